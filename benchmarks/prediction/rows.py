"""Predicts and measures one model, on every number of devices, by every placement.

The model is profiled as `place` does, at the threads that a logical device will have, right before
it is measured. A profile is made in passes, seconds apart; so all placements of a model are
measured in turns, several times, and the median of all steps counts. What disturbs the machine for
a second or two is then in one pass or turn of several, and decides neither number.
"""

import gc
import random
import statistics
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
_TURNS: Final = 3  # the fewest of which one can be an outlier


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
        cases = []
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
                cases.append(_Case(traced, graph, cluster, title, placement, threads))
        turns = []
        for turn in range(_TURNS):
            for case in cases:
                where = f"{case.title} on {len(case.cluster.devices)}"
                say(f"{name} {batch} {mode}: {where}, turn {turn + 1}")
                turns.append(_measured(case))
        for index, case in enumerate(cases):
            yield _row((name, batch, mode), case, turns[index :: len(cases)])
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


@final
@dataclass(frozen=True)
class _Case:
    """One placement of a traced model, before it is measured."""

    traced: baechi.Traced
    graph: baechi.OpGraph
    cluster: baechi.Cluster
    title: str
    placement: baechi.Placement
    threads: int | None

    def schedule(self) -> baechi.Schedule:
        """What is predicted."""
        return baechi.simulate(self.graph, self.cluster, self.placement)


def _measured(case: _Case) -> tuple[baechi.Measurement, int]:
    """One turn of a placement, and how many segments run in a step."""
    placed = baechi.apply(
        case.traced,
        case.placement,
        graph=case.graph,
        cluster=case.cluster,
        # A single device without workers computes in the caller's thread, with all of its threads.
        threads_per_device=case.threads if len(case.cluster.devices) > 1 else None,
    )
    fewest, most = _STEPS
    steps = min(max(_BUDGET_NS // max(case.schedule().makespan_ns, 1), fewest), most)
    measured = placed.measure(-(-steps // _TURNS))
    phases = placed._current.executable.program.phases
    placed.unplace()
    return measured, sum(len(phase.segments) for phase in phases)


def joined(turns: Sequence[baechi.Measurement]) -> baechi.Measurement:
    """The turns of one placement as one: the median of all steps, the highest of each peak."""
    samples = tuple(sample for turn in turns for sample in turn.samples_ns)
    peaks = tuple(map(max, zip(*(turn.peak_bytes for turn in turns), strict=True)))
    return baechi.Measurement(
        int(statistics.median(samples)),
        peaks,
        samples,
        turns[0].moved_bytes,
        turns[0].absent_bytes,
    )


def _row(
    model: tuple[str, int, str], case: _Case, turns: Sequence[tuple[baechi.Measurement, int]]
) -> Row:
    schedule = case.schedule()
    return Row(
        *model,
        devices=len(case.cluster.devices),
        placement=case.title,
        ops=len(case.graph.ops),
        segments=turns[0][1],
        transfers=len(schedule.transfers),
        predicted_ns=schedule.makespan_ns,
        predicted_bytes=schedule.peak_bytes,
        measured=joined([measured for measured, _ in turns]),
    )
