"""Predicts and measures one model, on every number of devices, by every placement.

The model is profiled as `place` does, at the threads that a logical device will have. The speed of
a machine that others share changes by the minute, which is no error of a prediction. So costs
and steps are measured in turns: every pass profiles and probes anew, predicts every placement by
that, and measures it. Passes begin when the machine is quiet, and are made until there are three
that were quiet throughout; whether one was is decided before its error is known. A row is the pass
of the median error among these. Where there are none after `_MOST_PASSES` it is that of all, and
`disturbed`.
"""

import copy
import gc
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, final

import torch
from benchmarks.prediction.models import build
from benchmarks.quiet import Quiet

import baechi
from baechi.probing.cluster_probe import survey

MODES: Final = ("forward", "training")
_FEW_CUTS: Final = 2  # per device: a model in so many pieces, in a row
_BUDGET_NS: Final = 1_000_000_000  # of the timed steps of one placement
_STEPS: Final = (3, 20)
_PASSES: Final = 3  # an odd number, so that one has the median error
_MOST_PASSES: Final = 6


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
        predicted_ns: The step, in the pass of the median error.
        predicted_bytes: The peak of every device.
        measured: The same pass, with the highest peak of any.
        passes_ns: Of every pass, in the order in which they were made, the step as predicted, the
            median step, and whether the machine was quiet.
        disturbed: Whether the machine was quiet in no pass.
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
    passes_ns: tuple[tuple[int, int, bool], ...]
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
        profiles: dict[int | None, _Profiled] = {}
        cases: list[_Case] = []
        for devices in counts:
            names = device_names(kind, devices)
            threads = max(total // devices, 1) if kind == "cpu" else None
            if threads not in profiles:
                say(f"{name} {batch} {mode}: profiling")
                profiles[threads] = _Profiled(traced, training, names[0], threads, quiet)
            graph = profiles[threads].graph
            cluster = baechi.probe(names)
            for placement_name, placement in placements(graph, cluster):
                placed = baechi.apply(
                    baechi.trace(copy.deepcopy(model), args, kwargs),  # all run in turns
                    placement,
                    graph=graph,
                    cluster=cluster,
                    # One device without workers computes in the caller's thread, with all of its.
                    threads_per_device=threads if devices > 1 else None,
                )
                title = (name, batch, mode, devices, placement_name)
                cases.append(_Case(title, profiles[threads], placement, placed))
        yield from _measured(cases, list(profiles.values()), kind, quiet, say)
        del model, traced, args, kwargs, cases, profiles
        gc.collect()


@final
class _Profiled:
    """A traced model with the costs that its operators had last.

    Attributes:
        graph: With these costs.
        calm: Whether the machine was quiet meanwhile.
    """

    def __init__(
        self,
        traced: baechi.Traced,
        training: bool,
        device: str,
        threads: int | None,
        quiet: Quiet,
    ) -> None:
        self._traced, self._training = traced, training
        self._device, self._threads = device, threads
        self._quiet = quiet
        self.measure()

    def measure(self) -> None:
        """Measure every operator anew."""
        with self._quiet.watching() as watch:
            profile = baechi.profile(
                self._traced, self._device, threads=self._threads, progress=False, cache=False
            )
        self.calm = watch.calm
        self.graph = self._traced.graph(profile, training=self._training)


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
class _Case:
    """A placed model, and its passes so far."""

    def __init__(
        self,
        title: tuple[str, int, str, int, str],
        profiled: _Profiled,
        placement: baechi.Placement,
        placed: baechi.PlacedModule,
    ) -> None:
        self.title, self.devices = title, title[3]
        self.placed = placed
        self.profiled, self._placement = profiled, placement
        # By the costs that the program was made with; its peaks are of the same order of operators,
        # with what streams hold.
        self._schedule = placed.schedule
        self._passes: list[tuple[int, baechi.Measurement, bool]] = []

    @property
    def calm(self) -> int:
        """How many passes were quiet."""
        return sum(calm for _, _, calm in self._passes)

    def measure(self, cluster: baechi.Cluster, quiet: Quiet) -> None:
        """One more pass, predicted by the last profile and what the links cost now."""
        graph = self.profiled.graph
        placement = replace(self._placement, graph_digest=graph.digest)  # the costs alone differ
        predicted_ns = baechi.simulate(graph, cluster, placement).makespan_ns
        fewest, most = _STEPS
        steps = min(max(_BUDGET_NS // max(predicted_ns, 1), fewest), most)
        with quiet.watching() as watch:
            found = self.placed.measure(steps)
        self._passes.append((predicted_ns, found, self.profiled.calm and watch.calm))

    def row(self) -> Row:
        """Prediction and measurement."""
        counted = [one for one in self._passes if one[2]] or self._passes
        by_error = sorted(counted, key=lambda one: one[0] / one[1].step_ns)
        predicted_ns, found, calm = by_error[len(by_error) // 2]
        peaks = zip(*(each.peak_bytes for _, each, _ in self._passes), strict=True)
        phases = self.placed._current.program.phases
        return Row(
            *self.title,
            ops=len(self.profiled.graph.ops),
            segments=sum(len(phase.segments) for phase in phases),
            transfers=len(self._schedule.transfers),
            predicted_ns=predicted_ns,
            predicted_bytes=self._schedule.peak_bytes,
            measured=replace(found, peak_bytes=tuple(map(max, peaks))),
            passes_ns=tuple(
                (predicted, each.step_ns, quiet) for predicted, each, quiet in self._passes
            ),
            disturbed=not calm,
        )


def _measured(
    cases: Sequence[_Case],
    profiles: Sequence[_Profiled],
    kind: str,
    quiet: Quiet,
    say: Callable[[str], None],
) -> list[Row]:
    """The rows, after all passes."""
    for count in range(_MOST_PASSES):
        left = [case for case in cases if case.calm < _PASSES]
        for profiled in profiles if count else ():  # those of the first pass are made
            if any(case.profiled is profiled for case in left):
                profiled.measure()
        sizes = {case.devices for case in left}
        clusters = {n: survey(device_names(kind, n), anew=True).cluster for n in sorted(sizes)}
        for case in left:
            name, batch, mode, devices, placement = case.title
            say(f"{name} {batch} {mode}: {placement} on {devices}, pass {count + 1}")
            case.measure(clusters[case.devices], quiet)
    rows = [case.row() for case in cases]
    for case in cases:
        case.placed.unplace()
    return rows
