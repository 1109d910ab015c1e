"""m-SCT: small communication time, under memory.

Source: Baechi (SoCC 2020; arXiv 2301.08695), section "m-SCT", after Hanen and Munier (1995). A
linear program (`linear_programs.py`) picks favorite children: pairs of ops to run in succession
on one device. The list scheduler keeps them together (`csrc/schedulers/list_schedule.cc`). At every
step:

- A device has room for an op if the op has a path to it and fits there at its earliest start.
- A device is *awake* if the favorite child of its last op is ready and not committed, and of all
  devices with room for that child this one starts it earliest (the lower index on a tie). It waits
  for that child.
- An op is *urgent* on a device if no device with room for it would start it later: it could start
  at that time on any device with room.
- An awake device takes that child or an op that is urgent there; other devices take any op.
Of the allowed pairs, the one with the smallest (earliest start, op, device) is committed. Without
favorites this is m-ETF.

`docs/favorites.md` has the solvers, how shares that w does not need are removed, and the rounding.
Differences from the paper, besides those of m-ETF (`list_schedulers`): edges in a group get no
favorites; first-order instead of MOSEK; no unneeded favorites; the threshold is 1/2 with repair,
instead of 0.1 without; c is the mean over the links. Complexity: the program, then as m-ETF.
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Final, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from baechi import _core
from baechi.errors import InputError
from baechi.placers.linear_programs import (
    SOLVERS,
    FavoriteProgram,
    LinearSolver,
    favorite_program,
    links_between,
    near_point,
    solver_rows,
)
from baechi.placers.list_schedulers import ListScheduler
from baechi.problem.problem_arrays import Problem
from baechi.records.placement import Placement
from baechi.validation import check_choice

# Accuracy of some solvers; values of x closer than this are considered equal.
_DIGITS: Final = 6
# Twice the steps that the hardest graph seen so far took to 0.25 %.
_FIRST_ORDER_STEPS: Final = 1000


@final
@dataclass(frozen=True, slots=True)
class MSCT(ListScheduler):
    """Small communication time.

    `stats` has the number of favorites, the optimum of the linear program or a proved bound on it,
    the method, and rho, the longest transfer over the shortest op: the paper's bounds
    hold if communication is small, rho <= 1.

    Attributes:
        solver: `"first-order"`, `"highs"`, `"cvxopt"`, `"mosek"`, or a solver.
        tolerance: The proved relative gap at which the first-order method stops.

    Raises:
        InputError: The solver is unknown, or a number is invalid or negative.
    """

    name: ClassVar[str] = "m-sct"
    solver: str | LinearSolver = "first-order"
    tolerance: float = 0.005

    def __post_init__(self) -> None:
        ListScheduler.__post_init__(self)
        if not isinstance(self.solver, LinearSolver):
            check_choice(self.solver, ("first-order", *SOLVERS), "solver")
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
        return self.past_dead_ends(
            problem, lambda timeline: timeline.list_schedule(favorites.children), stats
        )


def rho(problem: Problem) -> float:
    """The longest transfer of a tensor, overhead included, over the shortest op of any time.

    Over all links between two memories, and all devices. 0.0 if nothing is ever sent; infinity if
    something is, but no op takes time.
    """
    arrays = problem.arrays
    producers, consumers = arrays.edges()
    sent = arrays.op_group[producers] != arrays.op_group[consumers]
    links = set(links_between(problem))
    if not sent.any() or not links:
        return 0.0
    largest = float(arrays.per_consumer(arrays.nbytes)[sent].max())
    longest_ns = max(
        link.latency_ns + link.overhead_ns + largest * 1e9 / link.bytes_per_s for link in links
    )
    times = problem.durations
    if not (times > 0).any():
        return float("inf") if longest_ns else 0.0
    return longest_ns / float(times[times > 0].min())


class Favorites(NamedTuple):
    """The favorite child of every op, or -1, with figures of the relaxation.

    `objective_ns` is w of the relaxed choice before rounding, `bound_ns` a lower bound on it, and
    `method` the solver, with the reason why another one stopped before it.
    """

    children: NDArray[np.int32]
    objective_ns: float
    bound_ns: float
    method: str


class Relaxed(NamedTuple):
    """A solution of the program: 1 - x of every edge, feasible, and a bound on w."""

    shares: NDArray[np.float64]
    bound_ns: float


def favorite_children(
    problem: Problem, solver: str | LinearSolver = "first-order", tolerance: float = 0.005
) -> Favorites:
    """The favorite child of every op; arguments and errors are those of `MSCT`."""
    program = favorite_program(problem)
    if not program.free.any():
        shares = np.zeros(len(program.src))
        method, relaxed = "none needed", Relaxed(shares, program.spans(shares)[2])
    else:
        method, relaxed = "first-order", first_order(program, tolerance)
        chosen = SOLVERS.get(solver) if isinstance(solver, str) else solver
        if chosen is not None:
            solved = relax(program, chosen, relaxed.shares)
            if isinstance(solved, str):
                method = f"first-order ({chosen.name} stopped: {solved})"
            else:
                method, relaxed = chosen.name, solved
    children = rounded(program, program.needed(relaxed.shares))
    objective_ns = program.spans(relaxed.shares)[2]
    return Favorites(children, objective_ns, relaxed.bound_ns, method)


def relax(
    program: FavoriteProgram, solver: LinearSolver, near: NDArray[np.float64] | None = None
) -> Relaxed | str:
    """The optimum of a program that has a free edge, or the reason why the solver stopped.

    `near` are feasible shares near the optimum, as a start for HiGHS.
    """
    rows = solver_rows(program)
    start, whole = None, rows.program
    if near is not None:
        start = near_point(program, rows, near)
        # When a solver pushes the point to a vertex, it may not raise w.
        whole = replace(whole, upper=np.append(whole.upper[:-1], start[-1]))
    solution = solver.solve(whole, start)
    if isinstance(solution, str):
        return solution
    shares = np.zeros(len(program.src))
    shares[program.free] = 1.0 - solution[: int(program.free.sum())]
    return Relaxed(program.feasible(shares), rows.offset_ns + rows.unit_ns * float(solution[-1]))


def first_order(program: FavoriteProgram, tolerance: float) -> Relaxed:
    """A solution within the tolerance; times are scaled, so that their squares stay in range."""
    unit_ns = float(program.free_cost.max())
    shares, _, bound, _ = _core.save_transfers(
        program.times / unit_ns,
        *program.ends,
        program.free_cost / unit_ns,
        tolerance,
        _FIRST_ORDER_STEPS,
    )
    return Relaxed(np.array(shares, np.float64), bound * unit_ns)


def rounded(program: FavoriteProgram, shares: NDArray[np.float64]) -> NDArray[np.int32]:
    """The favorite children of feasible shares: x below 1/2, the smallest x first."""
    x = np.round(np.where(program.sole, 0.0, 1.0 - shares), _DIGITS)
    order = np.lexsort((program.dst, program.src, -program.cost, x))
    order = order[x[order] < 0.5]
    children = [-1] * len(program.times)
    taken = set[int]()
    pairs = zip(program.src[order].tolist(), program.dst[order].tolist(), strict=True)
    for parent, child in pairs:
        if children[parent] < 0 and child not in taken:
            children[parent] = child
            taken.add(child)
    return np.array(children, np.int32)
