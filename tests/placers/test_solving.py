"""`solve`: it fits, it is never worse than one device, and it does not give up too early."""

import pickle
import warnings
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
from fitting_oracle import fits_in_index_order, grown
from hypothesis import given
from hypothesis import strategies as st
from strategies import clusters, graphs, steps

from baechi import (
    METF,
    MSCT,
    Auto,
    Cluster,
    Constraints,
    Device,
    InfeasibleError,
    InputError,
    Link,
    MTopo,
    Op,
    OpGraph,
    Pinned,
    Placement,
    SingleDevice,
    Tensor,
    simulate,
    solve,
)
from baechi.placers.local_search import LocalSearch
from baechi.placers.placer import Placer
from baechi.placers.searching import find, missing_as_run
from baechi.problem.problem_arrays import Problem
from baechi.problem.segments import in_run_order
from baechi.problem.simulation import overflows

LINK = Link(10, 10**9)
NAMES = ["auto", "m-topo", "m-etf", "m-sct"]
EFFORTS = ["fast", "balanced", "thorough"]


@given(graphs(parted=True), clusters(), st.sampled_from(NAMES), st.sampled_from(EFFORTS))
def test_an_answer_is_valid_and_its_prediction_is_right(graph, cluster, name, effort):
    placement = find(Problem(graph, cluster), effort, name)  # what is missing would take longer
    if placement is None:
        return
    schedule = simulate(graph, cluster, placement)
    assert not overflows(schedule, cluster)
    assert schedule.makespan_ns == placement.stats["makespan_ns"]
    assert schedule.makespan_ns >= schedule.lower_bound_ns
    assert placement.placer == name
    again = solve(graph, cluster, name, effort=effort)
    assert again == placement
    assert pickle.dumps(again.stats) == pickle.dumps(placement.stats)


@given(steps(), st.sampled_from(["auto", "m-etf"]), st.integers(1, 19))
def test_a_training_step_fits_as_it_runs(graph, name, share):
    """In the model's order inside of a segment, whatever the placement's is."""
    ample, alone = (Cluster.uniform(n, 2**40, Link(1, 2**40)) for n in (2, 1))
    (whole,) = simulate(graph, alone, solve(graph, alone, "single")).peak_bytes
    cluster = replace(ample, devices=tuple(Device(d, max(whole * share // 20, 1)) for d in "ab"))
    try:
        placement = solve(graph, cluster, name, effort="fast")
    except InfeasibleError as error:
        assert find(Problem(graph, cluster), "fast", name) is None
        rows = {row.name: row for row in cluster.devices}
        if error.extra_device in rows and "as a step runs it" not in error.args[0]:
            own = rows[error.extra_device]
            nbytes = own.memory_bytes + error.extra_bytes
            rows[own.name] = replace(own, memory_bytes=nbytes)
            solve(graph, replace(cluster, devices=tuple(rows.values())), name, effort="fast")
        return
    assert placement == find(Problem(graph, cluster), "fast", name)
    if graph.is_training:
        run = in_run_order(graph, placement)
        assert not overflows(simulate(graph, cluster, run), cluster)


def test_an_order_on_one_device_that_no_step_runs():
    """The longest first, so that what is kept would be there for no time; a step runs it last."""
    ops = (
        Op("kept", 0),
        Op("long", 1),
        Op("loss", 0, group="kept", phase="loss"),
        Op("kept'", 0, group="kept", phase="backward", forward=(0,)),
    )
    tensors = (Tensor(0, (2,), 0), Tensor(0, (), 2, kept=True), Tensor(2, (3,), 0))
    graph = OpGraph(ops, tensors)
    cluster = Cluster.uniform(2, 1, Link(1, 2**40))
    problem, order = Problem(graph, cluster), (1, 0, 2, 3)
    reordered = Placement(graph.digest, (0, 0, 0, 0), order)
    assert not overflows(simulate(graph, cluster, reordered), cluster)
    assert missing_as_run(problem, reordered) == {"device0": 1}
    with pytest.raises(InfeasibleError):
        solve(graph, cluster, effort="fast")


def test_gradients_that_come_first_in_the_run_alone():
    """Backward the run takes the bags before the dense ops, which the placement takes first."""
    kinds = ("dense", "dense", "bag", "bag")
    n = len(kinds)
    forward = [
        Op(f"{k}{i}", 5, 70 if k == "bag" else 10, group=f"{i}") for i, k in enumerate(kinds)
    ]
    backward = [
        Op(
            f"{k}{i}'",
            5,
            group=f"{i}",
            late_bytes=60 * (k == "bag"),
            phase="backward",
            forward=(i + 1,),
        )
        for i, k in enumerate(kinds)
    ]
    middle = (
        Op("sum", 1, group="sum"),
        Op("loss", phase="loss", time_ns=0),
        Op("sum'", 1, group="sum", phase="backward", forward=(n + 1,)),
    )
    gradients = [
        Tensor(n + 3, (2 * n + 3 - i,), 1 if k == "bag" else 40) for i, k in enumerate(kinds)
    ]
    tensors = [
        Tensor(0, tuple(range(1, n + 1)), 1),
        *(Tensor(i, (n + 1,), 1) for i in range(1, n + 1)),
    ]
    tensors += [Tensor(n + 1, (n + 2,), 1), Tensor(n + 2, (n + 3,), 1), *gradients]
    graph = OpGraph((Op("x", 1), *forward, *middle, *reversed(backward)), tuple(tensors))
    order = (0, 1, 2, 4, 3, 5, 6, 7, 11, 10, 8, 9)
    by_hand = Placement(graph.digest, (0, 1, 0, 0, 1, 0, 0, 0, 1, 0, 0, 1), order, "by hand", {})
    clusters = [Cluster.uniform(2, nbytes, Link(1, 10**12)) for nbytes in (103, 162)]
    assert not overflows(simulate(graph, clusters[0], by_hand), clusters[0])
    with pytest.raises(InfeasibleError, match="order inside of a segment"):
        solve(graph, clusters[0])
    assert find(Problem(graph, clusters[0])) is None
    placement = solve(graph, clusters[1])
    run = in_run_order(graph, placement)
    assert not overflows(simulate(graph, clusters[1], run), clusters[1])


@given(graphs(parted=True), clusters(), st.sampled_from(EFFORTS))
def test_auto_is_never_worse_than_a_single_device_that_fits(graph, cluster, effort):
    single = SingleDevice().place(Problem(graph, cluster))
    if single is not None:
        chosen = solve(graph, cluster, effort=effort)
        assert chosen.stats["makespan_ns"] <= single.stats["makespan_ns"]


@given(
    graphs(max_ops=5, min_ops=1, parted=True),
    clusters(memory=st.integers(0, 150)),
    st.sampled_from(["fast", "balanced"]),
)
def test_find_is_solve_without_the_explanation(graph, cluster, effort):
    found = find(Problem(graph, cluster), effort)
    try:
        assert found == solve(graph, cluster, effort=effort)
    except InfeasibleError:
        assert found is None


@given(
    graphs(max_ops=4, min_ops=1, parted=True),
    clusters(max_devices=3, memory=st.integers(0, 150)),
    st.data(),
)
def test_where_brute_force_finds_a_placement_solve_does(graph, cluster, data):
    name = data.draw(st.sampled_from(NAMES))
    if fits_in_index_order(graph, cluster):
        solve(graph, cluster, name)


@pytest.mark.unsanitized
@given(
    graphs(max_ops=4, min_ops=1, parted=True),
    clusters(memory=st.integers(0, 60)),
    st.sampled_from(NAMES),
)
def test_the_missing_memory_is_exact(graph, cluster, name):
    try:
        solve(graph, cluster, name)
        return
    except InfeasibleError as error:
        device, extra = error.extra_device, error.extra_bytes
    assert extra > 0
    solve(graph, grown(cluster, {device}, extra), name)
    assert find(Problem(graph, grown(cluster, {device}, extra - 1)), "balanced", name) is None


def test_the_error_says_what_is_missing():
    graph = OpGraph((Op("small", 5, 10), Op("embed", 5, 9 << 20, 1 << 20)))
    devices = [Device("cuda:0", 3 << 20), Device("cuda:1", 4 << 20)]
    with pytest.raises(InfeasibleError) as caught:
        solve(graph, Cluster.connected(devices, LINK))
    assert str(caught.value) == (
        "cannot place op 'embed' (needs 10.0 MiB when it runs): no device has room then "
        "(cuda:0 3.0 MiB left, cuda:1 4.0 MiB left). Give 6.0 MiB more to cuda:1, add a device, or "
        "shrink the batch."
    )
    error = caught.value
    assert (error.subject, error.needed_bytes) == ("embed", 10 << 20)
    assert error.left_bytes == (("cuda:0", 3 << 20), ("cuda:1", 4 << 20))
    assert (error.extra_bytes, error.extra_device) == (6 << 20, "cuda:1")


@pytest.mark.parametrize(
    ("effort", "more"),
    [("fast", "effort ('auto' with effort='thorough') or memory"), ("thorough", "memory")],
)
def test_the_error_claims_no_proof_that_there_is_none(effort, more):
    # A tree of reductions: the last has 40 bytes in flight, and no op needs more than 30.
    readers = {"a": 4, "b": 4, "c": 5, "d": 5, "e": 6, "f": 6}
    tensors = tuple(Tensor(op, (reader,), 10) for op, reader in enumerate(readers.values()))
    graph = OpGraph(tuple(Op(name, 5) for name in "abcdefg"), tensors)
    with pytest.raises(InfeasibleError) as caught:
        solve(graph, Cluster.uniform(1, 39, LINK), effort=effort)
    assert str(caught.value) == (
        "no placement was found: the search ended where op 'e' needs 30 B to run and no device has "
        f"room (device0 9 B left). That does not prove that there is none. Give more {more} (with "
        "1 B more on device0 one was found), add a device, or shrink the batch."
    )
    solve(graph, Cluster.uniform(1, 40, LINK), effort=effort)


def test_the_error_names_a_group_and_what_is_left_when_it_gets_stuck():
    ops = (Op("a", 5, 60), Op("b", 5, 60), Op("c", 5, 30, group="g"), Op("d", 5, 30, group="g"))
    with pytest.raises(InfeasibleError) as caught:
        solve(OpGraph(ops), Cluster.uniform(2, 100, LINK), "m-etf")
    error = caught.value
    assert (error.subject, error.needed_bytes) == ("g", 60)
    assert error.left_bytes == (("device0", 40), ("device1", 40))
    assert (error.extra_bytes, error.extra_device) == (20, "device0")
    assert "cannot place group 'g'" in str(error)


def test_many_devices_are_not_all_listed():
    with pytest.raises(InfeasibleError, match=r"device7 10 B left, and 4 more devices\)"):
        solve(OpGraph((Op("a", 1, 11),)), Cluster.uniform(12, 10, LINK))


@pytest.mark.parametrize("effort", ["fast", "balanced"])
def test_the_device_that_lacks_least_is_found(effort):
    ops = (Op("a", 0), Op("b", 688, 6), Op("c", 0, 12), Op("d", 899, 6, 25, late_bytes=3))
    ops = tuple(replace(op, reused_bytes=r) for op, r in zip(ops, (0, 53, 3, 0), strict=True))
    tensors = (Tensor(0, (), 22), Tensor(1, (), 36), Tensor(1, (3,), 49), Tensor(2, (3,), 42))
    devices = (Device("x", 99, 0.5), Device("y", 72, 0.5))
    links = ((None, Link(0, 10**7)), (Link(0, 10**11), None))
    rules = Constraints({"b": "x"})
    with pytest.raises(InfeasibleError) as caught:
        solve(
            OpGraph(ops, tensors), Cluster(devices, links, "none"), effort=effort, constraints=rules
        )
    # With 65 bytes more it fits on x, too.
    assert (caught.value.extra_bytes, caught.value.extra_device) == (62, "y")


def test_the_missing_memory_of_a_large_graph_is_found_to_a_unit():
    graph = OpGraph(tuple(Op(f"o{i}", 1, 1000) for i in range(300)))
    cluster = Cluster.uniform(2, 100_500, LINK)
    with pytest.raises(InfeasibleError) as caught:
        solve(graph, cluster, "m-topo")
    # 100 ops fit on one device; the other must take 200.
    unit = 1 + ((300_000 - 100_500) >> 7)
    assert 99_500 <= caught.value.extra_bytes < 99_500 + unit
    solve(graph, grown(cluster, {caught.value.extra_device}, caught.value.extra_bytes), "m-topo")


def test_what_a_pinned_placement_lacks_is_said_and_nothing_is_moved():
    graph = OpGraph((Op("a", 5, 60), Op("b", 5, 70), Op("c", 5, 10)))
    cluster = Cluster.uniform(2, 100, LINK)
    solve(graph, cluster)
    with pytest.raises(InfeasibleError) as caught:
        solve(graph, cluster, Pinned((1, 1, 0)))
    assert str(caught.value) == (
        "the placement of 'pinned' does not fit: device1 would need 30 B more than its 100 B, and "
        "the largest there is op 'b' (70 B). Give it more, shrink the batch, or let a placer that "
        "looks at memory decide, such as 'auto'."
    )
    assert (caught.value.extra_bytes, caught.value.extra_device) == (30, "device1")


def test_one_device_that_does_not_suffice_is_the_one_that_lacks_least():
    graph = OpGraph((Op("a", 5, 60), Op("b", 5, 70)))
    devices = [Device("x", 100), Device("y", 110)]
    with pytest.raises(InfeasibleError) as caught:
        solve(graph, Cluster.connected(devices, LINK), "single")
    assert (caught.value.extra_bytes, caught.value.extra_device) == (20, "y")


def tight():
    """Two devices that a chain of 4, 5, 6 and 5 fills to the byte, in one pairing alone."""
    sizes = [4, 5, 6, 5]
    ops = tuple(Op(f"o{i}", 10, size) for i, size in enumerate(sizes))
    edges = tuple(Tensor(i, (i + 1,), 0) for i in range(3))
    return OpGraph(ops, edges), Cluster.uniform(2, 10, LINK)


@pytest.mark.parametrize("placer", [MTopo(), METF(retries=0), MSCT(retries=0)])
def test_a_dead_end_falls_back_and_says_so(placer):
    graph, cluster = tight()
    assert placer.place(Problem(graph, cluster)) is None
    placement = solve(graph, cluster, placer)
    assert placement.placer == placer.name
    assert placement.stats["fallback"] == "m-etf"
    assert placement.devices[0] == placement.devices[2] != placement.devices[1]


def test_the_stats_of_auto_name_every_candidate():
    graph, cluster = tight()
    stats = solve(graph, cluster).stats
    assert stats["single/device0"] == "does not fit"
    assert stats["m-topo/fine"] == "does not fit"
    assert stats["makespan_ns"] == stats[stats["chosen"]]
    assert {"m-etf/fine", "m-sct/fine", "packing/fine"} <= set(stats)


def test_efforts_look_at_different_grains():
    graph = OpGraph(
        tuple(Op(f"o{i}", 100, 1) for i in range(5)),
        (Tensor(0, (1, 2), 1), Tensor(1, (3,), 1), Tensor(2, (4,), 1)),
    )
    cluster = Cluster.uniform(2, 1000, LINK)
    stats = {effort: solve(graph, cluster, effort=effort).stats for effort in EFFORTS}
    grains = {
        effort: {label.split("/")[1] for label in row if label.startswith("m-")}
        for effort, row in stats.items()
    }
    assert grains == {
        "fast": {"fine"},
        "balanced": {"coarse", "fine"},
        "thorough": {"coarse", "fine"},
    }


@pytest.mark.parametrize("name", ["Auto", "M-SCT", "round-robin", "RANDOM", "Single"])
def test_names_are_read_in_any_case(name):
    graph = OpGraph((Op("a", 5),))
    assert solve(graph, Cluster.uniform(2, 9, LINK), name).placer == name.lower()


@pytest.mark.parametrize("placer", ["alpa", "", None, 3, METF])
def test_an_unknown_placer_is_refused_with_the_names(placer):
    with pytest.raises(InputError, match=r"must be one of 'auto', 'm-topo', 'm-etf', 'm-sct', "):
        solve(OpGraph(()), Cluster.uniform(1, 9, LINK), placer)


def test_an_unknown_effort_is_refused():
    with pytest.raises(InputError, match="must be one of fast, balanced, thorough"):
        solve(OpGraph(()), Cluster.uniform(1, 9, LINK), effort="heroic")
    with pytest.raises(InputError, match="effort is 'heroic'"):
        Auto(effort="heroic")


def test_a_placer_of_the_user_is_checked():
    @dataclass(frozen=True)
    class Everything(Placer):
        name: ClassVar[str] = "everything"

        def place(self, problem):
            n = len(problem.graph.ops)
            stats = {"makespan_ns": 1}
            return Placement(problem.graph.digest, (0,) * n, range(n), self.name, stats)

    graph = OpGraph((Op("a", 5, 60), Op("b", 5, 60)))
    assert solve(graph, Cluster.uniform(2, 120, LINK), Everything()).devices == (0, 0)
    with pytest.raises(InputError, match="'everything' returned a placement that does not fit"):
        solve(graph, Cluster.uniform(2, 100, LINK), Everything())


def test_a_placer_of_the_user_need_not_say_what_its_placement_takes():
    @dataclass(frozen=True)
    class Silent(Placer):
        name: ClassVar[str] = "silent"

        def place(self, problem):
            n = len(problem.graph.ops)
            return Placement(problem.graph.digest, (0,) * n, range(n), self.name)

    graph = OpGraph((Op("a", 5, 60), Op("b", 5, 60)))
    cluster = Cluster.uniform(2, 120, LINK)
    assert solve(graph, cluster, Silent()).stats["makespan_ns"] == 10
    assert solve(graph, cluster, LocalSearch((Silent(),))).stats["makespan_ns"] == 5
    assert solve(graph, cluster, Auto((Silent(),))).stats["silent/fine"] == 10
    with pytest.raises(InputError, match="'silent' returned a placement that does not fit"):
        solve(graph, Cluster.uniform(2, 100, LINK), Silent())


@pytest.mark.parametrize("name", [*NAMES, "single", "round-robin", "random"])
def test_nothing_to_place(name):
    assert solve(OpGraph(()), Cluster.uniform(2, 0, LINK), name).devices == ()


@pytest.mark.parametrize("name", NAMES)
def test_corners(name):
    # No time, no bytes, no memory.
    ops = tuple(Op(f"o{i}", 0) for i in range(3))
    graph = OpGraph(ops, (Tensor(0, (1, 2), 0), Tensor(1, (2,), 0, kept=True)))
    assert solve(graph, Cluster.uniform(2, 0, LINK), name).stats["makespan_ns"] == 0
    # One device with memory, without a link to the others.
    devices = (Device("a", 0), Device("b", 99), Device("c", 0))
    lonely = Cluster(devices, ((None,) * 3,) * 3)
    graph = OpGraph((Op("x", 5, 9), Op("y", 5, 9)), (Tensor(0, (1,), 9),))
    assert solve(graph, lonely, name).devices == (1, 1)


def test_times_of_another_kind_of_device_are_told() -> None:
    graph = OpGraph((Op("a", 10),), times={"cpu": (4,)})
    other = Cluster((Device("d0", 8, kind="H100"),), ((None,),))
    with pytest.warns(UserWarning, match=r"times for cpu and none for H100: .*`baechi estimate`"):
        solve(graph, other)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        solve(graph, Cluster((Device("d0", 8, kind="cpu"),), ((None,),)))
        solve(OpGraph((Op("a", 10),)), other)


def test_no_number_of_micro_batches_follows_from_one_graph() -> None:
    graph = OpGraph((Op("a", 1),), ())
    cluster = Cluster.uniform(2, "1GiB", Link(0, 10**9))
    with pytest.raises(InputError, match=r"several sizes.*place\(model"):
        solve(graph, cluster, microbatches="auto")
    with pytest.raises(InputError, match="microbatches is 'many'"):
        solve(graph, cluster, microbatches="many")
