"""Sizes by evolution, under limits that double while a job trains: ONES.

The rule (Bian et al., "Online Evolutionary Batch Size Orchestration for Scheduling Deep Learning
Workloads in GPU Clusters", SC'21): the batch of a job grows with its GPUs, up to a limit that
doubles with every epoch, so that training stays sound. A schedule says how many GPUs each job has.
A population of schedules evolves: a child has each job's size from one of two parents, or is a
parent of which some jobs are preempted; GPUs that are left go to waiting jobs, then to more of the
batch of others. Of all, those survive that have the smallest remaining utilization, the sum of GPUs
times remaining time over the jobs that run; the best is carried out.

Where we leave it: a job here has no batch, so its limit is in GPUs: what its user asks for at
first and after a preemption, twice as much after every round of 300 ticks in which it ran. How
much of its work a larger batch does is the predicted rate, as `Job.curve` may be a curve of
goodput. ONES draws the remaining time from a fitted distribution; a simulator knows it. GPUs that
no job waits for go to whose remaining time falls most. Genes are numbers of GPUs, and the scheme
places them, so that nothing is reordered. Draws are from a generator with a seed.
"""

from collections.abc import Sequence
from random import Random
from typing import Final, final

from baechi.cluster_simulation.jobs import JobRun
from baechi.cluster_simulation.policy_support.allocation import Allocation, ClusterView, RoundPolicy

Schedule = dict[int, int]  # GPUs by the index of a job

_POPULATION: Final = 8
_PREEMPTED: Final = 0.1  # the chance of a job in a mutation


@final
class Ones(RoundPolicy):
    """The schedule of the smallest remaining utilization, of a population that evolves."""

    name = "ones"
    round_ticks = 300

    def __init__(self) -> None:
        super().__init__()
        self._random = Random(0)
        self._population: list[Schedule] = []
        self._limits: dict[int, int] = {}
        self._times: dict[int, list[float]] = {}  # what a job still takes on 0, 1, 2, ... GPUs

    def decide(self, view: ClusterView) -> Sequence[Allocation]:
        """A generation."""
        for run in view.runs:
            before = self._limits.get(run.index, 0)
            limit = 2 * before if run.running and before else run.job.gpus
            self._limits[run.index] = max(view.least(run), min(limit, view.most(run)))
            sizes = range(1, self._limits[run.index] + 1)
            self._times[run.index] = [0.0, *(view.time_left(run, size) for size in sizes)]
        draw = self._random
        new = [self.filled(view, {}) for _ in range(_POPULATION - len(self._population))]
        parents = [*(self.filled(view, schedule) for schedule in self._population), *new]
        children = []
        for parent in parents:
            other = draw.choice(parents)
            genes = [(i, draw.choice((parent, other)).get(i, 0)) for i in {**parent, **other}]
            stay = {i: size for i, size in parent.items() if draw.random() >= _PREEMPTED}
            children += [self.filled(view, dict(genes)), self.filled(view, stay)]
        self._population = sorted([*parents, *children], key=self.utilization)[:_POPULATION]
        best = self._population[0]
        answer = [Allocation(run, best[run.index]) for run in view.runs if run.index in best]
        return view.or_first(answer)

    def utilization(self, schedule: Schedule) -> float:
        """The GPU-time that remains of the jobs that run."""
        return sum(size * self._times[index][size] for index, size in schedule.items())

    def filled(self, view: ClusterView, schedule: Schedule) -> Schedule:
        """The schedule of the jobs that are here, cut to limits and GPUs, and no GPU left idle."""
        runs = list(view.runs)
        self._random.shuffle(runs)
        free, sizes = view.total, Schedule()
        for run in runs:
            size = min(schedule.get(run.index, 0), self._limits[run.index], free)
            if size and size >= view.least(run):
                sizes[run.index] = size
                free -= size
        more, free = view.least_sizes((run for run in runs if run.index not in sizes), free)

        def gain(run: JobRun, size: int) -> float:
            times = self._times[run.index]
            return times[size] - times[size + 1] if size + 1 < len(times) else 0.0

        return view.grow({**sizes, **more}, free, gain)
