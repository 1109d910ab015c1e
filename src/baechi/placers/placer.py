"""Base class of placers, and what they share: loads of groups, orders of ops, evaluation.

Some placers first give every group a device. They estimate memory by loads of groups that add up on
a device: with several shares of the outputs (`group_loads`), or at several moments of an order of
the ops (`live_loads`). The clock computes the exact need (`in_both_orders`, `shortest_assignment`).
"""

import itertools
import random
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from baechi import _core
from baechi.problem.problem_arrays import Problem
from baechi.problem.simulation import fits_memory, replay
from baechi.records.placement import Placement
from baechi.validation import FrozenDict

# Shares of every memory to hold back from new groups, tried in order after a dead end: room for
# backward ops, which greedy rules do not foresee.
HEADROOMS: Final = (0.0, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 3 / 8)
# Shares of the outputs that count as if they stayed: none as in inference, all as in training.
_SHARES: Final = ((0, 1), (1, 4), (1, 1))
# Moments of a step at which memory is checked: the work of a split grows with them.
_MOMENTS: Final = 32
# A partition is made for at most this many devices, or for twice as many as it needs.
_DEVICES: Final = 32
# Number of the best assignments that are also rescheduled.
_REORDERED: Final = 8

Stats = Mapping[str, int | float | str]


class Placer(ABC):
    """A rule that places a graph on a cluster; a frozen value whose fields are its parameters.

    Attributes:
        name: As in `Placement.placer` and `solve(..., placer=name)`.
        fixed: Whether the rule determines the placement (one device, an expert's): then `solve`
            neither coarsens the graph first nor searches for another placement if it does not fit.
    """

    __slots__ = ()
    name: ClassVar[str]
    fixed: ClassVar[bool] = False

    @abstractmethod
    def place(self, problem: Problem) -> Placement | None:
        """A valid placement of the problem's graph, or `None` if the rule reaches a dead end.

        A pure function: equal problems give equal placements.
        """


def placement_of(
    problem: Problem, timeline: _core.Timeline, placer: str, stats: Stats | None = None
) -> Placement:
    """The placement of a complete timeline."""
    order, where, _, _ = timeline.span_columns()
    devices = np.empty_like(where)
    devices[order] = where
    if problem.in_use(devices) is not problem:
        timeline = replay(problem, devices.tolist(), order.tolist())
    known = FrozenDict({"makespan_ns": timeline.makespan(), **(stats or {})})
    return Placement(
        problem.source.digest, tuple(devices.tolist()), tuple(order.tolist()), placer, known
    )


def placed_in(
    problem: Problem,
    devices: NDArray[np.int32],
    order: Sequence[int] | NDArray[np.int32],
    placer: str,
    stats: Stats | None = None,
) -> Placement | None:
    """The placement of these devices and order; `None` where an op has no path, or no room."""
    timeline = problem.in_use(devices).timeline()
    stuck = timeline.fold(devices, np.array(order, np.int32))
    if stuck >= 0 or not fits_memory(problem, timeline):
        return None
    return placement_of(problem, timeline, placer, stats)


def in_index_order(problem: Problem, devices: Sequence[int], placer: str) -> Placement | None:
    """The placement of the ops on these devices in index order; `None` if it does not fit.

    Errors are those of `simulate`.
    """
    timeline = replay(problem, devices, range(problem.arrays.ops))
    return placement_of(problem, timeline, placer) if fits_memory(problem, timeline) else None


def timed(problem: Problem, placement: Placement | None) -> Placement | None:
    """The placement with the makespan in its stats, which custom placers may omit."""
    if placement is None or "makespan_ns" in placement.stats:
        return placement
    timeline = replay(problem, placement.devices, placement.order)
    stats = FrozenDict({**placement.stats, "makespan_ns": timeline.makespan()})
    return replace(placement, stats=stats)


def shortest(placements: Iterable[Placement]) -> Placement | None:
    """The first of the placements with the shortest step."""
    return min(placements, key=lambda placement: placement.stats["makespan_ns"], default=None)


def smallest(succeeds: Callable[[int], bool], high: int, low: int = 0, steps: int = 64) -> int:
    """The number that succeeds where one less does not, by bisection.

    `high` is known to succeed, and `low` to fail; after `steps` the best so far is returned.
    """
    while high - low > 1 and steps:
        middle = (max(low, 0) + high) // 2
        low, high = (low, middle) if succeeds(middle) else (middle, high)
        steps -= 1
    return high


def group_loads(problem: Problem) -> tuple[tuple[int, ...], ...]:
    """The bytes of every group, with ever larger shares of its outputs and its workspace."""
    persistent = problem.arrays.group_persistent
    more = np.array(problem.group_bytes, np.int64) - persistent
    return tuple(tuple((persistent + more * a // b).tolist()) for a, b in _SHARES)


def distinct_loads(problem: Problem) -> tuple[tuple[int, ...], ...]:
    """`group_loads` without repetitions; only one where any device holds the whole graph."""
    rows = group_loads(problem)
    if sum(rows[-1]) <= min(problem.pool_memory):
        return rows[-1:]
    return tuple(dict.fromkeys(rows))


def live_loads(problem: Problem, order: Sequence[int], copies: int = 1) -> NDArray[np.int64]:
    """Bytes held by every group at some moments of a step that runs the ops in that order.

    Copies on other devices do not count. The moments are those with the largest sum in `_MOMENTS`
    stretches of the order: a row per moment, a column per group. A single moment without bytes
    where any device holds so many copies of the whole graph.
    """
    n, groups = len(order), len(problem.group_ops)
    if copies * sum(problem.group_bytes) <= min(problem.pool_memory):
        return np.zeros((1, groups), np.int64)
    position = np.empty(n, np.int64)
    position[list(order)] = np.arange(n)
    arrays = problem.arrays
    group, nbytes, owner = arrays.op_group, arrays.nbytes, arrays.producer
    born, last = arrays.extents(position)
    stays = (arrays.kept > 0) | (np.diff(arrays.consumer_begin) == 0)
    dies = np.where(stays, n - 1, last)
    workspace = arrays.workspace[list(order)]
    change = np.zeros(n + 1, np.int64)
    np.add.at(change, born, nbytes)
    np.add.at(change, dies + 1, -nbytes)
    total = np.cumsum(change)[:n] + workspace
    rows = []
    for stretch in np.array_split(np.arange(n), min(n, _MOMENTS)):
        moment = int(stretch[total[stretch].argmax()])
        row = arrays.group_persistent.copy()
        alive = (born <= moment) & (moment <= dies)
        np.add.at(row, group[owner[alive]], nbytes[alive])
        row[group[order[moment]]] += workspace[moment]
        rows.append(row)
    return np.array(rows)


def depth_first(problem: Problem) -> tuple[int, ...]:
    """A topological order that continues with the latest results.

    The op that became ready last is next, and of those the one with the lowest index.
    """
    return _topological(problem, lambda n_ready: n_ready - 1)


def on_demand(problem: Problem) -> tuple[int, ...]:
    """A topological order in which an op runs when a reader of it is next.

    Of the producers of an op those come first that leave the least behind for what they need, as in
    a tree of reductions (Liu, SIAM J. Algebraic Discrete Methods 8, 1987).
    """
    n, arrays = problem.arrays.ops, problem.arrays
    output_bytes = np.zeros(n, np.int64)
    np.add.at(output_bytes, arrays.producer, arrays.nbytes)
    leaves = output_bytes.tolist()
    needs: list[int] = []  # bytes while an op and all that it needs run, were the graph a tree
    producers: list[list[int]] = [[] for _ in range(n)]
    for producer, consumer in np.unique(np.stack(arrays.edges()), axis=1).T.tolist():
        producers[consumer].append(producer)
    for op, row in enumerate(producers):
        row.sort(key=lambda producer: leaves[producer] - needs[producer])
        held = most = 0
        for producer in row:
            most = max(most, held + needs[producer])
            held += leaves[producer]
        needs.append(max(most, held + leaves[op]))
    last = set(range(n)) - set(itertools.chain.from_iterable(producers))
    stack = sorted(last, key=lambda op: (needs[op] - leaves[op], op))
    order: dict[int, None] = {}
    while stack:
        op = stack[-1]
        following = next((p for p in producers[op] if p not in order), None)
        if following is None:
            order.setdefault(stack.pop())
        else:
            stack.append(following)
    return tuple(order)


def shuffled(problem: Problem, seed: int) -> tuple[int, ...]:
    """A random topological order: each op is drawn from those that are ready."""
    draw = random.Random(seed).random  # the same in every version of Python
    return _topological(problem, lambda n_ready: int(draw() * n_ready))


def _topological(problem: Problem, pick: Callable[[int], int]) -> tuple[int, ...]:
    """A topological order; `pick(n)` chooses among n ready ops, the latest being last."""
    producers, consumers = problem.arrays.edges()
    n = problem.arrays.ops
    waiting = np.bincount(consumers, minlength=n).tolist()
    readers: list[list[int]] = [[] for _ in range(n)]
    for producer, consumer in zip(producers.tolist(), consumers.tolist(), strict=True):
        readers[producer].append(consumer)
    ready = [op for op in reversed(range(n)) if not waiting[op]]
    order = []
    while ready:
        op = ready.pop(pick(len(ready)))
        order.append(op)
        for reader in sorted(readers[op], reverse=True):
            waiting[reader] -= 1
            if not waiting[reader]:
                ready.append(reader)
    return tuple(order)


def op_devices(problem: Problem, assignment: Sequence[int]) -> NDArray[np.int32]:
    """The device of every op, where every group has one."""
    return np.array(assignment, np.int32)[problem.arrays.op_group]


def in_both_orders(problem: Problem, assignment: Sequence[int], placer: str) -> Iterator[Placement]:
    """The placements of an assignment in index order and in list order, where they fit.

    Nothing where it uses too many devices.
    """
    if len(set(assignment)) > problem.most_devices:
        return
    devices = op_devices(problem, assignment)
    placement = placed_in(problem, devices, range(len(devices)), placer)
    if placement is not None:
        yield placement
    timeline = _reserved(problem, devices)
    if timeline.list_schedule(np.empty(0, np.int32)) and fits_memory(problem, timeline):
        yield placement_of(problem, timeline, placer)


def _reserved(problem: Problem, devices: NDArray[np.int32]) -> _core.Timeline:
    """A timeline in which every group has its device."""
    timeline = problem.timeline()
    for ops in problem.group_ops:
        timeline.reserve(ops[0], int(devices[ops[0]]))
    return timeline


def is_allowed(problem: Problem, devices: NDArray[np.int32]) -> bool:
    """True if every op may be on its device, and the number of devices is within the limit."""
    there = problem.allowed[devices, problem.arrays.op_group]
    return bool(there.all()) and len(set(devices.tolist())) <= problem.most_devices


def device_range(problem: Problem, memory: Sequence[int], need: int) -> tuple[int, int]:
    """The fewest first devices, of these bytes, that hold `need`, and the most devices to try."""
    most = min(problem.most_devices, len(memory))
    fewest = min(most, 1 + bisect_left(list(accumulate(memory[:most])), need))
    return fewest, min(most, max(_DEVICES, 2 * fewest))


def shortest_assignment(
    problem: Problem,
    candidates: Mapping[tuple[int, ...], Sequence[int]],
    placer: str,
    reordered: int | None = None,
) -> Placement | None:
    """The placement with the shortest step of some assignments, by the exact clock.

    The candidates are devices of all groups, each with a topological order of the ops. Each is
    tried in its order, and the best ones, fitting or not, also by earliest start and by upward
    rank: at most `reordered`; `None` is the `_REORDERED` best, and all as long as nothing fits.
    """
    rated: list[tuple[int, NDArray[np.int32]]] = []
    best: _core.Timeline | None = None
    for assignment, order in candidates.items():
        devices = op_devices(problem, assignment)
        if not is_allowed(problem, devices):
            continue
        timeline = problem.timeline()
        if timeline.fold(devices, np.array(order, np.int32)) >= 0:
            continue
        rated.append((timeline.makespan(), devices))
        shorter = best is None or timeline.makespan() < best.makespan()
        if shorter and fits_memory(problem, timeline):
            best = timeline
    rated.sort(key=lambda row: row[0])
    ranks = np.array(_core.upward_ranks(problem.core), np.int64)
    schedules: tuple[Callable[[_core.Timeline], bool], ...] = (
        lambda timeline: timeline.list_schedule(np.empty(0, np.int32)),
        lambda timeline: timeline.ranked_schedule(ranks, np.empty(0, np.int64)),
    )
    for number, (_, devices) in enumerate(rated[:reordered]):
        if number >= _REORDERED and best is not None:
            break
        for schedule in schedules:
            timeline = _reserved(problem, devices)
            if schedule(timeline) and (best is None or timeline.makespan() < best.makespan()):
                best = timeline
    return None if best is None else placement_of(problem, best, placer)
