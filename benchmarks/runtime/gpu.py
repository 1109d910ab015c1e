"""Claim: several logical devices on one GPU beat one sequential CUDA graph of the whole model.

`python3 -m benchmarks.runtime.gpu` prints, for branchy models at several batch sizes, the median
time of the unsplit eager model, and that of everything else as its ratio to one CUDA graph of the
whole model, launched on one stream: below 1 is faster. `--training` takes whole steps, forward and
backward, instead of inferences. It needs a CUDA device; nothing here has been run on one yet, so no
document cites a figure of it.

All sides take turns, step by step, and are timed by events on the caller's stream. How the models
are split is what `baechi.solve` says for operators measured on that GPU; `lanes` are those that
compute. Opara reports up to 1.68x of a sequential graph (https://arxiv.org/abs/2312.10351), Nimble
up to 1.9x from streams alone (https://arxiv.org/abs/2012.02732), both at batch 1 on other GPUs.
"""

import copy
import gc
import statistics
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Annotated, Any, Final

import torch
import typer
from benchmarks.environment import environment
from benchmarks.models.googlenet import googlenet
from benchmarks.models.inception_v3 import inception_v3
from benchmarks.models.nasnet_a import nasnet_a
from benchmarks.models.towers import Towers
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import baechi
from baechi.runtime.executors.cuda_graphs import WARM_UP

Example = tuple[nn.Module, Tensor]
Step = Callable[[], object]

_IMAGE: Final = (3, 224, 224)
_MODELS: Final[dict[str, Callable[[int], Example]]] = {
    "inception-v3": lambda batch: (inception_v3(), torch.randn(batch, 3, 299, 299)),
    "googlenet": lambda batch: (googlenet(), torch.randn(batch, *_IMAGE)),
    "nasnet-a": lambda batch: (nasnet_a(), torch.randn(batch, *_IMAGE)),
    "two towers": lambda batch: (Towers(2, 8, 1024), torch.randn(batch, 1024)),
}
_LANES: Final = (1, 2, 4)
_PLACE: Final = "cuda:0"


def main(
    rounds: Annotated[int, typer.Option(help="Steps of each side.")] = 50,
    batches: Annotated[str, typer.Option(help="Batch sizes.")] = "1,8,32",
    placer: Annotated[str, typer.Option(help="Who splits the models.")] = "auto",
    training: Annotated[bool, typer.Option(help="Forward and backward.")] = False,
    quick: Annotated[bool, typer.Option(help="The first model at the first batch size.")] = False,
    models: Annotated[str, typer.Option(help="Names, in turn.")] = ",".join(_MODELS),
) -> None:
    """Print the table."""
    console = Console(width=140)
    console.print(environment())
    if not torch.cuda.is_available():
        console.print("no GPU is at hand; this benchmark needs one.")
        raise typer.Exit(1)
    table = Table("model", "batch", "eager", "one graph", "eager /")
    for n in _LANES:
        table.add_column(f"{n} lanes /")
        table.add_column("as graphs /")
    sizes = [int(size) for size in batches.split(",")]
    names = models.split(",")
    for name in names[:1] if quick else names:
        for batch in sizes[:1] if quick else sizes:
            cells = row(name, batch, placer, training, rounds)
            table.add_row(name, str(batch), *cells)
            console.print(f"{name} at {batch}: {', '.join(cells)}")  # whatever ends the run
    console.print(table)


def row(name: str, batch: int, placer: str, training: bool, rounds: int) -> list[str]:
    """One row: milliseconds of the unsplit model, then ratios to one graph of it."""
    torch.manual_seed(0)
    model, x = _MODELS[name](batch)
    model, x = model.to(_PLACE).train(training), x.to(_PLACE)
    with nullcontext() if training else torch.no_grad():
        traced = baechi.trace(model, (x,))
        profile = baechi.profile(traced, _PLACE, progress=False)
        graph = traced.graph(profile, training=training)
        modules: list[baechi.PlacedModule] = []
        counts: list[int] = []
        for n in _LANES:
            cluster = baechi.probe([f"{_PLACE}/{lane}" for lane in range(n)])
            placement = baechi.solve(graph, cluster, placer if n > 1 else "single")
            counts.append(len(set(placement.devices)))
            modules += [
                baechi.apply(
                    *(baechi.trace(copy.deepcopy(model), (x,)), placement),
                    **{"graph": graph, "cluster": cluster, "cuda_graphs": wish},
                )
                for wish in (False, "auto")
            ]
        steps = [_step(module, x, training) for module in (model, *modules)]
        steps.insert(1, _one_graph(model, x, training))
        medians = _in_turns(steps, rounds)
    eager, whole, *rest = medians
    cells = [f"{eager:.2f} ms", f"{whole:.2f} ms", f"{eager / whole:.2f}"]
    for place, took in enumerate(rest):
        lanes = "" if counts[place // 2] == _LANES[place // 2] else f" ({counts[place // 2]})"
        cells.append(f"{took / whole:.2f}{lanes}")
    for module in modules:
        module.unplace()
    gc.collect()
    torch.cuda.empty_cache()
    return cells


def _step(module: nn.Module, x: Tensor, training: bool) -> Step:
    if not training:
        return lambda: module(x)

    def step() -> None:
        module.zero_grad()
        _loss(module(x)).backward()

    return step


def _loss(outputs: Any) -> Tensor:
    return outputs.float().square().mean()


def _one_graph(model: nn.Module, x: Tensor, training: bool) -> Step:
    """The whole model as one CUDA graph, by torch's own recipe."""
    step = _step(model, x, training)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(side)
    model.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = model(x)
        if training:
            _loss(kept).backward()
    return graph.replay


def _in_turns(steps: Sequence[Step], rounds: int) -> list[float]:
    """The median milliseconds of each, after a few to warm up and to capture."""
    took: list[list[float]] = [[] for _ in steps]
    for number in range(rounds + WARM_UP + 2):
        for step, mine in zip(steps, took, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            step()
            end.record()
            end.synchronize()
            if number >= WARM_UP + 2:
                mine.append(start.elapsed_time(end))
    return [statistics.median(row) for row in took]


if __name__ == "__main__":
    typer.run(main)
