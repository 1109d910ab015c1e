"""Every owner's cluster as if it had one alone, and opportunistic jobs on the rest: HiveD.

The rule (Zhao et al., "HiveD: Sharing a GPU Cluster for Deep Learning with Guarantees", OSDI'20,
sections 3 and 4): GPUs form cells of powers of two, halves of halves of a node. A tenant has a
number of whole cells, here nodes, and not of GPUs, as a quota would say. A job takes the smallest
cell that holds it, split off a larger one as a buddy, in the nodes that are bound to its tenant; a
node is bound when none of those has room, and free again when its last job ends. So a job with a
guarantee starts whenever it would on a private cluster, and who shares with whom fragments nobody
else. Jobs for which the tenant's nodes have no room run opportunistically, on any cell without a
guaranteed job, and are preempted where such a one needs their GPUs.

Where we leave it: all owners have equally many nodes; what does not divide is for opportunistic
jobs. Jobs of more than a node take whole nodes, under any switch. Jobs of negative priority have no
guarantee. A job that runs opportunistically gets the guarantee, in place, when its owner's nodes
have room and it is on one of them, and else when it stops.
"""

from collections.abc import Collection, Sequence
from typing import final

from baechi.cluster_simulation.jobs import Events, Job, JobRun
from baechi.cluster_simulation.policy_support.allocation import (
    AllocatingPolicy,
    Allocation,
    ClusterView,
)
from baechi.cluster_simulation.policy_support.cells import buddy, whole


@final
class HiveD(AllocatingPolicy):
    """Guaranteed jobs on the cells of their owners, the others on what is left."""

    name = "hived"
    preemptive = True

    def __init__(self) -> None:
        self._owners = 1
        self._guaranteed: dict[int, tuple[int, ...]] = {}  # the cells of running jobs, by index
        self._taken: set[int] = set()  # the GPUs of these
        self._bound: dict[int, str] = {}  # the owners of their nodes

    def events(self, admitted: Sequence[Job], refused: Sequence[Job]) -> Events:
        """Also counts the owners."""
        self._owners = max(1, len({job.owner for job in admitted if job.priority >= 0}))
        return super().events(admitted, refused)

    def allocate(self, view: ClusterView) -> Sequence[Allocation]:
        """Guaranteed jobs first, then the others, both in order of arrival.

        Less and less is left on the way, so of waiting jobs that are alike one is refused for all.
        """
        before, here = self._guaranteed, {run.index: run for run in view.runs}
        self._guaranteed, self._taken, self._bound = {}, set(), {}
        for index, cell in before.items():
            if index in here and here[index].running:
                self._guarantee(view, here[index], cell)
        held = {gpu for run in view.runs for gpu in run.grant.gpus if run.running}
        refused: set[object] = set()
        for run in view.runs:
            if run.job.priority < 0 or run.index in self._guaranteed:
                continue
            asked = run.job.owner, view.alike(run), run.running and run.grant.gpus
            own = self._cell(view, run, held) if asked not in refused else None
            if own is not None:
                self._guarantee(view, run, own)
            else:
                refused.add(asked)
        answer = [
            Allocation(here[index], among=cell) for index, cell in sorted(self._guaranteed.items())
        ]
        others = (run for run in view.runs if run.index not in self._guaranteed)
        away = self._taken | held
        for run in sorted(others, key=lambda run: (not run.running, run.index)):
            if run.running and self._taken.isdisjoint(run.grant.gpus):
                answer.append(Allocation(run, among=run.grant.gpus))
            elif view.alike(run) not in refused:
                left = _cell_anywhere(view, away, run)
                if left is not None:
                    away.update(left)
                    answer.append(Allocation(run, among=left))
                else:
                    refused.add(view.alike(run))
        return view.or_first(answer)

    def _guarantee(self, view: ClusterView, run: JobRun, cell: tuple[int, ...]) -> None:
        self._guaranteed[run.index] = cell
        self._taken.update(cell)
        self._bound.update({view.devices.fleet.node_of[gpu]: run.job.owner for gpu in cell})

    def _cell(
        self, view: ClusterView, run: JobRun, held: Collection[int]
    ) -> tuple[int, ...] | None:
        """A cell of its owner's nodes, bound if need be; if it runs, only what it already has."""
        fleet, taken = view.devices.fleet, self._taken
        own = [number for number, owner in self._bound.items() if owner == run.job.owner]
        more = fleet.nodes // self._owners - len(own)
        unbound = [number for number in range(fleet.nodes) if number not in self._bound]
        if run.running:
            new = {fleet.node_of[gpu] for gpu in run.grant.gpus}.difference(own)
            room = new <= set(unbound) and len(new) <= more and taken.isdisjoint(run.grant.gpus)
            return run.grant.gpus if room else None
        needs, nodes, avoided = view.needs(run), fleet.gpus_of, set(held) - taken

        def fits(cell: tuple[int, ...]) -> bool:
            return view.fits(run, cell)

        if needs > fleet.gpus_per_node:
            unbound.sort(key=lambda number: (len(avoided.intersection(nodes[number])), number))
            found = whole(nodes, unbound[: max(0, more)], needs)
            return found if found is not None and fits(found) else None
        found = buddy([nodes[number] for number in own], taken, avoided, needs, fits)
        if found is None and more > 0:
            found = buddy([nodes[number] for number in unbound], taken, avoided, needs, fits)
        return found


def _cell_anywhere(view: ClusterView, away: Collection[int], run: JobRun) -> tuple[int, ...] | None:
    """A cell for an opportunistic job: it takes nobody's GPUs."""
    fleet, needs = view.devices.fleet, view.needs(run)
    if needs <= fleet.gpus_per_node:
        return buddy(fleet.gpus_of, away, (), needs, lambda cell: view.fits(run, cell))
    idle = [number for number, gpus in enumerate(fleet.gpus_of) if not set(away).intersection(gpus)]
    found = whole(fleet.gpus_of, idle, needs)
    return found if found is not None and view.fits(run, found) else None
