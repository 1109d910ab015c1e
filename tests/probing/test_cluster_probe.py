"""What a machine has: names, capacities, links."""

import os
from collections.abc import Callable, Iterator
from dataclasses import astuple
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda import driver_too_old

import baechi
from baechi import Link
from baechi.probing import cluster_probe, link_probe
from baechi.probing.cluster_probe import replay_host
from baechi.probing.link_probe import (
    FREE_BYTES_PER_S,
    SIZES,
    LinkFit,
    copy_times_ns,
    first_broken_size,
    fit_link,
    graph_launch_ns,
    handover,
)
from baechi.torch_support.torch_devices import blas_bytes, torch_device

CPU = torch.device("cpu")


def handed(wait_ns: int, busy_ns: int) -> Link:
    return Link(wait_ns, FREE_BYTES_PER_S, overhead_ns=busy_ns)


def test_logical_cpu_devices_share_the_free_memory_and_are_linked() -> None:
    cluster = baechi.probe(["cpu:0", "cpu:1"])
    assert [device.name for device in cluster.devices] == ["cpu:0", "cpu:1"]
    assert cluster.devices[0].memory_bytes == cluster.devices[1].memory_bytes > 2**20
    link = cluster.links[0][1]
    assert link is not None
    assert 0 <= link.latency_ns < 10_000_000
    assert 0 < link.overhead_ns < 10_000_000
    assert link.bytes_per_s == FREE_BYTES_PER_S  # nothing is copied


def test_capacities_names_devices_and_clusters_are_taken() -> None:
    by_capacity = baechi.probe({"cpu:0": "1GiB", "cpu:1": 5})
    assert [device.memory_bytes for device in by_capacity.devices] == [2**30, 5]
    by_value = baechi.probe([baechi.Device("cpu:0", "2GiB", speed=0.5), torch.device("cpu", 1)])
    assert by_value.devices[0].speed == 0.5
    assert by_value.devices[1].name == "cpu:1"
    assert baechi.probe(by_value) is by_value
    assert len(baechi.probe("cpu:0").devices) == 1


def test_gpus_that_torch_cannot_run_on_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    driver_too_old(monkeypatch)
    for device in ("cuda:0", "cuda:0/a", "cuda"):
        with pytest.raises(baechi.InputError) as caught:
            baechi.probe([device])
        text = str(caught.value)
        assert f"device {device!r} cannot be used" in text
        assert "1 CUDA device(s)" in text
        assert "built for CUDA 13.0" in text
        assert "driver on your system is too old (found version 12020)" in text
        assert "Update the driver" in text
        assert "whl/cu126" in text


def test_without_devices_gpus_that_torch_cannot_run_on_leave_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver_too_old(monkeypatch)
    model, x = torch.nn.Linear(2, 2), torch.ones(1, 2)
    expected = model(x)
    with pytest.warns(UserWarning, match=r"^CPU used: the driver .* too old.*Update") as caught:
        placed = baechi.place(model, costs="estimate")
    assert len(caught) == 1
    assert "\n" not in str(caught[0].message)
    assert torch.equal(placed(x), expected)
    assert [device.name for device in placed.cluster.devices] == ["cpu:0"]


def test_all_gpus_have_one_host_and_cpus_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "torch_device": lambda name: torch.device(name.split("/")[0]),
        "free_bytes": lambda *_: 5,
        "device_kind": lambda place: place.type,
        "lane_ns": lambda _: 0,
        "_fit": lambda *_: LinkFit(Link(0, 1), (), 0.0, 0),
        "_handover": lambda pair, **_: Link(0, 1, 7 if "/" in pair[0] else 9),
    }.items():
        monkeypatch.setattr(cluster_probe, name, value)
    own = baechi.Device("cuda:2", 5)
    cluster = baechi.probe(["cuda:0/a", "cuda:0/b", "cuda:1", "cpu:0", own])
    assert [device.host for device in cluster.devices] == ["python"] * 3 + ["", ""]
    assert all(device.launches_ahead for device in cluster.devices)
    # What a GPU with a host receives takes that host's time: of a lane or a CPU, or of another GPU.
    overheads = [
        [-1 if link is None else link.overhead_ns for link in row] for row in cluster.links
    ]
    assert overheads == [
        [-1, 7, 9, 0, 0],
        [7, -1, 9, 0, 0],
        [9, 9, -1, 0, 0],
        [7, 7, 7, -1, 0],
        [9, 9, 9, 0, -1],
    ]


@pytest.mark.gpu
def test_a_gpu_receives_and_launches_in_measured_times() -> None:
    cluster = baechi.probe(["cuda:0/a", "cuda:0/b"])
    link = cluster.links[0][1]
    assert link is not None
    assert 0 < link.overhead_ns < 100_000_000
    gpu = torch.device("cuda:0")
    assert 0 < graph_launch_ns(gpu) < 10_000_000
    inference, step, larger = (
        astuple(replay_host(gpu, parameters, training=training))
        for parameters, training in ((8, False), (8, True), (200, True))
    )
    assert all(0 <= ns < 1_000_000_000 for ns in (*inference, *step, *larger))
    assert inference[1:] == (0, 0)
    if "EMULATED_CUDA" not in os.environ:  # where a wait is what the CPU computes
        assert step[2] < larger[2]
        assert graph_launch_ns(gpu) < inference[0] < sum(step[:2])


def test_without_names_there_is_always_a_device() -> None:
    assert baechi.probe().devices


def test_suffixes_tell_logical_devices_of_one_device_apart() -> None:
    assert torch_device("cpu:0/a") == torch_device("cpu:0/b") == torch.device("cpu")
    assert len(baechi.probe({"cpu:0/a": 1, "cpu:0/b": 1}).devices) == 2


@pytest.mark.parametrize(
    ("devices", "text"),
    [
        ([], "no devices"),
        ({}, "no devices"),
        (["cpu:0", "cpu:0"], "two devices are named 'cpu:0'"),
        (["gpu:0"], "'gpu:0'"),
        (["mps"], "neither a CPU nor CUDA"),
        ([3], "3 is a int"),
        ({"cpu:0": "10 gigs"}, "'10 gigs'"),
        ({"cpu:0": -1}, "-1"),
        (["cuda:99"], "'cuda:99' is not there"),
    ],
)
def test_bad_devices_are_refused(devices: object, text: str) -> None:
    with pytest.raises(baechi.InputError, match=text):
        baechi.probe(devices)


@pytest.fixture
def unmeasured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No hand-over is known before, and none that a test made up is known afterwards."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cluster_probe._handover.cache_clear()
    yield
    cluster_probe._handover.cache_clear()


@pytest.mark.usefixtures("unmeasured")
def test_pairs_on_one_torch_device_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    found = cache(lambda **_: calls.append(1) or handed(33, 7))
    monkeypatch.setattr(cluster_probe, "_handover", found)
    survey = cluster_probe.survey([f"cpu:{index}" for index in range(4)])
    assert len(calls) == 1
    assert survey.cluster.uniform_link == handed(33, 7)
    assert survey.fits == {}
    assert survey.remarks == ()
    assert cluster_probe.survey(survey.cluster).cluster is survey.cluster


def test_one_device_needs_no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        cluster_probe, "_handover", lambda **_: pytest.fail("nothing is handed over")
    )
    assert baechi.probe("cpu:0").links == ((None,),)


@pytest.mark.usefixtures("unmeasured")
def test_a_hand_over_is_measured_once_or_when_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cluster_probe, "handover", lambda _: handed(33, 7))
    first = baechi.probe(["cpu:0", "cpu:1"])
    monkeypatch.setattr(cluster_probe, "handover", lambda _: pytest.fail("it is known"))
    assert baechi.probe(["cpu:0", "cpu:1"]).links == first.links
    cluster_probe._handover.cache_clear()  # as in another process
    assert baechi.probe(["cpu:0", "cpu:1"]).links == first.links
    monkeypatch.setattr(cluster_probe, "handover", lambda _: handed(44, 9))
    assert cluster_probe.survey(["cpu:0", "cpu:1"], anew=True).cluster.uniform_link == handed(44, 9)
    cluster_probe._handover.cache_clear()
    assert baechi.probe(["cpu:0", "cpu:1"]).uniform_link == handed(44, 9)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_hand_over_is_measured_on_the_runtime_itself_and_leaves_nothing(mode: Any) -> None:
    threads, random = torch.get_num_threads(), torch.get_rng_state()
    with mode():  # the caller's mode is not the measurement's
        assert handover().overhead_ns > 0
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize(
    ("few", "many", "found"),
    [
        # 45 more values and gradients are handed over.
        ((1000, 900), (1000 + 45 * 50, 900 + 45 * 35), handed(15, 35)),
        # Workers that were busy side by side wait for nothing; a disturbed clock is no time won.
        ((1000, 900), (1000 + 45 * 30, 900 + 45 * 35), handed(0, 35)),
        ((1000, 900), (900, 800), handed(0, 0)),
    ],
)
def test_a_hand_over_is_what_more_cuts_take_longer(
    monkeypatch: pytest.MonkeyPatch, few: tuple[int, int], many: tuple[int, int], found: Link
) -> None:
    monkeypatch.setattr(link_probe, "_steps", lambda _modules, _x: [few, many])
    assert handover() == found


def test_the_clock_tells_the_chain_that_the_hand_over_was_measured_on() -> None:
    link = handed(15, 35)
    cluster = baechi.Cluster.uniform(2, "1GiB", link)
    traced = link_probe._traced_chain(torch.zeros(8, 16, requires_grad=True))
    rows = [link_probe._placement(traced, pieces) for pieces in (2, len(traced.ops))]
    few, many = (baechi.simulate(graph, cluster, placement) for graph, placement in rows)
    more = len(many.transfers) - len(few.transfers)
    assert more == link_probe._crossings(*rows[1]) - link_probe._crossings(*rows[0]) == 45
    # A byte takes next to nothing, but each transfer is rounded up to whole nanoseconds.
    assert many.makespan_ns - few.makespan_ns == more * (15 + 35 + 1)


def test_a_copy_is_timed_at_every_size() -> None:
    sizes = SIZES[:4]
    times = copy_times_ns(CPU, CPU, sizes)
    assert len(times) == len(sizes)
    assert min(times) > 0


def dropped_byte(tensor: torch.Tensor) -> torch.Tensor:
    copy = tensor.clone()
    copy[-1] += 1
    return copy


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.roll(1)


def late() -> Callable[[torch.Tensor], torch.Tensor]:
    """A path on which the first copy of each size arrives, and later ones find it still there."""
    seen: dict[int, torch.Tensor] = {}
    return lambda tensor: seen.setdefault(len(tensor), tensor.clone())


def cut_off(tensor: torch.Tensor) -> torch.Tensor:
    """A path that loses what is beyond the first megabyte."""
    copy = tensor.clone()
    copy[1 << 20 :] = 0
    return copy


def test_a_path_that_is_sound_breaks_at_no_size() -> None:
    assert first_broken_size(torch.clone, CPU) is None


@pytest.mark.parametrize(
    ("copy", "size"),
    [(dropped_byte, 1 << 10), (shifted, 1 << 10), (late(), 1 << 10), (cut_off, 1 << 22)],
)
def test_a_path_that_lies_is_found(copy: Callable[[torch.Tensor], torch.Tensor], size: int) -> None:
    assert first_broken_size(copy, CPU) == size


def test_a_path_that_lies_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_probe, "first_broken_size", lambda _copy, _src: 1024)
    with pytest.raises(
        baechi.InputError, match="1024 bytes from cuda:0 to cuda:1 do not arrive intact"
    ):
        cluster_probe._fit("cuda:0", "cuda:1", CPU, CPU)


def test_a_device_without_room_for_a_copy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_probe, "copy_times_ns", lambda _src, _dst: (5,))
    with pytest.raises(baechi.InputError, match="no room on cuda:0 and cuda:1"):
        cluster_probe._fit("cuda:0", "cuda:1", CPU, CPU)


def test_links_that_two_numbers_cannot_tell_are_remarked() -> None:
    good = fit_link((1_000, 2_000, 3_000), (20, 30, 40))
    bad = fit_link((1_000, 2_000, 3_000), (20, 90, 40))
    cluster = baechi.Cluster.uniform(2, "1GiB", good.link)
    survey = cluster_probe.Survey(cluster, {("a", "b"): good, ("b", "a"): bad})
    (remark,) = survey.remarks
    assert "The link from b to a predicts" in remark
    assert f"wrong by {bad.worst_error:.0%}, where 20% is good" in remark


@pytest.mark.parametrize(
    ("major", "setting", "mib"),
    [(9, "", 32), (10, "", 32), (8, "", 8.125), (9, ":4096:2:16:8", 8.125), (9, ":16:8", 0.125)],
)
def test_what_cublas_keeps_for_a_stream(major: int, setting: str, mib: float) -> None:
    assert blas_bytes(major, setting) == int(mib * 2**20)


@pytest.mark.gpu
def test_a_gpu_is_probed_with_its_links() -> None:
    torch.cuda.empty_cache()  # what earlier tests left there is free, too
    free = torch.cuda.mem_get_info(0)[0]
    survey = cluster_probe.survey(["cpu:0", "cuda:0/a", "cuda:0/b"])
    cluster = survey.cluster
    assert 0 < cluster.devices[1].memory_bytes <= free // 2
    assert set(survey.fits) == {
        ("cpu:0", "cuda:0/a"), ("cpu:0", "cuda:0/b"), ("cuda:0/a", "cpu:0"), ("cuda:0/b", "cpu:0")
    }  # fmt: skip
    for fit in survey.fits.values():
        assert fit.sizes[-1] == 2**28
        assert fit.link.bytes_per_s > 10**8
    lane = cluster.links[1][2]
    assert lane is not None
    assert lane.bytes_per_s == FREE_BYTES_PER_S


@pytest.mark.parametrize(
    ("fraction", "free"), [(1.0, 70 + 5), (0.5, 40 - 8 + 5), (0.05, 5)], ids=str
)
def test_no_more_is_free_on_a_gpu_than_torch_may_take(
    monkeypatch: pytest.MonkeyPatch, fraction: float, free: int
) -> None:
    """80 in all, of which torch has taken 8 and uses 3; others have 2."""
    for name, value in {
        "synchronize": None,
        "mem_get_info": (70, 80),
        "memory_reserved": 8,
        "memory_allocated": 3,
        "get_per_process_memory_fraction": fraction,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda _, value=value: value)
    assert cluster_probe._free_gpu_bytes(CPU) == free


def test_a_gpu_keeps_room_for_what_its_allocator_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 10 GiB that two logical devices share, on a GPU whose cuBLAS keeps 33 MiB a workspace."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(cluster_probe, "_free_gpu_bytes", lambda _: 10 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    room = cluster_probe.free_bytes(torch.device("cuda", 0), 2)
    assert room == pytest.approx(0.95 * 5 * 2**30 - (4 * 33 + 3 * 22) * 2**20, abs=1)
