"""Favorite children: pairs of ops to run in succession on one device.

The linear program is in `placers/sct_program.py`. Solvers: `"first-order"`, the default, finds
a choice and a lower bound that proves its distance from the optimum
(`csrc/favorites/first_order.cc`); `"highs"`, `"cvxopt"` and `"mosek"`
(`placers/linear_programs.py`) find the optimum, and take longer the larger and wider a graph is.
HiGHS starts from the first-order result (`near_point`). If a solver stops before the optimum, the
first-order result is used.

The optimum is not unique, and a simplex returns one with as many favorites as possible. An unneeded
favorite child hurts: its device idles until it is ready. So shares 1 - x that w does not need are
removed first (`FavoriteProgram.needed`); `docs/favorites.md` has the measured gain.
Rounding: edges with x below 1/2, the smallest x first, then the largest c, then the smallest
(i, j), are taken as long as i has no favorite child and j is not one yet, so every op has at most
one favorite child and is that of at most one op, whatever the solver returned.

Differences from the paper: edges inside one group cost nothing and get no favorites; HiGHS instead
of MOSEK; no unneeded favorites; the threshold is 1/2 with repair, instead of 0.1 without; c is the
mean over the links. All solvers run on one thread with fixed seeds, and are bounded by iterations,
never by time, so that equal input gives equal favorites. w is not a lower bound on the makespan if
communication outweighs computation.
Complexity: a linear program of ops + edges rows and columns; first-order takes some hundred passes
over the edges.
"""

from dataclasses import dataclass
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from baechi import _core
from baechi.errors import InputError
from baechi.placers.linear_programs import SOLVERS, LinearSolver
from baechi.placers.sct_program import (
    FavoriteProgram,
    capped,
    favorite_program,
    greedy_matching,
    near_point,
    solver_rows,
)
from baechi.problem.problem_arrays import Problem

NAMES: Final = ("first-order", *SOLVERS)
# Accuracy of some solvers; values of x closer than this are considered equal.
_DIGITS: Final = 6
# Twice the steps that the hardest graph seen so far took to 0.25 %.
_FIRST_ORDER_STEPS: Final = 1000


@final
@dataclass(frozen=True, eq=False)
class Favorites:
    """Favorite children, with figures of the relaxation.

    Attributes:
        children: The favorite child of every op, or -1; no op is that of two.
        objective_ns: w of the relaxed choice before rounding, as a longest path.
        bound_ns: A lower bound on w: proved by `"first-order"`; for the others their optimum, up to
            their tolerances.
        method: The solver, and the reason why another one stopped before it.
    """

    children: NDArray[np.int32]
    objective_ns: float
    bound_ns: float
    method: str


def check_solver(solver: str | LinearSolver) -> None:
    """Check that this is a solver, or the name of one.

    Raises:
        InputError: Any other.
    """
    if not isinstance(solver, LinearSolver) and solver not in NAMES:
        known = ", ".join(repr(known) for known in NAMES)
        raise InputError(f"solver {solver!r} is unknown; it must be one of {known}.")


def favorite_children(
    problem: Problem,
    solver: str | LinearSolver = "first-order",
    tolerance: float = 0.005,
) -> Favorites:
    """The favorite child of every op.

    Args:
        problem: Graph and cluster.
        solver: See the module.
        tolerance: The relative gap between objective and bound at which first-order stops.

    Raises:
        InputError: The solver is unknown, not installed, or has no licence.
    """
    check_solver(solver)
    program = favorite_program(problem)
    if program.free.any():
        method, relaxed = _solved(program, solver, tolerance)
    else:
        method, relaxed = "none needed", _trivial(program)
    children = rounded(program, program.needed(relaxed.shares))
    objective_ns = program.spans(relaxed.shares)[2]
    return Favorites(children, objective_ns, relaxed.bound_ns, method)


def _solved(
    program: FavoriteProgram, solver: str | LinearSolver, tolerance: float
) -> tuple[str, "Relaxed"]:
    """A solution of a program that has a free edge, and the method."""
    near = first_order(program, tolerance)
    if isinstance(solver, str):
        if solver not in SOLVERS:
            return solver, near
        solver = SOLVERS[solver]
    solved = relax(program, solver, near.shares)
    if isinstance(solved, str):
        return f"first-order ({solver.name} stopped: {solved})", near
    return solver.name, solved


@final
@dataclass(frozen=True, eq=False)
class Relaxed:
    """A solution of the program: 1 - x of every edge, feasible, and a bound on w.

    The bound is the solver's optimum, or a proved bound.
    """

    shares: NDArray[np.float64]
    bound_ns: float


def _trivial(program: FavoriteProgram) -> Relaxed:
    """The solution if no edge is free."""
    shares = np.zeros(len(program.src))
    return Relaxed(shares, program.spans(shares)[2])


def relax(
    program: FavoriteProgram, solver: LinearSolver, near: NDArray[np.float64] | None = None
) -> Relaxed | str:
    """The optimum of a program that has a free edge, or the reason why the solver stopped.

    Args:
        program: The program.
        solver: The solver.
        near: Feasible shares near the optimum, as a start for HiGHS.
    """
    rows = solver_rows(program)
    start, whole = None, rows.program
    if near is not None:
        start = near_point(program, rows, near)
        whole = capped(whole, start)
    solution = solver.solve(whole, start)
    if solution.values is None:
        return solution.status
    shares = np.zeros(len(program.src))
    shares[program.free] = 1.0 - solution.values[: int(program.free.sum())]
    return Relaxed(
        program.feasible(shares), rows.offset_ns + rows.unit_ns * float(solution.values[-1])
    )


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
    """The favorite children of feasible shares, by the module's rounding."""
    x = np.round(np.where(program.sole, 0.0, 1.0 - shares), _DIGITS)
    order = np.lexsort((program.dst, program.src, -program.cost, x))
    taken = greedy_matching(program, order, x < 0.5)
    children = np.full(len(program.times), -1, np.int32)
    children[program.src[taken]] = program.dst[taken]
    return children
