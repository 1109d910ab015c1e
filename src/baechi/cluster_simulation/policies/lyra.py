"""Idle servers of an inference cluster on loan to training jobs that can shrink: Lyra.

The rule (Li et al., "Lyra: Elastic Scheduling for Deep Learning Clusters", EuroSys'23): training
jobs may run on servers that inference does not need, which takes them back when its load rises.
Servers are reclaimed one by one, each time the one whose preemption cost is least: the sum, over
the jobs on it, of 1 over the number of servers that a job is on. A job on a reclaimed server is
preempted, which makes its other servers cheaper. Who can give up just the workers there costs
nothing. Training jobs start with their least size, the shortest first; what is left is given
out by a multiple-choice knapsack, whose items are more workers for a job and whose value is by how
much they shorten it.

Where we leave it: a job of positive priority is load of inference. It runs on the nodes of GPUs of
the kind `inference`, or on any where no kind has that name, and nobody preempts it. Training jobs
that run keep their least size. Sizes are chosen every 300 ticks, and when inference wants servers.
Jobs of one size prefer the GPUs of the training cluster and others those on loan.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, final

from baechi.cluster_simulation.jobs import JobRun
from baechi.cluster_simulation.policy_support.allocation import (
    Allocation,
    ClusterView,
    RoundPolicy,
)
from baechi.cluster_simulation.policy_support.optimal_choices import knapsack
from baechi.cluster_simulation.policy_support.server_loans import reclaimed

_INFERENCE: Final = "inference"


@final
class Lyra(RoundPolicy):
    """Inference first, on reclaimed servers if need be; training jobs on what is left."""

    name = "lyra"
    round_ticks = 300

    def urgent(self, view: ClusterView) -> bool:
        """Inference does not wait for training jobs."""
        return any(run.job.priority > 0 for run in view.waiting)

    def fill(self, view: ClusterView) -> Sequence[Allocation]:
        """In the middle of an interval the shortest that fit start with their least size."""
        waiting = _shortest(view, view.waiting)
        sizes, _ = view.least_sizes(waiting, len(view.idle))
        return [Allocation(run, sizes[run.index]) for run in waiting if run.index in sizes]

    def decide(self, view: ClusterView) -> Sequence[Allocation]:
        """Inference, the least sizes, and the knapsack."""
        pool = view.kinds.get(_INFERENCE, tuple(range(view.total)))
        inference = [run for run in view.runs if run.job.priority > 0]
        training = [run for run in view.runs if run.job.priority <= 0]
        answer = view.kept(inference)
        held = {gpu for row in answer for gpu in row.run.grant.gpus}
        on = {run.index: run for run in training if run.running}
        back: set[int] = set()  # servers that are reclaimed
        for run in inference:
            if not run.running and (gpus := reclaimed(view, run, pool, held, on, back)):
                answer.append(Allocation(run, among=gpus))
                held.update(gpus)
        waiting = _shortest(view, (run for run in training if run.index not in on))
        sizes, left = view.least_sizes([*on.values(), *waiting], view.total - len(held))
        here = [run for run in (*on.values(), *waiting) if run.index in sizes]
        more = knapsack([_values(view, run, sizes[run.index], left) for run in here], left)
        for run, extra in zip(here, more, strict=True):
            sizes[run.index] += extra
        return view.or_first([*answer, *_placed(view, here, sizes, pool, held)])


def _placed(
    view: ClusterView,
    runs: Sequence[JobRun],
    sizes: Mapping[int, int],
    pool: Sequence[int],
    held: set[int],
) -> list[Allocation]:
    """Who keeps its size stays, if that is not reclaimed; others go to the cluster they prefer."""
    inside = set(pool)
    free = tuple(gpu for gpu in range(view.total) if gpu not in held)
    parts = {lent: tuple(gpu for gpu in free if (gpu in inside) == lent) for lent in (True, False)}
    left = {lent: len(gpus) for lent, gpus in parts.items()}
    answer, moves = [], []
    for run in runs:
        same = run.running and run.asked == sizes[run.index]
        if same and held.isdisjoint(run.grant.gpus):
            answer.append(Allocation(run, sizes[run.index], run.grant.gpus))
            for gpu in run.grant.gpus:
                left[gpu in inside] -= 1
        else:
            moves.append(run)
    for run in moves:
        size, lent = sizes[run.index], view.most(run) > view.least(run)
        near = size <= left[lent] and view.fits(run, parts[lent])
        left[lent] = max(0, left[lent] - size)
        answer.append(Allocation(run, size, parts[lent] if near else free))
    return answer


def _shortest(view: ClusterView, runs: Iterable[JobRun]) -> list[JobRun]:
    return sorted(runs, key=lambda run: (run.remaining(view.now), run.index))


def _values(view: ClusterView, run: JobRun, least: int, room: int) -> list[float]:
    """How much sooner a job ends with 1, 2, ... GPUs more."""
    sizes = range(least + 1, min(view.most(run), least + room) + 1)
    now = view.time_left(run, least)
    return [now - view.time_left(run, size) for size in sizes]
