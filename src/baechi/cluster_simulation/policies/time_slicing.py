"""Time slicing and leases: policies that reorder jobs periodically.

Gandiva (OSDI'18) suspends and resumes jobs so that all make progress: every quantum, those that
have run longest step back. Its packing puts two jobs on one GPU while their compute fits; that is
`fjf`'s order with a sharing model and a scheme (`policies.DEFAULTS`).

Themis (NSDI'20) leases GPUs to the jobs that are treated worst, by finish-time fairness
`rho = (time since arrival + remaining time) / time on a fair share alone`. The fair share is an
equal part of the cluster among the jobs that are there; a job wider than it runs slower in
proportion. We leave out the auction, which makes agents tell the truth about what they gain; a
simulator knows.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import final

from baechi.cluster_simulation.jobs import JobRun
from baechi.cluster_simulation.policies.policy import Policy
from baechi.errors import InputError


class _Periodic(Policy):
    """Reorders jobs at the end of every quantum."""

    preemptive = True

    def __init__(self, quantum: int) -> None:
        if quantum < 1:
            raise InputError(f"a quantum of {quantum} ticks; give at least 1.")
        self._quantum = quantum
        self._turn = -1

    def wake(self, runs: Sequence[JobRun], now: int) -> int | None:
        """The next multiple of the quantum, while a job waits and another runs."""
        mixed = any(run.running for run in runs) and any(not run.running for run in runs)
        return (now // self._quantum + 1) * self._quantum if mixed else None

    def _is_new_turn(self, now: int) -> bool:
        turn = now // self._quantum
        new = turn > self._turn
        self._turn = max(self._turn, turn)
        return new


@final
class TimeSlicing(_Periodic):
    """Round robin: at a new quantum, jobs that have held GPUs for least time go first."""

    name = "gandiva"

    def __init__(self, quantum: int = 60) -> None:
        super().__init__(quantum)

    def order(self, runs: list[JobRun], now: int) -> list[JobRun]:
        """By time on GPUs at a new quantum; in between, running jobs keep what they have."""
        if self._is_new_turn(now):
            return sorted(runs, key=lambda run: (run.attained(now), run.index))
        return sorted(runs, key=lambda run: not run.running)


@final
class FinishTimeFairness(_Periodic):
    """The worst treated first, at the end of every lease."""

    name = "themis"

    def __init__(self, lease: int = 600) -> None:
        super().__init__(lease)
        self._gpus = 1

    def begin(self, gpus: int) -> None:
        """Keeps the size of the cluster."""
        self._gpus = gpus

    def order(self, runs: list[JobRun], now: int) -> list[JobRun]:
        """By falling rho at a new lease; in between, leases hold."""
        if not self._is_new_turn(now):
            return sorted(runs, key=lambda run: not run.running)
        rho = {run.index: self.rho(run, len(runs), now) for run in runs}
        return sorted(runs, key=lambda run: (-rho[run.index], run.index))

    def rho(self, run: JobRun, jobs: int, now: int) -> Fraction:
        """Finish-time fairness if it ran from now on: 1 is fair, above is worse."""
        job = run.job
        alone = max(Fraction(1), Fraction(job.gpus * jobs, self._gpus)) * max(1, job.duration)
        return (now - job.submit_time + run.remaining(now)) / alone
