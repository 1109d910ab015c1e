"""Claim: several logical devices on one GPU beat one sequential CUDA graph of the whole model.

`python3 -m benchmarks.runtime.gpu` prints, for branchy models at several batch sizes, the median
time of the unsplit eager model, and that of everything else as its ratio to one CUDA graph of the
whole model, launched on one stream: below 1 is faster. What lanes are predicted to take is beside
that graph's steps alone. That graph has what a placed model has, too:
the input is copied to where the graph reads it, and the output to the caller; the graph alone is
beside it. `--training` takes whole steps, forward and backward, instead of inferences. It needs a
CUDA device.

All sides take turns and are timed by events on the caller's stream: a step behind a
synchronization, so that the time has what the host takes of it, and then ten steps in a row, which
overlap with their launches. Lanes are what `baechi.place` makes of so many, as CUDA graphs, by
costs measured on that many, and without its comparison with one lane (`guard=False`). Opara reports
up to 1.68x of a sequential graph (https://arxiv.org/abs/2312.10351), Nimble up to 1.9x from streams
alone (https://arxiv.org/abs/2012.02732), both at batch 1 on other GPUs.
"""

import copy
import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Annotated, Any, Final, final

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
ONE_GRAPH: Final = "one graph"
_PLACE: Final = "cuda:0"


@final
@dataclass(frozen=True)
class Measured:
    """Of each side, in milliseconds: the median of steps alone, and of steps in a row.

    Of lanes also what a step is predicted to take, and how many of them the plan uses.
    """

    alone: Mapping[str, float]
    in_a_row: Mapping[str, float]
    predicted: Mapping[str, float]
    used: Mapping[str, int]


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
    names = models.split(",")
    sizes = [int(size) for size in batches.split(",")]
    table: Table | None = None
    for name in names[:1] if quick else names:
        for batch in sizes[:1] if quick else sizes:
            found = measured(name, batch, placer, training=training, rounds=rounds)
            table = table or Table("model", "batch", "steps", *found.alone)
            rows = {"alone": found.alone, "in a row": found.in_a_row, "predicted": found.predicted}
            for title, took in rows.items():
                cells = _cells(found, took)
                table.add_row(name, str(batch), title, *cells)
                console.print(f"{name} at {batch}, {title}: {', '.join(cells)}")  # as they come
    console.print(table)


def measured(
    name: str,
    batch: int,
    placer: str = "auto",
    *,
    training: bool = False,
    rounds: int = 50,
    lanes: Sequence[int] = _LANES,
    models: Mapping[str, Callable[[int], Example]] = _MODELS,
) -> Measured:
    """What every side takes, and what lanes are predicted to take."""
    torch.manual_seed(0)
    model, x = models[name](batch)
    model, x = model.to(_PLACE).train(training), x.to(_PLACE)
    with nullcontext() if training else torch.no_grad():
        modules: dict[str, baechi.PlacedModule] = {}
        steps = {
            "eager": _step(model, x, training),
            ONE_GRAPH: _one_graph(model, x, training, copies=True),
            "one graph alone": _one_graph(model, x, training, copies=False),
        }
        for n in lanes:
            placed = baechi.place(
                copy.deepcopy(model),
                [f"{_PLACE}/{lane}" for lane in range(n)],
                placer=placer if n > 1 else "single",
                example_args=(x,),
                training=training,
                cuda_graphs="auto",
                guard=False,
                progress=False,
            )
            modules[f"{n} lanes"] = placed
            steps[f"{n} lanes"] = _step(placed, x, training)
        alone = dict(zip(steps, _in_turns(list(steps.values()), rounds, 1), strict=True))
        in_a_row = _in_turns(list(steps.values()), max(rounds // 10, 2), 10)
    found = Measured(
        alone,
        dict(zip(steps, in_a_row, strict=True)),
        {title: module.schedule.makespan_ns / 1e6 for title, module in modules.items()},
        {title: len(set(module.placement.devices)) for title, module in modules.items()},
    )
    for module in modules.values():
        module.unplace()
    gc.collect()
    torch.cuda.empty_cache()
    return found


def _cells(found: Measured, took: Mapping[str, float]) -> list[str]:
    """Milliseconds of the one graph, and the ratio of every other side to it, where there is one.

    Predictions are beside the one graph's steps alone, and say how many lanes their plans use.
    """
    whole = took.get(ONE_GRAPH, found.alone[ONE_GRAPH])
    cells = []
    for side in found.alone:
        cell = f"{took[side] / whole:.2f}" if side in took else ""
        if side in found.used and took is found.predicted:
            cell += f" ({found.used[side]} used)"
        cells.append(f"{whole:.2f} ms" if cell and side == ONE_GRAPH else cell)
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


def _one_graph(model: nn.Module, x: Tensor, training: bool, *, copies: bool) -> Step:
    """The whole model as one CUDA graph, by torch's recipe; with copies in and out, or without."""
    static = x.clone()
    step = _step(model, static, training)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(side)
    model.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = model(static)
        if training:
            _loss(kept).backward()
    made = [kept, *(p.grad for p in model.parameters() if p.grad is not None)]
    model.zero_grad()  # the next side has gradients of its own

    def replayed() -> object:
        static.copy_(x)
        graph.replay()
        return torch._foreach_mul([tensor.detach() for tensor in made], 1.0)

    return replayed if copies else graph.replay


def _in_turns(steps: Sequence[Step], rounds: int, row: int) -> list[float]:
    """The median milliseconds of a step of each, so many in a row; the first ones warm up."""
    took: list[list[float]] = [[] for _ in steps]
    warm_up = WARM_UP + 2 if row == 1 else 0
    for number in range(rounds + warm_up):
        for step, mine in zip(steps, took, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            for _ in range(row):
                step()
            end.record()
            end.synchronize()
            if number >= warm_up:
                mine.append(start.elapsed_time(end) / row)
    return [statistics.median(rows) for rows in took]


if __name__ == "__main__":
    typer.run(main)
