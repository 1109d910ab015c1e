"""Placements that are found by packing memory, for when greedy rules meet a dead end.

Static loads of groups are packed into devices, and every assignment found is checked with the exact
clock, in index order and in list order. The searches, from cheap to dear (`arrangements`):

1. everything on one device; m-TOPO with and without its cap; m-ETF;
2. packings (`packings`): loads of persistent bytes plus a share of all outputs, laid contiguously
   in topological order or best fit decreasing, under the smallest common fill of the devices with
   which everything has a place, and under looser ones;
3. where groups and devices are few, every assignment (`_every_assignment`).

So it finds what first fit, bin packing or, on small problems, backtracking over assignments find.
Complexity: some tens of simulations and 2 * `_ASSIGNMENTS` small ones.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, final

from baechi.bounds import running_bytes
from baechi.placement import Placement
from baechi.placers.assignments import group_loads, in_both_orders, shortest
from baechi.placers.base import Placer
from baechi.placers.baselines import SingleDevice
from baechi.placers.etf import METF
from baechi.placers.topo import MTopo
from baechi.problem import Problem

# Fills of the devices are tried in steps of 1 / _STEPS of their memory.
_STEPS: Final = 64
# All assignments are tried up to this number of them: a second or so.
_ASSIGNMENTS: Final = 2048


@final
@dataclass(frozen=True, slots=True)
class Packing(Placer):
    """The shortest step of all packings that fit."""

    name: ClassVar[str] = "packing"

    def place(self, problem: Problem) -> Placement | None:
        """As the class says."""
        return shortest(packings(problem))


def arrangements(problem: Problem) -> Iterator[Placement]:
    """Valid placements, as the module says; none where none of its searches finds one."""
    if _is_hopeless(problem):
        return
    found = False
    held = sum(problem.group_persistent)
    singles = [
        SingleDevice(device)
        for device, row in enumerate(problem.cluster.devices)
        if held <= row.memory_bytes
    ]
    for placer in (*singles, MTopo(), MTopo(capped=False), METF()):
        placement = placer.place(problem)
        if placement is not None:
            found = True
            yield placement
    for placement in packings(problem):
        found = True
        yield placement
    if not found:
        yield from _every_assignment(problem)


def packings(problem: Problem) -> Iterator[Placement]:
    """The packings that fit."""
    seen = set()
    for loads in group_loads(problem):
        for pack in (_contiguous, _best_fit):
            for assignment in _fillings(problem, loads, pack):
                if assignment not in seen:
                    seen.add(assignment)
                    yield from in_both_orders(problem, assignment, Packing.name)


# From a problem, loads of groups and caps of pools to a device per group.
_Pack = Callable[[Problem, Sequence[int], Sequence[int]], tuple[int, ...] | None]


def _fillings(problem: Problem, loads: Sequence[int], pack: _Pack) -> Iterator[tuple[int, ...]]:
    """What `pack` finds at the smallest fill of the devices where it finds anything, and above."""

    def packed(fill: int) -> tuple[int, ...] | None:
        return pack(problem, loads, [memory * fill // _STEPS for memory in problem.pool_memory])

    # More than the memory may be laid there, since not all of it is there at the same time.
    low, high = 0, 4 * _STEPS
    if packed(high) is None:
        return
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if packed(middle) else (middle, high)
    for fill in sorted({high, (high + _STEPS) // 2, max(high, _STEPS)}):
        assignment = packed(fill)
        if assignment is not None:
            yield assignment


def _contiguous(
    problem: Problem, loads: Sequence[int], caps: Sequence[int]
) -> tuple[int, ...] | None:
    """Groups in the order of their first op, to device after device; a full one is left."""
    assignment = []
    device = 0
    filled = [0] * len(caps)
    for load in loads:
        while filled[problem.device_pool[device]] + load > caps[problem.device_pool[device]]:
            device += 1
            if device == len(problem.device_pool):
                return None
        filled[problem.device_pool[device]] += load
        assignment.append(device)
    return tuple(assignment)


def _best_fit(
    problem: Problem, loads: Sequence[int], caps: Sequence[int]
) -> tuple[int, ...] | None:
    """The largest group first, to the pool where it leaves the least room."""
    assignment = [0] * len(loads)
    room = list(caps)
    for group in sorted(range(len(loads)), key=lambda group: (-loads[group], group)):
        fitting = [pool for pool, left in enumerate(room) if left >= loads[group]]
        if not fitting:
            return None
        pool = min(fitting, key=lambda pool: room[pool])
        room[pool] -= loads[group]
        assignment[group] = problem.pool_devices[pool][0]
    return tuple(assignment)


def _every_assignment(problem: Problem) -> Iterator[Placement]:
    """All assignments of groups to devices whose persistent bytes fit, if they are few."""
    n, groups = len(problem.device_pool), len(problem.group_ops)
    if n**groups > _ASSIGNMENTS:
        return
    for assignment in itertools.product(range(n), repeat=groups):
        held = [0] * len(problem.pool_memory)
        for group, device in enumerate(assignment):
            held[problem.device_pool[device]] += problem.group_persistent[group]
        if all(h <= m for h, m in zip(held, problem.pool_memory, strict=True)):
            yield from in_both_orders(problem, assignment, Packing.name)


def _is_hopeless(problem: Problem) -> bool:
    """Whether a group is too large for every pool, or all of them are for all pools together."""
    largest = max(problem.pool_memory)
    if sum(problem.group_persistent) > sum(problem.pool_memory):
        return True
    fastest = problem.durations.min(axis=0)
    for persistent, ops in zip(problem.group_persistent, problem.group_ops, strict=True):
        running = max((running_bytes(problem, op) for op in ops if fastest[op]), default=0)
        if persistent + running > largest:
            return True
    return False
