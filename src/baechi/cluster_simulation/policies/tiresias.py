"""Least attained service in discrete queues, and the Gittins index in them (Tiresias, NSDI'19).

A job starts in the first queue and goes to the next once the service that it has had passes the
queue's limit. Queues are served in order; within one, running jobs go before waiting ones, in the
order in which they came, or all by the Gittins index.

`compat` repeats what the published simulator does, which its results need: docs/cluster.md lists
it. The original writes a third limit, which it never reads; it is left out here.
"""

from collections.abc import Sequence
from typing import Final, final

from baechi.cluster_simulation.jobs import Events, Job, JobRun
from baechi.cluster_simulation.policy_support.gittins import GittinsIndex
from baechi.cluster_simulation.policy_support.policy import Policy
from baechi.cluster_simulation.policy_support.published_simulator import PublishedEvents
from baechi.errors import InputError

_LIMITS: Final = (3250, 7200)  # the service at which a job leaves each queue but the last


@final
class LeastAttained(Policy):
    """Discretized least attained service.

    Args:
        name: Its name in results.
        by_gpus: By GPU-time (two-dimensional) instead of time.
        promote: A job that has waited `promote` times what it ran since it was last in the first
            queue goes back to it; 0 for never.
        compat: As the published simulator.
        samples: What jobs needed in all: those of a queue are ordered by its Gittins index.
    """

    preemptive = True

    def __init__(
        self,
        name: str = "dlas",
        *,
        by_gpus: bool = False,
        promote: float = 0,
        compat: bool = False,
        samples: Sequence[int] | None = None,
    ) -> None:
        if promote < 0:
            raise InputError(f"promote is {promote}; it must not be negative.")
        self.name = name
        self.counts = compat
        self._by_gpus = by_gpus
        self._promote = promote
        self._compat = compat
        self._index: GittinsIndex | None = None
        # The original sorts only where the policy has the plain name.
        if samples is not None and not (compat and promote):
            self._index = GittinsIndex(samples, rounded=compat)
        self._queues: list[list[JobRun]] = [[] for _ in range(len(_LIMITS) + 1)]
        self._level: dict[int, int] = {}  # by a job's index
        self._ran_before: dict[int, int] = {}  # attained when it last came into the first queue
        self._waited_before: dict[int, int] = {}  # waited when it first ran after that

    def events(self, admitted: Sequence[Job], refused: Sequence[Job]) -> Events:
        """In the original, jobs that are refused arrive as well."""
        if not self._compat:
            return super().events(admitted, refused)
        return PublishedEvents(job.submit_time for job in (*admitted, *refused))

    def order(self, runs: list[JobRun], now: int) -> list[JobRun]:
        """Queue after queue."""
        for queue in self._queues:
            alive = [run for run in queue if not run.done]
            queue[:] = [run for run in alive if run.running]
            queue += [run for run in alive if not run.running]
        by_arrival = sorted(runs, key=lambda run: run.index)
        for run in by_arrival:
            if run.index not in self._level:
                self._level[run.index] = self._ran_before[run.index] = 0
                self._queues[0].append(run)
        for run in by_arrival:
            self._move(run, now)
        index = self._index
        if index is not None:
            for queue in self._queues:
                queue.sort(key=lambda run: (-index(self._service(run, now)), run.job.submit_time))
        return [run for queue in self._queues for run in queue]

    def wake(self, runs: Sequence[JobRun], now: int) -> int | None:
        """The time at which the first job leaves its queue."""
        times = []
        for run in runs:
            level = self._level[run.index]
            ran = self._ran(run, now)
            if run.running and level < len(_LIMITS):
                times.append(now + self._until_demotion(run, ran, _LIMITS[level]))
            elif not run.running and self._promote and level and ran:
                left = self._until_promotion(run, ran, now)
                if left > 0:
                    times.append(now + left)
        return min(times, default=None)

    def _until_demotion(self, run: JobRun, ran: int, limit: int) -> int:
        if not self._by_gpus:
            return limit - ran
        if self._compat:  # seconds are subtracted from GPU-seconds; Python 2 divides downwards
            return (limit - ran) // run.job.gpus
        return -(-limit // run.job.gpus) - ran

    def _move(self, run: JobRun, now: int) -> None:
        """To the next queue, or back to the first."""
        level = self._level[run.index]
        ran = self._ran(run, now)
        if not ran:
            self._waited_before[run.index] = run.waited(now)
        if run.running:
            if level < len(_LIMITS) and self._service(run, now) >= _LIMITS[level]:
                self._change(run, level + 1)
        elif self._promote and level and ran and self._until_promotion(run, ran, now) <= 0:
            self._change(run, 0)
            self._ran_before[run.index] = run.attained(now)
            self._waited_before[run.index] = run.waited(now)
            run.promote += 1

    def _change(self, run: JobRun, level: int) -> None:
        self._queues[self._level[run.index]].remove(run)
        self._queues[level].append(run)
        self._level[run.index] = level

    def _ran(self, run: JobRun, now: int) -> int:
        """Ticks on GPUs since it was last put into the first queue."""
        return run.attained(now) - self._ran_before[run.index]

    def _until_promotion(self, run: JobRun, ran: int, now: int) -> int:
        """Ticks that it has still to wait, since it first ran after that."""
        pending = run.waited(now) - self._waited_before[run.index]
        return int(ran * self._promote) - pending

    def _service(self, run: JobRun, now: int) -> int:
        return self._ran(run, now) * (run.job.gpus if self._by_gpus else 1)
