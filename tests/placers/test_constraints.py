"""Constraints: what they refuse, that every placer respects them, and that none is too strict."""

import pickle
import re
from functools import partial

import numpy as np
import oracle
import pytest
from fitting_oracle import fits_in_index_order, grown
from hypothesis import given
from hypothesis import strategies as st
from oracle import Oracle, spans
from strategies import clusters, constraints_for, graphs, placements, random_favorites

from baechi import (
    METF,
    Cluster,
    Constraints,
    Device,
    InfeasibleError,
    InputError,
    Link,
    Op,
    OpGraph,
    Pinned,
    Placement,
    SingleDevice,
    Span,
    Tensor,
    Timeline,
    simulate,
    solve,
)
from baechi.placers.device_choice import device_choices
from baechi.placers.searching import find
from baechi.problem.coarsening import coarsen
from baechi.problem.problem_arrays import Problem
from baechi.problem.simulation import overflows
from baechi.storage.serialization import dumps, loads

LINK = Link(10, 10**9)
NAMES = ["auto", "m-topo", "m-etf", "m-sct"]
FIXED = ["single", "round-robin", "random"]
EFFORTS = ["fast", "balanced", "thorough"]
# a -> b -> c, where b and c share a group; d alone.
GRAPH = OpGraph(
    (Op("a", 5, 30), Op("b", 5, 30, group="g"), Op("c", 5, 30, group="g"), Op("d", 9, 10)),
    (Tensor(0, (1,), 8), Tensor(1, (2,), 8)),
)
CLUSTER = Cluster.uniform(3, 100, LINK)


def violations(graph, cluster, rules, devices):
    """What a device per op violates but margins, from the words of the constraints."""
    clock = Oracle(graph, cluster, constraints=rules)
    wrong = [op for op, device in enumerate(devices) if device not in clock.places(op)]
    many = rules.max_devices is not None and len(set(devices)) > rules.max_devices
    return wrong + ["too many devices"] * many


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Constraints(pins=[("a", "b")]), "pins is .*, a list; give a mapping by name"),
        (lambda: Constraints(pins={"a": 0}), "the device of pin 'a' is 0"),
        (lambda: Constraints(pins={"": "d"}), "a pinned op is ''"),
        (lambda: Constraints(forbidden={"a": "d"}), r"forbidden\['a'\] is 'd'; give a list"),
        (lambda: Constraints(forbidden={"a": (1,)}), r"a device of forbidden\['a'\] is 1"),
        (lambda: Constraints(excluded="d"), "excluded is 'd'; give a list of device names"),
        (lambda: Constraints(max_devices=0), "max_devices is 0; it must be a positive integer"),
        (lambda: Constraints(max_devices=-1), "max_devices is -1"),
        (lambda: Constraints(max_devices=1.5), "max_devices is 1.5; it must be a positive integer"),
        (lambda: Constraints(margins={"d": -1}), "margin of device 'd' is -1"),
        (lambda: Constraints(margins={"d": "much"}), "margin of device 'd' 'much' cannot be read"),
    ],
)
def test_what_is_wrong_is_named(make, match):
    with pytest.raises(InputError, match=match):
        make()


def test_constraints_are_a_value_and_survive_json():
    rules = Constraints(
        {"a": "device0"}, {"g": ["device2", "device1", "device2"]}, ["device1"], 2, {"x": "1KiB"}
    )
    assert rules.forbidden["g"] == ("device1", "device2")
    assert rules.margins["x"] == 1024
    assert pickle.loads(pickle.dumps(rules)) == rules
    assert loads(dumps(rules), Constraints) == rules
    assert hash(loads(dumps(rules))) == hash(rules)
    assert loads('{"format": "baechi", "type": "Constraints", "version": 1, "value": {}}') == (
        Constraints()
    )


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("h.0", "name; it is a submodule's, so name its ops: 'h.0.norm/add', 'h.0/mul'."),
        ("h.0/mull", "name. Did you mean 'h.0/mul', 'h.01/mul'?"),
        ("transformer", "name, only 'h.0.norm/add', 'h.0/mul', 'h.01/mul'."),
    ],
)
def test_an_unknown_name_gets_a_hint(name, hint):
    graph = OpGraph(tuple(Op(name, 1) for name in ("h.0.norm/add", "h.0/mul", "h.01/mul")))
    with pytest.raises(InputError, match=re.escape(f"names {name!r}, but")) as caught:
        solve(graph, CLUSTER, constraints=Constraints(pins={name: "device0"}))
    assert str(caught.value).endswith(hint)


@pytest.mark.parametrize(
    ("rules", "match"),
    [
        (Constraints(pins={"x": "device0"}), "a pin names 'x', but the graph has no op and no gro"),
        (Constraints(pins={"a": "gpu"}), "the pin of 'a' names device 'gpu'; the cluster has 'dev"),
        (Constraints(forbidden={"x": ("device0",)}), r"forbidden\['x'\] names 'x', but the graph"),
        (Constraints(forbidden={"a": ("gpu",)}), r"forbidden\['a'\] names device 'gpu'"),
        (Constraints(excluded=("gpu",)), "excluded names device 'gpu'"),
        (Constraints(margins={"gpu": 1}), "a margin names device 'gpu'"),
        (
            Constraints({"a": "device0"}, {"a": ("device0",)}),
            "'a' is pinned to 'device0', where the constraints also forbid it; drop",
        ),
        (
            Constraints({"g": "device0"}, excluded=("device0",)),
            "'g' is pinned to 'device0', where the constraints also forbid it",
        ),
        (
            Constraints({"b": "device0", "c": "device1"}),
            "'b' is pinned to 'device0' and 'c' to 'device1', but they are in one group",
        ),
        (
            Constraints(forbidden={"b": ("device0", "device1"), "c": ("device2",)}),
            "op 'b' may go to no device: all are forbidden to it or to its group, or excluded",
        ),
        (
            Constraints({"a": "device0", "g": "device1", "d": "device2"}, max_devices=2),
            "may go to .* alone, but max_devices is 2; raise it, pin to fewer",
        ),
        (
            Constraints(
                {"a": "device0"}, {"g": ("device0", "device2")}, ("device2",), max_devices=1
            ),
            "ops that may go to 'device0', 'device1' alone, but max_devices is 1; raise it, pin",
        ),
    ],
)
def test_what_cannot_be_is_refused(rules, match):
    for ask in (
        lambda: solve(GRAPH, CLUSTER, constraints=rules),
        lambda: simulate(GRAPH, CLUSTER, solve(GRAPH, CLUSTER), rules),
        lambda: Timeline(GRAPH, CLUSTER, rules),
    ):
        with pytest.raises(InputError, match=match):
            ask()


def test_what_are_no_constraints_is_refused():
    with pytest.raises(InputError, match=r"constraints is .*, a dict; give a Constraints"):
        solve(GRAPH, CLUSTER, constraints={"max_devices": 1})


@pytest.mark.parametrize(
    ("rules", "match"),
    [
        (
            Constraints({"a": "device1"}),
            "op 'a' is on 'device0', but .* pin op 'a' to 'device1'",
        ),
        (
            Constraints({"c": "device0"}),
            "op 'b' is on 'device1', but .* pin 'c', with",
        ),
        (
            Constraints({"g": "device0"}),
            "'b' is on 'device1', but .* pin 'g', with wh",
        ),
        (Constraints(excluded=("device1",)), "op 'b' is on 'device1', which the constraints exclu"),
        (Constraints(forbidden={"d": ("device2",)}), "'d' is on 'device2', .* forbid to op 'd'"),
        (Constraints(max_devices=2), "the placement uses 3 devices .*, but max_devices is 2"),
    ],
)
def test_the_violated_constraint_is_named(rules, match):
    placement = Placement(GRAPH.digest, (0, 1, 1, 2), range(4))
    assert simulate(GRAPH, CLUSTER, placement).makespan_ns > 0
    with pytest.raises(InputError, match=match):
        simulate(GRAPH, CLUSTER, placement, rules)
    with pytest.raises(InputError, match=match):
        solve(GRAPH, CLUSTER, Pinned((0, 1, 1, 2)), constraints=rules)


def test_a_margin_is_memory_that_is_not_there():
    devices = [Device("a", 100, pool="p"), Device("b", 100, pool="p"), Device("c", 100)]
    cluster = Cluster.connected(devices, LINK)
    graph = OpGraph((Op("x", 5, 60), Op("y", 5, 60)))
    rules = Constraints(margins={"b": 30, "a": 20, "c": 10**6})
    assert Problem(graph, cluster, rules).pool_memory == (70, 0)
    schedule = simulate(graph, cluster, Placement(graph.digest, (0, 2), (0, 1)), rules)
    assert overflows(schedule, cluster) == ()
    assert overflows(schedule, cluster, Constraints(margins={"b": 50})) == (("a", 10), ("b", 10))
    assert solve(graph, cluster, constraints=Constraints(margins={"b": 30})).devices
    with pytest.raises(InfeasibleError):
        solve(graph, cluster, constraints=Constraints(margins={"b": 50}))


@given(st.data())
def test_the_clock_agrees_with_the_oracle_at_every_step(data):
    graph, cluster = data.draw(graphs(max_ops=6)), data.draw(clusters())
    rules = data.draw(constraints_for(graph, cluster))
    timeline = Timeline(graph, cluster, rules)
    clock = Oracle(graph, cluster, constraints=rules)
    for op in range(len(graph.ops)):
        fitting = []
        for device in range(len(cluster.devices)):
            fits = clock.fits(op, device)
            assert timeline.fits(op, device) == fits
            if fits:
                fitting.append(device)
            elif device not in clock.places(op):
                with pytest.raises(InputError, match="constraints"):
                    timeline.commit(op, device)
        if not fitting:
            return
        device = data.draw(st.sampled_from(fitting))
        start, end = clock.commit(op, device)
        assert timeline.commit(op, device) == Span(op, device, start, end)


def test_a_full_house_is_said():
    timeline = Timeline(GRAPH, CLUSTER, Constraints(max_devices=1))
    timeline.commit(0, 1)
    assert not timeline.fits(1, 0)
    with pytest.raises(InputError, match="'b' cannot go to 'device0': 1 other devices are in use"):
        timeline.commit(1, 0)


@given(st.data(), st.booleans())
def test_the_list_schedulers_agree_with_the_oracle(data, sct):
    graph, cluster = data.draw(graphs(max_ops=7)), data.draw(clusters())
    rules = data.draw(constraints_for(graph, cluster))
    favorites = random_favorites(graph, data.draw(st.integers(0, 9))) if sct else None
    clock = Oracle(graph, cluster, constraints=rules)
    done = oracle.list_schedule(
        clock, None if favorites is None else [None if f < 0 else f for f in favorites]
    )
    timeline = Problem(graph, cluster, rules).timeline()
    assert timeline.list_schedule(np.array(favorites or [], np.int32)) == done
    assert spans(timeline) == [(op, *span) for op, span in clock.spans.items()]


@given(st.data(), st.sampled_from(NAMES), st.sampled_from(EFFORTS))
def test_an_answer_respects_the_constraints(data, name, effort):
    graph, cluster = data.draw(graphs()), data.draw(clusters())
    rules = data.draw(constraints_for(graph, cluster))
    placement = find(Problem(graph, cluster, rules), effort, name)
    if placement is None:  # what is missing would take longer to find
        return
    assert violations(graph, cluster, rules, placement.devices) == []
    schedule = simulate(graph, cluster, placement, rules)
    assert overflows(schedule, cluster, rules) == ()
    assert schedule.makespan_ns == placement.stats["makespan_ns"]
    assert schedule.makespan_ns >= schedule.lower_bound_ns
    assert solve(graph, cluster, name, effort=effort, constraints=rules) == placement


@given(st.data(), st.sampled_from(EFFORTS))
def test_auto_is_never_worse_than_a_single_device_that_may_take_all(data, effort):
    graph, cluster = data.draw(graphs()), data.draw(clusters())
    rules = data.draw(constraints_for(graph, cluster))
    single = SingleDevice().place(Problem(graph, cluster, rules))
    if single is not None:
        chosen = solve(graph, cluster, effort=effort, constraints=rules)
        assert chosen.stats["makespan_ns"] <= single.stats["makespan_ns"]


@given(st.data(), st.sampled_from(FIXED))
def test_what_does_not_search_respects_them_too_or_says_why_not(data, name):
    graph, cluster = data.draw(graphs(min_ops=1)), data.draw(clusters(whole=True))
    rules = data.draw(constraints_for(graph, cluster))
    try:
        placement = solve(graph, cluster, name, constraints=rules)
    except (InfeasibleError, InputError):
        return
    assert violations(graph, cluster, rules, placement.devices) == []


@given(st.data())
def test_the_simulator_refuses_exactly_what_violates(data):
    graph, cluster = data.draw(graphs()), data.draw(clusters(whole=True))
    rules = data.draw(constraints_for(graph, cluster))
    placement = data.draw(placements(graph, cluster))
    if violations(graph, cluster, rules, placement.devices):
        with pytest.raises(InputError):
            simulate(graph, cluster, placement, rules)
    else:
        same = simulate(graph, cluster, placement)
        other = simulate(graph, cluster, placement, rules)
        assert (same.spans, same.peak_bytes) == (other.spans, other.peak_bytes)
        assert overflows(other, cluster, rules) or other.makespan_ns >= other.lower_bound_ns


@given(graphs(max_ops=4, min_ops=1), clusters(max_devices=3, memory=st.integers(0, 150)), st.data())
def test_where_brute_force_finds_a_placement_solve_does(graph, cluster, data):
    rules = data.draw(constraints_for(graph, cluster))
    name = data.draw(st.sampled_from(NAMES))
    violates = partial(violations, graph, cluster, rules)
    if fits_in_index_order(graph, cluster, rules=rules, violates=violates):
        solve(graph, cluster, name, constraints=rules)


@pytest.mark.unsanitized
@given(graphs(max_ops=5, min_ops=1), clusters(max_devices=3, memory=st.integers(0, 60)), st.data())
def test_the_missing_memory_is_exact(graph, cluster, data):
    rules = data.draw(constraints_for(graph, cluster))
    try:
        solve(graph, cluster, constraints=rules)
        return
    except InfeasibleError as error:
        where, extra = error.extra_device, error.extra_bytes
    names = {device.name for device in cluster.devices}
    if not where:
        with pytest.raises(InfeasibleError, match="more memory would not help"):
            solve(graph, grown(cluster, names, 10**6), constraints=rules)
        return
    where = names if where == "every device" else {where}
    solve(graph, grown(cluster, where, extra), constraints=rules)
    assert find(Problem(graph, grown(cluster, where, extra - 1), rules), "balanced") is None


def test_a_pool_keeps_the_margin_of_a_device_that_is_left_out():
    devices = (Device("a", 10, pool="p"), Device("b", 10, pool="p"))
    cluster = Cluster.connected(devices, LINK)
    rules = Constraints(excluded=("b",), margins={"b": 4})
    small = Problem(OpGraph((Op("x", 1, 5),)), cluster, rules).on([0])
    assert small.pool_memory == (6,)
    with pytest.raises(InfeasibleError):
        solve(OpGraph((Op("x", 1, 7),)), cluster, constraints=rules)
    assert solve(OpGraph((Op("x", 1, 6),)), cluster, constraints=rules).devices == (0,)


def test_pins_that_no_device_alone_can_help():
    graph = OpGraph((Op("a", 1, 50), Op("b", 1, 60)))
    rules = Constraints({"a": "device0", "b": "device1"})
    with pytest.raises(InfeasibleError, match="no single device can help: give 50 B more to every"):
        solve(graph, Cluster.uniform(3, 10, LINK), constraints=rules)


def test_pins_that_no_link_joins():
    graph = OpGraph((Op("a", 1), Op("b", 1)), (Tensor(0, (1,), 1),))
    lonely = Cluster((Device("x", 9), Device("y", 9)), ((None, None), (LINK, None)))
    assert solve(graph, lonely, constraints=Constraints({"a": "y", "b": "x"})).devices == (1, 0)
    with pytest.raises(InfeasibleError, match="more memory would not help") as caught:
        solve(graph, lonely, constraints=Constraints({"a": "x", "b": "y"}))
    assert (caught.value.extra_bytes, caught.value.extra_device) == (0, "")


def test_links_that_leave_more_devices_than_may_be_used():
    graph = OpGraph((Op("a", 1, 5), Op("b", 1, 5)), (Tensor(0, (1,), 1),))
    names = ("w", "x", "y", "z")
    links = [[None] * 4 for _ in names]
    links[0][2] = LINK
    rules = Constraints({}, {"a": ("y", "z"), "b": ("w", "x")}, max_devices=1)
    for memory in (0, 99):
        cluster = Cluster(tuple(Device(name, memory) for name in names), tuple(map(tuple, links)))
        with pytest.raises(InfeasibleError, match="takes more devices than may be used"):
            solve(graph, cluster, constraints=rules)


def test_the_error_lists_the_devices_that_may_be_used():
    graph = OpGraph((Op("a", 1, 50),))
    devices = [Device("x", 10), Device("y", 20), Device("z", 99)]
    rules = Constraints(excluded=("z",))
    with pytest.raises(InfeasibleError) as caught:
        solve(graph, Cluster.connected(devices, LINK), constraints=rules)
    assert str(caught.value) == (
        "cannot place op 'a' (needs 50 B when it runs): no device that it may use has room then "
        "(x 10 B left, y 20 B left). Give 30 B more to y, add a device, or shrink the batch."
    )


def test_the_error_lists_no_device_that_the_limit_keeps_out():
    graph = OpGraph((Op("a", 1, 60), Op("b", 1, 50)))
    with pytest.raises(InfeasibleError, match=r"that it may use has room then \(device0 40 B left"):
        solve(graph, CLUSTER, constraints=Constraints(max_devices=1))


def test_no_lump_spans_two_colors():
    ops = tuple(Op(f"o{i}", 1, 1) for i in range(6))
    graph = OpGraph(ops, tuple(Tensor(i, (i + 1,), 10**6) for i in range(5)))
    cluster = Cluster.uniform(2, 10**9, LINK)
    assert len(coarsen(Problem(graph, cluster)).members) == 1
    rules = Constraints({"o2": "device1"}, {"o3": ("device0",)})
    assert coarsen(Problem(graph, cluster, rules)).members == ((0, 1), (2, 3), (4, 5))
    assert solve(graph, cluster, constraints=rules).devices == (1,) * 6
    rules = Constraints({"o0": "device0", "o5": "device1"})
    assert solve(graph, cluster, constraints=rules, effort="fast").devices[::5] == (0, 1)


@pytest.mark.parametrize("name", NAMES)
def test_the_best_few_of_unequal_devices_are_chosen(name):
    graph = OpGraph(tuple(Op(f"o{i}", 1000, 10) for i in range(8)))
    devices = [Device(f"slow{i}", 40) for i in range(6)]
    devices[3], devices[5] = Device("big", 60, 0.5), Device("fast", 40, 4.0)
    cluster = Cluster.connected(devices, LINK)
    assert set(solve(graph, cluster, "m-etf", constraints=Constraints(max_devices=2)).devices)
    placement = solve(graph, cluster, name, constraints=Constraints(max_devices=2))
    assert len(set(placement.devices)) == 2
    assert 5 in placement.devices
    with pytest.raises(InfeasibleError):
        solve(graph, cluster, name, constraints=Constraints(max_devices=1))


def test_equal_devices_are_one_choice():
    rules = Constraints(max_devices=2)
    graph = OpGraph((Op("a", 1), Op("b", 1)))
    wide = Problem(graph, Cluster.uniform(300, 10, LINK), rules)
    assert list(device_choices(wide)) == [(0, 1)]
    devices = [Device(f"d{i}", 10 + i // 2) for i in range(4)]
    problem = Problem(graph, Cluster.connected(devices, LINK), rules)
    assert sorted(device_choices(problem)) == [(0, 1), (0, 2), (2, 3)]
    assert list(device_choices(Problem(graph, CLUSTER))) == [(0, 1, 2)]


def test_one_device_among_those_allowed():
    graph = OpGraph((Op("a", 5), Op("b", 5)))
    rules = Constraints(forbidden={"a": ("device0",), "b": ("device2",)})
    assert solve(graph, CLUSTER, "single", constraints=rules).devices == (1, 1)
    with pytest.raises(InputError, match="op 'a' is on 'device0', which the constraints forbid"):
        solve(graph, CLUSTER, SingleDevice(0), constraints=rules)
    rules = Constraints({"a": "device0", "b": "device1"})
    with pytest.raises(InputError, match="the constraints allow no single device for all ops"):
        solve(graph, CLUSTER, "single", constraints=rules)


def test_a_placer_asked_directly_respects_the_limit():
    graph = OpGraph(tuple(Op(f"o{i}", 10) for i in range(6)))
    placement = METF().place(Problem(graph, CLUSTER, Constraints(max_devices=2)))
    assert sorted(set(placement.devices)) == [0, 1]
    assert placement.stats["makespan_ns"] == 30
