"""What placers share that first give every group a device and then ask the exact clock.

Such a placer sees memory as static loads of groups. How much of its outputs a group holds at a time
shows only in the order of the ops, so the loads are tried with several shares of them
(`group_loads`), and what an assignment really needs, the clock says (`in_both_orders`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from baechi import _core
from baechi.placement import Placement
from baechi.placers.base import placement_of
from baechi.problem import Problem
from baechi.simulation import fits_memory

# Shares of the outputs that count as if they stayed: none as in inference, all as in training.
_SHARES: Final = ((0, 1), (1, 4), (1, 1))


def shortest(placements: Iterable[Placement]) -> Placement | None:
    """The first of those with the shortest step."""
    return min(placements, key=lambda placement: placement.stats["makespan_ns"], default=None)


def group_loads(problem: Problem) -> tuple[tuple[int, ...], ...]:
    """The bytes of every group, with ever larger shares of its outputs and its workspace."""
    return tuple(
        tuple(
            persistent + (total - persistent) * numerator // denominator
            for persistent, total in zip(problem.group_persistent, problem.group_bytes, strict=True)
        )
        for numerator, denominator in _SHARES
    )


def distinct_loads(problem: Problem) -> tuple[tuple[int, ...], ...]:
    """`group_loads` without repetitions; one alone where any device holds the whole graph."""
    rows = group_loads(problem)
    if sum(rows[-1]) <= min(problem.pool_memory):
        return rows[-1:]
    return tuple(dict.fromkeys(rows))


def op_devices(problem: Problem, assignment: Sequence[int]) -> NDArray[np.int32]:
    """The device of every op, where every group has one."""
    return np.array(assignment, np.int32)[np.array(problem.op_group, np.int64)]


def in_both_orders(problem: Problem, assignment: Sequence[int], placer: str) -> Iterator[Placement]:
    """The assignment of devices to groups in index order and in list order, where it fits.

    Nothing where it uses too many devices.
    """
    if problem.max_devices is not None and len(set(assignment)) > problem.max_devices:
        return
    devices = op_devices(problem, assignment)
    orders: tuple[Callable[[_core.Timeline], bool], ...] = (
        lambda timeline: in_order(timeline, devices, range(len(devices))),
        lambda timeline: in_list_order(problem, timeline, devices),
    )
    for order in orders:
        timeline = problem.timeline()
        if order(timeline) and fits_memory(problem, timeline):
            yield placement_of(problem, timeline, placer)


def in_order(timeline: _core.Timeline, devices: NDArray[np.int32], order: Sequence[int]) -> bool:
    """Commits the ops in that order; false where one has no path."""
    return timeline.fold(devices, np.array(order, np.int32)) < 0


def in_list_order(problem: Problem, timeline: _core.Timeline, devices: NDArray[np.int32]) -> bool:
    """Commits the ops by earliest start; false at a dead end."""
    for ops in problem.group_ops:
        timeline.reserve(ops[0], int(devices[ops[0]]))
    return timeline.list_schedule(np.empty(0, np.int32))
