"""Claim: a step on GPUs takes what its schedule says, by torch's own allocator.

`python3 -m benchmarks.prediction.allocator` prints, for whole models on one GPU, on two logical
devices of it and on two GPUs where there are, what `placed.schedule` predicts for every GPU and the
most that the allocator gave in a few steps. Two devices are a random placement, which sends much;
Beside it is what the allocator held for that, as a multiple of all that it gave out at most: blocks
of segments that nobody uses, and of streams that others may not use. `--graphs` replays CUDA graphs
instead of launching eagerly. What cuBLAS keeps for itself is left
out where a step leaves it behind, but a graph's pool keeps it.

Without a GPU it runs on the emulated runtime, whose memory torch's allocator manages as it does a
GPU's: `python tests/support/emulated_cuda/run.py -m benchmarks.prediction.allocator`.
"""

import gc
from collections.abc import Iterator
from typing import Annotated, Final

import torch
import typer
from benchmarks.environment import environment
from benchmarks.prediction.models import MODELS, build
from rich.console import Console
from rich.table import Table
from torch.utils import _pytree as pytree

import baechi
from baechi.runtime.executors.cuda_graphs import WARM_UP
from baechi.tracing.pytrees import tensors_in

_LINK: Final = baechi.Link(latency_ns=1000, bytes_per_s=10**11)


def main(
    models: Annotated[str, typer.Option(help="Names, with commas.")] = ",".join(MODELS),
    modes: Annotated[str, typer.Option(help="With commas.")] = "forward,training",
    graphs: Annotated[bool, typer.Option(help="As CUDA graphs.")] = False,
    seed: Annotated[int, typer.Option(help="Of the random placements.")] = 0,
) -> None:
    """Print the table."""
    console = Console(width=120)
    console.print(environment())
    if not torch.cuda.is_available():
        console.print("no GPU is at hand; this benchmark needs one, or the emulated runtime.")
        raise typer.Exit(1)
    sides = [["cuda:0"], ["cuda:0/a", "cuda:0/b"], ["cuda:0", "cuda:1"]]
    table = Table("model", "mode", "devices", "GPU", "predicted", "allocated", "error", "reserved")
    errors = []
    for name in models.split(","):
        for mode in modes.split(","):
            for devices in sides[: 2 + (torch.cuda.device_count() > 1)]:
                for gpu, said, real, held in peaks(name, mode == "training", devices, seed, graphs):
                    errors.append((said - real) / real)
                    row = (
                        f"{said / 1e6:.1f} MB",
                        f"{real / 1e6:.1f} MB",
                        f"{errors[-1]:+.1%}",
                        f"{held:.2f}",
                    )
                    table.add_row(name, mode, " ".join(devices), gpu, *row)
        console.print(f"{name}: {min(errors):+.1%} to {max(errors):+.1%} so far")
    console.print(table)


def peaks(
    name: str, training: bool, devices: list[str], seed: int, graphs: bool
) -> Iterator[tuple[str, int, int, float]]:
    """Every GPU of a placement: predicted and allocated bytes, and what is held for the latter."""
    gpus = sorted({device.split("/")[0] for device in devices})
    gc.collect()
    torch.cuda.empty_cache()
    before = {gpu: torch.cuda.memory_allocated(gpu) for gpu in gpus}
    model, args, kwargs = build(name, MODELS[name].batches[0], training=training)
    model = model.to(gpus[0])
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: t.to(gpus[0]), (args, kwargs))
    given = sum(t.nbytes for t in {id(t): t for t in tensors_in((args, kwargs))}.values())
    with torch.set_grad_enabled(training):
        traced = baechi.trace(model, args, kwargs)
        profile = baechi.profile(traced, gpus[0], progress=False)
        graph = traced.graph(profile, training=training)
        cluster = baechi.Cluster.connected([baechi.Device(d, "64GiB") for d in devices], _LINK)
        placer = baechi.RandomPlacer(seed) if len(devices) > 1 else "single"
        placement = baechi.solve(graph, cluster, placer)
        placed = baechi.apply(
            traced,
            placement,
            graph=graph,
            cluster=cluster,
            devices=devices,
            cuda_graphs="auto" if graphs else False,
        )
        torch.cuda.empty_cache()
        for gpu in gpus:
            torch.cuda.reset_peak_memory_stats(gpu)
        for _ in range(WARM_UP + 3):
            placed.zero_grad()
            outputs = [t for t in tensors_in(placed(*args, **kwargs)) if t.requires_grad]
            if training:
                # The first, which is the loss where the model has one.
                (outputs[0] if outputs[0].dim() == 0 else _loss(outputs)).backward()
            del outputs
    for gpu in gpus:
        known = before[gpu] + (given if gpu == gpus[0] else 0)
        real = torch.cuda.max_memory_allocated(gpu) - known
        rows = zip(devices, placed.schedule.peak_bytes, strict=True)
        said = sum(peak for device, peak in rows if device.split("/")[0] == gpu)
        placed.zero_grad()
        state = [t for t in (*model.parameters(), *model.buffers()) if str(t.device) == gpu]
        left = torch.cuda.memory_allocated(gpu) - known - sum(t.nbytes for t in state)
        held = torch.cuda.max_memory_reserved(gpu) / torch.cuda.max_memory_allocated(gpu)
        yield gpu, said, real - (0 if graphs else max(left, 0)), held
    placed.unplace()


def _loss(outputs: list[torch.Tensor]) -> torch.Tensor:
    total = outputs[0].new_zeros((), device="cpu")
    for output in outputs:
        total = total + output.float().sum().cpu()
    return total


if __name__ == "__main__":
    typer.run(main)
