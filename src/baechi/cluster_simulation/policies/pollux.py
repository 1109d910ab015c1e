"""Sizes that maximize the mean goodput of all jobs, over that of a fair part: like Pollux.

The rule (Qiao et al., "Pollux: Co-adaptive Cluster Scheduling for Goodput-Optimized Deep Learning",
OSDI'21, section 4.2): speedup_j is the goodput of a job on its GPUs over that on an equal part of
the cluster. Every 60 s the allocation changes to what maximizes the power mean of the speedups with
p = -1, a harmonic mean that no starved job lets grow. A job of much GPU-time counts less: w_j = (4
h / GPU-time)^0.5 at most 1. A job that would be restarted counts 0.25 less.

Where we leave it: goodput is throughput times the statistical efficiency of a batch size, which
Pollux adapts while a job runs. Ours is the predicted rate: `Job.curve` may be a curve of goodput.
Its genetic algorithm is replaced: GPUs go one by one to the job for which the sum of w_j /
speedup_j falls most, which is optimal where curves are concave, and the answer is taken if,
restarts counted, it is better than what jobs have now with the idle GPUs given out in the same way.
"""

from collections.abc import Mapping, Sequence
from typing import Final, final

from baechi.cluster_simulation.jobs import JobRun
from baechi.cluster_simulation.policy_support.allocation import Allocation, ClusterView, RoundPolicy

_RESTART: Final = 0.25
_THRESHOLD: Final = 4 * 3600  # GPU-seconds
_STARVED: Final = 1e-3  # the speedup of a job without GPUs


@final
class Pollux(RoundPolicy):
    """The largest harmonic mean of speedups."""

    name = "pollux"
    round_ticks = 60

    def decide(self, view: ClusterView) -> Sequence[Allocation]:
        """The better of sizes from nothing, and of sizes that only grow."""
        runs = view.runs
        fresh = self.sizes(view, runs, {})
        held = {run.index: run.asked for run in runs if run.running}
        grown = self.sizes(view, runs, held)
        best = min((grown, fresh), key=lambda sizes: self._loss(view, runs, sizes, held))
        # Who has what it had goes first, as it stays where it is.
        stays = [run for run in runs if best.get(run.index) == held.get(run.index, 0)]
        rest = [run for run in runs if run not in stays]
        return [Allocation(r, best[r.index]) for r in (*stays, *rest) if r.index in best]

    def sizes(
        self, view: ClusterView, runs: Sequence[JobRun], held: Mapping[int, int]
    ) -> dict[int, int]:
        """The GPUs of every job that gets some; at least those that are held."""
        waiting = [run for run in runs if run.index not in held]
        sizes, free = view.least_sizes(waiting, view.total - sum(held.values()))
        sizes.update(held)

        def gain(run: JobRun, size: int) -> float:
            return self._term(view, run, size) - self._term(view, run, size + 1)

        return view.grow(sizes, free, gain)

    def _term(self, view: ClusterView, run: JobRun, size: int, less: float = 0.0) -> float:
        """What a job adds to the sum that is to be small."""
        fair = max(view.least(run), min(view.most(run), view.total // max(1, len(view.runs))))
        speedup = view.rate(run, size) / max(1, view.rate(run, fair)) if size else 0.0
        used = run.attained(view.now) * run.job.gpus
        weight = min(1.0, (_THRESHOLD / used) ** 0.5) if used else 1.0
        return weight / max(_STARVED, speedup - less)

    def _loss(
        self,
        view: ClusterView,
        runs: Sequence[JobRun],
        sizes: Mapping[int, int],
        held: Mapping[int, int],
    ) -> float:
        """The sum for an answer, with restarts."""
        total = 0.0
        for run in runs:
            size, before = sizes.get(run.index, 0), held.get(run.index, 0)
            total += self._term(view, run, size, _RESTART if before and size != before else 0.0)
        return total
