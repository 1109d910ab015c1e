"""Study: the backward in two parts, for inputs and for weights, in steps of micro-batches.

    OMP_NUM_THREADS=1 python3 -m benchmarks.backward_split

"Zero bubble" schedules let gradients of weights wait until their device has nothing else to do. It
costs processor time, since the second part goes through the graph again from where the first
left it. Parts of GPT-2 small are measured in one thread, with the functions of
`torch.distributed.pipelining`; then its 13 parts are placed on the clock, with the backward whole
and in two: as a line of stages, and freely, by `solve`. Memory is ample, or what 1F1B needs in the
line; transfers are free. Figures are steps over that of the line with whole backwards; `bound` is
the work of a device, or that of the head.
"""

import statistics
import time
from itertools import combinations, product
from typing import Annotated, Any, Final

import torch
import typer
from benchmarks.environment import environment
from benchmarks.models.hugging_face import gpt2
from benchmarks.pipelines.graphs import chunks, cluster_of
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from baechi import simulate, solve
from baechi.placers.turn_orders import ordered_turns

_TOKENS: Final = 128
_BLOCKS: Final = 12


class Head(nn.Module):
    """The last norm, logits, and a number of them."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.norm, self.head = model.transformer.ln_f, model.lm_head

    def forward(self, x: Tensor) -> Tensor:
        """Of hidden states."""
        return self.head(self.norm(x)).logsumexp(-1)


def measured(part: nn.Module, rounds: int) -> tuple[int, int, int, int]:
    """Median ns of forward, backward, and of the backward for inputs and for weights."""
    rows: list[tuple[float, ...]] = []
    clock = time.perf_counter_ns
    for _ in range(rounds):
        x = torch.randn(1, _TOKENS, 768, requires_grad=True)
        began = clock()
        y = part(x)
        forward = clock()
        seed = torch.ones_like(y)
        started = clock()
        y.backward(seed)
        backward = clock() - started
        part.zero_grad()
        y = part(x)
        started = clock()
        _, groups = stage_backward_input([y], [seed], [x], part.parameters())
        inputs = clock() - started
        started = clock()
        stage_backward_weight(part.parameters(), groups)
        rows.append((forward - began, backward, inputs, clock() - started))
        part.zero_grad()
    found = [round(statistics.median(column)) for column in zip(*rows[1:], strict=True)]
    return found[0], found[1], found[2], found[3]


def main(rounds: Annotated[int, typer.Option(help="Of every measurement.")] = 11) -> None:
    """Print the tables."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    console = Console(width=110)
    console.print(environment())
    model: Any = gpt2(dropout=False)
    costs = {
        "a block": measured(model.transformer.h[0], rounds),
        "head": measured(Head(model), rounds),
    }
    table = Table("ms", "forward", "backward", "for inputs", "for weights", "both / backward")
    for name, row in costs.items():
        more = (row[2] + row[3]) / row[1]
        table.add_row(name, *(f"{ns / 1e6:.1f}" for ns in row), f"{more:.3f}")
    console.print(table)
    parts = [costs["a block"]] * _BLOCKS + [costs["head"]]
    forward, backward, inputs, weights = (list(column) for column in zip(*parts, strict=True))
    table = Table(
        *("devices", "micro-batches", "memory", "line, ms", "bound", "line, in two", "freely"),
        "freely, in two",
    )
    for devices, n, ample in product((2, 4), (8, 16, 32), (True, False)):
        homes = line([f + b for f, b in zip(forward, backward, strict=True)], devices)
        room = [devices * homes.count(device) for device in range(devices)]
        cluster = cluster_of([10**6] * devices if ample else room)
        steps = []
        for rest in ((backward,), (inputs, weights)):
            graph, placement = chunks(homes, forward, *rest)
            steps.append(ordered_turns(graph, cluster, placement, n).step_ns)
            found = solve(graph, cluster, microbatches=n)
            steps.append(min(steps[-1], simulate(graph, cluster, found).makespan_ns))
        base, free, split, free_split = steps
        bound = n * max(sum(forward + backward) / devices, sum(costs["head"][:2]))
        row = [f"{ns / base:.3f}" for ns in (bound, split, free, free_split)]
        memory = "ample" if ample else "of 1F1B"
        table.add_row(str(devices), str(n), memory, f"{base / 1e6:.0f}", *row)
    console.print(table)


def line(times: list[int], devices: int) -> list[int]:
    """The devices of parts in a row of stages of least bottleneck."""

    def cut(ends: tuple[int, ...]) -> list[int]:
        return [sum(at >= end for end in ends) for at in range(len(times))]

    def longest(homes: list[int]) -> int:
        return max(
            sum(time for time, home in zip(times, homes, strict=True) if home == device)
            for device in range(devices)
        )

    return min(map(cut, combinations(range(1, len(times)), devices - 1)), key=longest)


if __name__ == "__main__":
    typer.run(main)
