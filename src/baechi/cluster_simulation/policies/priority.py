"""Higher priority first, with preemption: what Kubernetes, Slurm's partitions and Determined do.

The rule (Kubernetes, "Pod Priority and Preemption"; Slurm, `PreemptType=preempt/partition_prio`;
Determined's `priority` scheduler): the queue is in order of priority, then of arrival, and a job
that finds no room takes it from jobs of lower priority. All three take as few victims as they can,
the least urgent first, which the simulator does wherever GPUs are placed.

Where we leave them: a gang is preempted and started whole, as with Determined; Kubernetes evicts
pod by pod and needs a plugin for gangs. Nobody has a grace period here; `--preempt-cost` is the
work that is lost.
"""

from typing import final

from baechi.cluster_simulation.jobs import JobRun
from baechi.cluster_simulation.policy_support.policy import Policy


@final
class Priority(Policy):
    """The highest priority first, then the first to arrive; the others may lose their GPUs."""

    name = "priority"
    preemptive = True

    def order(self, runs: list[JobRun], now: int) -> list[JobRun]:
        """By priority and arrival."""
        del now
        return sorted(runs, key=lambda run: (-run.job.priority, run.index))
