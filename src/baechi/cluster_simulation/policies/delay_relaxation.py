"""Locality that is given up step by step while a job waits: Philly's.

The rule (Jeon et al., "Analysis of Large-Scale Multi-Tenant GPU Clusters for DNN Training
Workloads", ATC'19, section 2.3): a gang first asks for the fewest nodes, under one switch. After
some time without such a place it asks for GPUs under one switch on any nodes, and at last for any
GPUs at all. Who finds no place holds nobody up (section 3.1: large jobs are overtaken).

Where we leave it: Philly counts scheduling attempts, and we count ticks; its quotas of virtual
clusters and their preemption are left out (`fair-share` and `hived` have such). A job has its rate
apart from `Job.across`: without it, locality costs and brings nothing.
"""

from collections.abc import Sequence
from typing import Final, final

from baechi.cluster_simulation.jobs import JobRun
from baechi.cluster_simulation.policy_support.allocation import (
    AllocatingPolicy,
    Allocation,
    ClusterView,
)
from baechi.cluster_simulation.policy_support.locality import LEVELS, closest

_PATIENCE: Final = 300  # ticks at each level: some minutes of attempts


@final
class DelayRelaxation(AllocatingPolicy):
    """The first to arrive that finds GPUs as near to each other as it still insists on."""

    name = "delay-relaxation"

    def allocate(self, view: ClusterView) -> Sequence[Allocation]:
        """The running jobs, and those that start."""
        allocations = view.kept()
        free = list(view.idle)
        for run in view.runs:
            needs = view.needs(run)
            if run.running or needs > len(free):
                continue
            level = min(run.waited(view.now) // _PATIENCE, LEVELS - 1)
            roomy = [gpu for gpu in free if view.has_memory(run, gpu)]
            gpus = closest(view.devices.fleet, roomy, needs, level)
            if gpus is not None:
                # What a graph fits on is for the scheme to say.
                anywhere = level == LEVELS - 1 and run.job.graph is not None
                allocations.append(Allocation(run, among=None if anywhere else gpus))
                free = [gpu for gpu in free if gpu not in gpus]
        return allocations

    def wake(self, runs: Sequence[JobRun], now: int) -> int | None:
        """The time at which the first waiting job insists on less."""
        times = [
            now + _PATIENCE - run.waited(now) % _PATIENCE
            for run in runs
            if not run.running and run.waited(now) < (LEVELS - 1) * _PATIENCE
        ]
        return min(times, default=None)
