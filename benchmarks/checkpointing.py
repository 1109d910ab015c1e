"""Claim: for a limit of memory, what runs forward again costs the time that was said, and it fits.

`python3 -m benchmarks.checkpointing` places models on one logical device with less and less memory
(`place(..., checkpoint=limit)`), and prints for each limit how many submodules run forward again,
and the step and the peak beside those without any: predicted and measured. Steps of both take turns
in one thread; a figure is a ratio of medians of processor time, peaks are counted by storages.

At the end the step's ratio where all layers of the GPT-2 run again, here and by what
`transformers` does with torch's checkpointing (`gradient_checkpointing_enable`).
"""

import copy
import statistics
import time
from collections.abc import Callable
from typing import Annotated, Any, Final

import torch
import typer
from benchmarks.environment import environment
from benchmarks.models import hugging_face
from benchmarks.prediction.models import build
from rich.console import Console
from rich.table import Table
from torch.utils import _pytree as pytree

import baechi

_CASES: Final = (("gpt2", 8), ("resnet50", 4), ("inception", 4))
_PERCENT: Final = (80, 60, 40)


def main(
    rounds: Annotated[int, typer.Option(help="Steps of each side.")] = 9,
    quick: Annotated[bool, typer.Option(help="The first model, few rounds.")] = False,
) -> None:
    """Print the tables."""
    torch.set_num_threads(1)
    console = Console(width=110)
    console.print(environment())
    table = Table(
        *("model, batch", "limit", "units", "step, predicted", "measured"),
        *("peak, predicted", "measured"),
    )
    for name, batch in _CASES[:1] if quick else _CASES:
        for row in limited(name, batch, 3 if quick else rounds):
            table.add_row(f"{name}, {batch}", *row)
    console.print(table)
    ours, theirs = against_torch(3 if quick else rounds)
    console.print(f"gpt2, all layers run again: step {ours:.2f} here, {theirs:.2f} by torch's own")


def gpt2(batch: int) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    """A GPT-2 of 8 layers, 256 wide, whose activations are most of what a step holds."""
    torch.manual_seed(0)
    sizes = {"n_layer": 8, "n_embd": 256, "n_head": 8, "vocab_size": 1024, "n_positions": 128}
    model = hugging_face.gpt2(dropout=False, **sizes, bos_token_id=1, eos_token_id=2)
    tokens = torch.randint(3, 1024, (batch, 128))
    return model.train(), (), {"input_ids": tokens, "labels": tokens}


def limited(name: str, batch: int, rounds: int) -> list[list[str]]:
    """For each limit a row."""
    model, args, kwargs = gpt2(batch) if name == "gpt2" else build(name, batch, training=True)
    traced = baechi.trace(model, args, kwargs)
    profile = baechi.profile(traced, "cpu", threads=1, progress=False)
    cluster = baechi.probe({"cpu:0": 1 << 40})

    def placed(checkpoint: Any) -> baechi.PlacedModule:
        graph = traced.graph(profile, checkpoint=checkpoint)
        placement = baechi.solve(graph, cluster, placer="single")
        own = baechi.trace(copy.deepcopy(model), args, kwargs)  # each of a model of its own
        return baechi.apply(own, placement, graph=graph, cluster=cluster)

    plain = placed(None)
    said, seen = plain.schedule, peak(plain, args, kwargs)
    rows = []
    for percent in _PERCENT:
        limit = said.peak_bytes[0] * percent // 100
        try:
            names = baechi.choose_checkpoint(traced, profile, baechi.within_memory(cluster, limit))
        except baechi.InfeasibleError:
            rows.append([f"{percent} %", "does not fit", "", "", "", ""])
            continue
        again = placed(names or None)
        steps = [lambda m=m: step(m, args, kwargs) for m in (plain, again)]
        rows.append(
            [
                f"{percent} %",
                f"{len(again.graph.units)}",
                f"{again.schedule.makespan_ns / said.makespan_ns:.2f}",
                f"{ratio(*steps, rounds):.2f}",
                f"{again.schedule.peak_bytes[0] / said.peak_bytes[0]:.2f}",
                f"{peak(again, args, kwargs) / seen:.2f}",
            ]
        )
    return rows


def against_torch(rounds: int) -> tuple[float, float]:
    """GPT-2 with all layers run again: the step's ratio here, and by torch's own checkpointing."""
    model, args, kwargs = gpt2(8)
    traced = baechi.trace(model, args, kwargs)
    profile = baechi.estimate(traced, "cpu")
    cluster = baechi.probe({"cpu:0": 1 << 40})
    modules = []
    for checkpoint in (None, "transformer.h.*"):
        graph = traced.graph(profile, checkpoint=checkpoint)
        placement = baechi.solve(graph, cluster, placer="single")
        own = baechi.trace(copy.deepcopy(model), args, kwargs)  # the model itself stays unsplit
        modules.append(baechi.apply(own, placement, graph=graph, cluster=cluster))
    ours = ratio(*(lambda m=m: step(m, args, kwargs) for m in modules), rounds)

    def eager(again: bool) -> None:
        if again:
            model.gradient_checkpointing_enable()
        step(model, args, kwargs)
        model.gradient_checkpointing_disable()

    return ours, ratio(lambda: eager(False), lambda: eager(True), rounds)


def step(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
    """A forward and a backward."""
    module.zero_grad()
    leaves = pytree.tree_leaves(module(*args, **kwargs))
    graded = [t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad]
    torch.stack([tensor.square().mean() for tensor in graded]).sum().backward()


def peak(placed: baechi.PlacedModule, args: Any, kwargs: Any) -> int:
    """The measured peak of a step."""
    with placed.metered() as meter:
        step(placed, args, kwargs)
    placed.zero_grad()
    return meter.peak_bytes[0]


def ratio(one: Callable[[], None], other: Callable[[], None], rounds: int) -> float:
    """The median processor time of the other for each of the one; they take turns."""
    samples: tuple[list[int], list[int]] = ([], [])
    for _ in range(rounds + 1):
        for part, row in zip((one, other), samples, strict=True):
            before = time.process_time_ns()
            part()
            row.append(time.process_time_ns() - before)
    first, second = (statistics.median(row[1:]) for row in samples)
    return second / first


if __name__ == "__main__":
    typer.run(main)
