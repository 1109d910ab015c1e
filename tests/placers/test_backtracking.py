"""Backtracking over devices: what it finds fits, and what it calls impossible is."""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
from hidden import hidden_among_constraints
from seeds import seeds

from baechi import (
    Cluster,
    Constraints,
    Device,
    InfeasibleError,
    InputError,
    Link,
    Op,
    OpGraph,
    Tensor,
    _core,
    solve,
)
from baechi.placers.memory_packing import backtracked, is_hopeless, is_unpackable
from baechi.placers.placer import depth_first, shuffled
from baechi.placers.searching import find
from baechi.problem.problem_arrays import Problem
from baechi.problem.simulation import fits_memory, replay

LINK = Link(10, 10**9)


def assignments(problem):
    """All devices of groups that the constraints allow."""
    choices = [np.flatnonzero(column).tolist() for column in problem.allowed.T]
    for row in itertools.product(*choices):
        if len(set(row)) <= (problem.max_devices or len(row)):
            yield row


def fits(problem, assignment):
    """Whether it does, in index order."""
    row = [assignment[group] for group in problem.op_group]
    try:
        return fits_memory(problem, replay(problem, row, range(len(row))))
    except InputError:
        return False


def packing(seed):
    """Persistent bytes alone, that fill most of the memory; with pins, and links that are missing.

    Its tensors are empty, so what fits does not depend on the order.
    """
    draw = random.Random(seed)
    groups, n = draw.randint(1, 7), draw.randint(1, 3)
    sizes = [draw.choice([0, draw.randint(1, 9), draw.randint(10, 40)]) for _ in range(groups)]
    ops = tuple(Op(f"o{i}", 5, size) for i, size in enumerate(sizes))
    tensors = tuple(
        Tensor(i, (draw.randrange(i + 1, groups),), 0)
        for i in range(groups - 1)
        if draw.random() < 0.3
    )
    shares = [draw.uniform(0.5, 2) for _ in range(n)]
    room = sum(sizes) / draw.uniform(0.8, 1) / sum(shares)
    devices = tuple(Device(f"d{d}", int(room * share)) for d, share in enumerate(shares))
    links = [[LINK if a != b and draw.random() < 0.8 else None for b in range(n)] for a in range(n)]
    pins = {op.name: f"d{draw.randrange(n)}" for op in ops if draw.random() < 0.1}
    limit = draw.randint(max(1, len(set(pins.values()))), n) if draw.random() < 0.3 else None
    cluster = Cluster(devices, tuple(map(tuple, links)))
    return OpGraph(ops, tensors), cluster, Constraints(pins, max_devices=limit)


def test_a_packing_is_found_where_there_is_one_and_only_there():
    feasible = hopeless = 0
    count = seeds(120)
    for seed in count:
        problem = Problem(*packing(seed))
        exists = any(fits(problem, row) for row in assignments(problem))
        assert (find(problem) is not None) == exists
        if exists:
            assert not is_hopeless(problem)
            assert not is_unpackable(problem)
        feasible += exists
        hopeless += is_hopeless(problem)
    assert len(count) <= 3 * feasible <= 2 * len(count)
    assert 5 * hopeless >= len(count)


def test_nothing_is_cut_off_that_fits():
    """Against all assignments, with copies, ports, pools, groups, limits: memory over time."""
    proofs = 0
    count = seeds(400)
    for seed in count:
        graph, cluster, constraints, _ = hidden_among_constraints(seed, 9)
        less = random.Random(seed).uniform(0.6, 1)
        devices = tuple(
            replace(d, memory_bytes=int(d.memory_bytes * less)) for d in cluster.devices
        )
        problem = Problem(graph, replace(cluster, devices=tuple(devices)), constraints)
        if len(cluster.devices) ** len(problem.group_ops) > 1100:
            continue
        order = np.arange(len(graph.ops), dtype=np.int32)
        found, proven = _core.backtrack(problem.core, order, 10**7, 1)
        exists = any(fits(problem, row) for row in assignments(problem))
        assert (len(found) > 0, proven) == (exists, not exists)
        if exists:
            assert fits(problem, found.tolist())
        proofs += proven
    assert 15 * proofs > len(count)


@pytest.mark.parametrize("seed", [912, 5067, 632])
def test_a_copy_serves_who_comes_later(seed):
    """The maker's own room is then free before who waits for the tensor starts."""
    graph, cluster, constraints, _ = hidden_among_constraints(seed)
    problem = Problem(graph, cluster, constraints)
    order = np.arange(len(graph.ops), dtype=np.int32)
    found, _ = _core.backtrack(problem.core, order, 10**6, 1)
    assert fits(problem, found.tolist())


def test_a_depth_first_order_holds_less():
    # In index order both results wait for their readers, and there is room for one.
    ops = tuple(Op(name, 5) for name in ("a", "b", "after a", "after b"))
    graph = OpGraph(ops, (Tensor(0, (2,), 6), Tensor(1, (3,), 6)))
    problem = Problem(graph, Cluster((Device("d", 10),), ((None,),)))
    assert not fits(problem, (0, 0, 0, 0))
    (first, *_) = backtracked(problem, "packing")
    assert first.order == (0, 2, 1, 3)


def test_random_orders_are_asked_too():
    # The scratch of the third has room only before the first.
    ops = (Op("a", 5), Op("b", 5), Op("scratch", 5, workspace_bytes=10), Op("all", 5))
    graph = OpGraph(ops, (Tensor(0, (3,), 6), Tensor(1, (3,), 0), Tensor(2, (3,), 0)))
    problem = Problem(graph, Cluster((Device("d", 10),), ((None,),)))
    assert depth_first(problem) == (0, 1, 2, 3)
    assert not fits(problem, (0, 0, 0, 0))
    (first, *_) = backtracked(problem, "packing")
    assert first.order.index(2) < first.order.index(0)
    orders = [shuffled(problem, seed) for seed in range(50)]
    assert len(set(orders)) == 6
    assert {order[3] for order in orders} == {3}
    assert orders == [shuffled(problem, seed) for seed in range(50)]


def test_a_budget_ends_it_without_a_proof():
    problem = Problem(*packing(3))
    assert _core.backtrack(problem.core, np.empty(0, np.int32), 1, 1)[1] is False


def towers(count):
    """So many groups, of which two have room on a device, and small ones."""
    ops = tuple(Op(f"o{i}", 5, 36 if i < count else 1) for i in range(count + 20))
    return OpGraph(ops)


@pytest.mark.parametrize("devices", [3, 8, 64])
def test_too_many_large_groups_are_seen_at_once(devices):
    cluster = Cluster.uniform(devices, 100, LINK)
    assert not is_hopeless(Problem(towers(2 * devices), cluster))
    assert is_hopeless(Problem(towers(2 * devices + 1), cluster))
    with pytest.raises(InfeasibleError) as caught:
        solve(towers(2 * devices + 1), cluster, effort="fast")
    name, extra = caught.value.extra_device, caught.value.extra_bytes
    more = tuple(
        replace(d, memory_bytes=d.memory_bytes + (extra if d.name == name else 0))
        for d in cluster.devices
    )
    assert find(Problem(towers(2 * devices + 1), replace(cluster, devices=more))) is not None
