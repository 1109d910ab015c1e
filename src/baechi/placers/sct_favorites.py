"""Favorite children: which op should follow which on the same device.

The linear program is in `placers/favorite_program.py`. Solvers: `"interior-point"` finds its
optimum with a proof, in time that goes with the length of the graph and a power of its width
(`csrc/interior.cc`); `"highs"`, `"cvxopt"` and `"mosek"` (`linear_programs.py`) find its optimum;
`"first-order"` finds a choice and a lower bound that proves how far it is from the optimum, on
graphs where those take too long (`csrc/favorites.cc`). `"auto"` is the interior point where that is
affordable; else HiGHS, within few iterations, up to a size; and first-order above. HiGHS starts
from what first-order found: from a matching of its largest shares where that is close
(`matching_vertex`), else from the shares themselves (`near_point`). Where a solver stops, they are
the answer.

Optima are many, and a simplex returns one that chooses wherever it may. A favorite child without
need is harmful: its device waits for it. So shares 1 - x that w does not need are taken back first
(`FavoriteProgram.needed`); `docs/favorites.md` has what that gains.
Rounding: edges with x below 1/2, the smallest x first, then the largest c, then the smallest
(i, j), are taken as long as i has no favorite child and j is nobody's: so every op ends with at
most one of each, whatever the solver returned.

Where we leave the paper: edges inside one group cost nothing and choose nothing; HiGHS instead of
MOSEK; no favorites without need; the threshold is 1/2 with repair, instead of 0.1 without; c is the
mean over the links. All
solvers run on one thread with fixed seeds, and are bounded by iterations, never by time, so that
equal input gives equal favorites. Where communication outweighs computation, w is no lower bound on
the makespan.
Complexity: a linear program of ops + edges rows and columns; first-order takes some hundred passes
over the edges.
"""

import math
from dataclasses import dataclass
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from baechi import _core
from baechi.errors import InputError
from baechi.placers.linear_programs import SOLVERS, Highs, LinearSolver, Point, Vertex
from baechi.placers.sct_program import (
    FavoriteProgram,
    SolverRows,
    capped,
    favorite_program,
    greatest_matching,
    greedy_matching,
    matching_vertex,
    near_point,
    solver_rows,
)
from baechi.problem.problem_arrays import Problem

NAMES: Final = ("auto", "interior-point", *SOLVERS, "first-order")
# Multiplications of one iteration: above, HiGHS is faster on graphs that it can solve at all, and
# first-order on larger ones.
_AFFORDABLE: Final = 700e6
_AFFORDABLE_LARGE: Final = 200e6
# What HiGHS promises of its rows; most programs end with a gap that is ten times smaller.
_INTERIOR_TOLERANCE: Final = 1e-7
# Three times what any program has been seen to take.
_INTERIOR_STEPS: Final = 100
# Above so many ops and edges `"auto"` does not ask HiGHS.
_SIMPLEX_SIZE: Final = 20_000
# Sparse graphs take at most 0.65 iterations a row from the start that they get. Dense ones with
# equal costs take more and longer ones, for less than the tolerance.
_BRIEF: Final = Highs(iterations_per_row=1)
# Some solvers are right to about this; closer values of x are one and the same.
_DIGITS: Final = 6
# A matching that close to the shares that it was made of is the better start: no push to a vertex.
_CLOSE: Final = 0.1
# Twice what the hardest graph seen so far took to 0.25 %.
_FIRST_ORDER_STEPS: Final = 1000


@final
@dataclass(frozen=True, eq=False)
class Favorites:
    """Favorite children, and the relaxation that they come from.

    Attributes:
        children: The favorite child of every op, or -1; no op is the favorite child of two.
        objective_ns: w of the relaxed choice before rounding, as a longest path.
        bound_ns: A lower bound on w: proved by `"first-order"` and `"interior-point"`; of the
            others, their optimum, to their tolerances.
        method: The solver, and why another one stopped before it.
    """

    children: NDArray[np.int32]
    objective_ns: float
    bound_ns: float
    method: str


def check_solver(solver: str | LinearSolver) -> None:
    """Passes solvers, and the names of known ones.

    Raises:
        InputError: Any other.
    """
    if not isinstance(solver, LinearSolver) and solver not in NAMES:
        known = ", ".join(repr(known) for known in NAMES)
        raise InputError(f"solver {solver!r} is unknown; it must be one of {known}.")


def favorite_children(
    problem: Problem,
    solver: str | LinearSolver = "auto",
    exact_size: int = 500_000,
    tolerance: float = 0.004,
) -> Favorites:
    """The favorite child of every op.

    Args:
        problem: Graph and cluster.
        solver: As the module says.
        exact_size: Up to how many ops and edges `"auto"` tries the interior point, and HiGHS up to
            20,000 of them.
        tolerance: The relative gap between objective and bound at which first-order stops.

    Raises:
        InputError: The solver is unknown, not installed, or has no licence.
    """
    check_solver(solver)
    program = favorite_program(problem)
    if program.free.any():
        method, relaxed = _solved(program, solver, exact_size, tolerance)
    else:
        method, relaxed = "none needed", _trivial(program)
    children = rounded(program, program.needed(relaxed.shares))
    objective_ns = program.spans(relaxed.shares)[2]
    return Favorites(children, objective_ns, relaxed.bound_ns, method)


def _solved(
    program: FavoriteProgram, solver: str | LinearSolver, exact_size: int, tolerance: float
) -> tuple[str, "Relaxed"]:
    """A solution of a program that has a free edge, and how it was found."""
    size = len(program.times) + len(program.src)
    if solver == "interior-point" or (solver == "auto" and size <= exact_size):
        affordable = _AFFORDABLE if size <= _SIMPLEX_SIZE else _AFFORDABLE_LARGE
        exact = interior_point(program, affordable if solver == "auto" else math.inf)
        if exact is not None:
            return "interior-point", exact
    near = first_order(program, tolerance)
    if solver == "interior-point":
        return "first-order (interior-point stopped: the gap stayed open)", near
    if solver == "auto" and size <= min(exact_size, _SIMPLEX_SIZE):
        solver = _BRIEF
    elif isinstance(solver, str) and solver in SOLVERS:
        solver = SOLVERS[solver]
    if not isinstance(solver, LinearSolver):
        return "first-order", near
    solved = relax(program, solver, near.shares)
    if isinstance(solved, str):
        return f"first-order ({solver.name} stopped: {solved})", near
    return solver.name, solved


@final
@dataclass(frozen=True, eq=False)
class Relaxed:
    """A solution of the program: 1 - x of every edge, feasible, and a bound on w.

    The bound is the optimum, as the solver told it, or what is proved.
    """

    shares: NDArray[np.float64]
    bound_ns: float


def _trivial(program: FavoriteProgram) -> Relaxed:
    """The solution where no edge is free."""
    shares = np.zeros(len(program.src))
    return Relaxed(shares, program.spans(shares)[2])


def relax(
    program: FavoriteProgram, solver: LinearSolver, near: NDArray[np.float64] | None = None
) -> Relaxed | str:
    """The optimum of a program that has a free edge, or why the solver stopped.

    Args:
        program: What to solve.
        solver: By which.
        near: Feasible shares near the optimum, where a simplex may start.
    """
    rows = solver_rows(program)
    start = None if near is None else _start(program, rows, near)
    whole = capped(rows.program, start) if isinstance(start, Point) else rows.program
    solution = solver.solve(whole, start)
    if solution.values is None:
        return solution.status
    shares = np.zeros(len(program.src))
    shares[program.free] = 1.0 - solution.values[: int(program.free.sum())]
    return Relaxed(
        program.feasible(shares), rows.offset_ns + rows.unit_ns * float(solution.values[-1])
    )


def _start(program: FavoriteProgram, rows: SolverRows, near: NDArray[np.float64]) -> Vertex | Point:
    """Where a simplex starts best, given feasible shares near the optimum."""
    matching = greatest_matching(program, near)
    w_ns = program.spans(matching.astype(np.float64))[2]
    if w_ns <= (1 + _CLOSE) * program.spans(near)[2]:
        return matching_vertex(program, rows, matching)
    return near_point(program, rows, near)


def first_order(program: FavoriteProgram, tolerance: float) -> Relaxed:
    """A solution within the tolerance; times are scaled, so that their squares stay in range."""
    unit_ns, transfers = _transfers(program)
    shares, _, bound, _ = _core.save_transfers(*transfers, tolerance, _FIRST_ORDER_STEPS)
    return Relaxed(np.array(shares, np.float64), bound * unit_ns)


def interior_point(program: FavoriteProgram, most_work: float = math.inf) -> Relaxed | None:
    """The optimum within 10^-7, as proved, of a program that has a free edge.

    `None` where an iteration would take more than so many multiplications, or digits ran out.
    """
    unit_ns, transfers = _transfers(program)
    shares, objective, bound, _ = _core.save_most_transfers(
        *transfers, _INTERIOR_TOLERANCE, _INTERIOR_STEPS, most_work
    )
    if objective > (1 + _INTERIOR_TOLERANCE) * bound:
        return None
    return Relaxed(np.array(shares, np.float64), bound * unit_ns)


def _transfers(
    program: FavoriteProgram,
) -> tuple[
    float,
    tuple[NDArray[np.float64], NDArray[np.int32], NDArray[np.int32], NDArray[np.float64]],
]:
    """The unit, the largest c, and times, ends of edges and costs in it."""
    unit_ns = float(program.free_cost.max())
    return unit_ns, (program.times / unit_ns, *program.ends, program.free_cost / unit_ns)


def rounded(program: FavoriteProgram, shares: NDArray[np.float64]) -> NDArray[np.int32]:
    """The favorite children of feasible shares, as the module says under rounding."""
    x = np.round(np.where(program.sole, 0.0, 1.0 - shares), _DIGITS)
    order = np.lexsort((program.dst, program.src, -program.cost, x))
    taken = greedy_matching(program, order, x < 0.5)
    children = np.full(len(program.times), -1, np.int32)
    children[program.src[taken]] = program.dst[taken]
    return children
