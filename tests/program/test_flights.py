"""Slots of micro-batches: none is two batches' at once, and what takes one waits for the last."""

from collections import defaultdict
from itertools import pairwise

import pytest
from benchmarks.pipelines.graphs import layers

from baechi import Placement
from baechi.program.compilation import compile_program
from baechi.program.flights import flights
from baechi.records.instructions import Copy, Program, Run

N = 6
ONE_BY_ONE = [(piece, batch) for batch in range(N) for piece in range(5)]
ALL_FORWARD_FIRST = [(piece, batch) for piece in range(5) for batch in range(N)]
# Two on the first stage, one on the second.
FEW = sorted(
    ONE_BY_ONE, key=lambda turn: (2 * turn[1] + (turn[0], 3, 3, 4, 5)[turn[0]], turn[0], turn[1])
)


def program_of(turns: list[tuple[int, int]]) -> Program:
    """Two stages, each on its device, with the loss between forward and backward."""
    graph = layers(4)
    layer = [row.forward[0] if row.forward else min(op, 3) for op, row in enumerate(graph.ops)]
    placement = Placement(graph.digest, tuple(at // 2 for at in layer), tuple(range(len(layer))))
    return compile_program(
        *(graph, placement), copy_lanes=True, batches=N, joined=False, order=lambda _: turns
    )


@pytest.mark.parametrize(
    ("turns", "n"), [(ONE_BY_ONE, 1), (FEW, 3), (ALL_FORWARD_FIRST, N)], ids=["one", "few", "all"]
)
def test_a_slot_is_taken_when_its_batch_is_over(turns: list[tuple[int, int]], n: int) -> None:
    program = program_of(turns)
    found = flights(program)
    assert (found.n, len(found.slots)) == (n, N)
    (phase,) = program.phases
    rows = [enumerate(row) for row in phase.lanes]
    ticks: dict[int, list[int]] = defaultdict(list)
    on: dict[tuple[int, int], list[int]] = defaultdict(list)
    for tick, lane in enumerate(phase.launch):
        position, row = next(rows[lane])
        if isinstance(row, Run | Copy):
            ticks[row.batch].append(tick)
            on[row.batch, lane].append(position)
    for slot in range(n):
        batches = [batch for batch in range(N) if found.slots[batch] == slot]
        for one, two in pairwise(batches):
            assert ticks[one][-1] < ticks[two][0]
            for lane in range(len(phase.lanes)):
                assert found.after[lane, on[two, lane][0]] == one
                assert found.last[lane, on[one, lane][-1]] == one
    assert len(found.after) == len(found.last) == (N - n) * len(phase.lanes)
