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
from baechi.cluster_simulation.policy_support.cells import buddy, nodes_of, whole


@final
class HiveD(AllocatingPolicy):
    """Guaranteed jobs on the cells of their owners, the others on what is left."""

    name = "hived"
    preemptive = True

    def __init__(self) -> None:
        self._owners = 1
        self._guaranteed: dict[int, tuple[int, ...]] = {}  # the cells of running jobs, by index

    def events(self, admitted: Sequence[Job], refused: Sequence[Job]) -> Events:
        """Also counts the owners."""
        self._owners = max(1, len({job.owner for job in admitted if job.priority >= 0}))
        return super().events(admitted, refused)

    def allocate(self, view: ClusterView) -> Sequence[Allocation]:
        """Guaranteed jobs first, then the others, both in order of arrival."""
        nodes = nodes_of(view.devices.fleet)
        here = {run.index: run for run in view.runs}
        self._guaranteed = {
            index: cell
            for index, cell in self._guaranteed.items()
            if index in here and here[index].running
        }
        held = {gpu for run in view.runs for gpu in run.grant.gpus if run.running}
        for run in view.runs:
            if run.job.priority >= 0 and run.index not in self._guaranteed:
                cell = self._cell(view, here, nodes, run, held)
                if cell is not None:
                    self._guaranteed[run.index] = cell
        taken = {gpu for cell in self._guaranteed.values() for gpu in cell}
        answer = [
            Allocation(here[index], among=cell) for index, cell in sorted(self._guaranteed.items())
        ]
        others = (run for run in view.runs if run.index not in self._guaranteed)
        for run in sorted(others, key=lambda run: (not run.running, run.index)):
            stays = run.running and taken.isdisjoint(run.grant.gpus)
            left = _cell_anywhere(view, nodes, taken | held, run) if not stays else run.grant.gpus
            if left is not None:
                taken.update(left)
                answer.append(Allocation(run, among=left))
        return view.or_first(answer)

    def _cell(
        self,
        view: ClusterView,
        here: dict[int, JobRun],
        nodes: Sequence[Sequence[int]],
        run: JobRun,
        held: Collection[int],
    ) -> tuple[int, ...] | None:
        """A cell of its owner's nodes, bound if need be; if it runs, only what it already has."""
        node_of = view.devices.fleet.node_of
        bound: dict[int, str] = {}
        taken: set[int] = set()
        for index, cell in self._guaranteed.items():
            taken.update(cell)
            bound.update({node_of[gpu]: here[index].job.owner for gpu in cell})
        own = [number for number, owner in bound.items() if owner == run.job.owner]
        more = len(nodes) // self._owners - len(own)
        unbound = [number for number in range(len(nodes)) if number not in bound]
        needs = view.needs(run)
        if run.running:
            where = {node_of[gpu] for gpu in run.grant.gpus}
            new = where - set(own)
            room = new <= set(unbound) and len(new) <= more and taken.isdisjoint(run.grant.gpus)
            return run.grant.gpus if room else None
        avoided = set(held) - taken
        if needs > max(map(len, nodes)):
            unbound.sort(key=lambda number: (sum(g in avoided for g in nodes[number]), number))
            found = whole(nodes, unbound[: max(0, more)], needs)
            return found if found is not None and view.fits(run, found) else None

        def fits(cell: tuple[int, ...]) -> bool:
            return view.fits(run, cell)

        found = buddy([nodes[number] for number in own], taken, avoided, needs, fits)
        if found is None and more > 0:
            found = buddy([nodes[number] for number in unbound], taken, avoided, needs, fits)
        return found


def _cell_anywhere(
    view: ClusterView, nodes: Sequence[Sequence[int]], away: Collection[int], run: JobRun
) -> tuple[int, ...] | None:
    """A cell for an opportunistic job: it takes nobody's GPUs."""
    needs = view.needs(run)
    if needs <= max(map(len, nodes)):
        return buddy(nodes, away, (), needs, lambda cell: view.fits(run, cell))
    idle = [number for number, node in enumerate(nodes) if not set(away).intersection(node)]
    found = whole(nodes, idle, needs)
    return found if found is not None and view.fits(run, found) else None
