"""Layout of a graph: positions of its ops in the figure.

x is the column: the longest path to the op, counted in forward ops, so that a forward step runs
from left to right; a backward op stands in the column of its forward op, so that the backward runs
back below it. y is the row: each device has a band, and in it one row per branch that is open at
the same column, forward rows above backward rows. An op takes the row of its first producer where
that is free, so that branches are straight.
"""

from dataclasses import dataclass
from typing import Final, final

from baechi.records.graph import OpGraph

_GAP: Final = 2  # rows between two bands


@final
@dataclass(frozen=True, slots=True)
class Layout:
    """Positions of ops.

    Attributes:
        columns: x of every op.
        rows: y of every op, growing downwards.
        bands: First and last row of every device that has ops; `None` for one without.
    """

    columns: tuple[int, ...]
    rows: tuple[int, ...]
    bands: tuple[tuple[int, int] | None, ...]


def lay_out(graph: OpGraph, devices: tuple[int, ...], n_devices: int) -> Layout:
    """The positions of all ops; O((ops + tensors) log) time, no two ops at one place."""
    columns = _columns(graph)
    is_backward = [op.in_backward for op in graph.ops]
    lanes, heights = _lanes(graph, columns, [*zip(devices, is_backward, strict=True)])
    top = 0
    start: dict[tuple[int, bool], int] = {}
    bands: list[tuple[int, int] | None] = []
    for device in range(n_devices):
        first = top
        for backward in (False, True):
            start[device, backward] = top
            top += heights.get((device, backward), 0)
        bands.append((first, top - 1) if top > first else None)
        top += _GAP if top > first else 0
    rows = (start[devices[op], is_backward[op]] + lanes[op] for op in range(len(graph.ops)))
    return Layout(tuple(columns), tuple(rows), tuple(bands))


def _columns(graph: OpGraph) -> list[int]:
    twin = [op.forward[0] if op.phase == "backward" else None for op in graph.ops]
    columns = [0] * len(graph.ops)
    for op in range(len(graph.ops)):
        forward = twin[op]
        if forward is not None:
            columns[op] = columns[forward]
            continue
        producers = (graph.tensors[tensor].producer for tensor in graph.op_inputs[op])
        columns[op] = max((columns[producer] + 1 for producer in producers), default=0)
    for op in reversed(graph.inputs):  # a constant is placed beside its user, not at the far left
        uses = [c for tensor in graph.op_outputs[op] for c in graph.tensors[tensor].consumers]
        if twin[op] is None and uses:
            columns[op] = max(0, min(columns[use] for use in uses) - 1)
    for op in graph.inputs:  # an isolated op, as the counter of a batch norm, is beside a neighbor
        uses = [c for tensor in graph.op_outputs[op] for c in graph.tensors[tensor].consumers]
        if twin[op] is None and not uses and op:
            columns[op] = columns[op - 1]
    return columns


def _lanes(
    graph: OpGraph, columns: list[int], homes: list[tuple[int, bool]]
) -> tuple[list[int], dict[tuple[int, bool], int]]:
    """The row of each op within its device, and the number of rows of each device."""
    lanes = [0] * len(graph.ops)
    heights: dict[tuple[int, bool], int] = {}
    taken: dict[tuple[int, bool], dict[int, set[int]]] = {}
    for op, home in enumerate(homes):
        used = taken.setdefault(home, {}).setdefault(columns[op], set())
        producers = (graph.tensors[tensor].producer for tensor in graph.op_inputs[op])
        wished = [lanes[producer] for producer in producers if homes[producer] == home]
        free = (lane for lane in wished if lane not in used)
        lane = next(free, None)
        if lane is None:
            lane = next(lane for lane in range(len(used) + 1) if lane not in used)
        lanes[op] = lane
        used.add(lane)
        heights[home] = max(heights.get(home, 0), lane + 1)
    return lanes, heights


def sections(graph: OpGraph, columns: tuple[int, ...], most: int = 24) -> list[tuple[int, str]]:
    """Labels of the parts of a model along x: (column, name), far enough apart to be readable.

    Op names are paths (`h.0.attn/linear`); the deepest level with at most `most` parts is taken.
    If two parts begin close to each other, the longer one is named.
    """
    paths: dict[int, list[str]] = {}
    for column, op in sorted(zip(columns, graph.ops, strict=True), key=lambda pair: pair[0]):
        if "/" in op.name and op.phase != "backward":
            paths.setdefault(column, op.name.partition("/")[0].split("."))
    best: list[tuple[int, str]] = []
    for depth in range(1, max((len(path) for path in paths.values()), default=0) + 1):
        found: list[tuple[int, str]] = []
        for column, path in paths.items():
            name = ".".join(path[:depth])
            if not found or found[-1][1] != name:
                found.append((column, name))
        if len(found) > most:
            break
        best = found
    end = max(columns, default=0) + 1
    ends = [*(column for column, _ in best[1:]), end][: len(best)]
    lengths = [stop - start for (start, _), stop in zip(best, ends, strict=True)]
    named: list[tuple[int, str]] = []
    for _, part in sorted(zip(lengths, best, strict=True), key=lambda pair: (-pair[0], pair[1])):
        if all(abs(part[0] - column) * 1.5 * most >= end for column, _ in named):
            named.append(part)
    return sorted(named)
