"""Admission: whether a step fits at another shape of its family, on the devices it was placed on.

The devices and the order of operators are the family's. At another shape tensors have other
bytes, by the facts of the trace at that shape. What only a profile knows, workspaces and bytes
saved inside an operator, grows at most with the square of what the operator reads and makes. Times
stay those of the reference shape: they decide when a tensor is alive, and no result. Times at
another shape, for people, follow from those at two (`schedule_at`).

A shape whose every size is at most that of an admitted one fits, too: with times as they are,
memory at each instant is a sum of sizes. Others are simulated once, first with what grew doubled.
O(nodes + edges), with a sort.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter, le
from typing import Any, final

from baechi.costs.estimation import estimate, rescaled
from baechi.errors import InfeasibleError, InputError
from baechi.problem.simulation import overflows
from baechi.program.stream_memory import Gpus, scheduled
from baechi.records.cluster import Cluster, Constraints
from baechi.records.graph import OpGraph
from baechi.records.op_costs import Profile
from baechi.records.placement import Placement, Schedule
from baechi.runtime.executors.cuda_graphs import MOST_SHAPES
from baechi.traced.step_costs import op_times
from baechi.traced.traced_model import Traced
from baechi.tracing.families import Family
from baechi.tracing.family_traces import resized, sized
from baechi.tracing.lowering import TracedModule
from baechi.tracing.node_facts import Facts
from baechi.units import format_bytes
from baechi.validation import FrozenDict


@final
@dataclass(eq=False)
class Admission:
    """The shapes of one placed family that fit.

    Attributes:
        traced: The traced family.
        graph: That was placed: of the reference shape.
        placement: Of the graph.
        cluster: Its devices.
        constraints: Whose margins stay free.
        gpus: The GPU of every logical device; None for a CPU.
        checkpoint: What runs forward again in the graph.
        reference: Values of the family's symbols at the reference shape.
        other: Values at the other shape that the family began with; empty if there was none.
        profiles: Costs of a trace, for each kind of device.
        besides: These with those where several workers are busy.
        replayed: Whether it runs as CUDA graphs.
    """

    traced: Traced
    graph: OpGraph
    placement: Placement
    cluster: Cluster
    constraints: Constraints | None
    gpus: Gpus
    checkpoint: Any
    reference: Sequence[int]
    other: Sequence[int]
    profiles: Callable[[Traced], Sequence[Profile]]
    besides: Callable[[Sequence[Profile]], Sequence[Profile]] = tuple
    replayed: bool = False

    def __post_init__(self) -> None:
        module: TracedModule = self.traced.module
        assert module.family is not None
        self.family: Family = module.family
        self._facts = self.family.facts(self.reference)
        self._fit = [self.family.sizes(self.reference)]
        self._replayed = MOST_SHAPES

    def missing(self, values: Sequence[int]) -> Mapping[str, int]:
        """The devices whose memory the step exceeds at a shape, with the missing bytes."""
        sizes = self.family.sizes(values)
        if any(all(map(le, sizes, known)) for known in self._fit):
            return {}
        pairs = zip(values, self.reference, strict=True)
        ahead = [2 * now if now > was else now for now, was in pairs]
        for at in (ahead, values):  # what grows, such as a cache, will grow on
            found = self._overflows(at)
            if not found:
                self._fit.append(self.family.sizes(at))
                return {}
        return found

    def most_replayed(self, values: Sequence[int]) -> int:
        """The number of shapes whose CUDA graphs fit at once: this one, and those of before.

        At least one, at most `MOST_SHAPES`. They share nothing but persistent bytes.
        """
        schedule, memory_of = self._schedule_at(values), self.cluster.memories
        held: Counter[int] = Counter()
        for op, device in zip(self.graph.ops, self.placement.devices, strict=True):
            held[memory_of[device]] += op.persistent_bytes
        rows = [(peak, held[m]) for peak, m in zip(schedule.peak_bytes, memory_of, strict=True)]
        while self._replayed > 1:
            peaks = tuple(peak + (self._replayed - 1) * (peak - kept) for peak, kept in rows)
            several = replace(schedule, peak_bytes=peaks)
            if not overflows(several, self.cluster, self.constraints):
                break
            self._replayed -= 1
        return self._replayed

    def _overflows(self, values: Sequence[int]) -> Mapping[str, int]:
        return dict(overflows(self._schedule_at(values), self.cluster, self.constraints))

    def _schedule_at(self, values: Sequence[int]) -> Schedule:
        return self._scheduled(self.graph_at(values))

    def _scheduled(self, graph: OpGraph) -> Schedule:
        placement = replace(self.placement, graph_digest=graph.digest)
        return scheduled(graph, self.cluster, placement, self.gpus, replayed=self.replayed)

    def largest(self, values: Sequence[int]) -> tuple[int, int] | None:
        """(symbol, value): the largest that fits of the symbol that grew most, all else equal.

        None if it did not grow, or nothing fits.
        """
        growth = [now / was for now, was in zip(values, self.reference, strict=True)]
        symbol = max(range(len(growth)), key=growth.__getitem__)
        low, high = 1, values[symbol]  # what fits, or is none; and what does not
        while high - low > 1:
            middle = (low + high) // 2
            at = [*values[:symbol], middle, *values[symbol + 1 :]]
            fits = not self._overflows(at)
            low, high = (middle, high) if fits else (low, middle)
        return None if low == 1 else (symbol, low)

    def schedule_at(self, values: Sequence[int]) -> Schedule:
        """The predicted schedule of a step at a shape, with times that follow from two shapes.

        Measured costs are measured at the second of them when this is first called.
        """
        graph, traced = self.graph_at(values), sized(self.traced, values)
        alone = [rescaled(rows, _computed(traced, rows[0][0].kind)) for rows in self._known]
        profiles = self.besides(alone)
        times = {row.kind: op_times(graph, row.costs) for row in profiles}
        rows = zip(graph.ops, times[profiles[0].kind], strict=True)
        ops = tuple(replace(op, time_ns=time_ns) for op, time_ns in rows)
        return self._scheduled(replace(graph, ops=ops, times=FrozenDict(times)))

    @cached_property
    def _known(self) -> list[list[tuple[Profile, Profile]]]:
        """Of every kind of device the costs, and the computed ones, at one shape or two."""
        rows = []
        for values in filter(None, (self.reference, self.other)):
            traced = sized(self.traced, values)
            rows.append([(row, _computed(traced, row.kind)) for row in self.profiles(traced)])
        return list(map(list, zip(*rows, strict=True)))

    def graph_at(self, values: Sequence[int]) -> OpGraph:
        """The graph at a shape, with times as they were."""
        graph, training = self.graph, self.graph.is_training
        traced = resized(self.traced, values)
        growth = _growth(traced.module, self._facts, traced.module.facts)
        squares = [max(1.0, factor * factor) for factor in growth]
        ordered = any(row.order for row in graph.tensors)
        rows = traced.sized_tensors(
            training=training, checkpoint=self.checkpoint, draws_in_order=ordered
        )
        tensors = tuple(
            replace(
                row,
                nbytes=size if size >= 0 else math.ceil(row.nbytes * squares[~size]),
                parts=there.parts,
            )
            for row, (there, size) in zip(graph.tensors, rows, strict=True)
        )
        # What is held beside others is a part of the workspace, and grows no faster: it may stay.
        ops = tuple(
            replace(
                op,
                workspace_bytes=math.ceil(op.workspace_bytes * _most(squares, index, op.forward)),
                reused_bytes=math.floor(op.reused_bytes * _least(growth, op.forward)),
            )
            for index, op in enumerate(graph.ops)
        )
        return replace(graph, ops=ops, tensors=tensors)


def check_batches(
    n: int, peaks: tuple[int, ...], cluster: Cluster, constraints: Constraints | None
) -> None:
    """Raise an `InfeasibleError` where a call of so many micro-batches does not fit."""
    missing = overflows(Schedule((), (), peaks), cluster, constraints)
    if not missing:
        return
    name, extra = max(missing, key=itemgetter(1))
    left = tuple((row.name, row.memory_bytes) for row in cluster.devices)
    needed = peaks[[row.name for row in cluster.devices].index(name)]
    text = (
        f"{name} would need {format_bytes(needed)} for {n} micro-batches, "
        f"{format_bytes(extra)} more than it has: a call keeps what all of them leave for the "
        "backward. Use placed.step(...), which keeps less; or smaller batches, or more memory."
    )
    raise InfeasibleError(text, name, needed, left, extra, name)


def _computed(traced: Traced, kind: str) -> Profile:
    """Computed costs; as on a CPU where the kind is not in the table."""
    try:
        return estimate(traced, kind)
    except InputError:
        return estimate(traced, "cpu")


def _most(factors: Sequence[float], index: int, forward: Sequence[int]) -> float:
    own = forward or ((index,) if index < len(factors) else ())
    return max((factors[op] for op in own), default=1.0)


def _least(factors: Sequence[float], forward: Sequence[int]) -> float:
    return min((1.0, *(factors[op] for op in forward)))


def _growth(module: TracedModule, before: Facts, after: Facts) -> list[float]:
    """Of every operator the largest ratio of the bytes of what it reads or makes."""
    ratios = [
        new.nbytes / old.nbytes if old.nbytes else 1.0
        for old, new in zip(before.storages, after.storages, strict=True)
    ]
    found = []
    for nodes in module.nodes:
        touched = {n for node in nodes for n in (node, *node.all_input_nodes)}
        storages = {v.storage for n in touched for v in before.nodes[n].values}
        found.append(max((ratios[storage] for storage in storages), default=1.0))
    return found
