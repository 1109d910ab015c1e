"""Placements of a graph that a step runs for several micro-batches, and the order of their turns.

A placement is best for micro-batches where the busiest device has little to do, and best for one
where the path is short, so candidates come from both ends:

- what the placer finds for one micro-batch, and every single device;
- `stages`: contiguous splits with the smallest bottleneck, by dynamic programming from the last
  stage to the first. A stage with s - 1 stages behind it holds what min(s, M) micro-batches keep
  for their backward;
- `auto` on the copies of the coarse graph (`problem/microbatches.py`), where they are few enough:
  it finds interleavings, in which a device has several stages.

Each gets its best order of turns (`turn_orders`), and the shortest step of all copies wins. Among
steps within a hundredth of it the one with the fewest turns does: what a turn costs besides its
operators is not on the clock.

Source of the program: Tarnawski et al., "Piper" (NeurIPS 2021), section 3, where memory grows by
the stages behind; here without replicas. Complexity: O(blocks**2 * devices) per number of stages.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, Final, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from baechi import _core
from baechi.placers.auto import Auto
from baechi.placers.contiguous import blocks_of
from baechi.placers.device_choice import device_choices, device_kinds
from baechi.placers.placer import Placer, live_loads
from baechi.placers.turn_orders import Order, shortest_order
from baechi.problem.coarsening import Coarse, coarsen
from baechi.problem.microbatches import Turns, Unrolled, segments_of
from baechi.problem.problem_arrays import LIMIT, Problem
from baechi.problem.simulation import fits_memory
from baechi.records.graph import OpGraph
from baechi.records.placement import Placement
from baechi.validation import FrozenDict

# Blocks of neighboring groups between which stages are cut: programs of some milliseconds.
_BLOCKS: Final = 256
# Copies of the blocks' forward and backward that are placed freely, of so many micro-batches.
_MOST_COPIES: Final = 16
_COPIES: Final = {"fast": 1_000, "balanced": 4_000, "thorough": 16_000}
# Splits with the best estimates, of all numbers of stages.
_SPLITS: Final = {"fast": 2, "balanced": 8, "thorough": 32}
# A step so much longer, as a part, is as good if it has fewer turns.
_ALIKE: Final = 100

# A name, and the devices and the order of the ops of one micro-batch.
Candidate: TypeAlias = tuple[str, tuple[int, ...], tuple[int, ...]]


def pipelined(
    graph: OpGraph,
    problem: Problem,
    one: Placement,
    placer: Placer,
    effort: str,
    microbatches: int,
) -> Placement | None:
    """The best placement found for several micro-batches, with its turns; `None` if none fits.

    Args:
        graph: The graph of one micro-batch.
        problem: The same with its cluster and constraints.
        one: The placer's placement of it.
        placer: `Auto` tries all candidates, any other placer only `one`.
        effort: How many candidates, and how many orders of each.
        microbatches: Their number, at least 2.
    """
    if problem.max_devices is not None:
        problem = problem.within(next(device_choices(problem)))
    found: list[tuple[int, Order, Candidate]] = []
    steps: dict[str, int | float | str] = {}
    for candidate in _candidates(graph, problem, one, placer, effort, microbatches):
        label, devices, order = candidate
        placed = Placement(graph.digest, devices, order)
        if problem.timeline().fold(np.array(devices, np.int32), np.array(order, np.int32)) >= 0:
            continue  # there is no path
        turns = Turns(graph, problem, devices, segments_of(graph, placed), microbatches)
        launches, timeline = shortest_order(turns, effort)
        fits = fits_memory(problem, timeline)
        steps[label] = timeline.makespan() if fits else "does not fit"
        if fits:
            found.append((timeline.makespan(), launches, candidate))
    if not found:
        return None
    least_ns = min(step_ns for step_ns, *_ in found)
    alike = [row for row in found if row[0] * _ALIKE <= least_ns * (_ALIKE + 1)]
    step_ns, launches, (label, devices, order) = min(alike, key=lambda row: (len(row[1]), row[0]))
    stats = FrozenDict({"makespan_ns": step_ns, **steps, "chosen": label})
    rest = {"placer": placer.name, "stats": stats, "microbatches": microbatches, "turns": launches}
    return Placement(graph.digest, devices, order, **rest)


def _candidates(
    graph: OpGraph, problem: Problem, one: Placement, placer: Placer, effort: str, microbatches: int
) -> Iterator[Candidate]:
    """Devices and orders of the ops of one micro-batch, each set of devices once."""
    yield f"{placer.name}/one", one.devices, one.order
    if not isinstance(placer, Auto):
        return
    seen = {one.devices}
    n = problem.arrays.ops
    rows = [
        *_singles(problem),
        *_stages(graph, problem, effort, microbatches),
        *_interleaved(graph, problem, placer, effort, microbatches),
    ]
    for name, devices in rows:
        where = tuple(devices.tolist())
        if where not in seen:
            seen.add(where)
            yield name, where, tuple(range(n))


def _singles(problem: Problem) -> Iterator[tuple[str, NDArray[np.int32]]]:
    """Every kind of single device."""
    kinds = device_kinds(problem)
    for device in problem.free_devices:
        if kinds[device] == device:
            name = problem.cluster.devices[device].name
            yield f"single/{name}", np.full(problem.arrays.ops, device, np.int32)


def _stages(
    graph: OpGraph, problem: Problem, effort: str, microbatches: int
) -> list[tuple[str, NDArray[np.int32]]]:
    """Contiguous splits of the groups, in index order, of least bottleneck: the best estimates."""
    blocks = _Blocks(graph, problem, microbatches)
    kinds, memory, work = device_kinds(problem), problem.device_memory, problem.device_work
    devices = range(len(kinds))
    rows = (
        list(devices),
        sorted(devices, key=lambda d: (-memory[d], work[d], d)),
        sorted(devices, key=lambda d: (work[d], -memory[d], d)),
    )
    found: dict[tuple[int, ...], tuple[int, str, NDArray[np.int32]]] = {}
    for in_flight in dict.fromkeys((microbatches, 2, 1)):
        for row, stages in product(rows, range(2, problem.most_devices + 1)):
            used = row[:stages]
            key = tuple(kinds[device] for device in used)
            split = None if key in found else blocks.split(used, in_flight)
            if split is not None:
                bottleneck_ns, where = split
                estimate_ns = (microbatches - 1) * bottleneck_ns + work[used[0]]
                found[key] = estimate_ns, f"stages/{stages}", where
        if found:
            break
    ranked = sorted(found.values(), key=lambda entry: entry[0])[: _SPLITS[effort]]
    names = (f"{name}.{at}" if at else name for at, (_, name, _) in enumerate(ranked))
    return [(name, where) for name, (*_, where) in zip(names, ranked, strict=True)]


@final
class _Blocks:
    """Blocks of neighboring groups in index order; a matrix has the first and the next block."""

    def __init__(self, graph: OpGraph, problem: Problem, microbatches: int) -> None:
        arrays = problem.arrays
        costs, self._count, self._block = _cut(problem, _BLOCKS)
        self._where = self._block[arrays.op_group]
        self._problem = problem
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

    def split(self, row: Sequence[int], in_flight: int) -> tuple[int, NDArray[np.int32]] | None:
        """The least bottleneck of stages on these devices, and the device of every op."""
        n = self._count + 1
        least = np.full(n, LIMIT)
        least[-1] = 0
        ends = []
        empty = np.tril(np.ones((n, n), np.bool_))
        for behind, device in enumerate(reversed(row)):
            held = self._loads + min(in_flight - 1, behind) * self._held
            full = held > self._problem.device_share[device]
            time = np.maximum(self._work[self._problem.device_class[device]], self._moves)
            time = np.where(empty | full | self._forbidden[device], LIMIT, time)
            time = np.maximum(time, least[None, :])
            ends.append(time.argmin(axis=1))
            least = time.min(axis=1)
        if least[0] >= LIMIT:
            return None
        at, stage_of = 0, np.empty(self._count, np.int32)
        for device, end in zip(row, reversed(ends), strict=True):
            stage_of[at : end[at]] = device
            at = int(end[at])
        return int(least[0]), stage_of[self._where]


def _interleaved(
    graph: OpGraph, problem: Problem, placer: Auto, effort: str, microbatches: int
) -> Iterator[tuple[str, NDArray[np.int32]]]:
    """What `auto` finds for copies of a graph of blocks, which are few enough for it."""
    copies = min(microbatches, _MOST_COPIES)
    coarse = _coarse(graph, problem, _COPIES[effort] // (2 * copies))
    late = coarse.tensors >= len(graph.tensors)
    unrolled = Unrolled(coarse.arrays, late, copies)
    placement = placer.place(unrolled.problem(coarse.lumped()))
    if placement is not None:
        where = np.array(placement.devices, np.int32)[unrolled.position[0]]
        yield "auto/copies", where[coarse.part_of]


def _cut(problem: Problem, most: int) -> tuple[NDArray[np.int64], int, NDArray[np.int32]]:
    """Mean transfers of tensors, the number of blocks, about `most`, and that of every group."""
    costs = np.array(_core.mean_transfers(problem.core), np.int64)
    return costs, *blocks_of(problem, tuple(range(problem.arrays.groups)), costs, most)


def _coarse(graph: OpGraph, problem: Problem, most: int) -> Coarse:
    """The blocks' forward ops, the loss, and the blocks' other ops; or else the usual coarse graph.

    That is used where the first has a cycle.
    """
    _, count, block = _cut(problem, most)
    where, loss, op = block[problem.arrays.op_group], graph.n_forward, np.arange(len(graph.ops))
    key = np.where(op < loss, where, 2 * count - where)
    key[loss : loss + 1] = count
    _, first, part_of = np.unique(key, return_index=True, return_inverse=True)
    makers, readers = problem.arrays.edges()
    if (part_of[makers] > part_of[readers]).any():
        return coarsen(problem)
    _, part, group = np.unique(where[first], return_index=True, return_inverse=True)
    return Coarse(problem, part_of.astype(np.int32), part[group].astype(np.int32))
