"""Base class of placers, and shared helpers."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Final

import numpy as np

from baechi import _core
from baechi.problem.problem_arrays import Problem
from baechi.problem.simulation import fits_memory, replay
from baechi.records.placement import Placement
from baechi.validation import FrozenDict

# Shares of every memory to hold back from new groups, tried in order after a dead end: room for
# backward ops, which greedy rules do not foresee.
HEADROOMS: Final = (0.0, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 3 / 8)


class Placer(ABC):
    """A rule that places a graph on a cluster; a frozen value whose fields are its parameters.

    Attributes:
        name: As in `Placement.placer` and `solve(..., placer=name)`.
        fixed: Whether the rule determines the placement (one device, an expert's): then `solve`
            neither coarsens the graph first nor searches for another placement if it does not fit.
    """

    __slots__ = ()
    name: ClassVar[str]
    fixed: ClassVar[bool] = False

    @abstractmethod
    def place(self, problem: Problem) -> Placement | None:
        """A valid placement of the problem's graph, or `None` if the rule reaches a dead end.

        A pure function: equal problems give equal placements.
        """


def placement_of(
    problem: Problem,
    timeline: _core.Timeline,
    placer: str,
    stats: Mapping[str, int | float | str] | None = None,
) -> Placement:
    """The placement of a complete timeline."""
    order, where, _, _ = timeline.span_columns()
    devices = np.empty_like(where)
    devices[order] = where
    known = FrozenDict({"makespan_ns": timeline.makespan(), **(stats or {})})
    return Placement(
        problem.graph.digest, tuple(devices.tolist()), tuple(order.tolist()), placer, known
    )


def timed(problem: Problem, placement: Placement | None) -> Placement | None:
    """The placement with the makespan in its stats, which custom placers may omit."""
    if placement is None or "makespan_ns" in placement.stats:
        return placement
    timeline = replay(problem, placement.devices, placement.order)
    stats = FrozenDict({**placement.stats, "makespan_ns": timeline.makespan()})
    return replace(placement, stats=stats)


def in_index_order(problem: Problem, devices: Sequence[int], placer: str) -> Placement | None:
    """The placement of the ops on these devices in index order; `None` if it does not fit.

    Raises:
        InputError: As `simulate`.
    """
    timeline = replay(problem, devices, range(len(problem.graph.ops)))
    return placement_of(problem, timeline, placer) if fits_memory(problem, timeline) else None
