"""Linear programs over the parts of the time that jobs have on kinds of GPU.

X_jk is the part of the time that job j is on kind k, its effective throughput the sum of T_jk X_jk.
A job has no more than all the time (the sum over k of X_jk <= 1), and a kind no more than its GPUs
(the sum over j of gpus_j X_jk <= N_k): `max_min` has the rows. Jobs that share GPUs are a column of
all of them. `gavel.py` says which needs make which objective.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

import numpy as np

from baechi.placers.linear_programs import solved

_TIE: Final = 1e-5  # what all throughput together counts, beside the smallest
_STEPS: Final = 40


@final
@dataclass(frozen=True, slots=True)
class Column:
    """Jobs that run together on GPUs of one kind; by their places in a list of jobs."""

    jobs: tuple[int, ...]
    kind: int
    rates: tuple[float, ...]
    gpus: int


def max_min(columns: Sequence[Column], needs: Sequence[float], gpus: Sequence[int]) -> list[float]:
    """The part of the time of each column for which min throughput_j / needs_j is the largest.

    Args:
        columns: Every job is in one, at least.
        needs: Of every job; positive.
        gpus: The GPUs of every kind.
    """
    jobs, last = len(needs), len(columns)
    best = [0.0] * jobs  # rates are in that of the job's best column, so that numbers are near 1
    for column in columns:
        for job, rate in zip(column.jobs, column.rates, strict=True):
            best[job] = max(best[job], rate)
    scaled = [need / rate for need, rate in zip(needs, best, strict=True)]
    unit = max(scaled)
    entries: list[tuple[int, int, float]] = []
    cost = [0.0] * last + [-1.0]
    for place, column in enumerate(columns):
        entries.append((2 * jobs + column.kind, place, float(column.gpus)))
        for job, rate in zip(column.jobs, column.rates, strict=True):
            entries.append((job, place, -rate / best[job]))  # t need_j - throughput_j <= 0
            entries.append((jobs + job, place, 1.0))
            cost[place] -= _TIE / jobs * rate / best[job]
    entries += [(job, last, need / unit) for job, need in enumerate(scaled)]
    limit = [*[0.0] * jobs, *[1.0] * jobs, *map(float, gpus)]
    return solved(cost, [1.0] * last + [np.inf], entries, limit)[:last]


def throughputs(columns: Sequence[Column], parts: Sequence[float], jobs: int) -> list[float]:
    """The effective throughput of every job."""
    sums = [0.0] * jobs
    for column, part in zip(columns, parts, strict=True):
        for job, rate in zip(column.jobs, column.rates, strict=True):
            sums[job] += rate * part
    return sums


def finish_time_fair(
    columns: Sequence[Column],
    since: Sequence[float],
    steps: Sequence[float],
    alone: Sequence[float],
    gpus: Sequence[int],
) -> list[float]:
    """The parts for which max (since_j + steps_j / throughput_j) / alone_j is the least."""

    def best_within(rho: float) -> tuple[float, list[float]]:
        """What is reached by the parts for which all are farthest from `rho` of their time."""
        needs = [s / (rho * a - t) for t, s, a in zip(since, steps, alone, strict=True)]
        parts = max_min(columns, needs, gpus)
        got = throughputs(columns, parts, len(steps))
        return max(
            (t + s / g) / a for t, s, a, g in zip(since, steps, alone, got, strict=True)
        ), parts

    # From above, as Dinkelbach does for fractions; the first is beyond what anybody needs.
    rho, parts = best_within(2 * max(t / a for t, a in zip(since, alone, strict=True)) + 1.0)
    for _ in range(_STEPS):
        nearer, better = best_within(rho)
        if nearer >= rho * (1 - 1e-6):
            break
        rho, parts = nearer, better
    return parts


def equal_parts(rates: Sequence[Sequence[float]], gpus: Sequence[int]) -> list[float]:
    """The throughput of every job if it has each kind in proportion to its GPUs, all the time."""
    total = sum(gpus)
    return [sum(rate * n / total for rate, n in zip(row, gpus, strict=True)) for row in rates]
