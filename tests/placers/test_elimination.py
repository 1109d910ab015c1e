"""Orders of elimination (`csrc/minimum_degree.cc`) against the fill that they make, set by set."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baechi import _core


def eliminate(n, edges, stage=None):
    """The order, and per unknown its parent and the rows below it; all of that is checked."""
    ends = np.array(sorted(edges), np.int32).reshape(-1, 2)
    stages = np.zeros(n, np.int32) if stage is None else np.array(stage, np.int32)
    sequence, parent, rows, work = _core.least_degree_first(
        ends[:, 0].copy(), ends[:, 1].copy(), stages
    )
    assert sorted(sequence) == list(range(n))
    turn = {unknown: at for at, unknown in enumerate(sequence)}
    filled = fill(n, edges, sequence)
    for unknown in range(n):
        below = set(rows[unknown])
        assert len(below) == len(rows[unknown])
        assert filled[unknown] <= below
        first = min(below, key=turn.__getitem__, default=-1)
        assert parent[unknown] == first
        # What is left of a column goes on in its parent's.
        assert not below or (turn[first] > turn[unknown] and below - {first} <= set(rows[first]))
    assert work == sum(len(row) ** 2 for row in rows) / 2
    return sequence, rows, filled


def fill(n, edges, sequence):
    """Per unknown, the rows that are not 0 below it where they are eliminated in that order."""
    near = [set() for _ in range(n)]
    for a, b in edges:
        near[a].add(b)
        near[b].add(a)
    below = [set() for _ in range(n)]
    for unknown in sequence:
        row = near[unknown]
        below[unknown] = row
        for other in row:
            near[other] |= row
            near[other] -= {other, unknown}
    return below


def hubs(n, many, seed):
    """A random tree and some unknowns, next to each other, that nearly all others are next to."""
    draw = random.Random(seed)
    tree = {(draw.randrange(many, i), i) for i in range(many + 1, n)}
    spokes = {(hub, i) for hub in range(many) for i in range(hub + 1, n) if draw.random() < 0.9}
    return tree | spokes | {(a, b) for b in range(many) for a in range(b)}


@pytest.mark.parametrize(
    ("n", "edges"),
    [
        (0, []),
        (1, []),
        (9, []),
        (2, [(0, 1)]),
        (40, [(a, b) for b in range(40) for a in range(b)]),
        (300, [(0, i) for i in range(1, 300)]),
        (300, [(i, 299) for i in range(299)]),
        (60, [(i, i + 1) for i in range(59)]),
        (90, [(i, i + 1) for i in range(89) if i % 9 != 8]),
    ],
    ids=["none", "one", "apart", "pair", "dense", "star", "in-star", "chain", "disconnected"],
)
def test_worked_patterns(n, edges):
    _, rows, filled = eliminate(n, edges)
    assert list(map(set, rows)) == filled
    # None of these fills in anything.
    assert sum(map(len, rows)) == len(edges)


@given(st.data(), st.integers(1, 40))
def test_any_pattern_in_stages(data, n):
    pairs = st.tuples(st.integers(0, n - 1), st.integers(0, n - 1))
    drawn = data.draw(st.sets(pairs, max_size=4 * n))
    stage = data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    sequence, rows, filled = eliminate(n, {(a, b) for a, b in drawn if a < b}, stage)
    assert [stage[unknown] for unknown in sequence] == sorted(stage)
    assert list(map(set, rows)) == filled


@pytest.mark.parametrize("many", [1, 2, 3, 7])
def test_hubs_go_last_and_those_before_them_have_them_below(many):
    n = 400
    sequence, rows, _ = eliminate(n, hubs(n, many, many))
    assert set(sequence[n - many :]) == set(range(many))
    assert [len(rows[hub]) for hub in sequence[n - many :]] == list(reversed(range(many)))


def test_a_grid_fills_less_than_in_its_own_order():
    side = 20
    right = {(i, i + 1) for i in range(side * side) if i % side < side - 1}
    edges = right | {(i, i + side) for i in range(side * (side - 1))}
    _, rows, _ = eliminate(side * side, edges)
    own = sum(map(len, fill(side * side, edges, range(side * side))))
    assert sum(map(len, rows)) < own / 2
