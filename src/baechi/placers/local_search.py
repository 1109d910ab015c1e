"""Local search over placements, from several starts.

A state is a device for every group and an order of all ops; the clock computes its time and memory.
A move is a small change: a group, a cluster of groups, or a run of a device's ops goes to another
device (which shifts the boundary between two devices), two groups swap devices, or an op launches
earlier or later. It is kept if the step gets shorter, or not much longer (simulated annealing:
Kirkpatrick, Gelatt, Vecchi, Science 220, 1983). A placement may exceed the memory meanwhile, at a
price that rises while it does, because where memory is tight hardly any single move fits. In a part
of every cycle the order is rebuilt after each change of devices, by list scheduling along the
critical path with the ports of the clock (`csrc/search/list_order.cc`), so that devices are
found first and the order afterwards (`csrc/search/local_search.cc`).

Starts are placements from other placers; list schedules that place whole clusters
(`csrc/coarsening/clusters.cc`); partitions of the groups that balance work and transfers regardless
of order, also found by annealing (`csrc/search/partition_search.cc`), for several weights of
transfers and several time windows; and, when thorough, placements grown along time, whose
beginning is annealed before more ops are added (`csrc/search/growth.cc`). All get a little of the
budget, the better ones more, and the best most of it (`Budget`): successive halving (Karnin,
Koren, Somekh, ICML 2013).

Everything is seeded, and the budget is counted in evaluated ops, so equal input gives equal output;
the searches of one stage run in separate threads. An evaluation costs O((ops + tensors) log
tensors) at most, and usually a fraction, since it resumes from the first change and ends as soon
as the step is known to be too long.
"""

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import ClassVar, Final, final

import numpy as np
from numpy.typing import NDArray

from baechi import _core
from baechi.placers.device_choice import MOST_USED, used_devices
from baechi.placers.etf import METF
from baechi.placers.heft import HEFT
from baechi.placers.placer import Placer, distinct_loads, placed_in, timed
from baechi.problem.bounds import lower_bound_ns
from baechi.problem.problem_arrays import Problem
from baechi.records.placement import Placement

# Evaluations of a whole step below which a search does not pay.
_WORTH: Final = 20
# Minimum number of moves of a partition, some milliseconds.
_MOVES: Final = 30_000
# Graphs with fewer ops get proportionally fewer evaluations per op; but at least so many, a tenth
# of a second, or so many times the ops squared for the smallest, if that is at most this share of
# the budget for large ones.
_TINY: Final = 50
_ENOUGH: Final = 6_000_000
_SQUARED: Final = 10_000
_SHARE: Final = 10
# A step proved to be within this fraction of the optimum is good enough.
_CLOSE: Final = 2_000
# Mean inputs per op above which the evaluation of an op counts for several.
_INPUTS: Final = 4
# Tensors times devices, at 40 bytes each, above which a search takes too much memory.
_SIZE: Final = 2**22
# Numbers of time windows in which a partition balances the work, and ns of work that a ns of
# transfer counts as: the first where transfers overlap with work, the second where they are slow.
_SHAPES: Final = ((4, 1.0), (1, 1.0), (4, 3.0), (1, 3.0), (4, 0.3), (16, 3.0))


# Ops per device added at once, for each growth.
_STRETCHES: Final = (12, 12, 16, 8)


@final
@dataclass(frozen=True, slots=True)
class Budget:
    """Effort of a search.

    Attributes:
        evaluations: Maximum number of op evaluations; about a hundred million in ten seconds.
        per_op: The same per op of the graph: a small graph needs less.
        stages: Number of searches and share of the budget of each, per stage; the cost of
            growing is taken from the stages after the first.
        levels: Maximum number of cluster levels for list schedules to start from.
        partitions: Number of partitions to start from.
        moves: Moves per group and partition; at least `_MOVES`, and at most half the
            evaluations for all partitions.
        growths: Number of placements to grow, at most one per `_STRETCHES`, and share of the budget
            of each; half as many are grown first at half the cost, and must beat the first stage.
    """

    evaluations: int
    per_op: int
    stages: tuple[tuple[int, float], ...]
    levels: int
    partitions: int
    moves: int
    growths: tuple[int, float] = (0, 0.0)


FAST: Final = Budget(300_000, 3_000, ((3, 1 / 6), (1, 1 / 2)), 2, 2, 20)
BALANCED: Final = Budget(60_000_000, 60_000, ((8, 1 / 32), (2, 1 / 8), (2, 1 / 4)), 16, 12, 400)
THOROUGH: Final = Budget(
    1_800_000_000,
    2_400_000,
    ((32, 1 / 128), (6, 1 / 24), (2, 1 / 4)),
    16,
    24,
    4_000,
    growths=(4, 1 / 16),
)


@final
@dataclass(frozen=True, slots=True)
class LocalSearch(Placer):
    """The best placement found by a search from other placers' placements.

    Attributes:
        starts: The placers.
        budget: Effort of the search.
    """

    name: ClassVar[str] = "local-search"
    starts: tuple[Placer, ...] = (METF(), HEFT())
    budget: Budget = BALANCED

    def place(self, problem: Problem) -> Placement | None:
        """The best placement found; never worse than the starts."""
        placements = [timed(problem, placer.place(problem)) for placer in self.starts]
        found = [placement for placement in placements if placement is not None]
        better = improved(problem, found, self.budget)
        chosen = min(
            [*found, *([] if better is None else [better])],
            key=lambda placement: placement.stats["makespan_ns"],
            default=None,
        )
        return None if chosen is None else replace(chosen, placer=self.name)


def improved(problem: Problem, placements: Sequence[Placement], budget: Budget) -> Placement | None:
    """The best placement found by a search from these and other starts.

    `None` if none is found that fits, or if nothing can be improved: there are no ops, or a start
    is within a `_CLOSE`th of the lower bound.

    Args:
        problem: Graph and cluster.
        placements: Valid placements, if any.
        budget: Effort of the search. Graphs for which it allows at most `_WORTH` evaluations of the
            whole step are skipped; so are problems with a limit on the number of devices, for which
            `solve` tries one choice of devices at a time.
    """
    n = len(problem.graph.ops)
    # The cost of an op grows with its inputs.
    density = max(1, len(problem.graph.arrays.consumers) // (_INPUTS * max(1, n)))
    budget = replace(
        budget,
        evaluations=budget.evaluations // density,
        per_op=budget.per_op // density,
        moves=budget.moves // density,
    )
    some = min(budget.evaluations, budget.per_op * n)
    enough = min(max(some, budget.evaluations // _SHARE), _ENOUGH, _SQUARED * n * n)
    evaluations = max(enough, some * min(n, _TINY) // _TINY)
    least = min((int(p.stats["makespan_ns"]) for p in placements), default=None)
    bound = lower_bound_ns(problem)
    target = bound + bound // _CLOSE
    if evaluations <= _WORTH * n or problem.max_devices or (least is not None and least <= target):
        return None
    space = _Space.of(problem, placements)
    too_large = len(problem.graph.tensors) * len(space.devices) > _SIZE
    if too_large or (len(space.devices) == 1 and placements):
        return None
    workers = min(budget.stages[0][0], os.cpu_count() or 1)
    with ThreadPoolExecutor(workers) as threads, closing(space.halt):
        states = space.evaluated(space.starts(placements, budget, threads), target)
        spent, left = 0, 1.0
        for stage, (count, share) in enumerate(budget.stages):
            if _is_optimal(states[0], target):
                break
            jobs = states[:count]
            each = int(evaluations * share * left)
            results = threads.map(
                lambda job, each=each, stage=stage: space.searched(
                    job[1], each, target, seed=stage * 1000 + job[0]
                ),
                enumerate(jobs),
            )
            found = list(results)
            spent += sum(state.evaluations for state in found)
            states = space.ranked([*found, *states])
            if stage == 0 and budget.growths[0]:
                grown, cost = _grown(space, states[0], budget.growths, evaluations, target, threads)
                spent += cost
                states = space.ranked([*states, *grown])
                left -= cost / sum(evaluations * n * part for n, part in budget.stages[1:])
    if states[0].overflow_bytes:
        return None
    devices = space.devices[states[0].devices]
    return placed_in(problem, devices, states[0].order, LocalSearch.name, {"evaluations": spent})


def _grown(
    space: "_Space",
    best: "_State",
    growths: tuple[int, float],
    evaluations: int,
    target: int,
    threads: Executor,
) -> "tuple[list[_State], int]":
    """Grown placements and their cost; only the first, cheap ones if none of them is better."""
    states: list[_State] = []
    spent = 0
    count, share = growths
    for number, part in ((count // 2, share / 2), (count, share)):
        rows, cost = space.grown(number, int(evaluations * part), threads)
        spent += cost
        states = space.ranked([*states, *space.evaluated(rows, target)])
        if not states or space.ranked([best, states[0]])[0] is best:
            break
    return states, spent


@final
@dataclass(frozen=True, eq=False)
class _State:
    """Devices (of the space) and order of all ops, with their time and memory."""

    devices: NDArray[np.int32]
    order: NDArray[np.int32]
    makespan_ns: int
    overflow_bytes: int
    evaluations: int


def _is_optimal(state: _State, target: int) -> bool:
    return state.overflow_bytes == 0 and state.makespan_ns <= target


@final
@dataclass(frozen=True, eq=False)
class _Space:
    """A problem on the devices to search.

    Attributes:
        problem: The problem with all devices.
        devices: The devices to search; a device of the space is an index into them.
        core: The problem with only these.
        clusters: Clusters of groups per level.
        halt: Ends all searches when closed, so that an interrupt does not wait for them.
    """

    problem: Problem
    devices: NDArray[np.int32]
    core: _core.Problem
    clusters: list[NDArray[np.int32]]
    halt: _core.Halt = field(default_factory=_core.Halt)

    @staticmethod
    def of(problem: Problem, placements: Iterable[Placement]) -> "_Space":
        """The space of all devices if they are few, or else of those that the placements use."""
        n = len(problem.device_pool)
        devices = np.flatnonzero(problem.allowed.any(axis=1))
        if len(devices) > MOST_USED:
            devices = np.array(used_devices(problem, placements) or devices)
        searched = np.array(devices, np.int32)
        core = problem.core if len(searched) == n else _core.restricted(problem.core, searched)
        return _Space(problem, searched, core, _core.group_clusters(core, problem.group_colors))

    def starts(
        self, placements: Sequence[Placement], budget: Budget, threads: Executor
    ) -> list[tuple[NDArray[np.int32], NDArray[np.int32]]]:
        """Devices and order of every start, the given ones first."""
        index = np.full(len(self.problem.device_pool), -1, np.int32)
        index[self.devices] = np.arange(len(self.devices), dtype=np.int32)
        rows = []
        for placement in sorted(placements, key=lambda p: p.stats["makespan_ns"]):
            devices = index[np.array(placement.devices, np.int64)]
            if devices.min(initial=0) >= 0:
                rows.append((devices, np.array(placement.order, np.int32)))
        if len(self.devices) > 1:
            rows += self._clustered(budget.levels)
        if not rows:
            devices = self._anywhere()
            rows.append((devices, _core.list_order(self.core, devices)))
        if len(self.devices) > 1:
            rows += self._partitions(rows[0][0], budget, threads)
        return rows

    def _clustered(self, levels: int) -> list[tuple[NDArray[np.int32], NDArray[np.int32]]]:
        """Earliest-task-first schedules that keep the groups of a cluster together."""
        rows = []
        n = len(self.problem.graph.ops)
        for cluster in self.clusters[1 : 1 + levels]:
            timeline = _core.Timeline(_core.regrouped(self.core, cluster))
            if timeline.list_schedule(np.empty(0, np.int32)):
                op, device, _, _ = timeline.span_columns()
                devices = np.empty(n, np.int32)
                devices[op] = device
                rows.append((devices, np.asarray(op, np.int32)))
        return rows

    def _anywhere(self) -> NDArray[np.int32]:
        """Every group on its first allowed device."""
        first = self.problem.allowed[self.devices].argmax(axis=0)
        return np.asarray(first[np.array(self.problem.op_group, np.int64)], np.int32)

    def _partitions(
        self, devices: NDArray[np.int32], budget: Budget, threads: Executor
    ) -> list[tuple[NDArray[np.int32], NDArray[np.int32]]]:
        loads = [np.array(row, np.int64) for row in distinct_loads(self.problem)]
        most = budget.evaluations // (2 * max(1, budget.partitions))
        moves = min(most, max(budget.moves * len(self.problem.group_ops), _MOVES))

        def start(number: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
            windows, weight = _SHAPES[number % len(_SHAPES)]
            load = loads[number // len(_SHAPES) % len(loads) - 1]
            found = _core.partition_search(
                self.core, devices, self.clusters, load, weight, windows, moves, number, self.halt
            )
            return found, _core.list_order(self.core, found)

        return list(threads.map(start, range(budget.partitions)))

    def grown(
        self, count: int, evaluations: int, threads: Executor
    ) -> tuple[list[tuple[NDArray[np.int32], NDArray[np.int32]]], int]:
        """Devices and order of placements grown along time, and their total cost.

        None if one stretch holds all ops, or if the budget of each would be too small.

        Args:
            count: Number of placements.
            evaluations: Approximate evaluations of each.
            threads: Number of threads.
        """
        n = len(self.problem.graph.ops)
        stretches = [len(self.devices) * ops for ops in _STRETCHES[:count] if len(self.devices) > 1]
        worth = [ops for ops in stretches if ops < n and evaluations * ops > _WORTH * n * n]

        def grow(number: int) -> tuple[NDArray[np.int32], NDArray[np.int32], int]:
            budget = (worth[number], evaluations, number * 1000, self.halt)
            return _core.grown(self.core, self.clusters, *budget)

        found = list(threads.map(grow, range(len(worth))))
        rows = [(devices, order) for devices, order, _ in found if len(devices)]
        return rows, sum(cost for _, _, cost in found)

    def evaluated(
        self, starts: Iterable[tuple[NDArray[np.int32], NDArray[np.int32]]], target: int
    ) -> list[_State]:
        """The different starts, the best first."""
        states = {}
        for devices, order in starts:
            key = devices.tobytes()
            if key not in states:
                states[key] = self.searched(_State(devices, order, 0, 0, 0), 0, target, seed=0)
        return self.ranked(states.values())

    def searched(self, state: _State, evaluations: int, target: int, *, seed: int) -> _State:
        """The best state found by a search from a state."""
        start = (state.devices, state.order, self.clusters, evaluations, target, seed, self.halt)
        return _State(*_core.local_search(self.core, *start))

    def ranked(self, states: Iterable[_State]) -> list[_State]:
        """Best first; overflowing ones count as longer by twice the missing share of memory."""
        memory = max(1, sum(self.problem.pool_memory))

        def rank(state: _State) -> tuple[bool, float]:
            price = 1 + 2 * len(self.devices) * state.overflow_bytes / memory
            return state.overflow_bytes > 0, state.makespan_ns * price

        return sorted(states, key=rank)
