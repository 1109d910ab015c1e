"""Free and used devices of a simulated cluster: counted, or GPU by GPU."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import final

from baechi.cluster_simulation.contention import WORK, Part, Sharing
from baechi.cluster_simulation.fleet import Fleet
from baechi.cluster_simulation.jobs import WHOLE, Job


@final
@dataclass(frozen=True, slots=True)
class Grant:
    """The GPUs of a job.

    Attributes:
        gpus: Their indices; empty where they are only counted.
        parts: Its share of each of them.
        rate: Work per tick on whole GPUs: below `WORK` where being split slows the job down.
    """

    gpus: tuple[int, ...]
    parts: tuple[Part, ...]
    rate: int = WORK


class FreeDevices(ABC):
    """The state of a cluster's devices.

    Attributes:
        held_bytes: The memory that jobs hold, where it is modeled.
    """

    held_bytes: int = 0

    @abstractmethod
    def place(self, job: Job) -> Grant | None:
        """The GPUs on which the job could run now; changes nothing."""

    @abstractmethod
    def take(self, owner: int, job: Job, grant: Grant) -> None:
        """Puts a job on its GPUs."""

    @abstractmethod
    def give(self, owner: int, job: Job, grant: Grant) -> None:
        """Takes a job off its GPUs."""

    @abstractmethod
    def rate(self, grant: Grant, *, joins: bool = False) -> int:
        """Its work per tick among those on its GPUs: the slowest GPU's.

        Args:
            grant: The place.
            joins: Whether the job is not there yet, but would come.
        """

    @abstractmethod
    def neighbors(self, grant: Grant) -> set[int]:
        """The jobs on the GPUs of a grant."""

    @abstractmethod
    def place_again(self, grant: Grant) -> bool:
        """True if a job that was taken off its GPUs still fits on them."""

    @abstractmethod
    def row(self) -> tuple[int, int, int, int, int]:
        """Idle, partly busy and full nodes; idle and busy GPUs."""


@final
class DeviceCounter(FreeDevices):
    """Counts free GPUs, as the published simulators' scheme `count`: GPUs are not told apart."""

    def __init__(self, fleet: Fleet) -> None:
        self.total = self.free = len(fleet.gpus)
        self._nodes = fleet.nodes
        self._per_node = fleet.gpus_per_node
        self._grant = Grant((), ())

    def place(self, job: Job) -> Grant | None:
        """On any GPUs, if enough are free."""
        return self._grant if job.gpus <= self.free else None

    def take(self, owner: int, job: Job, grant: Grant) -> None:
        """Fewer are free."""
        del owner, grant
        self.free -= job.gpus

    def give(self, owner: int, job: Job, grant: Grant) -> None:
        """More are free."""
        del owner, grant
        self.free += job.gpus

    def rate(self, grant: Grant, *, joins: bool = False) -> int:
        """Of a whole GPU."""
        del grant, joins
        return WORK

    def neighbors(self, grant: Grant) -> set[int]:
        """None: GPUs are not shared."""
        del grant
        return set()

    def place_again(self, grant: Grant) -> bool:
        """Never called: where GPUs are counted, preemption reorders all jobs."""
        del grant
        return False

    def row(self) -> tuple[int, int, int, int, int]:
        """As if all nodes but one were full or idle; the last counts as full and as busy."""
        busy = self.total - self.free
        nodes = -(-busy // self._per_node)
        return self._nodes - nodes, nodes, nodes, self.free, busy


@final
class DeviceStates(FreeDevices):
    """The jobs on every GPU.

    Attributes:
        fleet: The GPUs.
        sharing: How jobs share one.
        owners: The jobs on every GPU.
        parts: What each of them has there, in the same order.
        memory_left: The memory that is left on every GPU; `None` where it is not modeled.
        random: For schemes that draw; seeded.
        memo: Answers of schemes; may be shared with other simulations.
        refused: Requests of this simulation that schemes found no room for.
    """

    def __init__(
        self,
        fleet: Fleet,
        sharing: Sharing,
        choose: "Callable[[Job, DeviceStates], Grant | None]",
        seed: int,
        memo: dict[object, object],
    ) -> None:
        self.fleet = fleet
        self.sharing = sharing
        self.random = Random(seed)
        self.memo = memo
        self.refused: dict[object, list[tuple[int, ...]]] = {}
        self._choose = choose
        count = len(fleet.gpus)
        self.owners: list[list[int]] = [[] for _ in range(count)]
        self.parts: list[list[Part]] = [[] for _ in range(count)]
        self.memory_left = [gpu.free_bytes for gpu in fleet.gpus]
        self._size = [0] * fleet.nodes
        for gpu in fleet.gpus:
            self._size[gpu.node] += 1
        self._busy = [0] * fleet.nodes
        self._busy_gpus = self._full_nodes = self._busy_nodes = 0

    def admits(self, gpu: int, part: Part) -> bool:
        """True if a GPU has room for one more part."""
        left = self.memory_left[gpu]
        fits = left is None or part.memory_bytes <= left
        if self.sharing.wants_whole and self.fleet.gpus[gpu].held_bytes:
            return False
        return fits and self.sharing.admits(self.parts[gpu], part)

    def open(self, part: Part) -> list[int]:
        """The GPUs that have room for one more part."""
        return [gpu for gpu in range(len(self.owners)) if self.admits(gpu, part)]

    def place(self, job: Job) -> Grant | None:
        """The scheme's choice."""
        return self._choose(job, self)

    def place_again(self, grant: Grant) -> bool:
        """True if a job that was taken off its GPUs still fits on them."""
        return all(
            self.admits(gpu, part) for gpu, part in zip(grant.gpus, grant.parts, strict=True)
        )

    def take(self, owner: int, job: Job, grant: Grant) -> None:
        """Puts its parts on its GPUs."""
        del job
        for gpu, part in zip(grant.gpus, grant.parts, strict=True):
            if not self.owners[gpu]:
                self._count(gpu, 1)
            self.owners[gpu].append(owner)
            self.parts[gpu].append(part)
            self._use_memory(gpu, part.memory_bytes)

    def give(self, owner: int, job: Job, grant: Grant) -> None:
        """Takes its parts off its GPUs."""
        del job
        for gpu in grant.gpus:
            place = self.owners[gpu].index(owner)
            del self.owners[gpu][place]
            self._use_memory(gpu, -self.parts[gpu].pop(place).memory_bytes)
            if not self.owners[gpu]:
                self._count(gpu, -1)

    def rate(self, grant: Grant, *, joins: bool = False) -> int:
        """That of its slowest GPU."""
        slowest = min(
            self.sharing.rate(
                [*self.parts[gpu], part] if joins else self.parts[gpu],
                part,
                self.fleet.gpus[gpu].share,
            )
            * self.fleet.gpus[gpu].speed
            for gpu, part in zip(grant.gpus, grant.parts, strict=True)
        )
        return max(1, slowest * grant.rate // (WORK * WHOLE))

    def neighbors(self, grant: Grant) -> set[int]:
        """The owners of those GPUs."""
        return {owner for gpu in grant.gpus for owner in self.owners[gpu]}

    def row(self) -> tuple[int, int, int, int, int]:
        """As counted while jobs came and went."""
        idle = len(self._busy) - self._busy_nodes
        partly = self._busy_nodes - self._full_nodes
        return idle, partly, self._full_nodes, len(self.owners) - self._busy_gpus, self._busy_gpus

    def _use_memory(self, gpu: int, nbytes: int) -> None:
        left = self.memory_left[gpu]
        if left is not None:
            self.memory_left[gpu] = left - nbytes
            self.held_bytes += nbytes

    def _count(self, gpu: int, more: int) -> None:
        """Updates the counts behind `row` as a GPU becomes busy or idle."""
        node = self.fleet.gpus[gpu].node
        before = self._busy[node]
        after = self._busy[node] = before + more
        self._busy_gpus += more
        self._busy_nodes += (after > 0) - (before > 0)
        self._full_nodes += (after == self._size[node]) - (before == self._size[node])
