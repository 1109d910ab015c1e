"""Cells: GPUs of a node in powers of two, halves of halves, and their buddies.

The allocation of HiveD (Zhao et al., OSDI'20, section 4.1), as of memory by buddies.
"""

from collections.abc import Callable, Collection, Iterable, Sequence


def cell_of(gpus: int) -> int:
    """The size of the smallest cell for so many GPUs."""
    return 1 << (gpus - 1).bit_length()


def buddy(
    nodes: Iterable[Sequence[int]],
    taken: Collection[int],
    avoided: Collection[int],
    needs: int,
    fits: Callable[[tuple[int, ...]], bool] = lambda _: True,
) -> tuple[int, ...] | None:
    """So many GPUs of a free cell in one of some nodes; `None` if there is none.

    Args:
        nodes: The GPUs of each.
        taken: GPUs that are not free.
        avoided: GPUs that others would lose.
        needs: How many GPUs; the cell is the smallest that has them.
        fits: Whether some GPUs will do.

    Of all such cells it is one on which the fewest GPUs are avoided, and of these one whose buddy,
    and whose buddy's buddy, is the least free: large cells stay whole.
    """
    found = []
    for node in nodes:
        size, free = min(cell_of(needs), len(node)), set(node).difference(taken)
        for begin in range(0, len(node) - size + 1, size):
            cell = tuple(node[begin : begin + size])
            if needs > size or not free.issuperset(cell) or not fits(cell[:needs]):
                continue
            room, wider = size, 2 * size
            while wider <= len(node):
                start = begin // wider * wider
                if not free.issuperset(node[start : start + wider]):
                    break
                room, wider = wider, 2 * wider
            found.append((sum(gpu in avoided for gpu in cell), room, cell[:needs]))
    return min(found)[-1] if found else None


def whole(
    nodes: Sequence[Sequence[int]], numbers: Iterable[int], needs: int
) -> tuple[int, ...] | None:
    """So many GPUs of whole nodes, in the order in which these are given."""
    gpus: list[int] = []
    for number in numbers:
        if len(gpus) < needs:
            gpus += nodes[number]
    return tuple(sorted(gpus[:needs])) if len(gpus) >= needs else None
