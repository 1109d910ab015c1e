"""Jobs that use different resources at different times on the same GPUs: Muri.

The rule (Zhao et al., "Multi-Resource Interleaving for Deep Learning Training", SIGCOMM'22, section
4): jobs of equal size share GPUs a stage apart (`interleaving.py`), up to four of them. Whom to put
together: jobs by remaining GPU-time (`muri-s`), or by the GPU-time that they have had (`muri-l`,
which knows no durations); of each size four times as many as find room are candidates. While these
want more GPUs than there are, pairs are formed by a matching of maximum weight, Blossom's, where
the weight is the part of the resources' time that is used; then pairs of pairs. A group that is
slower than its jobs one after another is taken apart.

Where we leave it: a job keeps its GPUs while its group does, and the published simulator places all
anew at every event. Equal matchings may differ. A job without `Job.stages` is alone on its GPUs.
"""

from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import final

import networkx as nx

from baechi.cluster_simulation.fleet import DeviceStates
from baechi.cluster_simulation.jobs import JobRun
from baechi.cluster_simulation.policies.allocation import (
    AllocatingPolicy,
    Allocation,
    ClusterView,
)
from baechi.cluster_simulation.policies.interleaving import MOST, STEPS, iteration_together


@final
class Muri(AllocatingPolicy):
    """Groups of jobs by matching.

    Args:
        name: `muri-s`, or `muri-l`, which does not look at durations.
    """

    preemptive = True

    def __init__(self, name: str) -> None:
        self.name = name

    def allocate(self, view: ClusterView) -> Sequence[Allocation]:
        """The groups that find room, the most urgent first, placed from wide to narrow."""
        if sum(run.job.gpus for run in view.runs) <= view.total:
            running = sorted(view.runs, key=lambda run: (not run.running, run.index))
            return [Allocation(run) for run in running]
        rank = {run.index: self._service(run, view.now) for run in view.runs}
        runs = sorted(view.runs, key=lambda run: (rank[run.index], run.index))
        groups = _grouped(self._candidates(view, runs), view.total)
        apart = [part for group in groups for part in _taken_apart(group)]
        apart.sort(key=lambda group: min(rank[run.index] for run in group))
        trial = _Trial(view.devices)
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
        trial = _Trial(view.devices)
        for run in runs:
            size = run.job.gpus
            if run.index not in used and trial.takes(run):
                upto = min(taken[size] + MOST, len(by_size[size]))
                used.update(other.index for other in by_size[size][taken[size] : upto])
                taken[size] = upto
        return [rows[: taken[size]] for size, rows in by_size.items()]


@final
class _Trial:
    """The empty cluster, given out job by job."""

    def __init__(self, devices: DeviceStates) -> None:
        self._devices = devices.emptied()
        self._free = list(range(len(devices.owners)))

    def takes(self, run: JobRun) -> bool:
        """Gives a job GPUs, if it finds room."""
        if run.job.gpus > len(self._free) and run.job.graph is None:
            return False
        grant = self._devices.place(run.job, among=self._free) if self._free else None
        if grant is None:
            return False
        self._devices.take(run, grant)
        self._free = [gpu for gpu in self._free if gpu not in grant.gpus]
        return True


def _grouped(rows: Iterable[list[JobRun]], total: int) -> list[list[JobRun]]:
    """Groups of the jobs of each size, by matchings until they need no more GPUs than there are."""
    sizes = [[[run] for run in row] for row in rows if row]
    needed = sum(len(groups) * groups[0][0].job.gpus for groups in sizes)
    for _ in range(MOST):
        if needed <= total:
            break
        for place, groups in enumerate(sizes):
            pairs = _matching(groups)
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


def _matching(groups: Sequence[Sequence[JobRun]]) -> dict[int, int]:
    """The partners of a matching of maximum weight: of each pair, the later to the earlier."""
    graph = nx.Graph()
    for one, other in combinations(range(len(groups)), 2):
        both = [*groups[one], *groups[other]]
        stages = [run.job.stages for run in both]
        if len(both) <= MOST and all(len(stage) == 3 for stage in stages):
            used = sum(map(sum, stages)) / (STEPS * _together(both))
            graph.add_edge(one, other, weight=used)
    return {max(pair): min(pair) for pair in nx.max_weight_matching(graph)}


def _together(group: Sequence[JobRun]) -> float:
    return iteration_together(tuple(sorted((r.job.stages, r.job.iteration) for r in group)))


def _taken_apart(group: list[JobRun]) -> list[list[JobRun]]:
    """The group, or its jobs alone where they are faster one after another."""
    if len(group) == 1 or _together(group) <= sum(_together([run]) for run in group):
        return [group]
    return [[run] for run in group]
