"""Equal shares of the cluster for all owners of jobs: Determined's fair share.

The rule (Determined's `fair_share` scheduler; for several resources Ghodsi et al., "Dominant
Resource Fairness", NSDI'11, Algorithm 1): GPUs are filled in progressively. The owner that has the
least so far gets its next job, until nothing fits; so owners that want less than an equal part get
what they want, and what they leave is shared equally by the others. Jobs beyond an owner's share
lose their GPUs.

Where we leave them: gangs are whole, so an owner may hold more than its share by less than a job;
all weights are 1; and what an owner has used before does not count, as it does in Slurm's
`priority/multifactor`, where it decays.
"""

from collections import deque
from heapq import heappop, heappush
from typing import final

from baechi.cluster_simulation.jobs import JobRun
from baechi.cluster_simulation.policy_support.policy import Policy


@final
class FairShare(Policy):
    """The owner with the fewest GPUs first; of one owner, running jobs and then the first."""

    name = "fair-share"
    preemptive = True

    def order(self, runs: list[JobRun], now: int) -> list[JobRun]:
        """The jobs that get GPUs by progressive filling, then those for which none are left."""
        del now
        if sum(run.job.gpus for run in runs) <= self.gpus:
            return runs  # all get theirs
        queues: dict[str, deque[JobRun]] = {}
        for run in sorted(runs, key=lambda run: (not run.running, run.index)):
            queues.setdefault(run.job.owner, deque()).append(run)
        # GPUs so far, the arrival of its next job, the owner.
        turns: list[tuple[int, int, str]] = []
        for owner, queue in queues.items():
            heappush(turns, (0, queue[0].index, owner))
        free = self.gpus
        given: list[JobRun] = []
        left: list[JobRun] = []
        while turns and free:
            held, _, owner = heappop(turns)
            run = queues[owner].popleft()
            if run.job.gpus <= free:
                free -= run.job.gpus
                held += run.job.gpus
                given.append(run)
            else:
                left.append(run)
            if queues[owner]:
                heappush(turns, (held, queues[owner][0].index, owner))
        return given + left + [run for queue in queues.values() for run in queue]
