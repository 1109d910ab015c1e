"""Claim: where memory is nearly full no placement is missed that is known to exist.

Two kinds of problems: those of `tests/support/hidden.py`, hostile in everything, whose hidden
placement fills 80 to 95 % of every memory that it uses; and packings, devices cut into the
persistent bytes of groups. And what it costs to say that nothing fits: CPU time of `solve` until
its error, with the search for the memory that is missing. That this memory suffices is checked.
"""

import random
import time
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hidden import hidden_among_constraints

from baechi import Cluster, Device, InfeasibleError, Link, Op, OpGraph, Tensor, solve
from baechi.placers.searching import find
from baechi.problem.problem_arrays import Problem

LINK = Link(10_000, 10**9)
MEMORY = 10**9
# Ops that share a device, and the part of the memory that a large group fills.
TOGETHER = 6
LARGE = 0.36


def packed(seed: int, n: int, devices: int, fill: float, grouped: bool, kind: str) -> Problem:
    """Devices filled to a part with pieces, `"tailed"` or `"alike"`; or on `"unequal"` devices."""
    draw = random.Random(seed)
    memory = [MEMORY] * devices
    if kind == "unequal":
        memory = [MEMORY * draw.choice([1, 1, 2, 3]) for _ in range(devices)]
    pieces: list[int] = []
    for room in memory:
        count = max(1, n // (TOGETHER if grouped else 1) * room // sum(memory))
        weights = [
            draw.uniform(1, 3) if kind == "alike" else draw.paretovariate(1.2) for _ in range(count)
        ]
        pieces += [int(room * fill * weight / sum(weights)) for weight in weights]
    parts = TOGETHER if grouped else 1
    rows = [(piece, size // parts) for piece, size in enumerate(pieces) for _ in range(parts)]
    draw.shuffle(rows)
    ops = tuple(
        Op(f"op{i}", draw.randrange(10**4, 10**6), size, 0, f"group{piece}" if grouped else None)
        for i, (piece, size) in enumerate(rows)
    )
    tensors = tuple(
        Tensor(draw.randrange(max(0, i - 30), i), (i,), draw.randrange(1000))
        for i in range(1, len(ops))
    )
    cluster = Cluster.connected([Device(f"d{i}", m) for i, m in enumerate(memory)], LINK)
    return Problem(OpGraph(ops, tensors), cluster)


def crowded(n: int, devices: int) -> tuple[OpGraph, Cluster]:
    """A training step whose persistent bytes and activations fill 107 % of all memory."""
    draw = random.Random(n)
    half = n // 2
    share = devices * MEMORY / half
    ops = [
        Op(
            f"f{i}",
            draw.randrange(10**4, 10**6),
            int(0.55 * share * draw.uniform(0.5, 1.5)),
            0,
            f"{i}",
        )
        for i in range(half)
    ]
    ops += [Op(f"b{i}", draw.randrange(10**4, 10**6), 0, 0, f"{half - 1 - i}") for i in range(half)]
    tensors = [Tensor(half + i, (half + i + 1,), 1000) for i in range(half - 1)]
    for i in range(half):
        readers = {2 * half - 1 - i, i + 1}
        size = int(0.52 * share * draw.uniform(0.5, 1.5))
        tensors.append(Tensor(i, tuple(sorted(readers)), size))
    return OpGraph(tuple(ops), tuple(tensors)), Cluster.uniform(devices, MEMORY, LINK)


def towers(n: int, devices: int) -> tuple[OpGraph, Cluster]:
    """One large group more than there is room for, among small ops."""
    count = 2 * devices + 1
    ops = [Op(f"op{i}", 10**5, int(LARGE * MEMORY) if i < count else 1000) for i in range(n)]
    tensors = [Tensor(i - 1, (i,), 1000) for i in range(1, n)]
    return OpGraph(tuple(ops), tuple(tensors)), Cluster.uniform(devices, MEMORY, LINK)


@pytest.mark.parametrize("most_ops", [14, 24, 70])
@pytest.mark.parametrize("seeds", [300, pytest.param(6500, marks=pytest.mark.slow)])
def test_hidden_placements(benchmark: Any, most_ops: int, seeds: int) -> None:
    def missed() -> list[int]:
        rows = ((seed, hidden_among_constraints(seed, most_ops)) for seed in range(seeds))
        return [seed for seed, (g, c, rules, _) in rows if find(Problem(g, c, rules)) is None]

    seeds_missed = benchmark.pedantic(missed, rounds=1)
    print(f"\nhidden, below {most_ops} ops: {len(seeds_missed)} of {seeds} missed {seeds_missed}")
    assert not seeds_missed


@pytest.mark.parametrize("effort", ["fast", "balanced"])
@pytest.mark.parametrize(
    "n", [100, *(pytest.param(n, marks=pytest.mark.slow) for n in (500, 2000))]
)
def test_packings(benchmark: Any, n: int, effort: str) -> None:
    cases = list(
        product((2, 3, 4, 8), (0.8, 0.9, 0.95), (False, True), ("tailed", "unequal", "alike"))
    )

    def missed() -> list[tuple[int, float, bool, str]]:
        return [case for case in cases if find(packed(n, n, *case), effort) is None]

    cases_missed = benchmark.pedantic(missed, rounds=1)
    print(f"\npacked, {n} ops, {effort}: {len(cases_missed)} of {len(cases)} missed {cases_missed}")
    assert not cases_missed


@pytest.mark.parametrize("made", [crowded, towers])
@pytest.mark.parametrize("devices", [3, 8])
@pytest.mark.parametrize("n", [200, 700, 2000])
def test_infeasible(benchmark: Any, n: int, devices: int, made: Any) -> None:
    graph, cluster = made(n, devices)

    def cpu_s() -> float:
        start = time.process_time()
        with pytest.raises(InfeasibleError) as caught:
            solve(graph, cluster, effort="fast")
        seconds = time.process_time() - start
        error = caught.value
        extra = {error.extra_device: error.extra_bytes}
        more = tuple(
            replace(d, memory_bytes=d.memory_bytes + extra.get(d.name, 0)) for d in cluster.devices
        )
        assert find(Problem(graph, replace(cluster, devices=more))) is not None
        return seconds

    seconds = benchmark.pedantic(cpu_s, rounds=1)
    print(f"\n{made.__name__}, {n} ops, {devices} devices: {seconds:.2f} s of CPU to say so")
