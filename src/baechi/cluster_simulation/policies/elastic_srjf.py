"""The least remaining time first, and what is left to them in turn: Voda's elastic SRJF.

The rule (Lin et al., "Voda: A GPU Scheduling Platform for Elastic Deep Learning in Kubernetes",
IC2E'23; `pkg/algorithm/elastic_srjf.go`): in order of remaining time each job gets its least number
of GPUs. Then those jobs get one more each, in the same order and again, up to their most. When a
job arrives or ends all is decided anew.

Where we leave it: the estimate of the remaining time, which Voda updates after every epoch, is what
is left at the rate of the job's own number of GPUs. A GPU that would not speed a job up is not
given to it, which is a wish in Voda's source; and its jobs that did not get their least get no
single GPUs, which its second loop can do. Its placement manager, which moves few workers, is the
scheme's part: who keeps its size keeps its place.
"""

from collections.abc import Sequence
from typing import final

from baechi.cluster_simulation.policy_support.allocation import (
    AllocatingPolicy,
    Allocation,
    ClusterView,
)


@final
class ElasticSrjf(AllocatingPolicy):
    """The least for the shortest jobs, and the rest to them in turn."""

    name = "elastic-srjf"
    preemptive = True

    def allocate(self, view: ClusterView) -> Sequence[Allocation]:
        """Shortest first."""
        by_time = sorted(view.runs, key=lambda run: (run.remaining(view.now), run.index))
        sizes, free = view.least_sizes(by_time)
        growing = [run for run in by_time if run.index in sizes]
        while free and growing:
            still = []
            for run in growing:
                size = sizes[run.index]
                grows = size < view.most(run) and view.rate(run, size + 1) > view.rate(run, size)
                if free and grows:
                    sizes[run.index] = size + 1
                    free -= 1
                    still.append(run)
            growing = still
        return [Allocation(run, sizes[run.index]) for run in by_time if run.index in sizes]
