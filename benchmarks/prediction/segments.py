"""What one more segment costs in CPU time, which other processes do not disturb as they do a clock.

`python3 -m benchmarks.prediction.segments`: a model on two logical devices of one thread each, with
few cuts and with as many as there are groups; the least CPU time of a few steps, which take turns,
and the difference per segment that runs. It has nothing of what workers wait for each other.

`--chain`: what `probe` measures, for chains of shorter and of longer operators.
"""

import copy
import statistics
import time
from collections.abc import Sequence
from typing import Annotated

import torch
import typer
from benchmarks.prediction.models import MODELS, build
from benchmarks.prediction.rows import MODES, placements
from rich.console import Console
from rich.table import Table

import baechi
from baechi.probing.link_probe import handover

_WARM_UP = 2
_STEPS = 11
_CHAINS = ((8, 128), (32, 256), (64, 384), (128, 512))
_TIMES = 5


def least_cpu_ns(
    modules: Sequence[baechi.PlacedModule], args: tuple[object, ...], kwargs: dict[str, object]
) -> list[int]:
    """The least CPU time of a step of each; what disturbs one of them disturbs all."""
    readings: list[list[int]] = [[] for _ in modules]
    for _ in range(_WARM_UP + _STEPS):
        for module, row in zip(modules, readings, strict=True):
            row.append(_step_cpu_ns(module, args, kwargs))
    return [min(row[_WARM_UP:]) for row in readings]


def _step_cpu_ns(
    placed: baechi.PlacedModule, args: tuple[object, ...], kwargs: dict[str, object]
) -> int:
    """The CPU time of a step; its loss is the model's own, or the sum of its tensors."""
    placed.zero_grad(set_to_none=True)
    start = time.process_time_ns()
    output = placed(*args, **kwargs)
    if placed.training:
        leaves = torch.utils._pytree.tree_leaves(output)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        roots = [tensor for tensor in tensors if tensor.requires_grad]
        roots = next(([root] for root in roots if root.dim() == 0), roots)
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
    return time.process_time_ns() - start


def _linear_ns(rows: int, width: int) -> int:
    """What one operator of a chain takes alone, the median."""
    x, weight = torch.zeros(rows, width), torch.eye(width)
    readings = []
    for _ in range(100):
        start = time.perf_counter_ns()
        torch.nn.functional.linear(x, weight)
        readings.append(time.perf_counter_ns() - start)
    return int(statistics.median(readings))


def print_chains() -> None:
    """Prints a line per chain."""
    table = Table(title=f"A hand-over in chains of linear operators, {_TIMES} times each")
    for column in ("rows", "weights", "operator", "work, us", "wait, us"):
        table.add_column(column, justify="right")
    for rows, width in _CHAINS:
        found = [handover(rows, width) for _ in range(_TIMES)]
        work, wait = (
            " ".join(f"{ns / 1e3:.0f}" for ns in sorted(column))
            for column in zip(*((each.overhead_ns, each.latency_ns) for each in found), strict=True)
        )
        weights = f"{4 * width * width >> 10} KiB"
        took = f"{_linear_ns(rows, width) / 1e3:.0f} us"
        table.add_row(str(rows), weights, took, work, wait)
    Console(width=100).print(table)


def main(
    models: Annotated[str, typer.Option(help="With commas.")] = "llama,vit",
    chain: Annotated[bool, typer.Option("--chain", help="Chains of operators alone.")] = False,
) -> None:
    """Prints a line per model and mode."""
    torch.set_num_threads(1)
    if chain:
        print_chains()
        return
    table = Table(title="CPU time of a step on two devices, and of one more segment")
    for column in ("model", "mode", "segments, few", "CPU", "many", "CPU", "per segment"):
        table.add_column(column, justify="right")
    link = baechi.Link(0, 10**15)
    cluster = baechi.Cluster.connected(
        [baechi.Device(f"cpu:{index}", "16GiB") for index in range(2)], link
    )
    for name in models.split(","):
        for mode in MODES:
            training = mode == "training"
            model, args, kwargs = build(name, MODELS[name].batches[0], training=training)
            traced = baechi.trace(model, args, kwargs)
            costs = tuple(baechi.OpCost(100_000, 200_000) for _ in traced.ops)
            graph = traced.graph(baechi.Profile(traced.digest, "", costs), training=training)
            modules = [
                baechi.apply(
                    *(baechi.trace(copy.deepcopy(model), args, kwargs), placement),
                    **{"graph": graph, "cluster": cluster, "threads_per_device": 1},
                )
                for title, placement in placements(graph, cluster)
                if title != "auto"
            ]
            few, many = (
                sum(len(phase.segments) for phase in module._current.program.phases)
                for module in modules
            )
            few_ns, many_ns = least_cpu_ns(modules, args, kwargs)
            for module in modules:
                module.unplace()
            each = (many_ns - few_ns) / max(many - few, 1) / 1e3
            cells = [str(few), f"{few_ns / 1e6:.1f} ms", str(many), f"{many_ns / 1e6:.1f} ms"]
            table.add_row(name, mode, *cells, f"{each:.0f} us")
    Console(width=100).print(table)


if __name__ == "__main__":
    typer.run(main)
