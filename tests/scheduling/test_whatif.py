from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import constraints_for, graphs, snapshots

import baechi
from baechi import (
    Cluster,
    Constraints,
    Device,
    InfeasibleError,
    InputError,
    Link,
    Op,
    OpGraph,
    ReservationError,
    Tensor,
    Topology,
)
from baechi.placers.baselines import SingleDevice
from baechi.placers.memory_packing import arrangements
from baechi.placers.searching import find
from baechi.problem.problem_arrays import Problem
from baechi.scheduling.claims import Claim, Use, Wish
from baechi.scheduling.decision import choose, decide, explore
from baechi.scheduling.device_sets import Demand, candidates
from baechi.scheduling.ledger import Ledger
from baechi.scheduling.snapshot import Site, Snapshot
from baechi.scheduling.whatif import Point, whatif

NEAR, FAR = Link(1, 10**12), Link(1000, 10**9)
# Eight ops side by side, then one: more devices are faster, up to eight.
FAN = OpGraph(
    (*(Op(f"op{i}", 1000, persistent_bytes=10) for i in range(8)), Op("sum", 10)),
    tuple(Tensor(i, (8,), 1) for i in range(8)),
)


def grid(switches=2, nodes=2, devices=2, memory=100):
    return Topology.grid(
        switches, nodes, devices, memory, node_link=NEAR, switch_link=NEAR, site_link=FAR
    )


def where(site, names):
    """The nodes and switches of devices."""
    places = [site.index[name] for name in names]
    return {site.base.nodes[at] for at in places}, {site.base.switches[at] for at in places}


def check(graph, snapshot, wish, decision):
    """The decision is what the one clock says, respects the wish, and can be reserved."""
    limits = wish.constraints
    schedule = baechi.simulate(graph, decision.cluster, decision.placement)
    assert schedule.makespan_ns == decision.step_ns
    assert schedule.peak_bytes == decision.peak_bytes
    assert set(decision.placement.devices) == set(range(len(decision.devices)))
    nodes, switches = where(snapshot.site, decision.devices)
    assert len(nodes) <= 1 or wish.same != "node"
    assert len(switches) <= 1 or wish.same not in ("node", "switch")
    assert len(decision.devices) <= (limits.max_devices or 99)
    assert not set(decision.devices) & set(limits.excluded)
    for op, at in zip(graph.ops, decision.placement.devices, strict=True):
        device = decision.devices[at]
        for name in {op.name, op.group}:
            if name == op.name or name not in graph.op_index:
                assert limits.pins.get(name, device) == device
                assert device not in limits.forbidden.get(name, ())
    rooms = {room.device.name: room for room in snapshot.rooms(wish.share_milli)}
    for device, peak, share in zip(
        decision.cluster.devices, decision.peak_bytes, decision.shares, strict=True
    ):
        assert device == rooms[device.name].device
        assert peak <= max(0, device.memory_bytes - limits.margins.get(device.name, 0))
        assert share == rooms[device.name].share_milli
    snapshot.site.take(snapshot.uses, decision.claims())


@given(st.data())
def test_a_decision_respects_the_wish_and_is_what_the_clock_says(data):
    graph = data.draw(graphs(min_ops=1, kinds=False))
    snapshot = data.draw(snapshots(graph))
    full = Cluster.connected(snapshot.site.base.devices, NEAR)
    wish = Wish(
        data.draw(st.sampled_from(["", "", "node", "switch"])),
        data.draw(st.sampled_from([0, 100, None])),
        data.draw(st.sampled_from([None, None, 400])),
        data.draw(st.sampled_from(["fast", "fast", "balanced"])),
        data.draw(st.just(Constraints()) | constraints_for(graph, full)),
    )
    found = explore(graph, snapshot, wish)
    for row in found:
        check(graph, snapshot, wish, row)
    # A Pareto list, and the same every time.
    counts, steps = [len(row.devices) for row in found], [row.step_ns for row in found]
    assert counts == sorted(set(counts))
    assert steps == sorted(set(steps), reverse=True)
    assert found == explore(graph, snapshot, wish)
    if found:
        assert decide(graph, snapshot, wish) in found
    else:
        with pytest.raises((InfeasibleError, ReservationError)):
            decide(graph, snapshot, wish)


@given(st.data())
def test_a_decision_is_found_where_the_solver_finds_a_placement(data):
    graph = data.draw(graphs(min_ops=1, kinds=False))
    snapshot = data.draw(snapshots(graph))
    assume(snapshot.rooms())
    residual = snapshot.residual()
    limits = Constraints(max_devices=data.draw(st.none() | st.integers(1, 5)))
    problem = Problem(graph, residual, limits)
    if problem.max_devices is None and next(arrangements(problem), None) is not None:
        assert explore(graph, snapshot, Wish())
    solved = find(problem)
    if solved is None:
        return
    found = explore(graph, snapshot, Wish(effort="balanced", constraints=limits))
    assert found


def test_devices_without_memory_are_asked_for_what_needs_none():
    """The two with memory are not enough: what needs none takes a place of its own."""
    ops = (
        Op("op0", 0, group="g"),
        Op("op1", 0),
        Op("op2", 0),
        Op("op3", 1, persistent_bytes=22, workspace_bytes=37, group="h"),
        Op("op4", 0, persistent_bytes=33, group="h"),
        Op("op5", 0),
        Op("op6", 3, persistent_bytes=22, workspace_bytes=29),
        Op("op7", 0, persistent_bytes=29, group="g"),
        Op("op8", 0),
    )
    tensors = (
        Tensor(0, (), 0),
        Tensor(3, (), 0),
        Tensor(0, (), 7),
        Tensor(0, (), 11),
        Tensor(6, (7,), 26),
        Tensor(0, (1, 2, 3), 33),
        Tensor(0, (1, 2, 3), 0),
        Tensor(8, (), 0),
    )
    graph = OpGraph(ops, tensors)
    memory = (131, 0, 0, 0, 123)
    devices = tuple(Device(f"d{at}", nbytes) for at, nbytes in enumerate(memory))
    site = Site.of(Topology(devices, ("n",) * 5, ("s",) * 5, Link(0, 10**9), None, None), "whole")
    snapshot = Snapshot(site, 0, (Use(),) * 5)
    problem = Problem(graph, snapshot.residual())
    assert next(arrangements(problem), None) is not None  # whatever luck a search has
    assert find(problem) is not None
    assert explore(graph, snapshot, Wish(effort="balanced"))


@given(st.data())
def test_what_is_missing_is_enough(data):
    graph = data.draw(graphs(min_ops=1, kinds=False))
    snapshot = data.draw(snapshots(graph))
    answer = whatif(graph, snapshot)
    assert (answer.shortage is None) == bool(answer.alternatives)
    short = answer.shortage
    if short is None or short.extra_bytes is None:
        return
    assert short.extra_bytes > 0
    every = short.extra_device == "every device"
    base = snapshot.site.base
    devices = tuple(
        Device(row.name, row.memory_bytes + short.extra_bytes, row.speed)
        if every or row.name == short.extra_device
        else row
        for row in base.devices
    )
    grown = Topology(
        devices, base.nodes, base.switches, base.node_link, base.switch_link, base.site_link
    )
    assert explore(graph, Snapshot(Site(grown, snapshot.site.sharing), 0, snapshot.uses), Wish())


def test_fewer_devices_are_preferred_as_far_as_the_slack_goes():
    found = explore(FAN, Snapshot(Site.of(grid(1, 1, 8))), Wish())
    assert [len(row.devices) for row in found] == [1, 2, 3, 4, 6, 8]
    steps = {len(row.devices): row.step_ns for row in found}
    assert steps[1] == 8010
    assert steps[2] < 4100
    assert len(choose(found, 0).devices) == 8
    assert len(choose(found, None).devices) == 1
    slack = 1000 * (steps[4] - steps[8]) // steps[8] + 1
    assert len(choose(found, slack).devices) == 4
    assert len(choose(found, slack - 2).devices) == 6


def test_devices_of_a_node_or_a_switch_are_kept_together():
    site = Site.of(grid(2, 2, 2, 30))
    empty = Snapshot(site)
    # 80 bytes: on one node of 60 there is no room, under a switch of 120 there is.
    with pytest.raises(InfeasibleError, match=r"node0/0 30 B, node0/1 30 B.*Give \d+ B more"):
        decide(FAN, empty, Wish(same="node"))
    _, switches = where(site, decide(FAN, empty, Wish(same="switch")).devices)
    assert len(switches) == 1
    # One device of every node is taken: then two switches are needed.
    uses = [Use(20, 0) if at % 2 else Use() for at in range(8)]
    less = Snapshot(site, 1, tuple(uses))
    assert not explore(FAN, less, Wish(same="switch"))
    assert len(where(site, decide(FAN, less).devices)[1]) == 2
    with pytest.raises(InputError, match="does not say which node"):
        decide(FAN, Snapshot(Site.of(Cluster.uniform(2, 100, NEAR))), Wish(same="node"))


def test_near_devices_are_chosen_where_transfers_are_dear():
    site = Site.of(grid(4, 2, 4, 1000))
    # Fast devices are one in every switch, a little slower ones are all under the last.
    decision = decide(FAN, Snapshot(site), Wish(constraints=Constraints(max_devices=4)))
    nodes, _ = where(site, decision.devices)
    assert len(nodes) == 1
    assert len(decision.devices) == 4


def test_pins_and_taken_devices():
    site = Site.of(grid(1, 2, 2))
    pinned = Wish(constraints=Constraints(pins={"op0": "node1/1"}))
    assert "node1/1" in decide(FAN, Snapshot(site), pinned).devices
    taken = Snapshot(site, 1, (Use(), Use(), Use(), Use(0, 1000)))
    with pytest.raises(ReservationError, match="pinned"):
        decide(FAN, taken, pinned)
    assert whatif(FAN, taken, pinned).shortage.extra_bytes is None
    with pytest.raises(InputError, match="no ops"):
        explore(OpGraph(()), taken, Wish())
    nothing = Snapshot(site, 1, (Use(0, 1000),) * 4)
    assert "nothing is left" in whatif(FAN, nothing).shortage.message
    for limits in (
        Constraints(excluded=("gpu",)),
        Constraints(pins={"op0": "gpu"}),
        Constraints(margins={"gpu": 1}),
        Constraints(forbidden={"op0": ("gpu",)}),
        Constraints(pins={"nobody": "node0/0"}),
    ):
        with pytest.raises(InputError):
            explore(FAN, Snapshot(site), Wish(constraints=limits))


def test_a_share_and_an_instance_are_reserved_as_they_were_decided():
    site = grid(1, 1, 2, 200)
    book = Ledger(site, sharing={"node0/1": "mig"})
    now = book.snapshot()
    decision = decide(FAN, now, Wish(share_milli=400))
    assert decision.devices == ("node0/0", "node0/1/3g@0", "node0/1/3g@4")
    made = book.reserve("a", decision.claims(), version=decision.version)
    assert [claim.share_milli for claim in made.claims] == [400, 428, 428]
    assert decide(FAN, book.snapshot(), Wish(share_milli=400)).devices == ("node0/0",)
    with pytest.raises(ReservationError) as stale:
        book.reserve("b", decision.claims(), version=decision.version)
    assert stale.value.reason in ("stale", "capacity")


def test_what_if_has_no_side_effects_and_tells_what_waiting_brings():
    book = Ledger(grid(1, 1, 2))
    book.reserve("big", [Claim("node0/0", 90, 900)])
    book.reserve("small", [Claim("node0/1", 1, 500)])
    now = book.snapshot()
    answer = whatif(FAN, now, after=["big", "small"], up_to=2)
    assert book.snapshot() == now
    assert answer.version == 2
    step = answer.alternatives[-1].step_ns
    big, small = answer.waiting
    assert (big.job, small.job) == ("big", "small")
    assert big.gain_ns == step - big.decision.step_ns > 0
    assert big.worth_after(0) == 1
    assert big.worth_after(10 * big.gain_ns) == 11
    assert small.gain_ns > 0
    assert answer.curve[0].step_ns >= answer.curve[1].step_ns
    with pytest.raises(ReservationError):
        whatif(FAN, now, after=["nobody"])
    book.reserve("rest", [Claim("node0/1", 99, 500)])
    full = whatif(FAN, book.snapshot(), after=["big", "small"], up_to=2)
    assert full.shortage is not None
    assert full.waiting[0].gain_ns is None
    assert full.waiting[0].worth_after(5) == 0
    assert full.waiting[1].decision is None
    assert full.waiting[1].worth_after(5) is None
    assert full.curve == (Point(1, None), Point(2, None))


def test_the_curve_is_the_speed_up_by_devices():
    answer = whatif(FAN, Snapshot(Site.of(grid(1, 2, 4))), up_to=12)
    assert [point.devices for point in answer.curve] == list(range(1, 13))
    steps = [point.step_ns for point in answer.curve]
    assert steps == sorted(steps, reverse=True)
    assert steps[0] == 8010
    assert steps[7] < 1100
    few = Wish(constraints=Constraints(max_devices=2))
    assert len(whatif(FAN, Snapshot(Site.of(grid(1, 2, 4))), few, up_to=12).curve) == 2


@given(st.data())
def test_no_decision_is_slower_than_the_best_single_device_that_fits(data):
    graph = data.draw(graphs(min_ops=1, kinds=False))
    snapshot = data.draw(snapshots(graph))
    assume(snapshot.rooms())
    single = SingleDevice().place(Problem(graph, snapshot.residual()))
    if single is not None:
        assert decide(graph, snapshot).step_ns <= single.stats["makespan_ns"]


def test_pins_to_two_devices_are_kept_on_them():
    site = Site.of(grid(1, 2, 2))
    wish = Wish(constraints=Constraints(pins={"op0": "node0/0", "op1": "node1/1"}))
    for row in explore(FAN, Snapshot(site), wish):
        assert {"node0/0", "node1/1"} <= set(row.devices)
        check(FAN, Snapshot(site), wish, row)
    assert decide(FAN, Snapshot(site), wish).step_ns < 8010
    assert not explore(FAN, Snapshot(site), replace(wish, same="node"))


def test_candidates_are_few_and_the_most_promising_come_first():
    site = Site.of(grid(32, 4, 8, 100))
    rooms = Snapshot(site).rooms()
    rows = list(candidates(Demand.of(FAN), site, rooms, Wish()))
    assert max(len(row.rooms) for row in rows) == 64
    assert len(rows) < 100
    assert len({row.rooms for row in rows}) == len(rows)
    # One of every size first; eight ops side by side promise an eighth.
    sizes = [len(row.rooms) for row in rows]
    assert sizes[:12] == [1, 2, 4, 8, 16, 32, 64, 3, 6, 12, 24, 48]
    assert rows[3].bound_ns == 1010
    # A graph that needs more than 64 of them is offered more.
    large = OpGraph(tuple(Op(f"op{i}", 10, persistent_bytes=99) for i in range(100)))
    rows = list(candidates(Demand.of(large), site, rooms, Wish()))
    assert min(len(row.rooms) for row in rows) > 64
    assert len(decide(large, Snapshot(site)).devices) == 100


@pytest.mark.parametrize(
    "fields",
    [{"same": "rack"}, {"slack_milli": -1}, {"share_milli": 0}, {"effort": "some"},
     {"constraints": None}],
)  # fmt: skip
def test_a_wish_that_makes_no_sense_is_refused(fields):
    with pytest.raises(InputError):
        Wish(**fields)


def test_a_forward_needs_no_room_for_gradients_that_come_late():
    ops = (
        Op("f", 10, persistent_bytes=100, workspace_bytes=30, group="g"),
        Op("b", 10, group="g", late_bytes=40),
    )
    demand = Demand.of(OpGraph(ops))
    assert (demand.total_bytes, demand.largest_bytes, demand.single_bytes) == (100, 100, 100)


def test_bytes_of_an_op_that_ends_the_step_in_no_time_need_no_room():
    ops = (Op("a", 10), Op("b", 0, persistent_bytes=100, late_bytes=100))
    graph = OpGraph(ops, (Tensor(0, (1,), 0),))
    snapshot = Snapshot(Site.of(grid(1, 1, 2, 0)))
    assert find(Problem(graph, snapshot.residual())) is not None
    assert explore(graph, snapshot, Wish())


def test_what_is_forbidden_on_the_first_devices_goes_to_others():
    first = tuple(f"node0/{at}" for at in range(5))
    alone = Wish(slack_milli=None, constraints=Constraints(forbidden={"op0": first}))
    assert decide(FAN, Snapshot(Site.of(grid(1, 1, 6, 200))), alone).devices == ("node0/5",)
    two = Wish(constraints=Constraints(forbidden={"op0": first[:2]}, max_devices=2))
    snapshot = Snapshot(Site.of(grid(1, 1, 6, 60)))
    check(FAN, snapshot, two, decide(FAN, snapshot, two))


def test_what_is_forbidden_to_an_op_is_forbidden_to_its_group():
    graph = OpGraph((Op("a", 10, group="g"), Op("b", 10, group="g")))
    limits = Constraints(forbidden={"a": ("node0/0",), "b": ("node0/1",)})
    decision = decide(graph, Snapshot(Site.of(grid(1, 1, 3))), Wish(constraints=limits))
    assert decision.devices == ("node0/2",)


def test_a_mig_device_in_the_constraints_is_all_its_instances():
    site = Site.of(grid(1, 2, 1, 800), "mig")
    _, after = site.take((Use(), Use()), [Claim("node1/0/3g@4", 1)])
    snapshot = Snapshot(site, 1, (Use(), after[1]))
    for limits in (
        Constraints(excluded=("node0/0",)),
        Constraints(forbidden={f"op{at}": ("node0/0",) for at in range(8)} | {"sum": ("node0/0",)}),
        # An instance that somebody has is no mistake.
        Constraints(excluded=("node0/0", "node1/0/3g@4")),
    ):
        decision = decide(FAN, snapshot, Wish(constraints=limits))
        assert {name.rpartition("/")[0] for name in decision.devices} == {"node1/0"}
    for limits, says in (
        (Constraints(pins={"op0": "node0/0"}), "cut into MIG instances"),
        (Constraints(margins={"node0/0": 1}), "cut into MIG instances"),
        (Constraints(excluded=("node0/0/3g@1",)), "no device of the cluster"),
        (Constraints(excluded=("node0/0/3g",)), "no device of the cluster"),
    ):
        with pytest.raises(InputError, match=says):
            explore(FAN, snapshot, Wish(constraints=limits))


def test_a_margin_of_a_pool_holds_whichever_of_its_devices_is_chosen():
    pair = tuple(Device(name, 100, pool="p") for name in ("a", "b"))
    snapshot = Snapshot(Site.of(Cluster.connected(pair, NEAR)))
    wish = Wish(constraints=Constraints(margins={"b": 50}))
    assert explore(OpGraph((Op("op", 10, persistent_bytes=50),)), snapshot, wish)
    assert not explore(OpGraph((Op("op", 10, persistent_bytes=51),)), snapshot, wish)


@pytest.mark.parametrize("same", ["node", "switch"])
def test_a_node_that_promises_little_is_looked_at_where_no_other_has_room(same):
    # Of three ops of 30 bytes four nodes hold two, though they have the bytes for three.
    graph = OpGraph(tuple(Op(f"op{at}", 100, persistent_bytes=30) for at in range(3)))
    fast = [Device(f"fast{at}", 45) for at in range(8)]
    slow = [Device(f"slow{at}", 70, 0.5) for at in range(2)]
    names = [f"n{at // 2}" for at in range(10)]
    snapshot = Snapshot(Site.of(Topology((*fast, *slow), names, names, NEAR)))
    assert decide(graph, snapshot, Wish(same=same)).devices == ("slow0", "slow1")
