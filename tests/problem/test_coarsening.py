"""Coarsening: what it fuses by hand, and that it stays exact whatever it fuses."""

from dataclasses import replace

import coarsening_oracle
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from seeds import seeds
from strategies import clusters, colored, graphs, tight

from baechi import (
    METF,
    Auto,
    Cluster,
    InputError,
    Link,
    Op,
    OpGraph,
    Placement,
    Tensor,
    simulate,
    solve,
)
from baechi.placers.baselines import SingleDevice
from baechi.placers.local_search import LocalSearch
from baechi.placers.placer import Placer
from baechi.problem.coarsening import Coarse, coarsen
from baechi.problem.problem_arrays import Problem

# A byte takes a nanosecond, after a hundred.
CLUSTER = Cluster.uniform(2, 10**6, Link(100, 10**9))


def graph_of(ops, edges):
    """A graph of (name, time, ...) rows and (src, dst or dsts, bytes) edges, all by name."""
    index = {row[0]: i for i, row in enumerate(ops)}
    return OpGraph(
        tuple(Op(*row) for row in ops),
        tuple(Tensor(index[src], tuple(index[d] for d in dst.split()), n) for src, dst, n in edges),
    )


def coarse_of(graph, cluster=CLUSTER, color=None):
    return coarsen(colored(graph, cluster, color))


def names(coarse):
    ops = coarse.problem.graph.ops
    return [" ".join(ops[op].name for op in row) for row in coarse.members]


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
    assert names(coarse_of(graph_of(ops, edges))) == parts


def test_a_training_chain_becomes_one_op():
    assert len(coarse_of(training(6)).members) == 1


def test_a_group_with_something_between_its_ops_makes_no_cycle():
    graph = graph_of(
        [("a", 9, 0, 0, "g"), ("b", 9, 0, 0, "h"), ("c", 9, 0, 0, "g"), ("d", 9, 0, 0, "h")],
        [("a", "b", 1), ("b", "c", 1), ("c", "d", 1)],
    )
    # Constructing the coarse graph would fail on a cycle.
    coarse = coarse_of(graph)
    assert len(coarse.graph.ops) == len(coarse.members)


def test_groups_that_touch_once_do_not_become_one():
    ops = [(f"{group}{i}", 999, 0, 0, group) for i in range(3) for group in "gh"]
    graph = graph_of(ops, [("g0", "h0", 1)])
    assert len(coarse_of(graph).members) == 6


def chain(n, persistent=0):
    ops = [(f"o{i}", 1, persistent) for i in range(n)]
    return graph_of(ops, [(f"o{i}", f"o{i + 1}", 0) for i in range(n - 1)])


@pytest.mark.parametrize(("memory", "largest"), [(8000, 800), (80_000, 3600)])
def test_a_lump_has_a_limit(memory, largest):
    cluster = Cluster.uniform(2, memory, Link(100, 10**9))
    sizes = [op.persistent_bytes for op in coarse_of(chain(9, 400), cluster).graph.ops]
    assert max(sizes) == largest


def test_groups_of_different_color_stay_apart():
    assert names(coarse_of(chain(4), color=np.array([0, 0, 1, 1], np.int32))) == ["o0 o1", "o2 o3"]


def test_workspace_is_the_peak_of_what_stays_inside():
    ops = [("a", 1, 5, 10), ("b", 1, 6, 90), ("c", 1, 7, 10)]
    graph = graph_of(ops, [("a", "b c", 20), ("b", "c", 40), ("c", "", 3)])
    coarse = Coarse(Problem(graph, CLUSTER), np.zeros(3, np.int32), np.zeros(1, np.int32))
    # While b runs: a's 20, its own 40 and 90.
    assert coarse.graph == OpGraph((Op("a", 3, 18, 150),), (Tensor(0, (), 3),))


def same_as_oracle(graph, cluster):
    coarse, expected = coarse_of(graph, cluster), coarsening_oracle.coarsen(graph, cluster)
    assert coarse.members == expected.members
    assert coarse.graph == expected.graph


@given(graphs(max_ops=16), clusters())
def test_the_rules_are_the_oracles(graph, cluster):
    same_as_oracle(graph, cluster)


@pytest.mark.parametrize("seed", seeds(60))
def test_the_rules_are_the_oracles_on_larger_graphs(seed):
    same_as_oracle(*tight(seed))
    same_as_oracle(mirrored(seed, 60), CLUSTER)


def mirrored(seed, n):
    """A layered forward graph of n ops, and its mirror image; op and image share a group."""
    draw = np.random.default_rng(seed)
    width = int(draw.integers(1, 6))
    sources = [
        {int(draw.integers(max(0, op - 2 * width), op)) for _ in range(draw.integers(1, 3))}
        if op
        else set()
        for op in range(n)
    ]
    times = draw.integers(0, 2000, n).tolist()
    ops = [Op(f"f{i}", times[i], 10, 5, f"g{i}") for i in range(n)]
    ops += [Op(f"b{i}", 2 * times[i], 0, 5, f"g{i}") for i in reversed(range(n))]
    last = 2 * n - 1
    tensors = [
        Tensor(i, (*(j for j in range(n) if i in sources[j]), last - i), int(draw.integers(500)))
        for i in range(n)
    ]
    tensors += [
        Tensor(last - i, tuple(last - j for j in sources[i]), int(draw.integers(500)))
        for i in range(n)
    ]
    return OpGraph(tuple(ops), tuple(tensors))


def check(coarse):
    """What every coarse graph must be. Constructing it fails on a cycle."""
    graph, coarse_graph = coarse.problem.graph, coarse.graph
    assert sorted(op for row in coarse.members for op in row) == list(range(len(graph.ops)))
    assert all(row == tuple(sorted(row)) for row in coarse.members)
    for attribute in ("time_ns", "persistent_bytes"):
        total = sum(getattr(op, attribute) for op in graph.ops)
        assert sum(getattr(op, attribute) for op in coarse_graph.ops) == total
    part_of = {op: part for part, row in enumerate(coarse.members) for op in row}
    assert coarse.part_of.tolist() == [part_of[op] for op in range(len(graph.ops))]
    for group in graph.groups.values():
        parts = {part_of[op] for op in group}
        coarse_groups = {coarse_graph.ops[part].group for part in parts}
        assert len(parts) == 1 or (len(coarse_groups) == 1 and None not in coarse_groups)
    crossing = [
        t
        for t in graph.tensors
        if t.kept or not t.consumers or {part_of[c] for c in t.consumers} != {part_of[t.producer]}
    ]
    assert sum(t.nbytes for t in coarse_graph.tensors) == sum(t.nbytes for t in crossing)
    check_arrays(coarse.arrays, coarse_graph.arrays)
    check_limit(coarse)


def check_arrays(arrays, expected):
    """The columns that C++ gets are those of the graph as values."""
    for name, value in vars(expected).items():
        np.testing.assert_equal(getattr(arrays, name), value)
        assert type(value) is dict or getattr(arrays, name).dtype == value.dtype


def check_limit(coarse):
    """A lump of several groups has no more bytes than its share of the largest memory."""
    problem = coarse.problem
    groups = {}
    for op, part in enumerate(coarse.part_of.tolist()):
        lump = groups.setdefault(int(coarse.group_of[part]), set())
        lump.add(problem.op_group[op])
    for lump in groups.values():
        nbytes = sum(problem.arrays.group_persistent[group] for group in lump)
        assert len(lump) == 1 or nbytes <= max(problem.pool_memory) // 8


@given(graphs(max_ops=14), clusters(), st.data())
def test_a_coarse_graph_stands_for_the_fine_one(graph, cluster, data):
    n = len(Problem(graph, cluster).group_ops)
    colors = data.draw(st.lists(st.integers(0, 1), min_size=n, max_size=n))
    color = data.draw(st.sampled_from([None, np.array(colors, np.int32)]))
    coarse = coarse_of(graph, cluster, color)
    check(coarse)
    if color is not None:
        op_group = coarse.problem.op_group
        pairs = {(coarse.part_of[op], colors[op_group[op]]) for op in range(len(graph.ops))}
        assert len(pairs) == len(coarse.members)
    assert coarse.graph == coarse_of(graph, cluster, color).graph


@pytest.mark.parametrize("seed", seeds(20))
def test_coarse_mirrored_graphs(seed):
    check(coarse_of(mirrored(seed, 80)))


@given(graphs(max_ops=10), clusters(whole=True, memory=st.just(10**6)))
def test_a_placement_expands_to_one_of_the_fine_graph(graph, cluster):
    coarse = coarse_of(graph, cluster)
    placement = METF().place(Problem(coarse.graph, cluster))
    lumped = METF().place(coarse.lumped())
    assert (lumped.devices, lumped.order) == (placement.devices, placement.order)
    devices, order = (row.tolist() for row in coarse.expand(placement))
    assert [row.tolist() for row in coarse.expand(lumped)] == [devices, order]
    # `simulate` checks the order and the groups.
    simulate(graph, cluster, Placement(graph.digest, tuple(devices), tuple(order)))
    for part, row in enumerate(coarse.members):
        assert {devices[op] for op in row} == {placement.devices[part]}


def test_names_do_not_matter():
    graph = mirrored(3, 60)
    renamed = OpGraph(
        tuple(
            replace(op, name=f"z{999 - i}", group=f"y{999 - int(op.group[1:])}")
            for i, op in enumerate(graph.ops)
        ),
        graph.tensors,
    )
    cluster = Cluster.uniform(3, 10**5, Link(50, 10**9))
    parts = [coarse_of(g, cluster).part_of.tolist() for g in (graph, renamed)]
    assert parts[0] == parts[1]
    assert 1 < len(set(parts[0])) < len(graph.ops)


def test_on_one_device_the_coarse_step_is_the_fine_one():
    graph = training(5)
    coarse = coarse_of(graph, Cluster.uniform(1, 2000, Link(1, 10**9)))
    assert 1 < len(coarse.members) < len(graph.ops)
    makespans = [
        SingleDevice(0).place(Problem(g, CLUSTER)).stats["makespan_ns"]
        for g in (graph, coarse.graph)
    ]
    assert makespans == [15000, 15000]


@pytest.mark.parametrize("ops", [(), (Op("one", 5, 3, 2),)])
def test_a_graph_of_no_op_or_one(ops):
    coarse = coarse_of(OpGraph(ops))
    assert coarse.members == tuple((op,) for op in range(len(ops)))
    assert coarse.graph == OpGraph(ops)


def test_a_large_graph():
    n = 100_000
    ops = tuple(Op(f"o{i}", 1000 + i % 7, 10) for i in range(n))
    chains = tuple(Tensor(i, (i + 100,), 500) for i in range(n - 100))
    coarse = coarse_of(OpGraph(ops, chains), Cluster.uniform(8, 10**12, Link(100, 10**9)))
    assert len(coarse.graph.ops) == 100


def test_a_placement_of_another_graph_is_not_expanded():
    with pytest.raises(InputError, match="the placement is for graph other"):
        coarse_of(training(3)).expand(Placement("other", (0,), (0,)))


def test_a_placer_may_ask_for_the_coarse_graph_as_values():
    seen = []

    class Own(Placer):
        name = "own"

        def place(self, problem):
            seen.append(problem.graph)
            n = len(problem.graph.ops)
            placement = Placement(problem.graph.digest, (0,) * n, tuple(range(n)))
            simulate(problem.graph, problem.cluster, placement)
            return placement

    graph = mirrored(3, 60)
    placement = solve(graph, CLUSTER, Own())
    assert seen[0] == coarse_of(graph).graph
    assert len(seen[0].ops) < len(graph.ops)
    assert (placement.graph_digest, set(placement.devices)) == (graph.digest, {0})


def test_a_placer_of_ours_makes_no_coarse_graph_of_values(monkeypatch):
    graph = mirrored(3, 60)
    monkeypatch.setattr(Coarse, "graph", property(lambda _: pytest.fail("asked for")))
    for placer in (*Auto().placers, Auto(), LocalSearch()):
        solve(graph, CLUSTER, placer, effort="fast")


def test_times_that_no_device_takes_may_add_up_to_anything():
    ops = tuple(Op(f"o{i}", 10, 10) for i in range(20))
    chain = tuple(Tensor(i, (i + 1,), 5) for i in range(19))
    graph = OpGraph(ops, chain, {"never": (2**62,) * 20})
    coarse = coarsen(Problem(graph, CLUSTER)).graph
    assert sum(op.time_ns for op in coarse.ops) == 200
    assert max(coarse.times["never"]) == 2**63 - 1
