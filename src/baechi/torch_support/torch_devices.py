"""Logical devices as torch devices, and what hardware is behind them."""

import ctypes
import os
import platform
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from baechi.errors import InputError
from baechi.records.cluster import Cluster
from baechi.torch_support.torch_internals import kernel_settings, precision_settings
from baechi.units import parse_bytes

# Where the system does not report it: the least that server processors have.
_USUAL_CACHE_BYTES = 32 * 2**20


def torch_device(name: str | torch.device) -> torch.device:
    """The torch device behind a logical device's name: `"cuda:0/a"` is on `cuda:0`.

    Raises:
        InputError: torch has no such device, this machine has none, or torch cannot use it.
    """
    text = str(name).split("/")[0]
    try:
        device = torch.device(text)
    except RuntimeError:
        raise InputError(
            f"device {str(name)!r} is unknown; write a torch device such as 'cuda:0' or 'cpu:0', "
            "with a suffix ('cuda:0/a') for several logical devices on one."
        ) from None
    if device.type == "cuda":
        n, reason = usable_gpus()
        if reason:
            raise InputError(f"device {str(name)!r} cannot be used: {reason}, or use 'cpu:0'.")
        if (device.index or 0) >= n:
            have = f"only {n} CUDA device(s)" if n else "no CUDA device"
            raise InputError(
                f"device {str(name)!r} is not there: torch sees {have}. "
                "Check CUDA_VISIBLE_DEVICES and the installed torch build, or use 'cpu:0'."
            )
        return torch.device("cuda", device.index or 0)
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"device {str(name)!r} is neither a CPU nor CUDA; only these are run on.")
    return torch.device("cpu")


def usable_gpus() -> tuple[int, str]:
    """How many GPUs torch can run on; and why not, with the remedy, if there are others."""
    n = torch.cuda.device_count()  # it asks NVML, which counts those of too old a driver, too
    try:
        if n:
            torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0].partition(". ")[0].rstrip(".")
        file = Path("/proc/driver/nvidia/version")
        found = re.search(r" (\d+\.[\d.]+) ", file.read_text() if file.exists() else "")
        return 0, (
            f"the driver (version: {found[1] if found else 'unknown'}) has {n} CUDA device(s), but "
            f"torch {torch.__version__}, built for CUDA {torch.version.cuda}, cannot run on them "
            f"({reason}). Update the driver (CUDA 13 needs 580, CUDA 12 525), install a torch for "
            "an older CUDA (pip install torch --index-url https://download.pytorch.org/whl/cu126)"
        )
    return n, ""


def processes_on(gpu: torch.device) -> int:
    """The number of processes that compute on a GPU, this one included; 0 where it is unknown.

    Source: NVIDIA's Management Library, `nvmlDeviceGetComputeRunningProcesses`.
    """
    if gpu.type != "cuda":
        return 0
    handle, count = ctypes.c_void_p(), ctypes.c_uint()
    name = f"GPU-{torch.cuda.get_device_properties(gpu).uuid}"
    with suppress(OSError, AttributeError):  # no such library, or an older one
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() == 0:
            if nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle)) == 0:
                # Given no room for them, it tells how many there are.
                nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle, ctypes.byref(count), None)
            nvml.nvmlShutdown()
    return count.value


def gpus_of(places: Sequence[torch.device]) -> tuple[str | None, ...]:
    """The GPU behind every logical device, as its name; None for a CPU."""
    return tuple(str(place) if place.type == "cuda" else None for place in places)


def device_kind(device: torch.device) -> str:
    """The hardware kind, for `Device.kind` and `OpGraph.times`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def with_kinds(cluster: Cluster) -> Cluster:
    """The cluster with missing kinds, and lanes of GPUs, filled in from the hardware."""
    places = [torch_device(row.name) for row in cluster.devices]
    rows = tuple(
        replace(
            row,
            kind=row.kind or device_kind(place),
            lane_of=row.lane_of or (str(place) if several and place.type == "cuda" else ""),
        )
        for row, place in zip(cluster.devices, places, strict=True)
        for several in [places.count(place) > 1]
    )
    return replace(cluster, devices=rows)


def hardware(device: torch.device) -> str:
    """The exact processor, as the driver or the system names it."""
    if device.type == "cuda":
        row = torch.cuda.get_device_properties(device)
        memory_gib = row.total_memory / 2**30
        return f"{row.name}, {row.multi_processor_count} SMs, {memory_gib:.0f} GiB"
    named: list[str] = []
    with suppress(OSError):  # no such file on this system
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        named = [line for line in lines if line.startswith(("model name", "Hardware"))]
    name = named[0].partition(":")[2].strip() if named else platform.processor()
    flags = torch.backends.cpu.get_cpu_capability()
    return f"{name or 'unnamed'}, {platform.machine()}, {flags}"


def cache_bytes(device: torch.device) -> int:
    """Bytes of the last-level cache that the device reads memory through."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("*/size"):
        with suppress(OSError, InputError):
            sizes.append(parse_bytes(path.read_text().strip() + "iB"))  # such as 32768K
    return max(sizes, default=_USUAL_CACHE_BYTES)


def free_host_bytes() -> int:
    """Memory of the host that a process could get now."""
    with suppress(OSError), open("/proc/meminfo", encoding="ascii") as file:  # not on all systems
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def is_allocator_native() -> bool:
    """True if the memory of GPUs is of torch's own allocator, or there are none."""
    return not torch.cuda.is_available() or torch.cuda.get_allocator_backend() == "native"


def blas_bytes(major: int, setting: str) -> int:
    """Bytes that cuBLAS keeps for every stream and every host thread that launches on it.

    Args:
        major: The GPU's compute capability.
        setting: `CUBLAS_WORKSPACE_CONFIG`: pairs of KiB and counts, such as `:4096:2:16:8`.

    Source: `parseChosenWorkspaceSize` in torch's `aten/src/ATen/cuda/CublasHandlePool.cpp`.
    """
    pairs = re.findall(r":(\d+):(\d+)", setting)
    if pairs:
        return sum(int(size) * int(count) for size, count in pairs) * 2**10
    return 32 * 2**20 if major >= 9 else 8 * 2**20 + 2**17


def fp32_precisions() -> dict[str, str]:
    """To what fp32 is rounded before it is multiplied: `tf32`, `bf16`, or `ieee`, which is not.

    By library and class of operator, and one by one: where they were set apart,
    `torch.get_float32_matmul_precision` and `torch.backends.cudnn.allow_tf32` raise an error.
    """
    found = {name: read() for name, read in precision_settings.items()}
    return {name: "ieee" if kind == "none" else kind for name, kind in found.items()}


def kernel_choices() -> tuple[Any, ...]:
    """The settings by which torch chooses among kernels of an operator, precisions included."""
    return tuple([read() for read in kernel_settings])


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Lets torch use so many threads for an operator inside, as a logical CPU device does."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
