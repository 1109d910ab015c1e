"""The cluster of this machine: devices with their free memory, and measured links."""

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final, final

import torch
from torch import nn

from baechi.costs.profile_cache import Conditions, Measured, ProfileStore
from baechi.errors import InputError
from baechi.probing.link_probe import (
    FREE_BYTES_PER_S,
    GOOD_ERROR,
    SIZES,
    LinkFit,
    copy_times_ns,
    first_broken_size,
    fit_link,
    handover,
    lane_ns,
    replay_ns,
)
from baechi.records.cluster import HANDOVER_NS, HOST, Cluster, Device, Link
from baechi.torch_support.torch_devices import (
    blas_bytes,
    device_kind,
    free_host_bytes,
    hardware,
    is_allocator_native,
    torch_device,
    usable_gpus,
)
from baechi.units import format_bytes, parse_bytes
from baechi.validation import check_row

# A prediction is of what torch's allocator gives out. It holds more for that: blocks that do not
# fit what is asked for, and of each stream (a lane's own, of its copies, of its captures) segments
# small and large (2 and 20 MiB). The share is a guess, which held for GPT-2 on an H200.
RESERVED_SHARE: Final = 0.05
_SEGMENT_BYTES: Final = 3 * 22 * 2**20
# Of a lane: its stream and that of its captures, for the caller's thread and for autograd's.
_WORKSPACES: Final = 4
_BLAS_LT_BYTES: Final = 2**20  # cuBLASLt's own, which torch 2.11 took beside each on an H200
# Parameters and rows of the steps whose host is measured: one of long kernels, whose waits are
# seen, and one of many parameters. What others take is on the line through both.
_REPLAYS: Final = ((8, 4096), (120, 32))

Devices = str | torch.device | Device | Cluster | Mapping[str, int | str] | Sequence[Any] | None


@final
@dataclass(frozen=True, slots=True)
class ReplayHost:
    """The host's part in a step that is CUDA graphs.

    Attributes:
        forward_ns: Until it has launched a forward.
        backward_ns: From there until it has launched the backward.
        gradients_ns: From there until every gradient is with its parameter.
    """

    forward_ns: int = 0
    backward_ns: int = 0
    gradients_ns: int = 0


@final
@dataclass(frozen=True)
class Survey:
    """A cluster, and the fit of each of its links that copies, by source and destination."""

    cluster: Cluster
    fits: Mapping[tuple[str, str], LinkFit]

    @property
    def remarks(self) -> tuple[str, ...]:
        """A sentence for every link whose prediction of some message is wrong by more than 20 %."""
        return tuple(
            f"The link from {src} to {dst} predicts {format_bytes(fit.worst_bytes)} wrong by "
            f"{fit.worst_error:.0%}, where {GOOD_ERROR:.0%} is good: one latency and one rate do "
            "not fit all sizes there. Predictions that send such messages are as wrong."
            for (src, dst), fit in self.fits.items()
            if fit.worst_error > GOOD_ERROR
        )


def probe(devices: Devices = None) -> Cluster:
    """The cluster of the named devices of this machine.

    Args:
        devices: Names (`["cuda:0", "cuda:1"]`), torch devices, `baechi.Device` values, a mapping
            from names to capacities (`{"cpu:0": "1GiB"}`), a ready `Cluster` (returned as it is),
            or None: all CUDA devices that torch can use, or one CPU, with a warning if the driver
            has GPUs. `"cpu:0"`, `"cpu:1"`, ... are logical devices on the CPU, with a worker each;
            `"cuda:0/a"`, `"cuda:0/b"` are two on one GPU.

    Returns:
        Devices with the memory that is free now, on GPUs less what torch's allocator and cuBLAS
        hold for themselves; or with the capacity given. Links as measured. All GPUs have one host,
        the thread that launches for them, and what they receive takes as much of it as between two
        lanes of that GPU, or from another. CPUs have none: `place` counts what their workers
        lose to Python's lock.

    Raises:
        InputError: No devices, two of one name, an unknown one, one that is not there, a capacity
            that cannot be read, or copies between two of them do not arrive intact.
    """
    return survey(devices).cluster


def survey(devices: Devices = None, *, anew: bool = False) -> Survey:
    """The cluster of the named devices, as `probe` says, with how well its links fit.

    Every ordered pair of torch devices is measured once, whatever the number of logical devices.
    A hand-over between CPU workers is the machine's alone: it is kept in the store of costs, and
    measured again, once in a process, if `anew`.
    """
    if isinstance(devices, Cluster):
        return Survey(devices, {})
    wanted = _wanted(devices)
    names = [device.name if isinstance(device, Device) else device for device, _ in wanted]
    places = [torch_device(name) for name in names]
    Cluster.connected([Device(name, 0) for name in names], Link(0, 1))  # checks the names
    hosted = [
        place.type == "cuda" and (not isinstance(device, Device) or device.host != "")
        for (device, _), place in zip(wanted, places, strict=True)
    ]
    # First, since it leaves cuBLAS workspaces, which are not free memory.
    links, fits = _links(names, places, hosted, anew=anew)
    rows = []
    for (device, capacity), place in zip(wanted, places, strict=True):
        if isinstance(device, Device):
            rows.append(device)
            continue
        what = f"memory of device {device!r}"
        free = free_bytes(place, places.count(place))
        memory = free if capacity is None else parse_bytes(capacity, what=what)
        host = HOST if place.type == "cuda" else ""
        rows.append(Device(device, memory, kind=device_kind(place), host=host))
    return Survey(Cluster(tuple(rows), links), fits)


def _links(
    names: Sequence[str], places: Sequence[torch.device], hosted: Sequence[bool], *, anew: bool
) -> tuple[tuple[tuple[Link | None, ...], ...], dict[tuple[str, str], LinkFit]]:
    """The table of links, and the fits of those that copy."""

    @cache
    def measured(src: torch.device, dst: torch.device) -> Link | LinkFit:
        if src != dst:
            return _fit(names[places.index(src)], names[places.index(dst)], src, dst)
        return _handover(anew=anew) if src.type == "cpu" else Link(lane_ns(src), FREE_BYTES_PER_S)

    fits: dict[tuple[str, str], LinkFit] = {}

    def link(i: int, j: int) -> Link | None:
        if i == j:
            return None
        src, dst = places[i], places[j]
        found = measured(src, dst)
        if isinstance(found, LinkFit):
            fits[names[i], names[j]] = found
            found = found.link
        if not hosted[j]:
            return found
        crosses = src.type == "cuda" and src != dst
        if not crosses and not is_allocator_native():  # no lanes run there
            return replace(found, overhead_ns=HANDOVER_NS)
        pair = (str(src), str(dst)) if crosses else (f"{dst}/a", f"{dst}/b")
        return replace(found, overhead_ns=_handover(pair, anew=anew).overhead_ns)

    all_places = range(len(places))
    return tuple(tuple(link(i, j) for j in all_places) for i in all_places), fits


@cache
def _handover(names: tuple[str, str] = ("cpu:0", "cpu:1"), *, anew: bool) -> Link:
    """A hand-over between two logical devices."""

    def measured() -> Measured:
        link = handover(names)
        return Measured(link.latency_ns, link.overhead_ns)

    what = f"a hand-over from {names[0]} to {names[1]}"
    kept = _kept(what, names, measured, anew=anew)
    return Link(kept.forward_ns, FREE_BYTES_PER_S, kept.backward_ns)


@cache
def replay_host(gpu: torch.device, parameters: int, *, training: bool) -> ReplayHost:
    """The host's part in a step of so many parameters that is CUDA graphs."""
    what = f"a replayed {'step' if training else 'inference'} on {gpu}"

    def of(n: int, rows: int) -> Measured:
        def measured() -> Measured:
            ways = zip(*replay_ns(gpu, n, rows, training=training), strict=True)
            (forward_ns, backward_ns), (forward_launch_ns, backward_launch_ns) = ways
            return Measured(
                *(forward_ns, backward_ns),
                forward_launch_ns=forward_launch_ns,
                backward_launch_ns=backward_launch_ns,
            )

        return _kept(f"{what}, {n} parameters", (str(gpu),), measured, anew=False)

    (few, rows), (many, least_rows) = _REPLAYS
    long, wide = of(few, rows), of(many, least_rows)

    def at(shorter_ns: int, longer_ns: int) -> int:
        share = (parameters - few) / (many - few)
        return max(round(shorter_ns + share * (longer_ns - shorter_ns)), 0)

    forward_ns = at(long.forward_ns, wide.forward_ns)
    if not training:
        return ReplayHost(forward_ns)
    rest_ns = max(at(long.forward_launch_ns, wide.forward_launch_ns) - forward_ns, 0)
    whole_ns = at(long.backward_launch_ns, wide.backward_launch_ns)
    gradients_ns = max(whole_ns - long.backward_ns, 0)
    return ReplayHost(forward_ns, rest_ns + long.backward_ns, gradients_ns)


def _kept(
    what: str, names: Sequence[str], measure: Callable[[], Measured], *, anew: bool
) -> Measured:
    """Times in the store of costs, measured for it if they are not there, or if `anew`."""
    conditions = Conditions(
        kind=", ".join(device_kind(torch_device(name)) for name in names),
        hardware=", ".join(hardware(torch_device(name)) for name in names),
        threads=1,
        torch=torch.__version__,
        settings=what,
        method=3,  # changes with how it is measured
    )
    with ProfileStore() as store:
        known = None if anew else store.find("link", conditions)
        if known is None:
            known = measure()
            store.keep("link", conditions, known)
    return known


def _fit(src_name: str, dst_name: str, src: torch.device, dst: torch.device) -> LinkFit:
    """The fitted link between two torch devices, if what is sent there arrives."""
    broken = first_broken_size(lambda tensor: tensor.to(dst), src)
    if broken is not None:
        raise InputError(
            f"copies of {broken} bytes from {src_name} to {dst_name} do not arrive intact; peer "
            "access between them is broken. Leave one of the two out, or switch peer access off "
            "in the driver."
        )
    times = copy_times_ns(src, dst)
    if len(times) < 2:
        raise InputError(
            f"there is no room on {src_name} and {dst_name} for a copy of "
            f"{format_bytes(SIZES[1])}, so their link cannot be measured. Free memory there."
        )
    return fit_link(SIZES[: len(times)], times)


def _wanted(devices: Any) -> list[tuple[str | Device, int | str | None]]:
    """(name or device, capacity or None) of every requested device."""
    if devices is None:
        n, reason = usable_gpus()
        if reason:
            warnings.warn(f"CPU used: {reason}, or name the devices.", stacklevel=4)
        return [(f"cuda:{i}", None) for i in range(n)] or [("cpu:0", None)]
    if isinstance(devices, str | torch.device | Device):
        devices = [devices]
    if isinstance(devices, Mapping):
        return [(str(name), capacity) for name, capacity in devices.items()]
    wanted: list[tuple[str | Device, int | str | None]] = []
    for device in check_row(devices, "devices"):
        if not isinstance(device, str | torch.device | Device):
            raise InputError(
                f"device {device!r} is a {type(device).__name__}; give a name such as 'cuda:0', "
                "a torch.device or a baechi.Device."
            )
        wanted.append((device if isinstance(device, Device) else str(device), None))
    return wanted


def free_bytes(place: torch.device, sharing: int) -> int:
    """Memory that each of so many logical devices on one torch device could get now."""
    if place.type == "cuda":
        left = int((1 - RESERVED_SHARE) * (_free_gpu_bytes(place) // sharing))
        return max(left - sum(lane_bytes(place)), 0)
    return free_host_bytes() // sharing


def lane_bytes(gpu: torch.device) -> tuple[int, int]:
    """What each logical device on a GPU is left: for cuBLAS, and for segments of its streams."""
    major = torch.cuda.get_device_capability(gpu)[0]
    setting = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
    return _WORKSPACES * (blas_bytes(major, setting) + _BLAS_LT_BYTES), _SEGMENT_BYTES


def _free_gpu_bytes(gpu: torch.device) -> int:
    """Bytes that are free on a GPU beside CUDA's context and libraries.

    These take some hundred megabytes when they are first used, so they are used first. What
    torch's allocator holds without using it is free for this process.
    """
    matrix = torch.zeros(64, 64, device=gpu)
    image = torch.zeros(1, 8, 16, 16, device=gpu)
    with torch.no_grad():
        torch.mm(matrix, matrix)
        nn.functional.conv2d(image, image.new_zeros(8, 8, 3, 3), padding=1)
    del matrix, image
    torch.cuda.synchronize(gpu)
    free, total = torch.cuda.mem_get_info(gpu)
    reserved = torch.cuda.memory_reserved(gpu)
    # What torch may take in all (`set_per_process_memory_fraction`).
    granted = int(total * torch.cuda.get_per_process_memory_fraction(gpu))
    unused = reserved - torch.cuda.memory_allocated(gpu)
    return max(min(int(free), granted - reserved), 0) + unused
