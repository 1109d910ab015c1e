"""Weights of a model on meta: the time to read them, and what the host holds besides them.

    python3 -m benchmarks.loading [--gib 4]

Writes a checkpoint of a stack of linear layers to a temporary folder. A process that may hold what
the devices hold and 1 GiB more (`RLIMIT_DATA`) builds the skeleton, places it on two logical CPU
devices, and reads it. The claims, which are checked: it works, its memory grows by at most the
weights, 64 MiB and the largest tensor, and reading takes at most 1.5 times as long as reading the
same files, from the disk and from the page cache. Of each the best of `--rounds`.

What devices hold is fresh memory of the host here, which takes longer to get than a file in the
page cache takes to read; so a third column reads the files into fresh memory, too, and the claim
is about this one. On a GPU the copies of pinned buffers run beside the reading.
"""

import argparse
import json
import mmap
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


def read_time(folder: Path, *, keep: bool) -> float:
    """Seconds to read the files through one buffer; or into memory that keeps them."""
    buffer, kept = bytearray(BUFFER), []
    start = time.perf_counter()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(memory := mmap.mmap(-1, BUFFER) if keep else buffer):
                kept.append(memory if keep else None)
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
        grown, ratios = 0, []
        for cold in (True, False):
            seconds: dict[str, list[float]] = {"read": [], "kept": [], "loaded": []}
            for _ in range(options.rounds):
                for what, row in seconds.items():
                    if cold:
                        evict(folder)
                    if what != "loaded":
                        row.append(read_time(folder, keep=what == "kept"))
                        continue
                    command = [sys.executable, "-m", "benchmarks.loading"]
                    command += ["--gib", str(options.gib), "--child", name, str(total + GIB)]
                    run = subprocess.run(command, check=True, capture_output=True, text=True)
                    found = json.loads(run.stdout)
                    assert found["devices"] == 2
                    row.append(found["seconds"])
                    grown = max(grown, found["grown"] - total)
            read, kept, loaded = (min(row) for row in seconds.values())
            print(
                f"{options.gib} GiB from the {'disk' if cold else 'page cache'}: read in "
                f"{read:.2f} s, into memory in {kept:.2f} s, to its devices in {loaded:.2f} s; "
                f"ratios {loaded / read:.2f} and {loaded / kept:.2f}",
                flush=True,
            )
            ratios.append(loaded / kept)
        print(f"host memory besides the weights: {grown / MIB:.1f} MiB")
        if grown > 64 * MIB + largest or max(ratios) > 1.5:
            sys.exit("missed: 64 MiB and the largest tensor, or 1.5 of reading into memory")


if __name__ == "__main__":
    main()
