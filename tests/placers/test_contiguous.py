"""Contiguous splits: the dynamic program against all splits, its loads, and small examples."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import Oracle
from strategies import clusters, graphs

from baechi import (
    Cluster,
    Constraints,
    Contiguous,
    Device,
    Link,
    Metis,
    Op,
    OpGraph,
    Tensor,
    _core,
    simulate,
    solve,
)
from baechi.placers import contiguous
from baechi.placers import placer as assignments
from baechi.placers.placer import device_range, is_allowed, live_loads, shortest_assignment
from baechi.problem.problem_arrays import Problem

LINK = Link(10, 10**9)


def value_of(problem, split, block, costs, *, bottleneck):
    """What a split costs: per device what comes in, and its time where the maximum counts."""
    of_op = [split[block[group]] for group in problem.op_group]
    received = dict.fromkeys(split, 0)
    times = dict.fromkeys(split, 0)
    for op, device in enumerate(of_op):
        times[device] += int(problem.durations[problem.device_class[device]][op])
    for tensor, cost in zip(problem.graph.tensors, costs, strict=True):
        for device in {of_op[op] for op in tensor.consumers} - {of_op[tensor.producer]}:
            received[device] += cost
    if bottleneck:
        return max((times[d] + received[d] for d in times), default=0)
    return sum(received.values())


def all_splits(blocks, devices):
    """Every way to cut the blocks into segments for some of the devices, in their order."""
    for indices in itertools.combinations_with_replacement(range(len(devices)), blocks):
        yield tuple(devices[index] for index in indices)


@given(st.data(), graphs(max_ops=6, min_ops=1), clusters(max_devices=3), st.booleans())
def test_the_program_finds_the_best_of_all_splits(data, graph, cluster, bottleneck):
    problem = Problem(graph, cluster)
    groups, n = len(problem.group_ops), len(cluster.devices)
    row = data.draw(st.permutations(range(groups)))
    blocks = data.draw(st.integers(1, groups))
    block = [0] * groups
    for position, group in enumerate(row):
        block[group] = position * blocks // groups
    loads = data.draw(
        st.lists(st.lists(st.integers(0, 9), min_size=groups, max_size=groups), max_size=2)
    ) or [[0] * groups]
    devices = data.draw(st.permutations(range(n)))
    caps = data.draw(st.lists(st.integers(0, 40), min_size=n, max_size=n))
    allowed = data.draw(st.lists(st.booleans(), min_size=n * groups, max_size=n * groups))
    costs = data.draw(
        st.lists(st.integers(0, 9), min_size=len(graph.tensors), max_size=len(graph.tensors))
    )
    found = _core.contiguous_splits(
        problem.core,
        blocks=blocks,
        block=np.array(block, np.int32),
        loads=np.array(loads, np.int64).reshape(-1),
        costs=np.array(costs, np.int64),
        devices=np.array(devices, np.int32),
        caps=np.array(caps, np.int64),
        allowed=np.array(allowed, np.uint8),
        bottleneck=bottleneck,
    )
    rows = np.array(allowed).reshape(n, groups)
    best = {}
    for split in all_splits(blocks, devices):
        there = [split[block[group]] for group in range(groups)]
        fits = all(
            sum(load for load, device in zip(moment, there, strict=True) if device == d) <= cap
            for moment in loads
            for d, cap in zip(devices, caps, strict=True)
        )
        if fits and all(rows[device][group] for group, device in enumerate(there)):
            value = value_of(problem, split, block, costs, bottleneck=bottleneck)
            used = 1 + max(devices.index(device) for device in split)
            best[used] = min(value, best.get(used, value))
    values = [value_of(problem, split, block, costs, bottleneck=bottleneck) for split in found]
    better = []
    for used in sorted(best):
        if not better or best[used] < better[-1]:
            better.append(best[used])
    assert values == better
    for split in found:
        assert tuple(split) in set(all_splits(blocks, devices))


def test_the_slowest_device_is_that_with_what_it_receives():
    graph = OpGraph(tuple(Op(name, 10) for name in "abc"), (Tensor(0, (1,), 1), Tensor(1, (2,), 1)))
    found = _core.contiguous_splits(
        Problem(graph, Cluster.uniform(2, 1000, LINK)).core,
        blocks=3,
        block=np.arange(3, dtype=np.int32),
        loads=np.zeros(3, np.int64),
        costs=np.array([0, 15], np.int64),
        devices=np.arange(2, dtype=np.int32),
        caps=np.ones(2, np.int64),
        allowed=np.ones(6, np.uint8),
        bottleneck=True,
    )
    assert [list(split) for split in found] == [[0, 0, 0], [0, 1, 1]]


@given(graphs(), st.integers(0, 60))
def test_loads_are_what_one_device_holds(graph, memory):
    problem = Problem(graph, Cluster.uniform(2, memory, LINK))
    order = range(len(graph.ops))
    rows = live_loads(problem, order)
    if sum(problem.group_bytes) <= memory:
        assert not rows.any()
        return
    # With a moment per op; the clock's peak is that of ops that take time.
    untimed = OpGraph(tuple(replace(op, time_ns=1) for op in graph.ops), graph.tensors)
    oracle = Oracle(untimed, problem.cluster)
    for op in order:
        oracle.commit(op, 0)
    assert rows.sum(axis=1).max() == oracle.peak(oracle.pool(0))


def test_moments_are_the_largest_of_their_stretches(monkeypatch):
    ops = tuple(Op(f"o{i}", 1, workspace_bytes=size) for i, size in enumerate([1, 5, 2, 9]))
    problem = Problem(OpGraph(ops), Cluster.uniform(2, 1, LINK))
    monkeypatch.setattr(assignments, "_MOMENTS", 2)
    assert live_loads(problem, range(4)).tolist() == [[0, 5, 0, 0], [0, 0, 0, 9]]


def chain(cuts, size=10):
    """A chain of ops of equal persistent bytes, with these tensors between them."""
    ops = tuple(Op(f"o{i}", 100, size) for i in range(len(cuts) + 1))
    return OpGraph(ops, tuple(Tensor(i, (i + 1,), nbytes) for i, nbytes in enumerate(cuts)))


def test_a_chain_is_cut_where_least_flows():
    graph = chain([50, 40, 3, 60, 50])
    placement = Contiguous().place(Problem(graph, Cluster.uniform(2, 150, LINK)))
    assert placement.devices == (0, 0, 0, 1, 1, 1)
    # The transfer takes 10 + 3 ns.
    assert placement.stats["makespan_ns"] == 6 * 100 + 13


def test_a_bad_cut_is_avoided_with_one_device_more():
    # Three ops fit on a device. Two devices must be cut in the middle, where most flows.
    graph = chain([1, 1, 90, 1, 1])
    two = Contiguous().place(Problem(graph, Cluster.uniform(2, 125, LINK)))
    three = Contiguous().place(Problem(graph, Cluster.uniform(3, 125, LINK)))
    assert two.stats["makespan_ns"] == 600 + 100
    assert three.stats["makespan_ns"] == 600 + 2 * 11
    assert len(set(three.devices)) == 3


def test_branches_run_side_by_side():
    # Two chains of three ops between a source and a sink; depth first lays them one by one.
    ops = tuple(Op(f"o{i}", 100) for i in range(8))
    edges = [(0, (1, 2)), (1, (3,)), (2, (4,)), (3, (5,)), (4, (6,)), (5, (7,)), (6, (7,))]
    graph = OpGraph(ops, tuple(Tensor(p, c, 1) for p, c in edges))
    problem = Problem(graph, Cluster.uniform(2, 1000, LINK))
    assert assignments.depth_first(problem) == (0, 1, 3, 5, 2, 4, 6, 7)
    assert Contiguous().place(problem).stats["makespan_ns"] == 100 + 11 + 300 + 100


@given(graphs(), clusters())
def test_all_orders_are_topological(graph, cluster):
    for order in contiguous._orders(Problem(graph, cluster)):
        assert sorted(order) == list(range(len(graph.ops)))
        place = {op: i for i, op in enumerate(order)}
        for tensor in graph.tensors:
            assert all(place[tensor.producer] < place[op] for op in tensor.consumers)


def test_many_groups_are_cut_at_the_cheapest_places():
    problem = Problem(chain([5, 1, 7, 4, 2, 9, 3, 8]), Cluster.uniform(2, 100, LINK))
    costs = np.array(_core.mean_transfers(problem.core), np.int64)
    blocks, block = contiguous.blocks_of(problem, tuple(range(9)), costs, 3)
    # Stretches of three cuts: behind the fifth op flow 2, behind the eighth 8 and the seventh 3.
    assert (blocks, block.tolist()) == (3, [0, 0, 0, 0, 0, 1, 1, 2, 2])
    assert Contiguous(work=3 * 3 * 2).place(problem) is not None


def test_devices_of_a_pool_share_its_memory_or_leave_it_to_the_fastest():
    devices = [
        Device("slow", 100, 0.5, pool="p"),
        Device("fast", 100, pool="p"),
        Device("large", 400, 0.25),
    ]
    problem = Problem(chain([1]), Cluster.connected(devices, LINK))
    assert contiguous._rows_of_devices(problem, 20) == [
        ((2, 1, 0), (400, 50, 50)),
        ((1, 0, 2), (50, 50, 400)),
        ((0, 1, 2), (50, 50, 400)),
        ((2, 1), (400, 100)),
        ((1, 2), (100, 400)),
    ]


def test_of_very_many_devices_some_are_looked_at():
    problem = Problem(chain([1]), Cluster.uniform(100, 10, LINK))
    assert device_range(problem, [10] * 100, 30) == (3, 32)
    assert device_range(problem, [10] * 100, 400) == (40, 80)
    assert device_range(problem, [10] * 5, 400) == (5, 5)
    # Memories whose sum passes 64 bits.
    assert device_range(problem, [2**62] * 100, 400) == (1, 32)


@pytest.mark.parametrize("placer", [Contiguous(), Metis()])
def test_forbidden_devices_are_left_out(placer):
    graph, cluster = chain([5, 1, 7, 4, 2, 9, 3, 8]), Cluster.uniform(3, 100, LINK)
    names = [op.name for op in graph.ops]
    forbidden = dict.fromkeys(names[6:], ("device0",))
    forbidden |= dict.fromkeys(names[:3], ("device1",))
    problem = Problem(graph, cluster, Constraints(forbidden=forbidden, excluded=("device2",)))
    devices = placer.place(problem).devices
    assert devices[:3] == (0, 0, 0)
    assert devices[6:] == (1, 1, 1)
    assert set(devices) == {0, 1}
    assert is_allowed(problem, np.array(devices, np.int32))
    one = Problem(graph, cluster, Constraints(max_devices=1))
    assert not is_allowed(one, np.array(devices, np.int32))


def test_an_assignment_that_fits_in_one_order_only_is_found():
    # In index order both wide outputs are there together; by earliest start a reader goes between.
    ops = (Op("a", 10), Op("b", 10), Op("c", 10), Op("d", 10))
    tensors = (Tensor(0, (2,), 60), Tensor(1, (3,), 60))
    problem = Problem(OpGraph(ops, tensors), Cluster.uniform(1, 100, LINK))
    placement = shortest_assignment(problem, {(0, 0, 0, 0): range(4)}, "mine")
    assert placement.order == (0, 2, 1, 3)
    assert simulate(problem.graph, problem.cluster, placement).makespan_ns == 40


@pytest.mark.parametrize("n", [0, 1])
def test_a_graph_without_ops_and_one_with_a_single_op(n):
    graph = OpGraph(tuple(Op(f"o{i}", 5) for i in range(n)))
    assert solve(graph, Cluster.uniform(3, 10, LINK), "contiguous").stats["makespan_ns"] == 5 * n
