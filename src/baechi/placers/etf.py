"""m-ETF: earliest task first, under memory.

Source: Baechi (SoCC 2020; arXiv 2301.08695), section "m-ETF", after Hwang, Chow, Anger and Lee
(1989).
Repeatedly commit the pair of a ready op and a device with the smallest (earliest start, op index,
device index) among the devices that have a path to its inputs and room for it (`list_schedule` in
`csrc/schedulers/list_schedule.cc`).

Differences from the paper: the earliest start is the exact clock's, with ports and copies; a pair
without room is reconsidered when memory is freed; and after a dead end the schedule is retried
(`docs/solver.md`, "The placers"), with `HEADROOMS` and then with groups pinned in advance.
Complexity: O((ops * devices + tensors) * log ops) queue operations where memory is ample; of equal
devices only the used ones and one more count.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from baechi import _core
from baechi.placers.placer import HEADROOMS, Placer, Stats, placement_of
from baechi.problem.problem_arrays import Problem
from baechi.records.placement import Placement
from baechi.validation import check_count


@dataclass(frozen=True, slots=True)
class ListScheduler(Placer):
    """A placer that may meet dead ends, and retries as in the module.

    Attributes:
        retries: Maximum number of retries after a dead end, each with one more group pinned.
    """

    retries: int = 16

    def __post_init__(self) -> None:
        check_count(self.retries, "retries")

    def past_dead_ends(
        self, problem: Problem, schedule: Callable[[_core.Timeline], bool], stats: Stats
    ) -> Placement | None:
        """The first schedule that is complete, after retries as in the module.

        `schedule` commits all ops to a timeline, in which groups may be reserved and memory held
        back; it returns false at a dead end.
        """
        for headroom in HEADROOMS:
            timeline = problem.timeline(headroom)
            if schedule(timeline):
                return placement_of(problem, timeline, self.name, stats)
        pins: dict[int, int] = {}  # the first op of a group, and its device
        for _ in range(self.retries + 1):
            timeline, fresh = problem.timeline(), problem.timeline()
            for op, device in pins.items():
                timeline.reserve(op, device)
                fresh.reserve(op, device)
            if schedule(timeline):
                more = {"pinned groups": len(pins)} if pins else {}
                return placement_of(problem, timeline, self.name, {**stats, **more})
            pin = _next_pin(problem, timeline, fresh)
            if pin is None:
                return None
            pins[pin[0]] = pin[1]
        return None


@final
@dataclass(frozen=True, slots=True)
class METF(ListScheduler):
    """Earliest task first."""

    name: ClassVar[str] = "m-etf"

    def place(self, problem: Problem) -> Placement | None:
        """A placement by the rule of the module."""
        nothing = np.empty(0, np.int32)
        return self.past_dead_ends(problem, lambda timeline: timeline.list_schedule(nothing), {})


def _next_pin(
    problem: Problem, timeline: _core.Timeline, fresh: _core.Timeline
) -> tuple[int, int] | None:
    """The largest group without a device, by its first op, and the device with most room for it."""
    nbytes, pool = problem.arrays.group_persistent.tolist(), problem.device_pool
    homeless = [g for g, ops in enumerate(problem.group_ops) if timeline.group_device(ops[0]) < 0]
    group = max(homeless, key=lambda group: nbytes[group], default=-1)
    if group < 0 or not nbytes[group]:
        return None
    room, op = fresh.left(), problem.group_ops[group][0]
    devices = [d for d in range(len(pool)) if fresh.allows(op, d)]
    device = max(devices, key=lambda d: room[pool[d]], default=-1)
    return (op, device) if device >= 0 and nbytes[group] <= room[pool[device]] else None
