"""Linear programs and their solvers: HiGHS, CVXOPT and MOSEK.

    minimize cost @ z  subject to  A z <= limit,  0 <= z <= upper

HiGHS comes with Baechi. CVXOPT (`pip install baechi[cvxopt]`) and MOSEK (`pip install
baechi[mosek]`, and a licence) are imported on use. All run on one thread, with
fixed seeds, and stop by iterations, never by time, so that equal programs give equal solutions.
An optimum need not be unique: HiGHS's simplex and MOSEK return a vertex of the optimal face,
CVXOPT a point inside it.

The numbers of a program should be near 1: tolerances are partly absolute, and CVXOPT returns
`unknown` if numbers differ too much in size.

`FavoriteProgram` is the program for favorite children, as arrays and as rows for a solver.

`docs/favorites.md`, "The program", has the formulation after Hanen and Munier (1995): ops take k_i
from their starts s_i, edges take c_ij x_ij, where x_ij = 0 for a favorite child, and the step w is
minimized. An edge gets x = 0 if it is the only candidate at both ends; an edge that costs nothing
(inside a group, or without a link) gets x = 1; only ops without children need an end row.

Numbers are shifted and scaled: s and w count from their values without transfer times, and the unit
is the largest c. So the origin satisfies all edge and end rows.
Complexity: edges + ops rows and columns.
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Final, final

import highspy
import numpy as np
from numpy.typing import NDArray

from baechi import _core
from baechi.errors import InputError
from baechi.problem.problem_arrays import Problem
from baechi.records.cluster import Link

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

    @staticmethod
    def of(
        cost: Sequence[float],
        upper: Sequence[float],
        entries: Sequence[tuple[int, int, float]],
        limit: Sequence[float],
    ) -> "LinearProgram":
        """From row, column and value of every nonzero."""
        row, column, value = zip(*entries, strict=True)
        floats = (np.array(numbers, np.float64) for numbers in (cost, upper, value, limit))
        costs, uppers, values, limits = floats
        rows, columns = np.array(row, np.int64), np.array(column, np.int64)
        return LinearProgram(costs, uppers, rows, columns, values, limits)


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
        presolve: Whether the program is made smaller first, which costs more than it saves where
            it has some dozens of columns.
    """

    name: ClassVar[str] = "highs"
    iterations_per_row: int = 50
    presolve: bool = True

    def solve(self, program: LinearProgram, start: Start = None) -> Solution:
        """The optimum, or the reason for stopping before it."""
        make: Any = _SilentHighs  # some releases have types, others do not
        solver = make()
        for option, value in (
            ("output_flag", False),  # constructors before 1.11 enable no callbacks
            ("threads", 1),
            ("random_seed", 0),
            ("solver", "simplex"),
            ("presolve", "choose" if self.presolve else "off"),
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


def solved(program: LinearProgram, *, presolve: bool = True) -> list[float]:
    """HiGHS's vertex for a program that is known to have an optimum."""
    solution = Highs(presolve=presolve).solve(program)
    assert not isinstance(solution, str), f"a program that has an optimum: {solution}"
    values: list[float] = solution.tolist()
    return values


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


@final
@dataclass(frozen=True, eq=False)
class FavoriteProgram:
    """The program; edges are pairs of ops that a tensor joins, sorted by (src, dst).

    Attributes:
        times: k of every op, in ns: the mean over the devices.
        src: Of every edge.
        dst: Of every edge.
        cost: c of every edge, in ns: the mean over the links, including the overhead at the
            receiver; 0 inside a group.
    """

    times: NDArray[np.float64]
    src: NDArray[np.int64]
    dst: NDArray[np.int64]
    cost: NDArray[np.float64]

    @cached_property
    def sole(self) -> NDArray[np.bool_]:
        """Edges that cost something and are the only such edge at both ends."""
        paid: NDArray[np.bool_] = self.cost > 0
        children = np.bincount(self.src[paid], minlength=len(self.times))
        parents = np.bincount(self.dst[paid], minlength=len(self.times))
        alone: NDArray[np.bool_] = (children[self.src] == 1) & (parents[self.dst] == 1)
        return alone & paid

    @cached_property
    def free(self) -> NDArray[np.bool_]:
        """Edges whose x is a variable."""
        return np.logical_and(self.cost > 0, ~self.sole)

    @cached_property
    def free_cost(self) -> NDArray[np.float64]:
        """The c of free edges, and 0 for the others."""
        return np.where(self.free, self.cost, 0.0)

    def spans(
        self, shares: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
        """The earliest and the latest s of every op, and w, for given shares 1 - x of the edges.

        All in ns.
        """
        length = self.free_cost * (1.0 - shares)
        heads, tails = map(np.array, _core.longest_paths(self.times, *self.ends, length))
        total = float((heads + self.times).max(initial=0.0))
        return heads, total - tails - self.times, total

    def needed(self, shares: NDArray[np.float64]) -> NDArray[np.float64]:
        """The part of feasible shares that w needs (`docs/favorites.md`, "Rounding")."""
        without, _, _ = self.spans(np.zeros(len(shares)))
        _, latest, _ = self.spans(shares)
        start = np.minimum(without, latest)
        gap = (start[self.dst] - start[self.src] - self.times[self.src])[self.free]
        needed = np.zeros(len(shares))
        needed[self.free] = np.clip(1.0 - gap / self.cost[self.free], 0.0, shares[self.free])
        return needed

    def feasible(self, shares: NDArray[np.float64]) -> NDArray[np.float64]:
        """Shares near the given ones that add up to at most 1 at both ends of every edge.

        0 for edges that are not free.
        """
        shares = np.where(self.free, np.clip(shares, 0.0, 1.0), 0.0)
        for end in (self.src, self.dst):
            total = np.bincount(end, shares, minlength=len(self.times))
            shares = shares / np.maximum(total, 1.0)[end]
        return shares

    @cached_property
    def ends(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """The src and dst of every edge, as the core reads them."""
        return self.src.astype(np.int32), self.dst.astype(np.int32)


def links_between(problem: Problem) -> list[Link]:
    """The links between two memories."""
    pools = problem.device_pool
    return [
        link
        for src, row in enumerate(problem.cluster.links)
        for dst, link in enumerate(row)
        if link is not None and pools[src] != pools[dst]
    ]


def favorite_program(problem: Problem) -> FavoriteProgram:
    """The program of a problem; tensors between the same two ops are sent one after another."""
    arrays, n = problem.arrays, problem.arrays.ops
    links = links_between(problem)
    empty_ns = sum(link.latency_ns + link.overhead_ns for link in links) / max(1, len(links))
    ns_per_byte = sum(1e9 / link.bytes_per_s for link in links) / max(1, len(links))
    sent_ns = empty_ns + ns_per_byte * arrays.nbytes.astype(np.float64)
    producers, consumers = arrays.edges()
    pairs, pair_of = np.unique(producers.astype(np.int64) * n + consumers, return_inverse=True)
    cost = np.bincount(pair_of, arrays.per_consumer(sent_ns), minlength=len(pairs)).astype(
        np.float64
    )
    src, dst = pairs // max(1, n), pairs % max(1, n)
    cost[arrays.op_group[src] == arrays.op_group[dst]] = 0.0
    times = problem.durations[problem.device_class].mean(axis=0)
    return FavoriteProgram(times, src, dst, cost)


# Rows, columns and values of the nonzeros of some constraints, and the constraints' upper bounds.
_Block = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]


@final
@dataclass(frozen=True, eq=False)
class SolverRows:
    """The program, shifted by w without transfers and scaled by the largest c, for solvers.

    Its columns are x of the free edges, s of the ops, and w.
    """

    program: LinearProgram
    offset_ns: float
    unit_ns: float


def solver_rows(program: FavoriteProgram) -> SolverRows:
    """The rows of a program that has a free edge."""
    n, edges, free = len(program.times), len(program.src), program.free
    choices = int(free.sum())
    unit_ns = float(program.free_cost.max())
    heads, _, offset_ns = program.spans(np.ones(edges))
    ends = heads + program.times
    column = np.where(free, np.cumsum(free) - 1, -1)
    edge = np.arange(edges)
    last = np.flatnonzero(np.bincount(program.src, minlength=n) == 0)
    end = np.arange(len(last))
    blocks: list[_Block] = [
        # s_i - s_j + c_ij x_ij <= the slack without transfers.
        (
            np.concatenate([edge, edge, edge[free]]),
            np.concatenate([choices + program.src, choices + program.dst, column[free]]),
            np.concatenate([np.ones(edges), -np.ones(edges), program.cost[free] / unit_ns]),
            (heads[program.dst] - ends[program.src]) / unit_ns,
        ),
        # s_i - w <= the slack without transfers, for ops without children.
        (
            np.concatenate([end, end]),
            np.concatenate([choices + last, np.full(len(last), choices + n)]),
            np.concatenate([np.ones(len(last)), -np.ones(len(last))]),
            (offset_ns - ends[last]) / unit_ns,
        ),
        _choice_rows(program.src, column),
        _choice_rows(program.dst, column),
    ]
    rows, columns, values, limits = zip(*blocks, strict=True)
    first = np.cumsum([0, *map(len, limits)])
    return SolverRows(
        LinearProgram(
            cost=np.concatenate([np.zeros(choices + n), np.ones(1)]),
            upper=np.concatenate([np.ones(choices), np.full(n + 1, np.inf)]),
            row=np.concatenate([row + first[b] for b, row in enumerate(rows)]),
            column=np.concatenate(columns),
            value=np.concatenate(values),
            limit=np.concatenate(limits),
        ),
        offset_ns,
        unit_ns,
    )


def _choice_rows(end: NDArray[np.int64], column: NDArray[np.int64]) -> _Block:
    """-(sum of x over the d free edges at an end) <= 1 - d, for ends with two or more of them."""
    picked = column >= 0
    _, row, degree = np.unique(end[picked], return_inverse=True, return_counts=True)
    keep = degree > 1
    number = np.cumsum(keep) - 1
    kept = keep[row]
    return (
        number[row[kept]],
        column[picked][kept],
        -np.ones(int(kept.sum())),
        1.0 - degree[keep].astype(np.float64),
    )


def near_point(
    program: FavoriteProgram, rows: SolverRows, shares: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The columns of `rows` at these shares, where every op starts as early as possible."""
    heads, _, total = program.spans(shares)
    without, _, _ = program.spans(np.ones(len(shares)))
    starts = np.maximum(0.0, heads - without) / rows.unit_ns
    w = (total - rows.offset_ns) / rows.unit_ns
    return np.concatenate([1.0 - shares[program.free], starts, [max(0.0, w)]])
