"""m-SCT: small communication time, under memory.

Source: Baechi (SoCC 2020; arXiv 2301.08695), section "m-SCT", after Hanen and Munier (1995). A
linear program picks favorite children (`placers/favorites.py`), and the list scheduler keeps them
with their parents (`csrc/list_schedule.cc`). At every step:

- A device has room for an op if the op has a path to it and fits there at its earliest start.
- A device is *awake* if the favorite child of the op that it took last is ready, and is not
  committed, and of all devices with room for it this one starts it earliest (the lower index on a
  tie). It waits for that child.
- An op is *urgent* on a device if no device with room for it would start it later: it could start
  at that time wherever it has room.
- An awake device takes that child or an op that is urgent there; other devices take anything.

Of the pairs that this allows, the one with the smallest (earliest start, op, device) is committed.
Without favorites that is m-ETF.

Where we leave the paper: see `placers/etf.py`; and above `max_ops` the linear program costs more
than it gains, so that there are no favorites, which `stats` says.
"""

from dataclasses import dataclass
from typing import ClassVar, final

from baechi.placement import Placement
from baechi.placers.base import Placer, placement_of
from baechi.placers.etf import schedule_list
from baechi.placers.favorites import favorite_children, no_favorites
from baechi.problem import Problem


@final
@dataclass(frozen=True, slots=True)
class MSCT(Placer):
    """Small communication time.

    Attributes:
        retries: How often a dead end is met with one more group pinned.
        max_ops: Up to how many ops the linear program is solved.
    """

    name: ClassVar[str] = "m-sct"
    retries: int = 16
    max_ops: int = 3000

    def place(self, problem: Problem) -> Placement | None:
        """As the module says."""
        n = len(problem.graph.ops)
        stats: dict[str, int | float | str] = {}
        if n > self.max_ops:
            favorites = no_favorites(n)
            stats["favorites"] = f"none: {n} ops are more than max_ops={self.max_ops}"
        else:
            favorites = favorite_children(problem)
            stats["favorites"] = int((favorites >= 0).sum())
        timeline, pins = schedule_list(problem, favorites, self.retries)
        if timeline is None:
            return None
        if pins:
            stats["pinned groups"] = pins
        return placement_of(problem, timeline, self.name, stats)
