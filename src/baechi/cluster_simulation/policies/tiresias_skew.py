"""Least attained service, and consolidation for those jobs alone that profit from it: Tiresias.

The rule (Gu et al., "Tiresias: A GPU Cluster Manager for Distributed Deep Learning", NSDI'19,
section 3.4): jobs are ordered by their queues, as under `dlas-gpu`. Where a model's tensors are
very unequal, so that the largest makes a burst on the network, its GPUs are on as few nodes as can
be, and it waits for those; all others take any GPUs, and so wait for no such hole.

Where we leave it: Tiresias measures the sizes of messages as a job runs. Here the skew is the
largest operator's part of what the graph's operators keep in memory; without a graph it is known by
name, for the models of its trace: VGG and AlexNet are skewed, ResNet and Inception are not. A job
keeps its GPUs while no more urgent one needs them.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Final, final

from baechi.cluster_simulation.jobs import Job, JobRun
from baechi.cluster_simulation.policies.tiresias import LeastAttained
from baechi.cluster_simulation.policy_support.allocation import (
    AllocatingPolicy,
    Allocation,
    ClusterView,
)
from baechi.cluster_simulation.policy_support.locality import LEVELS, in_order

_SKEWED: Final = 0.5  # the largest of VGG-16's tensors is 0.74 of all, of ResNet-50's 0.09
_FAMILIES: Final = ("vgg", "alexnet")


def is_skewed(job: Job) -> bool:
    """True if one operator has most of the model's parameters."""
    if job.graph is None:
        return job.model.lower().startswith(_FAMILIES)
    return _skew(tuple(op.persistent_bytes for op in job.graph.ops)) > _SKEWED


@lru_cache(maxsize=256)
def _skew(sizes: tuple[int, ...]) -> float:
    return max(sizes, default=0) / max(1, sum(sizes))


@final
class TiresiasSkew(AllocatingPolicy):
    """The queues of `dlas-gpu`; skewed jobs on one node, or on whole nodes of a switch."""

    name = "tiresias-skew"
    preemptive = True

    def __init__(self) -> None:
        self._queues = LeastAttained("dlas-gpu", by_gpus=True)

    def allocate(self, view: ClusterView) -> Sequence[Allocation]:
        """Queue after queue."""
        order = self._queues.order(list(view.runs), view.now)
        level = {run.index: 0 if is_skewed(run.job) else LEVELS - 1 for run in order}
        return view.or_first(in_order(view, order, lambda run: level[run.index]))

    def wake(self, runs: Sequence[JobRun], now: int) -> int | None:
        """The time at which the first job leaves its queue."""
        return self._queues.wake(runs, now)
