"""What a running job moves from one decision to the next."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import graphs, snapshots

import baechi
from baechi import Cluster, Constraints, Device, Link, Op, OpGraph, Tensor, Topology
from baechi.scheduling.claims import Wish
from baechi.scheduling.decision import Decision, explore
from baechi.scheduling.migration import Move, migration, staying
from baechi.scheduling.snapshot import Site, Snapshot

LINK = Link(10, 10**9)
# Two groups of 300 and 500 bytes, of which the backward makes 100 anew, and 7 by themselves.
GRAPH = OpGraph(
    (
        Op("a", 100, persistent_bytes=300, group="A"),
        Op("b", 100, persistent_bytes=500, group="B"),
        Op("c", 100, persistent_bytes=7),
        Op("loss", 0, phase="loss"),
        Op(
            "db", 100, persistent_bytes=0, late_bytes=100, group="B", phase="backward", forward=(1,)
        ),
        Op("da", 100, group="A", phase="backward", forward=(0,)),
    ),
    tuple(Tensor(i, (i + 1,), 1) for i in range(5)),
)


def snapshot(n=4, memory=1000, links=None, ports="duplex", **changes):
    devices = tuple(Device(f"d{i}", memory, **changes) for i in range(n))
    table = links or tuple((LINK,) * n for _ in range(n))
    return Snapshot(Site.of(Cluster(devices, table, ports)))


def decision(free, names, devices):
    """A decision for these devices of a snapshot, with an op on each by its index among them."""
    rows = [room for room in free.rooms() if room.device.name in names]
    cluster = free.part(rows)
    placement = baechi.Placement(GRAPH.digest, devices, tuple(range(len(devices))))
    schedule = baechi.simulate(GRAPH, cluster, placement)
    shares = (1000,) * len(rows)
    peaks = schedule.peak_bytes
    return Decision(cluster, placement, schedule.makespan_ns, peaks, shares, free.version)


def test_what_changes_its_device_moves_without_gradients():
    free = snapshot()
    before = decision(free, ("d0", "d1"), (0, 1, 1, 1, 1, 0))
    after = decision(free, ("d0", "d2"), (0, 1, 0, 0, 1, 0))
    found = migration(GRAPH, before, after, free)
    assert found.moves == (Move("B", "d1", "d2", 400), Move("c", "d1", "d0", 7))
    assert found.nbytes == 407
    assert found.time_ns == (10 + 400) + (10 + 7)  # d1 sends both, one after the other
    assert migration(GRAPH, before, before, free).moves == ()
    assert [found.worth_after(gain) for gain in (0, 427, 428)] == [None, 2, 1]


@pytest.mark.parametrize(("ports", "ns"), [("duplex", 410), ("shared", 720), ("none", 410)])
def test_transfers_of_a_port_wait_for_each_other(ports, ns):
    free = snapshot(ports=ports)
    before = decision(free, ("d0", "d1"), (0, 1, 1, 1, 1, 0))
    after = decision(free, ("d0", "d1"), (1, 0, 1, 1, 0, 1))
    assert migration(GRAPH, before, after, free).time_ns == ns


def test_a_checkpoint_has_what_was_on_a_device_that_is_gone_or_has_no_path():
    row = (LINK, None, LINK, LINK)
    free = snapshot(links=(row, *((LINK,) * 4 for _ in range(3))))
    before = decision(free, ("d2", "d3"), (0, 1, 1, 1, 1, 0))
    after = decision(free, ("d1", "d3"), (0, 1, 1, 1, 1, 0))
    assert migration(GRAPH, before, after, free).moves == (Move("A", "d2", "d1", 300),)
    gone = migration(GRAPH, before, after, free, gone=["d2"])
    assert gone.moves == (Move("A", "", "d1", 300),)
    assert gone.time_ns == 0
    before = decision(free, ("d0", "d3"), (0, 1, 1, 1, 1, 0))
    assert migration(GRAPH, before, after, free).moves == (Move("A", "", "d1", 300),)
    smaller = Snapshot(Site.of(Cluster.uniform(2, 1000, LINK)))  # in which there is no d3
    names = [device.name for device in smaller.site.base.devices]
    here = replace(after, cluster=smaller.site.base)
    assert [row.source for row in migration(GRAPH, before, here, smaller).moves] == ["", "", ""]
    assert {row.target for row in migration(GRAPH, before, here, smaller).moves} == {*names}


def test_a_job_stays_on_equal_devices():
    free = snapshot()
    before = decision(free, ("d2", "d3"), (1, 0, 0, 0, 0, 1))
    after = decision(free, ("d0", "d1"), (0, 1, 1, 1, 1, 0))
    assert migration(GRAPH, before, after, free).nbytes == 707
    found = staying(GRAPH, before, after, free)
    assert found == before
    exchanged = decision(free, ("d2", "d3"), (0, 1, 1, 1, 1, 0))
    assert staying(GRAPH, before, exchanged, free) == before
    # Not where it may not be, where it would not fit, or where its step would be longer.
    wish = Wish(constraints=Constraints(excluded=("d2",)))
    assert staying(GRAPH, before, after, free, wish) == after
    less = Constraints(margins={"d3": "900"})
    assert staying(GRAPH, before, after, free, Wish(constraints=less)) == after
    slow = Snapshot(
        Site.of(
            replace(free.site.base, devices=(*free.site.base.devices[:3], Device("d3", 1000, 0.5)))
        )
    )
    assert staying(GRAPH, before, after, slow) == after


def test_a_job_that_wants_one_node_does_not_stay_on_two():
    devices = snapshot().site.base.devices
    nodes = ("left", "left", "right", "right")
    free = Snapshot(Site.of(Topology(devices, nodes, ("switch",) * 4, LINK, LINK)))
    before = decision(free, ("d1", "d2"), (0, 1, 1, 1, 1, 0))
    after = decision(free, ("d0", "d1"), (0, 1, 1, 1, 1, 0))
    assert staying(GRAPH, before, after, free) == before
    found = staying(GRAPH, before, after, free, Wish(same="node"))
    assert found.devices == after.devices  # exchanged: of the two 407 bytes were on neither
    assert migration(GRAPH, before, found, free).nbytes == 407


@given(st.data())
def test_moves_are_what_differs_and_staying_moves_no_more(data):
    graph = data.draw(graphs(min_ops=1))
    free = data.draw(snapshots(graph))
    base = free.site.base  # mostly with memory enough
    roomy = tuple(replace(row, memory_bytes=row.memory_bytes + 500) for row in base.devices)
    free = replace(free, site=replace(free.site, base=replace(base, devices=roomy)))
    found = []
    for _ in range(2):
        out = data.draw(st.sets(st.sampled_from([device.name for device in roomy])))
        rows = explore(graph, free, Wish(constraints=Constraints(excluded=tuple(sorted(out)))))
        found += rows[-1:]
    assume(len(found) == 2)
    before, after = found
    plan = migration(graph, before, after, free)
    held = Counter()
    for op in graph.ops:
        held[op.group or op.name] += op.persistent_bytes - op.late_bytes
    homes = [
        {
            op.group or op.name: row.devices[at]
            for op, at in zip(graph.ops, row.placement.devices, strict=True)
        }
        for row in found
    ]
    moved = {name for name, n in held.items() if n and homes[0][name] != homes[1][name]}
    assert {move.subject: move.nbytes for move in plan.moves} == {
        name: held[name] for name in moved
    }
    assert all(move.target == homes[1][move.subject] for move in plan.moves)
    other = staying(graph, before, after, free)
    assert other.step_ns <= after.step_ns
    assert migration(graph, before, other, free).nbytes <= plan.nbytes
    schedule = baechi.simulate(graph, other.cluster, other.placement)
    assert (schedule.makespan_ns, schedule.peak_bytes) == (other.step_ns, other.peak_bytes)
    rooms = {room.device.name: room.device.memory_bytes for room in free.rooms()}
    assert all(claim.memory_bytes <= rooms[claim.device] for claim in other.claims())
    assert staying(graph, before, before, free) == before
