"""Themis' finish-time fairness."""

from fractions import Fraction
from typing import final

from baechi.cluster_simulation.jobs import JobRun
from baechi.cluster_simulation.policy_support.policy import Periodic


@final
class FinishTimeFairness(Periodic):
    """Themis (NSDI'20): leases of GPUs to the jobs that are treated worst.

    We leave out the auction, which makes agents tell the truth about what they gain; a simulator
    knows.
    """

    name = "themis"
    quantum_ticks = 600

    def _dealt(self, runs: list[JobRun], now: int) -> list[JobRun]:
        rho = {run.index: self.rho(run, len(runs), now) for run in runs}
        return sorted(runs, key=lambda run: (-rho[run.index], run.index))

    def rho(self, run: JobRun, jobs: int, now: int) -> Fraction:
        """Finish-time fairness if it ran from now on: 1 is fair, above is worse.

        `(time since arrival + remaining time) / time on a fair share alone`. The share is an equal
        part of the cluster among the jobs that are there; a wider job runs slower in proportion.
        """
        job = run.job
        alone = max(Fraction(1), Fraction(job.gpus * jobs, self.gpus)) * max(1, job.duration)
        return (now - job.submit_time + run.remaining(now)) / alone
