"""The shortest first, beside a running job where that ends both sooner: SJF-BSBF.

The rule (Luo et al., "Scheduling Deep Learning Jobs in Multi-Tenant GPU Clusters via Wise Resource
Sharing", 2024, arXiv 2407.13088): waiting jobs are taken by remaining time, without preemption. A
job that finds free GPUs has them. If not, it may share those of a running job, at most two to a
GPU, if the test of the pair (its Theorem 1) says that the mean completion time of the two is less
than one after the other; of several partners, the one with the best benefit.

The test here: with rates x and y of the two together, and times a (new) and b (running) that are
left of each alone, one after the other they end at b and a + b in the sum. Together the first of
them ends at m = min(a / x, b / y), and the other has what is left of it to do alone.

Where we leave it: it chooses the batch size of the new job so that both fit into memory; a job here
is as it is. Partners have as many GPUs as the new job. Rates are those of the simulation's sharing.
"""

from collections.abc import Sequence
from typing import final

from baechi.cluster_simulation.policy_support.allocation import (
    AllocatingPolicy,
    Allocation,
    ClusterView,
)


def benefit(new: float, running: float, rates: Sequence[float]) -> float:
    """How much less the sum of two completion times is if they share than in sequence.

    Args:
        new: The time that the new job takes alone.
        running: The time that is left to the running one alone.
        rates: The part of its rate that each keeps beside the other.
    """
    if not all(rates):
        return float("-inf")
    first = min(new / rates[0], running / rates[1])
    left = new - first * rates[0] + running - first * rates[1]  # one of them is done
    return (running + running + new) - (first + first + left)


@final
class SjfBsbf(AllocatingPolicy):
    """The shortest on free GPUs, or with the partner that gains most."""

    name = "sjf-bsbf"

    def allocate(self, view: ClusterView) -> Sequence[Allocation]:
        """The running jobs, and those that start, alone or beside one."""
        answer = view.kept()
        alone = [group[0] for group in view.groups() if len(group) == 1]
        free = len(view.idle)
        for run in sorted(view.waiting, key=lambda run: (run.remaining(view.now), run.index)):
            needs = view.needs(run)
            if needs <= free:
                free -= needs
                answer.append(Allocation(run))
                continue
            gains = [
                (-benefit(view.time_left(run), view.time_left(other), slowed), other.index, other)
                for other in alone
                if len(other.grant.gpus) == needs and view.may_share((other, run))
                for slowed in [view.slowed_together((run, other))]
            ]
            best = min(gains, default=None)
            if best is not None and best[0] < 0:
                alone.remove(best[2])
                answer.append(Allocation(run, beside=best[2]))
        return answer
