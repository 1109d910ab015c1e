"""ResourceSlices and ResourceClaims: what is left, and the claims of a decision."""

from typing import Any

import pytest
from dynamic_resources import DRIVER, GIB, allocated, gpu, published, shared

from baechi import InputError, Link, Op, OpGraph, Tensor
from baechi.adapters.dynamic_resources import Names, free_devices, resource_claims
from baechi.adapters.free_devices import topology
from baechi.scheduling import Ledger, Wish, decide

LINK = Link(5_000, 300 * 10**9)


def rows(slices: Any, claims: Any = ()) -> list[tuple[str, int, int]]:
    free = free_devices(slices, list(claims))
    return [(row.full_name, row.memory_bytes, row.share_milli) for row in free]


def test_a_device_that_is_allocated_whole_is_gone() -> None:
    slices = {"kind": "List", "items": [published("n1", gpu("gpu-0"), gpu("gpu-1"))]}
    assert rows(slices) == [("n1/gpu-0", 80 * GIB, 1000), ("n1/gpu-1", 80 * GIB, 1000)]
    assert rows(slices, [allocated("n1", "gpu-0")]) == [("n1/gpu-1", 80 * GIB, 1000)]
    (row,) = free_devices(slices, [allocated("n1", "gpu-1")])
    assert (row.kind, row.uid) == ("A100-SXM-80GB", "GPU-gpu-0")


def test_an_administrators_claim_takes_nothing() -> None:
    claim = allocated("n1", "gpu-0")
    claim["status"]["allocation"]["devices"]["results"][0]["adminAccess"] = True
    assert len(rows([published("n1", gpu("gpu-0"))], [claim])) == 1


def test_of_a_shared_device_what_no_claim_consumes_is_left() -> None:
    claims = [
        allocated("n1", "gpu-0", memory="10Gi", cores="25"),
        allocated("n1", "gpu-0", memory="1500Mi", cores="1"),
        {"kind": "ResourceClaim", "metadata": {"name": "waits"}, "spec": {}},
    ]
    found = rows([published("n1", shared("gpu-0"))], claims)
    assert found == [("n1/gpu-0", 70 * GIB - 1500 * 2**20, 740)]
    # Who says nothing of a capacity has all of it.
    assert rows([published("n1", shared("gpu-0"))], [allocated("n1", "gpu-0", memory="1Gi")]) == [
        ("n1/gpu-0", 79 * GIB, 0)
    ]


def test_partitions_that_draw_on_the_same_counters_are_offered_as_they_fit_together() -> None:
    def part(name: str, slices: int, memory: str, profile: str) -> dict[str, Any]:
        device = gpu(name, memory)
        device["attributes"]["profile"] = {"string": profile}
        counters = {"slices": {"value": str(slices)}}
        device["consumesCounters"] = [{"counterSet": "gpu-0", "counters": counters}]
        return device

    parts = [
        part("mig-3g-a", 4, "40Gi", "3g.40gb"),
        part("mig-3g-b", 4, "40Gi", "3g.40gb"),
        part("mig-2g", 2, "20Gi", "2g.20gb"),
    ]
    counters = [{"name": "gpu-0", "counters": {"slices": {"value": "8"}}}]
    slices = [published("n1", *parts, sharedCounters=counters)]
    assert rows(slices) == [("n1/mig-3g-a", 40 * GIB, 428), ("n1/mig-3g-b", 40 * GIB, 428)]
    taken = [allocated("n1", "mig-2g")]
    assert rows(slices, taken) == [("n1/mig-3g-a", 40 * GIB, 428)]


def test_only_the_newest_generation_of_a_pool_counts_and_only_whole() -> None:
    old, new = published("n1", gpu("gpu-0")), published("n1", gpu("gpu-9"), generation=2)
    assert [name for name, *_ in rows([old, new])] == ["n1/gpu-9"]
    with pytest.raises(InputError, match=r"1 of 2 slices of generation 3.*Read the ResourceSlices"):
        rows([old, published("n1", gpu("gpu-9"), generation=3, count=2)])


def test_what_is_closed_belongs_to_no_node_or_has_no_memory_is_left_out() -> None:
    nic = {"name": "nic-0", "attributes": {}, "capacity": {"bandwidth": {"value": "100G"}}}
    closed = gpu("gpu-1", taints=[{"key": "broken", "effect": "NoExecute"}])
    far = published("pool", gpu("gpu-2"))
    del far["spec"]["nodeName"]
    assert rows([published("n1", gpu("gpu-0"), nic, closed), far]) == [("n1/gpu-0", 80 * GIB, 1000)]


def test_the_first_beta_has_devices_one_level_below() -> None:
    device = {"name": "gpu-0", "basic": {"capacity": {"memory": {"value": "16Gi"}}}}
    assert rows([published("n1", device)]) == [("n1/gpu-0", 16 * GIB, 1000)]


def test_a_name_with_the_drivers_domain_is_the_name() -> None:
    device = shared("gpu-0")
    for field in ("attributes", "capacity"):
        device[field] = {f"{DRIVER}/{name}": value for name, value in device[field].items()}
    consumed = {f"{DRIVER}/memory": "10Gi", f"{DRIVER}/cores": "25"}
    found = free_devices([published("n1", device)], [allocated("n1", "gpu-0", **consumed)])
    (row,) = found
    assert (row.memory_bytes, row.share_milli, row.uid) == (70 * GIB, 750, "GPU-gpu-0")


def test_what_is_no_resource_slice_is_refused() -> None:
    with pytest.raises(InputError, match="a Pod stands where a ResourceSlice of Kubernetes"):
        free_devices({"kind": "List", "items": [{"kind": "Pod"}]}, [])


def chain(n: int, gib: int) -> OpGraph:
    ops = tuple(Op(f"layer{i}", 10**6, persistent_bytes=gib * GIB) for i in range(n))
    return OpGraph(ops, tuple(Tensor(i, (i + 1,), 2**20) for i in range(n - 1)))


def test_a_decision_becomes_a_claim_for_each_device() -> None:
    policy = {"validRange": {"min": "1Gi", "step": "2Gi"}}
    slices = [published("n1", shared("gpu-0", policy)), published("n2", gpu("gpu-0"))]
    claims = [allocated("n1", "gpu-0", memory="20Gi", cores="50")]
    free = free_devices(slices, claims)
    ledger = Ledger(topology(free, LINK, LINK))
    decision = decide(chain(6, 18), ledger.snapshot(), Wish(effort="balanced"))
    assert decision.devices == ("n1/gpu-0", "n2/gpu-0")
    first, second = resource_claims("job", decision, slices)
    assert first["metadata"]["name"] == "job-0"
    (request,) = first["spec"]["devices"]["requests"]
    exactly = request["exactly"]
    assert exactly["deviceClassName"] == DRIVER
    assert exactly["selectors"] == [
        {"cel": {"expression": f'device.attributes["{DRIVER}"].uuid == "GPU-gpu-0"'}}
    ]
    asked = exactly["capacity"]["requests"]
    peak = decision.peak_bytes[0]
    assert int(asked["memory"]) >= peak > int(asked["memory"]) - 2 * GIB
    assert (int(asked["memory"]) - GIB) % (2 * GIB) == 0
    assert asked["cores"] == "50"
    assert "capacity" not in second["spec"]["devices"]["requests"][0]["exactly"]


def test_the_claims_of_a_decision_take_what_was_left() -> None:
    """Granted as they ask, nothing is over what there is, and the next reading has the rest."""
    slices = [published("n1", shared("gpu-0"), shared("gpu-1"))]
    free = free_devices(slices, [])
    decision = decide(chain(4, 30), Ledger(topology(free, LINK)).snapshot(), Wish(share_milli=300))
    granted = []
    for claim, device in zip(
        resource_claims("job", decision, slices), decision.devices, strict=True
    ):
        (request,) = claim["spec"]["devices"]["requests"]
        node, _, name = device.partition("/")
        granted.append(allocated(node, name, **request["exactly"]["capacity"]["requests"]))
    left = {row.full_name: row for row in free_devices(slices, granted)}
    for device, peak in zip(decision.devices, decision.peak_bytes, strict=True):
        assert left[device].memory_bytes == 80 * GIB - peak
        assert left[device].share_milli == 700


def test_a_device_that_nothing_tells_from_others_cannot_be_claimed() -> None:
    slices = [published("n1", gpu("gpu-0"))]
    decision = decide(chain(1, 1), Ledger(topology(free_devices(slices, []), LINK)).snapshot())
    with pytest.raises(InputError, match=r"no attribute 'serial'.*names="):
        resource_claims("job", decision, slices, Names(uid="serial"))
    with pytest.raises(InputError, match="'n1/gpu-0' of the decision is in no ResourceSlice"):
        resource_claims("job", decision, [published("n2", gpu("gpu-0"))])
