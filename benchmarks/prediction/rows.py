"""Predicts and measures one model, on every number of devices, by every placement.

The model is profiled as `place` does, at the threads that a logical device will have, right before
it is measured. A profile is made in passes, whose lowest counts (`baechi.passes`), and so are the
steps: every placement once, then every placement again, and the pass of the lowest median counts.
Profiles and passes begin when the machine is quiet; a row of which it was not is `disturbed`.
"""

import gc
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, final

import torch
from benchmarks.prediction.models import build
from benchmarks.quiet import Quiet

import baechi

MODES: Final = ("forward", "training")
_FEW_CUTS: Final = 2  # per device: a model in so many pieces, in a row
_BUDGET_NS: Final = 1_000_000_000  # of the timed steps of one placement
_STEPS: Final = (3, 20)
_PASSES: Final = (2, 4)  # at least, and at most where no second pass is near the lowest
_NEAR: Final = 1.05
_PROFILES: Final = 3  # at most, where none is of a quiet machine


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
        measured: The pass of the lowest median step, and the highest peak of any pass.
        passes_ns: The median step of every pass, in the order in which they were made.
        disturbed: Whether the machine was not quiet in its profile, or in every pass.
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
    passes_ns: tuple[int, ...]
    disturbed: bool


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
    quiet: Quiet,
    say: Callable[[str], None],
) -> Iterator[Row]:
    """The rows of one model at one batch size."""
    total = torch.get_num_threads()
    for mode in modes:
        training = mode == "training"
        model, args, kwargs = build(name, batch, training=training)
        say(f"{name} {batch} {mode}: tracing")
        traced = baechi.trace(model, args, kwargs)
        profiles: dict[int | None, tuple[baechi.Profile, bool]] = {}
        cases: list[_Case] = []
        for devices in counts:
            names = device_names(kind, devices)
            threads = max(total // devices, 1) if kind == "cpu" else None
            if threads not in profiles:
                say(f"{name} {batch} {mode}: profiling")
                profiles[threads] = _profile(traced, names[0], threads, quiet)
            profile, calm = profiles[threads]
            graph = traced.graph(profile, training=training)
            cluster = baechi.probe(names)
            for placement_name, placement in placements(graph, cluster):
                placed = baechi.apply(
                    traced,
                    placement,
                    graph=graph,
                    cluster=cluster,
                    # One device without workers computes in the caller's thread, with all of its.
                    threads_per_device=threads if devices > 1 else None,
                )
                schedule = baechi.simulate(graph, cluster, placement)
                title = (name, batch, mode, devices, placement_name)
                cases.append(_Case(title, graph, schedule, placed, calm))
        yield from _measured(cases, quiet, say)
        del model, traced, args, kwargs, cases
        gc.collect()


def _profile(
    traced: baechi.Traced, device: str, threads: int | None, quiet: Quiet
) -> tuple[baechi.Profile, bool]:
    """A profile, and whether the machine was quiet before and after it."""
    for _ in range(_PROFILES):
        before = quiet.wait()
        profile = baechi.profile(traced, device, threads=threads, progress=False, cache=False)
        calm = before and quiet.is_now()
        if calm:
            break
    return profile, calm


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
@dataclass
class _Case:
    """A placed model, and its passes so far."""

    title: tuple[str, int, str, int, str]
    graph: baechi.OpGraph
    schedule: baechi.Schedule
    placed: baechi.PlacedModule
    profiled_calmly: bool
    measured_calmly: bool = False
    passes: list[baechi.Measurement] = field(default_factory=list)

    @property
    def is_settled(self) -> bool:
        """Whether a second pass is near the lowest one, and one was calm."""
        lowest, *others = sorted(found.step_ns for found in self.passes)
        return self.measured_calmly and bool(others) and others[0] <= _NEAR * lowest

    def measure(self, quiet: Quiet) -> None:
        """One more pass."""
        fewest, most = _STEPS
        steps = min(max(_BUDGET_NS // max(self.schedule.makespan_ns, 1), fewest), most)
        before = quiet.wait()
        self.passes.append(self.placed.measure(steps))
        self.measured_calmly |= before and quiet.is_now()

    def row(self) -> Row:
        """Prediction and measurement."""
        best = min(self.passes, key=lambda found: found.step_ns)
        peaks = zip(*(found.peak_bytes for found in self.passes), strict=True)
        phases = self.placed._current.executable.program.phases
        return Row(
            *self.title,
            ops=len(self.graph.ops),
            segments=sum(len(phase.segments) for phase in phases),
            transfers=len(self.schedule.transfers),
            predicted_ns=self.schedule.makespan_ns,
            predicted_bytes=self.schedule.peak_bytes,
            measured=replace(best, peak_bytes=tuple(map(max, peaks))),
            passes_ns=tuple(found.step_ns for found in self.passes),
            disturbed=not (self.profiled_calmly and self.measured_calmly),
        )


def _measured(cases: Sequence[_Case], quiet: Quiet, say: Callable[[str], None]) -> list[Row]:
    """The rows, after as many passes as it takes."""
    fewest, most = _PASSES
    for count in range(most):
        for case in cases:
            if count < fewest or not case.is_settled:
                name, batch, mode, devices, placement = case.title
                say(f"{name} {batch} {mode}: {placement} on {devices}, pass {count + 1}")
                case.measure(quiet)
    rows = [case.row() for case in cases]
    for case in cases:
        case.placed.unplace()
    return rows
