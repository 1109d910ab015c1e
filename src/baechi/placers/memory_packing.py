"""Placements by memory packing, for problems where greedy rules reach a dead end.

Static loads of groups are packed into devices, and every assignment found is checked with the exact
clock, in index order and in list order. The searches, in order of cost (`arrangements`):

1. everything on one device; m-TOPO with and without its cap; m-ETF;
2. packings (`packings`): loads of persistent bytes plus a share of all outputs, packed contiguously
   or by best fit decreasing, at the smallest common fill level that suffices and at higher ones;
3. backtracking over devices with the exact clock (`backtracked`; `docs/solver.md`, "Infeasible
   problems").
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar, Final, final

import numpy as np

from baechi import _core
from baechi.placers.baselines import MTopo, SingleDevice
from baechi.placers.list_schedulers import METF
from baechi.placers.placer import (
    Placer,
    depth_first,
    group_loads,
    in_both_orders,
    op_devices,
    placed_in,
    shortest,
    shuffled,
    smallest,
)
from baechi.problem.problem_arrays import Problem
from baechi.records.placement import Placement

# Fill levels of the devices are tried in steps of 1 / _STEPS of their memory.
_STEPS: Final = 64
# A proof that groups cannot be packed is attempted if they fill at least this much of the memory.
_TIGHT: Final = 3 / 4
# Only groups larger than this part of the largest memory are counted.
_LARGE: Final = 8
# Budget of a whole search, in committed ops and examined groups: a fifth of a second.
PATIENT: Final = 1_000_000
# The same for each of many searches, when computing the missing memory.
HASTY: Final = 50_000
# Number of random orders, and the most ops to try them for: a search of few ops ends early.
_RANDOM: Final = 32
_FEW_OPS: Final = 64
# Budget of a proof, which comes before anything else: some milliseconds.
_PROOF: Final = 200_000
# Budget below which nothing is proved.
_NODES: Final = 100
_SEED: Final = 1


@final
@dataclass(frozen=True, slots=True)
class Packing(Placer):
    """The shortest step of all packings that fit."""

    name: ClassVar[str] = "packing"

    def place(self, problem: Problem) -> Placement | None:
        """A placement by the rule of the class."""
        return shortest(packings(problem))


def arrangements(problem: Problem, patience: int = PATIENT) -> Iterator[Placement]:
    """Valid placements from the module's searches, in their order; empty if all fail.

    `patience` is the budget of each backtracking.
    """
    if is_hopeless(problem):
        return
    held = problem.arrays.group_persistent.sum()
    singles = [
        SingleDevice(device)
        for device in problem.free_devices
        if held <= problem.device_memory[device]
    ]
    greedy = (*singles, MTopo(), MTopo(capped=False), METF())
    found = False
    for placement in chain((placer.place(problem) for placer in greedy), packings(problem)):
        if placement is not None:
            found = True
            yield placement
    if not found:
        yield from backtracked(problem, Packing.name, patience)


def packings(problem: Problem) -> Iterator[Placement]:
    """The packings that fit."""
    seen = set()
    for loads in group_loads(problem):
        for pack in (_contiguous, _best_fit):
            for assignment in _fillings(problem, loads, pack):
                if assignment not in seen:
                    seen.add(assignment)
                    yield from in_both_orders(problem, assignment, Packing.name)


# A function from a problem, loads of groups and caps of pools to a device per group.
_Pack = Callable[[Problem, Sequence[int], Sequence[int]], tuple[int, ...] | None]


def _fillings(problem: Problem, loads: Sequence[int], pack: _Pack) -> Iterator[tuple[int, ...]]:
    """Packings at the smallest fill level of the devices at which `pack` succeeds, and above."""

    def packed(fill: int) -> tuple[int, ...] | None:
        return pack(problem, loads, [memory * fill // _STEPS for memory in problem.pool_memory])

    # Fill levels may exceed the memory, since not all loads are there at the same time.
    if packed(4 * _STEPS) is None:
        return
    high = smallest(lambda fill: bool(packed(fill)), 4 * _STEPS)
    for fill in sorted({high, (high + _STEPS) // 2, max(high, _STEPS)}):
        assignment = packed(fill)
        if assignment is not None:
            yield assignment


def _contiguous(
    problem: Problem, loads: Sequence[int], caps: Sequence[int]
) -> tuple[int, ...] | None:
    """Groups in the order of their first op, to one device after another; a full one is closed.

    A group that may not use the current device goes to the next allowed one with room, or else to
    the first, so that no other group moves.
    """
    assignment = []
    order = np.flatnonzero(problem.allowed.any(axis=1)).tolist()
    at = 0
    filled = [0] * len(caps)

    def full(device: int, load: int) -> bool:
        return filled[problem.device_pool[device]] + load > caps[problem.device_pool[device]]

    for group, load in enumerate(loads):
        may = problem.allowed[:, group]
        while at < len(order) and may[order[at]] and full(order[at], load):
            at += 1
        if at == len(order):
            return None
        device = order[at]
        if not may[device]:
            later = (*order[at:], *order[:at])
            device = next((d for d in later if may[d] and not full(d, load)), -1)
            if device < 0:
                return None
        filled[problem.device_pool[device]] += load
        assignment.append(device)
    return tuple(assignment)


def _best_fit(
    problem: Problem, loads: Sequence[int], caps: Sequence[int]
) -> tuple[int, ...] | None:
    """Best fit decreasing: the largest group first, to the pool where it leaves the least room.

    Groups with a single allowed device come first.
    """
    assignment = [0] * len(loads)
    room = list(caps)
    free = (problem.allowed.sum(axis=0) > 1).tolist()
    anywhere = bool(problem.allowed.all())
    may = [True] * len(problem.allowed)
    for group in sorted(range(len(loads)), key=lambda g: (free[g], -loads[g], g)):
        load = loads[group]
        fitting = [(left, pool) for pool, left in enumerate(room) if left >= load]
        if not anywhere:
            may = problem.allowed[:, group].tolist()
            pools = problem.pool_devices
            fitting = [row for row in fitting if any(may[d] for d in pools[row[1]])]
        if not fitting:
            return None
        pool = min(fitting)[1]
        room[pool] -= load
        assignment[group] = next(d for d in problem.pool_devices[pool] if may[d])
    return tuple(assignment)


def is_hopeless(problem: Problem) -> bool:
    """True if a quick test of bytes that are surely in use proves that there is no placement.

    If memory is nearly full, that includes a search for a packing (`is_unpackable`).
    """
    arrays = problem.arrays
    if not arrays.groups:
        return False
    usable = problem.allowed.any(axis=1)
    pools = {problem.device_pool[device] for device in np.flatnonzero(usable).tolist()}
    # If fewer devices than pools may be used, at most that many pools count.
    room = sorted(problem.pool_memory[pool] for pool in pools)[-problem.most_devices :]
    held = int(arrays.group_persistent.sum())
    if held > sum(room) or _too_many(problem, room):
        return True
    if held + arrays.total_tensor_bytes > sum(room):
        together = _core.regrouped(problem.core, np.zeros(arrays.groups, np.int32))
        if _core.most_held(together) > sum(room):  # at one time of every step
            return True
    least = arrays.least_bytes(problem.durations.min(axis=0) > 0)
    if (least > problem.largest_memory).any():
        return True
    return held > _TIGHT * sum(room) and is_unpackable(problem)


def _too_many(problem: Problem, room: Sequence[int]) -> bool:
    """True if, for some size, the pools cannot hold all groups of at least that size."""
    sizes = problem.arrays.group_persistent
    sizes = np.sort(sizes[sizes > max(room) // _LARGE])[::-1]
    places = np.zeros(len(sizes), np.int64)
    for nbytes, pools in Counter(room).items():
        places += pools * (nbytes // sizes)
    return bool((places < np.arange(1, len(sizes) + 1)).any())


def backtracked(problem: Problem, placer: str, budget: int = PATIENT) -> Iterator[Placement]:
    """Placements with the first devices found for each order; empty if none are found.

    Also empty if `PATIENT` searches do not find a device for every group.
    """
    ops, groups = problem.arrays.ops, problem.arrays.groups
    if groups * (groups + ops) // 2 > PATIENT:
        return
    tries = dict.fromkeys([tuple(range(ops)), depth_first(problem)], budget)
    if ops <= _FEW_OPS:
        for seed in range(_RANDOM):
            tries.setdefault(shuffled(problem, seed), budget // _RANDOM)
    for order, most in tries.items():
        found, _ = _core.backtrack(problem.core, np.array(order, np.int32), most, _SEED)
        if len(found):
            assignment = found.tolist()
            placement = placed_in(problem, op_devices(problem, assignment), order, placer)
            if placement is not None:
                yield placement
            yield from in_both_orders(problem, assignment, placer)
            return


def is_unpackable(problem: Problem) -> bool:
    """True if it is proved that the persistent bytes of all groups cannot be packed."""
    if problem.arrays.groups > _PROOF // _NODES:
        return False
    return _core.backtrack(problem.core, np.empty(0, np.int32), _PROOF, _SEED)[1]
