"""Claim: running a placement costs next to nothing.

`python3 -m benchmarks.runtime` prints four tables:

- a model placed on one logical device against the unsplit eager model, at the same threads: at most
  1.03 of its time;
- the peak memory of the same steps, metered: at most 1.02 of the unsplit model's;
- a chain of tiny operators, cut between two devices after each, against the whole chain: what a
  segment costs where one thread does everything, at most 30 us, and with a worker per device, where
  each is handed over, at most 80 us;
- the proof of a program of about 10,000 instructions: at most 100 ms.

With `--compiled` it prints a fourth alone: models on one logical device, as generated and compiled,
against eager, beside `torch.compile` of the whole model.
`python3 -m benchmarks.runtime.gpu` is the part for a GPU.

Peers take turns, step by step; a figure is the ratio of the medians of one run, or a difference of
lower quartiles divided by the count. The ratio of medians of processor time stands beside it: on a
machine that does something else meanwhile that says more, with `OMP_NUM_THREADS=1`.
"""

import copy
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Annotated, Any, Final

import torch
import typer
from benchmarks.environment import environment
from benchmarks.prediction.models import build
from benchmarks.runtime.peaks import placed_alone, step_peaks
from rich.console import Console
from rich.table import Table
from torch import nn

import baechi
from baechi.program.compilation import compile_program
from baechi.program.race_proof import check_program
from baechi.runtime.autograd.step import Step
from baechi.runtime.executors.cuda_streams import CudaExecutor

_CASES: Final = (("gpt2", 1), ("gpt2", 8), ("bert", 2), ("inception", 1), ("resnet50", 2))
_OPS: Final = 200


def main(
    rounds: Annotated[int, typer.Option(help="Steps of each side.")] = 15,
    quick: Annotated[bool, typer.Option(help="The first model, few rounds.")] = False,
    compiled: Annotated[bool, typer.Option(help="Compiled segments alone; minutes.")] = False,
) -> None:
    """Print the tables."""
    console = Console(width=100)
    console.print(environment())
    if compiled:
        console.print(against_compiled(rounds, quick=quick))
        return
    models = Table("model", "batch", "mode", "eager", "placed", "placed / eager", "by processor")
    memory = Table("model", "batch", "mode", "unsplit", "placed", "placed / unsplit")
    for name, batch in _CASES[:1] if quick else _CASES:
        for training in (False, True):
            models.add_row(name, str(batch), *against_eager(name, batch, training, rounds))
            memory.add_row(name, str(batch), *peaks(name, batch, training))
    console.print(models)
    console.print(memory)
    console.print(overheads(rounds * 4))
    console.print(proofs())


def against_eager(name: str, batch: int, training: bool, rounds: int) -> list[str]:
    """One row: the median steps of the eager and of the placed model, and their ratio."""
    model, args, kwargs = build(name, batch, training=training)
    placed = placed_alone(baechi.trace(copy.deepcopy(model), args, kwargs), training)
    step = partial(_step, args=args, kwargs=kwargs, training=training)
    sides = [model, placed]
    steps = [partial(step, side) for side in sides]
    seconds = _in_turns(steps, rounds, lambda: [side.zero_grad() for side in sides])
    eager, ours = (statistics.median(row[0] for row in rows) for rows in seconds)
    busy = [statistics.median(row[1] for row in rows) for rows in seconds]
    placed.unplace()
    gc.collect()
    mode = "training" if training else "forward"
    took = [f"{eager * 1e3:.1f} ms", f"{ours * 1e3:.1f} ms"]
    return [mode, *took, f"{ours / eager:.3f}", f"{busy[1] / busy[0]:.3f}"]


def _step(module: nn.Module, *, args: Any, kwargs: Any, training: bool) -> None:
    with nullcontext() if training else torch.no_grad():
        outputs = module(*args, **kwargs)
        if training:
            _loss(outputs).backward()


def against_compiled(rounds: int, *, quick: bool) -> Table:
    """Models on one logical device, as generated and compiled, and compiled unsplit, to eager."""
    table = Table("model", "batch", "mode", "eager", "placed", "placed, compiled", "compiled whole")
    for name, batch in _CASES[:1] if quick else (_CASES[0], _CASES[2], _CASES[4]):
        for training in (False, True):
            table.add_row(name, str(batch), *_compiled_row(name, batch, training, rounds))
            torch._dynamo.reset()
    table.caption = "processor time, medians; of the last three its ratio to eager"
    return table


def _compiled_row(name: str, batch: int, training: bool, rounds: int) -> list[str]:
    model, args, kwargs = build(name, batch, training=training)
    traced = [baechi.trace(copy.deepcopy(model), args, kwargs) for _ in range(2)]
    sides = [model, _placed(traced[0], training), _placed(traced[1], training, compile=True)]
    sides.append(torch.compile(model, dynamic=False))
    step = partial(_step, args=args, kwargs=kwargs, training=training)
    steps = [lambda side=side: step(side) for side in sides]
    seconds = _in_turns(steps, rounds, lambda: [side.zero_grad() for side in sides])
    busy = [statistics.median(row[1] for row in rows) for rows in seconds]
    ratios = [f"{side / busy[0]:.3f}" for side in busy[1:]]
    for side in sides[1:3]:
        side.unplace()
    gc.collect()
    return ["training" if training else "forward", f"{busy[0] * 1e3:.1f} ms", *ratios]


def _placed(
    traced: baechi.Traced,
    training: bool,
    *,
    compile: bool = False,  # noqa: A002
) -> baechi.PlacedModule:
    costs = tuple(baechi.OpCost(1000, 2000) for _ in traced.ops)
    graph = traced.graph(baechi.Profile(traced.digest, "", costs), training=training)
    cluster = baechi.Cluster.uniform(1, 2**50, baechi.Link(0, 10**9))
    placement = baechi.solve(graph, cluster, placer="single")
    return baechi.apply(traced, placement, ["cpu:0"], compile=compile)


def peaks(name: str, batch: int, training: bool) -> list[str]:
    """One row: the peaks of the unsplit and of the placed model, and their ratio."""
    model, args, kwargs = build(name, batch, training=training)
    unsplit, placed = step_peaks(model, args, kwargs, training=training)
    sizes = [f"{nbytes / 2**20:.1f} MiB" for nbytes in (unsplit, placed)]
    return ["training" if training else "forward", *sizes, f"{placed / unsplit:.4f}"]


def _loss(outputs: Any) -> torch.Tensor:
    own = getattr(outputs, "loss", None)
    if own is not None:
        return own
    tensors = [t for t in torch.utils._pytree.tree_leaves(outputs) if isinstance(t, torch.Tensor)]
    return torch.stack([t.float().mean() for t in tensors if t.requires_grad]).sum()


def _in_turns(
    steps: Sequence[Callable[[], object]], rounds: int, before: Callable[[], object]
) -> list[list[tuple[float, float]]]:
    """The seconds of every step of each, and those of processors, after two to warm up."""
    seconds: list[list[tuple[float, float]]] = [[] for _ in steps]
    for _ in range(rounds + 2):
        for step, row in zip(steps, seconds, strict=True):
            before()
            start, busy = time.perf_counter(), time.process_time()
            step()
            row.append((time.perf_counter() - start, time.process_time() - busy))
    return [row[2:] for row in seconds]


class _Chain(nn.Module):
    """Operators one after the other, each of next to no time."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(_OPS):
            x = x.neg()
        return x


def overheads(rounds: int) -> Table:
    """What a segment and a hand-over cost, in inference and in a training step."""
    table = Table("mode", "segments", "us each, one thread", "us each, handed over")
    table.add_row("forward", *_overhead(False, rounds))
    table.add_row("training", *_overhead(True, rounds))
    return table


def _overhead(training: bool, rounds: int) -> list[str]:
    """The segments of a chain cut after each operator, and what each adds to the whole chain."""
    x = torch.zeros(1, requires_grad=True)
    traced = baechi.trace(_Chain(), (x,))
    costs = tuple(baechi.OpCost(1, 1) for _ in traced.ops)
    graph = traced.graph(baechi.Profile(traced.digest, "", costs), training=training)
    devices = [op % 2 for op in range(len(traced.ops))]
    if training:
        backward = list(range(len(traced.ops)))[::-1][: len(graph.ops) - len(traced.ops) - 1]
        devices += [devices[-1], *(devices[op] for op in backward)]
    many = baechi.Placement(graph.digest, tuple(devices), tuple(range(len(devices))))
    one = baechi.Placement(graph.digest, (0,) * len(devices), many.order)
    other = baechi.trace(_Chain(), (x,))
    whole = baechi.apply(other, one, ["cpu:0", "cpu:1"])
    cut = baechi.apply(traced, many, ["cpu:0", "cpu:1"])
    usual = cut._current._executor
    program = cut._current.program
    inline = CudaExecutor(program, usual.bound, [torch.device("cpu")] * 2)

    def run(executor: Any) -> None:
        step = Step(training, None, (x,), usual.bound.sizes)
        for value in usual.bound.input_values:
            step.flags[value] = training
        executor.run([step], 0)
        if training:
            (result,) = usual.bound.results.values()
            step.grads[result.grads[0]] = torch.ones(1)
            with torch.no_grad():
                executor.run([step], 1)

    def run_whole() -> None:
        with nullcontext() if training else torch.no_grad():
            y = whole(x)
            if training:
                torch.autograd.grad(y, x, torch.ones(1))

    with nullcontext() if training else torch.no_grad():
        sides = [run_whole, lambda: run(inline), lambda: run(usual)]
        seconds = _in_turns(sides, rounds, lambda: None)
    quartiles = (statistics.quantiles([row[0] for row in rows], n=4)[0] for rows in seconds)
    base, alone, handed = quartiles
    whole.unplace()
    cut.unplace()
    segments = sum(len(phase.segments) for phase in program.phases)
    each = [f"{(side - base) / segments * 1e6:.1f}" for side in (alone, handed)]
    return [str(segments), *each]


def proofs() -> Table:
    """Processor time of compiling and of proving programs on four and on eight devices."""
    table = Table("devices", "copy lanes", "instructions", "compiled in", "proved in")
    ops = 1800
    graph = baechi.OpGraph(
        tuple(baechi.Op(f"op{op}", 1 + op * 7919 % 50) for op in range(ops)),
        tuple(
            baechi.Tensor(op, (op + 1, min(ops - 1, op + 2 + op * 31 % 9)), 8)
            for op in range(ops - 2)
        ),
    )
    for n in (4, 8):
        devices = tuple(op * 7919 // 13 % n for op in range(ops))
        placement = baechi.Placement(graph.digest, devices, tuple(range(ops)))
        for copy_lanes in (False, True):
            start = time.process_time()
            program = compile_program(graph, placement, copy_lanes=copy_lanes)
            compiled = time.process_time() - start
            proved = []
            for _ in range(7):
                start = time.process_time()
                check_program(program)
                proved.append(time.process_time() - start)
            count = sum(map(len, program.phases[0].lanes))
            took = [f"{1e3 * s:.0f} ms" for s in (compiled, statistics.median(proved))]
            table.add_row(str(n), "yes" if copy_lanes else "no", str(count), *took)
    return table


if __name__ == "__main__":
    typer.run(main)
