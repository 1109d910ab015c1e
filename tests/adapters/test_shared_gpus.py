"""What HAMi, KAI and `nvidia-smi` say is left."""

from collections.abc import Iterator
from typing import Any

import pytest
from dynamic_resources import allocated, published, shared

from baechi import InputError, Link
from baechi.adapters.dynamic_resources import free_devices
from baechi.adapters.free_devices import FreeDevice, quantity, topology
from baechi.adapters.nvidia_smi import smi_devices
from baechi.adapters.shared_gpus import hami_devices, kai_devices

MIB = 2**20


def node(name: str, annotations: dict[str, str] | None = None, **labels: str) -> dict[str, Any]:
    named = {key.replace("gpu_", "nvidia.com/gpu."): value for key, value in labels.items()}
    return {
        "kind": "Node",
        "metadata": {"name": name, "annotations": annotations or {}, "labels": named},
    }


def pod(
    name: str,
    annotations: dict[str, str] | None = None,
    labels: dict[str, str] | None = None,
    *,
    where: str = "n1",
    gpus: int = 0,
    phase: str = "Running",
) -> dict[str, Any]:
    limits = {"nvidia.com/gpu": str(gpus)} if gpus else {}
    return {
        "kind": "Pod",
        "metadata": {"name": name, "annotations": annotations or {}, "labels": labels or {}},
        "spec": {"nodeName": where, "containers": [{"resources": {"limits": limits}}]},
        "status": {"phase": phase},
    }


OLD = (
    "GPU-a,10,81920,100,NVIDIA-NVIDIA A100-SXM4-80GB,0,true:"
    "GPU-b,2,81920,100,NVIDIA-NVIDIA A100-SXM4-80GB,0,true:"
    "GPU-c,10,81920,100,NVIDIA-NVIDIA A100-SXM4-80GB,1,false:"
)
NEW = (
    '[{"id":"GPU-a","count":10,"devmem":81920,"devcore":100,'
    '"type":"NVIDIA A100-SXM4-80GB","numa":0,"health":true}]'
)


@pytest.mark.parametrize("register", [OLD, NEW])
def test_hami_leaves_what_no_pod_was_allocated(register: str) -> None:
    pods = [
        pod("one", {"hami.io/vgpu-devices-allocated": "GPU-a,NVIDIA,3000,30:;"}),
        pod("two", {"hami.io/vgpu-devices-allocated": ";GPU-a,NVIDIA,1000,20:GPU-b,NVIDIA,5,0:"}),
        pod("over", {"hami.io/vgpu-devices-allocated": "GPU-a,NVIDIA,900,9:"}, phase="Succeeded"),
    ]
    first, *others = hami_devices([node("n1", {"hami.io/node-nvidia-register": register})], pods)
    assert first == FreeDevice("n1", "GPU-a", 77920 * MIB, 500, "A100-SXM-80GB", "GPU-a")
    expected = [] if register is NEW else [("n1/GPU-b", 81915 * MIB, 1000)]
    assert [(row.full_name, row.memory_bytes, row.share_milli) for row in others] == expected


def test_what_go_leaves_out_of_hamis_register_is_zero_or_false() -> None:
    """Its fields are `omitempty`: a GPU that is not healthy has no field `health`."""
    sick = '{"id":"GPU-b","index":1,"count":10,"devmem":81920,"devcore":100}'
    register = f"{NEW[:-1]},{sick}]"
    found = hami_devices([node("n1", {"hami.io/node-nvidia-register": register})], [])
    assert [row.uid for row in found] == ["GPU-a"]


def test_an_instance_that_hami_has_given_out_is_gone_from_its_gpu() -> None:
    taken = pod("one", {"hami.io/vgpu-devices-allocated": "GPU-a[0-1],NVIDIA,20480,28:;"})
    (row,) = hami_devices([node("n1", {"hami.io/node-nvidia-register": NEW})], [taken])
    assert (row.memory_bytes, row.share_milli) == (61440 * MIB, 720)


def test_nodes_that_take_no_pod_and_gpus_that_are_gone_are_left_out() -> None:
    def nodes(**spec: Any) -> list[Any]:
        labels = {"gpu_count": "4", "gpu_memory": "40960"}
        row = node("n1", {"hami.io/node-nvidia-register": NEW}, **labels)
        row["status"] = {"allocatable": {"nvidia.com/gpu": "2"}}
        return [row | spec]

    assert (len(hami_devices(nodes(), [])), len(kai_devices(nodes(), []))) == (1, 2)
    away = {"conditions": [{"type": "Ready", "status": "Unknown"}]}
    for spec in ({"spec": {"unschedulable": True}}, {"status": away}):
        assert hami_devices(nodes(**spec), []) == kai_devices(nodes(**spec), []) == ()


def test_a_gpu_of_hami_with_as_many_tasks_as_it_may_have_is_full() -> None:
    pods = [
        pod(name, {"hami.io/vgpu-devices-allocated": "GPU-b,NVIDIA,5,0:"}) for name in ("a", "b")
    ]
    found = hami_devices([node("n1", {"hami.io/node-nvidia-register": OLD})], pods)
    assert [row.uid for row in found] == ["GPU-a"]


def test_a_register_of_hami_that_cannot_be_read_is_told() -> None:
    with pytest.raises(InputError, match="fewer than 7 fields"):
        hami_devices([node("n1", {"hami.io/node-nvidia-register": "GPU-a,10,:"})], [])


def test_kai_leaves_whole_gpus_and_parts_of_groups() -> None:
    nodes = [
        node("n1", gpu_count="4", gpu_memory="40960", gpu_product="NVIDIA-A100-SXM4-40GB"),
        node("cpu"),
    ]
    group = {"runai-gpu-group": "g1"}
    pods = [
        pod("whole", gpus=1),
        pod("reservation", labels=group, gpus=1),
        pod("half", {"gpu-fraction": "0.5"}, group),
        pod("some", {"gpu-memory": "4096"}, group),
        pod(
            "two",
            {"gpu-fraction": "0.25"},
            {"runai-gpu-group/g2": "g2", "runai-gpu-group/g1": "g1"},
        ),
        pod("reserved too", labels={"runai-gpu-group": "g2"}, gpus=1),
        pod("elsewhere", where="cpu"),
        pod("over", gpus=1, phase="Failed"),
    ]
    found = kai_devices({"kind": "List", "items": nodes}, pods)
    kind = "A100-SXM-40GB"
    assert found == (
        FreeDevice("n1", "gpu0", 40960 * MIB, 1000, kind),
        FreeDevice("n1", "g1", 6144 * MIB, 150, kind, "g1"),
        FreeDevice("n1", "g2", 30720 * MIB, 750, kind, "g2"),
    )


def test_a_fraction_of_kai_that_cannot_be_read_is_told() -> None:
    nodes = [node("n1", gpu_count="1", gpu_memory="100")]
    with pytest.raises(InputError, match="of KAI's cannot be read: Invalid literal"):
        kai_devices(nodes, [pod("p", {"gpu-fraction": "half"})])


SMI = """\
0, GPU-a, NVIDIA A100-SXM4-80GB, 60000, 35, Disabled
1, GPU-b, NVIDIA H100 80GB HBM3, 81000, [N/A], [N/A]
2, GPU-c, NVIDIA A100-SXM4-80GB, 100, 100, Disabled
"""


def test_nvidia_smi_tells_free_memory_and_idle_time() -> None:
    found = smi_devices(SMI, "here")
    assert found[0] == FreeDevice("here", "cuda:0", 60000 * MIB, 650, "A100-SXM-80GB", "GPU-a")
    assert (found[1].kind, found[1].share_milli) == ("H100-SXM-80GB", 1000)
    site = topology(found, Link(1, 10**9))
    assert [device.name for device in site.devices] == ["here/cuda:0", "here/cuda:1"]
    assert site.devices[0].speed == 0.65


def test_what_is_no_such_output_is_told_with_the_command() -> None:
    with pytest.raises(InputError, match="nvidia-smi --query-gpu"):
        smi_devices("Thu Nov 26 2026")
    with pytest.raises(InputError, match="cut into MIG instances"):
        smi_devices("0, GPU-a, A100, 1, 0, Enabled")
    with pytest.raises(InputError, match="cannot be read: invalid literal"):
        smi_devices("0, GPU-a, A100, many, 0, Disabled")


def test_where_nothing_is_left_there_is_no_topology() -> None:
    full = [FreeDevice("n1", "gpu0", 0), FreeDevice("n1", "gpu1", 5, 0)]
    with pytest.raises(InputError, match="wait until a job ends"):
        topology(full, Link(1, 1))


def test_nodes_have_switches_or_share_one() -> None:
    free = [FreeDevice("n1", "gpu0", 5), FreeDevice("n2", "gpu0", 5)]
    assert topology(free, Link(1, 1)).switches == ("switch", "switch")
    assert topology(free, Link(1, 1), switches={"n1": "a", "n2": "b"}).switches == ("a", "b")
    with pytest.raises(InputError, match="no entry for node 'n2'"):
        topology(free, Link(1, 1), switches={"n1": "a"})


@pytest.mark.parametrize(
    ("text", "down", "up"),
    [
        ("80Gi", 80 * 2**30, 80 * 2**30),
        ("1500m", 1, 2),
        ("2e3", 2000, 2000),
        (7, 7, 7),
        ("1k", 1000, 1000),
    ],
)
def test_quantities_of_kubernetes(text: Any, down: int, up: int) -> None:
    assert (quantity(text, "it"), quantity(text, "it", up=True)) == (down, up)


@pytest.mark.parametrize("text", ["", "many", "-1Gi", "5GB", "1/0"])
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="no quantity"):
        quantity(text, "it")


def damaged(document: Any) -> Iterator[Any]:
    """The document with one part gone, or something else, for every part."""
    rows = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in list(rows):
        for other in (None, "x", -1, [7], {"y": 1}):
            yield {**document, key: other} if isinstance(document, dict) else [other]
        if isinstance(document, dict):
            yield {name: row for name, row in document.items() if name != key}
        if isinstance(value, dict | list):
            for inner in damaged(value):
                if isinstance(document, dict):
                    yield {**document, key: inner}
                else:
                    yield [*document[:key], inner, *document[key + 1 :]]


HAMI = (
    node("n1", {"hami.io/node-nvidia-register": NEW}),
    pod("one", {"hami.io/vgpu-devices-allocated": "GPU-a,NVIDIA,3000,30:;"}),
)
KAI = (
    node("n1", gpu_count="4", gpu_memory="40960", gpu_product="NVIDIA-A100-SXM4-40GB"),
    pod("half", {"gpu-fraction": "0.5"}, {"runai-gpu-group": "g1"}, gpus=1),
)
DRA = (published("n1", shared("gpu-0")), allocated("n1", "gpu-0", memory="1Gi", cores="5"))


@pytest.mark.parametrize(
    ("read", "documents"), [(hami_devices, HAMI), (kai_devices, KAI), (free_devices, DRA)]
)
def test_what_is_damaged_is_read_or_refused_in_one_way(read: Any, documents: Any) -> None:
    refused = 0
    for place in (0, 1):
        for other in damaged(documents[place]):
            chosen = [other if i == place else row for i, row in enumerate(documents)]
            try:
                read([chosen[0]], [chosen[1]])
            except InputError:
                refused += 1
    assert refused
