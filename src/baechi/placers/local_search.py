"""Local search over placements, from several starts (`docs/solver.md`).

Simulated annealing (Kirkpatrick, Gelatt, Vecchi, Science 220, 1983) of a device for every group and
an order of all ops (`csrc/search/local_search.cc`), from other placers' placements, list schedules
of clusters (`csrc/coarsening/clusters.cc`), partitions (`csrc/search/partition_search.cc`) and,
when thorough, placements grown along time (`csrc/search/growth.cc`). The budget is shared by
successive halving (Karnin, Koren, Somekh, ICML 2013), and counted in evaluated ops; the searches of
one stage run in separate threads. An evaluation costs O((ops + tensors) log tensors) at most, and
usually a fraction.
"""

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from typing import ClassVar, Final, final

import numpy as np
from numpy.typing import NDArray

from baechi import _core
from baechi.placers.device_choice import MOST_USED, used_devices
from baechi.placers.list_schedulers import HEFT, METF
from baechi.placers.placer import Placer, distinct_loads, placed_in, shortest, timed
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
# A step proved to be within this fraction of the optimum is good enough, and a smaller gain none.
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

# Devices (of the space) and order of all ops.
_Start = tuple[NDArray[np.int32], NDArray[np.int32]]


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
        patience: Number of stages after which the search ends if it has made the best start
            shorter by less than a `_CLOSE`th.
    """

    evaluations: int
    per_op: int
    stages: tuple[tuple[int, float], ...]
    levels: int
    partitions: int
    moves: int
    growths: tuple[int, float] = (0, 0.0)
    patience: int = 3


FAST: Final = Budget(300_000, 3_000, ((3, 1 / 6), (1, 1 / 2)), 2, 2, 20)
BALANCED: Final = Budget(
    60_000_000, 60_000, ((8, 1 / 32), (2, 1 / 8), (2, 1 / 4)), 16, 6, 400, patience=2
)
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
        chosen = shortest(found if better is None else [*found, better])
        return None if chosen is None else replace(chosen, placer=self.name)


def improved(problem: Problem, placements: Sequence[Placement], budget: Budget) -> Placement | None:
    """The best placement found by a search from these and other starts.

    `None` if none is found that fits, a start is within a `_CLOSE`th of the lower bound, or the
    search does not pay; also with a limit on the number of devices, for which `solve` tries one
    choice of devices at a time.
    """
    n = problem.arrays.ops
    # The cost of an op grows with its inputs.
    density = max(1, len(problem.arrays.consumers) // (_INPUTS * max(1, n)))
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
    devices = np.flatnonzero(problem.allowed.any(axis=1))
    if len(devices) > MOST_USED:
        devices = np.array(used_devices(problem, placements) or devices)
    too_large = problem.arrays.tensors * len(devices) > _SIZE
    if too_large or (len(devices) == 1 and placements):
        return None
    halt = _core.Halt()  # ends all searches when closed: an interrupt does not wait for them
    workers = min(budget.stages[0][0], os.cpu_count() or 1)
    with ThreadPoolExecutor(workers) as threads, closing(halt):
        space = _Space(problem, devices.astype(np.int32), target, threads, halt)
        states = space.evaluated(space.starts(placements, budget))
        spent, left, start = 0, 1.0, states[0]
        for stage, (count, share) in enumerate(budget.stages):
            if states[0].overflow_bytes == 0 and states[0].makespan_ns <= target:
                break
            gained_ns = start.makespan_ns - states[0].makespan_ns
            stalls = stage >= budget.patience and gained_ns * _CLOSE < start.makespan_ns
            if stalls and start.overflow_bytes == 0:
                break
            each = int(evaluations * share * left)
            found = space.searched(states[:count], each, seed=stage * 1000)
            spent += sum(state.evaluations for state in found)
            states = space.ranked([*found, *states])
            if stage == 0 and budget.growths[0]:
                grown, cost = space.grown(states[0], budget.growths, evaluations)
                spent += cost
                states = space.ranked([*states, *grown])
                left -= cost / sum(evaluations * n * part for n, part in budget.stages[1:])
    if states[0].overflow_bytes:
        return None
    where = space.devices[states[0].devices]
    return placed_in(problem, where, states[0].order, LocalSearch.name, {"evaluations": spent})


@final
@dataclass(frozen=True, eq=False)
class _State:
    """A placement in the space, with its time and memory, and the cost of finding it."""

    devices: NDArray[np.int32]
    order: NDArray[np.int32]
    makespan_ns: int
    overflow_bytes: int
    evaluations: int


@final
class _Space:
    """A problem on the devices to search; a device of the space is an index into them."""

    def __init__(
        self,
        problem: Problem,
        devices: NDArray[np.int32],
        target: int,
        threads: Executor,
        halt: _core.Halt,
    ) -> None:
        self.devices = devices
        self._problem = problem
        whole = len(devices) == len(problem.device_pool)
        self._core = problem.core if whole else _core.restricted(problem.core, devices)
        self._clusters = _core.group_clusters(self._core, problem.group_colors)
        self._target, self._threads, self._halt = target, threads, halt

    def starts(self, placements: Sequence[Placement], budget: Budget) -> list[_Start]:
        """Devices and order of every start, the given ones first."""
        index = np.full(len(self._problem.device_pool), -1, np.int32)
        index[self.devices] = np.arange(len(self.devices), dtype=np.int32)
        rows: list[_Start] = []
        for placement in sorted(placements, key=lambda p: p.stats["makespan_ns"]):
            devices = index[np.array(placement.devices, np.int64)]
            if devices.min(initial=0) >= 0:
                rows.append((devices, np.array(placement.order, np.int32)))
        if len(self.devices) > 1:
            rows += self._clustered(budget.levels)
        if not rows:
            # Every group on its first allowed device.
            first = self._problem.allowed[self.devices].argmax(axis=0)
            devices = first[self._problem.arrays.op_group].astype(np.int32)
            rows.append((devices, _core.list_order(self._core, devices)))
        if len(self.devices) > 1:
            rows += self._partitions(rows[0][0], budget)
        return rows

    def _clustered(self, levels: int) -> list[_Start]:
        """Earliest-task-first schedules that keep the groups of a cluster together."""
        rows = []
        for cluster in self._clusters[1 : 1 + levels]:
            timeline = _core.Timeline(_core.regrouped(self._core, cluster))
            if timeline.list_schedule(np.empty(0, np.int32)):
                op, device, _, _ = timeline.span_columns()
                devices = np.empty(len(op), np.int32)
                devices[op] = device
                rows.append((devices, np.asarray(op, np.int32)))
        return rows

    def _partitions(self, devices: NDArray[np.int32], budget: Budget) -> list[_Start]:
        loads = [np.array(row, np.int64) for row in distinct_loads(self._problem)]
        most = budget.evaluations // (2 * max(1, budget.partitions))
        moves = min(most, max(budget.moves * len(self._problem.group_ops), _MOVES))

        def start(number: int) -> _Start:
            windows, weight = _SHAPES[number % len(_SHAPES)]
            load = loads[number // len(_SHAPES) % len(loads) - 1]
            rest = (load, weight, windows, moves, number, self._halt)
            found = _core.partition_search(self._core, devices, self._clusters, *rest)
            return found, _core.list_order(self._core, found)

        return list(self._threads.map(start, range(budget.partitions)))

    def grown(
        self, best: _State, growths: tuple[int, float], evaluations: int
    ) -> tuple[list[_State], int]:
        """Placements grown along time, and their cost; only the cheap ones if none is better."""
        n, devices = self._problem.arrays.ops, len(self.devices)
        states: list[_State] = []
        spent = 0
        count, share = growths
        for number, part in ((count // 2, share / 2), (count, share)):
            each = int(evaluations * part)
            stretches = [devices * ops for ops in _STRETCHES[:number] if devices > 1]
            worth = [ops for ops in stretches if ops < n and each * ops > _WORTH * n * n]
            calls = [
                (self._core, self._clusters, ops, each, 1000 * at, self._halt)
                for at, ops in enumerate(worth)
            ]
            found = list(self._threads.map(lambda call: _core.grown(*call), calls))
            spent += sum(cost for _, _, cost in found)
            rows = [(devices, order) for devices, order, _ in found if len(devices)]
            states = self.ranked([*states, *self.evaluated(rows)])
            if not states or self.ranked([best, states[0]])[0] is best:
                break
        return states, spent

    def evaluated(self, starts: Iterable[_Start]) -> list[_State]:
        """The different starts, the best first."""
        different: dict[bytes, _State] = {}
        for devices, order in starts:
            different.setdefault(devices.tobytes(), _State(devices, order, 0, 0, 0))
        return self.ranked(self.searched(list(different.values()), 0, 0))

    def searched(self, states: Sequence[_State], evaluations: int, seed: int) -> list[_State]:
        """The best states found by a search from each, in threads."""

        def search(state: _State, seed: int) -> _State:
            rest = (self._clusters, evaluations, self._target, seed, self._halt)
            return _State(*_core.local_search(self._core, state.devices, state.order, *rest))

        return list(self._threads.map(search, states, range(seed, seed + len(states))))

    def ranked(self, states: Iterable[_State]) -> list[_State]:
        """Best first; overflowing ones count as longer by twice the missing share of memory."""
        memory = max(1, sum(self._problem.pool_memory))

        def rank(state: _State) -> tuple[bool, float]:
            price = 1 + 2 * len(self.devices) * state.overflow_bytes / memory
            return state.overflow_bytes > 0, state.makespan_ns * price

        return sorted(states, key=rank)
