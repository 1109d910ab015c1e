"""Contiguous splits: the groups in a row, cut into one segment per device, by dynamic programming.

The row follows the groups' first ops in a topological order of the ops (`_orders`). A segment fits
if its groups' loads fit at some moments of that order (`live_loads`). Of the splits over the first
k devices, for every k, two are best (`csrc/schedulers/contiguous_splits.cc`):

- least cut: the smallest sum of mean transfer times of all tensors that a segment reads but does
  not make, each counted once per segment, for chain-like graphs or slow links;
- bottleneck: the smallest maximum over the segments of their time plus that sum, for graphs with
  branches or fast links.

The exact clock evaluates all of them (`shortest_assignment`). If none fits, increasing shares of
every memory are left free for bytes missing from the loads, such as copies (`HEADROOMS`).

Source: PipeDream's partitioner (SOSP 2019, section 3.1) and Tarnawski et al. (NeurIPS 2020); here
with memory, with tensors that several segments read, and for one step. Complexity: O(blocks *
(tensors + blocks * (devices + moments))) per program, with blocks of neighboring groups so large
that blocks**2 * devices <= `work`, and some tens of simulations.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import ClassVar, Final, final

import numpy as np
from numpy.typing import NDArray

from baechi import _core
from baechi.placers.placer import (
    HEADROOMS,
    Placer,
    depth_first,
    device_range,
    live_loads,
    shortest_assignment,
)
from baechi.problem.problem_arrays import Problem
from baechi.records.placement import Placement

# Splits of one program to evaluate: those over the fewest devices, the most, and some between.
_SPLITS: Final = 8


@final
@dataclass(frozen=True, slots=True)
class Contiguous(Placer):
    """The shortest step of all contiguous splits that minimize the cut or the bottleneck.

    Attributes:
        work: Steps of one dynamic program: by default some tens of milliseconds, and 2,048 blocks
            for 8 devices.
        headrooms: Shares of every memory to leave free, tried in order until something fits.
        reordered: Number of the best splits also scheduled by earliest start and by rank; `None`
            is a few of them, and all as long as nothing fits.
    """

    name: ClassVar[str] = "contiguous"
    work: int = 2**25
    headrooms: tuple[float, ...] = HEADROOMS
    reordered: int | None = None

    def place(self, problem: Problem) -> Placement | None:
        """A placement by the rule of the module."""
        rows = [(order, _splits(problem, order, self.work)) for order in _orders(problem)]
        for headroom in self.headrooms:
            candidates: dict[tuple[int, ...], tuple[int, ...]] = {}
            for order, splits in rows:
                for assignment in splits(headroom):
                    candidates.setdefault(assignment, order)
            placement = shortest_assignment(problem, candidates, self.name, self.reordered)
            if placement is not None or not candidates:
                return placement
        return None


def _orders(problem: Problem) -> Iterator[tuple[int, ...]]:
    """Topological orders of the ops."""
    n = problem.arrays.ops
    yield tuple(range(n))
    yield depth_first(problem)
    ranks = _core.upward_ranks(problem.core)
    yield tuple(sorted(range(n), key=lambda op: (-ranks[op], op)))


def _splits(
    problem: Problem, order: tuple[int, ...], work: int
) -> Callable[[float], Iterator[tuple[int, ...]]]:
    """A function from a headroom to the best splits for that order: a device per group."""
    row = tuple(dict.fromkeys(problem.op_group[op] for op in order))
    costs = np.array(_core.mean_transfers(problem.core), np.int64)
    loads = live_loads(problem, order)
    rows = [
        (devices, caps, *blocks_of(problem, row, costs, max(2, int((work / len(devices)) ** 0.5))))
        for devices, caps in _rows_of_devices(problem, int(loads.sum(axis=1).max(initial=0)))
    ]

    def splits(headroom: float) -> Iterator[tuple[int, ...]]:
        for (devices, caps, blocks, block), bottleneck in product(rows, (False, True)):
            found = _core.contiguous_splits(
                problem.core,
                blocks=blocks,
                block=block,
                loads=loads.reshape(-1),
                costs=costs,
                devices=np.array(devices, np.int32),
                caps=np.array([cap - int(cap * headroom) for cap in caps], np.int64),
                allowed=problem.allowed.astype(np.uint8).reshape(-1),
                bottleneck=bottleneck,
            )
            some = np.linspace(0, len(found) - 1, _SPLITS) if found else ()
            for index in sorted({round(i) for i in some}):
                yield tuple(np.array(found[index], np.int32)[block].tolist())

    return splits


def _rows_of_devices(problem: Problem, need: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Orders of the devices and the maximum load of each, for `need` bytes in total.

    The devices of a pool get equal shares of its memory; alternatively, only the fastest of each
    pool is used, with all of it.
    """
    n, times = len(problem.device_pool), problem.device_work
    fastest = [min(row, key=lambda device: times[device]) for row in problem.pool_devices]
    whole = {device: problem.pool_memory[pool] for pool, device in enumerate(fastest)}
    rows: dict[tuple[tuple[int, ...], tuple[int, ...]], None] = {}
    for devices, caps in ((range(n), dict(enumerate(problem.device_share))), (fastest, whole)):
        by_memory = sorted((-caps[device], times[device], device) for device in devices)
        by_speed = sorted((times[device], -caps[device], device) for device in devices)
        for row in ([d for *_, d in by_memory], [d for *_, d in by_speed], sorted(devices)):
            memory = tuple(caps[device] for device in row)
            _, most = device_range(problem, memory, need)
            rows[tuple(row[:most]), memory[:most]] = None
    return list(rows)


def blocks_of(
    problem: Problem, row: tuple[int, ...], costs: NDArray[np.int64], most: int
) -> tuple[int, NDArray[np.int32]]:
    """The number of blocks, at most about `most`, and the block of every group.

    If there are more groups, the row is cut at the cheapest place in each stretch.
    """
    position = np.empty(len(row), np.int64)
    position[list(row)] = np.arange(len(row))
    if len(row) <= most:
        return len(row), position.astype(np.int32)
    first, last = problem.arrays.extents(position[problem.arrays.op_group])
    crossing = np.zeros(len(row) + 1, np.int64)
    # A tensor crosses the cuts before positions first + 1 .. last.
    np.add.at(crossing, first + 1, costs)
    np.subtract.at(crossing, last + 1, costs)
    cuts = np.cumsum(crossing)[: len(row)]
    stretch = -(-len(row) // most)
    starts = np.zeros(len(row), np.int64)
    for begin in range(stretch, len(row), stretch):
        starts[begin + int(cuts[begin : begin + stretch].argmin())] = 1
    block = np.cumsum(starts)
    return int(block[-1]) + 1, block[position].astype(np.int32)
