"""GPUs that slow a job down least, weighed against being near to each other: PAL.

The rule (Jain et al., "PAL: A Variability-Aware Policy for Scheduling ML Workloads in GPU
Clusters", SC'24, and its published code): GPUs of one model differ in speed, and jobs
feel that more or less, by their class. In every round the queue is cut where the cluster is full,
and the jobs before the cut are placed anew, the most sensitive class first. A job of one GPU, or of
more than a node has, takes the fastest GPUs for its class (PM-First), of equal ones those on a node
that has nearly as many of them as it needs. Any other walks through a matrix of locality L (1
within a node, a penalty across nodes) times slowness V, from the least product: an entry within a
node needs a node with enough GPUs no slower than V, one across takes PM-First from all of these.

Where we leave it: V is over `Gpu.speed` times the job's speed on the kind of the GPU (`Job.kinds`):
jobs of a class list the same speeds. The paper finds classes of jobs and of GPUs by k-means, and
the penalty by a measurement; here it is `Job.across`. Of several nodes the one with the fewest such
GPUs is taken. Jobs are in order of arrival, which the paper leaves to another policy.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import final

from baechi.cluster_simulation.fleet import Fleet
from baechi.cluster_simulation.jobs import WHOLE, Job, JobRun
from baechi.cluster_simulation.policy_support.allocation import Allocation, ClusterView, RoundPolicy


def speeds(fleet: Fleet, job: Job, among: Sequence[int]) -> dict[int, int]:
    """How fast a job is on some GPUs, in millionths."""
    gpus = fleet.gpus
    on_kind = {kind: job.speed_on(kind) for kind in {gpus[gpu].kind for gpu in among}}
    return {gpu: gpus[gpu].speed * on_kind[gpus[gpu].kind] for gpu in among}


def least_slowed(
    fleet: Fleet, job: Job, free: Sequence[int], count: int
) -> Iterator[tuple[int, ...]]:
    """So many of the free GPUs, for every entry of the matrix that has them; the best first."""
    speed = speeds(fleet, job, free)
    if count > len(free):
        return
    if count == 1 or count > fleet.gpus_per_node:
        yield _fastest(fleet, speed, free, count)
        return
    entries = {(value * WHOLE, True, value) for value in speed.values()}
    entries |= {(value * job.across[0], False, value) for value in speed.values()}
    for _, near, slowest in sorted(entries, reverse=True):
        enough = [gpu for gpu in free if speed[gpu] >= slowest]
        if near:
            nodes = (list(row) for _, row in groupby(enough, key=fleet.node_of.__getitem__))
            enough = min((row for row in nodes if len(row) >= count), key=len, default=[])
        if len(enough) >= count:
            yield _fastest(fleet, speed, enough, count)


def _fastest(
    fleet: Fleet, speed: dict[int, int], gpus: Sequence[int], count: int
) -> tuple[int, ...]:
    """PM-First: the fastest of some GPUs, equal ones from nodes with about as many of them."""
    equal = Counter((speed[gpu], fleet.node_of[gpu]) for gpu in gpus)

    def rank(gpu: int) -> tuple[int, int, int]:
        return -speed[gpu], abs(equal[speed[gpu], fleet.node_of[gpu]] - count), gpu

    return tuple(sorted(sorted(gpus, key=rank)[:count]))


@final
class Pal(RoundPolicy):
    """The first jobs that fill the cluster; the most sensitive of them choose first."""

    name = "pal"
    round_ticks = 300

    def __init__(self) -> None:
        super().__init__()
        self._spread: dict[object, float] = {}  # the fastest GPU over the slowest, by class

    def decide(self, view: ClusterView) -> Sequence[Allocation]:
        """All jobs before the cut, placed anew."""
        return view.or_first(self._placed(view, view.runs, range(view.total)))

    def fill(self, view: ClusterView) -> Sequence[Allocation]:
        """In the middle of a round the first that wait, on idle GPUs."""
        return self._placed(view, view.waiting, view.idle)

    def _placed(
        self, view: ClusterView, runs: Sequence[JobRun], gpus: Sequence[int]
    ) -> list[Allocation]:
        fleet, left = view.devices.fleet, len(gpus)
        first = []
        for run in runs:
            left -= view.needs(run)
            if left < 0:
                break
            if run.job.kinds not in self._spread:
                every = speeds(fleet, run.job, range(view.total)).values()
                self._spread[run.job.kinds] = max(every) / min(every)
            first.append((-self._spread[run.job.kinds], run.index, run))
        free, answer = list(gpus), []
        for _, _, run in sorted(first):
            roomy = [gpu for gpu in free if view.has_memory(run, gpu)]
            choices = least_slowed(fleet, run.job, roomy, view.needs(run))
            chosen = next((gpus for gpus in choices if view.fits(run, gpus)), None)
            if chosen is not None:
                answer.append(Allocation(run, among=chosen))
                free = [gpu for gpu in free if gpu not in chosen]
        return answer
