"""Where a placement is known, however odd the graph, the devices and the rules, `solve` has one."""

import numpy as np
import pytest
from benchmarks.placement_quality.feasibility import hidden
from hidden import hidden_among_constraints
from hypothesis import given
from hypothesis import strategies as st
from seeds import seeds
from strategies import graphs

from baechi import Cluster, Link, Op, OpGraph, Placement, Tensor, _core, simulate, solve
from baechi.placers.memory_packing import is_hopeless
from baechi.placers.placer import on_demand
from baechi.placers.searching import find
from baechi.problem.problem_arrays import Problem
from baechi.problem.simulation import fits_memory, overflows, replay


@pytest.mark.unsanitized
def test_what_is_hidden_among_constraints_is_found():
    rules = missing = 0
    count = seeds(150)
    for seed in count:
        graph, cluster, constraints, row = hidden_among_constraints(seed)
        problem = Problem(graph, cluster, constraints)
        assert fits_memory(problem, replay(problem, row, range(len(row))))
        assert not is_hopeless(problem)
        placement = solve(graph, cluster, effort="fast", constraints=constraints)
        schedule = simulate(graph, cluster, placement, constraints)
        assert not overflows(schedule, cluster, constraints)
        assert placement.stats["makespan_ns"] == schedule.makespan_ns >= schedule.lower_bound_ns
        rules += constraints is not None
        n = len(cluster.devices)
        missing += sum(link is None for row in cluster.links for link in row) > n
    assert 3 * min(rules, missing) > len(count)


# What neither the rules of a fast solve find, nor a balanced search, nor a plain backtracking by
# persistent bytes: few groups of many ops, many small ones, a limit of devices, far links.
MISSED = [
    (268, 14), (1977, 14), (3624, 14), (4403, 14), (2021, 24), (2927, 24), (5129, 24), (134, 70),
    (537, 70), (684, 70), (2018, 70), (3643, 70), (4730, 70), (5174, 70), (6418, 70),
]  # fmt: skip


@pytest.mark.parametrize(("seed", "most_ops"), MISSED)
def test_what_no_rule_finds_is_backtracked(seed, most_ops):
    graph, cluster, constraints, _ = hidden_among_constraints(seed, most_ops)
    placement = solve(graph, cluster, effort="fast", constraints=constraints)
    assert not overflows(simulate(graph, cluster, placement, constraints), cluster, constraints)


@pytest.mark.unsanitized
@pytest.mark.parametrize(("seed", "most_ops"), [(1977, 14), (5174, 70)])
def test_a_balanced_solve_finds_it_too(seed, most_ops):
    graph, cluster, constraints, _ = hidden_among_constraints(seed, most_ops)
    assert find(Problem(graph, cluster, constraints), "balanced") is not None


# Planted schedules, 5 % of memory to spare, tensors in flight as large as weights: an order that
# does not look at memory has many times as much in flight.
@pytest.mark.unsanitized
@pytest.mark.parametrize(
    ("seed", "shape", "devices", "ccr"),
    [(0, "once", 2, 0.2), (1, "once", 3, 0.2), (2, "near", 2, 5.0), (1, "close", 2, 5.0),
     (2, "close", 3, 5.0)],
)  # fmt: skip
def test_orders_that_let_go_early_are_found(seed, shape, devices, ccr):
    made = hidden(seed, shape, 220, devices, ccr)
    assert not overflows(simulate(made.graph, made.cluster, made.planted), made.cluster)
    placement = solve(made.graph, made.cluster, effort="fast")
    assert not overflows(simulate(made.graph, made.cluster, placement), made.cluster)
    assert solve(made.graph, made.cluster, effort="fast") == placement


@pytest.mark.unsanitized
def test_a_balanced_solve_finds_one_on_many_devices():
    made = hidden(0, "close", 220, 8, 1.0)
    placement = solve(made.graph, made.cluster)
    assert not overflows(simulate(made.graph, made.cluster, placement), made.cluster)


LINK = Link(10, 10**9)


def orders(problem):
    return tuple(_core.level_order(problem.core).tolist()), on_demand(problem)


@given(graphs(12), st.integers(1, 3), st.integers(0, 60))
def test_thrifty_orders_are_topological_and_are_scheduled_over_the_memory(graph, devices, memory):
    problem = Problem(graph, Cluster.uniform(devices, memory, LINK))
    for order in orders(problem):
        place = {op: at for at, op in enumerate(order)}
        assert sorted(order) == list(range(len(graph.ops)))
        for tensor in graph.tensors:
            assert all(place[tensor.producer] < place[op] for op in tensor.consumers)
        timeline = problem.timeline()
        ranks = -np.array([place[op] for op in range(len(order))], np.int64)
        assert timeline.ranked_schedule(ranks, np.empty(0, np.int64), overfull=True)
        assert len(timeline.span_columns()[0]) == len(order)


def test_an_order_on_demand_holds_least_in_a_tree():
    # Eight leaves are added up by two; with the leaves first eight tensors are held at once.
    n = 15
    tensors = tuple(Tensor(op, (8 + op // 2,), 10) for op in range(n - 1))
    graph = OpGraph(tuple(Op(f"op{op}", 5) for op in range(n)), tensors)
    cluster = Cluster.uniform(1, 1000, LINK)
    order = on_demand(Problem(graph, cluster))
    peak = simulate(graph, cluster, Placement(graph.digest, (0,) * n, order)).peak_bytes[0]
    assert peak == 50  # 30 for a subtree of two leaves, and a subtotal of each level above
