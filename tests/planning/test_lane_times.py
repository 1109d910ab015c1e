"""Times on lanes of one GPU: between those alone and those beside busy lanes, by the plan."""

from functools import partial

import baechi
from baechi import Cluster, Device, Link, Op, OpGraph, Placement, Tensor
from baechi.planning.lane_times import settled

LANES = Cluster.connected(
    [Device(f"gpu/{n}", 10**9, kind="gpu", lane_of="gpu") for n in range(2)], Link(0, 10**15)
)
BOTH = "gpu, 2 lanes"
auto = partial(baechi.solve, cluster=LANES, placer="auto")


def branches(together: float) -> OpGraph:
    """A stem of 100 ns, then two branches of 60 and 30 ns, that take so often as long together."""
    took = (100, 60, 30)
    ops = tuple(Op(name, ns) for name, ns in zip(("stem", "a", "b"), took, strict=True))
    times = {"gpu": took, BOTH: tuple(round(together * ns) for ns in took)}
    return OpGraph(ops, (Tensor(0, (1, 2), 0),), times)


def always(*_: object) -> bool:
    return True


def step_ns(graph: OpGraph, placement: Placement) -> int:
    return baechi.simulate(graph, LANES, placement).makespan_ns


def test_an_operator_takes_as_long_as_lanes_are_busy_beside_it() -> None:
    graph = branches(2)
    placement = Placement(graph.digest, (0, 0, 1), (0, 1, 2))
    own, kept = settled(graph, LANES, placement, None, always)
    assert (kept.devices, kept.order) == (placement.devices, placement.order)
    # The stem is alone, and all of b is beside a: 30 (1 + 1). Of a these 60 ns are beside b:
    # a = 60 (1 + 60 / a), some 97.
    stem, a, b = own.times[BOTH]
    assert (stem, b) == (100, 60)
    assert 94 <= a <= 100
    assert step_ns(own, kept) == kept.stats["makespan_ns"] == stem + a


def test_lanes_pay_where_they_are_seldom_busy_together() -> None:
    """By times of lanes that are always busy the stem would take 150 ns, and a step 240."""
    graph = branches(1.5)
    worst = auto(graph)
    assert len(set(worst.devices)) == 1
    assert step_ns(graph, worst) == 190
    own, kept = settled(graph, LANES, worst, auto, always)
    assert len(set(kept.devices)) == 2
    assert 170 < step_ns(own, kept) < 180  # b = 45, a = 60 (1 + 0.5 * 45 / a), some 77


def test_a_plan_that_does_not_fit_by_its_own_times_is_not_taken() -> None:
    graph = branches(1.5)
    worst = auto(graph)
    _, kept = settled(graph, LANES, worst, auto, lambda _, own: len(set(own.devices)) == 1)
    assert kept.devices == worst.devices
    assert settled(graph, LANES, worst, auto, lambda *_: False) == (graph, worst)


def test_lanes_that_lose_by_all_they_take_from_each_other_are_not_used() -> None:
    graph = branches(4)
    _, kept = settled(graph, LANES, auto(graph), auto, always)
    assert len(set(kept.devices)) == 1


def test_devices_that_are_no_lanes_keep_their_times() -> None:
    graph = branches(2)
    gpus = [Device(f"gpu:{n}", 10**9, kind="gpu") for n in range(2)]
    cluster = Cluster.connected(gpus, Link(0, 10**15))
    placement = Placement(graph.digest, (0, 0, 1), (0, 1, 2))
    assert settled(graph, cluster, placement, None, always) == (graph, placement)
