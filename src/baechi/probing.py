"""What this machine has: devices with their free memory, and measured links between them."""

import os
import queue
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from baechi.devices import Cluster, Device, Link
from baechi.errors import InputError
from baechi.profiling import device_kind, torch_device
from baechi.units import parse_bytes

# A hand-over between workers moves no bytes; this rate makes its bytes free and keeps it finite.
_HANDOVER_BYTES_PER_S = 10**15
_SIZES = (1 << 16, 1 << 26)
_ROUNDS = 50

Devices = str | torch.device | Device | Cluster | Mapping[str, int | str] | Sequence[Any] | None


def probe(devices: Devices = None) -> Cluster:
    """The cluster of the named devices of this machine.

    Args:
        devices: Names (`["cuda:0", "cuda:1"]`), torch devices, `baechi.Device` values, a mapping
            from names to capacities (`{"cpu:0": "1GiB"}`), a ready `Cluster` (returned as it is),
            or None: all CUDA devices, or one CPU. `"cpu:0"`, `"cpu:1"`, ... are logical devices
            on the CPU, with a worker each; `"cuda:0/a"`, `"cuda:0/b"` are two on one GPU.

    Returns:
        Devices with the memory that is free now, or with the capacity given; links as measured.

    Raises:
        InputError: No devices, two of one name, an unknown one, one that is not there, or a
            capacity that cannot be read.
    """
    if isinstance(devices, Cluster):
        return devices
    wanted = _wanted(devices)
    if not wanted:
        raise InputError("no devices: name at least one, such as ['cuda:0'] or ['cpu:0', 'cpu:1'].")
    names = [device.name if isinstance(device, Device) else device for device, _ in wanted]
    for name in names:
        if names.count(name) > 1:
            raise InputError(
                f"device {name!r} is named twice; names must be unique. For two logical devices "
                f"on it write {name + '/a'!r} and {name + '/b'!r}."
            )
    places = [torch_device(name) for name in names]
    rows = []
    for (device, capacity), place in zip(wanted, places, strict=True):
        if isinstance(device, Device):
            rows.append(device)
            continue
        what = f"memory of device {device!r}"
        sharing = places.count(place)
        free = _free_bytes(place) // sharing
        memory = free if capacity is None else parse_bytes(capacity, what=what)
        rows.append(Device(device, memory, kind=device_kind(place)))
    measured: dict[tuple[torch.device, torch.device], Link] = {}
    links: list[tuple[Link | None, ...]] = []
    for i, src in enumerate(places):
        row: list[Link | None] = []
        for j, dst in enumerate(places):
            if i != j and (src, dst) not in measured:
                measured[src, dst] = _link(src, dst)
            row.append(None if i == j else measured[src, dst])
        links.append(tuple(row))
    return Cluster(tuple(rows), tuple(links))


def _wanted(devices: Any) -> list[tuple[str | Device, int | str | None]]:
    """(name or device, capacity or None) of every device asked for."""
    if devices is None:
        n = torch.cuda.device_count()
        return [(f"cuda:{i}", None) for i in range(n)] or [("cpu:0", None)]
    if isinstance(devices, str | torch.device | Device):
        devices = [devices]
    if isinstance(devices, Mapping):
        return [(str(name), capacity) for name, capacity in devices.items()]
    wanted: list[tuple[str | Device, int | str | None]] = []
    for device in devices:
        if not isinstance(device, str | torch.device | Device):
            raise InputError(
                f"device {device!r} is a {type(device).__name__}; give a name such as 'cuda:0', "
                "a torch.device or a baechi.Device."
            )
        wanted.append((device if isinstance(device, Device) else str(device), None))
    return wanted


def _free_bytes(place: torch.device) -> int:
    """Memory that is free now."""
    if place.type == "cuda":
        return int(torch.cuda.mem_get_info(place)[0])
    pages = os.sysconf("SC_AVPHYS_PAGES")
    total = pages * os.sysconf("SC_PAGE_SIZE")
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        return total  # no such file on this system
    return total


def _link(src: torch.device, dst: torch.device) -> Link:
    """The measured link: latency of a small copy, rate of a large one."""
    if src == dst:
        return Link(_handover_ns() if src.type == "cpu" else 10_000, _HANDOVER_BYTES_PER_S)
    times = [_copy_ns(src, dst, nbytes) for nbytes in _SIZES]
    rate = (_SIZES[1] - _SIZES[0]) * 10**9 // max(times[1] - times[0], 1)
    return Link(max(times[0] - _SIZES[0] * 10**9 // max(rate, 1), 0), max(rate, 1))


def _copy_ns(src: torch.device, dst: torch.device, nbytes: int) -> int:
    source = torch.ones(nbytes, dtype=torch.uint8, device=src)
    target = torch.empty(nbytes, dtype=torch.uint8, device=dst)
    readings = []
    for _ in range(_ROUNDS):
        _synchronize(src, dst)
        start = time.perf_counter_ns()
        target.copy_(source)
        _synchronize(src, dst)
        readings.append(time.perf_counter_ns() - start)
    if not bool((target == 1).all()):
        raise InputError(
            f"copies from {src} to {dst} do not arrive intact; peer access between them is broken. "
            "Leave one of them out, or switch peer access off in the driver."
        )
    return int(statistics.median(readings))


def _synchronize(*places: torch.device) -> None:
    for place in places:
        if place.type == "cuda":
            torch.cuda.synchronize(place)


def _handover_ns() -> int:
    """The time from one worker's result to another worker's start: half of a round trip."""
    there: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    back: queue.SimpleQueue[int] = queue.SimpleQueue()

    def echo() -> None:
        while (item := there.get()) is not None:
            back.put(item)

    thread = threading.Thread(target=echo, daemon=True)
    thread.start()
    readings = []
    for i in range(_ROUNDS * 4):
        start = time.perf_counter_ns()
        there.put(i)
        back.get()
        readings.append((time.perf_counter_ns() - start) // 2)
    there.put(None)
    thread.join()
    return int(statistics.median(readings))
