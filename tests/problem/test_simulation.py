"""`simulate`: what must hold for every schedule, recomputed from the schedule alone."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import clusters, graphs, placements

from baechi import (
    Cluster,
    Device,
    InfeasibleError,
    InputError,
    Link,
    Op,
    OpGraph,
    Placement,
    Tensor,
    simulate,
    solve,
)
from baechi.problem.simulation import overflows

LINK = Link(10, 10**9)


def overlap(intervals):
    rows = sorted(row for row in intervals if row[0] < row[1])
    return any(b[0] < a[1] for a, b in pairwise(rows))


def absent_bytes(schedule, pool_of, op, row):
    """Of its workspace what is held only beside ops that were launched before, elsewhere."""
    where = [(span.op, pool_of[span.device]) for span in schedule.spans]
    rank = [other for other, _ in where].index(op)
    elsewhere = {other for other, pool in where[:rank] if pool != where[rank][1]}
    return sum(nbytes for other, nbytes in row.beside if other in elsewhere)


def memory_at(graph, schedule, pool_of, pool, time):
    """Bytes in use in a pool at a time, from the spans and transfers alone."""
    spans = {span.op: span for span in schedule.spans}
    total = 0
    for op, row in enumerate(graph.ops):
        span = spans[op]
        if pool_of[span.device] == pool:
            total += row.persistent_bytes
            workspace = row.net_workspace_bytes - absent_bytes(schedule, pool_of, op, row)
            total += workspace * (span.start_ns <= time < span.end_ns)
    for t, tensor in enumerate(graph.tensors):
        made = spans[tensor.producer]
        sent = [row for row in schedule.transfers if row.tensor == t]
        begin = None
        if pool_of[made.device] == pool:
            begin, end = made.start_ns, max([made.end_ns, *(row.end_ns for row in sent)])
        for row in sent:
            if pool_of[row.dst] == pool:
                begin, end = row.start_ns, row.end_ns
        if begin is None:
            continue
        used = [spans[c].end_ns for c in tensor.consumers if pool_of[spans[c].device] == pool]
        end = max([end, *used])
        if pool_of[made.device] == pool and (tensor.kept or not tensor.consumers):
            end = schedule.makespan_ns
        nbytes = tensor.nbytes
        if pool_of[made.device] != pool and tensor.parts:
            there = {c for c in tensor.consumers if pool_of[spans[c].device] == pool}
            rows = [row for row in tensor.parts if there.intersection(row[1:])]
            if all(any(c in row[1:] for row in rows) for c in there):
                nbytes = min(nbytes, sum(row[0] for row in rows))
        total += nbytes * (begin <= time < end)
    return total


@given(st.data())
def test_invariants_of_every_schedule(data):
    graph = data.draw(graphs(parted=True))
    cluster = data.draw(clusters(whole=True))
    placement = data.draw(placements(graph, cluster))
    schedule = simulate(graph, cluster, placement)
    assert tuple(span.op for span in schedule.spans) == placement.order
    spans = {span.op: span for span in schedule.spans}
    assert all(span.device == placement.devices[op] for op, span in spans.items())
    pool_of = {i: d.pool or i for i, d in enumerate(cluster.devices)}
    for tensor in graph.tensors:
        for consumer in tensor.consumers:
            made, used = spans[tensor.producer], spans[consumer]
            assert used.start_ns >= made.end_ns
            if pool_of[made.device] == pool_of[used.device] and made.device != used.device:
                wait = cluster.links[made.device][used.device].latency_ns
                assert used.start_ns >= made.end_ns + wait
    for sent in schedule.transfers:
        tensor, link = graph.tensors[sent.tensor], cluster.links[sent.src][sent.dst]
        assert sent.start_ns >= spans[tensor.producer].end_ns
        assert sent.end_ns - sent.start_ns == link.transfer_ns(tensor.nbytes)
        assert pool_of[sent.src] != pool_of[sent.dst]
    assert len({(t.tensor, pool_of[t.dst]) for t in schedule.transfers}) == len(schedule.transfers)
    for device in range(len(cluster.devices)):
        assert not overlap((s.start_ns, s.end_ns) for s in schedule.spans if s.device == device)
        sends = [(t.start_ns, t.end_ns) for t in schedule.transfers if t.src == device]
        receives = [(t.start_ns, t.end_ns) for t in schedule.transfers if t.dst == device]
        if cluster.ports != "none":
            assert not overlap(sends)
            assert not overlap(receives)
        if cluster.ports == "shared":
            assert not overlap(sends + receives)
    times = {s.start_ns for s in schedule.spans} | {t.start_ns for t in schedule.transfers} | {0}
    times |= {s.end_ns for s in schedule.spans}  # room that was used again is taken then
    for device, peak in enumerate(schedule.peak_bytes):
        assert peak == max(
            memory_at(graph, schedule, pool_of, pool_of[device], time) for time in times
        )
    assert schedule.makespan_ns >= schedule.lower_bound_ns or overflows(schedule, cluster)


@pytest.mark.parametrize(
    ("devices", "there"),
    [
        ((0, 1, 1, 0, 0), 20),  # one part, which two of them read
        ((0, 1, 1, 1, 0), 50),
        ((0, 0, 0, 1, 0), 30),
        ((0, 0, 0, 1, 1), 90),  # the last one reads the whole
        ((0, 0, 0, 0, 0), 0),
    ],
)
def test_a_copy_holds_each_part_that_is_read_there_once(devices, there):
    ops = tuple(Op(f"op{i}", 5) for i in range(5))
    graph = OpGraph(ops, (Tensor(0, (1, 2, 3, 4), 90, parts=((20, 1, 2), (30, 3))),))
    cluster = Cluster.uniform(2, 1000, Link(1, 10**9))
    schedule = simulate(graph, cluster, Placement(graph.digest, devices, tuple(range(5))))
    assert schedule.peak_bytes == (90, there)
    wide = replace(graph.tensors[0], parts=((60, 1), (60, 2)))
    assert [wide.copy_bytes(readers) for readers in ({1}, {1, 2}, {3})] == [60, 90, 90]


@given(st.data())
def test_names_change_nothing(data):
    graph, cluster = data.draw(graphs()), data.draw(clusters(whole=True))
    placement = data.draw(placements(graph, cluster))
    ops = tuple(replace(op, name=f"renamed {op.name}") for op in graph.ops)
    other = replace(graph, ops=ops)
    devices = tuple(replace(d, name=f"renamed {d.name}") for d in cluster.devices)
    assert simulate(graph, cluster, placement) == simulate(
        other,
        replace(cluster, devices=devices),
        replace(placement, graph_digest=other.digest),
    )


GRAPH = OpGraph(
    (Op("a", 5, 30, group="g"), Op("b", 5, 30), Op("c", 5, 40, group="g")),
    (Tensor(0, (1,), 8), Tensor(1, (2,), 8)),
)
CLUSTER = Cluster.uniform(2, 100, LINK)


@pytest.mark.parametrize(
    ("devices", "order", "match"),
    [
        ((0, 1, 1), (0, 1, 2), "group 'g' is parted: op 'a' is on device 0 and op 'c' on"),
        ((0, 0, 0), (1, 0, 2), "launches op 'b' before op 'a'"),
        ((0, 2, 0), (0, 1, 2), "op 'b' is placed on device 2, but the cluster has 2 devices"),
        ((0, 0), (0, 1), "it has 2 ops, and this step has 3"),
    ],
)
def test_a_placement_that_is_no_placement_is_refused(devices, order, match):
    with pytest.raises(InputError, match=match):
        simulate(GRAPH, CLUSTER, Placement(GRAPH.digest, devices, order))


def test_a_placement_of_another_graph_is_refused():
    with pytest.raises(InputError, match="the placement is for graph elsewhere"):
        simulate(GRAPH, CLUSTER, Placement("elsewhere", (0, 0, 0), (0, 1, 2)))


def test_a_missing_path_is_named():
    cluster = Cluster((Device("x", 99), Device("y", 99)), ((None, None), (LINK, None)))
    with pytest.raises(InputError, match=r"op 'b' cannot run on 'y'.*producers \('a'\)"):
        simulate(GRAPH, cluster, Placement(GRAPH.digest, (0, 1, 0), (0, 1, 2)))


def test_too_little_memory_is_shown_not_raised():
    small = Cluster.uniform(2, 90, LINK)
    schedule = simulate(GRAPH, small, Placement(GRAPH.digest, (0, 0, 0), (0, 1, 2)))
    # At its height 100 persistent bytes, and the tensors of 8 into b and out of it.
    assert schedule.peak_bytes == (116, 0)
    assert overflows(schedule, small) == (("device0", 26),)
    assert overflows(schedule, Cluster.uniform(2, 116, LINK)) == ()


def test_no_ops():
    schedule = simulate(OpGraph(()), CLUSTER, Placement(OpGraph(()).digest, (), ()))
    assert (schedule.makespan_ns, schedule.lower_bound_ns, schedule.gap) == (0, 0, 0.0)
    assert schedule.peak_bytes == (0, 0)


def test_what_is_used_again_is_charged_when_its_op_ends():
    ops = (Op("f", 10), Op("b", 10, 30, late_bytes=30, reused_bytes=25), Op("last", 10))
    graph = OpGraph(ops, (Tensor(0, (1,), 20), Tensor(1, (2,), 8)))
    cluster = Cluster.uniform(1, 38, LINK)
    schedule = simulate(graph, cluster, Placement(graph.digest, (0, 0, 0), (0, 1, 2)))
    # 20 and, of 38 that come, 13 besides; then the 38 alone.
    assert schedule.peak_bytes == (38,)
    assert solve(graph, cluster, "m-etf").devices == (0, 0, 0)
    with pytest.raises(InfeasibleError):
        solve(graph, Cluster.uniform(1, 37, LINK), "m-etf")


def test_late_bytes_are_charged_from_their_op_on():
    ops = (
        Op("f", 10, persistent_bytes=100, group="g"),
        Op("big", 10, workspace_bytes=50),
        Op("b", 10, group="g", late_bytes=40),
    )
    graph = OpGraph(ops, (Tensor(0, (2,), 8),))
    cluster = Cluster.uniform(1, 118, LINK)
    schedule = simulate(graph, cluster, Placement(graph.digest, (0, 0, 0), (0, 1, 2)))
    # 60 from the beginning, 8 of the tensor and 50 beside them; then 100 and 8.
    assert schedule.peak_bytes == (118,)
    assert solve(graph, cluster, "m-etf").devices == (0, 0, 0)
    with pytest.raises(InfeasibleError):
        solve(graph, Cluster.uniform(1, 107, LINK), "m-etf")
