"""The clock: small tables by hand, and a slow clock that must agree about everything."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import Oracle
from seeds import seeds
from strategies import clusters, graphs, launched, placements

from baechi import (
    Cluster,
    Device,
    InputError,
    Link,
    Op,
    OpGraph,
    Span,
    Tensor,
    Timeline,
    simulate,
)
from baechi.problem.problem_arrays import Problem
from baechi.problem.simulation import launches

# One byte takes one nanosecond, after ten.
LINK = Link(latency_ns=10, bytes_per_s=10**9)


def two(ports="duplex", memory=1000):
    devices = [Device("a", memory), Device("b", memory)]
    return Cluster.connected(devices, LINK, ports=ports)


def run(graph, cluster, devices):
    timeline = Timeline(graph, cluster)
    for op, device in enumerate(devices):
        timeline.commit(op, device)
    return timeline.schedule()


@given(st.data())
def test_the_clock_agrees_with_the_oracle_at_every_step(data):
    graph, cluster = data.draw(graphs(max_ops=7)), data.draw(clusters())
    timeline, oracle = Timeline(graph, cluster), Oracle(graph, cluster)
    left = set(range(len(graph.ops)))
    while left:
        ready = [op for op in sorted(left) if oracle.ready(op)]
        choices = []
        for op in ready:
            for device in range(len(cluster.devices)):
                start = timeline.earliest_start(op, device)
                assert start == oracle.earliest_start(op, device)
                assert timeline.fits(op, device) == oracle.fits(op, device)
                if (
                    start is not None
                    and oracle.group_device.get(oracle.group(op), device) == device
                ):
                    choices.append((op, device))
        if not choices:
            return
        op, device = data.draw(st.sampled_from(choices))
        start, end = oracle.commit(op, device)
        assert timeline.commit(op, device) == Span(op, device, start, end)
        left.remove(op)
    schedule = timeline.schedule()
    assert [(s.op, s.device, s.start_ns, s.end_ns) for s in schedule.spans] == [
        (op, *span) for op, span in oracle.spans.items()
    ]
    assert [(t.tensor, t.src, t.dst, t.start_ns, t.end_ns) for t in schedule.transfers] == (
        oracle.transfers
    )
    assert list(schedule.peak_bytes) == oracle.peaks()
    assert list(launches(graph, cluster, schedule)) == oracle.launches


def test_hosts_launch_as_the_oracle_s():
    for seed in seeds(2000):
        graph, cluster = launched(seed)
        timeline, oracle, draw = Timeline(graph, cluster), Oracle(graph, cluster), Random(seed)
        while ready := [op for op in range(len(graph.ops)) if oracle.ready(op)]:
            op, device = draw.choice(ready), draw.randrange(len(cluster.devices))
            device = oracle.group_device.get(oracle.group(op), device)
            start = timeline.earliest_start(op, device)
            assert start == oracle.earliest_start(op, device)
            if start is None:
                break
            assert timeline.commit(op, device) == Span(op, device, *oracle.commit(op, device))
        else:
            schedule = timeline.schedule()
            assert list(launches(graph, cluster, schedule)) == oracle.launches
            assert list(schedule.peak_bytes) == oracle.peaks()


@given(st.data())
def test_what_fits_at_every_commit_fits_in_the_end(data):
    graph = data.draw(graphs(max_ops=7))
    cluster = data.draw(clusters(memory=st.integers(60, 200)))
    timeline = Timeline(graph, cluster)
    for op in range(len(graph.ops)):
        devices = [d for d in range(len(cluster.devices)) if timeline.fits(op, d)]
        if not devices:
            return
        timeline.commit(op, data.draw(st.sampled_from(devices)))
    for device, peak in zip(cluster.devices, timeline.schedule().peak_bytes, strict=True):
        assert peak <= device.memory_bytes


def test_memory_that_is_freed_when_other_memory_is_taken_is_not_held_twice():
    cluster = Cluster.connected([Device(name, 100, pool="p") for name in "ab"], LINK)
    ops = (Op("makes", 10), Op("waits", 20), Op("reads", 10), Op("takes", 5))
    timeline = Timeline(OpGraph(ops, (Tensor(0, (2,), 60), Tensor(3, (), 60))), cluster)
    for op, device in ((0, 0), (1, 1), (3, 1)):
        timeline.commit(op, device)
    assert timeline.fits(2, 0)  # at 20 what it reads goes, and the other comes


FORK = OpGraph((Op("a", 5), Op("b", 5), Op("c", 5)), (Tensor(0, (1,), 20), Tensor(0, (2,), 30)))
JOIN = OpGraph((Op("a", 5), Op("b", 9), Op("c", 5)), (Tensor(1, (2,), 20), Tensor(0, (2,), 30)))
SHARED = OpGraph((Op("a", 5), Op("b", 5), Op("c", 5)), (Tensor(0, (1, 2), 20),))
CROSS = OpGraph(
    (Op("a", 5), Op("b", 5), Op("c", 5), Op("d", 5)), (Tensor(0, (2,), 20), Tensor(1, (3,), 20))
)


@pytest.mark.parametrize(
    ("graph", "ports", "devices", "spans", "transfers"),
    [
        # Both tensors leave a, one after the other; b's ops run in commit order.
        (FORK, "duplex", (0, 1, 1), [(0, 5), (35, 40), (75, 80)], [(5, 35), (35, 75)]),
        (FORK, "none", (0, 1, 1), [(0, 5), (35, 40), (45, 50)], [(5, 35), (5, 45)]),
        # Of two missing inputs the one whose producer ended first goes first.
        (JOIN, "duplex", (0, 0, 1), [(0, 5), (5, 14), (75, 80)], [(5, 45), (45, 75)]),
        # One tensor is sent once to a device, however many consume it there.
        (SHARED, "duplex", (0, 1, 1), [(0, 5), (35, 40), (40, 45)], [(5, 35)]),
        # Two devices send to each other at once, unless a port is for both directions.
        (CROSS, "duplex", (0, 1, 1, 0), [(0, 5), (0, 5), (35, 40), (35, 40)], [(5, 35), (5, 35)]),
        (CROSS, "shared", (0, 1, 1, 0), [(0, 5), (0, 5), (35, 40), (65, 70)], [(5, 35), (35, 65)]),
    ],
)
def test_worked_examples(graph, ports, devices, spans, transfers):
    schedule = run(graph, two(ports), devices)
    assert [(span.start_ns, span.end_ns) for span in schedule.spans] == spans
    assert [(sent.start_ns, sent.end_ns) for sent in schedule.transfers] == transfers


@pytest.mark.parametrize(
    ("ports", "transfers"),
    [("duplex", [(5, 35), (35, 75)]), ("none", [(5, 35), (5, 45)])],
)
def test_a_device_sends_to_two_others_in_turn(ports, transfers):
    cluster = Cluster.connected([Device(name, 1000) for name in "abc"], LINK, ports=ports)
    schedule = run(FORK, cluster, (0, 1, 2))
    assert [(sent.start_ns, sent.end_ns) for sent in schedule.transfers] == transfers


@pytest.mark.parametrize(
    ("graph", "devices", "spans"),
    [
        # The first reader of a tensor is longer by the overhead, and who waits for it ends later.
        (SHARED, (0, 1, 1), [(0, 5), (35, 47), (47, 52)]),
        # Two tensors that arrive for one op cost it two of them; what starts, starts as before.
        (JOIN, (0, 0, 1), [(0, 5), (5, 14), (75, 94)]),
        # Sending costs the sender nothing, and what stays costs nobody.
        (CROSS, (0, 1, 1, 0), [(0, 5), (0, 5), (35, 47), (35, 47)]),
        (JOIN, (0, 0, 0), [(0, 5), (5, 14), (14, 19)]),
    ],
)
def test_overhead_keeps_the_receiver_busy(graph, devices, spans):
    link = Link(10, 10**9, overhead_ns=7)
    cluster = Cluster.connected([Device("a", 1000), Device("b", 1000)], link)
    schedule = run(graph, cluster, devices)
    assert [(span.start_ns, span.end_ns) for span in schedule.spans] == spans


@given(st.data())
def test_overhead_counts_on_the_paths_that_are_taken_alone(data):
    graph, cluster = data.draw(graphs(max_ops=7)), data.draw(clusters(whole=True))
    chosen = data.draw(placements(graph, cluster))
    schedule = simulate(graph, cluster, chosen)
    taken = {(row.src, row.dst) for row in schedule.transfers}
    links = tuple(
        tuple(
            link if link is None or (src, dst) in taken else replace(link, overhead_ns=10**6)
            for dst, link in enumerate(row)
        )
        for src, row in enumerate(cluster.links)
    )
    assert simulate(graph, replace(cluster, links=links), chosen) == schedule


@pytest.mark.parametrize(
    ("takes_ns", "launch_ns", "ahead", "devices", "spans"),
    [
        # Shorter than its launch, an op waits for it, on whichever device of the host.
        (5, 10, True, (0, 0, 0), [(10, 15), (20, 25), (30, 35)]),
        (5, 10, True, (0, 1, 0), [(10, 15), (20, 25), (30, 35)]),
        # Longer than their launches, ops of one device hide all but the first.
        (30, 10, True, (0, 0, 0), [(10, 40), (40, 70), (70, 100)]),
        (30, 10, True, (0, 1, 0), [(10, 40), (20, 50), (40, 70)]),
        # Another host launches for itself.
        (5, 10, True, (0, 2, 0), [(10, 15), (10, 15), (20, 25)]),
        # A launch that is the op's first part waits for the device, and others for it.
        (30, 10, False, (0, 1, 0), [(0, 30), (10, 40), (30, 60)]),
        (30, 10, False, (0, 0, 1), [(0, 30), (30, 60), (40, 70)]),
        # It is no longer than the op.
        (30, 99, False, (0, 1, 0), [(0, 30), (30, 60), (60, 90)]),
        (30, 99, False, (0, 2, 0), [(0, 30), (0, 30), (30, 60)]),
        # Without a launch the host is not asked.
        (30, 0, False, (0, 1, 0), [(0, 30), (0, 30), (30, 60)]),
    ],
)
def test_a_host_launches_one_op_at_a_time(takes_ns, launch_ns, ahead, devices, spans):
    graph = OpGraph(tuple(Op(name, takes_ns, launch_ns=launch_ns) for name in "abc"))
    rows = [
        Device(f"{host}{i}", 0, host=host, launches_ahead=ahead) for i, host in enumerate("hhi")
    ]
    schedule = run(graph, Cluster.connected(rows, LINK), devices)
    assert [(span.start_ns, span.end_ns) for span in schedule.spans] == spans


def test_a_launch_ahead_waits_for_no_input():
    # b's input arrives at 35; c was launched in 10 to 20 behind it.
    ops = (Op("a", 5, launch_ns=0), Op("b", 5, launch_ns=10), Op("c", 5, launch_ns=10))
    graph = OpGraph(ops, (Tensor(0, (1,), 20),))
    rows = [Device("x", 99, host="h"), Device("y", 99, host="h")]
    for ahead, spans in (
        (True, [(0, 5), (35, 40), (20, 25)]),
        (False, [(0, 5), (35, 40), (40, 45)]),
    ):
        devices = [replace(row, launches_ahead=ahead) for row in rows]
        schedule = run(graph, Cluster.connected(devices, LINK), (0, 1, 0))
        assert [(span.start_ns, span.end_ns) for span in schedule.spans] == spans


# The tensor for b comes 20 after its producer's end. c reads nothing.
@pytest.mark.parametrize(
    ("launch_ns", "ahead", "hosts", "spans", "launched_ns"),
    [
        # b's hand-over is launched in 10 to 35, b behind it, and c behind b.
        (10, True, "hh", [(10, 40), (60, 90), (55, 85)], [(0, 10), (10, 45), (45, 55)]),
        # Another host hands over.
        (10, True, "hi", [(10, 40), (60, 90), (40, 70)], [(0, 10), (0, 35), (10, 20)]),
        # Where nothing is launched ahead, it is the device's work.
        (10, False, "hh", [(0, 30), (50, 105), (60, 90)], [(0, 10), (50, 60), (60, 70)]),
        (10, True, "h-", [(10, 40), (60, 115), (40, 70)], [(0, 10), (10, 20)]),
        # No op takes a launch: the hand-over does.
        (0, True, "hh", [(0, 30), (50, 80), (30, 60)], [(0, 25)]),
    ],
)
def test_a_hand_over_takes_the_time_of_a_host_that_launches_ahead(
    launch_ns, ahead, hosts, spans, launched_ns
):
    ops = tuple(Op(name, 30, launch_ns=launch_ns) for name in "abc")
    graph = OpGraph(ops, (Tensor(0, (1,), 10),))
    rows = [
        Device(f"d{i}", 99, host=host.strip("-"), launches_ahead=ahead)
        for i, host in enumerate(hosts)
    ]
    cluster = Cluster.connected(rows, Link(10, 10**9, overhead_ns=25))
    schedule = run(graph, cluster, (0, 1, 0))
    assert [(span.start_ns, span.end_ns) for span in schedule.spans] == spans
    found = launches(graph, cluster, schedule)
    assert [(row.start_ns, row.end_ns) for row in found] == launched_ns


def test_a_host_hands_a_tensor_over_once():
    # c finds it there, and d, which takes no launch, does not ask the host.
    ops = (Op("a", 5), Op("b", 5), Op("c", 5), Op("d", 5))
    graph = OpGraph(ops, (Tensor(0, (1, 2), 10),))
    rows = [Device("x", 99, host="h"), Device("y", 99, host="h")]
    cluster = Cluster.connected(rows, Link(10, 10**9, overhead_ns=100))
    schedule = run(graph, cluster, (0, 1, 1, 0))
    ends = [(span.start_ns, span.end_ns) for span in schedule.spans]
    assert ends == [(0, 5), (100, 105), (105, 110), (5, 10)]


def test_overhead_cannot_hide_behind_other_work():
    # b has work until the tensor is there: the latency is hidden, the overhead is not.
    graph = OpGraph((Op("a", 5), Op("own", 100), Op("b", 5)), (Tensor(0, (2,), 20),))
    devices = [Device("a", 1000), Device("b", 1000)]
    ends = [
        run(graph, Cluster.connected(devices, link), (0, 1, 1)).makespan_ns
        for link in (Link(0, 10**9), Link(40, 10**9), Link(0, 10**9, 40))
    ]
    assert ends == [105, 105, 145]


def test_while_a_device_is_busy_to_receive_an_op_holds_its_memory():
    # b takes no time of its own, but it is there while its input is taken.
    graph = OpGraph((Op("a", 5), Op("b", 0, 0, 30)), (Tensor(0, (1,), 10), Tensor(1, (), 4)))
    devices = [Device("a", 1000), Device("b", 1000)]
    assert run(graph, Cluster.connected(devices, LINK), (0, 1)).peak_bytes == (10, 10)
    busy = Cluster.connected(devices, Link(10, 10**9, overhead_ns=1))
    assert run(graph, busy, (0, 1)).peak_bytes == (10, 44)


def test_devices_of_one_pool_hand_tensors_over_for_the_latency():
    devices = [Device("a", 100, pool="p"), Device("b", 100, pool="p"), Device("c", 100)]
    cluster = Cluster.connected(devices, LINK)
    chain = OpGraph((Op("x", 5), Op("y", 5)), (Tensor(0, (1,), 30, kept=True),))
    schedule = run(chain, cluster, (0, 1))
    assert [(s.start_ns, s.end_ns) for s in schedule.spans] == [(0, 5), (15, 20)]
    assert schedule.transfers == ()
    assert schedule.peak_bytes == (30, 30, 0)
    # A hand-over is no transfer and has no overhead.
    busy = Cluster.connected(devices, Link(10, 10**9, overhead_ns=7))
    assert run(chain, busy, (0, 1)) == schedule
    # A copy that one of them received serves the other, too, a latency later.
    schedule = run(SHARED, cluster, (2, 0, 1))
    assert [(s.start_ns, s.end_ns) for s in schedule.spans] == [(0, 5), (35, 40), (45, 50)]
    assert len(schedule.transfers) == 1
    assert schedule.peak_bytes == (20, 20, 20)


@pytest.mark.parametrize(
    ("time_ns", "speed", "takes"),
    [(10, 1.0, 10), (10, 0.5, 20), (10, 3.0, 4), (0, 0.1, 0), (2**60 + 1, 1.0, 2**60 + 1)],
)
def test_an_op_takes_its_time_over_the_speed_rounded_up(time_ns, speed, takes):
    cluster = Cluster.uniform(1, 0, LINK, speed=speed)
    assert run(OpGraph((Op("a", time_ns),)), cluster, (0,)).makespan_ns == takes


def test_a_kind_has_its_own_times():
    graph = OpGraph((Op("a", 10),), times={"new": (4,)})
    devices = [Device("n", 0, 0.5, "new"), Device("o", 0, 0.5, "old")]
    cluster = Cluster.connected(devices, LINK)
    assert run(graph, cluster, (0,)).makespan_ns == 8
    assert run(graph, cluster, (1,)).makespan_ns == 20


BESIDE = OpGraph(
    (Op("a", 5), Op("b", 5, 0, 50, beside=((0, 30), (2, 10))), Op("c", 5)), (Tensor(0, (1,), 0),)
)


@pytest.mark.parametrize(
    ("graph", "devices", "peaks"),
    [
        # Persistent bytes for the whole step, workspace while the op runs.
        (OpGraph((Op("a", 5, 7, 100), Op("b", 5, 1, 50))), (0, 0), (108, 0)),
        # A chain: each tensor is freed when its consumer ends, so two are there at a time.
        (
            OpGraph(
                (Op("a", 5), Op("b", 5), Op("c", 5)), (Tensor(0, (1,), 10), Tensor(1, (2,), 20))
            ),
            (0, 0, 0),
            (30, 0),
        ),
        # The same over a link: the source holds it until it has left, the copy until it is used.
        (OpGraph((Op("a", 5), Op("b", 5)), (Tensor(0, (1,), 10),)), (0, 1), (10, 10)),
        # Kept, and consumed by nobody: to the end of the step.
        (
            OpGraph((Op("a", 5), Op("b", 5)), (Tensor(0, (), 10), Tensor(0, (1,), 3, kept=True))),
            (0, 0),
            (13, 0),
        ),
        # Half-open: what ends when something starts is gone; what takes no time holds nothing.
        (OpGraph((Op("a", 5, 0, 10), Op("b", 5, 0, 10))), (0, 0), (10, 0)),
        (OpGraph((Op("a", 0, 0, 10),), (Tensor(0, (), 9, kept=True),)), (0,), (0, 0)),
        # What is held beside an op is not held where that is elsewhere, and was launched before.
        (BESIDE, (0, 0, 0), (50, 0)),
        (BESIDE, (1, 0, 0), (20, 0)),
        (BESIDE, (0, 0, 1), (50, 0)),
        (BESIDE, (1, 0, 1), (20, 0)),
    ],
)
def test_memory_by_hand(graph, devices, peaks):
    assert run(graph, two(), devices).peak_bytes == peaks


def test_a_group_reserves_its_persistent_bytes_with_its_first_op():
    graph = OpGraph((Op("a", 1, 60, group="g"), Op("b", 1, 50), Op("c", 1, 60, group="g")))
    timeline = Timeline(graph, two(memory=150))
    timeline.commit(0, 0)
    assert not timeline.fits(1, 0)
    assert timeline.fits(1, 1)
    assert timeline.fits(2, 0)
    assert not timeline.fits(2, 1)
    with pytest.raises(InputError, match="its group 'g' is on 'a'"):
        timeline.commit(2, 1)


def test_in_a_pool_what_comes_later_does_not_crowd_what_starts_earlier():
    devices = [Device("a", 100, pool="p"), Device("b", 100, pool="p")]
    graph = OpGraph(
        (Op("early", 20), Op("late", 5), Op("now", 5, 0, 50)),
        (Tensor(0, (1,), 0), Tensor(1, (), 90, kept=True)),
    )
    timeline = Timeline(graph, Cluster.connected(devices, LINK))
    timeline.commit(0, 0)
    assert timeline.commit(1, 0).start_ns == 20
    assert timeline.fits(2, 1)
    assert not timeline.fits(2, 0)


def test_a_kept_tensor_stays_after_its_last_consumer():
    graph = OpGraph((Op("a", 5), Op("b", 0)), (Tensor(0, (1,), 60, kept=True), Tensor(1, (), 50)))
    timeline = Timeline(graph, two(memory=100))
    timeline.commit(0, 0)
    assert not timeline.fits(1, 0)
    # There the copy is gone when b, which takes no time, has its output.
    assert timeline.fits(1, 1)


def test_an_op_out_of_turn_is_refused():
    timeline = Timeline(FORK, two())
    with pytest.raises(InputError, match="'b' consumes a tensor of op 'a', which is not committed"):
        timeline.earliest_start(1, 0)
    timeline.commit(0, 0)
    with pytest.raises(InputError, match="'a' is already committed"):
        timeline.fits(0, 1)
    with pytest.raises(InputError, match="op 3 does not exist; there are 3 ops"):
        timeline.commit(3, 0)
    with pytest.raises(InputError, match="device -1 does not exist"):
        timeline.commit(1, -1)
    with pytest.raises(InputError, match="2 ops are not committed, the first is 'b'"):
        timeline.schedule()


def test_no_path_is_no_start():
    cluster = Cluster((Device("a", 99), Device("b", 99)), ((None, None), (LINK, None)))
    timeline = Timeline(FORK, cluster)
    timeline.commit(0, 0)
    assert timeline.earliest_start(1, 1) is None
    assert not timeline.fits(1, 1)
    with pytest.raises(InputError, match="'b' cannot run on 'b': there is no link"):
        timeline.commit(1, 1)


@pytest.mark.parametrize(
    ("graph", "cluster", "match"),
    [
        (OpGraph((Op("a", 2**61), Op("b", 2**61))), two(), r"more than 2\*\*62 \(146 years\)"),
        (OpGraph((Op("a", 1),), (Tensor(0, (), 2**61),)), two(), "may take"),
        (
            OpGraph((Op("a", 1),), (Tensor(0, (), 1),)),
            Cluster.uniform(2, 9, Link(0, 1, overhead_ns=2**61)),
            "an overhead or a tensor is too large",
        ),
        (OpGraph((Op("a", 0, 2**62),)), two(), r"bytes \(4194304.0 TiB\), more than 2\*\*62"),
        (
            OpGraph((Op("a", 10**6),)),
            Cluster.uniform(1, 0, LINK, speed=1e-300),
            "'a' would take more than",
        ),
    ],
)
def test_what_would_overflow_is_refused(graph, cluster, match):
    with pytest.raises(InputError, match=match):
        Timeline(graph, cluster)


def test_large_numbers_are_exact():
    # 3 * 10^15 bytes at 7 bytes/s pass 64 bits on the way.
    cluster = Cluster.connected([Device("a", 2**62), Device("b", 2**62)], Link(1, 7 * 10**9))
    graph = OpGraph((Op("a", 1), Op("b", 1)), (Tensor(0, (1,), 3 * 10**15),))
    sent = run(graph, cluster, (0, 1)).transfers[0]
    assert sent.end_ns - sent.start_ns == 1 + -(-3 * 10**24 // (7 * 10**9))


def test_a_deep_profile_stays_fast_and_right():
    n = 20_000
    graph = OpGraph(
        tuple(Op(f"o{i}", 1, 0, 1) for i in range(n)),
        tuple(Tensor(i, (i + 1,), 1) for i in range(n - 1)),
    )
    timeline = Problem(graph, two()).timeline()
    assert timeline.fold(np.zeros(n, np.int32), np.arange(n, dtype=np.int32)) == -1
    assert (timeline.makespan(), timeline.peaks()) == (n, [3, 0])
