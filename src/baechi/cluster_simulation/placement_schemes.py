"""Placement schemes: the choice of GPUs for a job.

| scheme | takes |
|---|---|
| `count` | any free GPUs, only counted (`free_devices.DeviceCounter`) |
| `first-fit` | the first GPUs that have room, in order |
| `consolidated` | the first node with room for all, else whole nodes and a rest under one switch |
| `random` | any GPUs with room |
| `best-fit` | the node that would have the least left; else as few nodes as possible |
| `least-loaded` | the GPUs with the fewest jobs |
| `baechi` | what `baechi.solve` decides on what is left (`splitting.py`) |
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from baechi.cluster_simulation.contention import Part
from baechi.cluster_simulation.free_devices import DeviceStates, Grant
from baechi.cluster_simulation.jobs import Job


class Scheme(ABC):
    """Chooses GPUs."""

    @abstractmethod
    def place(self, job: Job, devices: DeviceStates) -> Grant | None:
        """The GPUs for a job, or `None` if it must wait; changes nothing."""


def part_of(job: Job) -> Part:
    """The part of a job that is not split on each of its GPUs."""
    return Part(job.memory_bytes, job.compute, job.limit)


def granted(job: Job, gpus: Sequence[int]) -> Grant:
    """The grant of equal parts on some GPUs."""
    return Grant(tuple(gpus), (part_of(job),) * len(gpus))


def by_node(devices: DeviceStates, gpus: Sequence[int]) -> dict[int, list[int]]:
    """GPUs by their node, in order."""
    nodes: dict[int, list[int]] = {}
    for gpu in gpus:
        nodes.setdefault(devices.fleet.gpus[gpu].node, []).append(gpu)
    return nodes


@final
@dataclass(frozen=True, slots=True)
class FirstFit(Scheme):
    """On the first GPUs that have room, on any nodes."""

    def place(self, job: Job, devices: DeviceStates) -> Grant | None:
        """In the order of the cluster."""
        free = devices.open(part_of(job))
        return granted(job, free[: job.gpus]) if len(free) >= job.gpus else None


@final
@dataclass(frozen=True, slots=True)
class Consolidated(Scheme):
    """On one node where a node is enough, else on whole nodes and a rest, under one switch.

    The rule of the Tiresias simulator's scheme `yarn`; CPUs and host memory are not modeled here.
    """

    def place(self, job: Job, devices: DeviceStates) -> Grant | None:
        """The first node or switch that has room; GPUs with fewer jobs before others."""
        free = by_node(devices, devices.open(part_of(job)))
        for row in free.values():
            row.sort(key=lambda gpu: len(devices.owners[gpu]))
        per_node = devices.fleet.gpus_per_node
        if job.gpus <= per_node:
            found = next((row for row in free.values() if len(row) >= job.gpus), None)
            return None if found is None else granted(job, sorted(found[: job.gpus]))
        whole, rest = divmod(job.gpus, per_node)
        switches: dict[int, list[list[int]]] = {}
        for row in free.values():
            switches.setdefault(devices.fleet.gpus[row[0]].switch, []).append(row)
        for nodes in switches.values():
            idle = [
                row
                for row in nodes
                if len(row) == per_node and not any(devices.owners[gpu] for gpu in row)
            ][:whole]
            last = next((row for row in nodes if len(row) >= rest and row not in idle), None)
            if len(idle) == whole and (last is not None or not rest):
                chosen = [gpu for row in idle for gpu in row]
                return granted(job, sorted(chosen + (last[:rest] if last and rest else [])))
        return None


@final
@dataclass(frozen=True, slots=True)
class Random(Scheme):
    """On any GPUs with room, drawn anew for each job."""

    def place(self, job: Job, devices: DeviceStates) -> Grant | None:
        """A uniform sample."""
        free = devices.open(part_of(job))
        if len(free) < job.gpus:
            return None
        return granted(job, sorted(devices.random.sample(free, job.gpus)))


@final
@dataclass(frozen=True, slots=True)
class BestFit(Scheme):
    """On the tightest node, and there on the fullest GPUs."""

    def place(self, job: Job, devices: DeviceStates) -> Grant | None:
        """One node if any has room for all; else the nodes with the most room, one by one."""
        free = devices.open(part_of(job))
        if len(free) < job.gpus:
            return None
        nodes = sorted(by_node(devices, free).values(), key=len)
        tightest = next((row for row in nodes if len(row) >= job.gpus), None)
        chosen: list[int] = []
        for row in [tightest] if tightest else reversed(nodes):
            fullest = sorted(row, key=lambda gpu: _left(devices, gpu))
            chosen += fullest[: job.gpus - len(chosen)]
        return granted(job, sorted(chosen))


def _left(devices: DeviceStates, gpu: int) -> tuple[int, int]:
    """A key that sorts GPUs from full to empty: free memory, then number of jobs."""
    return devices.memory_left[gpu] or 0, -len(devices.owners[gpu])


@final
@dataclass(frozen=True, slots=True)
class LeastLoaded(Scheme):
    """On the GPUs that have the fewest jobs."""

    def place(self, job: Job, devices: DeviceStates) -> Grant | None:
        """The first of those with the fewest jobs."""
        free = devices.open(part_of(job))
        if len(free) < job.gpus:
            return None
        free.sort(key=lambda gpu: len(devices.owners[gpu]))
        return granted(job, sorted(free[: job.gpus]))
