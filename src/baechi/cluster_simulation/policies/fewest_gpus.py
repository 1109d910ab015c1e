"""Jobs of the fewest GPUs first, as the Tiresias simulator's `sjf`."""

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
