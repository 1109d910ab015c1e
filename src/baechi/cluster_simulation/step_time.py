"""Step time and memory of a job whose operator graph is placed on some GPUs.

The predicted step gives the job's rate, the predicted peaks its memory on each GPU, the busy times
what share of each GPU's compute it keeps busy. The rate is that of the placement on GPUs that have
no other job; contention with others is the sharing model's matter.

Where only a share of a GPU is left, an op takes as much longer as the job wants more than that
share: `Job.compute` is what the job keeps busy of a whole GPU while an op of it runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, final

from baechi.cluster_simulation.contention import WORK, Part
from baechi.cluster_simulation.fleet import Gpu
from baechi.cluster_simulation.free_devices import Grant
from baechi.cluster_simulation.jobs import WHOLE, Job
from baechi.placers.auto import best
from baechi.placers.etf import METF
from baechi.placers.heft import HEFT
from baechi.placers.solving import find
from baechi.problem.problem_arrays import Problem
from baechi.problem.simulation import simulate
from baechi.records.cluster import Cluster, Device, Link
from baechi.records.graph import OpGraph
from baechi.records.placement import Placement

AMPLE: Final = 2**61  # bytes, where memory is not modeled
# 16 lanes of PCIe 4 and more; a network of 100 Gbit/s.
NEAR: Final = Link(10_000, 50 * 10**9)
FAR: Final = Link(30_000, 10 * 10**9)


# Instead of an effort of `solve`: the better of two list schedules, as a service's fast decisions.
# That takes milliseconds, whether something fits or nothing does, and may miss what `solve` finds.
LISTED: Final = "list"


@final
@dataclass(frozen=True, slots=True)
class Links:
    """The links between GPUs.

    Attributes:
        near: Those of one node.
        far: Those of different nodes.
    """

    near: Link = NEAR
    far: Link = FAR


@final
@dataclass(frozen=True, slots=True)
class ResidualGpu:
    """A GPU with the memory that is left on it."""

    index: int
    nbytes: int
    gpu: Gpu

    def rounded(self) -> "ResidualGpu":
        """With memory in 32nds of the GPU's, rounded down, so that fewer questions differ."""
        unit = (self.gpu.memory_bytes or 0) // 32
        return replace(self, nbytes=self.nbytes // unit * unit) if unit else self


def shape_of(left: Sequence[ResidualGpu]) -> tuple[ResidualGpu, ...]:
    """Equal for GPUs on which a graph has the same answer: without indices, nodes renumbered."""
    nodes = {node: rank for rank, node in enumerate(dict.fromkeys(row.gpu.node for row in left))}
    return tuple(
        ResidualGpu(
            0, row.nbytes, replace(row.gpu, node=nodes[row.gpu.node], switch=0, held_bytes=0)
        )
        for row in left
    )


def cluster_of(left: Sequence[ResidualGpu], links: Links, job: Job) -> Cluster:
    """The cluster for `solve`: a share of a GPU is a slower GPU."""
    devices = tuple(
        Device(f"gpu{place}", row.nbytes, _speed(row.gpu, job), row.gpu.kind)
        for place, row in enumerate(left)
    )
    rows = tuple(
        tuple(
            None if a is b else links.near if a.gpu.node == b.gpu.node else links.far for b in left
        )
        for a in left
    )
    return Cluster(devices, rows)


def solved(
    job: Job, graph: OpGraph, left: Sequence[ResidualGpu], links: Links, effort: str
) -> Grant | None:
    """The grant of the placement by `solve`; its GPUs are indices into `left`."""
    cluster = cluster_of(left, links, job)
    problem = Problem(graph, cluster)
    placement = _listed(problem) if effort == LISTED else find(problem, effort)
    return None if placement is None else stepped(job, graph, placement, cluster, left)


def stepped(
    job: Job, graph: OpGraph, placement: Placement, cluster: Cluster, left: Sequence[ResidualGpu]
) -> Grant | None:
    """The grant of a placement; its GPUs are indices into `left`. `None` if it does not fit."""
    schedule = simulate(graph, cluster, placement)
    if any(peak > row.nbytes for peak, row in zip(schedule.peak_bytes, left, strict=True)):
        return None
    step_ns = max(1, schedule.makespan_ns)
    busy_ns = [0] * len(left)
    for span in schedule.spans:
        busy_ns[span.device] += span.end_ns - span.start_ns
    used = sorted({span.device for span in schedule.spans})
    parts = tuple(
        Part(
            schedule.peak_bytes[place],
            max(1, -(-busy_ns[place] * min(job.compute, left[place].gpu.share) // step_ns)),
            job.limit,
        )
        for place in used
    )
    whole_ns = job.step_ns or sum(op.time_ns for op in graph.ops)
    # Speeds are in the predicted step; `DeviceStates.rate` multiplies by the slowest once more.
    slowest = min(left[place].gpu.speed for place in used)
    rate = WORK * whole_ns * WHOLE // (step_ns * slowest)
    return Grant(tuple(used), parts, max(1, rate))


def _listed(problem: Problem) -> Placement | None:
    return best([(placer.name, placer.place(problem)) for placer in (METF(), HEFT())], LISTED)


def _speed(gpu: Gpu, job: Job) -> float:
    return gpu.speed * min(gpu.share, job.compute) / (WHOLE * job.compute)
