"""Placements grown along time: valid, repeatable, and good where a search of the whole is not."""

import math
from dataclasses import replace

import numpy as np
import pytest
from benchmarks.placement_quality import generators
from hypothesis import given
from hypothesis import strategies as st
from strategies import clusters, constraints_for, graphs

from baechi import METF, Cluster, Constraints, Device, Link, Op, OpGraph, Tensor, _core
from baechi.placers.local_search import Budget, improved
from baechi.problem.problem_arrays import Problem

LINK = Link(10, 10**9)


def grown(problem, stretch, budget, seed=0):
    """Devices and order as lists, and what they have cost."""
    levels = _core.group_clusters(problem.core, problem.group_colors)
    devices, order, cost = _core.grown(problem.core, levels, stretch, budget, seed)
    return devices.tolist(), order.tolist(), cost


def makespan_ns(problem, devices, order):
    """By the exact clock."""
    timeline = problem.timeline()
    assert timeline.fold(np.array(devices, np.int32), np.array(order, np.int32)) < 0
    return timeline.makespan()


@given(st.data(), st.integers(1, 8), st.integers(0, 500))
def test_a_grown_placement_keeps_to_order_groups_and_constraints(data, stretch, budget):
    graph, cluster = data.draw(graphs(12)), data.draw(clusters())
    problem = Problem(graph, cluster, data.draw(constraints_for(graph, cluster)))
    devices, order, cost = grown(problem, stretch, budget)
    assert grown(problem, stretch, budget) == (devices, order, cost)
    if not devices:
        return
    makespan_ns(problem, devices, order)
    assert sorted(order) == list(range(len(graph.ops)))
    for members in problem.group_ops:
        assert len({devices[op] for op in members}) == 1
    for op, device in enumerate(devices):
        assert problem.allowed[device, problem.op_group[op]]


def test_without_a_path_nothing_grows():
    devices = tuple(Device(f"d{i}", 100) for i in range(2))
    graph = OpGraph((Op("a", 1), Op("b", 1)), (Tensor(0, (1,), 1),))
    cluster = Cluster(devices, ((None, None), (None, None)))
    apart = Problem(graph, cluster, Constraints(pins={"a": "d0", "b": "d1"}))
    assert grown(apart, 1, 100) == ([], [], 0)
    together = Problem(graph, cluster, Constraints(pins={"a": "d0"}))
    assert grown(together, 1, 100)[:2] == ([0, 0], [0, 1])


@pytest.mark.slow
def test_growth_wins_where_transfers_are_dear():
    # At equal cost: the search ends at 1.97, 2.11 and 1.97 times the optimum, growth at 1.67, 1.83
    # and 1.07.
    ratios = []
    for seed in range(3):
        made = generators.planted(seed, 500, 4, ccr=10)
        problem = Problem(made.graph, made.cluster)
        devices, order, cost = grown(problem, 48, 20_000_000)
        start = METF().place(problem)
        levels = _core.group_clusters(problem.core, problem.group_colors)
        state = np.array(start.devices, np.int32), np.array(start.order, np.int32)
        searched_ns = _core.local_search(problem.core, *state, levels, cost, 0, 0)[2]
        ratios.append(makespan_ns(problem, devices, order) / searched_ns)
    assert math.prod(ratios) ** (1 / 3) < 0.85


def test_a_search_grows_within_its_budget():
    made = generators.planted(1, 200, 4, ccr=10)
    problem = Problem(made.graph, made.cluster)
    plain = Budget(4_000_000, 10**6, ((2, 1 / 8), (2, 3 / 8)), 4, 4, 100)
    growing = replace(plain, growths=(4, 1 / 16))
    found = [improved(problem, [], budget) for budget in (plain, growing)]
    assert found[0] != found[1] == improved(problem, [], growing)
    for placement in found:
        assert 3_900_000 < placement.stats["evaluations"] < 4_100_000
        makespan_ns(problem, placement.devices, placement.order)
