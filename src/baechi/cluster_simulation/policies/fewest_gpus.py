"""The fewest GPUs or the least GPU-time first: the Tiresias simulator's `sjf`, `shortest-gpu`."""

from typing import final

from baechi.cluster_simulation.jobs import JobRun
from baechi.cluster_simulation.policy_support.policy import Policy


@final
class FewestGpusFirst(Policy):
    """Jobs of fewer GPUs first, preempting those of more."""

    name = "sjf"
    preemptive = True

    def order(self, runs: list[JobRun], now: int) -> list[JobRun]:
        """By GPUs; equals stay as they were."""
        del now
        return sorted(runs, key=lambda run: run.job.gpus)


@final
class ShortestGpuTime(Policy):
    """The least remaining time times GPUs first, preempting."""

    name = "shortest-gpu"
    preemptive = True

    def order(self, runs: list[JobRun], now: int) -> list[JobRun]:
        """By remaining GPU-time; equals stay as they were."""
        return sorted(runs, key=lambda run: run.remaining(now) * run.job.gpus)
