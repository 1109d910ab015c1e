"""Placement schemes: the choice of GPUs for a job. Without one, GPUs are counted.

A job whose graph is placed has the rate of the predicted step on GPUs without other jobs, the
predicted peaks as its memory, and keeps each GPU as busy as the op times there say. Where only a
share of a GPU is left, an op takes as much longer as the job wants more than that share:
`Job.compute` is what the job keeps busy of a whole GPU while an op of it runs.
"""

import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heapreplace
from itertools import groupby, islice
from typing import Final, final

from baechi.cluster_simulation.fleet import DeviceStates, Gpu
from baechi.cluster_simulation.jobs import WHOLE, WORK, Grant, Job, Part
from baechi.placers.auto import best
from baechi.placers.list_schedulers import HEFT, METF
from baechi.placers.searching import find
from baechi.problem.problem_arrays import Problem
from baechi.problem.simulation import simulate
from baechi.records.cluster import Cluster, Device, Link
from baechi.records.graph import OpGraph
from baechi.records.placement import Placement

AMPLE: Final = 2**61  # bytes, where memory is not modeled
# Between GPUs of a node 16 lanes of PCIe 4 and more; between nodes a network of 100 Gbit/s.
NEAR: Final = Link(10_000, 50 * 10**9)
FAR: Final = Link(30_000, 10 * 10**9)
# Instead of an effort of `solve`: the better of two list schedules, as a service's fast decisions.
# That takes milliseconds, whether something fits or nothing does, and may miss what `solve` finds.
LISTED: Final = "list"


class Scheme(ABC):
    """Chooses GPUs."""

    @abstractmethod
    def place(self, job: Job, devices: DeviceStates) -> Grant | None:
        """The GPUs for a job, or `None` if it must wait; changes nothing."""


class WholeScheme(Scheme):
    """Chooses as many GPUs as a job asks for, with equal parts."""

    def place(self, job: Job, devices: DeviceStates) -> Grant | None:
        """What `choose` takes of the GPUs that have room, if they are enough."""
        if devices.sharing.most == 1 and job.gpus > devices.free:
            return None
        part = job.part
        chosen = self.choose(job.gpus, devices.open(part), devices)
        return Grant(tuple(sorted(chosen)), (part,) * job.gpus) if len(chosen) == job.gpus else None

    @abstractmethod
    def choose(self, count: int, free: Iterator[int], devices: DeviceStates) -> Sequence[int]:
        """So many of the free GPUs, which come in order; fewer if these are too few."""


def _by_node(devices: DeviceStates, free: Iterable[int]) -> Iterator[list[int]]:
    return (list(row) for _, row in groupby(free, key=devices.fleet.node_of.__getitem__))


@final
@dataclass(frozen=True, slots=True)
class FirstFit(WholeScheme):
    """On the first GPUs that have room, on any nodes."""

    def choose(self, count: int, free: Iterator[int], devices: DeviceStates) -> Sequence[int]:
        """In the order of the cluster."""
        del devices
        return tuple(islice(free, count))


@final
@dataclass(frozen=True, slots=True)
class Consolidated(WholeScheme):
    """On one node where a node is enough, else on whole nodes and a rest, under one switch.

    The rule of the Tiresias simulator's scheme `yarn`; CPUs and host memory are not modeled here.
    """

    def choose(self, count: int, free: Iterator[int], devices: DeviceStates) -> Sequence[int]:
        """The first node or switch that has room; GPUs with fewer jobs before others."""

        def by_owners(row: list[int]) -> list[int]:
            return sorted(row, key=lambda gpu: len(devices.owners[gpu]))

        rows = _by_node(devices, free)
        per_node = devices.fleet.gpus_per_node
        if count <= per_node:
            row = next((row for row in rows if len(row) >= count), [])
            return row if len(row) == count else by_owners(row)[:count]
        whole, rest = divmod(count, per_node)
        for _, switch in groupby(rows, key=lambda row: devices.fleet.gpus[row[0]].switch):
            nodes = list(map(by_owners, switch))
            idle = [
                row
                for row in nodes
                if len(row) == per_node and not any(devices.owners[gpu] for gpu in row)
            ][:whole]
            last = next((row for row in nodes if len(row) >= rest and row not in idle), None)
            if len(idle) == whole and (last is not None or not rest):
                return [*(gpu for row in idle for gpu in row), *(last or [])[:rest]]
        return ()


@final
@dataclass(frozen=True, slots=True)
class Random(WholeScheme):
    """On any GPUs with room, drawn anew for each job."""

    def choose(self, count: int, free: Iterator[int], devices: DeviceStates) -> Sequence[int]:
        """A uniform sample."""
        every = list(free)
        return devices.random.sample(every, count) if len(every) >= count else ()


@final
@dataclass(frozen=True, slots=True)
class BestFit(WholeScheme):
    """On the tightest node, and there on the fullest GPUs."""

    def choose(self, count: int, free: Iterator[int], devices: DeviceStates) -> Sequence[int]:
        """One node if any has room for all; else the nodes with the most room, one by one."""

        def left(gpu: int) -> tuple[int, int]:
            return devices.memory_left[gpu] or 0, -len(devices.owners[gpu])

        nodes = sorted(_by_node(devices, free), key=len)
        tightest = next((row for row in nodes if len(row) >= count), None)
        chosen: list[int] = []
        for row in [tightest] if tightest else reversed(nodes):
            chosen += sorted(row, key=left)[: count - len(chosen)]
        return chosen


@final
@dataclass(frozen=True, slots=True)
class Spread(WholeScheme):
    """On the nodes that are the least full, GPU by GPU: Kubernetes' default for its pods."""

    def choose(self, count: int, free: Iterator[int], devices: DeviceStates) -> Sequence[int]:
        """The first GPU of the node with the most that are free, again and again."""
        heap = [(-len(row), rank, row) for rank, row in enumerate(_by_node(devices, free))]
        heapify(heap)
        chosen: list[int] = []
        while len(chosen) < count and heap and heap[0][0] < 0:
            _, rank, row = heap[0]
            chosen.append(row[0])
            heapreplace(heap, (1 - len(row), rank, row[1:]))
        return chosen


@final
@dataclass(frozen=True, slots=True)
class LeastLoaded(WholeScheme):
    """On the GPUs that have the fewest jobs."""

    def choose(self, count: int, free: Iterator[int], devices: DeviceStates) -> Sequence[int]:
        """The first of those with the fewest jobs."""
        return sorted(free, key=lambda gpu: len(devices.owners[gpu]))[:count]


class _GraphScheme(Scheme):
    """Places operator graphs; answers are kept in `DeviceStates.memo`."""

    @abstractmethod
    def _placement(self, job: Job, graph: OpGraph, cluster: Cluster) -> Placement | None:
        """The placement of the job's graph there, if there is one."""

    def _grant(self, job: Job, devices: DeviceStates, left: list["_Residual"]) -> Grant | None:
        """The grant of the placement on some GPUs, computed once for every shape of them."""
        assert job.graph is not None, "only graphs are split"
        asked = id(job.graph), id(job.placement), job.step_ns, job.compute, job.limit
        question = (self, *asked, _shape_of(left))
        if question not in devices.memo:
            cluster = _cluster_of(left, job)
            placement = self._placement(job, job.graph, cluster)
            devices.memo[question] = (
                None if placement is None else _granted(job, job.graph, placement, cluster, left)
            )
        answer = devices.memo[question]
        if answer is None:
            return None
        return replace(answer, gpus=tuple(left[place].index for place in answer.gpus))


@final
@dataclass(frozen=True, slots=True)
class Baechi(_GraphScheme):
    """Places a job's graph on what is left of the GPUs that admit another job.

    Whole on one GPU where that is possible, else on as few as possible, at most `Job.most_gpus`. A
    job without a graph is placed as by `best-fit`. Where a policy chooses how many GPUs a job has,
    it is split over so many if that is faster than whole.

    A split costs a `solve` for each number of devices that is tried, some 0.1 s for 500 ops. So
    answers are kept (`DeviceStates.memo`) by kinds of GPUs and 32nds of their memory. Nothing is
    tried with less on every device than what did not fit, nor where all devices together have less
    than the whole job holds at its peak, which leaves out splits that would hold less.

    Attributes:
        effort: As `solve`'s, or `LISTED` for simulations of many jobs.
    """

    effort: str = "fast"

    def place(self, job: Job, devices: DeviceStates) -> Grant | None:
        """The first of whole, two, three, ... GPUs that fits; `None` if none does."""
        if job.graph is None:
            return BestFit().place(job, devices)
        left = []
        for index in devices.open(Part(0, 1, job.limit)):
            memory = devices.memory_left[index]
            if memory != 0:
                nbytes = AMPLE if memory is None else memory
                left.append(_Residual(index, nbytes, devices.fleet.gpus[index]))
        found = self._whole(job, devices, left)
        if found is not None and devices.wanted > 1 and len(left) > 1:
            split = self._split(job, devices, left, min(devices.wanted, len(left)))
            if split is not None and devices.rate(split, joins=True) > devices.rate(
                found, joins=True
            ):
                return split
        for most in range(2, min(job.most_gpus or job.gpus, len(left)) + 1):
            if found is None:
                found = self._split(job, devices, left, most)
        return found

    def _whole(self, job: Job, devices: DeviceStates, left: list["_Residual"]) -> Grant | None:
        """On one GPU: where it is fastest, and among those where the least memory is left."""
        found = []
        for row in left:
            grant = self._grant(job, devices, [replace(row, nbytes=AMPLE)])
            if grant is not None and devices.admits_all(grant):
                found.append((-devices.rate(grant, joins=True), row.nbytes, row.index, grant))
        return min(found)[-1] if found else None

    def _split(
        self, job: Job, devices: DeviceStates, left: list["_Residual"], most: int
    ) -> Grant | None:
        """On at most `most` GPUs, those with the most memory: of one node if that is enough."""
        alone = self._grant(job, devices, [replace(left[0], nbytes=AMPLE)])
        least = alone.parts[0].memory_bytes if alone is not None else 0
        nodes = [list(rows) for _, rows in groupby(left, key=lambda row: row.gpu.node)]
        offers = [
            sorted(rows, key=lambda row: (-row.nbytes, row.index))[:most] for rows in (*nodes, left)
        ]
        enough = [rows for rows in offers if _total(rows) >= least]
        if not enough:
            return None
        near = [rows for rows in enough[:-1] if len(rows) == most] or enough[-1:]
        left = [row.rounded() for row in max(near, key=_total)]
        memory = tuple(row.nbytes for row in left)
        asked = (self, id(job.graph), job.step_ns, job.compute, job.limit, most)
        refused = devices.refused.setdefault(asked, [])
        if any(
            len(memory) <= len(before) and all(map(operator.le, memory, before))
            for before in refused
        ):
            return None
        grant = self._grant(job, devices, left)
        if grant is None:
            refused.append(memory)
        return grant if grant is not None and devices.admits_all(grant) else None

    def _placement(self, job: Job, graph: OpGraph, cluster: Cluster) -> Placement | None:
        del job
        problem = Problem(graph, cluster)
        if self.effort == LISTED:
            placers = METF(), HEFT()
            return best([(placer.name, placer.place(problem)) for placer in placers], LISTED)
        return find(problem, self.effort)


@final
@dataclass(frozen=True, slots=True)
class AsPlaced(_GraphScheme):
    """Takes GPUs as another scheme does, and splits a graph over them as `Job.placement` says.

    Attributes:
        scheme: Which GPUs; each has room for `Job.memory_bytes`.
    """

    scheme: Scheme

    def place(self, job: Job, devices: DeviceStates) -> Grant | None:
        """On the scheme's GPUs; the rate is that of the predicted step there."""
        grant = self.scheme.place(job, devices)
        if grant is None or job.graph is None or job.placement is None:
            return grant
        left = [_Residual(index, AMPLE, devices.fleet.gpus[index]) for index in grant.gpus]
        grant = self._grant(job, devices, left)
        return grant if grant is not None and devices.admits_all(grant) else None

    def _placement(self, job: Job, graph: OpGraph, cluster: Cluster) -> Placement | None:
        del graph, cluster
        return job.placement


@final
@dataclass(frozen=True, slots=True)
class _Residual:
    """A GPU with the memory that is left on it."""

    index: int
    nbytes: int
    gpu: Gpu

    def rounded(self) -> "_Residual":
        """With memory in 32nds of the GPU's, rounded down, so that fewer questions differ."""
        unit = (self.gpu.memory_bytes or 0) // 32
        return replace(self, nbytes=self.nbytes // unit * unit) if unit else self


def _total(left: Sequence[_Residual]) -> int:
    return sum(row.nbytes for row in left)


def _shape_of(left: Sequence[_Residual]) -> tuple[_Residual, ...]:
    """Equal for GPUs on which a graph has the same answer: without indices, nodes renumbered."""
    nodes = {node: rank for rank, node in enumerate(dict.fromkeys(row.gpu.node for row in left))}
    return tuple(
        _Residual(0, row.nbytes, replace(row.gpu, node=nodes[row.gpu.node], switch=0, held_bytes=0))
        for row in left
    )


def _cluster_of(left: Sequence[_Residual], job: Job) -> Cluster:
    """The cluster for `solve`: a share of a GPU is a slower GPU."""
    devices = []
    for place, row in enumerate(left):
        speed = row.gpu.speed * min(row.gpu.share, job.compute) / (WHOLE * job.compute)
        devices.append(Device(f"gpu{place}", row.nbytes, speed, row.gpu.kind))
    links = tuple(
        tuple(None if a is b else NEAR if a.gpu.node == b.gpu.node else FAR for b in left)
        for a in left
    )
    return Cluster(tuple(devices), links)


def _granted(
    job: Job, graph: OpGraph, placement: Placement, cluster: Cluster, left: Sequence[_Residual]
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
    # As if nothing of the step were computed while a tensor is between nodes.
    sending_ns = sum(
        row.end_ns - row.start_ns
        for row in schedule.transfers
        if left[row.src].gpu.node != left[row.dst].gpu.node
    )
    sending = min(WHOLE, WHOLE * sending_ns // step_ns)
    return Grant(tuple(used), parts, max(1, rate), sending)
