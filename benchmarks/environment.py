"""What the numbers of a benchmark depend on: `python3 -m benchmarks.environment` prints it."""

import json
import os
import platform
from importlib import metadata
from pathlib import Path


def environment() -> dict[str, str | int]:
    """Processor, cores that this process may use, and versions."""
    facts: dict[str, str | int] = {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1,
        "system": platform.platform(),
        "python": platform.python_version(),
    }
    for package in ("baechi", "torch", "transformers", "numpy", "highspy"):
        try:
            facts[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            facts[package] = "absent"
    facts["gpu"] = gpu_name()
    return facts


def cpu_name() -> str:
    """The processor's own name, where the system tells."""
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def gpu_name() -> str:
    """The first GPU's name."""
    try:
        import torch
    except ImportError:
        return "none"
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"


if __name__ == "__main__":
    print(json.dumps(environment(), indent=2))
