"""Lanes of one GPU: what operators take from each other, in the clock, the bounds, and `solve`."""

import itertools
import random
from dataclasses import replace

import pytest
from oracle import Oracle
from seeds import seeds

import baechi
from baechi import Cluster, Constraints, Device, Link, Op, OpGraph, Placement, Tensor
from baechi.placers.auto import Auto
from baechi.placers.searching import PLACERS
from baechi.problem.problem_arrays import Problem
from baechi.problem.simulation import Timeline
from baechi.records.cluster import lane_kind, lanes_of
from baechi.storage.serialization import dumps, loads

LINK = Link(1, 10**12)


def lanes(n: int, gpus: int = 1, **fields: object) -> Cluster:
    """So many lanes of every GPU."""
    devices = [
        Device(f"cuda:{gpu}/{lane}", 10**6, kind="gpu", lane_of=f"cuda:{gpu}", **fields)
        for gpu in range(gpus)
        for lane in "abcd"[:n]
    ]
    return Cluster.connected(devices, LINK)


def towers(share: float | None, lanes: int = 2) -> OpGraph:
    """Two operators of 10 ns side by side, each of which takes a share of the GPU."""
    ops = tuple(
        Op(name, time_ns) for name, time_ns in (("in", 2), ("a", 10), ("b", 10), ("out", 2))
    )
    tensors = (Tensor(0, (1, 2), 1), Tensor(1, (3,), 1), Tensor(2, (3,), 1), Tensor(3, (), 1, True))
    times = {"gpu": (2, 10, 10, 2)}
    if share is not None:
        both = round(10 * max(1, lanes * share))
        times[lane_kind("gpu", lanes)] = (2, both, both, 2)
    return OpGraph(ops, tensors, times)


@pytest.mark.parametrize(
    ("share", "split", "step_ns"),
    [
        (None, True, 16),  # 2 + 10 + 2, and a hand-over of 2: nothing is known of shares
        (0.5, True, 16),  # both fill the GPU together
        (0.6, True, 18),  # side by side they take 1.2 times as long
        (0.8, True, 22),
        (0.9, False, 24),  # as one after the other: 2 + 18 + 2 + 2 on two lanes
        (1.0, False, 24),
    ],
)
def test_two_lanes_pay_as_far_as_shares_leave_room(share, split, step_ns) -> None:
    graph, cluster = towers(share), lanes(2)
    for effort in ("fast", "balanced"):
        placement = baechi.solve(graph, cluster, effort=effort)
        assert (len(set(placement.devices)) > 1) == split
        schedule = baechi.simulate(graph, cluster, placement)
        assert schedule.makespan_ns == placement.stats["makespan_ns"] == step_ns
        assert schedule.lower_bound_ns <= step_ns


def test_lanes_that_a_placement_leaves_idle_slow_no_other_down() -> None:
    """On three lanes of which two are in use, and on one of three."""
    graph = towers(1.0, 3)
    assert graph.times[lane_kind("gpu", 3)] == (2, 30, 30, 2)
    three, order = lanes(3), (0, 1, 2, 3)
    one = Placement(graph.digest, (1, 1, 1, 1), order)
    two = Placement(graph.digest, (0, 0, 1, 0), order)
    assert baechi.simulate(graph, three, one).makespan_ns == 24
    # For two lanes there are no times: those of three are as long, or longer.
    assert baechi.simulate(graph, three, two).makespan_ns == 2 + 2 + 30 + 2 + 2
    times = {**graph.times, lane_kind("gpu", 2): (2, 20, 20, 2)}
    known = replace(graph, times=times)
    two = replace(two, graph_digest=known.digest)
    assert baechi.simulate(known, three, two).makespan_ns == 2 + 2 + 20 + 2 + 2
    # What is excluded is not in use either.
    some = Timeline(known, three, Constraints(excluded=("cuda:0/c",)))
    assert [some.commit(0, 0).end_ns, some.commit(1, 1).end_ns] == [2, 24]


def test_one_lane_of_each_gpu_is_a_candidate() -> None:
    """Of operators that fill a GPU each, two GPUs take half the time, and four lanes do not."""
    for seed in seeds(6):
        draw = random.Random(seed)
        ops = tuple(Op(f"op{i}", 100 + draw.randrange(50)) for i in range(8))
        times = {"gpu": tuple(op.time_ns for op in ops)}
        times[lane_kind("gpu", 2)] = tuple(2 * op.time_ns for op in ops)
        graph = OpGraph(ops, (), times)
        alone = baechi.solve(graph, lanes(1, gpus=2))
        placement = baechi.solve(graph, lanes(2, gpus=2))
        assert placement.stats["makespan_ns"] <= alone.stats["makespan_ns"]


def drawn(seed: int) -> tuple[OpGraph, Cluster, dict[str, tuple[int, ...]]]:
    """A graph and a cluster of lanes and others, and the work of every operator, in ns of a GPU."""
    draw = random.Random(seed)
    n = draw.randrange(3, 12)
    ops = tuple(
        Op(
            f"op{i}",
            draw.randrange(1, 40),
            draw.randrange(20),
            group=draw.choice([None] * 5 + ["g"]),
        )
        for i in range(n)
    )
    tensors = tuple(
        Tensor(i, tuple(sorted({draw.randrange(i + 1, n) for _ in range(draw.randrange(3))})), 9)
        for i in range(n - 1)
    )
    work = tuple(draw.randrange(op.time_ns + 1) for op in ops)
    alone = tuple(op.time_ns for op in ops)
    most = draw.randrange(2, 4)
    times = {
        lane_kind("gpu", k): tuple(max(t, k * w) for t, w in zip(alone, work, strict=True))
        for k in range(1, most + 1)
    }
    graph = OpGraph(ops, tensors, times)
    rows = lanes(most, gpus=draw.randrange(1, 3)).devices
    rows += (Device("other", 10**6, kind="other"),) * draw.randrange(2)
    return graph, Cluster.connected(rows, Link(draw.randrange(5), 10**9)), {"work": work}


def clocked_plainly(graph: OpGraph, cluster: Cluster, placement: Placement, work) -> Oracle:
    """By the clock in plain Python, with the rule as it is written: t * max(1, k * u)."""
    used = {cluster.devices[device].name for device in placement.devices}
    times = {}
    for row in cluster.devices:
        k = sum(row.lane_of == other.lane_of for other in cluster.devices if other.name in used)
        k = k if row.lane_of else 1
        times[row.name] = tuple(
            max(op.time_ns, k * w) for op, w in zip(graph.ops, work, strict=True)
        )
    devices = tuple(replace(row, kind=row.name, lane_of="") for row in cluster.devices)
    oracle = Oracle(replace(graph, times=times), replace(cluster, devices=devices))
    for op in placement.order:
        oracle.commit(op, placement.devices[op])
    return oracle


def test_every_placer_predicts_what_the_plain_clock_says() -> None:
    for seed in seeds(25):
        graph, cluster, known = drawn(seed)
        best = None
        for name, placer in PLACERS.items():
            placement = baechi.solve(graph, cluster, placer, effort="fast")
            schedule = baechi.simulate(graph, cluster, placement)
            oracle = clocked_plainly(graph, cluster, placement, known["work"])
            spans = {span.op: (span.device, span.start_ns, span.end_ns) for span in schedule.spans}
            assert spans == oracle.spans, (seed, name)
            assert placement.stats["makespan_ns"] == schedule.makespan_ns, (seed, name)
            assert schedule.lower_bound_ns <= schedule.makespan_ns, (seed, name)
            if name == "single":
                best = schedule.makespan_ns
        auto = baechi.solve(graph, cluster)
        assert auto.stats["makespan_ns"] <= best
        assert baechi.solve(graph, cluster) == auto


def test_no_schedule_is_below_the_bound() -> None:
    """Of all placements of few operators, in every order."""
    for seed in seeds(40):
        graph, cluster, _ = drawn(seed)
        n = min(4, len(graph.ops))
        ops = tuple(replace(op, group=None) for op in graph.ops[:n])
        times = {kind: row[:n] for kind, row in graph.times.items()}
        tensors = (
            replace(row, consumers=tuple(op for op in row.consumers if op < n))
            for row in graph.tensors
            if row.producer < n
        )
        small = OpGraph(ops, tuple(tensors), times)
        bound = None
        for devices in itertools.product(range(min(3, len(cluster.devices))), repeat=n):
            placement = Placement(small.digest, devices, tuple(range(n)))
            schedule = baechi.simulate(small, cluster, placement)
            bound = schedule.lower_bound_ns if bound is None else bound
            assert bound <= schedule.makespan_ns


def test_what_knows_no_shares_is_as_before_in_every_byte() -> None:
    """Lanes without times for them, and times for lanes without any."""
    for seed in seeds(10):
        graph, cluster, _ = drawn(seed)
        plain = replace(graph, times={"gpu": graph.times["gpu"]})
        bare = tuple(replace(row, lane_of="") for row in cluster.devices)
        apart = replace(cluster, devices=bare)
        for placer in (Auto(effort="fast"), "m-etf", "m-sct"):
            expected = baechi.solve(plain, apart, placer)
            assert baechi.solve(plain, cluster, placer) == expected
            other = baechi.solve(graph, apart, placer)
            assert (other.devices, other.order, other.stats) == (
                *(expected.devices, expected.order),
                expected.stats,
            )
    assert '"lane_of"' not in dumps(apart)
    assert '"lane_of"' in dumps(cluster)
    assert loads(dumps(cluster)) == cluster


def test_the_steps_of_micro_batches_are_of_lanes_in_use() -> None:
    for seed in seeds(8):
        graph, cluster, _ = drawn(seed)
        placement = baechi.solve(graph, cluster, microbatches=3, effort="fast")
        schedule = baechi.simulate(graph, cluster, placement)
        assert placement.stats["makespan_ns"] == schedule.makespan_ns
        one = baechi.solve(graph, cluster, "single").stats["makespan_ns"]
        assert schedule.makespan_ns <= 3 * one


def test_a_kind_of_lanes_is_read_as_it_is_written() -> None:
    assert lanes_of(lane_kind("H100", 4)) == ("H100", 4)
    assert lanes_of("H100") == lanes_of(lane_kind("H100", 1)) == ("H100", 1)
    assert Problem(towers(0.5), lanes(2)).lanes == (2, 2)
