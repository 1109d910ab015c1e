"""Linear programs and their solvers: HiGHS, CVXOPT and MOSEK.

    minimize cost @ z  subject to  A z <= limit,  0 <= z <= upper

HiGHS comes with Baechi. CVXOPT (`pip install baechi[cvxopt]`) and MOSEK (`pip install
baechi[mosek]`, and a licence) are imported on use. All run on one thread, with
fixed seeds, and stop by iterations, never by time, so that equal programs give equal solutions.
An optimum need not be unique: HiGHS's simplex and MOSEK return a vertex of the optimal face,
CVXOPT a point inside it.

The numbers of a program should be near 1: tolerances are partly absolute, and CVXOPT returns
`unknown` if numbers differ too much in size.
"""

import importlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Final, final

import highspy
import numpy as np
from numpy.typing import NDArray

from baechi.errors import InputError

# HiGHS's constant for it.
_PRIMAL_SIMPLEX: Final = 4
# Without a second refinement step its Newton directions lose precision on programs with thousands
# of rows, and it returns `unknown`.
_CVXOPT_REFINEMENT: Final = 2
_CVXOPT_ITERATIONS: Final = 200

# A feasible point near the optimum: values per column.
Start = NDArray[np.float64] | None


@final
@dataclass(frozen=True, eq=False)
class LinearProgram:
    """A linear program; A is given by its nonzeros in any order, each position at most once.

    Attributes:
        cost: Per column.
        upper: Per column; infinity where there is none.
        row: Row of every nonzero.
        column: Column of every nonzero.
        value: Value of every nonzero.
        limit: Per row.
    """

    cost: NDArray[np.float64]
    upper: NDArray[np.float64]
    row: NDArray[np.int64]
    column: NDArray[np.int64]
    value: NDArray[np.float64]
    limit: NDArray[np.float64]


# The optimum's values per column, or the solver's own reason for stopping before it.
Solution = NDArray[np.float64] | str


class LinearSolver(ABC):
    """A solver of linear programs; a frozen value."""

    __slots__ = ()
    name: ClassVar[str]

    @abstractmethod
    def solve(self, program: LinearProgram, start: Start = None) -> Solution:
        """The optimum, or the reason for stopping before it; HiGHS alone reads the start.

        Raises:
            InputError: The solver is not installed or has no licence.
        """


@final
@dataclass(frozen=True, slots=True)
class Highs(LinearSolver):
    """HiGHS's simplex: a vertex. Dual without a start.

    A start is first pushed to a vertex by the crossover of HiGHS's interior point; the primal
    simplex continues from there.

    Attributes:
        iterations_per_row: Limit on iterations, as a multiple of the number of rows. The default
            is far above the largest need seen so far (2.6).
    """

    name: ClassVar[str] = "highs"
    iterations_per_row: int = 50

    def solve(self, program: LinearProgram, start: Start = None) -> Solution:
        """The optimum, or the reason for stopping before it."""
        make: Any = _SilentHighs  # some releases have types, others do not
        solver = make()
        for option, value in (
            ("output_flag", False),  # constructors before 1.11 enable no callbacks
            ("threads", 1),
            ("random_seed", 0),
            ("solver", "simplex"),
            ("simplex_iteration_limit", self.iterations_per_row * len(program.limit)),
        ):
            solver.setOptionValue(option, value)
        # HiGHS 1.15 crashes in `crossover` if its thread has not run anything yet. And a thread
        # that has run it with more threads keeps them, and refuses to run with one.
        solver.addVar(0.0, 1.0)
        if solver.run() == highspy.HighsStatus.kError:
            solver.setOptionValue("threads", 0)
            solver.setOptionValue("parallel", "off")
        n, least = len(program.cost), np.full(len(program.limit), -np.inf)
        order = np.lexsort((program.column, program.row))  # by rows, columns ascending
        begin = np.searchsorted(program.row[order], np.arange(len(least) + 1))
        solver.passModel(
            *(n, len(least), len(order)),
            *(int(highspy.MatrixFormat.kRowwise), int(highspy.ObjSense.kMinimize), 0.0),
            *(program.cost, np.zeros(n), program.upper, least, program.limit),
            *(begin.astype(np.int32), program.column[order].astype(np.int32)),
            *(program.value[order], np.zeros(n, np.int32)),
        )
        if start is not None:
            solver.setOptionValue("simplex_strategy", _PRIMAL_SIMPLEX)
            solution = highspy.HighsSolution()
            solution.col_value = start.tolist()
            terms = program.value * start[program.column]
            rows = np.bincount(program.row, terms, minlength=len(program.limit))
            solution.row_value = rows.tolist()
            solution.value_valid = True
            solver.crossover(solution)
        solver.run()
        status = solver.getModelStatus()
        if status != highspy.HighsModelStatus.kOptimal:
            return str(solver.modelStatusToString(status)).lower()
        return np.array(solver.getSolution().col_value, np.float64)


class _SilentHighs(highspy.Highs):
    """HiGHS without its banner on stdout.

    Since 1.16 the constructor enables callbacks, and the first call of any method except those for
    options prints the banner, so output is off before. Not needed once the constructor is silent:
    https://github.com/ERGO-Code/HiGHS/issues/1932
    """

    def enableCallbacks(self) -> None:  # noqa: N802 (highspy's name)
        """As in highspy, silently."""
        self.setOptionValue("output_flag", False)
        super().enableCallbacks()  # type: ignore[no-untyped-call, unused-ignore]


@final
@dataclass(frozen=True, slots=True)
class Cvxopt(LinearSolver):
    """CVXOPT's interior point (`conelp`): a point inside the optimal face."""

    name: ClassVar[str] = "cvxopt"

    def solve(self, program: LinearProgram, start: Start = None) -> Solution:  # noqa: ARG002 (the interface's)
        """The optimum, or the reason for stopping before it."""
        cvxopt = _imported("cvxopt")
        columns = np.arange(len(program.cost))
        bounded = np.isfinite(program.upper)
        first = np.cumsum([0, len(program.limit), len(columns), int(bounded.sum())])
        # A, then -z <= 0, then z <= upper.
        rows = [program.row, first[1] + columns, first[2] + np.arange(int(bounded.sum()))]
        values = [program.value, -np.ones(len(columns)), np.ones(int(bounded.sum()))]
        where = [program.column, columns, columns[bounded]]
        entries = (np.concatenate(part).tolist() for part in (values, rows, where))
        left = cvxopt.spmatrix(*entries, (int(first[3]), len(columns)))
        right = np.concatenate([program.limit, np.zeros(len(columns)), program.upper[bounded]])
        options = {
            "show_progress": False,
            "maxiters": _CVXOPT_ITERATIONS,
            "refinement": _CVXOPT_REFINEMENT,
        }
        cost, right = cvxopt.matrix(program.cost), cvxopt.matrix(right)
        answer = cvxopt.solvers.lp(cost, left, right, options=options)
        if answer["status"] != "optimal":
            return str(answer["status"])
        return np.array(answer["x"], np.float64).reshape(-1)


@final
@dataclass(frozen=True, slots=True)
class Mosek(LinearSolver):
    """MOSEK's interior point with basis identification: a vertex. Needs a licence."""

    name: ClassVar[str] = "mosek"

    def solve(self, program: LinearProgram, start: Start = None) -> Solution:  # noqa: ARG002 (the interface's)
        """The optimum, or the reason for stopping before it."""
        mosek = _imported("mosek")
        with mosek.Env() as env, _mosek_task(mosek, env, program) as task:
            try:
                task.optimize()
            except mosek.Error as error:
                raise InputError(
                    f"MOSEK did not start: {error.msg.strip()} Install a licence, or choose one "
                    "of the other solvers: 'highs' (comes with Baechi), 'cvxopt'."
                ) from error
            status = task.getsolsta(mosek.soltype.bas)
            if status != mosek.solsta.optimal:
                return str(status)
            return np.array(task.getxx(mosek.soltype.bas), np.float64)


def _mosek_task(mosek: Any, env: Any, program: LinearProgram) -> Any:
    n, m, bounded = len(program.cost), len(program.limit), np.isfinite(program.upper)
    task = env.Task(m, n)
    task.putintparam(mosek.iparam.num_threads, 1)
    task.appendvars(n)
    task.appendcons(m)
    task.putobjsense(mosek.objsense.minimize)
    task.putcslice(0, n, program.cost)
    keys = [mosek.boundkey.ra if limited else mosek.boundkey.lo for limited in bounded]
    task.putvarboundslice(0, n, keys, np.zeros(n), np.where(bounded, program.upper, 0.0))
    task.putconboundslice(0, m, [mosek.boundkey.up] * m, np.zeros(m), program.limit)
    task.putaijlist(program.row.astype(np.int32), program.column.astype(np.int32), program.value)
    return task


SOLVERS: Final[dict[str, LinearSolver]] = {
    solver.name: solver for solver in (Highs(), Cvxopt(), Mosek())
}


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        others = ", ".join(repr(other) for other in SOLVERS if other != name)
        raise InputError(
            f"the linear program was to be solved by {name!r}, which is not installed: run "
            f"`pip install baechi[{name}]`, or choose another solver: {others}."
        ) from error
