"""Segments of a placed graph: what a device runs without interruption, in the order of a step.

A training step runs the model's order, whatever the placement's is (docs/memory.md); a segment's
operators are parted by tapes (docs/runtime.md, "How tapes are found").
"""

from collections.abc import Iterator, Sequence, Set
from dataclasses import replace
from itertools import chain, count, groupby

from baechi.problem.cutting import Cutter, Piece, tapes_of
from baechi.records.graph import OpGraph
from baechi.records.placement import Placement


def instant_ops(graph: OpGraph) -> Set[int]:
    """The ops that take no time: in a segment they may follow an output that must leave."""
    return {op for op, row in enumerate(graph.ops) if row.time_ns == 0}


def segments_of(graph: OpGraph, placement: Placement) -> tuple[tuple[int, ...], ...]:
    """The ops of every segment of a placed graph: those of the forward, the loss, the others.

    A segment ends where an output must leave and begins where an input arrives (`cutting`).
    """
    n, instant = graph.n_forward, instant_ops(graph)
    phases = ([op for op in placement.order if op < n], [op for op in placement.order if op > n])
    forward, backward = (
        tuple(
            event.ops
            for event in Cutter(graph, placement.devices, ops, False, None, instant).cut()
            if isinstance(event, Piece)
        )
        for ops in phases
    )
    return as_run(graph, (*forward, *(((n,),) if graph.is_training else ()), *backward))


def as_run(graph: OpGraph, segments: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """The same segments, each in the order in which a step runs its ops.

    In a training step that is the model's, whatever the placement's is (docs/memory.md).
    """
    return tuple(tuple(chain(*tapes)) for tapes in by_tape(graph, segments))


def by_tape(
    graph: OpGraph, segments: Sequence[Sequence[int]]
) -> Iterator[Sequence[tuple[int, ...]]]:
    """The ops of every segment as a step runs them, parted by the tapes that have them."""
    if not graph.is_training:
        yield from ([tuple(row)] for row in segments)
        return
    n = graph.n_forward
    piece = {op: i for i, row in enumerate(segments) for op in row}
    backward = {op: piece[twin] for op, twin in enumerate(graph.twins) if twin >= 0}
    again = {op: at for at, unit in graph.units.items() for op in unit}
    rank: dict[int, int] = {}  # of the ops so far
    tape_of: dict[int, int] = {}  # of those of the forward

    def after_forward(op: int) -> int:
        return -rank[graph.ops[op].forward[0]]

    def tape(op: int) -> int:
        return tape_of.get(graph.ops[op].forward[0], -1)

    for row in segments:
        tapes = [tuple(row)]
        if max(row) < n:
            tapes = [ops for _, ops in tapes_of(graph, row, backward, again)]
            first = len(tape_of)
            tape_of.update((op, first + at) for at, ops in enumerate(tapes) for op in ops)
        elif min(row) > n and row[0] not in graph.units:  # what runs others again is apart
            tapes = [tuple(ops) for _, ops in groupby(sorted(row, key=after_forward), tape)]
        rank.update(zip(chain(*tapes), count(len(rank)), strict=False))
        yield tapes


def in_run_order(graph: OpGraph, placement: Placement) -> Placement:
    """A placement in the order in which a step runs it: in training segment after segment.

    What a device has from the beginning comes first.
    """
    trains = graph.is_training
    order = tuple(chain(*segments_of(graph, placement))) if trains else placement.order
    return replace(placement, order=tuple(sorted(order, key=lambda op: op not in graph.standing)))
