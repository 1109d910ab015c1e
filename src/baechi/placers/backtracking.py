"""Placements found by backtracking over the devices of groups, and proofs that there are none.

For a given order of the ops, `csrc/schedulers/backtracking.cc` gives devices to one group after the
other and goes back where the ops committed so far pass a memory by the exact clock, whatever
follows. Small problems are searched to the end; of large ones, budgets counted in ops end many
short searches, each with another rule for the devices. Orders are the ops' own and a depth-first
one, which uses up what it makes soon, and so holds less at a time (`depth_first`). Which order fits
is luck where memory is tight, so small problems try random ones, too; together they cost as much as
one of these.

Without an order the same search packs persistent bytes alone. Where that is impossible, nothing
fits in whatever order (`is_unpackable`).
"""

from collections.abc import Iterator
from typing import Final

import numpy as np

from baechi import _core
from baechi.placers.assignments import (
    depth_first,
    in_both_orders,
    in_order,
    op_devices,
    shuffled,
)
from baechi.placers.placer import placement_of
from baechi.problem.problem_arrays import Problem
from baechi.problem.simulation import fits_memory
from baechi.records.placement import Placement

# Committed ops and groups looked at in all of one search: a fifth of a second.
PATIENT: Final = 1_000_000
# The same of one of many searches, for what is missing.
HASTY: Final = 50_000
# Random orders besides, and of how many ops at most: a search of few ops ends early.
_RANDOM: Final = 32
_FEW_OPS: Final = 64
# The same of a proof, which is asked for before anything else: some milliseconds.
_PROOF: Final = 200_000
# With fewer nodes nothing is proved.
_NODES: Final = 100
_SEED: Final = 1


def backtracked(problem: Problem, placer: str, budget: int = PATIENT) -> Iterator[Placement]:
    """Placements with the first devices that are found for an order; none where none are found.

    Nor where `PATIENT` searches do not suffice for a device for every group.
    """
    ops, groups = len(problem.graph.ops), problem.graph.arrays.groups
    if groups * (groups + ops) // 2 > PATIENT:
        return
    tries = dict.fromkeys([tuple(range(ops)), depth_first(problem)], budget)
    if ops <= _FEW_OPS:
        for seed in range(_RANDOM):
            tries.setdefault(shuffled(problem, seed), budget // _RANDOM)
    for order, most in tries.items():
        launches = np.array(order, np.int32)
        assignment, _ = _core.backtrack(problem.core, launches, most, _SEED)
        if not len(assignment):
            continue
        timeline = problem.timeline()
        devices = op_devices(problem, assignment.tolist())
        if in_order(timeline, devices, order) and fits_memory(problem, timeline):
            yield placement_of(problem, timeline, placer)
        yield from in_both_orders(problem, assignment.tolist(), placer)
        return


def is_unpackable(problem: Problem) -> bool:
    """Whether the persistent bytes of all groups were proved to have no place."""
    if problem.graph.arrays.groups > _PROOF // _NODES:
        return False
    return _core.backtrack(problem.core, np.empty(0, np.int32), _PROOF, _SEED)[1]
