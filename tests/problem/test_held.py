"""Bytes that groups surely hold: what they add to the bounds, and that they never add too much."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import graphs, placements, tight

from baechi import (
    Cluster,
    InfeasibleError,
    InputError,
    Link,
    Op,
    OpGraph,
    Placement,
    Tensor,
    _core,
    simulate,
    solve,
)
from baechi.placers.memory_packing import is_hopeless
from baechi.problem.bounds import lower_bound_ns, parts
from baechi.problem.problem_arrays import Problem

LINK = Link(10, 10**9)


def bound(graph, memory):
    return lower_bound_ns(Problem(graph, Cluster.uniform(2, memory, LINK)))


def alone(graph, memory):
    """The step on one device of two, and whether it fits there."""
    placement = Placement(graph.digest, (0,) * len(graph.ops), tuple(range(len(graph.ops))))
    schedule = simulate(graph, Cluster.uniform(2, memory, LINK), placement)
    return schedule.makespan_ns, max(schedule.peak_bytes) <= memory


# Two ops and their backwards, for which each saves 60 bytes.
SAVING = OpGraph(
    (Op("f", 5, group="f"), Op("g", 5, group="g"), Op("dg", 5, group="g"), Op("df", 5, group="f")),
    (Tensor(0, (1,), 9), Tensor(0, (3,), 60), Tensor(1, (2,), 60), Tensor(2, (3,), 0)),
)
# What both keep is there at the end of the step.
KEEPING = OpGraph(
    (Op("a", 5), Op("b", 7)), (Tensor(0, (1,), 9), Tensor(0, (), 60), Tensor(1, (), 60))
)
# What an op needs while it runs.
NEEDING = OpGraph((Op("a", 5, 60), Op("b", 7, 0, 60)), (Tensor(0, (1,), 9),))
# What comes while something else goes is there when the op has ended, and so never within the step.
REUSING = OpGraph(
    (Op("a", 5, 60), Op("b", 7, reused_bytes=60)), (Tensor(0, (1,), 9), Tensor(1, (), 60))
)
# Both groups have the one tensor before and after.
SHARING = OpGraph(SAVING.ops, (Tensor(0, (1, 2, 3), 60), Tensor(1, (2,), 0), Tensor(2, (3,), 0)))


@pytest.mark.parametrize(
    ("graph", "needed", "together", "apart"),
    [
        (SAVING, 129, 20, 5 + 19 + 5 + 5 + 10 + 5),
        (KEEPING, 129, 12, 5 + 19 + 7),
        (NEEDING, 129, 12, 5 + 19 + 7),
    ],
)
def test_what_one_device_has_no_room_for_is_sent(graph, needed, together, apart):
    assert alone(graph, needed) == (together, True)
    assert alone(graph, needed - 1) == (together, False)
    assert bound(graph, needed) == together
    # Of what is read alone, 9 bytes, nothing is known.
    assert bound(graph, 119) == apart


@pytest.mark.parametrize(("graph", "needed", "together"), [(REUSING, 69, 12), (SHARING, 60, 20)])
def test_what_is_there_once_is_counted_once(graph, needed, together):
    assert alone(graph, needed) == (together, True)
    assert bound(graph, needed) == together


def test_no_time_is_no_moment():
    instant = replace(NEEDING, ops=(NEEDING.ops[0], Op("b", 0, 0, 60)))
    assert alone(instant, 69) == (5, True)
    assert bound(instant, 69) == 5


def drawn(seed):
    """A graph of few groups, whose ops reuse, keep and are late, on devices with dear links."""
    graph, cluster = tight(seed)
    draw = random.Random(seed)
    groups = [None, *"abcde"[: draw.randrange(1, 6)]]
    made = [sum(graph.tensors[t].nbytes for t in row) for row in graph.op_outputs]
    ops = tuple(
        replace(
            op,
            group=draw.choice(groups),
            late_bytes=draw.choice([0, op.persistent_bytes]) if seed % 3 == 0 else 0,
            reused_bytes=draw.choice([0, 0, draw.randint(0, nbytes)]),
        )
        for op, nbytes in zip(graph.ops, made, strict=True)
    )
    dear = draw.choice([1, 10, 100])
    rows = tuple(
        tuple(link and Link(link.latency_ns * dear, link.bytes_per_s // dear) for link in row)
        for row in cluster.links
    )
    graph = OpGraph(ops, graph.tensors)
    devices = {}
    for op, row in enumerate(graph.ops):
        devices.setdefault(row.group or op, draw.randrange(len(cluster.devices)))
    places = tuple(devices[row.group or op] for op, row in enumerate(graph.ops))
    order = tuple(range(len(ops)))
    return graph, replace(cluster, links=rows), Placement(graph.digest, places, order)


@pytest.mark.unsanitized
def test_no_placement_that_just_fits_is_shorter_than_a_part():
    checked, reached = 0, 0
    for seed in range(500):
        graph, cluster, placement = drawn(seed)
        try:
            schedule = simulate(graph, cluster, placement)
        except InputError:  # no link
            continue
        devices = tuple(
            replace(device, memory_bytes=peak)
            for device, peak in zip(cluster.devices, schedule.peak_bytes, strict=True)
        )
        bounds = parts(Problem(graph, replace(cluster, devices=devices)))
        assert {n: ns for n, ns in bounds.items() if ns > schedule.makespan_ns} == {}, seed
        assert at_once(graph) <= sum(schedule.peak_bytes), seed
        checked += 1
        reached += max(bounds.values()) == schedule.makespan_ns
    assert checked > 300
    assert reached > 60


def at_once(graph):
    """What all devices together surely hold at one time."""
    problem = Problem(graph, Cluster.uniform(1, 2**40, LINK))
    whole = _core.regrouped(problem.core, np.zeros(problem.arrays.groups, np.int32))
    return _core.most_held(whole)


@given(st.data())
def test_no_placement_holds_less_than_what_is_surely_held_at_once(data):
    graph = data.draw(graphs(9, parted=True))
    cluster = Cluster.uniform(data.draw(st.integers(1, 3)), 2**40, LINK)
    schedule = simulate(graph, cluster, data.draw(placements(graph, cluster)))
    assert at_once(graph) <= sum(schedule.peak_bytes)


def test_what_is_surely_held_at_once_proves_that_nothing_fits():
    # Of three forward ops all saved tensors are there when the backward begins.
    rows = [(f"f{i}", f"g{i}") for i in range(3)] + [(f"b{i}", f"g{i}") for i in (2, 1, 0)]
    chain = [Tensor(op, (op + 1,), 0) for op in range(5)]
    saved = [Tensor(op, (5 - op,), 50) for op in range(3)]
    graph = OpGraph(
        tuple(Op(name, 5, group=group) for name, group in rows),
        tuple(sorted(chain + saved, key=lambda tensor: tensor.producer)),
    )
    assert at_once(graph) == 150
    assert is_hopeless(Problem(graph, Cluster.uniform(2, 74, LINK)))
    assert not is_hopeless(Problem(graph, Cluster.uniform(2, 75, LINK)))
    with pytest.raises(InfeasibleError, match="cannot place"):
        solve(graph, Cluster.uniform(2, 74, LINK))
