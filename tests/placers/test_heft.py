"""HEFT and PEFT: the papers' examples, and the C++ schedulers against plain ones."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from oracle import Oracle, spans, transfers
from seeds import seeds
from strategies import clusters, dense, graphs, tight

from baechi import HEFT, PEFT, Cluster, Device, Link, Op, OpGraph, Tensor, _core, solve
from baechi.placers.placer import distinct_loads, group_loads
from baechi.problem.problem_arrays import Problem

# The graph of HEFT's Fig. 2 and of PEFT's Fig. 2. Parent, child, mean transfer; tasks from 1.
HEFT_EDGES = (
    (1, 2, 18), (1, 3, 12), (1, 4, 9), (1, 5, 11), (1, 6, 14), (2, 8, 19), (2, 9, 16), (3, 7, 23),
    (4, 8, 27), (4, 9, 23), (5, 9, 13), (6, 8, 15), (7, 10, 17), (8, 10, 11), (9, 10, 13),
)  # fmt: skip
HEFT_TIMES = (
    (14, 16, 9), (13, 19, 18), (11, 13, 19), (13, 8, 17), (12, 13, 10),
    (13, 16, 9), (7, 15, 11), (5, 11, 14), (18, 12, 20), (21, 7, 16),
)  # fmt: skip
HEFT_RANKS = (108.0, 77.0, 80.0, 80.0, 69.0, 63.333, 42.667, 35.667, 44.333, 14.667)
PEFT_EDGES = (
    (1, 2, 17), (1, 3, 31), (1, 4, 29), (1, 5, 13), (1, 6, 7), (2, 8, 3), (2, 9, 30), (3, 7, 16),
    (4, 8, 11), (4, 9, 7), (5, 9, 57), (6, 8, 5), (7, 10, 9), (8, 10, 42), (9, 10, 7),
)  # fmt: skip
PEFT_TIMES = (
    (22, 21, 36), (22, 18, 18), (32, 27, 43), (7, 10, 4), (29, 27, 35),
    (26, 17, 24), (14, 25, 30), (29, 23, 36), (15, 21, 8), (13, 16, 33),
)  # fmt: skip
# Makes all means whole numbers.
UNIT = 3000


def example(edges, times):
    """A paper's graph on its three processors, with `UNIT` ns for each of its units of time."""
    graph = OpGraph(
        tuple(Op(f"n{i}", 0) for i in range(1, 11)),
        tuple(Tensor(u - 1, (v - 1,), cost * UNIT) for u, v, cost in edges),
        {f"p{p}": tuple(row[p] * UNIT for row in times) for p in range(3)},
    )
    devices = [Device(f"d{p}", "1GiB", kind=f"p{p}") for p in range(3)]
    return Problem(graph, Cluster.connected(devices, Link(0, 10**9), ports="none"))


def test_the_upward_ranks_are_the_published_ones():
    ranks = _core.upward_ranks(example(HEFT_EDGES, HEFT_TIMES).core)
    assert [round(rank / UNIT, 3) for rank in ranks] == list(HEFT_RANKS)


def test_heft_makes_the_published_schedule():
    problem = example(HEFT_EDGES, HEFT_TIMES)
    assert HEFT().place(problem).stats["makespan_ns"] == 80 * UNIT
    timeline = problem.timeline()
    ranks = np.array(_core.upward_ranks(problem.core), np.int64)
    assert timeline.insertion_schedule(ranks, np.empty(0, np.int64), np.zeros(10, np.int64))
    assert timeline.makespan() == 80 * UNIT


def test_peft_makes_the_published_table_and_schedule():
    problem = example(PEFT_EDGES, PEFT_TIMES)
    table, ranks = _core.optimistic_costs(problem.core)
    columns = [[value / UNIT for value in table[row * 10 : row * 10 + 10]] for row in range(3)]
    assert [column[0] for column in columns] == [64, 68, 86]
    assert [round(rank / UNIT, 1) for rank in ranks] == [
        72.7, 41.0, 37.0, 43.7, 31.0, 41.7, 17.0, 20.7, 16.3, 0.0,
    ]  # fmt: skip
    placement = PEFT().place(problem)
    assert placement.stats["makespan_ns"] == 122 * UNIT
    assert HEFT().place(problem).stats["makespan_ns"] == 133 * UNIT


def mean_transfers(problem):
    """Per tensor, the mean over the links between pools, overhead included, as the core rounds."""
    cluster = problem.cluster
    links = [
        link
        for src, row in enumerate(cluster.links)
        for dst, link in enumerate(row)
        if link is not None and problem.device_pool[src] != problem.device_pool[dst]
    ]
    if not links:
        return [0 for _ in problem.graph.tensors]
    latency = sum(link.latency_ns + link.overhead_ns for link in links) // len(links)
    per_bytes = sum((10**9 << 32) // link.bytes_per_s for link in links) // len(links)
    return [latency + (tensor.nbytes * per_bytes >> 32) for tensor in problem.graph.tensors]


def edges_of(problem):
    """Consumers of every op, each with the mean time of all that flows there."""
    edges = [{} for _ in problem.graph.ops]
    for tensor, cost in zip(problem.graph.tensors, mean_transfers(problem), strict=True):
        for consumer in tensor.consumers:
            edges[tensor.producer][consumer] = edges[tensor.producer].get(consumer, 0) + cost
    return edges


def mean(row):
    return sum(row) // len(row)


def plain_ranks(problem):
    edges, times = edges_of(problem), problem.durations[problem.device_class].tolist()
    ranks = [0] * len(edges)
    for op in reversed(range(len(edges))):
        tail = max((cost + ranks[child] for child, cost in edges[op].items()), default=0)
        ranks[op] = mean([row[op] for row in times]) + tail
    return ranks


def plain_table(problem):
    """Per op and device, by the paper's formula."""
    edges, times = edges_of(problem), problem.durations[problem.device_class].tolist()
    devices = range(len(times))
    table = [[0] * len(times) for _ in edges]
    for op in reversed(range(len(edges))):
        for p in devices:
            table[op][p] = max(
                (
                    min(table[child][q] + times[q][child] + (cost if p != q else 0)
                        for q in devices)
                    for child, cost in edges[op].items()
                ),
                default=0,
            )  # fmt: skip
    return table


def by_device(problem, table):
    """A row per device of the core's table of classes."""
    return np.array(table, np.int64).reshape(problem.durations.shape)[problem.device_class]


@given(graphs(max_ops=12), clusters())
def test_ranks_and_costs_agree_with_the_formulas(graph, cluster):
    problem = Problem(graph, cluster)
    assert _core.upward_ranks(problem.core) == plain_ranks(problem)
    table, ranks = _core.optimistic_costs(problem.core)
    plain = plain_table(problem)
    # A class with several devices lets an op stay where the paper lets it move: the same minimum.
    assert by_device(problem, table).T.tolist() == plain
    assert ranks == [mean(row) for row in plain]


def plain_schedule(oracle, problem, ranks, future):
    """HEFT or PEFT on the plain clock; false where an op would have to wait for memory."""
    devices, ops = range(len(problem.cluster.devices)), range(len(ranks))
    while len(oracle.spans) < len(ranks):
        op = min((op for op in ops if oracle.ready(op)), key=lambda op: (-ranks[op], op))
        options = [
            (oracle.earliest_end(op, d) + future[d][op], d) for d in devices if oracle.fits(op, d)
        ]
        if not options:
            return False
        oracle.commit(op, min(options)[1])
    return True


def assert_appended_agrees(graph, cluster):
    problem = Problem(graph, cluster)
    table, ranks = _core.optimistic_costs(problem.core)
    rows = by_device(problem, table).tolist()
    none = [[0] * len(graph.ops) for _ in cluster.devices]
    for rank, future, array in (
        (_core.upward_ranks(problem.core), none, []),
        (ranks, rows, table),
    ):
        oracle, timeline = Oracle(graph, cluster), problem.timeline()
        done = plain_schedule(oracle, problem, rank, future)
        same = timeline.ranked_schedule(np.array(rank, np.int64), np.array(array, np.int64))
        if done:
            assert same
            assert spans(timeline) == [(op, *span) for op, span in oracle.spans.items()]
            assert transfers(timeline) == oracle.transfers


@given(graphs(max_ops=10), clusters())
def test_the_appended_schedule_agrees_with_the_oracle(graph, cluster):
    assert_appended_agrees(graph, cluster)


@pytest.mark.parametrize("seed", seeds(60))
def test_the_appended_schedule_agrees_where_links_are_busy(seed):
    assert_appended_agrees(*dense(seed))


def plain_insertion(problem, ranks, loads):
    """The paper's schedule: device and start of every op, or `None` at a dead end."""
    graph, cluster = problem.graph, problem.cluster
    oracle = Oracle(graph, cluster)
    busy = [[] for _ in cluster.devices]
    room, homes, placed = list(problem.pool_memory), {}, {}
    while len(placed) < len(graph.ops):
        op = min(
            (
                op
                for op in range(len(graph.ops))
                if op not in placed
                and all(graph.tensors[t].producer in placed for t in graph.op_inputs[op])
            ),
            key=lambda op: (-ranks[op], op),
        )
        group, options = problem.op_group[op], []
        for device in range(len(cluster.devices)):
            pool = problem.device_pool[device]
            if homes.get(group, device) != device:
                continue
            if group not in homes and loads[group] > room[pool]:
                continue
            found = arrival(problem, placed, op, device)
            if found is None:
                continue
            ready, overhead = found
            duration = oracle.duration(op, device) + overhead
            start = first_gap(busy[device], ready, duration)
            options.append((start + duration, device, start))
        if not options:
            return None
        end, device, start = min(options)
        placed[op] = (device, start, end)
        if end > start:
            busy[device] = sorted([*busy[device], (start, end)])
        if group not in homes:
            homes[group] = device
            room[problem.device_pool[device]] -= loads[group]
    return placed


def arrival(problem, placed, op, device):
    """When the last input is there, and the overhead of all that are sent."""
    ready = overhead = 0
    for t in problem.graph.op_inputs[op]:
        tensor = problem.graph.tensors[t]
        src, _, end = placed[tensor.producer]
        link = problem.cluster.links[src][device]
        if src == device:
            ready = max(ready, end)
        elif link is None:
            return None
        elif problem.device_pool[src] == problem.device_pool[device]:
            ready = max(ready, end + link.latency_ns)
        else:
            ready = max(ready, end + link.transfer_ns(tensor.nbytes))
            overhead += link.overhead_ns
    return ready, overhead


def first_gap(busy, ready, duration):
    """The earliest start at or after `ready` that lies in a gap of that length."""
    gaps = pairwise([0, *(time for span in busy for time in span), math.inf])
    for begin, end in list(gaps)[::2]:
        start = max(ready, begin)
        # Two ops without a break between them leave a gap for nothing.
        real = begin < end or begin == 0
        if real and start + duration <= end:
            return start
    raise AssertionError("the last gap is endless")


def assert_inserted_agrees(graph, cluster):
    problem = Problem(graph, cluster)
    ranks = _core.upward_ranks(problem.core)
    for loads in group_loads(problem):
        timeline = problem.timeline()
        args = (np.array(row, np.int64) for row in (ranks, [], loads))
        done = timeline.insertion_schedule(*args)
        placed = plain_insertion(problem, ranks, loads)
        if placed is None:
            assert not done
        elif done:
            devices = {op: device for op, device, _, _ in spans(timeline)}
            assert devices == {op: row[0] for op, row in placed.items()}
            starts = [placed[op][1] for op, _, _, _ in spans(timeline)]
            assert starts == sorted(starts)
            if cluster.ports == "none" and not any(d.pool or d.host for d in cluster.devices):
                # Nothing but a copy that is there already makes the clock differ from the model.
                assert all(start <= placed[op][1] for op, _, start, _ in spans(timeline))


@given(graphs(max_ops=10), clusters())
def test_the_inserted_schedule_agrees_with_a_plain_one(graph, cluster):
    assert_inserted_agrees(graph, cluster)


@pytest.mark.parametrize("seed", seeds(100))
def test_the_inserted_schedule_agrees_where_memory_is_tight(seed):
    assert_inserted_agrees(*tight(seed))


def test_a_gap_is_filled():
    # The long op waits on device 0 for a slow input; the short one, of a lower rank, goes before.
    ops = (Op("a", 10, group="x"), Op("b", 30, group="y"), Op("c", 50, group="x"), Op("s", 20))
    tensors = (Tensor(0, (2,), 0), Tensor(1, (2,), 40))
    devices = [Device("d0", 100), Device("d1", 100)]
    graph = OpGraph(ops, tensors)
    cluster = Cluster.connected(devices, Link(0, 10**9))
    problem = Problem(graph, cluster)
    timeline = problem.timeline()
    ranks = np.array(_core.upward_ranks(problem.core), np.int64)
    empty, free = np.empty(0, np.int64), np.zeros(3, np.int64)
    assert timeline.insertion_schedule(ranks, empty, free)
    assert spans(timeline) == [(1, 0, 0, 30), (0, 1, 0, 10), (3, 1, 10, 30), (2, 1, 70, 120)]


def test_memory_waits_until_it_is_freed():
    # The second wide op has no room while the first one's output is there; its reader comes first.
    ops = (Op("wide", 10), Op("wide2", 10), Op("reader", 10))
    tensors = (Tensor(0, (2,), 60), Tensor(1, (), 60))
    problem = Problem(OpGraph(ops, tensors), Cluster.uniform(1, 100, Link(0, 10**9)))
    timeline = problem.timeline()
    ranks = np.array([3, 2, 1], np.int64)
    assert timeline.ranked_schedule(ranks, np.empty(0, np.int64))
    assert [op for op, _, _, _ in spans(timeline)] == [0, 2, 1]


def test_loads_are_one_where_memory_is_ample():
    graph = OpGraph((Op("a", 1, 10), Op("b", 1, 10)), (Tensor(0, (1,), 8),))
    assert group_loads(Problem(graph, Cluster.uniform(2, 100, Link(0, 1)))) == (
        (10, 10),
        (12, 10),
        (18, 10),
    )
    assert distinct_loads(Problem(graph, Cluster.uniform(2, 28, Link(0, 1)))) == ((18, 10),)
    assert len(distinct_loads(Problem(graph, Cluster.uniform(2, 27, Link(0, 1))))) == 3


@pytest.mark.parametrize("name", ["heft", "peft"])
@pytest.mark.parametrize("n", [0, 1])
def test_a_graph_without_ops_and_one_with_a_single_op(name, n):
    graph = OpGraph(tuple(Op(f"o{i}", 5) for i in range(n)))
    placement = solve(graph, Cluster.uniform(1, 10, Link(0, 1)), name)
    assert placement.stats["makespan_ns"] == 5 * n
