"""Predicts and measures one model, on every number of devices, by every placement.

The model is profiled as `place` does, at the threads that a logical device will have, right before
it is measured.
"""

import gc
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, final

import torch
from benchmarks.prediction.models import build

import baechi

MODES: Final = ("forward", "training")
_FEW_CUTS: Final = 2  # per device: a model in so many pieces, in a row
_BUDGET_NS: Final = 1_000_000_000  # of the timed steps of one placement
_STEPS: Final = (3, 20)


@final
@dataclass(frozen=True)
class Row:
    """One placement, predicted and measured.

    Attributes:
        model: Its name.
        batch: Its batch size.
        mode: `"forward"` or `"training"`.
        devices: Logical devices.
        placement: `"single"`, `"auto"`, `"few"` (random, few cuts) or `"many"` (random, an op at a
            time).
        ops: Of the graph.
        segments: That run one after another, backwards included.
        transfers: That the prediction has.
        predicted_ns: The step.
        predicted_bytes: The peak of every device.
        measured: What was measured.
    """

    model: str
    batch: int
    mode: str
    devices: int
    placement: str
    ops: int
    segments: int
    transfers: int
    predicted_ns: int
    predicted_bytes: tuple[int, ...]
    measured: baechi.Measurement


def device_names(kind: str, devices: int) -> list[str]:
    """Logical devices of the CPU, or of the first GPU; one GPU by its own name."""
    if kind == "cpu":
        return [f"cpu:{index}" for index in range(devices)]
    return ["cuda:0"] if devices == 1 else [f"cuda:0/{index}" for index in range(devices)]


def measure(
    name: str,
    batch: int,
    modes: Sequence[str],
    counts: Sequence[int],
    kind: str,
    say: Callable[[str], None],
) -> Iterator[Row]:
    """The rows of one model at one batch size."""
    total = torch.get_num_threads()
    for mode in modes:
        training = mode == "training"
        model, args, kwargs = build(name, batch, training=training)
        say(f"{name} {batch} {mode}: tracing")
        traced = baechi.trace(model, args, kwargs)
        profiles: dict[int | None, baechi.Profile] = {}
        for devices in counts:
            names = device_names(kind, devices)
            threads = max(total // devices, 1) if kind == "cpu" else None
            if threads not in profiles:
                say(f"{name} {batch} {mode}: profiling")
                profiles[threads] = baechi.profile(
                    traced, names[0], threads=threads, progress=False, cache=False
                )
            graph = traced.graph(profiles[threads], training=training)
            cluster = baechi.probe(names)
            for title, placement in placements(graph, cluster):
                say(f"{name} {batch} {mode}: {title} on {devices}")
                case = (name, batch, mode, devices, title)
                yield _row(case, traced, graph, cluster, placement, threads)
        del model, traced, args, kwargs
        gc.collect()


def placements(
    graph: baechi.OpGraph, cluster: baechi.Cluster
) -> Iterator[tuple[str, baechi.Placement]]:
    """The placements of a graph, with what a row calls them."""
    if len(cluster.devices) == 1:
        yield "single", baechi.solve(graph, cluster, placer="single")
        return
    yield "auto", baechi.solve(graph, cluster, placer="auto")
    yield "few", baechi.solve(graph, cluster, placer=baechi.Pinned(_in_pieces(graph, cluster)))
    yield "many", baechi.solve(graph, cluster, placer=baechi.RandomPlacer(1))


def _in_pieces(graph: baechi.OpGraph, cluster: baechi.Cluster) -> tuple[int, ...]:
    """Groups, by their first op, in a few pieces of random sizes; the devices take turns."""
    group_of = [op.group or f"op {index}" for index, op in enumerate(graph.ops)]
    groups = list(dict.fromkeys(group_of))
    n = len(cluster.devices)
    cuts = random.Random(0).sample(range(1, len(groups)), min(_FEW_CUTS * n, len(groups)) - 1)
    piece = {group: sum(cut <= index for cut in cuts) for index, group in enumerate(groups)}
    return tuple(piece[group] % n for group in group_of)


def _row(
    case: tuple[str, int, str, int, str],
    traced: baechi.Traced,
    graph: baechi.OpGraph,
    cluster: baechi.Cluster,
    placement: baechi.Placement,
    threads: int | None,
) -> Row:
    schedule = baechi.simulate(graph, cluster, placement)
    placed = baechi.apply(
        traced,
        placement,
        graph=graph,
        cluster=cluster,
        # A single device without workers computes in the caller's thread, with all of its threads.
        threads_per_device=threads if len(cluster.devices) > 1 else None,
    )
    fewest, most = _STEPS
    steps = min(max(_BUDGET_NS // max(schedule.makespan_ns, 1), fewest), most)
    measured = placed.measure(steps)
    phases = placed._current.executable.program.phases
    segments = sum(len(phase.segments) for phase in phases)
    placed.unplace()
    return Row(
        *case,
        ops=len(graph.ops),
        segments=segments,
        transfers=len(schedule.transfers),
        predicted_ns=schedule.makespan_ns,
        predicted_bytes=schedule.peak_bytes,
        measured=measured,
    )
