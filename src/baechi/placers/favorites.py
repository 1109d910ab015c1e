"""Favorite children: which op should follow which on the same device.

Given ops with times k_i and edges with transfer times c_ij, choose for every op at most one
favorite child, so that the step would be short if a favorite child needed no transfer and every
other child did (and devices were without number). Source: Hanen and Munier (1995), as in Baechi
(SoCC 2020; arXiv 2301.08695), section "m-SCT". The relaxation, with x_ij = 0 for a favorite child:

    minimize w
    0 <= x_ij <= 1                               variables, `_model`
    s_i + k_i + c_ij x_ij <= s_j                 an edge, `_edge_rows`
    s_i + k_i <= w                               an op, `_end_rows`
    sum over children j of i of (1 - x_ij) <= 1  at most one favorite child, `_choice_rows`
    sum over parents i of j of (1 - x_ij) <= 1   and favorite of at most one parent, `_choice_rows`

k and c are divided by the largest of them before, so that the solver sees numbers around 1.
Rounding: edges with x below 1/2, the smallest x first, then the largest c, then the smallest
(i, j), are taken as long as i has no favorite child and j is nobody's: so every op ends with at
most one of each, whatever the solver returned.

Where we leave the paper: edges inside one group cost nothing and choose nothing; HiGHS instead of
MOSEK; the threshold is 1/2 with repair, instead of 0.1 without; c is the mean over the links. The
solver runs on one thread with a fixed seed, and is bounded by iterations, never by time, so that
equal input gives equal favorites. Where communication outweighs computation, w is no lower bound on
the makespan.
Complexity: a linear program of ops + edges rows and columns.
"""

from dataclasses import dataclass
from typing import Any, Final, final

import highspy
import numpy as np
from numpy.typing import NDArray

from baechi.problem import Problem

# Some solvers are right to about this; closer values of x are one and the same.
_DIGITS: Final = 6
# Far above what a graph of the largest size that m-SCT hands over has been seen to take.
_ITERATIONS_PER_ROW: Final = 50


@final
@dataclass(frozen=True, eq=False)
class _Edges:
    """The edges of the program, sorted by (src, dst)."""

    src: NDArray[np.int64]
    dst: NDArray[np.int64]
    cost: NDArray[np.float64]
    chooses: NDArray[np.bool_]  # whether it has an x, that is, joins two groups


def favorite_children(problem: Problem) -> NDArray[np.int32]:
    """The favorite child of every op, or -1; no op is the favorite child of two.

    All are -1 where the solver does not reach the optimum within its iterations.
    """
    n = len(problem.graph.ops)
    favorites = no_favorites(n)
    edges = _edges(problem)
    if not edges.chooses.any():
        return favorites
    times = problem.durations[problem.device_class].mean(axis=0)
    scale = max(1.0, float(times.max()), float(edges.cost.max()))
    relaxed = _solve(times / scale, edges, edges.cost / scale)
    if relaxed is None:
        return favorites
    parented = np.zeros(n, np.bool_)
    src, dst, cost = (row[edges.chooses] for row in (edges.src, edges.dst, edges.cost))
    x = np.round(relaxed, _DIGITS)
    for edge in np.lexsort((dst, src, -cost, x)):
        if x[edge] < 0.5 and favorites[src[edge]] < 0 and not parented[dst[edge]]:
            favorites[src[edge]] = dst[edge]
            parented[dst[edge]] = True
    return favorites


def no_favorites(n: int) -> NDArray[np.int32]:
    """The answer where none of `n` ops has a favorite child."""
    return np.full(n, -1, np.int32)


def _edges(problem: Problem) -> _Edges:
    """One edge per pair of ops that a tensor joins, with the mean time to send all of theirs."""
    links = [
        link
        for src, row in enumerate(problem.cluster.links)
        for dst, link in enumerate(row)
        if link is not None and problem.device_pool[src] != problem.device_pool[dst]
    ]
    latency_ns = sum(link.latency_ns for link in links) / max(1, len(links))
    ns_per_byte = sum(1e9 / link.bytes_per_s for link in links) / max(1, len(links))
    costs: dict[tuple[int, int], float] = {}
    for tensor in problem.graph.tensors:
        for consumer in tensor.consumers:
            edge = (tensor.producer, consumer)
            costs[edge] = costs.get(edge, 0.0) + latency_ns + tensor.nbytes * ns_per_byte
    ends = np.array(sorted(costs), np.int64).reshape(-1, 2)
    groups = np.array(problem.op_group, np.int64)
    chooses = groups[ends[:, 0]] != groups[ends[:, 1]]
    cost = np.array([costs[edge] for edge in sorted(costs)], np.float64) * chooses
    return _Edges(ends[:, 0], ends[:, 1], cost, chooses)


def _solve(
    times: NDArray[np.float64], edges: _Edges, cost: NDArray[np.float64]
) -> NDArray[np.float64] | None:
    """The optimal x of the edges that choose, or `None`."""
    make: Any = highspy.Highs  # some releases have types, others none
    solver = make()
    for option, value in (
        ("output_flag", False),
        ("threads", 1),
        ("random_seed", 0),
        ("solver", "simplex"),
        ("simplex_iteration_limit", _ITERATIONS_PER_ROW * (len(times) + len(cost))),
    ):
        solver.setOptionValue(option, value)
    solver.passModel(_model(times, edges, cost))
    solver.run()
    if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return None
    values = np.array(solver.getSolution().col_value, np.float64)
    return values[: int(edges.chooses.sum())]


def _model(
    times: NDArray[np.float64], edges: _Edges, cost: NDArray[np.float64]
) -> "highspy.HighsLp":
    """The program; its columns are x of the edges that choose, s of the ops, and w."""
    n, choices = len(times), int(edges.chooses.sum())
    column = np.where(edges.chooses, np.cumsum(edges.chooses) - 1, -1)
    blocks = [
        _edge_rows(times, edges, cost, column, choices),
        _end_rows(times, choices),
        _choice_rows(edges.src, column),
        _choice_rows(edges.dst, column),
    ]
    lp = highspy.HighsLp()
    lp.num_col_ = choices + n + 1
    lp.num_row_ = sum(len(upper) for _, _, _, upper in blocks)
    lp.col_cost_ = np.concatenate([np.zeros(choices + n), np.ones(1)])
    lp.col_lower_ = np.zeros(lp.num_col_)
    lp.col_upper_ = np.concatenate([np.ones(choices), np.full(n + 1, highspy.kHighsInf)])
    lp.row_lower_ = np.full(lp.num_row_, -highspy.kHighsInf)
    lp.row_upper_ = np.concatenate([upper for _, _, _, upper in blocks])
    first = np.cumsum([0] + [len(upper) for _, _, _, upper in blocks])
    rows = np.concatenate([row + first[b] for b, (row, _, _, _) in enumerate(blocks)])
    columns = np.concatenate([block[1] for block in blocks])
    values = np.concatenate([block[2] for block in blocks])
    by_row = np.lexsort((columns, rows))
    matrix = lp.a_matrix_
    matrix.format_ = highspy.MatrixFormat.kRowwise
    matrix.num_col_, matrix.num_row_ = lp.num_col_, lp.num_row_
    counts = np.bincount(rows, minlength=lp.num_row_)
    matrix.start_ = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    matrix.index_ = columns[by_row].astype(np.int32)
    matrix.value_ = values[by_row]
    return lp


# Rows, columns and values of the nonzeros of some constraints, and the constraints' upper bounds.
_Block = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]


def _edge_rows(
    times: NDArray[np.float64],
    edges: _Edges,
    cost: NDArray[np.float64],
    column: NDArray[np.int64],
    choices: int,
) -> _Block:
    """s_i - s_j + c_ij x_ij <= -k_i."""
    row = np.arange(len(edges.src))
    picked = edges.chooses
    return (
        np.concatenate([row, row, row[picked]]),
        np.concatenate([choices + edges.src, choices + edges.dst, column[picked]]),
        np.concatenate([np.ones(len(row)), -np.ones(len(row)), cost[picked]]),
        -times[edges.src],
    )


def _end_rows(times: NDArray[np.float64], choices: int) -> _Block:
    """s_i - w <= -k_i."""
    row = np.arange(len(times))
    return (
        np.concatenate([row, row]),
        np.concatenate([choices + row, np.full(len(row), choices + len(row))]),
        np.concatenate([np.ones(len(row)), -np.ones(len(row))]),
        -times,
    )


def _choice_rows(end: NDArray[np.int64], column: NDArray[np.int64]) -> _Block:
    """-(sum of x over the d edges at an end) <= 1 - d, for ends with two edges or more."""
    picked = column >= 0
    ops, row, degree = np.unique(end[picked], return_inverse=True, return_counts=True)
    keep = degree > 1
    number = np.cumsum(keep) - 1
    kept = keep[row]
    return (
        number[row[kept]],
        column[picked][kept],
        -np.ones(int(kept.sum())),
        1.0 - degree[keep].astype(np.float64) if len(ops) else np.empty(0),
    )
