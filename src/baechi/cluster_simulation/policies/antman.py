"""Guaranteed jobs first, and opportunistic ones on what they leave: AntMan.

The rule (Xiao et al., "AntMan: Dynamic Scaling on GPU Clusters for Deep Learning", OSDI'20, section
4): jobs with a guarantee start in order of arrival, on GPUs without others of their kind, and run
as fast as alone. Opportunistic jobs (here `Job.priority` below 0) start on free GPUs, or beside a
job with a guarantee, and use the time in which it leaves the GPU idle. A job with a guarantee that
finds no free GPUs takes those of opportunistic ones, which are then slowed down to what is left,
not stopped.

Where we leave it: AntMan moves memory of opportunistic jobs to the host when it is short; here the
two must fit. Two jobs share GPUs if they have equally many; where no opportunistic job is as wide,
those that are alone and came last lose their GPUs to one with a guarantee. Its local coordinator
controls kernels by what it measures; `Opportunistic` is what that achieves at best.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

from baechi.cluster_simulation.jobs import WORK, JobRun, Part, Sharing
from baechi.cluster_simulation.policy_support.allocation import (
    AllocatingPolicy,
    Allocation,
    ClusterView,
)

_PAIR: Final = 2


@final
@dataclass(frozen=True, slots=True)
class Opportunistic(Sharing):
    """A guaranteed job as if alone, and one opportunistic job in the time that it leaves."""

    most: int = _PAIR

    def admits(self, parts: Sequence[Part], part: Part) -> bool:
        """At most one of each class."""
        return not any(other.opportunistic == part.opportunistic for other in parts)

    def rate(self, parts: Sequence[Part], part: Part, share: int) -> int:
        """Its rate alone, or that in what the guaranteed job leaves."""
        left = share
        if part.opportunistic:
            left -= sum(min(share, p.compute) for p in parts if not p.opportunistic)
        return min(WORK, WORK * left // part.compute)


@final
class AntMan(AllocatingPolicy):
    """Guaranteed jobs in order of arrival, then opportunistic ones."""

    name = "antman"
    preemptive = True

    def allocate(self, view: ClusterView) -> Sequence[Allocation]:
        """The running jobs; guaranteed ones that find or take room; others on what is left."""
        answer = view.kept()
        alone = [group[0] for group in view.groups() if len(group) == 1]
        guests = [run for run in alone if run.job.priority < 0]
        hosts = [run for run in alone if run.job.priority >= 0]
        free = len(view.idle)
        for run in sorted(view.waiting, key=lambda run: run.job.priority < 0):
            guaranteed = run.job.priority >= 0
            needs = view.needs(run)
            partners = guests if guaranteed else hosts
            partner = _partner(view, run, needs, partners)
            if needs > free and partner is not None:
                answer.append(Allocation(run, beside=partner))
                partners.remove(partner)
                continue
            while guaranteed and free < needs <= free + sum(len(g.grant.gpus) for g in guests):
                last = max(guests, key=lambda guest: guest.index)
                guests.remove(last)
                answer = [row for row in answer if row.run is not last]
                free += len(last.grant.gpus)
            if needs <= free:
                answer.append(Allocation(run))
                free -= needs
        return answer


def _partner(
    view: ClusterView, run: JobRun, needs: int, partners: Sequence[JobRun]
) -> JobRun | None:
    """Who has as many GPUs, room for it, and keeps them least busy."""
    fitting = [
        partner
        for partner in partners
        if len(partner.grant.gpus) == needs and view.may_share((partner, run))
    ]
    return min(fitting, key=lambda other: (other.job.compute, other.index), default=None)
