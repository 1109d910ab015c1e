"""Policies as linear programs over the throughput of every job on every kind of GPU: Gavel's.

The rule (Narayanan et al., "Heterogeneity-Aware Cluster Scheduling Policies for Deep Learning
Workloads", OSDI'20, sections 3 to 5): X_jk is the part of the time that job j is on kind k, its
effective throughput the sum of T_jk X_jk. A job has no more than all the time (`_solved`: the sum
over k of X_jk <= 1), and a kind no more than its GPUs (sum over j of gpus_j X_jk <= N_k). Programs:

    max-min fairness   max min  gpus_j throughput_j / (weight_j throughput of equal parts)
    makespan           min max  remaining steps_j / throughput_j
    finish-time        min max  (time since arrival_j + remaining steps_j / throughput_j)
    fairness                    / time alone on an equal part_j

All are `max t` where throughput_j >= t need_j; the third is quasi-convex and found by halving an
interval. With packing, a column is a pair of jobs on a kind, too, and a job's throughput the sum
over its columns. X is then approached in rounds of 360 s (section 5, Algorithm 1): a column's
priority is X over the part of the time that it had; GPUs go to the highest, each job once.

Where we leave it: programs are solved when jobs arrive or end, not at every round, and of equal
solutions the one with more throughput is taken. GPUs that no column takes go to those who wait. A
job that no single kind has room for is placed on any GPUs. Pairs are of jobs of equal size, at the
rates of the simulation's sharing, among the first jobs to arrive (`_PAIRED`). Throughput is the
predicted rate, of the split placement where the scheme is `baechi`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final, final

import numpy as np

from baechi.cluster_simulation.jobs import WORK, JobRun
from baechi.cluster_simulation.policies.allocation import Allocation, ClusterView, RoundPolicy
from baechi.placers.linear_programs import Highs, LinearProgram

_ROUND: Final = 360
_TIE: Final = 1e-5  # what all throughput together counts, beside the smallest
_HALVINGS: Final = 40
_PAIRED: Final = 32  # jobs that are looked at for pairs: some hundreds of columns


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
    cost = np.zeros(last + 1)
    cost[last] = -1.0
    for place, column in enumerate(columns):
        entries.append((2 * jobs + column.kind, place, float(column.gpus)))
        for job, rate in zip(column.jobs, column.rates, strict=True):
            entries.append((job, place, -rate / best[job]))  # t need_j - throughput_j <= 0
            entries.append((jobs + job, place, 1.0))
            cost[place] -= _TIE / jobs * rate / best[job]
    entries += [(job, last, need / unit) for job, need in enumerate(scaled)]
    rows, places, values = zip(*entries, strict=True)
    limit = [*[0.0] * jobs, *[1.0] * jobs, *map(float, gpus)]
    program = LinearProgram(
        cost,
        np.append(np.ones(last), np.inf),
        np.array(rows, np.int64),
        np.array(places, np.int64),
        np.array(values),
        np.array(limit),
    )
    solution = Highs().solve(program)
    assert not isinstance(solution, str), f"a program that all zeros solve: {solution}"
    return [float(value) for value in solution[:last]]


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

    def reached(rho: float) -> tuple[bool, list[float]]:
        """Whether all finish within `rho` of their time alone, and the parts that are closest."""
        needs = [s / (rho * a - t) for t, s, a in zip(since, steps, alone, strict=True)]
        parts = max_min(columns, needs, gpus)
        got = throughputs(columns, parts, len(steps))
        return all(g >= n * (1 - 1e-7) for g, n in zip(got, needs, strict=True)), parts

    low = max(t / a for t, a in zip(since, alone, strict=True))
    high = 2 * low + 1.0
    while not (answer := reached(high))[0]:
        low, high = high, 2 * high
    best = answer[1]
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        holds, parts = reached(middle)
        if holds:
            high, best = middle, parts
        else:
            low = middle
        if high - low <= 1e-6 * high:
            break
    return best


def equal_parts(rates: Sequence[Sequence[float]], gpus: Sequence[int]) -> list[float]:
    """The throughput of every job if it has each kind in proportion to its GPUs, all the time."""
    total = sum(gpus)
    return [sum(rate * n / total for rate, n in zip(row, gpus, strict=True)) for row in rates]


@final
class Gavel(RoundPolicy):
    """One of the programs, in rounds.

    Args:
        name: `gavel-max-min`, `gavel-makespan`, `gavel-ftf`, or `gavel-packed` (max-min, and pairs
            of jobs share GPUs).
        ticks: The length of a round.
    """

    def __init__(self, name: str, ticks: int = _ROUND) -> None:
        super().__init__(ticks)
        self.name = name
        self._jobs: tuple[int, ...] = ()  # that the program was solved for
        self._columns: list[Column] = []
        self._parts: list[float] = []
        self._had: list[int] = []  # ticks of every column, since it was solved
        self._chosen: list[int] = []
        self._solved_at = self._last = 0

    def decide(self, view: ClusterView) -> Sequence[Allocation]:
        """The columns of the highest priority, then those who wait."""
        here = tuple(run.index for run in view.runs)
        if not here:
            return []
        if here != self._jobs:
            self._jobs = here
            self._solve(view)
        else:
            for place in self._chosen:
                self._had[place] += view.now - self._last
        self._last = view.now
        left = [len(gpus) for gpus in view.kinds.values()]
        self._chosen = []
        answer: list[Allocation] = []
        wide = [run for run in view.runs if not any(view.rates_on_kinds(run))]
        for run in wide:
            answer.append(Allocation(run))
            left = [0 for _ in left]
        taken = {run.index for run in wide}
        kinds = list(view.kinds.values())
        for place in sorted(range(len(self._columns)), key=lambda place: self._rank(view, place)):
            column = self._columns[place]
            runs = [view.runs[job] for job in column.jobs]
            unserved = self._parts[place] > 1e-9 and taken.isdisjoint(run.index for run in runs)
            if unserved and column.gpus <= left[column.kind]:
                left[column.kind] -= column.gpus
                taken.update(run.index for run in runs)
                self._chosen.append(place)
                answer.append(Allocation(runs[0], among=kinds[column.kind]))
                answer += [Allocation(other, beside=runs[0]) for other in runs[1:]]
        waiting = [run for run in view.runs if run.index not in taken]
        return [*answer, *view.on_best_kinds(waiting, left)]

    def _rank(self, view: ClusterView, place: int) -> tuple[float, int]:
        """By priority: the part that is due over the part that was had."""
        passed = max(1, view.now - self._solved_at)
        had = max(self._had[place] / passed, 1e-9)
        return -self._parts[place] / had, place

    def _solve(self, view: ClusterView) -> None:
        runs = [run for run in view.runs if any(view.rates_on_kinds(run))]
        place_of = {run.index: place for place, run in enumerate(view.runs)}
        rates = [[rate / WORK for rate in view.rates_on_kinds(run)] for run in runs]
        gpus = [len(of_kind) for of_kind in view.kinds.values()]
        columns = [
            Column((job,), kind, (rate,), view.needs(run, name))
            for job, run in enumerate(runs)
            for kind, (name, rate) in enumerate(zip(view.kinds, rates[job], strict=True))
            if rate
        ]
        if self.name == "gavel-packed":
            columns += _pairs(view, runs, rates)
        self._parts = self._program(view, runs, rates, columns, gpus) if runs else []
        self._columns = [
            Column(tuple(place_of[runs[job].index] for job in c.jobs), c.kind, c.rates, c.gpus)
            for c in columns
        ]
        self._had = [0] * len(columns)
        self._solved_at = view.now

    def _program(
        self,
        view: ClusterView,
        runs: Sequence[JobRun],
        rates: Sequence[Sequence[float]],
        columns: Sequence[Column],
        gpus: Sequence[int],
    ) -> list[float]:
        equal = equal_parts(rates, gpus)
        steps = [max(1.0, float(run.remaining(view.now))) for run in runs]
        if self.name == "gavel-makespan":
            return max_min(columns, steps, gpus)
        sizes = [run.job.gpus for run in runs]
        if self.name == "gavel-ftf":
            share = [min(1.0, sum(gpus) / (len(runs) * size)) for size in sizes]
            alone = [
                max(1, run.job.duration) / (e * s)
                for run, e, s in zip(runs, equal, share, strict=True)
            ]
            since = [float(view.now - run.job.submit_time) for run in runs]
            return finish_time_fair(columns, since, steps, alone, gpus)
        return max_min(columns, [e / size for e, size in zip(equal, sizes, strict=True)], gpus)


def _pairs(
    view: ClusterView, runs: Sequence[JobRun], rates: Sequence[Sequence[float]]
) -> list[Column]:
    """Pairs that get more done together than in turns, on the kinds where both have a rate."""
    found = []
    for one, other in combinations(range(min(len(runs), _PAIRED)), 2):
        if runs[one].job.gpus != runs[other].job.gpus or not view.may_share(
            (runs[one], runs[other])
        ):
            continue
        slowed = view.slowed_together((runs[one], runs[other]))
        if sum(slowed) <= 1.0:
            continue
        for kind, name in enumerate(view.kinds):
            if rates[one][kind] and rates[other][kind]:
                both = rates[one][kind] * slowed[0], rates[other][kind] * slowed[1]
                found.append(Column((one, other), kind, both, view.needs(runs[one], name)))
    return found
