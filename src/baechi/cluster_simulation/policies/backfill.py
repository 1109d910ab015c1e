"""In order of arrival, with gaps filled: Slurm's default, EASY backfill.

The rule (Lifka, "The ANL/IBM SP Scheduling System", JSSPP'95; Slurm's `sched/backfill`): jobs start
in order of arrival. The first that finds no room has a reservation, at the time at which enough
running jobs will have ended. A job behind it may start if that does not delay it: if it ends
before, or takes no more GPUs than the first will leave.

Where we leave it: users' time limits are the durations, which a simulator knows; Slurm reserves for
more jobs than the first (`bf_max_job_test`). Where a scheme places, the GPUs of the reservation are
counted and not named, so the first job may still wait for them to come together.
"""

from collections.abc import Iterator
from typing import final

from baechi.cluster_simulation.jobs import JobRun
from baechi.cluster_simulation.policy_support.policy import Offer, Policy


@final
class Backfill(Policy):
    """The first to arrive, and those behind it that do not delay it."""

    name = "backfill"

    def __init__(self) -> None:
        self._now = 0
        self._first: JobRun | None = None  # that found no room at this event
        self._reserved: tuple[int, int] | None = None  # its time, and the GPUs that it leaves then

    def order(self, runs: list[JobRun], now: int) -> list[JobRun]:
        """In order of arrival."""
        self._now = now
        return runs

    def walk(self, runs: list[JobRun]) -> Iterator[JobRun]:
        """Without those that would delay the first that did not start, which is noted."""
        self._first = self._reserved = None
        for run in runs:
            if self._reserved is not None:
                time, spare = self._reserved
                if run.job.gpus > spare and self._now + run.job.duration > time:
                    continue
            yield run
            if self._first is None and not run.running:
                self._first = run

    def accepts(self, offer: Offer) -> bool:
        """True if the first waiting job is not delayed."""
        if self._first is None:
            return True
        if self._reserved is None:
            self._reserved = self._reservation(self._first, offer)
        time, spare = self._reserved
        if offer.now + offer.run.remaining(offer.now) <= time:
            return True
        if offer.run.job.gpus > spare:
            return False
        self._reserved = time, spare - offer.run.job.gpus
        return True

    def _reservation(self, first: JobRun, offer: Offer) -> tuple[int, int]:
        free = offer.devices.free
        time = offer.now
        for run in sorted(offer.running, key=lambda run: (run.ends_at(), run.index)):
            if free >= first.job.gpus:
                break
            time = run.ends_at()
            free += len(run.grant.gpus) or run.job.gpus
        return time, free - first.job.gpus
