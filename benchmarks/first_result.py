"""From `place` to the first result of a model of 24 layers, on two logical CPU devices.

    python3 -m benchmarks.first_result [--model gpt2] [--layers 12] [--split] [--beside SRC]

Claim: a training step of a decoder has its loss 4 s after `place` began, where costs are known:
those of operators are computed, and what is measured of the machine and of this model's steps is in
the store. The first row is with an empty store. Each row is a process of its own, which has
imported torch and transformers before, and has bytecode, as an installed package has. Seconds of
the wall and of processors (both of a figure's own process), and where they go; `export`, torch's
own tracer, and `propagate`, a run on fake tensors, are parts of `trace`. `--split` keeps the split
that is predicted to be faster where a hand-over takes 15 us. `--beside` runs the same in turns with
another checkout's `src`. `second` is the processor time of a call of another length after that,
which makes a plan for every length.
"""

import argparse
import hashlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Each stage is a function, looked up where it is called.
STAGES = {
    "probe": "baechi.placing",
    "trace": "baechi.tracing.ladder",
    "export": "torch.export",
    "propagate": "baechi.tracing.ladder",
    "estimate": "baechi.planning.device_costs",
    "solve_with_held": "baechi.planning.placement_search",
    "executable": "baechi.planning.split_guard",
    "compare": "baechi.planning.split_guard",
}


def child(name: str, layers: int, *, split: bool) -> None:
    """Place and call in this process, and print what it took."""
    import torch
    from benchmarks import shapes

    import baechi

    torch.set_num_threads(1)
    model, ids = getattr(shapes, name)(layers).train(), torch.randint(3, 500, (2, 32))
    given = {"input_ids": ids, "labels": ids, "use_cache": False}
    took = dict.fromkeys(STAGES, 0.0)

    def timed(stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                took[stage] += time.process_time() - start

        return run

    for stage, module in STAGES.items():
        owner = importlib.import_module(module)
        setattr(owner, stage, timed(stage, getattr(owner, stage)))
    devices: Any = shapes.DEVICES
    if split:
        rows = [baechi.Device(device, memory, kind="cpu") for device, memory in devices.items()]
        devices = baechi.Cluster.connected(rows, baechi.Link(2_000, 10**15, 15_000))
    wall, busy = time.perf_counter(), time.process_time()
    placed = baechi.place(
        model, devices, costs="estimate", progress=False, example_kwargs=given, guard=not split
    )
    placed(**given)
    wall, busy = time.perf_counter() - wall, time.process_time() - busy
    plan = repr((placed.placement.devices, placed.traced.digest))
    found = {"wall": wall, "processors": busy, **took}
    other, busy = ids[:, :24].contiguous(), time.process_time()
    placed(input_ids=other, labels=other, use_cache=False)
    found["second"] = time.process_time() - busy
    print(json.dumps({**found, "plan": hashlib.sha256(plan.encode()).hexdigest()[:12]}))


def row(source: str, store: str, *options: str) -> dict[str, Any]:
    """The figures of a process."""
    root = Path(__file__).parent.parent
    paths = os.pathsep.join([source, str(root)])
    own = {"PYTHONPATH": paths, "XDG_CACHE_HOME": store, "HF_HUB_OFFLINE": "1"}
    own |= {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": f"{store}/bytecode"}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.first_result", *options, "--child"],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **own},
        cwd=root,
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("llama", "gpt2"), default="llama")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--split", action="store_true")
    parser.add_argument("--beside", help="another checkout's src")
    parser.add_argument("--child", action="store_true")
    options = parser.parse_args()
    if options.child:
        child(options.model, options.layers, split=options.split)
        return
    own = str(Path(__file__).parent.parent / "src")
    sources = [options.beside, own] if options.beside else [own]
    given = ["--model", options.model, "--layers", str(options.layers)]
    given += ["--split"] if options.split else []
    columns = ("wall", "processors", *STAGES, "second", "plan")
    print(" " * 16, *(f"{column:>15}" for column in columns))
    with tempfile.TemporaryDirectory() as folder:
        for count in range(options.rounds + 1):
            for number, source in enumerate(sources):
                store = f"{folder}/{number}"
                found = row(source, store, *given)
                cells = (found[column] for column in columns)
                texts = (c if isinstance(c, str) else f"{c:.2f}" for c in cells)
                which = "beside" if options.beside and not number else "here"
                name = f"{which}, {'known' if count else 'empty store'}"
                print(f"{name:16}", *(f"{text:>15}" for text in texts), flush=True)


if __name__ == "__main__":
    main()
