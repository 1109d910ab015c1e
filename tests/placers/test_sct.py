"""Favorite children: worked examples, a matching whatever the solver returns, and sound bounds."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import clusters, graphs, layered

from baechi import MSCT, Cluster, Device, InputError, Link, Op, OpGraph, Tensor
from baechi.placers.linear_programs import Highs, favorite_program
from baechi.placers.sct import favorite_children, first_order, relax
from baechi.problem.problem_arrays import Problem

CLUSTER = Cluster.uniform(2, 10**9, Link(0, 10**9))
SOLVERS = ["first-order", "highs", "cvxopt"]


def favorites(ops, edges, groups=None, solver="first-order"):
    """Favorite children, where edges are (src, dst, bytes) and one byte takes one ns."""
    groups = groups or [None] * len(ops)
    graph = OpGraph(
        tuple(Op(f"o{i}", time_ns, group=groups[i]) for i, time_ns in enumerate(ops)),
        tuple(Tensor(src, (dst,), nbytes) for src, dst, nbytes in edges),
    )
    return favorite_children(Problem(graph, CLUSTER), solver).children.tolist()


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize(
    ("ops", "edges", "children"),
    [
        # A chain: everybody follows.
        ([5, 5, 5], [(0, 1, 9), (1, 2, 9)], [1, 2, -1]),
        # A fork into a long and a short branch: the long one follows, for the short one can wait.
        ([5, 50, 5, 5], [(0, 1, 9), (0, 2, 9), (1, 3, 9), (2, 3, 9)], [1, 3, -1, -1]),
        # Equal branches share a parent's one favorite, so that nobody gets it.
        ([5, 5, 5], [(0, 1, 9), (0, 2, 9)], [-1, -1, -1]),
        # A dear transfer is worth more than a cheap one.
        ([5, 5, 5], [(0, 2, 90), (1, 2, 1)], [2, -1, -1]),
        # Nobody follows where nothing is gained: the fork 3 -> 4, 5 has all the time of op 2.
        (
            [5, 5, 99, 5, 5, 5],
            [(0, 1, 9), (0, 2, 9), (1, 3, 9), (3, 4, 1), (3, 5, 9)],
            [2, 3, -1, -1, -1, -1],
        ),
        ([5, 5], [], [-1, -1]),
        ([], [], []),
    ],
)
def test_worked_examples(ops, edges, children, solver):
    if solver == "cvxopt":
        pytest.importorskip("cvxopt")
    assert favorites(ops, edges, solver=solver) == children


def test_two_tensors_between_two_ops_are_one_edge():
    # 40 + 40 to the second child outweigh 60 to the first.
    assert favorites([5, 5, 5], [(0, 1, 60), (0, 2, 40), (0, 2, 40)]) == [2, -1, -1]


def test_inside_a_group_nothing_is_chosen():
    edges = [(0, 1, 99), (0, 2, 9)]
    assert favorites([5, 5, 5], edges, ["g", "g", None]) == [2, -1, -1]
    assert favorites([5, 5, 5], edges, ["g", "g", "g"]) == [-1, -1, -1]


@given(graphs(), clusters(), st.sampled_from(["first-order", "highs"]))
def test_every_op_has_one_favorite_child_and_is_one_of_one_parent(graph, cluster, solver):
    problem = Problem(graph, cluster)
    found = favorite_children(problem, solver)
    children = found.children.tolist()
    edges = {(t.producer, c) for t in graph.tensors for c in t.consumers}
    chosen = [(parent, child) for parent, child in enumerate(children) if child >= 0]
    assert set(chosen) <= edges
    assert len({child for _, child in chosen}) == len(chosen)
    assert all(problem.op_group[parent] != problem.op_group[child] for parent, child in chosen)
    again = favorite_children(Problem(graph, cluster), solver)
    assert again.children.tolist() == children
    assert (again.objective_ns, again.bound_ns) == (found.objective_ns, found.bound_ns)


@given(graphs(), clusters())
def test_first_order_proves_what_highs_finds_on_small_graphs(graph, cluster):
    assert_proved(favorite_program(Problem(graph, cluster)))


@given(
    st.integers(2, 150), st.integers(1, 30), st.integers(0, 2**32), st.sampled_from([1, 100, 1e5])
)
def test_first_order_proves_what_highs_finds_on_layered_graphs(n, width, seed, cost):
    assert_proved(layered(max(n, width + 1), width, seed, cost))


def assert_proved(program):
    """The bound is below the optimum, the shares are feasible, and as long as they are told."""
    if not program.free.any():
        return
    optimum = relax(program, Highs()).bound_ns
    found = first_order(program, 0.0025)
    assert found.bound_ns <= optimum * (1 + 1e-9)
    assert_feasible(program, found.shares)
    assert optimum * (1 - 1e-9) <= program.spans(found.shares)[2] <= found.bound_ns * 1.03


def assert_feasible(program, shares):
    assert np.array_equal(shares[~program.free], np.zeros((~program.free).sum()))
    for end in (program.src, program.dst):
        assert np.bincount(end, shares).max() <= 1 + 1e-12
    assert shares.min() >= 0


@pytest.mark.parametrize(
    ("n", "width", "cost"),
    [(2000, 10, 20.0), (2000, 10, 200.0), (2000, 100, 20.0), (20000, 10, 9), (100000, 10, 9)],
)
def test_first_order_reaches_its_tolerance_on_large_graphs(n, width, cost):
    program = layered(n, width, 1, cost)
    found = first_order(program, 0.0025)
    assert program.spans(found.shares)[2] <= 1.0025 * found.bound_ns


def test_a_bound_is_not_far_above_a_flat_graph():
    # One parent of a thousand children: the relaxed choice saves next to nothing.
    n = 1001
    graph = OpGraph(
        tuple(Op(f"o{i}", 10) for i in range(n)), (Tensor(0, tuple(range(1, n)), 1000),)
    )
    found = favorite_children(Problem(graph, CLUSTER), "first-order")
    exact = favorite_children(Problem(graph, CLUSTER), "highs")
    assert exact.objective_ns == pytest.approx(1020 - 1)
    assert found.bound_ns <= exact.objective_ns <= found.objective_ns <= 1.0025 * found.bound_ns


def test_what_is_needed_is_feasible_and_enough():
    program = layered(500, 10, 3, 50.0)
    shares = relax(program, Highs()).shares
    needed = program.needed(shares)
    assert (needed <= shares).all()
    assert needed.sum() < 0.8 * shares.sum()
    assert program.spans(needed)[2] == pytest.approx(program.spans(shares)[2], rel=1e-9)


def test_where_a_solver_stops_the_first_order_method_goes_on_and_says_so():
    ops = tuple(Op(f"o{i}", 5 + i % 3) for i in range(30))
    graph = OpGraph(ops, tuple(Tensor(i, (i + 1, i + 2), 9) for i in range(28)))
    found = favorite_children(Problem(graph, CLUSTER), Highs(iterations_per_row=0))
    assert found.method.startswith("first-order (highs stopped: ")
    assert found.bound_ns <= found.objective_ns <= 1.005 * found.bound_ns


def test_unknown_solvers_are_refused():
    known = "first-order, highs, cvxopt, mosek"
    with pytest.raises(InputError, match=f"solver is 'simplex'; it must be one of {known}"):
        MSCT(solver="simplex")


@pytest.mark.parametrize("solver", SOLVERS)
def test_huge_and_tiny_costs_are_scaled(solver):
    if solver == "cvxopt":
        pytest.importorskip("cvxopt")
    huge, tiny = 10**17, 1
    ops, edges = [huge, tiny, tiny], [(0, 1, 10**15), (0, 2, 1)]
    assert favorites(ops, edges, solver=solver) == [1, -1, -1]


def test_without_links_transfers_cost_nothing():
    devices = (Device("a", 9), Device("b", 9))
    graph = OpGraph((Op("a", 1), Op("b", 1)), (Tensor(0, (1,), 5),))
    cluster = Cluster(devices, ((None, None), (None, None)))
    found = favorite_children(Problem(graph, cluster))
    assert (found.children.tolist(), found.objective_ns, found.bound_ns) == ([-1, -1], 2, 2)
