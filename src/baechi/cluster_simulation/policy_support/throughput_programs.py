"""Linear programs over the parts of the time that jobs have on kinds of GPU.

X_jk is the part of the time that job j is on kind k, its effective throughput the sum of T_jk X_jk.
A job has no more than all the time (the sum over k of X_jk <= 1), and a kind no more than its GPUs
(the sum over j of gpus_j X_jk <= N_k). Jobs that share GPUs are a column of all of them. `gavel.py`
says which needs make which objective.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from baechi.placers.linear_programs import LinearProgram, solved

Floats = NDArray[np.float64]

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


@final
class ThroughputProgram:
    """The rows that all objectives have, for some columns; built once for many needs.

    Args:
        columns: Every job is in one, at least.
        jobs: How many there are.
        gpus: The GPUs of every kind.
    """

    def __init__(self, columns: Sequence[Column], jobs: int, gpus: Sequence[int]) -> None:
        last = len(columns)
        self._jobs = jobs
        self._job = np.array([job for column in columns for job in column.jobs])
        self._column = np.repeat(np.arange(last), [len(column.jobs) for column in columns])
        self._rate = np.array([rate for column in columns for rate in column.rates])
        self._best = np.zeros(jobs)  # rates are in that of the job's best column, to be near 1
        np.maximum.at(self._best, self._job, self._rate)
        scaled = self._rate / self._best[self._job]
        bonus = np.bincount(self._column, _TIE / jobs * self._rate / self._best[self._job], last)
        self._cost = np.append(-bonus, -1.0)
        kinds = np.array([2 * jobs + column.kind for column in columns])
        of_job, all_columns = np.arange(jobs), np.arange(last)
        # t need_j - throughput_j <= 0; the time of a job; the GPUs of a kind; the needs.
        self._row = np.concatenate([self._job, jobs + self._job, kinds, of_job])
        self._where = np.concatenate([self._column, self._column, all_columns, np.full(jobs, last)])
        wide = [float(column.gpus) for column in columns]
        self._value = np.concatenate([-scaled, np.ones(len(scaled)), wide])
        self._upper = np.append(np.ones(last), np.inf)
        self._limit = np.array([0.0] * jobs + [1.0] * jobs + [float(many) for many in gpus])

    def max_min(self, needs: Floats) -> list[float]:
        """The part of the time of each column for which min throughput_j / needs_j is the largest.

        Args:
            needs: Of every job; positive.
        """
        scaled = needs / self._best
        value = np.concatenate([self._value, scaled / scaled.max()])
        program = LinearProgram(self._cost, self._upper, self._row, self._where, value, self._limit)
        return solved(program)[:-1]

    def throughputs(self, parts: Sequence[float]) -> Floats:
        """The effective throughput of every job."""
        terms = self._rate * np.array(parts)[self._column]
        return np.bincount(self._job, terms, self._jobs).astype(np.float64, copy=False)

    def finish_time_fair(self, since: Floats, steps: Floats, alone: Floats) -> list[float]:
        """The parts for which max (since_j + steps_j / throughput_j) / alone_j is the least."""

        def best_within(rho: float) -> tuple[float, list[float]]:
            """What is reached by the parts for which all are farthest from `rho` of their time."""
            parts = self.max_min(steps / (rho * alone - since))
            return float(((since + steps / self.throughputs(parts)) / alone).max()), parts

        # From above, as Dinkelbach does for fractions; the first is beyond what anybody needs.
        rho, parts = best_within(2 * float((since / alone).max()) + 1.0)
        for _ in range(_STEPS):
            nearer, better = best_within(rho)
            if nearer >= rho * (1 - 1e-6):
                break
            rho, parts = nearer, better
        return parts


def equal_parts(rates: Sequence[Sequence[float]], gpus: Sequence[int]) -> Floats:
    """The throughput of every job if it has each kind in proportion to its GPUs, all the time."""
    total = sum(gpus)
    return np.array([sum(r * n / total for r, n in zip(row, gpus, strict=True)) for row in rates])
