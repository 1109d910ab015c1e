"""Jobs of the least remaining GPU-time first, as the Tiresias simulator's `shortest-gpu`."""

from typing import final

from baechi.cluster_simulation.jobs import JobRun
from baechi.cluster_simulation.policy_support.policy import Policy


@final
class ShortestGpuTime(Policy):
    """The least remaining time times GPUs first, preempting."""

    name = "shortest-gpu"
    preemptive = True

    def order(self, runs: list[JobRun], now: int) -> list[JobRun]:
        """By remaining GPU-time; equals stay as they were."""
        return sorted(runs, key=lambda run: run.remaining(now) * run.job.gpus)
