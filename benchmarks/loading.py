"""Weights of a model on meta: the time to read them, and what the host holds besides them.

    python3 -m benchmarks.loading [--gib 4]

Writes a checkpoint of a stack of linear layers to a temporary folder. A process that may hold what
the devices hold and 1 GiB more (`RLIMIT_DATA`) builds the skeleton, places it on two logical CPU
devices, and reads it. The claims, which are checked: it works, its memory grows by at most the
weights, 64 MiB and the largest tensor, and reading takes at most 1.5 times as long as reading the
same files through one buffer to nowhere, from the disk or from the page cache. Of each the best of
`--rounds`.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MIB, GIB = 1 << 20, 1 << 30
WIDTH = 4096  # of a layer: 64 MiB of float32
BUFFER = 16 * MIB


def written(folder: Path, layers: int) -> None:
    """Write the checkpoint, in files of at most 1 GiB."""
    from baechi.storage.weight_files import write_weights

    piece = memoryview(os.urandom(BUFFER))
    nbytes = 4 * WIDTH * WIDTH
    rows = [(f"{i}.weight", "float32", (WIDTH, WIDTH), nbytes) for i in range(layers)]
    write_weights(folder, rows, lambda _: [piece] * (nbytes // BUFFER), GIB)


def evict(folder: Path) -> None:
    """Drop the files from the page cache."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_time(folder: Path) -> float:
    """Seconds to read the files through one buffer."""
    buffer = memoryview(bytearray(BUFFER))
    start = time.perf_counter()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - start


def _status(row: str) -> int:
    text = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith(row)) << 10


def child(folder: Path, layers: int, room: int) -> None:
    """Place and read in this process, and print what it took."""
    resource.setrlimit(resource.RLIMIT_DATA, (room, room))
    import torch

    import baechi
    from baechi.runtime.weights import Weights

    load, found = Weights.load, {}

    def measured(*args: Any) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
        before, start = _status("VmRSS"), time.perf_counter()
        load(*args)
        found.update(seconds=time.perf_counter() - start, grown=_status("VmHWM") - before)

    Weights.load = measured  # type: ignore[method-assign]
    layer = lambda: torch.nn.Linear(WIDTH, WIDTH, bias=False)  # noqa: E731
    model = baechi.skeleton(lambda: torch.nn.Sequential(*(layer() for _ in range(layers))))
    devices = dict.fromkeys(("cpu:0", "cpu:1"), 0.6 * layers * 4 * WIDTH * WIDTH)
    placed = baechi.place(
        model,
        {name: int(nbytes) for name, nbytes in devices.items()},
        example_args=(torch.ones(1, WIDTH),),
        training=False,
        costs="estimate",
        weights=folder,
        progress=False,
    )
    used = len({placed.placement.devices[op] for op in range(len(placed.placement.devices))})
    print(json.dumps({**found, "devices": used, "peak": _status("VmHWM")}))


def main() -> None:
    """Measure, print the table, and check the claims."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", nargs=2)
    options = parser.parse_args()
    layers = options.gib * GIB // (4 * WIDTH * WIDTH)
    total, largest = options.gib * GIB, 4 * WIDTH * WIDTH
    if options.child:
        child(Path(options.child[0]), layers, int(options.child[1]))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        written(folder, layers)
        grown = 0
        for cold in (True, False):
            reading, loading = [], []
            for _ in range(options.rounds):
                evict(folder) if cold else None
                reading.append(read_time(folder))
                evict(folder) if cold else None
                command = [sys.executable, "-m", "benchmarks.loading", "--gib", str(options.gib)]
                command += ["--child", name, str(total + GIB)]
                text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                row = json.loads(text)
                assert row["devices"] == 2
                loading.append(row["seconds"])
                grown = max(grown, row["grown"] - total)
            ratio = min(loading) / min(reading)
            where = "from the disk" if cold else "from the page cache"
            print(
                f"{options.gib} GiB {where}: read {min(reading):.2f} s, loaded "
                f"{min(loading):.2f} s, ratio {ratio:.2f}",
                flush=True,
            )
            assert ratio <= 1.5 or not cold, ratio
        print(f"host memory besides the weights: {grown / MIB:.1f} MiB")
        assert grown <= 64 * MIB + largest, grown


if __name__ == "__main__":
    main()
