"""What streams hold: bytes by hand, and placements that have room for them."""

import pytest
from benchmarks.pipelines.graphs import layers
from hypothesis import given
from hypothesis import strategies as st
from strategies import graphs

from baechi import (
    Cluster,
    Constraints,
    Device,
    InfeasibleError,
    Link,
    Op,
    OpGraph,
    Placement,
    Tensor,
    simulate,
    solve,
)
from baechi.problem.simulation import overflows
from baechi.program.stream_memory import scheduled, solve_with_held

LINK = Link(latency_ns=0, bytes_per_s=10**15)
LANES = ("cuda:0", "cuda:0")


def cluster_of(memory: int | str, n: int = 2) -> Cluster:
    rows = [Device(f"cuda:0/{lane}", memory) for lane in range(n)]
    return Cluster.connected(rows, LINK)


def placement_of(graph: OpGraph, *devices: int) -> Placement:
    return Placement(graph.digest, devices, tuple(range(len(devices))))


# a makes 100 bytes, which b reads on the other lane; c and d go on there with more and more.
INFERENCE = OpGraph(
    tuple(Op(name, 10) for name in "abcd"),
    (Tensor(0, (1,), 100), Tensor(1, (2,), 10), Tensor(2, (3,), 200), Tensor(3, (), 1, kept=True)),
)


def test_what_crosses_lanes_is_held_to_the_end_of_the_phase() -> None:
    cluster, placement = cluster_of("1GiB"), placement_of(INFERENCE, 0, 1, 1, 1)
    assert simulate(INFERENCE, cluster, placement).peak_bytes == (100, 210)
    held = scheduled(INFERENCE, cluster, placement, LANES)
    # While c makes 200 of 10 the 100 of a are still there; then d gives 1, and a copy of it.
    assert held.peak_bytes == (100, 310)
    assert held.makespan_ns == simulate(INFERENCE, cluster, placement).makespan_ns
    assert held.lower_bound_ns == simulate(INFERENCE, cluster, placement).lower_bound_ns


def test_a_result_is_there_twice_while_it_is_copied_for_the_caller() -> None:
    graph = OpGraph(INFERENCE.ops, (*INFERENCE.tensors[:3], Tensor(3, (), 400, kept=True)))
    cluster, placement = cluster_of("1GiB"), placement_of(graph, 0, 1, 1, 1)
    # Before anything is let go of that crossed, so beside the 100 of a.
    assert scheduled(graph, cluster, placement, LANES).peak_bytes == (100, 400 + 400 + 100)
    apart = ("cuda:0", "cuda:1")  # the caller's own stream made it
    assert scheduled(graph, cluster, placement, apart).peak_bytes == (100, 100 + 200 + 400)


@pytest.mark.parametrize("gpus", [LANES, ("cuda:0", "cuda:1")])
def test_what_is_sent_is_held_to_the_end_of_the_segment_that_runs_meanwhile(
    gpus: tuple[str, str],
) -> None:
    """b reads a's 100 on the other lane; c reads them, and d works with 200 in c's segment."""
    graph = OpGraph(
        (Op("a", 10), Op("b", 10), Op("c", 10), Op("d", 10, workspace_bytes=200), Op("e", 10)),
        (
            *(Tensor(0, (1, 2), 100), Tensor(1, (4,), 8)),
            *(Tensor(2, (3,), 10), Tensor(3, (4,), 5), Tensor(4, (), 0, kept=True)),
        ),
    )
    cluster, placement = cluster_of("1GiB"), placement_of(graph, 0, 1, 0, 0, 0)
    assert simulate(graph, cluster, placement).peak_bytes == (10 + 200 + 5 + 8, 100 + 8)
    held = scheduled(graph, cluster, placement, gpus)
    # b's 8 arrive earlier than d ends, but their copy is launched after it.
    assert held.peak_bytes == (100 + 10 + 200 + 5, 100 + 8)


@pytest.mark.parametrize("gpus", [(None, None), ("cuda:0", None)])
def test_a_cpu_holds_nothing(gpus: tuple[str | None, ...]) -> None:
    cluster, placement = cluster_of("1GiB"), placement_of(INFERENCE, 0, 1, 1, 1)
    planned = simulate(INFERENCE, cluster, placement)
    assert scheduled(INFERENCE, cluster, placement, gpus) == planned


def test_what_stands_there_counts_before_its_op_is_launched() -> None:
    ops = (Op("large", 5, 0, 100), Op("state:table", 0), Op("reader", 5))
    graph = OpGraph(ops, (Tensor(0, (2,), 1), Tensor(1, (2,), 60, kept=True)))
    assert graph.standing == {1}
    cluster, placement = cluster_of("1GiB"), Placement(graph.digest, (0, 0, 1), (0, 1, 2))
    assert simulate(graph, cluster, placement).peak_bytes == (101, 61)
    assert scheduled(graph, cluster, placement, [None, None]).peak_bytes == (161, 61)
    timed = OpGraph(graph.ops, graph.tensors, {"gpu": (5, 1, 5)})
    assert not timed.standing


def test_one_lane_holds_nothing_but_what_graphs_leave() -> None:
    cluster, placement = cluster_of("1GiB", 1), placement_of(INFERENCE, 0, 0, 0, 0)
    assert scheduled(INFERENCE, cluster, placement, LANES[:1]).peak_bytes == (210,)
    # All is inside of one tape; the result stays, and the caller gets a copy.
    graphs = scheduled(INFERENCE, cluster, placement, LANES[:1], replayed=True)
    assert graphs.peak_bytes == (211,)


# c, a and b, the loss, and their backwards; b's backward reads what a made.
STEP = OpGraph(
    (
        *(Op("c", 10, group="c"), Op("a", 10, group="a"), Op("b", 10, group="b")),
        Op("loss", 0, phase="loss"),
        Op("b'", 10, group="b", phase="backward", forward=(2,)),
        Op("a'", 10, group="a", phase="backward", forward=(1,)),
        Op("c'", 10, workspace_bytes=500, group="c", phase="backward", forward=(0,)),
    ),
    (
        *(Tensor(0, (1,), 30), Tensor(1, (2, 4), 100), Tensor(2, (3,), 8, kept=True)),
        *(Tensor(3, (4,), 8), Tensor(4, (5,), 100), Tensor(5, (6,), 30)),
    ),
)


def test_what_autograd_saved_and_every_gradient_are_held_to_the_end_of_the_step() -> None:
    cluster, placement = cluster_of("1GiB"), placement_of(STEP, 1, 0, 1, 1, 1, 0, 1)
    # In c's backward lane 1 has 500 to work with, b's 8, and the 30 that have just arrived.
    assert simulate(STEP, cluster, placement).peak_bytes == (130, 538)
    # There are still a's 100, which b saved, and the 8 that the caller gave.
    assert scheduled(STEP, cluster, placement, LANES).peak_bytes == (130, 646)
    # On GPUs of their own the caller's gradient is nobody else's to read.
    apart = ("cuda:0", "cuda:1")
    assert scheduled(STEP, cluster, placement, apart).peak_bytes == (130, 638)
    # Graphs leave what c and a made, and every gradient, where they are; the caller has a result's
    # copy to the end.
    static = scheduled(STEP, cluster, placement, apart, replayed=True)
    assert static.peak_bytes == (30 + 100 + 100 + 30, 538 + 30 + 100 + 8 + 100 + 8)


def test_a_placement_leaves_room_for_what_is_held() -> None:
    """Both ops fit apart by the clock; with what is held they do not."""
    memory = 250
    cluster = cluster_of(memory)
    graph = OpGraph(
        tuple(
            Op(name, 10, size, group=name)
            for name, size in (("a", 100), ("b", 40), ("c", 0), ("d", 0))
        ),
        INFERENCE.tensors,
    )
    apart = placement_of(graph, 0, 1, 1, 1)
    assert not overflows(simulate(graph, cluster, apart), cluster)
    assert overflows(scheduled(graph, cluster, apart, LANES), cluster)
    found = solve_with_held(graph, cluster, "auto", LANES)
    assert not overflows(scheduled(graph, cluster, found, LANES), cluster)


def test_what_has_no_room_is_refused_with_what_is_missing() -> None:
    """The two halves must be apart, and where b is there are a's 100 besides c's."""
    graph = OpGraph(
        (
            Op("a", 10, 200),
            *(Op(name, 10, size, group="b") for name, size in (("b", 200), ("c", 0))),
        ),
        (Tensor(0, (1,), 100), Tensor(1, (2,), 10), Tensor(2, (), 100)),
    )
    cluster = cluster_of(350)
    assert solve(graph, cluster).devices in {(0, 1, 1), (1, 0, 0)}
    with pytest.raises(InfeasibleError, match="what streams hold") as raised:
        solve_with_held(graph, cluster, "auto", LANES)
    assert raised.value.extra_bytes == 60


@pytest.mark.parametrize("mib", [60, 50, 35, 25])
@pytest.mark.parametrize("gpus", [("cuda:0", "cuda:1"), ("cuda:0", "cuda:0")], ids=["two", "lanes"])
def test_micro_batches_fit_with_what_streams_hold(mib: int, gpus: tuple[str, str]) -> None:
    """What lanes hand over stays to the end of the step, what another GPU sent until it is read."""
    graph = layers(8, sent=2**20)
    cluster = Cluster.uniform(2, mib * 2**20, Link(10_000, 10**11))
    plain = solve(graph, cluster, effort="fast", microbatches=8)
    over = overflows(scheduled(graph, cluster, plain, gpus), cluster)
    assert bool(over) == (gpus[0] == gpus[1] or mib in (50, 25))  # without what is held
    found = solve_with_held(graph, cluster, "auto", gpus, effort="fast", microbatches=8)
    schedule = scheduled(graph, cluster, found, gpus)
    assert not overflows(schedule, cluster)
    assert found.microbatches == 8
    assert schedule.makespan_ns == simulate(graph, cluster, found).makespan_ns


@given(st.data())
def test_what_is_placed_fits_and_is_placed_the_same_each_time(data: st.DataObject) -> None:
    graph = data.draw(graphs(max_ops=7))
    cluster = cluster_of(data.draw(st.integers(1, 400)), data.draw(st.integers(1, 3)))
    gpus = data.draw(st.tuples(*[st.sampled_from([None, "cuda:0", "cuda:1"])] * 3))
    gpus = gpus[: len(cluster.devices)]
    replayed = data.draw(st.booleans())
    constraints = data.draw(st.sampled_from([None, Constraints(margins={"cuda:0/0": 5})]))
    try:
        found = solve_with_held(
            graph, cluster, "m-etf", gpus, constraints=constraints, replayed=replayed
        )
    except InfeasibleError:
        return
    held = scheduled(graph, cluster, found, gpus, replayed=replayed)
    assert not overflows(held, cluster, constraints)
    assert not overflows(simulate(graph, cluster, found), cluster, constraints)
    again = solve_with_held(
        graph, cluster, "m-etf", gpus, constraints=constraints, replayed=replayed
    )
    assert again == found
