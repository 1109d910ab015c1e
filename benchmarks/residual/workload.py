"""What is drawn: how a cluster is taken by others, and which jobs come when.

All from a seed. Loads of one seed share the cluster, the jobs and their lengths; only the gaps
between arrivals are stretched, so that differences between loads are not the draw's.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Final, final

from benchmarks.residual.names import MEMORY_BYTES, MOST_GPUS

from baechi import OpGraph, Placement
from baechi.cluster_simulation.fleet import Fleet, Gpu
from baechi.cluster_simulation.jobs import WHOLE, Job
from baechi.cluster_simulation.placement_schemes import AMPLE, NEAR
from baechi.placers.searching import find
from baechi.placers.solving import solve
from baechi.problem.problem_arrays import Problem
from baechi.problem.simulation import simulate
from baechi.records.cluster import Cluster, Link

NODES: Final = 4
GPUS_PER_NODE: Final = 4
# The share of GPUs that others hold a part of, on all nodes but the first; on that, none.
TENANTS: Final = 0.75
# What they hold: of memory, uniform; of compute, one of these, in thousandths.
HELD: Final = (0.1, 0.75)
TAKEN: Final = (100, 200, 400)
# Seconds: the logarithm of a job's length is normal; cut at ten times the median.
MEDIAN_S: Final = 1200
SIGMA: Final = 1.0
# What a job keeps busy of a GPU while an op of it runs, drawn once per model. Two jobs side by side
# then do 1.3 times what one does, as the pairs that Gavel measured on a V100 do on average.
BUSY: Final = (550, 1000)
# Of a GPU's memory, that a user who splits a model tries to do with.
PARTS: Final = (1.0, 0.9, 0.8, 0.7, 0.6)


@final
@dataclass(frozen=True)
class Kind:
    """A model as jobs of it know it.

    Attributes:
        name: The model's.
        graph: A training step.
        gpus: How many empty GPUs its user asks for: as few as hold it.
        placement: How it is split over them.
        memory_bytes: What it holds on the fullest of them.
        step_ns: Its step there.
        compute: As `Job.compute`.
    """

    name: str
    graph: OpGraph
    gpus: int
    placement: Placement
    memory_bytes: int
    step_ns: int
    compute: int


def kind_of(name: str, graph: OpGraph, device: str, link: Link = NEAR) -> Kind:
    """As its user would ask: on as few empty GPUs of one node as hold it.

    Of those splits that are at most 2 % slower than the fastest, the one that holds least on the
    fullest GPU among the capacities that are tried: users who share GPUs ask for no more.
    """
    ample = Cluster.uniform(1, AMPLE, link, kind=device)
    whole = solve(graph, ample, "single")
    whole_bytes = simulate(graph, ample, whole).peak_bytes[0]
    for gpus in range(1, MOST_GPUS + 1):
        tried = []
        for part in PARTS if gpus > 1 else PARTS[:1]:
            nbytes = int(MEMORY_BYTES * part)
            cluster = Cluster.uniform(gpus, nbytes, link, kind=device)
            # A split needs what the whole needs, or more.
            enough = gpus * nbytes >= whole_bytes
            placement = find(Problem(graph, cluster)) if enough else None
            if placement is None:
                break
            schedule = simulate(graph, cluster, placement)
            tried.append((schedule.makespan_ns, max(schedule.peak_bytes), placement))
        if tried:
            fastest = min(step_ns for step_ns, _, _ in tried)
            near = [row for row in tried if row[0] <= fastest * 1.02]
            step_ns, memory_bytes, placement = min(near, key=lambda row: row[1])
            compute = Random(name).randint(*BUSY)
            return Kind(name, graph, gpus, placement, memory_bytes, step_ns, compute)
    raise ValueError(f"{name} fits no {MOST_GPUS} GPUs of {MEMORY_BYTES} bytes")


def fleet_of(seed: int, tenants: float, device: str) -> Fleet:
    """The GPUs, and what others hold of them."""
    draw = Random(f"fleet {seed}")
    gpus = []
    for node in range(NODES):
        for _ in range(GPUS_PER_NODE):
            held, share = 0, WHOLE
            if node and draw.random() < tenants:
                held = int(MEMORY_BYTES * draw.uniform(*HELD))
                share = WHOLE - draw.choice(TAKEN)
            gpus.append(Gpu(node, 0, MEMORY_BYTES, WHOLE, share, device, held))
    return Fleet(tuple(gpus))


def jobs_of(
    kinds: Sequence[Kind], fleet: Fleet, seed: int, count: int, load: float
) -> tuple[Job, ...]:
    """Poisson arrivals of jobs, each model as likely as any other.

    The load is the GPU-time that jobs ask for, their GPUs times their length, over what the
    cluster has: the compute that others leave. It is that of the mean job, not of those drawn.
    """
    draw = Random(f"jobs {seed}")
    capacity = sum(gpu.share for gpu in fleet.gpus) / WHOLE
    mean = sum(kind.gpus for kind in kinds) / len(kinds) * mean_seconds()
    moment = 0.0
    jobs = []
    for index in range(count):
        moment += draw.expovariate(1.0)
        kind = draw.choice(kinds)
        jobs.append(
            Job(
                f"{index}-{kind.name}",
                kind.gpus,
                round(moment * mean / (load * capacity)),
                min(10 * MEDIAN_S, max(1, round(draw.lognormvariate(math.log(MEDIAN_S), SIGMA)))),
                kind.name,
                kind.memory_bytes,
                kind.compute,
                graph=kind.graph,
                placement=kind.placement,
                step_ns=kind.step_ns,
                most_gpus=MOST_GPUS,
            )
        )
    return tuple(jobs)


def mean_seconds() -> float:
    """The mean length of a job: of a log-normal that is cut."""
    at = math.log(10) / SIGMA
    below = math.exp(SIGMA**2 / 2) * _normal(at - SIGMA)
    return MEDIAN_S * (below + 10 * (1 - _normal(at)))


def _normal(x: float) -> float:
    """The share of a normal distribution below x."""
    return (1 + math.erf(x / math.sqrt(2))) / 2
