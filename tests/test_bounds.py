"""Lower bounds: below everything that brute force finds, and equal to it where they should be."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings

from baechi import Cluster, Device, InputError, Link, Op, OpGraph, Placement, Tensor, simulate
from baechi.bounds import lower_bound_ns, parts
from baechi.problem import Problem
from baechi.simulation import overflows
from strategies import clusters, graphs

LINK = Link(10, 10**9)


def every_placement(graph, cluster):
    """Every device for every op, in every topological order."""
    ops = range(len(graph.ops))
    edges = [(t.producer, c) for t in graph.tensors for c in t.consumers]
    for order in itertools.permutations(ops):
        if all(order.index(u) < order.index(v) for u, v in edges):
            for devices in itertools.product(range(len(cluster.devices)), repeat=len(ops)):
                yield Placement(graph.digest, devices, order)


@settings(max_examples=60, deadline=None)
@given(graphs(max_ops=4), clusters(max_devices=2))
def test_no_valid_schedule_is_shorter(graph, cluster):
    bound = lower_bound_ns(Problem(graph, cluster))
    for placement in every_placement(graph, cluster):
        try:
            schedule = simulate(graph, cluster, placement)
        except InputError:
            continue
        if not overflows(schedule, cluster):
            assert schedule.makespan_ns >= bound


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
        # Of five equal ops one device gets three.
        (OpGraph(tuple(Op(f"o{i}", 5) for i in range(5))), uniform(2), 15),
        # A group runs on one device.
        (OpGraph(tuple(Op(f"o{i}", 5, group="g") for i in range(4))), uniform(4), 20),
        # ... between what comes before it and what comes after.
        (
            OpGraph(
                (Op("a", 3), Op("b", 5, group="g"), Op("c", 5, group="g"), Op("d", 2)),
                (Tensor(0, (1, 2), 0), Tensor(1, (3,), 0), Tensor(2, (3,), 0)),
            ),
            uniform(4),
            15,
        ),
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
def test_worked_examples(graph, cluster, bound):
    assert lower_bound_ns(Problem(graph, cluster)) == bound


@settings(max_examples=200, deadline=None)
@given(graphs(kinds=False), clusters(max_devices=3))
def test_twice_as_long_and_as_large_doubles_the_paths(graph, cluster):
    """At 1 byte per ns nothing is rounded."""
    assume(all(d.speed == 1.0 for d in cluster.devices))
    at_1 = [[link and Link(link.latency_ns, 10**9) for link in row] for row in cluster.links]
    at_2 = [[link and Link(2 * link.latency_ns, 10**9) for link in row] for row in cluster.links]
    doubled = OpGraph(
        tuple(
            Op(o.name, 2 * o.time_ns, 2 * o.persistent_bytes, 2 * o.workspace_bytes, o.group)
            for o in graph.ops
        ),
        tuple(Tensor(t.producer, t.consumers, 2 * t.nbytes, t.kept) for t in graph.tensors),
    )
    larger = tuple(replace(d, memory_bytes=2 * d.memory_bytes) for d in cluster.devices)
    once = parts(Problem(graph, replace(cluster, links=at_1)))
    twice = parts(Problem(doubled, replace(cluster, devices=larger, links=at_2)))
    assert (twice["path"], twice["group"]) == (2 * once["path"], 2 * once["group"])
