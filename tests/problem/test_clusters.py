"""Clusters of groups: nested, alike in size, and of groups that send each other much."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import spans, transfers
from strategies import clusters as device_clusters
from strategies import colored, graphs

from baechi import Cluster, Link, Op, OpGraph, Tensor, _core
from baechi.problem.problem_arrays import Problem

# A byte takes a nanosecond, after a hundred.
CLUSTER = Cluster.uniform(2, 10**6, Link(100, 10**9))


def chain(sizes, time_ns=1000, persistent=0):
    """A chain whose op i sends sizes[i] to the next."""
    ops = tuple(Op(f"o{i}", time_ns, persistent) for i in range(len(sizes) + 1))
    return OpGraph(ops, tuple(Tensor(i, (i + 1,), nbytes) for i, nbytes in enumerate(sizes)))


def levels(graph, cluster=CLUSTER, color=None):
    problem = colored(graph, cluster, color)
    return [level.tolist() for level in _core.group_clusters(problem.core, problem.group_colors)]


def test_heavy_edges_go_first():
    graph = chain([10, 9000, 10, 9000, 10, 5000, 4000])
    assert levels(graph)[1] == [0, 1, 1, 2, 2, 3, 3, 4]


def test_the_leaves_of_a_star_pair_up():
    ops = tuple(Op(f"o{i}", 1000) for i in range(17))
    graph = OpGraph(ops, (Tensor(0, tuple(range(1, 17)), 100),))
    sizes = [max(level) + 1 for level in levels(graph)]
    assert sizes == [17, 9, 5]


def test_a_dear_group_stays_alone_as_long_as_others_are_smaller():
    graph = OpGraph(
        (Op("dear", 50_000), *(Op(f"o{i}", 1000) for i in range(1, 33))),
        tuple(Tensor(i, (i + 1,), 10**5) for i in range(32)),
    )
    for level in levels(graph):
        assert level.count(0) == 1 or max(level) < 8


def test_what_no_memory_holds_is_no_cluster():
    cluster = Cluster.uniform(2, 500, Link(100, 10**9))
    found = levels(chain([10] * 15, persistent=200), cluster)
    assert max(np.bincount(found[-1])) == 2


@pytest.mark.parametrize("n_ops", [0, 1, 4])
def test_few_groups_are_one_level(n_ops):
    assert levels(OpGraph(tuple(Op(f"o{i}", 1) for i in range(n_ops)))) == [list(range(n_ops))]


def test_a_long_chain_halves():
    sizes = [max(level) + 1 for level in levels(chain([1000] * 99_999))]
    assert sizes[0] == 100_000
    assert sizes[-1] <= 8
    assert all(b <= 0.75 * a for a, b in itertools.pairwise(sizes))
    assert len(sizes) < 20


@given(graphs(max_ops=16), device_clusters(), st.data())
def test_levels_are_nested_and_of_one_color(graph, cluster, data):
    problem = colored(graph, cluster, None)
    n = len(problem.group_ops)
    colors = data.draw(st.lists(st.integers(0, 2), min_size=n, max_size=n))
    found = levels(graph, cluster, np.array(colors, np.int32))
    assert found[0] == list(range(n))
    for fine, coarse in itertools.pairwise(found):
        assert list(dict.fromkeys(coarse)) == list(range(max(coarse) + 1))
        assert max(coarse) < max(fine)
        # A cluster of the finer level is in one of the coarser.
        assert len(set(zip(fine, coarse, strict=True))) == max(fine) + 1
    for level in found:
        assert len(set(zip(level, colors, strict=True))) == len(set(level))
    assert found == levels(graph, cluster, np.array(colors, np.int32))


def etf(core):
    """What earliest task first does with the problem: spans, transfers and peaks."""
    timeline = _core.Timeline(core)
    timeline.list_schedule(np.empty(0, np.int32))
    return spans(timeline), transfers(timeline), timeline.peaks()


@given(graphs(max_ops=12), device_clusters())
def test_regrouped_is_the_problem_with_larger_groups(graph, cluster):
    problem = Problem(graph, cluster)
    for level in levels(graph, cluster):
        names = [f"c{level[group]}" for group in problem.op_group]
        ops = tuple(replace(op, group=g) for op, g in zip(graph.ops, names, strict=True))
        larger = Problem(replace(graph, ops=ops), cluster)
        assert etf(_core.regrouped(problem.core, np.array(level, np.int32))) == etf(larger.core)
