"""Jobs that use different resources at different times on the same GPUs: Muri.

The rule (Zhao et al., "Multi-Resource Interleaving for Deep Learning Training", SIGCOMM'22, section
4): jobs of equal size share GPUs a stage apart (`interleaving.py`), up to four of them. Whom to put
together: jobs by remaining GPU-time (`muri-s`), or by the GPU-time that they have had (`muri-l`,
which knows no durations); of each size four times as many as find room are candidates. While these
want more GPUs than there are, pairs are formed by a matching of maximum weight (`best_couples`;
there by Blossom's algorithm), where the weight is the part of the resources' time that is used;
then pairs of pairs. A group that is slower than its jobs one after another is taken apart.

Where we leave it: a job keeps its GPUs while its group does, and the published simulator places all
anew at every event. Of equal matchings, which may differ, one has the most urgent jobs together. A
job without `Job.stages` is alone on its GPUs.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import combinations_with_replacement
from typing import final

from baechi.cluster_simulation.jobs import JobRun
from baechi.cluster_simulation.policy_support.allocation import (
    AllocatingPolicy,
    Allocation,
    ClusterView,
)
from baechi.cluster_simulation.policy_support.interleaving import MOST, STEPS, iteration_together
from baechi.cluster_simulation.policy_support.optimal_choices import best_couples, partners

_Kind = tuple[tuple[int, ...], ...]  # the stages of a group's jobs
# The couples of so many groups of each kind.
_Known = dict[tuple[tuple[_Kind, int], ...], dict[tuple[_Kind, _Kind], int]]


@final
class Muri(AllocatingPolicy):
    """Groups of jobs by matching.

    Args:
        name: `muri-s`, or `muri-l`, which does not look at durations.
    """

    preemptive = True

    def __init__(self, name: str) -> None:
        self.name = name
        self._known: _Known = {}

    def allocate(self, view: ClusterView) -> Sequence[Allocation]:
        """The groups that find room, the most urgent first, placed from wide to narrow."""
        if sum(run.job.gpus for run in view.runs) <= view.total:
            running = sorted(view.runs, key=lambda run: (not run.running, run.index))
            return [Allocation(run) for run in running]
        rank = {run.index: self._service(run, view.now) for run in view.runs}
        runs = sorted(view.runs, key=lambda run: (rank[run.index], run.index))
        groups = _grouped(self._candidates(view, runs), view.total, self._known)
        apart = [part for group in groups for part in _taken_apart(group)]
        apart.sort(key=lambda group: min(rank[run.index] for run in group))
        trial = view.trial()
        chosen = [group for group in apart if trial.takes(group[0])]
        chosen.sort(key=lambda group: -group[0].job.gpus)
        # Whose first job runs keeps its GPUs, so those that run go first in a group.
        return [
            Allocation(run, beside=None if run is members[0] else members[0])
            for members in (sorted(group, key=lambda run: not run.running) for group in chosen)
            for run in members
        ]

    def _service(self, run: JobRun, now: int) -> int:
        left = run.remaining(now) if self.name == "muri-s" else run.attained(now)
        return left * run.job.gpus

    def _candidates(self, view: ClusterView, runs: Sequence[JobRun]) -> list[list[JobRun]]:
        """The first jobs of each size: four for each that finds room on the empty cluster."""
        by_size: dict[int, list[JobRun]] = {}
        for run in runs:
            by_size.setdefault(run.job.gpus, []).append(run)
        taken = dict.fromkeys(by_size, 0)
        used: set[int] = set()
        trial = view.trial()
        for run in runs:
            size = run.job.gpus
            if run.index not in used and trial.takes(run):
                upto = min(taken[size] + MOST, len(by_size[size]))
                used.update(other.index for other in by_size[size][taken[size] : upto])
                taken[size] = upto
        return [rows[: taken[size]] for size, rows in by_size.items()]


def _grouped(rows: Iterable[list[JobRun]], total: int, known: _Known) -> list[list[JobRun]]:
    """Groups of the jobs of each size, by matchings until they need no more GPUs than there are."""
    sizes = [[[run] for run in row] for row in rows if row]
    needed = sum(len(groups) * groups[0][0].job.gpus for groups in sizes)
    for _ in range(MOST):
        if needed <= total:
            break
        for place, groups in enumerate(sizes):
            pairs = _matching(groups, known) if needed > total else {}
            merged = []
            for late, group in enumerate(groups):
                early = pairs.get(late)
                if early is None or needed <= total:
                    merged.append(group)
                else:
                    merged.append(groups[early] + group)
                    merged.remove(groups[early])
                    needed -= group[0].job.gpus
            sizes[place] = merged
    return [group for groups in sizes for group in groups]


def _matching(groups: Sequence[Sequence[JobRun]], known: _Known) -> dict[int, int]:
    """The partners of a matching of maximum weight; groups of the same stages are alike."""
    kinds = [tuple(sorted(run.job.stages for run in group)) for group in groups]
    many = tuple(sorted(Counter(kinds).items()))
    if many not in known:
        weights = {
            (one, other): sum(map(sum, both)) / (STEPS * iteration_together(jobs))
            for (one, _), (other, _) in combinations_with_replacement(many, 2)
            for both in [sorted((*one, *other))]
            for jobs in [tuple((stages, 0) for stages in both)]
            if len(both) <= MOST and all(len(stages) == 3 for stages in both)
        }
        known[many] = best_couples(weights, dict(many))
    return partners(kinds, known[many])


def _together(group: Sequence[JobRun]) -> float:
    return iteration_together(tuple(sorted((r.job.stages, r.job.iteration) for r in group)))


def _taken_apart(group: list[JobRun]) -> list[list[JobRun]]:
    """The group, or its jobs alone where they are faster one after another."""
    if len(group) == 1 or _together(group) <= sum(_together([run]) for run in group):
        return [group]
    return [[run] for run in group]
