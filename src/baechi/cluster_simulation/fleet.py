"""The machines of a simulated cluster: switches of nodes of GPUs, or of slices of GPUs."""

from dataclasses import dataclass
from typing import Final, final

from baechi.cluster_simulation.jobs import WHOLE
from baechi.errors import InputError
from baechi.validation import check_count

MAX_GPUS: Final = 1_000_000  # some gigabytes of them


@final
@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, or a MIG slice of one.

    Attributes:
        node: Index of its node in the cluster.
        switch: Index of its switch.
        memory_bytes: Its memory; `None` where memory is not modeled.
        speed: How fast it runs a job, in thousandths of the GPU that durations were measured on.
        share: The part of a GPU's compute that it has, in thousandths; below 1,000 for a slice.
        kind: The kind of hardware, as named in `OpGraph.times`.
        held_bytes: What others hold of its memory all the time; not the jobs that are simulated.
            What they take of its compute is missing in `share`.
    """

    node: int
    switch: int
    memory_bytes: int | None = None
    speed: int = WHOLE
    share: int = WHOLE
    kind: str = ""
    held_bytes: int = 0

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
@dataclass(frozen=True, slots=True)
class Fleet:
    """All GPUs of a cluster, node after node and switch after switch.

    Attributes:
        gpus: `gpu` means an index into them everywhere.
        nodes: How many nodes there are.
        gpus_per_node: Of the largest node.

    Raises:
        InputError: No GPUs, nodes out of order, or a speed, a share or held memory out of range.
    """

    gpus: tuple[Gpu, ...]

    def __post_init__(self) -> None:
        if not self.gpus:
            raise InputError("a cluster has no GPUs; give at least one.")
        last = (0, 0)
        for index, gpu in enumerate(self.gpus):
            if (gpu.switch, gpu.node) < last or gpu.node > last[1] + 1:
                raise InputError(
                    f"GPU {index} is on node {gpu.node} of switch {gpu.switch}, after node "
                    f"{last[1]} of switch {last[0]}; list GPUs by switch and node, numbered from 0."
                )
            last = (gpu.switch, gpu.node)
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
            if check_count(count, f"the number of {what}") < 1:
                raise InputError(f"a cluster with {count} {what}; give at least 1.")
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
                Gpu(switch * nodes + node, switch, piece.memory_bytes, speed, piece.share, kind)
                for switch in range(switches)
                for node in range(nodes)
                for _ in range(gpus_per_node)
                for piece in pieces
            )
        )

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return self.gpus[-1].node + 1

    @property
    def gpus_per_node(self) -> int:
        """GPUs of the largest node."""
        counts = [0] * self.nodes
        for gpu in self.gpus:
            counts[gpu.node] += 1
        return max(counts)
