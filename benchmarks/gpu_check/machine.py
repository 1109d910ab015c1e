"""The step `environment`: what the other rows depend on, and whether torch can use a GPU at all."""

import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.check import Check, cores

_PACKAGES = ("baechi", "torch", "triton", "transformers", "accelerate", "pytest", "highspy")
_SETTINGS = ("CUDA_", "PYTORCH_", "CUBLAS_", "NVIDIA_", "TORCH", "OMP_", "EMULATED_CUDA")
_QUERY = (
    *("driver_version", "power.limit", "clocks.sm", "clocks.max.sm", "clocks.mem"),
    *("mig.mode.current", "compute_mode", "utilization.gpu", "memory.used", "pstate"),
)


def run(check: Check) -> None:
    """Rows of the host, of each GPU, and of what else runs there."""
    check.case("host", _host)
    check.case("torch", lambda: _torch(check.emulated))
    check.case("nvidia-smi", _driver)
    check.case("topology", lambda: {"text": _smi("topo", "-m")})


def _host() -> dict[str, Any]:
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "absent"
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": cores(),
        "versions": versions,
        "commit": _commit(),
        "settings": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_SETTINGS) and name != "NVIDIA_REQUIRE_CUDA"  # 2,000 characters
        },
    }


def _commit() -> str:
    """Of the tree that is tested; `+` where it is changed."""
    root = Path(__file__).parents[2]
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--abbrev=12"],
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"  # a copy without its history
    return found.stdout.strip()


def _torch(emulated: bool) -> dict[str, Any]:
    import torch

    from baechi.torch_support.torch_devices import usable_gpus

    n, reason = usable_gpus()
    if not n:
        why = reason or f"torch {torch.__version__} sees none (its CUDA: {torch.version.cuda})"
        raise AssertionError(f"no GPU can be used: {why}")
    gpus = []
    for index in range(n):
        row = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        gpus.append(
            {
                "name": row.name,
                "capability": f"{row.major}.{row.minor}",
                "sms": row.multi_processor_count,
                "l2_bytes": row.L2_cache_size,
                "free_bytes": free,
                "total_bytes": total,
                "peers": [
                    i
                    for i in range(n)
                    if i != index and torch.cuda.can_device_access_peer(index, i)
                ],
            }
        )
    return {
        "gpu": gpus[0]["name"],
        "gpus": gpus,
        "emulated": emulated,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "allocator": torch.cuda.get_allocator_backend(),
    }


def _driver() -> dict[str, Any]:
    text = _smi(f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader")
    rows = [dict(zip(_QUERY, line.split(", "), strict=False)) for line in text.splitlines()]
    others = _smi("--query-compute-apps=pid,used_memory", "--format=csv,noheader").splitlines()
    return {"driver": rows, "processes": others}


def _smi(*arguments: str) -> str:
    from benchmarks.gpu_check.check import Skipped

    command = shutil.which("nvidia-smi")
    if command is None:
        raise Skipped("nvidia-smi is not there")
    done = subprocess.run(
        [command, *arguments], capture_output=True, text=True, timeout=15, check=True
    )
    return done.stdout.strip()
