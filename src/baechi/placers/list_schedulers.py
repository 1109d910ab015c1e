"""List schedulers under memory: m-ETF, HEFT and PEFT.

m-ETF: earliest task first, under memory.

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

HEFT and PEFT: list schedules by rank and earliest finish time, under memory.

HEFT (heterogeneous earliest finish time): Topcuoglu, Hariri and Wu, "Performance-effective and
low-complexity task scheduling for heterogeneous computing" (IEEE TPDS 13(3), 2002), section 5.1.
Take the ops by decreasing upward rank, rank(i) = w(i) + max over children j of (c(i, j) + rank(j))
with mean times w and mean transfers c (`upward_ranks` in `csrc/schedulers/ranked_schedule.cc`),
each to the device where it ends first, in the first gap there that is long enough.

PEFT (predict earliest finish time): Arabnejad and Barbosa, "List scheduling algorithm for
heterogeneous systems by an optimistic cost table" (IEEE TPDS 25(3), 2014), section 4. For every op
i and device p the table has the shortest time that must follow once i has ended there,

    OCT(i, p) = max over children j of min over q of OCT(j, q) + w(j, q) + (c(i, j) if p != q),

with mean transfers c (`optimistic_costs`, the same file). Of the ready ops the one with the largest
mean OCT is next, and goes to the device with the smallest end + OCT.

The papers have no memory and no ports, and fill gaps between ops already placed; the exact clock
has both and only appends. So there are two candidates, and the shorter is returned (`by_rank`):

- the ranks on the exact clock, without gaps: an op goes to the device where it fits and ends first,
  and one without room waits for memory; dead ends as in m-ETF;
- the papers' schedule with gaps, in their own model, where static loads of groups
  (`distinct_loads`) approximate memory; its devices and the order of its starts are then used on
  the exact clock, if it fits.

Means are rounded down to ns. The first op of a group decides its device.
Complexity: O((ops * devices + tensors) * log ops) where memory is ample and gaps are few; the table
takes O(tensors * kinds of devices).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
from numpy.typing import NDArray

from baechi import _core
from baechi.placers.placer import (
    HEADROOMS,
    Placer,
    Stats,
    distinct_loads,
    is_allowed,
    placement_of,
    shortest,
)
from baechi.problem.problem_arrays import Problem
from baechi.problem.simulation import fits_memory
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


def by_rank(
    scheduler: ListScheduler, problem: Problem, ranks: NDArray[np.int64], future: NDArray[np.int64]
) -> Placement | None:
    """The shorter of the two schedules by rank; `None` if neither fits.

    Of the ready ops that of the highest rank is next. `future` is added to the end of an op on a
    device, and has the layout of the core's `ranked_schedule`.
    """
    appended = scheduler.past_dead_ends(
        problem, lambda timeline: timeline.ranked_schedule(ranks, future), {"schedule": "appended"}
    )
    found = [] if appended is None else [appended]
    for loads in distinct_loads(problem):
        timeline = problem.timeline()
        inserted = timeline.insertion_schedule(ranks, future, np.array(loads, np.int64))
        if not inserted or not fits_memory(problem, timeline):
            continue
        placement = placement_of(problem, timeline, scheduler.name, {"schedule": "inserted"})
        if is_allowed(problem, np.array(placement.devices, np.int32)):
            found.append(placement)
    return shortest(found)


@final
@dataclass(frozen=True, slots=True)
class HEFT(ListScheduler):
    """Heterogeneous earliest finish time."""

    name: ClassVar[str] = "heft"

    def place(self, problem: Problem) -> Placement | None:
        """A placement by the rule of the module."""
        ranks = np.array(_core.upward_ranks(problem.core), np.int64)
        return by_rank(self, problem, ranks, np.empty(0, np.int64))


@final
@dataclass(frozen=True, slots=True)
class PEFT(ListScheduler):
    """Predict earliest finish time."""

    name: ClassVar[str] = "peft"

    def place(self, problem: Problem) -> Placement | None:
        """A placement by the rule of the module."""
        table, ranks = (np.array(row, np.int64) for row in _core.optimistic_costs(problem.core))
        return by_rank(self, problem, ranks, table)
