"""Local search: its clock is the exact one, and what it finds is valid and never worse."""

import random
from dataclasses import replace

import numpy as np
import pytest
from benchmarks.placement_quality import generators
from benchmarks.placement_quality.mirroring import mirrored
from hypothesis import given
from hypothesis import strategies as st
from oracle import spans
from seeds import seeds
from strategies import clusters, constraints_for, dense, graphs, hosted, launched, placements, tight

from baechi import (
    HEFT,
    METF,
    Cluster,
    Constraints,
    Device,
    Link,
    Op,
    OpGraph,
    Tensor,
    _core,
    simulate,
)
from baechi.placers.local_search import BALANCED, FAST, Budget, LocalSearch, improved
from baechi.problem.bounds import lower_bound_ns
from baechi.problem.problem_arrays import Problem
from baechi.problem.simulation import fits_memory, overflows

LINK = Link(10, 10**9)
# What a search says of a start that needs a path that does not exist.
NO_PATH = ((2**63 - 1) // 4,) * 2
# Search that ends after some ten evaluations of a graph of this file.
SHORT = Budget(2_000, 2_000, ((3, 1 / 4), (1, 1 / 4)), 4, 3, 20)


def search(problem, devices, order, budget, *, target=0, seed=0):
    """What `local_search` finds, its clusters those of the problem."""
    levels = _core.group_clusters(problem.core, problem.group_colors)
    start = np.array(devices, np.int32), np.array(order, np.int32)
    return _core.local_search(problem.core, *start, levels, budget, target, seed)


def measured(problem, devices, order):
    """Makespan and overflow by the exact clock; `NO_PATH` where a path is missing."""
    timeline = problem.timeline()
    if timeline.fold(np.array(devices, np.int32), np.array(order, np.int32)) >= 0:
        return NO_PATH
    pools = zip(timeline.peaks(), problem.pool_memory, strict=True)
    return timeline.makespan(), sum(max(0, peak - memory) for peak, memory in pools)


def is_topological(graph, order):
    rank = {op: place for place, op in enumerate(order)}
    return sorted(order) == list(range(len(graph.ops))) and all(
        rank[tensor.producer] < rank[consumer]
        for tensor in graph.tensors
        for consumer in tensor.consumers
    )


def anything(problem, draw):
    """Devices that are allowed, the same for a whole group, and a topological order."""
    of_group = [
        draw.choice(np.flatnonzero(problem.allowed[:, group]).tolist())
        for group in range(len(problem.group_ops))
    ]
    order, left = [], set(range(len(problem.graph.ops)))
    while left:
        inputs = problem.graph.op_inputs
        ready = [
            op
            for op in sorted(left)
            if not any(problem.graph.tensors[t].producer in left for t in inputs[op])
        ]
        order.append(draw.choice(ready))
        left.remove(order[-1])
    return [of_group[group] for group in problem.op_group], order


def check(problem, devices, order, budget, seed=0):
    """Searches from there, and holds what comes back against the exact clock and the start."""
    start = measured(problem, devices, order)
    found, launches, makespan, overflow, spent = search(problem, devices, order, budget, seed=seed)
    found, launches = found.tolist(), launches.tolist()
    assert measured(problem, found, launches) == (makespan, overflow)
    assert (overflow, makespan) <= start[::-1]
    if start == NO_PATH:
        assert (found, launches) == (list(devices), list(order))
    assert is_topological(problem.graph, launches)
    for group, ops in enumerate(problem.group_ops):
        assert len({found[op] for op in ops}) == 1
        assert problem.allowed[found[ops[0]], group]
    # Before the last step of the search there was some budget left. A transfer counts as two ops.
    n, transfers = len(problem.graph.ops), len(problem.graph.tensors) * len(problem.device_pool)
    assert spent <= max(0, budget) + 10 * n + 12 * transfers + 2


@given(st.data(), st.sampled_from([0, 0, 30, 300, 3000]), st.integers(0, 2**64 - 1))
def test_the_clock_of_the_search_is_the_exact_one(data, budget, seed):
    graph = data.draw(graphs(max_ops=12, parted=True))
    cluster = data.draw(clusters(whole=True))
    start = data.draw(placements(graph, cluster))
    check(Problem(graph, cluster), start.devices, start.order, budget, seed)


@given(st.data(), st.integers(0, 3000), st.randoms(use_true_random=False))
def test_a_search_keeps_to_constraints_and_links(data, budget, draw):
    graph, cluster = data.draw(graphs(max_ops=12, parted=True)), data.draw(clusters())
    problem = Problem(graph, cluster, data.draw(constraints_for(graph, cluster)))
    check(problem, *anything(problem, draw), budget)


@pytest.mark.parametrize("family", [tight, dense, launched])
@pytest.mark.parametrize("budget", [0, 2_000])
def test_the_clock_is_exact_where_memory_is_tight_and_links_are_busy(family, budget):
    for seed in seeds(600):
        problem = Problem(*family(seed))
        check(problem, *anything(problem, random.Random(seed)), budget, seed)


@pytest.mark.parametrize("ports", ["duplex", "shared", "none"])
def test_the_clock_is_exact_on_steps_of_training(ports):
    for seed in seeds(20):
        draw = random.Random(seed)
        forward = generators.layered(seed, draw.randint(10, 60), width=4, ccr=draw.choice([0.3, 3]))
        graph = mirrored(forward, [op.time_ns for op in forward.ops])
        held = sum(op.persistent_bytes for op in graph.ops)
        pool = draw.choice(["", "p"])
        memory = int(held * draw.uniform(0.2, 0.8))
        devices = [Device(f"d{i}", memory, pool=pool if i < 2 else "") for i in range(4)]
        cluster = Cluster.connected(devices, generators.LINK, ports=ports)
        problem = Problem(graph, cluster)
        if seed % 2:
            problem = Problem(*hosted(graph, cluster, seed, longest=(50_000, 500_000)))
        check(problem, *anything(problem, draw), 40_000, seed)


def test_a_search_is_repeated_exactly_and_another_seed_is_another_search():
    made = generators.planted(1, 60, 3)
    problem = Problem(made.graph, made.cluster)
    start = [0] * 60, range(60)
    runs = [search(problem, *start, 100_000, seed=seed) for seed in (7, 7, 8)]
    first, again, other = ([x if isinstance(x, int) else x.tolist() for x in run] for run in runs)
    assert first == again
    assert first[:2] != other[:2]


def test_a_search_ends_at_its_target():
    made = generators.planted(1, 60, 3)
    problem = Problem(made.graph, made.cluster)
    devices, order = made.placement.devices, made.placement.order
    *_, makespan, overflow, spent = search(problem, devices, order, 10**9, target=made.optimum_ns)
    assert (makespan, overflow) == (made.optimum_ns, 0)
    assert spent < 20 * 60
    # A quarter more than the optimum is found long before the budget is used up.
    *_, makespan, _, spent = search(
        problem, [0] * 60, range(60), 10**9, target=made.optimum_ns * 5 // 4
    )
    assert makespan <= made.optimum_ns * 5 // 4
    assert spent < 10**8


@given(st.data(), st.randoms(use_true_random=False))
def test_a_listed_order_is_topological(data, draw):
    graph, cluster = data.draw(graphs(max_ops=12, parted=True)), data.draw(clusters())
    problem = Problem(graph, cluster)
    devices, _ = anything(problem, draw)
    order = _core.list_order(problem.core, np.array(devices, np.int32))
    assert is_topological(graph, order.tolist())


def test_a_listed_order_follows_the_critical_path():
    # The way c-d-e, over a link of 20 ns, is longer than a and b; so c goes first, and d, which
    # waits for its input until 30, lets f pass.
    ops = (Op("a", 10), Op("b", 10), Op("c", 10), Op("d", 30), Op("e", 5), Op("f", 20))
    graph = OpGraph(ops, (Tensor(2, (3,), 10), Tensor(3, (4,), 1)))
    problem = Problem(graph, Cluster.uniform(2, 100, LINK))
    order = _core.list_order(problem.core, np.array([0, 0, 0, 1, 1, 1], np.int32))
    assert order.tolist() == [2, 5, 0, 1, 3, 4]


def test_a_listed_order_knows_that_ports_are_busy():
    # From device 0 to 1 go the outputs of a, in 10 to 30, and of b, in 30 to 50. Without ports d
    # could start at 40, right after c; as it is, e fits between them.
    ops = (Op("a", 10), Op("b", 10), Op("c", 10), Op("d", 30), Op("e", 5))
    graph = OpGraph(ops, (Tensor(0, (1, 2), 10), Tensor(1, (3,), 10), Tensor(2, (4,), 1)))
    orders = {}
    for ports in ("duplex", "shared", "none"):
        devices = [Device("d0", 100), Device("d1", 100)]
        problem = Problem(graph, Cluster.connected(devices, LINK, ports=ports))
        orders[ports] = _core.list_order(problem.core, np.array([0, 0, 1, 1, 1], np.int32)).tolist()
    assert orders["duplex"] == orders["shared"] == [0, 1, 2, 4, 3]
    assert orders["none"] == [0, 1, 2, 3, 4]


@given(st.data(), st.randoms(use_true_random=False))
def test_no_device_waits_in_a_listed_order_while_an_op_could_start(data, draw):
    graph = data.draw(graphs(max_ops=12, launched=False))
    cluster = data.draw(clusters(uniform=True))
    # A device whose host is free takes an op, though its hand-over may come after other launches.
    cluster = replace(cluster, devices=tuple(replace(row, host="") for row in cluster.devices))
    problem = Problem(graph, cluster)
    devices, _ = anything(problem, draw)
    timeline, left = problem.timeline(), set(range(len(graph.ops)))
    for op in _core.list_order(problem.core, np.array(devices, np.int32)).tolist():
        free = [other for other in left if left.isdisjoint(producers(graph, other))]
        starts = {other: timeline.earliest_start(other, devices[other]) for other in free}
        assert starts[op] == min(starts.values())
        timeline.commit(op, devices[op])
        left.remove(op)


def producers(graph, op):
    return [graph.tensors[tensor].producer for tensor in graph.op_inputs[op]]


def cliques():
    """Two sets of four ops that exchange much, and send little to each other."""
    ops = tuple(Op(f"op{i}", 100) for i in range(8))
    # Evens and odds.
    tensors = [Tensor(i, tuple(range(i + 2, 8, 2)), 100) for i in range(6)]
    return OpGraph(ops, (*tensors, Tensor(2, (5,), 1)))


def partition(problem, devices, seed=0, moves=2000):
    levels = _core.group_clusters(problem.core, problem.group_colors)
    loads = np.array(problem.group_bytes, np.int64)
    start = np.array(devices, np.int32)
    return _core.partition_search(problem.core, start, levels, loads, 1.0, 1, moves, seed).tolist()


def test_a_partition_parts_what_exchanges_little():
    problem = Problem(cliques(), Cluster.uniform(2, 10**6, LINK))
    for seed in range(5):
        found = partition(problem, [0] * 8, seed)
        assert found == partition(problem, [0] * 8, seed)
        assert sorted({found[0], found[1]}) == [0, 1]
        assert found[::2] == [found[0]] * 4
        assert found[1::2] == [found[1]] * 4


def test_a_partition_mends_devices_that_change_roles():
    # Two chains side by side that change devices half-way: balanced in every window, and every
    # small change cuts them once more.
    ops = tuple(Op(f"op{i}", 100) for i in range(200))
    graph = OpGraph(ops, tuple(Tensor(i, (i + 2,), 300) for i in range(198)))
    problem = Problem(graph, Cluster.uniform(2, 10**6, LINK))
    levels = _core.group_clusters(problem.core, problem.group_colors)
    loads = np.array(problem.group_bytes, np.int64)
    crossed = np.array([(i + (i >= 100)) % 2 for i in range(200)], np.int32)
    for seed in range(5):
        found = _core.partition_search(
            problem.core, crossed, levels, loads, 1.0, 16, 20_000, seed
        ).tolist()
        assert found == [found[0], found[1]] * 100
        assert found[0] != found[1]


def test_a_partition_keeps_to_the_memory():
    # By work alone, one large and two small ops would be on each device.
    ops = (*(Op(f"large{i}", 10, 60) for i in range(2)), *(Op(f"o{i}", 10, 10) for i in range(4)))
    devices = [Device("small", 60), Device("big", 200)]
    problem = Problem(OpGraph(ops), Cluster.connected(devices, LINK))
    found = partition(problem, [1] * 6)
    assert sum(op.persistent_bytes for op, d in zip(ops, found, strict=True) if d == 0) <= 60
    assert 0 in found


@given(st.data(), st.integers(1, 16), st.randoms(use_true_random=False))
def test_a_partition_keeps_groups_together_and_to_what_is_allowed(data, windows, draw):
    graph, cluster = data.draw(graphs(max_ops=12, parted=True)), data.draw(clusters())
    problem = Problem(graph, cluster, data.draw(constraints_for(graph, cluster)))
    devices, _ = anything(problem, draw)
    levels = _core.group_clusters(problem.core, problem.group_colors)
    loads = np.array(problem.group_bytes, np.int64)
    found = _core.partition_search(
        problem.core, np.array(devices, np.int32), levels, loads, 2.0, windows, 200, 5
    )
    for group, ops in enumerate(problem.group_ops):
        assert len(set(found[list(ops)].tolist())) == 1
        assert problem.allowed[found[ops[0]], group]


@given(st.data(), st.randoms(use_true_random=False))
def test_devices_alone_take_as_long_as_among_others(data, draw):
    graph, cluster = data.draw(graphs(max_ops=10)), data.draw(clusters())
    some = sorted(data.draw(st.sets(st.integers(0, len(cluster.devices) - 1), min_size=1)))
    problem = Problem(graph, cluster)
    inner = problem.on(some)
    devices, order = (np.array(row, np.int32) for row in anything(inner, draw))
    alone, among = inner.timeline(), problem.timeline()
    stuck = alone.fold(devices, order)
    assert stuck == among.fold(np.array(some, np.int32)[devices], order)
    if stuck < 0:
        assert alone.makespan() == among.makespan()
        assert max(alone.peaks()) == max(among.peaks())
        renumbered = [(op, some[device], *times) for op, device, *times in spans(alone)]
        assert renumbered == [tuple(span) for span in spans(among)]


def check_improved(problem, budget):
    """The search from some placers' placements, and from nothing: valid, and never worse."""
    starts = [p for p in (METF().place(problem), HEFT().place(problem)) if p is not None]
    least = min((p.stats["makespan_ns"] for p in starts), default=None)
    for placement in (improved(problem, starts, budget), improved(problem, [], budget)):
        if placement is None:
            continue
        schedule = simulate(problem.graph, problem.cluster, placement, problem.constraints)
        assert not overflows(schedule, problem.cluster, problem.constraints)
        assert schedule.makespan_ns == placement.stats["makespan_ns"]
    chosen = LocalSearch(budget=budget).place(problem)
    if starts:
        assert chosen.stats["makespan_ns"] <= least
    return chosen


@given(st.data())
def test_what_a_search_finds_is_valid(data):
    graph, cluster = data.draw(graphs(max_ops=12, parted=True)), data.draw(clusters())
    constraints = data.draw(st.none() | constraints_for(graph, cluster))
    check_improved(Problem(graph, cluster, constraints), SHORT)


def test_a_search_of_many_devices_uses_those_that_the_starts_use():
    graph = generators.layered(0, 60, width=20, ccr=0.3)
    problem = Problem(graph, Cluster.uniform(24, generators.AMPLE, generators.LINK))
    chosen = check_improved(problem, SHORT)
    assert len(set(chosen.devices)) > 4
    # Each op has room on a device of its own alone, so that more are needed than are searched.
    ops = tuple(Op(f"o{i}", 10 + i, 60) for i in range(20))
    problem = Problem(OpGraph(ops), Cluster.uniform(24, 100, LINK))
    assert len(set(check_improved(problem, SHORT).devices)) == 20


def test_a_search_of_many_devices_without_a_start():
    graph = generators.layered(0, 60, width=20, ccr=0.3)
    problem = Problem(graph, Cluster.uniform(24, generators.AMPLE, generators.LINK))
    placement = improved(problem, [], SHORT)
    assert fits_memory(problem, replayed(problem, placement))


def replayed(problem, placement):
    timeline = problem.timeline()
    timeline.fold(np.array(placement.devices, np.int32), np.array(placement.order, np.int32))
    return timeline


@pytest.mark.parametrize(
    ("graph", "devices"),
    [
        (OpGraph(()), 2),
        (OpGraph((Op("a", 5),)), 2),
        (OpGraph((Op("a", 5), Op("b", 5)), (Tensor(0, (1,), 3),)), 1),
        (OpGraph(tuple(Op(f"o{i}", 0, 10) for i in range(6)), (Tensor(0, (3,), 0),)), 3),
        (OpGraph(tuple(Op(f"o{i}", 3, group="g") for i in range(4))), 3),
    ],
)
@pytest.mark.parametrize("budget", [FAST, BALANCED])
def test_a_search_with_little_to_search(graph, devices, budget):
    problem = Problem(graph, Cluster.uniform(devices, 100, LINK))
    assert check_improved(problem, budget).stats["makespan_ns"] == lower_bound_ns(problem)


def test_a_search_without_a_placement_to_start_from_finds_one():
    # Six ops of 30 and six of 20 fill three devices to the byte.
    ops = tuple(Op(f"o{i}", 10, 30 if i % 2 else 20) for i in range(12))
    problem = Problem(OpGraph(ops), Cluster.uniform(3, 100, LINK))
    placement = improved(problem, [], BALANCED)
    assert replayed(problem, placement).peaks() == [100] * 3
    limited = Problem(problem.graph, problem.cluster, Constraints(max_devices=2))
    assert improved(limited, [], BALANCED) is None


def test_a_search_near_the_largest_numbers_is_exact():
    # Each device ends in its turn, so that the sum of the ends passes 64 bits; so do the sums of
    # the memory, and the workspaces of a pool.
    ops = tuple(Op(f"o{i}", 2**58 + i, 2**55, 2**57) for i in range(8))
    graph = OpGraph(ops, tuple(Tensor(i, (i + 1,), 1) for i in range(7)))
    devices = [Device(f"d{i}", 2**63 - 1, pool="p" if i < 6 else "") for i in range(8)]
    problem = Problem(graph, Cluster.connected(devices, LINK))
    check(problem, range(8), range(8), 0)
    check(problem, range(8), range(8), 5_000)
    check_improved(problem, SHORT)
    for windows in (1, 16):
        found = _core.partition_search(
            problem.core,
            np.arange(8, dtype=np.int32),
            [],
            np.array(problem.group_bytes, np.int64),
            1.0,
            windows,
            500,
            0,
        )
        assert set(found.tolist()) <= set(range(8))


def test_one_op_that_takes_nearly_all_of_a_step_leaves_memory_exact():
    # All other ops are in one of the buckets into which times are sorted.
    draw = random.Random(0)
    n = 300
    ops = [Op(f"o{i}", draw.randrange(1, 50), 10, draw.randrange(40)) for i in range(n)]
    tensors = [
        Tensor(i, tuple({draw.randrange(i + 1, n + 1) for _ in range(3)}), draw.randrange(1, 30))
        for i in range(n)
    ]
    graph = OpGraph((*ops, Op("last", 2**50)), tuple(tensors))
    problem = Problem(graph, Cluster.uniform(3, 1_400, LINK))
    devices, order = anything(problem, draw)
    assert measured(problem, devices, order)[1] > 0
    check(problem, devices, order, 0)
    check(problem, devices, order, 30_000)


def far_from_its_bound():
    """A problem whose transfers are as long as its ops: no start is known to be the best."""
    draw = random.Random(2)
    ops = tuple(Op(f"o{i}", draw.randrange(10, 60), 10) for i in range(24))
    tensors = tuple(
        Tensor(draw.randrange(max(0, i - 8), i), (i,), draw.randrange(10, 60))
        for i in range(3, 24)
        for _ in range(2)
    )
    return Problem(OpGraph(ops, tensors), Cluster.uniform(3, 10**6, LINK))


def test_a_closed_halt_ends_searches_at_once():
    problem = far_from_its_bound()
    n = len(problem.graph.ops)
    devices, order = np.zeros(n, np.int32), np.arange(n, dtype=np.int32)
    levels = _core.group_clusters(problem.core, problem.group_colors)
    halt = _core.Halt()
    halt.close()
    ample = 10**15
    *_, spent = _core.local_search(problem.core, devices, order, levels, ample, 0, 0, halt)
    assert spent < 100 * n
    *_, spent = _core.grown(problem.core, levels, 4, ample, 0, halt)
    assert spent == 0
    loads = np.array(problem.group_bytes, np.int64)
    found = _core.partition_search(
        problem.core, devices, levels, loads, 1.0, 4, ample, 0, halt=halt
    )
    assert found.tolist() == devices.tolist()


def test_an_interrupt_ends_the_searches_that_run(monkeypatch):
    seen = []
    local_search = _core.local_search

    def interrupted(*asked):
        seen.append(asked[-1])
        if asked[-4] > 0:
            raise KeyboardInterrupt
        return local_search(*asked)

    monkeypatch.setattr(_core, "local_search", interrupted)
    problem = far_from_its_bound()
    with pytest.raises(KeyboardInterrupt):
        improved(problem, [], SHORT)
    assert seen[-1].closed


@pytest.mark.unsanitized
def test_a_search_ends_where_its_first_stages_gain_nothing():
    graph = generators.layered(0, 60, ccr=1.0)
    problem = Problem(graph, Cluster.uniform(4, generators.AMPLE, generators.LINK))
    budget = replace(BALANCED, per_op=8_000)
    best = LocalSearch(budget=replace(BALANCED, per_op=40_000)).place(problem)
    once, whole = (
        improved(problem, [best], budget),
        improved(problem, [best], replace(budget, patience=3)),
    )
    assert once.stats["makespan_ns"] > lower_bound_ns(problem) * 1.001
    assert once.stats["makespan_ns"] == whole.stats["makespan_ns"]
    assert once.stats["evaluations"] < 0.6 * whole.stats["evaluations"]


def test_a_search_may_start_without_partitions():
    problem = far_from_its_bound()
    start = METF().place(problem)
    found = improved(problem, [start], replace(SHORT, partitions=0))
    assert found.stats["makespan_ns"] <= start.stats["makespan_ns"]
