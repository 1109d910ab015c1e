"""Favorite children: worked examples, and a matching whatever the solver returns."""

import pytest
from hypothesis import given, settings

from baechi import Cluster, Device, Link, Op, OpGraph, Tensor
from baechi.placers.favorites import favorite_children
from baechi.problem import Problem
from strategies import clusters, graphs

CLUSTER = Cluster.uniform(2, 10**9, Link(0, 10**9))


def favorites(ops, edges, groups=None):
    """Favorite children, where edges are (src, dst, bytes) and one byte takes one ns."""
    groups = groups or [None] * len(ops)
    graph = OpGraph(
        tuple(Op(f"o{i}", time_ns, group=groups[i]) for i, time_ns in enumerate(ops)),
        tuple(Tensor(src, (dst,), nbytes) for src, dst, nbytes in edges),
    )
    return favorite_children(Problem(graph, CLUSTER)).tolist()


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
        ([5, 5], [], [-1, -1]),
        ([], [], []),
    ],
)
def test_worked_examples(ops, edges, children):
    assert favorites(ops, edges) == children


def test_two_tensors_between_two_ops_are_one_edge():
    # 40 + 40 to the second child outweigh 60 to the first.
    assert favorites([5, 5, 5], [(0, 1, 60), (0, 2, 40), (0, 2, 40)]) == [2, -1, -1]


def test_inside_a_group_nothing_is_chosen():
    edges = [(0, 1, 99), (0, 2, 9)]
    assert favorites([5, 5, 5], edges, ["g", "g", None]) == [2, -1, -1]
    assert favorites([5, 5, 5], edges, ["g", "g", "g"]) == [-1, -1, -1]


@settings(max_examples=100, deadline=None)
@given(graphs(), clusters())
def test_every_op_has_one_favorite_child_and_is_one_of_one_parent(graph, cluster):
    problem = Problem(graph, cluster)
    children = favorite_children(problem).tolist()
    edges = {(t.producer, c) for t in graph.tensors for c in t.consumers}
    chosen = [(parent, child) for parent, child in enumerate(children) if child >= 0]
    assert set(chosen) <= edges
    assert len({child for _, child in chosen}) == len(chosen)
    assert all(problem.op_group[parent] != problem.op_group[child] for parent, child in chosen)
    assert favorite_children(Problem(graph, cluster)).tolist() == children


def test_huge_and_tiny_costs_are_scaled():
    huge, tiny = 10**17, 1
    ops, edges = [huge, tiny, tiny], [(0, 1, 10**15), (0, 2, 1)]
    assert favorites(ops, edges) == [1, -1, -1]


def test_without_links_transfers_cost_nothing():
    devices = (Device("a", 9), Device("b", 9))
    graph = OpGraph((Op("a", 1), Op("b", 1)), (Tensor(0, (1,), 5),))
    cluster = Cluster(devices, ((None, None), (None, None)))
    assert favorite_children(Problem(graph, cluster)).shape == (2,)
