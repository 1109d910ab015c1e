"""The GPUs of a simulated cluster, and what is free of them: counted, or GPU by GPU."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from random import Random
from typing import Final, final

from baechi.cluster_simulation.jobs import WHOLE, WORK, Grant, Job, JobRun, Part, Sharing, draw
from baechi.errors import InputError
from baechi.validation import check_count, check_positive

MAX_GPUS: Final = 1_000_000  # some gigabytes of them


@final
@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, or a MIG slice of one.

    Attributes:
        memory_bytes: Its memory; `None` where memory is not modeled.
        speed: How fast it runs a job, in thousandths of the GPU that durations were measured on.
        share: The part of a GPU's compute that it has, in thousandths; below 1,000 for a slice.
        kind: The kind of hardware, as named in `OpGraph.times`.
        held_bytes: What others hold of its memory all the time; not the jobs that are simulated.
            What they take of its compute is missing in `share`.
        watts: What it draws idle, and what more when it is busy at its full clock; zeros where
            power is not modeled.
    """

    node: int
    switch: int
    memory_bytes: int | None = None
    speed: int = WHOLE
    share: int = WHOLE
    kind: str = ""
    held_bytes: int = 0
    watts: tuple[int, int] = (0, 0)

    @property
    def free_bytes(self) -> int | None:
        """Memory for jobs; `None` where it is not modeled."""
        return None if self.memory_bytes is None else self.memory_bytes - self.held_bytes


@final
@dataclass(frozen=True, slots=True)
class Slice:
    """A MIG profile: the share of compute in thousandths, and the memory of one slice."""

    share: int
    memory_bytes: int | None = None


@final
@dataclass(frozen=True)  # without slots: it keeps what is computed once
class Fleet:
    """All GPUs of a cluster, node after node and switch after switch.

    Raises:
        InputError: No GPUs, nodes out of order, or a speed, a share or held memory out of range.
    """

    gpus: tuple[Gpu, ...]  # `gpu` means an index into them everywhere

    def __post_init__(self) -> None:
        if not self.gpus:
            raise InputError("a cluster has no GPUs; give at least one.")
        switch = node = 0
        for index, gpu in enumerate(self.gpus):
            if gpu.switch < switch or gpu.node not in (node, node + 1):
                raise InputError(
                    f"GPU {index} is on node {gpu.node} of switch {gpu.switch}, after node "
                    f"{node} of switch {switch}; list GPUs by switch and node, numbered from 0."
                )
            switch, node = gpu.switch, gpu.node
            if gpu.speed < 1 or not 1 <= gpu.share <= WHOLE:
                raise InputError(
                    f"GPU {index} has speed {gpu.speed} and share {gpu.share}; give thousandths, "
                    f"a share of at most {WHOLE}."
                )
            if not 0 <= gpu.held_bytes <= (gpu.memory_bytes or 0):
                raise InputError(
                    f"others hold {gpu.held_bytes} bytes of GPU {index}, which has "
                    f"{gpu.memory_bytes}; give its memory, and not more than that."
                )
            for watts in gpu.watts:
                check_count(watts, f"the watts of GPU {index}")

    @staticmethod
    def uniform(
        switches: int,
        nodes: int,
        gpus_per_node: int,
        *,
        memory_bytes: int | None = None,
        speed: int = WHOLE,
        kind: str = "",
        slices: tuple[Slice, ...] = (),
        watts: tuple[int, int] = (0, 0),
    ) -> "Fleet":
        """`switches` of `nodes` each of `gpus_per_node` GPUs, each GPU cut into `slices` if given.

        Raises:
            InputError: A count below 1, more than `MAX_GPUS`, or slices that are more than a GPU or
                have no memory where it has.
        """
        for what, count in (
            ("switches", switches),
            ("nodes per switch", nodes),
            ("GPUs per node", gpus_per_node),
        ):
            check_positive(count, f"the number of {what}")
        count = switches * nodes * gpus_per_node * max(1, len(slices))
        if count > MAX_GPUS:
            raise InputError(f"a cluster of {count} GPUs; give {MAX_GPUS} at most.")
        if sum(piece.share for piece in slices) > WHOLE:
            raise InputError(
                f"slices of {', '.join(str(piece.share) for piece in slices)} thousandths are more "
                f"than a GPU's {WHOLE}."
            )
        if memory_bytes is not None and any(piece.memory_bytes is None for piece in slices):
            raise InputError(
                "memory is that of a whole GPU, but a slice has none; give it its own."
            )
        held = sum(piece.memory_bytes or 0 for piece in slices)
        if memory_bytes is not None and held > memory_bytes:
            raise InputError(f"slices hold {held} bytes of a GPU that has {memory_bytes}.")
        pieces = slices or (Slice(WHOLE, memory_bytes),)
        return Fleet(
            tuple(
                Gpu(node, switch, piece.memory_bytes, speed, piece.share, kind, watts=watts)
                for switch in range(switches)
                for node in range(switch * nodes, (switch + 1) * nodes)
                for _ in range(gpus_per_node)
                for piece in pieces
            )
        )

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return self.gpus[-1].node + 1

    @cached_property
    def node_of(self) -> tuple[int, ...]:
        """The node of every GPU."""
        return tuple(gpu.node for gpu in self.gpus)

    @cached_property
    def gpus_of(self) -> list[list[int]]:
        """The GPUs of every node."""
        return [
            list(row) for _, row in groupby(range(len(self.gpus)), key=self.node_of.__getitem__)
        ]

    @property
    def idle_milliwatts(self) -> int:
        """What all draw without jobs."""
        return sum(WHOLE * gpu.watts[0] for gpu in self.gpus)

    @cached_property
    def gpus_per_node(self) -> int:
        """GPUs of the largest node."""
        return max(map(len, self.gpus_of))


@final
class DeviceCounter:
    """Counts free GPUs, as the published simulators' scheme `count`: GPUs are not told apart."""

    held_bytes = 0
    milliwatt_ticks = 0

    def __init__(self, fleet: Fleet) -> None:
        self.total = self.free = len(fleet.gpus)
        self._nodes = fleet.nodes
        self._per_node = fleet.gpus_per_node
        self._busy_watts = fleet.gpus[0].watts[1]
        self.milliwatts = fleet.idle_milliwatts

    def place(self, job: Job) -> Grant | None:
        """The job's grant if enough are free; changes nothing."""
        return Grant() if job.gpus <= self.free else None

    def take(self, run: JobRun, grant: Grant) -> None:
        """Gives GPUs to a job."""
        del grant
        self.free -= run.job.gpus
        self.milliwatts += self._busy_watts * run.job.compute * run.job.gpus

    def give(self, run: JobRun) -> None:
        """Takes its GPUs from a job."""
        self.free += run.job.gpus
        self.milliwatts -= self._busy_watts * run.job.compute * run.job.gpus

    def rate(self, grant: Grant, *, joins: bool = False) -> int:
        """The work per tick of a whole GPU."""
        del grant, joins
        return WORK

    def row(self) -> tuple[int, int, int, int, int]:
        """Idle, partly busy and full nodes; idle and busy GPUs.

        As if all nodes but one were full or idle; the last counts as full and as busy.
        """
        busy = self.total - self.free
        nodes = -(-busy // self._per_node)
        return self._nodes - nodes, nodes, nodes, self.free, busy


@final
class DeviceStates:
    """The jobs on every GPU.

    Attributes:
        owners: The jobs on every GPU, by their indices.
        parts: What each of them has there, in the same order.
        memory_left: The memory that is left on every GPU; `None` where it is not modeled.
        random: For schemes that draw; seeded.
        memo: Answers of schemes; may be shared with other simulations.
        refused: Requests of this simulation that schemes found no room for.
        held_bytes: The memory that jobs hold, where it is modeled.
        milliwatts: What all GPUs draw, where it is modeled.
        milliwatt_ticks: What they have drawn, times how long.
        among: The GPUs that schemes may choose among, while a policy wants some; else all.
        wanted: How many GPUs a policy wants for a job, if it chooses sizes; else 0.
    """

    among: Sequence[int]
    wanted: int = 0

    def __init__(
        self,
        fleet: Fleet,
        sharing: Sharing,
        choose: "Callable[[Job, DeviceStates], Grant | None]",
        seed: int,
        memo: dict[object, Grant | None],
    ) -> None:
        self.fleet = fleet
        self.sharing = sharing
        self.random = Random(seed)
        self.memo = memo
        self.refused: dict[object, list[tuple[int, ...]]] = {}
        self.held_bytes = 0
        self._choose = choose
        self.among = self._all = range(len(fleet.gpus))
        self.owners: list[list[int]] = [[] for _ in fleet.gpus]
        self.parts: list[list[Part]] = [[] for _ in fleet.gpus]
        self.memory_left = [gpu.free_bytes for gpu in fleet.gpus]
        self._size = Counter(fleet.node_of)
        self._ample = self.memory_left.count(None) == len(fleet.gpus)  # memory is not modeled
        self._busy = [0] * fleet.nodes  # GPUs of every node
        self.milliwatts, self.milliwatt_ticks = fleet.idle_milliwatts, 0
        self._drawn = [0] * len(fleet.gpus)  # what jobs want of `watts`, in thousandths
        self._powered = any(gpu.watts[1] for gpu in fleet.gpus)

    @property
    def free(self) -> int:
        """The number of GPUs that no job is on."""
        return len(self.owners) - sum(self._busy)

    def admits(self, gpu: int, part: Part) -> bool:
        """True if a GPU has room for one more part."""
        if self.sharing.wants_whole and self.fleet.gpus[gpu].held_bytes:
            return False
        left = self.memory_left[gpu]
        fits = left is None or part.memory_bytes <= left
        return fits and self.sharing.admits(self.parts[gpu], part)

    def admits_all(self, grant: Grant) -> bool:
        """True if its GPUs have room for all its parts."""
        return all(map(self.admits, grant.gpus, grant.parts))

    def open(self, part: Part) -> Iterator[int]:
        """The GPUs that have room for one more part."""
        most, owners, left = self.sharing.most, self.owners, self.memory_left
        if type(self.sharing).admits is Sharing.admits and not self.sharing.wants_whole:
            # It counts jobs alone: thousands of GPUs are looked at in half the time.
            nbytes = part.memory_bytes
            return (
                gpu
                for gpu in self.among
                if len(owners[gpu]) < most and ((room := left[gpu]) is None or nbytes <= room)
            )
        idle, admits = self._ample and self.sharing.admits((), part), self.admits
        return (
            gpu
            for gpu in self.among
            if (idle and not owners[gpu]) or (len(owners[gpu]) < most and admits(gpu, part))
        )

    def place(self, job: Job, size: int = 0, among: Sequence[int] | None = None) -> Grant | None:
        """The grant that the scheme chooses; changes nothing.

        Args:
            job: For whom.
            size: So many GPUs; `Job.gpus` if 0. A graph is then as fast as it can be on so many.
            among: Of these, in order; of all if absent.
        """
        resized = size and size != job.gpus
        asking = replace(job, gpus=size, most_gpus=size, curve=()) if resized else job
        self.wanted = size
        grant = self.choose(asking, self._all if among is None else among)
        self.wanted = 0
        return None if grant is None else self._paced(job, grant)

    def choose(self, job: Job, among: Sequence[int]) -> Grant | None:
        """What the scheme chooses of some GPUs, in order; before the job's own rates."""
        self.among = among
        grant = self._choose(job, self)
        self.among = self._all
        return grant

    def join(self, job: Job, size: int, gpus: tuple[int, ...]) -> Grant | None:
        """The grant of a job on just these GPUs, which others are on; changes nothing."""
        if job.graph is not None:
            grant = self.place(job, size, gpus)
            return grant if grant is not None and grant.gpus == gpus else None
        grant = Grant(gpus, (job.part,) * len(gpus))
        fits = size == len(gpus) and self.admits_all(grant)
        return self._paced(job, grant) if fits else None

    def emptied(self) -> "DeviceStates":
        """The same cluster without jobs, for predictions; its answers go to the same memo."""
        return DeviceStates(self.fleet, self.sharing, self._choose, 0, self.memo)

    def _paced(self, job: Job, grant: Grant) -> Grant:
        """With the rate of a job of this size, on these kinds of GPUs, so far from each other."""
        if not (job.kinds or job.curve) and job.across == (WHOLE, WHOLE):
            return grant
        gpus = [self.fleet.gpus[gpu] for gpu in grant.gpus]
        rate, sending = grant.rate * min(job.speed_on(gpu.kind) for gpu in gpus) // WHOLE, 0
        if job.graph is not None:
            sending = grant.sending
        else:
            if job.curve:
                rate = rate * job.curve[len(gpus) - 1] // WHOLE
            if len({gpu.node for gpu in gpus}) > 1:
                near = job.across[len({gpu.switch for gpu in gpus}) > 1]
                rate, sending = rate * near // WHOLE, max(0, WHOLE - near)
        return Grant(grant.gpus, grant.parts, max(1, rate), sending)

    def take(self, run: JobRun, grant: Grant) -> None:
        """Puts the parts of a job on GPUs."""
        for gpu, part in zip(grant.gpus, grant.parts, strict=True):
            if not self.owners[gpu]:
                self._busy[self.fleet.gpus[gpu].node] += 1
            self.owners[gpu].append(run.index)
            self.parts[gpu].append(part)
            self._use_memory(gpu, part.memory_bytes)
            self._use_power(gpu, part, run.clock, 1)

    def give(self, run: JobRun) -> None:
        """Takes the parts of a job off its GPUs."""
        for gpu in run.grant.gpus:
            place = self.owners[gpu].index(run.index)
            del self.owners[gpu][place]
            part = self.parts[gpu].pop(place)
            self._use_memory(gpu, -part.memory_bytes)
            self._use_power(gpu, part, run.clock, -1)
            if not self.owners[gpu]:
                self._busy[self.fleet.gpus[gpu].node] -= 1

    def set_clock(self, run: JobRun, clock: int) -> None:
        """Sets the clock of the GPUs of a running job."""
        for change in (-1, 1):
            for gpu, part in zip(run.grant.gpus, run.grant.parts, strict=True):
                self._use_power(gpu, part, run.clock, change)
            run.clock = clock

    def rate(self, grant: Grant, *, joins: bool = False) -> int:
        """Its work per tick among those on its GPUs, or if it joined them: the slowest GPU's."""
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

    def row(self) -> tuple[int, int, int, int, int]:
        """Idle, partly busy and full nodes; idle and busy GPUs."""
        idle, busy = self._busy.count(0), sum(self._busy)
        full = sum(0 < count == self._size[node] for node, count in enumerate(self._busy))
        return idle, len(self._busy) - idle - full, full, len(self.owners) - busy, busy

    def _use_memory(self, gpu: int, nbytes: int) -> None:
        left = self.memory_left[gpu]
        if left is not None:
            self.memory_left[gpu] = left - nbytes
            self.held_bytes += nbytes

    def _use_power(self, gpu: int, part: Part, clock: int, change: int) -> None:
        if self._powered:
            before = self._drawn[gpu]
            after = self._drawn[gpu] = before + change * draw(part.compute, clock)
            more = min(WHOLE, after) - min(WHOLE, before)
            self.milliwatts += self.fleet.gpus[gpu].watts[1] * more


FreeDevices = DeviceCounter | DeviceStates
