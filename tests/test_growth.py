"""Placements grown along time: valid, repeatable, and good where a search of the whole is not."""

import math

import numpy as np
from benchmarks.placement_quality import generators
from hypothesis import given, settings
from hypothesis import strategies as st

from baechi import Cluster, Constraints, Device, Link, Op, OpGraph, Tensor, _core
from baechi.placers.search import Budget, improved
from baechi.problem import Problem
from strategies import clusters, constraints_for, graphs

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


@settings(max_examples=150, deadline=None)
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


def test_growth_wins_where_transfers_are_dear():
    # At equal budgets; the search alone is left with 1.9 times the optimum, and more.
    ratios = []
    for seed in range(2):
        made = generators.planted(seed, 240, 4, ccr=10)
        problem = Problem(made.graph, made.cluster)
        search = Budget(16_000_000, 10**6, ((2, 1 / 4), (2, 1 / 4)), 4, 4, 100)
        growth = Budget(16_000_000, 10**6, ((2, 1 / 4),), 4, 4, 100, growths=(4, 1 / 8))
        found = [improved(problem, [], budget) for budget in (search, growth)]
        steps = [placement.stats["makespan_ns"] for placement in found]
        costs = [placement.stats["evaluations"] for placement in found]
        print(seed, [s / made.optimum_ns for s in steps], costs)
        ratios.append(steps[1] / steps[0])
    assert math.prod(ratios) < 0.9
