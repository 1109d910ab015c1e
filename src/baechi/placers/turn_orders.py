"""Micro-batches: placements that let segments take turns well, and the order of the turns.

**Orders.** A turn is a segment with a batch (`problem/microbatches.py`). Candidates are, on the
turns as ops of a graph: earliest task first (m-ETF), which under the memory of 1F1B finds 1F1B;
HEFT; m-ETF that prefers the deepest of the turns that could start at once, which finds zero-bubble
schedules; each also with at most K batches in flight on a device, for the K that fit; a search from
the shortest; and one batch after the other, which needs least memory. The copies of all ops decide
(`Turns.ops`), so that what is predicted is what `simulate` says.

Earliest task first commits by start times. That matters: the clock's ports take transfers in the
order in which they are committed, so an order lane by lane would make the same schedule longer.

Complexity: that of m-ETF and HEFT on `microbatches * segments` turns for each K, and of a
simulation of all copies for the best few.

**Placements.** A placement is best for micro-batches where the busiest device has little to do, and
best for one where the path is short, so candidates come from both ends:

- what the placer finds for one micro-batch;
- `_stages`: contiguous splits with the smallest bottleneck, by dynamic programming from the last
  stage to the first. A stage with s - 1 stages behind it holds what min(s, M) micro-batches keep
  for their backward. A row of devices may be taken several times in turn;
- `_interleaved`: list schedules and `auto` on the copies of a graph of blocks, few enough for them.
  They find interleavings, in which a device has several stages.

Each gets its best order of turns, and the shortest step of all copies wins. Of many micro-batches
the first few are ordered, each one more is taken to need the busiest device's time once, and those
that look best are ordered with all. Among
steps within a hundredth of it the one with the fewest turns does: what a turn costs besides its
operators is not on the clock.

Source of the program: Tarnawski et al., "Piper" (NeurIPS 2021), section 3, where memory grows by
the stages behind; here without replicas. Complexity: O(blocks**2 * stages) per row of devices.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import Any, Final, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from baechi import _core
from baechi.placers.auto import Auto, check_effort
from baechi.placers.contiguous import blocks_of
from baechi.placers.device_choice import device_kinds
from baechi.placers.list_schedulers import HEFT, METF, PEFT
from baechi.placers.local_search import Budget, improved
from baechi.placers.max_load import balanced
from baechi.placers.placer import Placer, live_loads
from baechi.problem.bounds import lower_bound_ns
from baechi.problem.coarsening import Coarse, coarsen
from baechi.problem.microbatches import Turns, Unrolled
from baechi.problem.problem_arrays import LIMIT, Problem
from baechi.problem.segments import as_run, in_run_order, segments_of
from baechi.problem.simulation import overflows, period_ns, replay, simulate
from baechi.records.cluster import Cluster, Constraints
from baechi.records.graph import OpGraph
from baechi.records.placement import Placement
from baechi.validation import FrozenDict, check_positive

# Orders to simulate with the copies of all ops.
_SIMULATED: Final = {"fast": 1, "balanced": 3, "thorough": 8}
# Of the search for a shorter order: half a second for a thousand turns.
_SEARCH: Final = Budget(10_000_000, 60_000, ((1, 1 / 4), (1, 1 / 4), (1, 1 / 2)), 0, 0, 0)
# Turns above which few numbers of batches in flight are tried.
_MANY: Final = 4_000

# (segment, batch), in launch order.
Order: TypeAlias = tuple[tuple[int, int], ...]


@final
@dataclass(frozen=True, slots=True)
class Rhythm:
    """The turns of a placed graph in order, with what the clock says of them.

    Attributes:
        segments: The ops of every segment, in their order.
        turns: (segment, batch), in launch order: an order in which one thread may launch all. The
            turns of a segment are in the order of the batches; of those after a joined loss from
            the last batch to the first. A joined loss has one turn.
        step_ns: The step of all batches.
        peak_bytes: Peak memory of every device; of its pool, where it is in one.
        lower_bound_ns: No order of these ops on their devices is shorter.
    """

    segments: tuple[tuple[int, ...], ...]
    turns: tuple[tuple[int, int], ...]
    step_ns: int
    peak_bytes: tuple[int, ...]
    lower_bound_ns: int


def ordered_turns(
    graph: OpGraph,
    cluster: Cluster,
    placement: Placement,
    microbatches: int,
    *,
    segments: Sequence[Sequence[int]] | None = None,
    joined: bool = False,
    constraints: Constraints | None = None,
    effort: str = "balanced",
    in_flight: int = 0,
    gpus: tuple[str | None, ...] = (),
) -> Rhythm:
    """The shortest order found of the turns of a placed graph, of those that fit the memory.

    If none fits, the one that exceeds it least; `peak_bytes` says by how much. The order that the
    placement has is taken where it is of these turns or of parts of them, and no number in flight
    is asked for.

    Args:
        graph: The graph of one micro-batch.
        cluster: The devices.
        placement: Its devices and its order, from which the segments are cut.
        microbatches: Number of micro-batches.
        segments: The ops of every segment, in topological order; by default `segments_of`.
        joined: Whether a training graph has one loss for all batches in place of one for each.
        constraints: As for `solve`; margins are kept free.
        effort: `"fast"`, `"balanced"` or `"thorough"`: how many orders are tried.
        in_flight: The most batches that a device has begun and not ended; 0 for any number.
        gpus: As in `Turns`.

    Raises:
        InputError: A number is not positive, the placement is of another graph, or the segments
            are no partition of its ops in topological order.
    """
    check_positive(microbatches, "microbatches")
    check_effort(effort)
    problem = Problem(graph, cluster, constraints)
    replay(problem, placement.devices, placement.order)  # which checks it
    own = segments_of(graph, placement)
    rows = own if segments is None else tuple(map(tuple, segments))
    problem = problem.in_use(placement.devices)
    turns = Turns(graph, problem, placement, rows, microbatches, joined)
    turns = replace(turns, segments=as_run(graph, rows), gpus=gpus)
    known = placement.microbatches == microbatches and not joined and not in_flight
    parts = parts_of(own, turns.segments) if known and placement.turns else None
    if parts is not None:
        order: Order = tuple((at, batch) for whole, batch in placement.turns for at in parts[whole])
        step_ns, peaks = turns.clocked(order)
    else:
        order, step_ns, peaks = shortest_order(turns, effort, in_flight)
    return Rhythm(
        turns.segments,
        order,
        step_ns,
        tuple(peaks[pool] for pool in problem.device_pool),
        lower_bound_ns(turns.ops[1]),
    )


def parts_of(
    segments: Sequence[Sequence[int]], finer: Sequence[Sequence[int]]
) -> list[list[int]] | None:
    """Of every segment the indices of those that it is made of; None if one is of several."""
    whole = {op: at for at, row in enumerate(segments) for op in row}
    parts: list[list[int]] = [[] for _ in segments]
    for index, row in enumerate(finer):
        (at, *others) = {whole[op] for op in row}
        if others:
            return None
        parts[at].append(index)
    return parts


def shortest_order(turns: Turns, effort: str, in_flight: int = 0) -> tuple[Order, int, list[int]]:
    """The best order found, with the step and the peak of every pool of all copies in it."""
    memory = turns.problem.pool_memory
    rated = sorted(_schedules(turns, effort, in_flight), key=lambda row: row[0])
    copies, _ = turns.capped()
    one_by_one = turns.order_of(copies, range(copies.arrays.ops))
    best: tuple[int, int, Order, list[int]] | None = None
    for number, order in enumerate((*(order for _, order in rated), one_by_one)):
        if number >= _SIMULATED[effort] and best is not None and best[0] == 0:
            break
        step_ns, peaks = turns.clocked(order)
        over = sum(max(0, p - m) for p, m in zip(peaks, memory, strict=True))
        if best is None or (over, step_ns) < best[:2]:
            best = over, step_ns, order, peaks
    assert best is not None
    _, step_ns, order, peaks = best
    return order, step_ns, peaks


def _schedules(turns: Turns, effort: str, in_flight: int) -> list[tuple[int, Order]]:
    """Orders of the turns, each with its step on the clock of turns; ends at a shortest one."""
    found: list[tuple[int, Order]] = []
    placements: list[Placement] = []
    copies, problem = turns.capped()
    bound = lower_bound_ns(problem)
    schedulers = [(HEFT(), False), (METF(), False), *([(METF(), True)] if effort != "fast" else [])]
    used = len(set(turns.homes))
    caps = (in_flight,) if in_flight else _caps(turns, effort)
    for most, (placer, urgent) in product(caps, schedulers):
        if effort == "fast" and found and 0 < most < used:
            break
        view, capped = turns.capped(most, urgent=urgent) if most or urgent else (copies, problem)
        placement = placer.place(capped)
        if placement is not None:
            step_ns = int(placement.stats["makespan_ns"])
            found.append((step_ns, turns.order_of(view, placement.order)))
            if step_ns <= bound:
                return found
            placements += [] if urgent else [placement]
    search = effort != "fast" and not in_flight
    better = improved(problem, placements, _SEARCH) if search else None
    if better is not None:
        step_ns = int(better.stats["makespan_ns"])
        found.append((step_ns, turns.order_of(copies, better.order)))
    return found


def _caps(turns: Turns, effort: str) -> Iterator[int]:
    """Numbers of batches in flight to try; 0 is no limit."""
    yield 0
    used, most = len(set(turns.homes)), turns.microbatches - 1
    if turns.joined:
        return
    few = effort == "fast" or turns.microbatches * len(turns.segments) > _MANY
    tried = (used, used // 2, 1) if few else range(1, 2 * used + 1)
    yield from dict.fromkeys(k for k in tried if 0 < k <= most)


# Blocks of neighboring groups between which stages are cut: programs of some milliseconds.
_BLOCKS: Final = 256
# Copies of the blocks' forward and backward that are placed freely, of so many micro-batches.
_MOST_COPIES: Final = 16
_COPIES: Final = {
    "fast": (1_000,),
    "balanced": (500, 1_000, 2_000),
    "thorough": (500, 1_000, 2_000, 4_000, 8_000),
}
# How often a row of devices gets stages in turn; the most devices for that, how many numbers of
# them are tried, and how many splits with the best estimates are ordered.
_LAPS: Final = {"fast": (1, 2), "balanced": (1, 2, 3, 4), "thorough": (1, 2, 3, 4, 6, 8)}
_MOST_STAGES: Final = 64
_STAGES: Final = 8
_SPLITS: Final = {"fast": 1, "balanced": 2, "thorough": 8}
# Candidates that get the best order that the effort finds; the others get that of a fast solve.
_ORDERED: Final = {"fast": 0, "balanced": 2, "thorough": 12}
# Micro-batches with which candidates are compared; each one more takes them a period.
_RATED: Final = 8
# Steps of the search for less load, and the number of placements that it begins at.
_STEPS: Final = {"fast": 20_000, "balanced": 100_000, "thorough": 1_000_000}
_BALANCED: Final = 2
# A step so much longer, as a part, is as good if it has fewer turns.
_ALIKE: Final = 100


@final
@dataclass(frozen=True)
class Pipelines:
    """Placements of a graph for several micro-batches.

    Attributes:
        graph: The graph of one micro-batch.
        problem: The same with its cluster and constraints.
        microbatches: Their number, at least 2.
        effort: How many candidates, and how many orders of each.
    """

    graph: OpGraph
    problem: Problem
    microbatches: int
    effort: str

    def best(self, ones: Sequence[Placement], placer: Placer) -> Placement | None:
        """The best placement found, with its turns; `None` if none fits.

        `ones` are the placer's for one micro-batch; only `Auto` tries others.
        """
        steps: dict[str, int | float | str] = {}
        rated: list[tuple[int, str, Turns, Order]] = []

        def rate(label: str, turns: Turns, effort: str, more_ns: int = 0) -> None:
            order, step_ns, peaks = shortest_order(turns, effort)
            if all(p <= m for p, m in zip(peaks, self.problem.pool_memory, strict=True)):
                steps[label] = step_ns + more_ns
                rated.append((step_ns + more_ns, label, turns, order))
            else:
                steps.setdefault(label, "does not fit")

        few = min(self.microbatches, _RATED)
        for label, placement in self._candidates(ones, isinstance(placer, Auto)):
            segments = segments_of(self.graph, placement)
            turns = Turns(self.graph, self.problem, placement, segments, few)
            later = self.microbatches - few
            rate(label, turns, "fast", later * self._period_ns(placement) if later else 0)
        rated.sort(key=lambda row: row[0])
        best, all_of, wanted = list(rated), self.microbatches, _ORDERED[self.effort]
        if few < all_of:
            rated, wanted = [], max(wanted, 2)
        enough = len(rated) + wanted
        for _, label, turns, _ in best:
            if len(rated) == enough:
                break
            rate(label, replace(turns, microbatches=all_of), self.effort)
        if not rated:
            return None
        most_ns = min(step_ns for step_ns, *_ in rated) * (_ALIKE + 1) // _ALIKE
        alike = [row for row in rated if row[0] <= most_ns]
        step_ns, label, turns, order = min(alike, key=lambda row: (len(row[3]), row[0]))
        stats = FrozenDict({"makespan_ns": step_ns, **steps, "chosen": label})
        count, name = self.microbatches, placer.name
        return replace(turns.placement, placer=name, stats=stats, microbatches=count, turns=order)

    def steady(self, ones: Sequence[Placement], placer: Placer) -> Placement:
        """The placement for requests one behind the other: of least period, then latency.

        `ones` are the placer's for a single request; only `Auto` tries others.
        """
        rows, graph, cluster = [], self.graph, self.problem.cluster

        def rate(label: str, placement: Placement) -> None:
            schedule = simulate(graph, cluster, placement)
            runs = [schedule]
            if graph.is_training and len(set(placement.devices)) > 1:
                runs.append(simulate(graph, cluster, in_run_order(graph, placement)))
            if not any(overflows(run, cluster, self.problem.constraints) for run in runs):
                load = period_ns(graph, cluster, placement, schedule)
                rows.append((load, schedule.makespan_ns, label, placement))

        others = isinstance(placer, Auto)
        for label, placement in self._candidates(ones, others):
            rate(label, placement)
        best = sorted(rows, key=lambda row: row[:2])[: _BALANCED if others else 0]
        for _, _, label, placement in best:
            devices = balanced(self.problem, placement.devices, _STEPS[self.effort])
            rate(f"{label}, balanced", replace(placement, devices=devices))
        period, latency_ns, chosen, found = min(rows, key=lambda row: row[:2])
        stats: dict[str, int | float | str] = {label: load for load, _, label, _ in rows}
        stats |= {"period_ns": period, "latency_ns": latency_ns, "chosen": chosen}
        return replace(found, placer=placer.name, stats=FrozenDict(stats))

    def _period_ns(self, placement: Placement) -> int:
        """The largest load of a device or port by one micro-batch."""
        schedule = simulate(self.graph, self.problem.cluster, placement)
        return period_ns(self.graph, self.problem.cluster, placement, schedule)

    def _candidates(
        self, ones: Sequence[Placement], others: bool
    ) -> Iterator[tuple[str, Placement]]:
        """Placements for one micro-batch, one for each set of devices, if all paths are there."""
        order = tuple(range(self.problem.arrays.ops))
        rows = [
            (f"one/{row.stats.get('chosen', row.placer)}", row.devices, row.order) for row in ones
        ]
        found = chain(self._stages(), self._interleaved()) if others else ()
        more = ((name, tuple(where.tolist()), order) for name, where in found)
        seen = set()
        for name, devices, ops in chain(rows, more):
            where, timeline = np.array(devices, np.int32), self.problem.timeline()
            if devices not in seen and timeline.fold(where, np.array(ops, np.int32)) < 0:
                yield name, Placement(self.graph.digest, devices, ops)
            seen.add(devices)

    def _stages(self) -> Iterator[tuple[str, NDArray[np.int32]]]:
        """Contiguous splits of the groups, in index order, of least bottleneck."""
        problem = self.problem
        blocks = _Blocks(self.graph, problem, self.microbatches)
        kinds, memory, work = device_kinds(problem), problem.device_memory, problem.device_work
        devices = np.flatnonzero(problem.allowed.any(axis=1)).tolist()
        rows = (
            devices,
            sorted(devices, key=lambda d: (-memory[d], work[d], d)),
            sorted(devices, key=lambda d: (work[d], -memory[d], d)),
        )
        most = min(len(devices), _MOST_STAGES)
        numbers = sorted({round(some) for some in np.linspace(2, most, _STAGES)})
        for laps in _LAPS[self.effort] if most > 1 else ():
            found: dict[tuple[int, ...], tuple[int, NDArray[np.int32]]] = {}
            # Where what is in flight has no room, fewer will be, which the order of turns sees to.
            for in_flight in dict.fromkeys((self.microbatches, 2, 1)):
                for row, used in product(rows, numbers):
                    key = tuple(kinds[device] for device in row[:used])
                    split = None if key in found else blocks.split(row[:used], laps, in_flight)
                    if split is not None:
                        found[key] = split
                if found:
                    break
            best = sorted(found.items(), key=lambda entry: entry[1][0])[: _SPLITS[self.effort]]
            for at, (key, (_, where)) in enumerate(best):
                yield f"stages/{len(key)}x{laps}{f'.{at}' if at else ''}", where

    def _interleaved(self) -> Iterator[tuple[str, NDArray[np.int32]]]:
        """What list schedulers and `auto` find for copies of graphs of blocks."""
        copies = min(self.microbatches, 2 * len(self.problem.cluster.devices), _MOST_COPIES)
        fast: tuple[Placer, ...] = (HEFT(),)
        for size in _COPIES[self.effort]:
            coarse = _coarse(self.graph, self.problem, size // (2 * copies))
            late = coarse.tensors >= len(self.graph.tensors)
            unrolled = Unrolled(coarse.arrays, late, copies)
            whole = unrolled.problem(coarse.lumped())
            for placer in fast if self.effort == "fast" else (*fast, PEFT(), Auto(effort="fast")):
                placement = placer.place(whole)
                if placement is not None:
                    where = np.array(placement.devices, np.int32)[unrolled.position[0]]
                    yield f"{placer.name}/{size} copies", where[coarse.part_of]


@final
class _Blocks:
    """Blocks of neighboring groups in index order; a matrix has the first and the next block."""

    def __init__(self, graph: OpGraph, problem: Problem, microbatches: int) -> None:
        arrays = problem.arrays
        costs, self._count, self._block = _cut(graph, problem, _BLOCKS)
        self._where = self._block[arrays.op_group]
        self._problem, self._microbatches = problem, microbatches
        self._work = [self._between(times, self._where) for times in problem.durations]
        loads = live_loads(problem, range(arrays.ops), microbatches)
        self._loads = np.max([self._between(load, self._block) for load in loads], axis=0)
        # What one batch keeps of the forward for the backward.
        first, last = arrays.extents(np.arange(arrays.ops))
        held = (first < graph.n_forward) & (last > graph.n_forward)
        self._held = self._between(arrays.nbytes * held, self._where[arrays.producer])
        self._forbidden = [self._between(~row, self._block) > 0 for row in problem.allowed]
        crossing = np.zeros(self._count + 2, np.int64)
        first, last = arrays.extents(self._where.astype(np.int64))
        np.add.at(crossing, first + 1, costs)
        np.subtract.at(crossing, last + 1, costs)
        cuts = np.cumsum(crossing)[: self._count + 1]
        self._moves = (cuts[:, None] + cuts[None, :]) // 2

    def _between(self, values: NDArray[Any], block: NDArray[np.int32]) -> NDArray[np.int64]:
        """Sums of values from one block up to another, given the block of each."""
        sums = np.zeros(self._count + 1, np.int64)
        np.add.at(sums, block.astype(np.int64) + 1, values.astype(np.int64))
        sums = np.cumsum(sums)
        return np.asarray(sums[None, :] - sums[:, None])

    def split(
        self, row: Sequence[int], laps: int, in_flight: int
    ) -> tuple[int, NDArray[np.int32]] | None:
        """The stages of least bottleneck on these devices, taken several times in turn.

        An estimate of the step, and the device of every op; `None` if nothing fits.
        """
        n = self._count + 1
        least = np.full(n, LIMIT)
        least[-1] = 0
        ends = []
        empty = np.tril(np.ones((n, n), np.bool_))
        stages = [*row] * laps
        for behind, device in enumerate(reversed(stages)):
            held = self._loads + min(in_flight - 1, behind // laps) * self._held
            full = held > self._problem.device_share[device] // laps
            work = self._work[self._problem.device_class[device]]
            time = np.where(empty | full | self._forbidden[device], LIMIT, work)
            time = np.maximum(np.maximum(time, self._moves), least[None, :])
            ends.append(time.argmin(axis=1))
            least = time.min(axis=1)
        if least[0] >= LIMIT:
            return None
        at, stage_of = 0, np.empty(self._count, np.int32)
        load, fill_ns = dict.fromkeys(row, 0), 0
        for stage, (device, end) in enumerate(zip(stages, reversed(ends), strict=True)):
            work_ns = int(self._work[self._problem.device_class[device]][at, end[at]])
            load[device] += work_ns
            fill_ns += work_ns if stage < len(row) - 1 else 0
            stage_of[at : end[at]] = device
            at = int(end[at])
        return self._microbatches * max(load.values()) + fill_ns, stage_of[self._where]


def _cut(
    graph: OpGraph, problem: Problem, most: int
) -> tuple[NDArray[np.int64], int, NDArray[np.int32]]:
    """Mean transfers of tensors, the number of blocks, about `most`, and that of every group.

    A group is where its longest forward op is: its first may be weights, far ahead of that.
    """
    costs = np.array(_core.mean_transfers(problem.core), np.int64)
    arrays, n = problem.arrays, graph.n_forward
    by_time = np.argsort(arrays.times[:n], kind="stable")
    at = np.full(arrays.groups, n)
    at[arrays.op_group[by_time]] = by_time
    return costs, *blocks_of(problem, tuple(np.argsort(at, kind="stable").tolist()), costs, most)


def _coarse(graph: OpGraph, problem: Problem, most: int) -> Coarse:
    """The blocks' forward ops, the loss, and the blocks' other ops; or else the usual coarse graph.

    That is used where the first has a cycle.
    """
    _, count, block = _cut(graph, problem, most)
    where, loss, op = block[problem.arrays.op_group], graph.n_forward, np.arange(len(graph.ops))
    key = np.where(op < loss, where, 2 * count - where)
    key[loss : loss + 1] = count
    _, first, part_of = np.unique(key, return_index=True, return_inverse=True)
    makers, readers = problem.arrays.edges()
    if (part_of[makers] > part_of[readers]).any():
        return coarsen(problem)
    _, part, group = np.unique(where[first], return_index=True, return_inverse=True)
    return Coarse(problem, part_of.astype(np.int32), part[group].astype(np.int32))
