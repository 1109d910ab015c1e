"""m-SCT: small communication time, under memory.

Source: Baechi (SoCC 2020; arXiv 2301.08695), section "m-SCT", after Hanen and Munier (1995). A
linear program picks favorite children (`placers/sct_favorites.py`), and the list scheduler keeps
them with their parents (`csrc/schedulers/list_schedule.cc`). At every step:

- A device has room for an op if the op has a path to it and fits there at its earliest start.
- A device is *awake* if the favorite child of its last op is ready and not committed, and of all
  devices with room for that child this one starts it earliest (the lower index on a tie). It waits
  for that child.
- An op is *urgent* on a device if no device with room for it would start it later: it could start
  at that time on any device with room.
- An awake device takes that child or an op that is urgent there; other devices take any op.
Of the allowed pairs, the one with the smallest (earliest start, op, device) is committed. Without
favorites this is m-ETF.

For differences from the paper see `placers/etf.py` and `placers/sct_favorites.py`.

`stats` has the number of favorites, the optimum of the linear program or a proved bound on it,
the method, and rho, the longest transfer over the shortest op: the paper's bounds
hold if communication is small, rho <= 1.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from baechi.errors import InputError
from baechi.placers.etf import schedule_list
from baechi.placers.linear_programs import LinearSolver
from baechi.placers.placer import Placer, placement_of
from baechi.placers.sct_favorites import check_solver, favorite_children
from baechi.problem.problem_arrays import Problem
from baechi.records.placement import Placement
from baechi.validation import check_count


@final
@dataclass(frozen=True, slots=True)
class MSCT(Placer):
    """Small communication time.

    Attributes:
        retries: Maximum number of retries after a dead end, each with one more group pinned.
        solver: `"first-order"`, `"highs"`, `"cvxopt"`, `"mosek"`, or a solver; see
            `placers/sct_favorites.py`.
        tolerance: The proved relative gap at which the first-order method stops.

    Raises:
        InputError: The solver is unknown, or a number is invalid or negative.
    """

    name: ClassVar[str] = "m-sct"
    retries: int = 16
    solver: str | LinearSolver = "first-order"
    tolerance: float = 0.005

    def __post_init__(self) -> None:
        check_solver(self.solver)
        check_count(self.retries, "retries")
        if not isinstance(self.tolerance, int | float) or not self.tolerance >= 0:
            raise InputError(f"tolerance is {self.tolerance!r}; it must be a share of at least 0.")

    def place(self, problem: Problem) -> Placement | None:
        """A placement by the rule of the module.

        Raises:
            InputError: The solver is not installed or has no licence.
        """
        favorites = favorite_children(problem, self.solver, self.tolerance)
        ratio = rho(problem)
        stats: dict[str, int | float | str] = {
            "favorites": int((favorites.children >= 0).sum()),
            "lp_solver": favorites.method,
            "lp_objective_ns": round(favorites.objective_ns),
            "lp_bound_ns": round(favorites.bound_ns),
            "rho": ratio if math.isfinite(ratio) else "infinite",
        }
        timeline, pins = schedule_list(problem, favorites.children, self.retries)
        if timeline is None:
            return None
        if pins:
            stats["pinned groups"] = pins
        return placement_of(problem, timeline, self.name, stats)


def rho(problem: Problem) -> float:
    """The longest transfer of a tensor, overhead included, over the shortest op of any time.

    Over all links between two memories, and all devices. 0.0 if nothing is ever sent; infinity if
    something is, but no op takes time. Tensors that no other group consumes are not sent.
    O(tensors + links + ops).
    """
    groups, pools = problem.op_group, problem.device_pool
    nbytes = np.array(
        [
            tensor.nbytes
            for tensor in problem.graph.tensors
            if any(groups[consumer] != groups[tensor.producer] for consumer in tensor.consumers)
        ],
        np.float64,
    )
    links = {
        link
        for src, row in enumerate(problem.cluster.links)
        for dst, link in enumerate(row)
        if link is not None and pools[src] != pools[dst]
    }
    if not nbytes.size or not links:
        return 0.0
    largest = float(nbytes.max())
    longest_ns = max(
        link.latency_ns + link.overhead_ns + largest * 1e9 / link.bytes_per_s for link in links
    )
    times = problem.durations
    shortest_ns = float(times.min(where=times > 0, initial=np.iinfo(np.int64).max))
    if not (times > 0).any():
        return float("inf") if longest_ns else 0.0
    return longest_ns / shortest_ns
