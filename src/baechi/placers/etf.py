"""m-ETF: earliest task first, under memory.

Source: Baechi (SoCC 2020; arXiv 2301.08695), section "m-ETF", after Hwang, Chow, Anger and Lee
(1989).
Repeatedly commit the pair of a ready op and a device with the smallest (earliest start, op index,
device index) among the devices that have a path to its inputs and room for it (`list_schedule` in
`csrc/schedulers/list_schedule.cc`).

Differences from the paper: the earliest start is the exact clock's, with ports and copies, and a
pair without room is reconsidered when memory is freed. A forward op is placed without regard to
the needs of its backward there, so after a dead end the schedule is retried, first with increasing
shares of every memory held back from new groups (`HEADROOMS`), then with the largest unplaced group
pinned in advance to the device with the most unreserved memory, at most `retries` times.
Complexity: O((ops * devices + tensors) * log ops) queue operations where memory is ample; of equal
devices only the used ones and one more count.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
from numpy.typing import NDArray

from baechi import _core
from baechi.placers.placer import HEADROOMS, Placer, placement_of
from baechi.problem.problem_arrays import Problem
from baechi.records.placement import Placement
from baechi.validation import check_count


@final
@dataclass(frozen=True, slots=True)
class METF(Placer):
    """Earliest task first.

    Attributes:
        retries: Maximum number of retries after a dead end, each with one more group pinned.
    """

    name: ClassVar[str] = "m-etf"
    retries: int = 16

    def __post_init__(self) -> None:
        check_count(self.retries, "retries")

    def place(self, problem: Problem) -> Placement | None:
        """A placement by the rule of the module."""
        timeline, pins = schedule_list(problem, np.empty(0, np.int32), self.retries)
        if timeline is None:
            return None
        return placement_of(problem, timeline, self.name, {"pinned groups": pins} if pins else {})


def schedule_list(
    problem: Problem, favorites: NDArray[np.int32], retries: int
) -> tuple[_core.Timeline | None, int]:
    """The complete timeline of the list scheduler, or `None`; and the number of pinned groups.

    Args:
        problem: Graph and cluster.
        favorites: Favorite child of every op, or -1; empty for ETF's rule.
        retries: Maximum number of groups to pin.
    """
    return past_dead_ends(problem, lambda timeline: timeline.list_schedule(favorites), retries)


def past_dead_ends(
    problem: Problem, schedule: Callable[[_core.Timeline], bool], retries: int
) -> tuple[_core.Timeline | None, int]:
    """The first complete timeline after retries, as in the module; and the number of pinned groups.

    Args:
        problem: Graph and cluster.
        schedule: Commits all ops to a timeline, in which groups may be reserved and memory held
            back; false at a dead end.
        retries: Maximum number of groups to pin.
    """
    for headroom in HEADROOMS:
        timeline = problem.timeline(headroom)
        if schedule(timeline):
            return timeline, 0
    pins: dict[int, int] = {}
    while True:
        timeline = problem.timeline()
        for group, device in pins.items():
            timeline.reserve(problem.group_ops[group][0], device)
        if schedule(timeline):
            return timeline, len(pins)
        pin = _next_pin(problem, timeline, pins) if len(pins) < retries else None
        if pin is None:
            return None, len(pins)
        pins[pin[0]] = pin[1]


def _next_pin(
    problem: Problem, timeline: _core.Timeline, pins: dict[int, int]
) -> tuple[int, int] | None:
    """The largest group without a device, and the device with the most room for it."""
    homeless = [
        group for group, ops in enumerate(problem.group_ops) if timeline.group_device(ops[0]) < 0
    ]
    if not homeless:
        return None
    group = max(homeless, key=lambda group: (problem.group_persistent[group], -group))
    fresh = problem.timeline()
    for pinned, device in pins.items():
        fresh.reserve(problem.group_ops[pinned][0], device)
    room = fresh.left()
    op = problem.group_ops[group][0]
    devices = [d for d in range(len(problem.device_pool)) if fresh.allows(op, d)]
    if not devices:
        return None
    device = max(devices, key=lambda d: (room[problem.device_pool[d]], -d))
    fits = problem.group_persistent[group] <= room[problem.device_pool[device]]
    return (group, device) if fits and problem.group_persistent[group] else None
