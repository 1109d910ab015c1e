"""CP-SAT's optimum: brute force finds nothing better, and no bound passes it."""

import itertools

import pytest
from benchmarks.placement_quality.exact import fit_all, solve_all, solve_exactly
from benchmarks.placement_quality.tightness import cluster, random_graph
from strategies import tight

from baechi import (
    Cluster,
    Device,
    InputError,
    Link,
    Op,
    OpGraph,
    Tensor,
    simulate,
    solve,
)
from baechi.problem.bounds import lower_bound_ns
from baechi.problem.problem_arrays import Problem
from baechi.problem.simulation import fits_memory, replay

LINK = Link(10, 10**9)


def shortest(graph, cluster):
    """The best makespan of all devices and orders; None if no placement is valid."""
    problem = Problem(graph, cluster)
    ops, devices = range(len(graph.ops)), range(len(cluster.devices))
    edges = [(t.producer, c) for t in graph.tensors for c in t.consumers]
    orders = [
        order
        for order in itertools.permutations(ops)
        if all(order.index(u) < order.index(v) for u, v in edges)
    ]
    found = []
    for order, row in itertools.product(orders, itertools.product(devices, repeat=len(ops))):
        try:
            timeline = replay(problem, row, order)
        except InputError:
            continue
        if fits_memory(problem, timeline):
            found.append(timeline.makespan())
    return min(found, default=None)


def tiny_cases():
    """Those of the tight family that brute force can do."""
    cases = [tight(seed) for seed in range(400)]
    small = [(g, c) for g, c in cases if len(g.ops) <= 4 and len(c.devices) <= 3]
    return small[:20]


def test_it_is_what_brute_force_finds():
    cases = tiny_cases()
    optima = [shortest(graph, cluster) for graph, cluster in cases]
    results = solve_all([(*case, None) for case in cases], workers=1)
    fits = fit_all(cases, workers=1)
    for optimum, result, fit in zip(optima, results, fits, strict=True):
        if optimum is None:
            assert result.placement is None
            assert fit.full is not True
        else:
            assert result.bound_ns <= optimum
            assert fit.persistent is True
            assert fit.full is not False
            if result.proven:
                assert result.optimum_ns == result.makespan_ns == optimum
    assert sum(result.proven for result in results) >= len(results) - 2
    assert None in optima
    assert any(optima)


def test_no_bound_passes_the_optimum():
    cases = [
        (graph, cluster(graph, 2 + seed % 2, tight=seed % 4 == 3), None)
        for seed in range(12)
        for graph in [random_graph(seed, 10, (0.1, 1.0, 5.0)[seed % 3])]
    ]
    results = solve_all(cases, seconds=30)
    proven = [(case, result) for case, result in zip(cases, results, strict=True) if result.proven]
    ratios = [lower_bound_ns(Problem(g, c)) / r.optimum_ns for (g, c, _), r in proven]
    assert len(ratios) >= 9
    assert max(ratios) <= 1
    # What it is worth; `benchmarks/placement_quality/tightness.py` prints more of it.
    assert sum(ratios) / len(ratios) > 0.9


def test_a_placement_to_begin_with_is_kept_or_bettered():
    graph = random_graph(1, 8, 1.0)
    devices = cluster(graph, 2)
    hint = solve(graph, devices, "single")
    result = solve_exactly(graph, devices, hint=hint, workers=1)
    assert result.proven
    assert result.makespan_ns <= hint.stats["makespan_ns"]
    assert simulate(graph, devices, result.placement).makespan_ns == result.optimum_ns


def held(*sizes):
    return OpGraph(tuple(Op(f"o{i}", 5, size) for i, size in enumerate(sizes)))


@pytest.mark.parametrize(
    ("graph", "memory", "persistent", "full"),
    [
        (held(6, 5, 5, 4), 10, True, True),
        # 20 bytes in 20, but 7 goes with none of the others.
        (held(7, 5, 4, 4), 10, False, False),
        # Each has its device, and neither has room for what must travel.
        (OpGraph((Op("a", 5, 9), Op("b", 5, 9)), (Tensor(0, (1,), 2),)), 10, False, False),
        # Both of b's copies meet where there is room for one.
        (
            OpGraph(
                (Op("a", 5, 4), Op("b", 5, 4), Op("c", 5, 4)),
                (Tensor(0, (2,), 3, kept=True), Tensor(1, (2,), 3, kept=True)),
            ),
            10,
            False,
            False,
        ),
    ],
)
def test_what_fits(graph, memory, persistent, full):
    (fit,) = fit_all([(graph, Cluster.uniform(2, memory, LINK))], workers=1)
    assert (fit.persistent, fit.full) == (persistent, full)
    assert (fit.placement is not None) == full


def test_what_packs_need_not_fit():
    # Every op alone has room; the kept results of both do not, wherever they are.
    ops = (Op("a", 5), Op("b", 5))
    graph = OpGraph(ops, (Tensor(0, (), 6, kept=True), Tensor(1, (), 6, kept=True)))
    lonely = Cluster((Device("d", 10),), ((None,),))
    (fit,) = fit_all([(graph, lonely)], workers=1)
    assert (fit.persistent, fit.full) == (True, False)
    assert not solve_exactly(graph, lonely, workers=1).bound_ns


def test_a_child_that_fails_is_told():
    with pytest.raises(RuntimeError, match="a NoneType stands where"):
        solve_all([(None, None, None)])
