"""Jobs that use different resources at different times on the same GPUs: Muri.

The rule (Zhao et al., "Multi-Resource Interleaving for Deep Learning Training", SIGCOMM'22): an
iteration has stages, each of which needs one resource: input from storage and CPU, the GPU, the
network. Jobs of equal size share GPUs a stage apart, up to four of them, and all then take the time
of the slowest at each step (`iteration_together`). Whom to put together (section 4): jobs by
remaining GPU-time (`muri-s`), or by the GPU-time that they have had (`muri-l`, which knows no
durations); of each size four times as many as find room are candidates. While these want more GPUs
than there are, pairs are formed by a matching of maximum weight, Blossom's, where the weight is the
part of the resources' time that is used; then pairs of pairs. A group that is slower than its jobs
one after another is taken apart.

`interruption` and `iteration_together` are as in its published simulator, which its results need:
the first stage takes two of four steps; running together costs 31, 48 and 35 % (two, three and four
jobs) beside the 1.5 % that a job alone pays; and of every time between two events at which a job
goes on running it loses what a restart of all jobs on its GPUs takes.

Where we leave it: a job keeps its GPUs while its group does, and the published simulator places all
anew at every event. Equal matchings may differ. A job without `Job.stages` is alone on its GPUs.
"""

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import combinations, permutations
from typing import ClassVar, Final, final

import networkx as nx

from baechi.cluster_simulation.fleet import DeviceStates
from baechi.cluster_simulation.jobs import WORK, Job, JobRun, Part, Sharing
from baechi.cluster_simulation.policies.allocation import (
    AllocatingPolicy,
    Allocation,
    ClusterView,
)

_MOST: Final = 4
_STEPS: Final = 4  # of resources: storage, CPU, GPU, network
# What an iteration of one to four jobs together takes, as measured there, over what the stages say.
_SLOWER: Final = (1.015, 1.33 / 1.015, 1.5 / 1.015, 1.37 / 1.015)
# Seconds of a restart on 1, 2, 4, 8, 16 and 32 GPUs, as measured there.
_RESTART: Final = {
    "vgg16": (7, 7, 8, 9, 9, 10),
    "vgg19": (7, 7, 8, 9, 10, 10),
    "resnet18": (4, 5, 5, 7, 7, 7),
    "shufflenet_v2_x1_0": (4, 4, 5, 5, 7, 8),
    "bert": (10, 10, 10, 10, 10, 10),
    "gpt2": (10, 10, 10, 10, 10, 10),
    "a2c": (38, 39, 39, 46, 46, 46),
    "dqn": (5, 5, 6, 6, 8, 8),
}
_UNKNOWN: Final = 10


def interruption(jobs: Sequence[Job]) -> int:
    """What jobs on the same GPUs lose at an event, in seconds."""
    size = min(5, (jobs[0].gpus - 1).bit_length())
    return sum(_RESTART[job.model][size] if job.model in _RESTART else _UNKNOWN for job in jobs)


# The stages of a job (input, GPU, network) and its iteration alone.
_Stages = tuple[tuple[int, ...], int]


@cache
def iteration_together(jobs: tuple[_Stages, ...]) -> float:
    """The time in which jobs do one iteration each, in the best order, with what sharing costs."""
    if len(jobs) == 1:
        return jobs[0][1] * _SLOWER[0]
    stages = [stages for stages, _ in jobs]
    best = min(map(_period, permutations(stages)))
    if len(jobs) == 2:  # two steps: one has its input read while the other computes and sends
        (a, b, c), (d, e, f) = stages
        best = min(best, max(a, e + f) + max(d, b + c))
    return best * _SLOWER[len(jobs) - 1]


def _period(stages: Sequence[Sequence[int]]) -> float:
    """The time of four steps once they repeat, with each job a step behind the one before."""
    done = [0.0]
    count = len(stages)
    for step in range(2 * _STEPS):
        end = 0.0
        network, gpu, read = ((step + ahead) % _STEPS for ahead in (1, 2, 3))
        if network < count:
            end = max(end, done[step] + stages[network][2])
        if gpu < count:
            end = max(end, done[step] + stages[gpu][1])
        if step and read < count:  # begun a step earlier
            end = max(end, done[step - 1] + stages[read][0])
        done.append(end)
        if step >= _STEPS:
            now, before = end - done[step - 3], done[step] - done[step - 4]
            if now > 0 and abs(now - before) <= 1e-3 * max(now, before):
                return now
    return done[2 * _STEPS] - done[_STEPS]


@final
class Interleaved(Sharing):
    """Jobs a stage apart: each does an iteration in the time of `iteration_together`."""

    most: int = _MOST
    wants_whole: ClassVar[bool] = True

    def admits(self, parts: Sequence[Part], part: Part) -> bool:
        """Only jobs that have three stages."""
        interleave = all(len(each.stages) == 3 and each.iteration for each in (*parts, part))
        return not parts or (len(parts) < self.most and interleave)

    def rate(self, parts: Sequence[Part], part: Part, share: int) -> int:
        """Its iteration alone over that together."""
        alone = min(WORK, WORK * share // part.compute)
        if len(parts) == 1:
            return alone
        together = iteration_together(tuple(sorted((p.stages, p.iteration) for p in parts)))
        return min(alone, int(alone * part.iteration * _SLOWER[0] / together))


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
                upto = min(taken[size] + _MOST, len(by_size[size]))
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
    for _ in range(_MOST):
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
        if len(both) <= _MOST and all(len(stage) == 3 for stage in stages):
            used = sum(map(sum, stages)) / (_STEPS * _together(both))
            graph.add_edge(one, other, weight=used)
    return {max(pair): min(pair) for pair in nx.max_weight_matching(graph)}


def _together(group: Sequence[JobRun]) -> float:
    return iteration_together(tuple(sorted((r.job.stages, r.job.iteration) for r in group)))


def _taken_apart(group: list[JobRun]) -> list[list[JobRun]]:
    """The group, or its jobs alone where they are faster one after another."""
    if len(group) == 1 or _together(group) <= sum(r.job.iteration for r in group) * _SLOWER[0]:
        return [group]
    return [[run] for run in group]
