"""Lower bounds: below everything that brute force finds, and equal to it where they should be."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from seeds import seeds
from strategies import clusters, dense, graphs, launched, placements, tight

from baechi import (
    METF,
    Cluster,
    Constraints,
    Device,
    InputError,
    Link,
    MTopo,
    Op,
    OpGraph,
    Placement,
    Tensor,
    simulate,
)
from baechi.placers.local_search import FAST, improved
from baechi.placers.memory_packing import Packing
from baechi.placers.searching import find
from baechi.problem.bounds import lower_bound_ns, parts
from baechi.problem.problem_arrays import Problem
from baechi.problem.simulation import overflows

LINK = Link(10, 10**9)


def every_placement(graph, cluster):
    """Every device for every op, in every topological order."""
    ops = range(len(graph.ops))
    edges = [(t.producer, c) for t in graph.tensors for c in t.consumers]
    for order in itertools.permutations(ops):
        if all(order.index(u) < order.index(v) for u, v in edges):
            for devices in itertools.product(range(len(cluster.devices)), repeat=len(ops)):
                yield Placement(graph.digest, devices, order)


@given(graphs(max_ops=4, parted=True), clusters(max_devices=2))
def test_no_valid_schedule_is_shorter(graph, cluster):
    bound = lower_bound_ns(Problem(graph, cluster))
    for placement in every_placement(graph, cluster):
        try:
            schedule = simulate(graph, cluster, placement)
        except InputError:
            continue
        if not overflows(schedule, cluster):
            assert schedule.makespan_ns >= bound


@given(st.data(), graphs(parted=True), clusters())
def test_no_part_passes_a_valid_schedule(data, graph, cluster):
    check(graph, cluster, data.draw(placements(graph, cluster)))


@pytest.mark.parametrize("factor", [1, 10])
@pytest.mark.parametrize("family", [tight, dense, launched])
def test_no_part_passes_what_a_placer_finds(family, factor):
    checked = 0
    count = seeds(150)
    for seed in count:
        graph, cluster = family(seed)
        rows = tuple(
            tuple(link and Link(link.latency_ns, link.bytes_per_s // factor) for link in row)
            for row in cluster.links
        )
        dear = replace(cluster, links=rows)
        for placer in (METF(), MTopo(), Packing()):
            placement = placer.place(Problem(graph, dear))
            checked += placement is not None and check(graph, dear, placement)
    assert 2 * checked > len(count)


def check(graph, cluster, placement):
    """Asserts that each part holds; whether the placement is valid, so that they must."""
    try:
        schedule = simulate(graph, cluster, placement)
    except InputError:
        return False
    if overflows(schedule, cluster):
        return False
    bounds = parts(Problem(graph, cluster))
    assert {n: ns for n, ns in bounds.items() if ns > schedule.makespan_ns} == {}
    assert schedule.lower_bound_ns == max(bounds.values())
    return True


@given(st.data(), graphs(parted=True), clusters(max_devices=3))
def test_renaming_and_permuting_devices_changes_no_path(data, graph, cluster):
    n = len(cluster.devices)
    order = data.draw(st.permutations(range(n)))
    devices = tuple(replace(cluster.devices[d], name=f"new{d}") for d in order)
    links = tuple(tuple(cluster.links[a][b] for b in order) for a in order)
    permuted = replace(cluster, devices=devices, links=links)
    # Of equally near devices the first sets the times between which work is added up.
    before, after = (parts(Problem(graph, c))["path"] for c in (cluster, permuted))
    assert before == after


@given(st.data(), graphs(grouped=False), clusters(max_devices=3, whole=True))
def test_the_bound_of_pinned_ops_passes_no_schedule_of_them(data, graph, cluster):
    placement = data.draw(placements(graph, cluster))
    names = [device.name for device in cluster.devices]
    pinned = data.draw(st.sets(st.sampled_from(range(len(graph.ops))))) if graph.ops else ()
    limits = Constraints(pins={graph.ops[op].name: names[placement.devices[op]] for op in pinned})
    schedule = simulate(graph, cluster, placement, limits)
    bound = parts(Problem(graph, cluster, limits)).get("pinned", 0)
    if not overflows(schedule, cluster):
        assert bound <= schedule.makespan_ns


def test_the_bound_of_pinned_ops_is_work_between_what_comes_before_and_after():
    """b and c are on the second device, after a and its transfer, and before d on the first."""
    graph = OpGraph(
        (Op("a", 5), Op("b", 3), Op("c", 4), Op("d", 6)),
        (Tensor(0, (1, 2), 20), Tensor(1, (3,), 0), Tensor(2, (3,), 0)),
    )
    rows = {"a": "device0", "b": "device1", "c": "device1", "d": "device0"}
    bounds = parts(Problem(graph, uniform(2), Constraints(pins=rows)))
    assert bounds["pinned"] == 5 + (10 + 20) + (3 + 4) + 10 + 6
    assert "pinned" not in parts(Problem(graph, uniform(2)))


def uniform(n, memory=100):
    return Cluster.uniform(n, memory, LINK)


@pytest.mark.parametrize(
    ("graph", "cluster", "bound"),
    [
        (OpGraph(()), uniform(2), 0),
        # The longest path.
        (OpGraph((Op("a", 5), Op("b", 7)), (Tensor(0, (1,), 9),)), uniform(2), 12),
        # The work shared out, rounded up: 14 of 27 on one of two devices.
        (OpGraph(tuple(Op(f"o{i}", 1) for i in range(27))), uniform(2), 14),
        # A group runs on one device.
        (OpGraph(tuple(Op(f"o{i}", 5, group="g") for i in range(4))), uniform(4), 20),
        # The fast device could do it in 5, but has no memory for it.
        (
            OpGraph((Op("a", 10, 50),)),
            Cluster.connected([Device("fast", 49, 2.0), Device("slow", 50)], LINK),
            10,
        ),
        # 60 of work on speeds 3 and 1 is 15 each; equal weights alone would say 10.
        (
            OpGraph(tuple(Op(f"o{i}", 12) for i in range(5))),
            Cluster.connected([Device("fast", 50, 3.0), Device("slow", 50)], LINK),
            15,
        ),
    ],
)
def test_worked_examples_without_transfers(graph, cluster, bound):
    assert lower_bound_ns(Problem(graph, cluster)) == bound


# A fork of two ops of 50 and their join; a byte takes a nanosecond, and 10 more for each transfer.
FORK = (Op("a", 10), Op("b", 50), Op("c", 50), Op("d", 10))
# What is dear to send joins ops that are no ancestors of each other: a -> c <- b -> d.
ZIGZAG = OpGraph(
    tuple(Op(f"o{i}", 50) for i in range(4)), (Tensor(0, (2,), 0), Tensor(1, (2, 3), 0))
)


def forked(nbytes):
    return OpGraph(
        FORK, tuple(Tensor(*edge, nbytes) for edge in [(0, (1, 2)), (1, (3,)), (2, (3,))])
    )


HELD = (Op("a", 5, 60), Op("b", 7, 60))
PAIR = OpGraph(HELD, (Tensor(0, (1,), 9),))
POOL = [Device("s0", 200, pool="gpu"), Device("s1", 200, pool="gpu")]


@pytest.mark.parametrize(
    ("graph", "cluster", "name", "bound"),
    [
        # Together they are too large for a device, so that 9 bytes must travel.
        (PAIR, uniform(2), "path", 5 + 19 + 7),
        # They could share one device: then none need to.
        (PAIR, uniform(2, 200), "path", 12),
        # A chain over three devices at least pays two transfers.
        (
            OpGraph(
                tuple(Op(f"o{i}", 5, 60) for i in range(3)),
                (Tensor(0, (1,), 0), Tensor(1, (2,), 0)),
            ),
            uniform(3),
            "path",
            5 + 10 + 5 + 10 + 5,
        ),
        # Either branch may be away from the join, but then it sends for 10 ...
        (forked(0), uniform(2), "path", 10 + 50 + 10 + 10),
        # ... but not if that takes longer than one after the other.
        (forked(1000), uniform(2, 10**6), "path", 120),
        # The only link goes one way, so that the reader must be behind it.
        (
            OpGraph((Op("a", 5, 100), Op("b", 5, 100)), (Tensor(0, (1,), 50),)),
            Cluster(
                (Device("x", 180), Device("y", 180)), ((None, LINK), (None, None))
            ),
            "path",
            5 + 60 + 5,
        ),
        # Streams of one pool hand over for the latency, and here need not even that.
        (PAIR, Cluster.connected(POOL, LINK), "path", 12),
        # Between the 4 before and the 4 after, two devices have 3 * 5 to do.
        (
            OpGraph(
                (Op("a", 4), Op("b", 5), Op("c", 5), Op("d", 5), Op("e", 4)),
                (Tensor(0, (1, 2, 3), 0), Tensor(1, (4,), 0), Tensor(2, (4,), 0),
                 Tensor(3, (4,), 0)),
            ),
            Cluster.uniform(2, 100, Link(0, 10**9)),
            "work",
            4 + 8 + 4,
        ),
        # A schedule shorter than 4 * 50 has no time to send anything, and then runs all on one.
        (ZIGZAG, Cluster.uniform(2, 100, Link(500, 10**9)), "path", 150),
        (ZIGZAG, Cluster.uniform(2, 100, Link(500, 10**9)), "guess", 200),
    ],
)  # fmt: skip
def test_worked_examples(graph, cluster, name, bound):
    assert parts(Problem(graph, cluster))[name] == bound


@pytest.mark.parametrize(
    ("hosts", "ahead", "max_devices", "bound"),
    [
        ("hh", True, None, 60),  # one host launches everything
        ("hi", True, None, 30),  # two share it
        ("hi", True, 1, 60),  # but only one may be used
        ("h-", True, None, 0),  # all may go where no host is needed
        ("hh", False, None, 15),  # a launch that is part of its op is no longer than it
    ],
)
def test_hosts_have_to_launch_everything(hosts, ahead, max_devices, bound):
    graph = OpGraph(tuple(Op(f"o{i}", 5, launch_ns=20) for i in range(3)))
    rows = [
        Device(f"d{i}", 9, host=host.strip("-"), launches_ahead=ahead)
        for i, host in enumerate(hosts)
    ]
    problem = Problem(graph, Cluster.connected(rows, LINK), Constraints(max_devices=max_devices))
    assert parts(problem)["host"] == bound


def test_a_group_that_no_device_can_hold_together_leaves_a_bound():
    """What no schedule can do is no length: a search would have it as its target."""
    graph = OpGraph(
        (
            Op("a", 5, persistent_bytes=20),
            Op("b", 5, persistent_bytes=10),
            Op("c", 5, group="g"),
            Op("d", 5, group="g"),
        ),
        (Tensor(0, (2,), 1), Tensor(1, (3,), 1)),
    )
    cluster = Cluster((Device("large", 25), Device("small", 12)), ((None, None), (None, None)))
    problem = Problem(graph, cluster, Constraints(pins={"b": "small"}))
    assert parts(problem)["path"] == 10
    assert lower_bound_ns(problem) == 10
    assert find(problem) is None
    assert improved(problem, [], FAST) is None


def test_more_equal_devices_than_ops_change_nothing():
    graph = dense(3)[0]
    few, many = (parts(Problem(graph, uniform(n, 10**6))) for n in (30, 1024))
    assert few == many


@given(graphs(kinds=False), clusters(max_devices=3))
def test_twice_as_long_and_as_large_doubles_the_paths(graph, cluster):
    """At 1 byte per ns nothing is rounded."""
    cluster = replace(cluster, devices=tuple(replace(d, speed=1.0) for d in cluster.devices))
    at_1 = [[link and Link(link.latency_ns, 10**9) for link in row] for row in cluster.links]
    at_2 = [[link and Link(2 * link.latency_ns, 10**9) for link in row] for row in cluster.links]
    doubled = OpGraph(
        tuple(
            replace(
                o,
                time_ns=2 * o.time_ns,
                persistent_bytes=2 * o.persistent_bytes,
                workspace_bytes=2 * o.workspace_bytes,
                reused_bytes=2 * o.reused_bytes,
            )
            for o in graph.ops
        ),
        tuple(Tensor(t.producer, t.consumers, 2 * t.nbytes, t.kept) for t in graph.tensors),
    )
    larger = tuple(replace(d, memory_bytes=2 * d.memory_bytes) for d in cluster.devices)
    once = parts(Problem(graph, replace(cluster, links=at_1)))
    twice = parts(Problem(doubled, replace(cluster, devices=larger, links=at_2)))
    assert twice["path"] == 2 * once["path"]


@pytest.mark.parametrize("memory", [2**62, 2**63 - 1])
def test_memories_whose_sum_passes_64_bits_are_as_good_as_ample(memory):
    graph = OpGraph(tuple(Op(f"o{i}", 10, 10) for i in range(20)))

    def bounds(nbytes):
        devices = [Device(f"d{i}", nbytes, speed) for i, speed in enumerate((1.0, 1.0, 2.0, 2.0))]
        return parts(Problem(graph, Cluster.connected(devices, LINK)))

    assert bounds(memory) == bounds(2**40)


def test_a_link_of_the_highest_rate_takes_its_nanosecond():
    graph = OpGraph((Op("a", 5), Op("b", 5)), (Tensor(0, (1,), 8_000_000_000),))
    cluster = Cluster.uniform(2, 2**40, Link(0, 2**63 - 1))
    apart = Constraints(pins={"a": "device0", "b": "device1"})
    placed = Placement(graph.digest, (0, 1), (0, 1))
    assert simulate(graph, cluster, placed, apart).makespan_ns == 11
    assert lower_bound_ns(Problem(graph, cluster, apart)) == 11
