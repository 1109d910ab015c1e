"""Whether what `solve` accepts runs within its capacity.

`python3 -m benchmarks.prediction.capacities`

For each model the smallest equal capacity of two devices at which a training step is accepted, to
one part in 500, and multiples of it; each placement is run and metered.
"""

import sys
from typing import Final

import torch
from benchmarks.prediction.models import build

import baechi

FACTORS: Final = (1.0, 1.1, 1.25, 1.5, 2.0)
OPTIMIZERS: Final = ("sgd", "adamw")
# What two logical devices of a CPU have: a hand-over of some microseconds, whatever the size.
LINK: Final = baechi.Link(latency_ns=20_000, bytes_per_s=10**15)


def accepted(graph: baechi.OpGraph, capacity: int) -> baechi.Placement | None:
    """A placement on two devices of so many bytes, or None."""
    try:
        return baechi.solve(graph, devices_of(capacity), effort="fast")
    except baechi.InfeasibleError:
        return None


def devices_of(capacity: int) -> baechi.Cluster:
    """Two devices of so many bytes."""
    return baechi.Cluster.uniform(2, capacity, LINK, kind="cpu")


def least(graph: baechi.OpGraph) -> int:
    """The smallest capacity that is accepted, to one part in 500."""
    low = 0
    high = sum(op.persistent_bytes for op in graph.ops) + sum(t.nbytes for t in graph.tensors)
    while high - low > high // 500:
        middle = (low + high) // 2
        low, high = (low, middle) if accepted(graph, middle) else (middle, high)
    return high


def held(
    traced: baechi.Traced, graph: baechi.OpGraph, placement: baechi.Placement, capacity: int
) -> float:
    """The share of the capacity that the fuller device holds at its peak, as measured."""
    placed = baechi.apply(
        traced,
        placement,
        devices=["cpu:0", "cpu:1"],
        graph=graph,
        cluster=devices_of(capacity),
        threads_per_device=1,
    )
    measured = placed.measure(1)
    placed.unplace()
    absent = measured.absent_bytes or (0, 0)
    return max(map(sum, zip(measured.peak_bytes, absent, strict=True))) / capacity


def main(names: list[str]) -> None:
    """Prints a line per model and optimizer, and how many runs passed their capacity."""
    torch.set_num_threads(1)
    shares = []
    for name in names:
        model, args, kwargs = build(name, 2, training=True)
        traced = baechi.trace(model, args, kwargs)
        profile = baechi.profile(traced, threads=1)
        for optimizer in OPTIMIZERS:
            graph = traced.graph(profile, training=True, optimizer=optimizer)
            smallest = least(graph)
            row = []
            for factor in FACTORS:
                capacity = int(smallest * factor)
                placement = accepted(graph, capacity)
                row.append(
                    float("nan") if placement is None else held(traced, graph, placement, capacity)
                )
            print(
                f"{name:12} {optimizer:6} " + " ".join(f"{share:6.1%}" for share in row), flush=True
            )
            shares += row
    over = [share for share in shares if share > 1]
    print(
        f"{len(over)} of {len(shares)} above their capacity, the fullest at {max(shares):.1%} of it"
    )


if __name__ == "__main__":
    main(sys.argv[1:] or ["towers", "resnet18", "vit", "llama", "t5"])
