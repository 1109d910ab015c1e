"""What a placer is, and what all of them share."""

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

# Shares of every memory to hold back from new groups, one after the other, where a rule meets a
# dead end: the room that backward ops need beyond what their forward ops showed.
HEADROOMS: Final = (0.0, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 3 / 8)


class Placer(ABC):
    """A rule that places a graph on a cluster; a frozen value whose fields are its parameters.

    Attributes:
        name: As in `Placement.placer` and `solve(..., placer=name)`.
        fixed: Whether the rule itself is the answer (one device, an expert's): then `solve` neither
            coarsens the graph before it nor looks for another placement where it does not fit.
    """

    __slots__ = ()
    name: ClassVar[str]
    fixed: ClassVar[bool] = False

    @abstractmethod
    def place(self, problem: Problem) -> Placement | None:
        """A valid placement of the problem's graph, or `None` where the rule meets a dead end.

        A pure function: equal problems give equal placements.
        """


def placement_of(
    problem: Problem,
    timeline: _core.Timeline,
    placer: str,
    stats: Mapping[str, int | float | str] | None = None,
) -> Placement:
    """The placement that a complete timeline holds."""
    order, where, _, _ = timeline.span_columns()
    devices = np.empty_like(where)
    devices[order] = where
    known = FrozenDict({"makespan_ns": timeline.makespan(), **(stats or {})})
    return Placement(
        problem.graph.digest, tuple(devices.tolist()), tuple(order.tolist()), placer, known
    )


def timed(problem: Problem, placement: Placement | None) -> Placement | None:
    """The placement with the makespan in its stats, which a placer of the user may leave out."""
    if placement is None or "makespan_ns" in placement.stats:
        return placement
    timeline = replay(problem, placement.devices, placement.order)
    stats = FrozenDict({**placement.stats, "makespan_ns": timeline.makespan()})
    return replace(placement, stats=stats)


def in_index_order(problem: Problem, devices: Sequence[int], placer: str) -> Placement | None:
    """The placement with a device for every op, in index order; `None` where it does not fit.

    Raises:
        InputError: As `simulate`.
    """
    timeline = replay(problem, devices, range(len(problem.graph.ops)))
    return placement_of(problem, timeline, placer) if fits_memory(problem, timeline) else None
