"""Kubernetes' dynamic resource allocation: ResourceSlices and claims in, claims of a job out.

https://kubernetes.io/docs/concepts/scheduling-eviction/dynamic-resource-allocation. A device has
capacities, of which allocations consume a part where it allows several (KEP-5075); partitions of
one device draw on counters that they share (KEP-4815).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias, final

from baechi.adapters.free_devices import (
    FreeDevice,
    items_of,
    kind_named,
    quantity,
    reading,
)
from baechi.errors import InputError
from baechi.scheduling.claims import WHOLE_MILLI
from baechi.scheduling.decision import Decision

_Key: TypeAlias = tuple[str, str, str]  # driver, pool, device
_Counter: TypeAlias = tuple[str, str, str, str]  # driver, pool, set, counter
_CLOSED: Final = ("NoSchedule", "NoExecute")
_MIG_SLICES: Final = 7  # of compute, of a whole GPU


@final
@dataclass(frozen=True, slots=True)
class Names:
    """What a driver calls things.

    Attributes:
        memory: The capacity that is memory. Devices without it are none to compute on.
        compute: The capacity that is compute, if it is shared; else a device is taken whole.
        kind: The attribute that says what hardware it is.
        uid: The attribute that tells one device from all others, for the claims of a job.
        profile: The attribute with the MIG profile of a partition.
    """

    memory: str = "memory"
    compute: str = "cores"
    kind: str = "productName"
    uid: str = "uuid"
    profile: str = "profile"


class _Published(NamedTuple):
    """A device as its slice has it."""

    key: _Key
    node: str
    row: dict[str, Any]

    def capacity(self, name: str) -> int:
        found = self.row["capacity"].get(name)
        return 0 if found is None else quantity(found["value"], name)

    def attribute(self, name: str) -> str:
        return str((self.row["attributes"].get(name) or {}).get("string", ""))

    def consumed(self) -> Iterator[tuple[_Counter, int]]:
        """What it takes of counters that it shares with others."""
        for row in self.row.get("consumesCounters", ()):
            for name, counter in row["counters"].items():
                value = quantity(counter["value"], f"counter {name}", up=True)
                yield (*self.key[:2], row["counterSet"], name), value


@reading("a ResourceSlice or ResourceClaim")
def free_devices(slices: Any, claims: Any, names: Names | None = None) -> tuple[FreeDevice, ...]:
    """What is left of the devices of ResourceSlices beside the allocated ResourceClaims.

    Of partitions that share counters those that fit together, the largest first. Devices that
    belong to no node, or that a taint closes, are left out.

    Args:
        slices: Of `kubectl get resourceslices -o json`.
        claims: Of `kubectl get resourceclaims --all-namespaces -o json`.
        names: What the driver calls things; as NVIDIA's if absent.

    Raises:
        InputError: A pool is not complete, or a document cannot be read.
    """
    called = names or Names()
    published, counters = _published(items_of(slices, "ResourceSlice"))
    taken: dict[_Key, list[dict[str, Any]]] = {}
    for claim in items_of(claims, "ResourceClaim"):
        allocation = (claim.get("status") or {}).get("allocation") or {}
        for row in (allocation.get("devices") or {}).get("results", ()):
            if not row.get("adminAccess"):
                key = (row["driver"], row["pool"], row["device"])
                taken.setdefault(key, []).append(_plain(row.get("consumedCapacity"), key[0]))
    for device in published:
        if device.key in taken:
            for counter, value in device.consumed():
                counters[counter] = counters.get(counter, 0) - value
    free = []
    for device in sorted(published, key=lambda row: (-row.capacity(called.memory), row.key)):
        if not device.node or _is_closed(device):
            continue
        left = _left(device, taken.get(device.key, []), called)
        if left is None:
            continue
        needs = [] if device.key in taken else list(device.consumed())
        if any(counters.get(counter, 0) < value for counter, value in needs):
            continue
        for counter, value in needs:
            counters[counter] -= value
        free.append(left)
    return tuple(sorted(free, key=lambda row: (row.node, row.name)))


@reading("a ResourceSlice")
def resource_claims(
    job: str,
    decision: Decision,
    slices: Any,
    names: Names | None = None,
    *,
    device_class: str | None = None,
) -> list[dict[str, Any]]:
    """The ResourceClaims of a job, one for each device of a decision, in its order.

    Each selects its device by the attribute that is its own, and requests the predicted peak, in
    the steps that the device's policy asks for, where the device may be shared.

    Args:
        job: The prefix of their names.
        decision: On the topology of `free_devices`.
        slices: As there.
        names: As there.
        device_class: The DeviceClass; the driver's name if absent, as NVIDIA's driver has it.

    Raises:
        InputError: A device is in no slice, or has no attribute that tells it from others.
    """
    called = names or Names()
    published, _ = _published(items_of(slices, "ResourceSlice"))
    known = {f"{device.node}/{device.key[2]}": device for device in published}
    documents = []
    rows = zip(decision.cluster.devices, decision.peak_bytes, strict=True)
    for place, (device, peak_bytes) in enumerate(rows):
        found = known.get(device.name)
        if found is None:
            raise InputError(f"device {device.name!r} of the decision is in no ResourceSlice.")
        uid = found.attribute(called.uid)
        if not uid:
            raise InputError(
                f"device {device.name!r} has no attribute {called.uid!r}, so a claim cannot select "
                "it; give names= with the attribute that tells devices apart."
            )
        driver = found.key[0]
        exactly: dict[str, Any] = {
            "deviceClassName": device_class or driver,
            "selectors": [
                {"cel": {"expression": f'device.attributes["{driver}"].{called.uid} == "{uid}"'}}
            ],
        }
        if found.row.get("allowMultipleAllocations"):
            wanted = {called.memory: peak_bytes}
            whole = found.capacity(called.compute)
            if whole:
                share_milli = round(device.speed * WHOLE_MILLI)
                wanted[called.compute] = -(-whole * share_milli // WHOLE_MILLI)
            requests = {name: str(_in_steps(found, name, n)) for name, n in wanted.items()}
            exactly["capacity"] = {"requests": requests}
        documents.append(
            {
                "apiVersion": "resource.k8s.io/v1",
                "kind": "ResourceClaim",
                "metadata": {
                    "name": f"{job}-{place}",
                    "annotations": {"baechi.dev/device": device.name},
                },
                "spec": {"devices": {"requests": [{"name": "device", "exactly": exactly}]}},
            }
        )
    return documents


def _published(slices: Sequence[dict[str, Any]]) -> tuple[list[_Published], dict[_Counter, int]]:
    """The devices of the newest generation of every pool, and what their counters have."""
    pools: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for document in slices:
        spec = document["spec"]
        pools.setdefault((spec["driver"], spec["pool"]["name"]), []).append(spec)
    devices: list[_Published] = []
    counters: dict[_Counter, int] = {}
    for (driver, pool), rows in sorted(pools.items()):
        newest = max(row["pool"]["generation"] for row in rows)
        current = [row for row in rows if row["pool"]["generation"] == newest]
        count = current[0]["pool"]["resourceSliceCount"]
        if len(current) != count:
            raise InputError(
                f"pool {pool!r} of driver {driver!r} has {len(current)} of {count} slices of "
                f"generation {newest}: it is being updated. Read the ResourceSlices again."
            )
        for row in current:
            for shared in row.get("sharedCounters", ()):
                for name, counter in shared["counters"].items():
                    value = quantity(counter["value"], f"counter {name}")
                    counters[driver, pool, shared["name"], name] = value
            for device in row.get("devices", ()):
                body = {**device, **device.get("basic", {})}  # v1beta1 has it one level below
                body |= {key: _plain(body.get(key), driver) for key in ("attributes", "capacity")}
                node = row.get("nodeName") or body.get("nodeName") or ""
                devices.append(_Published((driver, pool, device["name"]), node, body))
    return devices, counters


def _plain(rows: dict[str, Any] | None, driver: str) -> dict[str, Any]:
    """By names without the driver's domain, which is meant where there is none."""
    return {name.removeprefix(f"{driver}/"): value for name, value in (rows or {}).items()}


def _left(
    device: _Published, allocations: Sequence[dict[str, Any]], names: Names
) -> FreeDevice | None:
    """What is left of a device; none of one that is allocated whole, or has no memory."""
    memory_bytes = device.capacity(names.memory)
    if not memory_bytes or (allocations and not device.row.get("allowMultipleAllocations")):
        return None
    share = WHOLE_MILLI
    profile = device.attribute(names.profile)
    if profile[:1].isdigit():
        share = share * int(profile[0]) // _MIG_SLICES
    whole = device.capacity(names.compute)
    for consumed in allocations:
        memory_bytes -= quantity(consumed.get(names.memory, memory_bytes), "memory", up=True)
        if whole:
            used = quantity(consumed.get(names.compute, whole), "compute", up=True)
            share -= -(-WHOLE_MILLI * used // whole)
    kind = kind_named(device.attribute(names.kind))
    uid = device.attribute(names.uid)
    left = (max(memory_bytes, 0), max(share, 0))
    return FreeDevice(device.node, device.key[2], *left, kind, uid)


def _is_closed(device: _Published) -> bool:
    return any(taint.get("effect") in _CLOSED for taint in device.row.get("taints", ()))


def _in_steps(device: _Published, name: str, wanted: int) -> int:
    """A request that the device's policy takes: at least the least, in whole steps, or a choice."""
    policy = device.row["capacity"][name].get("requestPolicy") or {}
    choices = sorted(quantity(value, name) for value in policy.get("validValues", ()))
    if choices:
        return next((value for value in choices if value >= wanted), choices[-1])
    limits = policy.get("validRange") or {}
    least = quantity(limits.get("min", 0), name, up=True)
    step = quantity(limits.get("step", 1), name, up=True) or 1
    return least + -(-max(wanted - least, 0) // step) * step
