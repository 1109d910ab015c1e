"""Figures from a process of its own: the peak of one's memory is what the others' left."""

import json
import os
import pathlib
import resource
import subprocess
import sys
from typing import Any


def figures_of(code: str, *args: int) -> dict[str, Any]:
    """What Python code with these arguments prints in its last line, as JSON."""
    command = [sys.executable, "-c", code, *map(str, args)]
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def peak_bytes() -> int:
    """This process's own peak; Linux keeps that of `getrusage` across exec, from the parent."""
    status = pathlib.Path("/proc/self/status")
    if status.exists():
        rows = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(rows["VmHWM"].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
