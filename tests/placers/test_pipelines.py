"""Placements for several micro-batches: the devices and the turns that `solve` finds."""

import random
from dataclasses import replace

import pytest
from benchmarks.pipelines.graphs import UNIT, chunks, cluster_of, layers, towers
from seeds import seeds
from strategies import dense

from baechi import (
    Constraints,
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
from baechi.placers import turn_orders
from baechi.placers.turn_orders import ordered_turns
from baechi.problem.simulation import overflows, period_ns
from baechi.storage.serialization import dumps, loads

LINK = Link(latency_ns=10_000, bytes_per_s=10**11)
MIB = 2**20


def ideal_1f1b(graph, devices, microbatches):
    work = sum(op.time_ns for op in graph.ops)
    return work // devices * (microbatches + devices - 1)


@pytest.mark.parametrize("stages", [2, 4])
def test_a_chain_of_equal_stages_is_split_and_runs_as_1f1b(stages):
    """With room for no more than one stage and what it holds in flight."""
    graph, _ = chunks([0] * stages, [UNIT] * stages, [2 * UNIT] * stages)
    ops = [replace(op, persistent_bytes=100 * (op.name[0] == "F")) for op in graph.ops]
    graph = replace(graph, ops=tuple(ops))
    cluster = cluster_of([100 + stages - at for at in range(stages)])
    placement = solve(graph, cluster, effort="fast", microbatches=8)
    schedule = simulate(graph, cluster, placement)
    assert schedule.makespan_ns == 3 * UNIT * (8 + stages - 1)
    assert not overflows(schedule, cluster)


@pytest.mark.parametrize(("microbatches", "most"), [(8, 0.776), (16, 0.88)])
def test_layers_interleave_where_memory_is_ample(microbatches, most):
    graph, cluster = layers(24), cluster_of([10**12] * 4, LINK)
    placement = solve(graph, cluster, effort="fast", microbatches=microbatches)
    step_ns = simulate(graph, cluster, placement).makespan_ns
    assert step_ns == placement.stats["makespan_ns"]
    assert step_ns <= most * ideal_1f1b(graph, 4, microbatches)


@pytest.mark.unsanitized
def test_layers_interleave_in_the_memory_of_1f1b_and_a_few_layers_more():
    graph = layers(12)
    cluster = cluster_of([(3 + 4 * 3 + 4 + 1) * MIB] * 4, LINK)
    placement = solve(graph, cluster, microbatches=6)
    schedule = simulate(graph, cluster, placement)
    assert schedule.makespan_ns <= 0.9 * ideal_1f1b(graph, 4, 6)
    assert not overflows(schedule, cluster)


def test_of_many_micro_batches_the_best_two_placements_are_ordered_with_all():
    """The one that looks best with eight of sixteen is 7 % longer."""
    graph = layers(24)
    cluster = cluster_of([(6 + 4 * 6 + 8 + 1) * MIB] * 4, LINK)
    placement = solve(graph, cluster, effort="fast", microbatches=16)
    schedule = simulate(graph, cluster, placement)
    assert schedule.makespan_ns <= 1.002 * ideal_1f1b(graph, 4, 16)
    assert not overflows(schedule, cluster)


@pytest.mark.unsanitized
def test_two_towers_and_a_trunk_are_no_slower_than_the_best_row_of_stages():
    """A device each for the towers: the second does not wait for the first."""

    graph = towers(2, 4, 4)
    cluster = cluster_of([10**9] * 3)
    step_ns = simulate(graph, cluster, solve(graph, cluster, microbatches=4)).makespan_ns
    stages = simulate(graph, cluster, solve(graph, cluster, "contiguous", microbatches=4))
    assert step_ns <= stages.makespan_ns
    assert step_ns < ideal_1f1b(graph, 3, 4)
    alone = simulate(graph, cluster, solve(graph, cluster)).makespan_ns
    assert step_ns < 4 * alone


@pytest.mark.parametrize("seed", seeds(30))
def test_every_answer_is_valid_and_no_slower_than_one_batch_after_the_other(seed):
    graph, cluster = dense(seed)
    microbatches = random.Random(seed).randint(2, 5)
    one = solve(graph, cluster, effort="fast")
    placement = solve(graph, cluster, effort="fast", microbatches=microbatches)
    schedule = simulate(graph, cluster, placement)
    assert placement.microbatches == microbatches
    assert placement.graph_digest == graph.digest
    assert not overflows(schedule, cluster)
    assert schedule.lower_bound_ns <= schedule.makespan_ns == placement.stats["makespan_ns"]
    alone = microbatches * simulate(graph, cluster, one).makespan_ns
    assert schedule.makespan_ns <= alone * 1.01
    assert solve(graph, cluster, effort="fast", microbatches=microbatches) == placement


@pytest.mark.unsanitized
@pytest.mark.parametrize("seed", seeds(10))
def test_more_effort_is_never_slower(seed):
    graph, cluster = dense(seed)
    steps = [
        solve(graph, cluster, effort=effort, microbatches=3).stats["makespan_ns"]
        for effort in ("fast", "balanced")
    ]
    # Of steps that are nearly alike the one with fewer turns is taken.
    assert steps[1] <= steps[0] * 1.01


@pytest.mark.unsanitized
def test_equal_input_gives_equal_bytes_and_a_file_has_the_turns():
    graph, cluster = layers(6), cluster_of([30 * MIB] * 3, LINK)
    placement = solve(graph, cluster, microbatches=4)
    text = dumps(placement)
    assert dumps(solve(graph, cluster, microbatches=4)) == text
    assert loads(text) == placement
    assert "turns" not in dumps(solve(graph, cluster))


@pytest.mark.unsanitized
def test_constraints_hold_for_all_micro_batches():
    graph, cluster = layers(6), cluster_of([10**9] * 3, LINK)
    limits = Constraints(pins={"layer0": "d2"}, excluded=("d1",))
    placement = solve(graph, cluster, microbatches=4, constraints=limits)
    assert placement.devices[0] == 2
    assert 1 not in placement.devices
    simulate(graph, cluster, placement, limits)
    few = Constraints(max_devices=2)
    placement = solve(graph, cluster, microbatches=4, constraints=few)
    assert len(set(placement.devices)) == 2
    simulate(graph, cluster, placement, few)


@pytest.mark.parametrize("placer", ["m-etf", "single", "contiguous"])
def test_a_placer_that_is_asked_for_decides_alone_where_ops_go(placer):
    graph, cluster = layers(6), cluster_of([10**9] * 3, LINK)
    placement = solve(graph, cluster, placer, microbatches=4)
    assert placement.devices == solve(graph, cluster, placer).devices
    assert placement.placer == placer


def test_what_fits_once_but_not_several_times_is_named():
    graph = OpGraph((Op("a", 5), Op("b", 5)), (Tensor(0, (1,), 5), Tensor(1, (), 30, kept=True)))
    solve(graph, cluster_of([40]))
    with pytest.raises(InfeasibleError, match=r"not 3: d0 would need 55 B more") as caught:
        solve(graph, cluster_of([40]), microbatches=3)
    assert caught.value.extra_bytes == 55
    solve(graph, cluster_of([95]), microbatches=3)


@pytest.mark.parametrize("number", [0, 2.5, "8"])
def test_the_number_of_micro_batches_is_positive(number):
    with pytest.raises(InputError, match="microbatches"):
        solve(layers(2), cluster_of([10**9]), microbatches=number)


def test_turns_of_a_placement_are_each_there_once():
    graph = layers(2)
    rest = {"graph_digest": graph.digest, "devices": (0,) * 5, "order": tuple(range(5))}
    Placement(**rest, microbatches=2, turns=((0, 0), (0, 1), (1, 0), (1, 1)))
    for microbatches, turns in ((2, ()), (2, ((0, 0), (0, 0))), (1, ((0, 0),)), (0, ())):
        with pytest.raises(InputError, match="micro"):
            Placement(**rest, microbatches=microbatches, turns=turns)


def test_one_micro_batch_is_as_before():
    graph, cluster = layers(4), cluster_of([10**9] * 2, LINK)
    assert solve(graph, cluster, microbatches=1) == solve(graph, cluster)
    assert Placement(graph.digest, (0,) * 9, tuple(range(9))).turns == ()


def line(times, nbytes=10):
    """A chain of ops."""
    ops = tuple(Op(f"o{i}", time) for i, time in enumerate(times))
    return OpGraph(ops, tuple(Tensor(i, (i + 1,), nbytes) for i in range(len(ops) - 1)))


def test_for_throughput_the_period_is_least_and_then_the_step():
    graph, cluster = line([400, 100, 100, 100, 100]), cluster_of([10**6] * 2, Link(5, 10**9))
    one = solve(graph, cluster, effort="fast")
    assert len(set(one.devices)) == 1
    placement = solve(graph, cluster, effort="fast", objective="throughput")
    assert placement.devices == tuple(placement.devices[:1] + 4 * (1 - placement.devices[0],))
    step_ns = simulate(graph, cluster, placement).makespan_ns
    assert step_ns == placement.stats["latency_ns"] == 815
    assert placement.stats["period_ns"] == 400
    steps = [ordered_turns(graph, cluster, placement, n).step_ns for n in (8, 16)]
    assert steps == [815 + 400 * 7, 815 + 400 * 15]
    assert solve(graph, cluster, effort="fast", objective="throughput") == placement
    with pytest.raises(InputError, match="microbatches="):
        solve(graph, cluster, microbatches=2, objective="throughput")
    with pytest.raises(InputError, match="objective is 'speed'; it must be one of step, throughp"):
        solve(graph, cluster, objective="speed")


@pytest.mark.unsanitized
@pytest.mark.parametrize("seed", seeds(20))
def test_no_row_of_runs_is_faster_than_their_period(seed):
    """And what was found has no longer one than a step, or than one device's work."""
    graph, cluster = dense(seed)
    placement = solve(graph, cluster, effort="fast", objective="throughput")
    period = placement.stats["period_ns"]
    assert period <= simulate(graph, cluster, solve(graph, cluster, effort="fast")).makespan_ns
    for n in (1, 5):
        assert ordered_turns(graph, cluster, placement, n).step_ns >= n * period


def test_shared_ports_and_hosts_have_loads_of_their_own():
    cluster = cluster_of([10**6] * 2, Link(300, 10**9))
    graph = line([100, 100, 100], nbytes=0)
    there_and_back = Placement(graph.digest, (0, 1, 0), (0, 1, 2))
    periods = []
    for ports in ("duplex", "shared", "none"):
        some = replace(cluster, ports=ports)
        schedule = simulate(graph, some, there_and_back)
        periods.append(period_ns(graph, some, there_and_back, schedule))
    assert periods == [300, 600, 200]
    slow = replace(graph, ops=tuple(replace(op, launch_ns=250) for op in graph.ops))
    hosted = tuple(replace(device, host="python") for device in cluster.devices)
    some, placement = (
        replace(cluster, devices=hosted),
        replace(there_and_back, graph_digest=slow.digest),
    )
    assert period_ns(slow, some, placement, simulate(slow, some, placement)) == 750


def test_of_many_microbatches_few_order_the_candidates(monkeypatch):
    calls = []

    def noted(turns, effort, in_flight=0):
        calls.append((turns.microbatches, effort))
        return known(turns, effort, in_flight)

    known = turn_orders.shortest_order
    monkeypatch.setattr(turn_orders, "shortest_order", noted)
    graph, cluster = layers(6), cluster_of([10**12] * 2, LINK)
    placement = solve(graph, cluster, microbatches=32)
    assert {many for many, _ in calls} == {8, 32}
    assert sum(many == 32 for many, _ in calls) <= 2
    # Its own turns are taken: nothing is searched for again.
    calls.clear()
    rhythm = ordered_turns(graph, cluster, placement, 32)
    assert not calls
    assert (rhythm.turns, rhythm.step_ns) == (placement.turns, placement.stats["makespan_ns"])
    fast = solve(graph, cluster, microbatches=32, effort="fast")
    assert fast.stats["makespan_ns"] == simulate(graph, cluster, fast).makespan_ns
