"""Free GPUs that are near to each other, for the policies that wait for such."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Final

from baechi.cluster_simulation.fleet import Fleet

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
        nodes = [list(row) for _, row in groupby(free, key=lambda gpu: gpus[gpu].node)]
        whole, rest = divmod(count, fleet.gpus_per_node)
        if not whole or (whole == 1 and not rest):
            return _tightest(nodes, count)
        rows = groupby(nodes, key=lambda node: gpus[node[0]].switch)
        return next(_on_few_nodes((list(row) for _, row in rows), fleet, whole, rest), None)
    if level == 1:
        switches = groupby(free, key=lambda gpu: gpus[gpu].switch)
        return _tightest((list(row) for _, row in switches), count)
    return tuple(free[:count]) if len(free) >= count else None


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
