"""Claim: `objective="throughput"` finds periods at or below those of the best contiguous split.

    python3 -m benchmarks.max_load [FOLDER]            # --effort fast, balanced, thorough

Forward graphs that others published (`placement_quality/instances.py` reads them from the folder;
without it there is nothing to do), at links of 1x, on as many devices as their authors had. The
period is the largest load of a device, a send port or a receive port. The reference is the best
split of the ops in index order into intervals, one for each device, by dynamic programming over
all of them; it counts what a device sends once, to however many others, and lets groups be apart,
so that it is never too long. It ignores memory, which is ample here.
"""

import time
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from benchmarks.placement_quality.instances import FOLDER, Instance, instances
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from baechi import Cluster, OpGraph, solve


def contiguous_period(graph: OpGraph, cluster: Cluster) -> int:
    """The least bottleneck of intervals of ops on equal devices; O(ops**2 * devices)."""
    n, link = len(graph.ops), cluster.links[0][1]
    assert link is not None
    took: NDArray[np.int64] = np.array([link.transfer_ns(t.nbytes) for t in graph.tensors])
    first = np.array([tensor.producer for tensor in graph.tensors])
    last = np.array([max(tensor.consumers, default=-1) for tensor in graph.tensors])
    times = np.cumsum([0, *(op.time_ns for op in graph.ops)])
    reads: list[list[int]] = [[] for _ in graph.ops]
    for index, tensor in enumerate(graph.tensors):
        for op in tensor.consumers:
            reads[op].append(index)
    load = np.full((n + 1, n + 1), np.iinfo(np.int64).max)
    for begin in range(n):
        seen: set[int] = set()
        received = 0
        inside = first >= begin
        for end in range(begin + 1, n + 1):
            for tensor in reads[end - 1]:
                if first[tensor] < begin and tensor not in seen:
                    seen.add(tensor)
                    received += int(took[tensor])
            load[begin, end] = max(times[end] - times[begin], received)
        # What intervals [begin, end) send: made in them and read behind.
        ends = np.arange(n + 1)
        change = np.zeros(n + 2, np.int64)
        np.add.at(change, first[inside & (last > first)] + 1, took[inside & (last > first)])
        np.subtract.at(change, last[inside & (last > first)] + 1, took[inside & (last > first)])
        load[begin] = np.where(ends > begin, np.maximum(load[begin], np.cumsum(change)[:-1]), 0)
    load[np.tril_indices(n + 1, -1)] = np.iinfo(np.int64).max
    best = load[0].copy()
    for _ in range(len(cluster.devices) - 1):
        best = np.minimum(best, np.maximum(best[:, None], load).min(axis=0))
    return int(best[n])


def row_of(instance: Instance, effort: str) -> list[str]:
    """A row of the table."""
    cluster = Cluster.uniform(instance.devices, "1000GiB", instance.link(1))
    began = time.process_time()
    stats = solve(instance.graph, cluster, effort=effort, objective="throughput").stats
    took = time.process_time() - began
    period, reference = stats["period_ns"], contiguous_period(instance.graph, cluster)
    ideal = sum(op.time_ns for op in instance.graph.ops) / instance.devices
    return [
        *(instance.name, str(len(instance.graph.ops)), str(instance.devices)),
        *(f"{ideal / 1e6:.3f}", f"{reference / 1e6:.3f}", f"{period / 1e6:.3f}"),
        *(f"{period / reference:.3f}", str(stats["chosen"]), f"{took:.1f}"),
    ]


def main(
    folder: Annotated[Path, typer.Argument(help="Of the published graphs.")] = FOLDER,
    effort: Annotated[str, typer.Option(help="Of the solve.")] = "balanced",
    only: Annotated[str, typer.Option(help="Those whose names have this.")] = "",
) -> None:
    """Print the table."""
    table = Table(
        *("graph", "ops", "devices", "work / devices, ms", "contiguous", "found", "ratio"),
        *("chosen", "s"),
    )
    for instance in instances(folder):
        if not instance.training and only in instance.name:
            table.add_row(*row_of(instance, effort))
    Console(width=140).print(table if table.row_count else f"{folder} has no published graphs.")


if __name__ == "__main__":
    typer.run(main)
