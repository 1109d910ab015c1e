"""HEFT and PEFT: list schedules by rank and earliest finish time, under memory.

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
  and one without room waits for memory; dead ends as in `placers/etf.py`;
- the papers' schedule with gaps, in their own model, where static loads of groups
  (`distinct_loads`) approximate memory; its devices and the order of its starts are then used on
  the exact clock, if it fits.

Means are rounded down to ns. The first op of a group decides its device.
Complexity: O((ops * devices + tensors) * log ops) where memory is ample and gaps are few; the table
takes O(tensors * kinds of devices).
"""

from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
from numpy.typing import NDArray

from baechi import _core
from baechi.placers.etf import ListScheduler
from baechi.placers.placer import distinct_loads, is_allowed, placement_of, shortest
from baechi.problem.problem_arrays import Problem
from baechi.problem.simulation import fits_memory
from baechi.records.placement import Placement


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
