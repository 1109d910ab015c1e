"""Whether what `solve` accepts runs within its capacity, and how far predictions are above.

    python3 -m benchmarks.prediction.capacities            40 models, 640 cases
    python3 -m benchmarks.prediction.capacities --quick    6 models
    python3 -m benchmarks.prediction.capacities lstm t5    these
    python3 -m benchmarks.prediction.capacities found/jetmoe llama
                                                           of benchmarks.architectures

For each model two logical devices of equal capacity: the least at which a training step is
accepted, to one part in 100, and shares of what the unsplit step needs; with measured and computed
costs, without an optimizer and with AdamW. Each placement is run and metered. Median and highest
error are of the fuller device, the lowest is of any. Fails if a device used more than it was given.
"""

import argparse
import sys
from dataclasses import dataclass
from statistics import median
from typing import Final, final

import torch
from benchmarks.architectures.catalog import example, names
from benchmarks.architectures.found import PREFIX, folders
from benchmarks.prediction.untuned import UNTUNED, untuned

import baechi

SHARES: Final = (0.6, 0.8, 1.0)  # of the peak of the unsplit step
OPTIMIZERS: Final = (None, "adamw")
COSTS: Final = ("measure", "estimate")
QUICK: Final = (
    *("state_space_wide", "recommender_max", "segmenter_joined"),
    *("lstm_both", "experts", "fourier"),
)
# What two logical devices of a CPU have: a hand-over of some microseconds, whatever the size.
LINK: Final = baechi.Link(latency_ns=20_000, bytes_per_s=10**15)
# Of the capacity: a device that holds less is no matter of memory.
_HELD: Final = 0.2


@final
@dataclass(frozen=True)
class Case:
    """A placement that was run: bytes of every device, as predicted and as metered."""

    capacity: int
    predicted: tuple[int, ...]
    metered: tuple[int, ...]

    @property
    def used(self) -> float:
        """The share of its capacity that the fuller device held."""
        return max(self.metered) / self.capacity

    @property
    def error(self) -> float:
        """(predicted - metered) / metered of the fuller device."""
        return max(self.predicted) / max(self.metered) - 1

    @property
    def lowest(self) -> float:
        """The lowest error of a device that holds a part of its capacity."""
        pairs = zip(self.predicted, self.metered, strict=True)
        return min(p / m - 1 for p, m in pairs if m > _HELD * self.capacity)


def accepted(graph: baechi.OpGraph, capacity: int) -> baechi.Placement | None:
    """A placement on two devices of so many bytes, or None."""
    try:
        return baechi.solve(graph, devices_of(capacity), effort="fast")
    except baechi.InfeasibleError:
        return None


def devices_of(capacity: int, n: int = 2) -> baechi.Cluster:
    """Devices of so many bytes each."""
    return baechi.Cluster.uniform(n, capacity, LINK, kind="cpu")


def unsplit(graph: baechi.OpGraph) -> int:
    """The peak of the unsplit step, as predicted."""
    single = devices_of(10**15, 1)
    placement = baechi.solve(graph, single, placer="single")
    return baechi.simulate(graph, single, placement).peak_bytes[0]


def least(graph: baechi.OpGraph, high: int) -> int:
    """The smallest capacity that is accepted, to one part in 100, from one that is on."""
    low = high // 2
    while high - low > high // 100:
        middle = (low + high) // 2
        low, high = (low, middle) if accepted(graph, middle) else (middle, high)
    return high


def case(
    traced: baechi.Traced, graph: baechi.OpGraph, placement: baechi.Placement, capacity: int
) -> Case:
    """A placement, run and metered."""
    placed = baechi.apply(
        traced,
        placement,
        devices=["cpu:0", "cpu:1"],
        graph=graph,
        cluster=devices_of(capacity),
        threads_per_device=1,
    )
    measured, schedule = placed.measure(1), placed.schedule
    placed.unplace()
    assert schedule is not None
    absent = measured.absent_bytes or (0, 0)
    metered = tuple(map(sum, zip(measured.peak_bytes, absent, strict=True)))
    return Case(capacity, schedule.peak_bytes, metered)


def cases(name: str, costs: str) -> list[Case]:
    """All cases of a model with one kind of costs."""
    model, args, kwargs = untuned(name) if name in UNTUNED else example(name)
    traced = baechi.trace(model, args, kwargs)
    profile = (
        baechi.profile(traced, threads=1, progress=False)
        if costs == "measure"
        else baechi.estimate(traced, "cpu")
    )
    found = []
    for optimizer in OPTIMIZERS:
        graph = traced.graph(profile, training=True, optimizer=optimizer)
        whole = unsplit(graph)
        for capacity in (least(graph, whole), *(int(share * whole) for share in SHARES)):
            placement = accepted(graph, capacity)
            if placement is not None:
                found.append(case(traced, graph, placement, capacity))
    return found


def summary(rows: list[Case]) -> str:
    """How many cases, how full, and how far predictions are above what was metered."""
    errors = [row.error for row in rows]
    over = sum(row.used > 1 for row in rows)
    return (
        f"{len(rows):5} {over:5} {max(row.used for row in rows):8.2%} "
        f"{median(errors):7.2%} {max(errors):7.2%} {min(row.lowest for row in rows):7.2%}"
    )


def main(names: list[str]) -> int:
    """Prints a line per model and kind of costs; how many runs passed their capacity."""
    torch.set_num_threads(1)
    print(f"{'model':20} {'costs':9} cases  over  fullest  median highest  lowest")
    every: list[Case] = []
    for name in names:
        for costs in COSTS:
            rows = cases(name, costs)
            if not rows:
                continue
            every += rows
            print(f"{name:20} {costs:9}{summary(rows)}", flush=True)
    print(f"{'all':20} {'':9}{summary(every)}")
    return sum(row.used > 1 for row in every)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = f"{', '.join(UNTUNED)}; or an architecture"
    parser.add_argument("models", nargs="*", metavar="model", help=f"of {known}")
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)}")
    asked = parser.parse_args()
    others = {*asked.models} - {*UNTUNED}
    if others:  # the folders are those of transformers, which takes seconds to import
        others -= {*names(), *(f"{PREFIX}{folder}" for folder in folders())}
    for unknown in others:
        parser.error(f"there is no model {unknown!r}")
    sys.exit(main(asked.models or list(QUICK if asked.quick else UNTUNED)) > 0)
