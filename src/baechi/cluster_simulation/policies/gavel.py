"""Policies as linear programs over the throughput of every job on every kind of GPU: Gavel's.

The rule (Narayanan et al., "Heterogeneity-Aware Cluster Scheduling Policies for Deep Learning
Workloads", OSDI'20, sections 3 to 5), over effective throughputs (`throughput_programs.py`):

    max-min fairness   max min  gpus_j throughput_j / (weight_j throughput of equal parts)
    makespan           min max  remaining steps_j / throughput_j
    finish-time        min max  (time since arrival_j + remaining steps_j / throughput_j)
    fairness                    / time alone on an equal part_j

All are `max t` where throughput_j >= t need_j; the third is a fraction and found from above by
Dinkelbach. With packing, a column is a pair of jobs on a kind, too, and a job's throughput the sum
over its columns. X is then approached in rounds of 360 s (section 5, Algorithm 1): a column's
priority is X over the part of the time that it had; GPUs go to the highest, each job once.

Where we leave it: programs are solved when jobs arrive or end, not at every round, and of equal
solutions the one with more throughput is taken. GPUs that no column takes go to those who wait. A
job that no single kind has room for is placed on any GPUs. Pairs are of jobs of equal size, at the
rates of the simulation's sharing, among the first jobs to arrive (`_PAIRED`). Throughput is the
predicted rate, of the split placement where the scheme is `baechi`.
"""

from collections.abc import Sequence
from itertools import combinations
from typing import Final, final

import numpy as np

from baechi.cluster_simulation.jobs import WORK, JobRun
from baechi.cluster_simulation.policy_support.allocation import Allocation, ClusterView, RoundPolicy
from baechi.cluster_simulation.policy_support.throughput_programs import (
    Column,
    ThroughputProgram,
    equal_parts,
)

_PAIRED: Final = 32  # jobs that are looked at for pairs: some hundreds of columns


@final
class Gavel(RoundPolicy):
    """One of the programs, in rounds.

    Args:
        name: `gavel-max-min`, `gavel-makespan`, `gavel-ftf`, or `gavel-packed` (max-min, and pairs
            of jobs share GPUs).
    """

    round_ticks = 360

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self._jobs: tuple[int, ...] = ()  # that the program was solved for
        self._columns: list[Column] = []
        self._parts: list[float] = []
        self._had: list[int] = []  # ticks of every column, since it was solved
        self._chosen: list[int] = []
        self._solved_at = self._last = 0

    def decide(self, view: ClusterView) -> Sequence[Allocation]:
        """The columns of the highest priority, then those who wait."""
        runs = [run for run in view.runs if any(view.rates_on_kinds(run))]
        if self._jobs != (here := tuple(run.index for run in runs)):
            self._jobs, self._solved_at = here, view.now
            self._solve(view, runs)
        else:
            for place in self._chosen:
                self._had[place] += view.now - self._last
        self._last = view.now
        self._chosen = []
        taken = {run.index for run in view.runs}.difference(here)  # who is wider than every kind
        answer = [Allocation(run) for run in view.runs if run.index in taken]
        left = [0 if taken else len(gpus) for gpus in view.kinds.values()]
        kinds = list(view.kinds.values())
        for place in sorted(range(len(self._columns)), key=lambda place: self._rank(view, place)):
            column = self._columns[place]
            first, *others = (runs[job] for job in column.jobs)
            unserved = self._parts[place] > 1e-9 and taken.isdisjoint(here[j] for j in column.jobs)
            if unserved and column.gpus <= left[column.kind]:
                left[column.kind] -= column.gpus
                taken.update(here[job] for job in column.jobs)
                self._chosen.append(place)
                answer.append(Allocation(first, among=kinds[column.kind]))
                answer += [Allocation(other, beside=first) for other in others]
        waiting = [run for run in runs if run.index not in taken]
        return [*answer, *view.on_best_kinds(waiting, left)]

    def _rank(self, view: ClusterView, place: int) -> tuple[float, int]:
        """By priority: the part that is due over the part that was had."""
        passed = max(1, view.now - self._solved_at)
        had = max(self._had[place] / passed, 1e-9)
        return -self._parts[place] / had, place

    def _solve(self, view: ClusterView, runs: Sequence[JobRun]) -> None:
        rates = [[rate / WORK for rate in view.rates_on_kinds(run)] for run in runs]
        gpus = [len(of_kind) for of_kind in view.kinds.values()]
        self._columns = [
            Column((job,), kind, (rate,), view.needs(run, name))
            for job, run in enumerate(runs)
            for kind, (name, rate) in enumerate(zip(view.kinds, rates[job], strict=True))
            if rate
        ]
        if self.name == "gavel-packed":
            self._columns += _pairs(view, runs, rates)
        self._parts = self._program(view, runs, rates, gpus) if runs else []
        self._had = [0] * len(self._columns)

    def _program(
        self,
        view: ClusterView,
        runs: Sequence[JobRun],
        rates: Sequence[Sequence[float]],
        gpus: Sequence[int],
    ) -> list[float]:
        program = ThroughputProgram(self._columns, len(runs), gpus)
        steps = np.array([max(1.0, float(run.remaining(view.now))) for run in runs])
        if self.name == "gavel-makespan":
            return program.max_min(steps)
        sizes = np.array([run.job.gpus for run in runs])
        equal = equal_parts(rates, gpus)
        if self.name == "gavel-ftf":
            duration = np.array([max(1, run.job.duration) for run in runs])
            alone = duration / (equal * np.minimum(1.0, sum(gpus) / (len(runs) * sizes)))
            since = np.array([float(view.now - run.job.submit_time) for run in runs])
            return program.finish_time_fair(since, steps, alone)
        return program.max_min(equal / sizes)


def _pairs(
    view: ClusterView, runs: Sequence[JobRun], rates: Sequence[Sequence[float]]
) -> list[Column]:
    """Pairs that get more done together than in turns, on the kinds where both have a rate."""
    found = []
    for one, other in combinations(range(min(len(runs), _PAIRED)), 2):
        pair = runs[one], runs[other]
        if pair[0].job.gpus != pair[1].job.gpus or not view.may_share(pair):
            continue
        slowed = view.slowed_together(pair)
        for kind, name in enumerate(view.kinds):
            both = rates[one][kind] * slowed[0], rates[other][kind] * slowed[1]
            if sum(slowed) > 1.0 and all(both):
                found.append(Column((one, other), kind, both, view.needs(pair[0], name)))
    return found
