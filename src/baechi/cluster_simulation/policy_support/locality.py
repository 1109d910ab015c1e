"""Free GPUs that are near to each other, for the policies that wait for such."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Final

from baechi.cluster_simulation.fleet import Fleet
from baechi.cluster_simulation.jobs import JobRun
from baechi.cluster_simulation.policy_support.allocation import Allocation, ClusterView

LEVELS: Final = 3  # the fewest nodes of a switch, one switch, anywhere


def closest(fleet: Fleet, free: Sequence[int], count: int, level: int) -> tuple[int, ...] | None:
    """So many of the free GPUs, given in order, as near as a level wants; `None` if there are none.

    The tightest node or switch that is enough is taken, so that large holes stay.

    Args:
        fleet: The cluster.
        free: The GPUs to choose from.
        count: How many.
        level: 0 for one node, or where none is large enough whole nodes of a switch and a rest; 1
            for one switch; 2 for any.
    """
    gpus = fleet.gpus
    if level == 0:
        nodes = [list(row) for _, row in groupby(free, key=fleet.node_of.__getitem__)]
        whole, rest = divmod(count, fleet.gpus_per_node)
        if not whole or (whole == 1 and not rest):
            return _tightest(nodes, count)
        rows = groupby(nodes, key=lambda node: gpus[node[0]].switch)
        return next(_on_few_nodes((list(row) for _, row in rows), fleet, whole, rest), None)
    if level == 1:
        switches = groupby(free, key=lambda gpu: gpus[gpu].switch)
        return _tightest((list(row) for _, row in switches), count)
    return tuple(free[:count]) if len(free) >= count else None


def distance(fleet: Fleet, gpus: Sequence[int]) -> int:
    """The level of some GPUs: 0 on one node, 1 on one switch, 2 beyond."""
    if len({fleet.node_of[gpu] for gpu in gpus}) == 1:
        return 0
    return 1 if len({fleet.gpus[gpu].switch for gpu in gpus}) == 1 else LEVELS - 1


def in_order(
    view: ClusterView, runs: Iterable[JobRun], level: Callable[[JobRun], int]
) -> list[Allocation]:
    """Allocations with preemption: a job has the GPUs that no more urgent one has.

    A running job keeps its own if they are left, however far apart. Others take GPUs that nobody
    holds if some are near enough, and else those of less urgent jobs.

    Args:
        view: The cluster.
        runs: Most urgent first.
        level: How near a job's GPUs must be, as for `closest`.
    """
    left = set(range(view.total))
    idle = set(view.idle)
    hopeless: set[object] = set()  # what found no room; less and less is left
    answer = []
    for run in runs:
        needs = len(run.grant.gpus) if run.running else view.needs(run)
        if needs > len(left):
            continue
        gpus: tuple[int, ...] | None = None
        if run.running and left.issuperset(run.grant.gpus):
            gpus = run.grant.gpus
        else:
            near = level(run)
            asked = needs, near, run.job.graph is None and run.job.memory_bytes
            for pool in (idle, left) if asked not in hopeless else ():
                if gpus is None and needs <= len(pool):
                    roomy = [gpu for gpu in sorted(pool) if view.has_memory(run, gpu)]
                    gpus = closest(view.devices.fleet, roomy, needs, near)
            if gpus is None:
                hopeless.add(asked)
        if gpus is not None:
            left.difference_update(gpus)
            idle.difference_update(gpus)
            # What a graph fits on is for the scheme to say, which takes one node where it can.
            left_to_scheme = run.job.graph is not None and not run.running
            answer.append(Allocation(run, among=None if left_to_scheme else gpus))
    return answer


def _tightest(groups: Iterable[list[int]], count: int) -> tuple[int, ...] | None:
    enough = [group for group in groups if len(group) >= count]
    return tuple(min(enough, key=len)[:count]) if enough else None


def _on_few_nodes(
    switches: Iterable[list[list[int]]], fleet: Fleet, whole: int, rest: int
) -> Iterator[tuple[int, ...]]:
    """Whole nodes of one switch, and what is missing on another one of it."""
    for nodes in switches:
        full = [node for node in nodes if len(node) == fleet.gpus_per_node][:whole]
        last = _tightest((node for node in nodes if node not in full), rest) if rest else ()
        if len(full) == whole and last is not None:
            yield tuple(sorted([*(gpu for node in full for gpu in node), *last]))
