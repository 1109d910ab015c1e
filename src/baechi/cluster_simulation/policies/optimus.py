"""GPUs one by one to the job that gains most from one more: Optimus.

The rule (Peng et al., "Optimus: An Efficient Dynamic Resource Scheduler for Deep Learning
Clusters", EuroSys'18, section 4.1): every job gets the least that it can run on, so that none
starves. Then the job whose remaining time falls most by one more worker gets one, until none gains
or nothing is left. Sizes are decided anew every 10 minutes.

Where we leave it: it fits the remaining epochs and the speed to what it has seen; a simulator knows
the first, and the second is the predicted rate: of the job's curve, or of its graph split over so
many GPUs. Workers and parameter servers are GPUs here. Its damping of gains of young jobs (0.95),
which is for the error of the fit, and its even spread over servers, which is the scheme's, are left
out.
"""

from collections.abc import Sequence
from typing import final

from baechi.cluster_simulation.jobs import JobRun
from baechi.cluster_simulation.policy_support.allocation import Allocation, ClusterView, RoundPolicy


@final
class Optimus(RoundPolicy):
    """The largest marginal gain in remaining time."""

    name = "optimus"
    round_ticks = 600

    def decide(self, view: ClusterView) -> Sequence[Allocation]:
        """The least for all in order of arrival, then GPU by GPU."""
        least, free = view.least_sizes(view.runs)

        def gain(run: JobRun, size: int) -> float:
            return view.time_left(run, size) - view.time_left(run, size + 1)

        sizes = view.grow(least, free, gain)
        return [Allocation(run, sizes[run.index]) for run in view.runs if run.index in sizes]
