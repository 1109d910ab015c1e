"""Coarsening: what it fuses by hand, and that it stays exact whatever it fuses."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baechi import METF, Cluster, InputError, Link, Op, OpGraph, Placement, Tensor, simulate
from baechi.coarsening import Coarse, coarsen
from baechi.placers.baselines import SingleDevice
from baechi.problem import Problem
from strategies import clusters, graphs

# A byte takes a nanosecond, after a hundred.
CLUSTER = Cluster.uniform(2, 10**6, Link(100, 10**9))


def graph_of(ops, edges):
    """A graph of (name, time, ...) rows and (src, dst or dsts, bytes) edges, all by name."""
    index = {row[0]: i for i, row in enumerate(ops)}
    return OpGraph(
        tuple(Op(*row) for row in ops),
        tuple(Tensor(index[src], tuple(index[d] for d in dst.split()), n) for src, dst, n in edges),
    )


def names(coarse):
    return [" ".join(coarse.fine.ops[op].name for op in row) for row in coarse.members]


def training(layers, time_ns=1000, persistent=100):
    """A chain of layers, each a forward and a backward op of one group, and a loss."""
    ops = [(f"f{i}", time_ns, persistent, 0, f"g{i}") for i in range(layers)] + [("loss", 0)]
    ops += [(f"b{i}", 2 * time_ns, 0, 0, f"g{i}") for i in reversed(range(layers))]
    edges = []
    for i in range(layers):
        after = f"f{i + 1} b{i + 1}" if i + 1 < layers else "loss"
        edges += [(f"f{i}", after, 10), (f"f{i}", f"b{i}", 5)]
        before = f"b{i + 1}" if i + 1 < layers else "loss"
        edges.append((before, f"b{i}", 10))
    return graph_of(ops, edges)


@pytest.mark.parametrize(
    ("ops", "edges", "parts"),
    [
        # A chain is one op, however dear its ops.
        ([("a", 999), ("b", 999), ("c", 999)], [("a", "b", 1), ("b", "c", 1)], ["a b c"]),
        # Branches survive, each fused into one.
        (
            [("a", 999), ("b", 999), ("c", 999), ("d", 999), ("e", 999), ("f", 999)],
            [("a", "b c", 1), ("b", "d", 1), ("c", "e", 1), ("d", "f", 1), ("e", "f", 1)],
            ["a", "b d", "c e", "f"],
        ),
        # An idle op joins its only neighbor, on the side where more flows.
        (
            [("a", 999), ("b", 999), ("idle", 0), ("c", 999), ("d", 999)],
            [("a", "idle b", 9), ("idle", "d", 1), ("b", "c d", 9), ("c", "d", 1)],
            ["a idle", "b", "c", "d"],
        ),
        # A cheap op joins its only neighbor on a side: 101 is less than 100 + 5, 110 is not.
        (
            [("a", 999), ("b", 101), ("c", 999), ("d", 999)],
            [("a", "b c", 5), ("b", "d", 5), ("c", "d", 5)],
            ["a b", "c", "d"],
        ),
        (
            [("a", 999), ("b", 110), ("c", 999), ("d", 999)],
            [("a", "b c", 5), ("b", "d", 5), ("c", "d", 5)],
            ["a", "b", "c", "d"],
        ),
        # Small branches are taken in only up to one transfer's time.
        (
            [("a", 999)] + [(f"b{i}", 40) for i in range(6)],
            [("a", "b0 b1 b2 b3 b4 b5", 5)],
            ["a b0 b1", "b2", "b3", "b4", "b5"],
        ),
    ],
)
def test_worked_examples(ops, edges, parts):
    assert names(coarsen(graph_of(ops, edges), CLUSTER)) == parts


def test_a_training_chain_becomes_one_op():
    assert len(coarsen(training(6), CLUSTER).members) == 1


def test_a_group_with_something_between_its_ops_makes_no_cycle():
    graph = graph_of(
        [("a", 9, 0, 0, "g"), ("b", 9, 0, 0, "h"), ("c", 9, 0, 0, "g"), ("d", 9, 0, 0, "h")],
        [("a", "b", 1), ("b", "c", 1), ("c", "d", 1)],
    )
    # Constructing the coarse graph would fail on a cycle.
    coarse = coarsen(graph)
    assert len(coarse.graph.ops) == len(coarse.members)


def test_groups_that_touch_once_do_not_become_one():
    ops = [(f"{group}{i}", 999, 0, 0, group) for i in range(3) for group in "gh"]
    graph = graph_of(ops, [("g0", "h0", 1)])
    assert len(coarsen(graph, CLUSTER).members) == 6


def test_a_lump_has_a_limit():
    cluster = Cluster.uniform(2, 8000, Link(100, 10**9))
    graph = graph_of(
        [(f"o{i}", 1, 400) for i in range(9)], [(f"o{i}", f"o{i + 1}", 0) for i in range(8)]
    )
    sizes = [op.persistent_bytes for op in coarsen(graph, cluster).graph.ops]
    assert max(sizes) == 800
    assert coarsen(graph).graph.ops[0].persistent_bytes == 3600


def test_workspace_is_the_peak_of_what_stays_inside():
    ops = [("a", 1, 5, 10), ("b", 1, 6, 90), ("c", 1, 7, 10)]
    graph = graph_of(ops, [("a", "b c", 20), ("b", "c", 40), ("c", "", 3)])
    coarse = Coarse(graph, ((0, 1, 2),))
    # While b runs: a's 20, its own 40 and 90.
    assert coarse.graph == OpGraph((Op("a", 3, 18, 150),), (Tensor(0, (), 3),))


@settings(max_examples=150, deadline=None)
@given(graphs(max_ops=14), st.one_of(st.none(), clusters()))
def test_a_coarse_graph_stands_for_the_fine_one(graph, cluster):
    coarse = coarsen(graph, cluster)
    assert sorted(op for row in coarse.members for op in row) == list(range(len(graph.ops)))
    assert all(row == tuple(sorted(row)) for row in coarse.members)
    for attribute in ("time_ns", "persistent_bytes"):
        total = sum(getattr(op, attribute) for op in graph.ops)
        assert sum(getattr(op, attribute) for op in coarse.graph.ops) == total
    part_of = {op: part for part, row in enumerate(coarse.members) for op in row}
    for group in graph.groups.values():
        parts = {part_of[op] for op in group}
        coarse_groups = {coarse.graph.ops[part].group for part in parts}
        assert len(parts) == 1 or (len(coarse_groups) == 1 and None not in coarse_groups)
    crossing = [
        t
        for t in graph.tensors
        if t.kept or not t.consumers or {part_of[c] for c in t.consumers} != {part_of[t.producer]}
    ]
    assert sum(t.nbytes for t in coarse.graph.tensors) == sum(t.nbytes for t in crossing)
    assert coarsen(graph, cluster) == coarse


@settings(max_examples=80, deadline=None)
@given(graphs(max_ops=10), clusters(whole=True, memory=st.just(10**6)))
def test_a_placement_expands_to_one_of_the_fine_graph(graph, cluster):
    coarse = coarsen(graph, cluster)
    placement = METF().place(Problem(coarse.graph, cluster))
    fine = coarse.expand(placement)
    # `simulate` checks the order and the groups.
    simulate(graph, cluster, fine)
    for part, row in enumerate(coarse.members):
        assert {fine.devices[op] for op in row} == {placement.devices[part]}


def test_on_one_device_the_coarse_step_is_the_fine_one():
    graph = training(5)
    coarse = coarsen(graph, Cluster.uniform(1, 2000, Link(1, 10**9)))
    assert 1 < len(coarse.members) < len(graph.ops)
    makespans = [
        SingleDevice(0).place(Problem(g, CLUSTER)).stats["makespan_ns"]
        for g in (graph, coarse.graph)
    ]
    assert makespans == [15000, 15000]


def test_a_placement_of_another_graph_is_not_expanded():
    with pytest.raises(InputError, match="the placement is for graph other"):
        coarsen(training(3), CLUSTER).expand(Placement("other", (0,), (0,)))
