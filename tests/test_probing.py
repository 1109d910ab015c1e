"""What a machine has: names, capacities, links."""

import pytest
import torch

import baechi
from baechi.profiling import torch_device


def test_logical_cpu_devices_share_the_free_memory_and_are_linked() -> None:
    cluster = baechi.probe(["cpu:0", "cpu:1"])
    assert [device.name for device in cluster.devices] == ["cpu:0", "cpu:1"]
    assert cluster.devices[0].memory_bytes == cluster.devices[1].memory_bytes > 2**20
    link = cluster.links[0][1]
    assert link is not None
    assert 0 < link.latency_ns < 10_000_000


def test_capacities_names_devices_and_clusters_are_taken() -> None:
    by_capacity = baechi.probe({"cpu:0": "1GiB", "cpu:1": 5})
    assert [device.memory_bytes for device in by_capacity.devices] == [2**30, 5]
    by_value = baechi.probe([baechi.Device("cpu:0", "2GiB", speed=0.5), torch.device("cpu", 1)])
    assert by_value.devices[0].speed == 0.5
    assert by_value.devices[1].name == "cpu:1"
    assert baechi.probe(by_value) is by_value
    assert len(baechi.probe("cpu:0").devices) == 1


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
        (["cpu:0", "cpu:0"], "'cpu:0' is named twice"),
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
