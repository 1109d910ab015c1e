"""An operator graph as flat NumPy arrays, for work that is too slow op by op in Python.

`OpGraph.arrays` computes them once per graph, so a scheduler that solves the same graph many times
pays for them once.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from baechi import _core


def exact_sum(values: NDArray[np.int64]) -> int:
    """The sum of fewer than 2**31 integers, exact where it has more than 64 bits."""
    return (int((values >> 32).sum()) << 32) + int((values & 0xFFFFFFFF).sum())


@final
@dataclass(frozen=True, eq=False)
class GraphArrays:
    """The columns of a graph; read-only.

    Attributes:
        times: ns per op on a device of speed 1 without times of its kind.
        kind_times: ns per op of every kind in `OpGraph.times`.
        persistent: Bytes per op.
        workspace: Net bytes per op: below 0 where it reuses more of its inputs than it takes.
        launch: ns of the launching host per op.
        op_group: Per op; groups are counted by first op, and an op without one is alone in its own.
        producer: Op per tensor.
        nbytes: Per tensor.
        kept: Per tensor, 0 or 1.
        consumer_begin: Where the consumers of every tensor begin in `consumers`, and their number.
        consumers: Ops, ascending per tensor.
        part_begin: Where the parts of every tensor begin in `part_bytes`, and their number; empty
            where there are none. Those that read the whole are the readers of such a part.
        part_bytes: Per part.
        reader_begin: Where the readers of every part begin in `readers`, and their number.
        readers: Ops.
        beside_begin: Where the rows of every op begin in the two below, and their number; empty
            where there are none.
        beside: Ops, as in `Op.beside`, ascending per op.
        beside_bytes: How much less the workspace is without each of them.
    """

    times: NDArray[np.int64]
    kind_times: dict[str, NDArray[np.int64]]
    persistent: NDArray[np.int64]
    workspace: NDArray[np.int64]
    launch: NDArray[np.int64]
    op_group: NDArray[np.int32]
    producer: NDArray[np.int32]
    nbytes: NDArray[np.int64]
    kept: NDArray[np.uint8]
    consumer_begin: NDArray[np.int64]
    consumers: NDArray[np.int32]
    part_begin: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    part_bytes: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    reader_begin: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    readers: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    beside_begin: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    beside: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    beside_bytes: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))

    def __post_init__(self) -> None:
        for column in (*vars(self).values(), *self.kind_times.values()):
            if isinstance(column, np.ndarray):
                column.setflags(write=False)

    @property
    def ops(self) -> int:
        """The number of ops."""
        return len(self.times)

    @property
    def tensors(self) -> int:
        """The number of tensors."""
        return len(self.nbytes)

    @property
    def groups(self) -> int:
        """The number of groups."""
        return int(self.op_group.max()) + 1 if len(self.op_group) else 0

    @cached_property
    def group_persistent(self) -> NDArray[np.int64]:
        """The persistent bytes of every group."""
        sums = np.zeros(self.groups, np.int64)
        np.add.at(sums, self.op_group, self.persistent)
        return sums

    # Sums of Python's integers are exact, however large.
    @cached_property
    def total_op_bytes(self) -> int:
        """Persistent and workspace bytes of all ops, as if none were reused."""
        return exact_sum(self.persistent) + exact_sum(np.maximum(self.workspace, 0))

    @cached_property
    def total_tensor_bytes(self) -> int:
        """Bytes of all tensors."""
        return exact_sum(self.nbytes)

    @cached_property
    def core(self) -> _core.Graph:
        """The graph for C++, shared by all problems of this graph."""
        return _core.Graph(
            workspace=self.workspace,
            beside_begin=self.beside_begin,
            beside=self.beside,
            beside_bytes=self.beside_bytes,
            group=self.op_group,
            group_persistent=self.group_persistent,
            producer=self.producer,
            nbytes=self.nbytes,
            kept=self.kept,
            consumer_begin=self.consumer_begin,
            consumers=self.consumers,
            part_begin=self.part_begin,
            part_bytes=self.part_bytes,
            reader_begin=self.reader_begin,
            readers=self.readers,
        )

    def __getstate__(self) -> dict[str, Any]:
        """The columns alone: derived values are recomputed after a load or a copy."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def edges(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Producer and consumer of every pair of a tensor and its consumer, in tensor order."""
        return self.per_consumer(self.producer), self.consumers

    def extents(self, position: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The first and the last position of the ops of every tensor, given that of every op."""
        first = position[self.producer]
        last = first.copy()
        tensors = self.per_consumer(np.arange(self.tensors))
        np.minimum.at(first, tensors, position[self.consumers])
        np.maximum.at(last, tensors, position[self.consumers])
        return first, last

    def per_consumer(self, values: NDArray[Any]) -> NDArray[Any]:
        """The value of its tensor for every consumer."""
        return np.repeat(values, np.diff(self.consumer_begin))

    @cached_property
    def least_workspace(self) -> NDArray[np.int64]:
        """The workspace of every op wherever the others are."""
        if not len(self.beside):
            return self.workspace
        least = self.workspace.copy()
        owners = np.repeat(np.arange(self.ops), np.diff(self.beside_begin))
        np.subtract.at(least, owners, self.beside_bytes)
        return least

    @cached_property
    def least_copies(self) -> NDArray[np.int64]:
        """The bytes of every tensor that a reader of it needs at least: those of a part."""
        if not len(self.part_bytes):
            return self.nbytes
        least = self.nbytes.copy()
        tensors = np.repeat(np.arange(self.tensors), np.diff(self.part_begin))
        np.minimum.at(least, tensors, self.part_bytes)
        return least

    @cached_property
    def running_bytes(self) -> NDArray[np.int64]:
        """Bytes of inputs, outputs and workspace that every op needs wherever the others are.

        Exact where the ops and tensors take less than 2**62 bytes, which `Problem` checks.
        """
        running = self.least_workspace.copy()
        np.add.at(running, self.producer, self.nbytes)
        np.add.at(running, self.consumers, self.per_consumer(self.least_copies))
        return running

    def least_bytes(self, takes_time: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Bytes that every group needs on its device at some time, given the ops that take time.

        Others hold nothing while they run: their intervals may be empty.
        """
        most = np.zeros(self.groups, np.int64)
        np.maximum.at(most, self.op_group, np.where(takes_time, self.running_bytes, 0))
        return self.group_persistent + most


def arrays_of(
    ops: Sequence[Any], tensors: Sequence[Any], times: Mapping[str, tuple[int, ...]]
) -> GraphArrays:
    """The columns of a graph's `Op` and `Tensor` values and times; O(ops + tensors)."""
    sizes = np.array([len(tensor.consumers) for tensor in tensors], np.int64)
    consumers = (consumer for tensor in tensors for consumer in tensor.consumers)
    keys = (index if op.group is None else op.group for index, op in enumerate(ops))
    groups: dict[int | str, int] = {}
    beside = [row for op in ops for row in op.beside]
    parts_of = [_all_parts(tensor) if tensor.parts else () for tensor in tensors]
    parts = [part for row in parts_of for part in row]
    return GraphArrays(
        times=np.array([op.time_ns for op in ops], np.int64),
        kind_times={kind: np.array(row, np.int64) for kind, row in times.items()},
        persistent=np.array([op.persistent_bytes for op in ops], np.int64),
        workspace=np.array([op.workspace_bytes - op.reused_bytes for op in ops], np.int64),
        launch=np.array([op.launch_ns for op in ops], np.int64),
        op_group=np.array([groups.setdefault(key, len(groups)) for key in keys], np.int32),
        producer=np.array([tensor.producer for tensor in tensors], np.int32),
        nbytes=np.array([tensor.nbytes for tensor in tensors], np.int64),
        kept=np.array([tensor.kept for tensor in tensors], np.uint8),
        consumer_begin=np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)]),
        consumers=np.fromiter(consumers, np.int32, int(sizes.sum())),
        part_begin=_begins(map(len, parts_of) if parts else None),
        part_bytes=np.array([nbytes for nbytes, *_ in parts], np.int64),
        reader_begin=_begins((len(part) - 1 for part in parts) if parts else None),
        readers=np.array([op for _, *row in parts for op in row], np.int32),
        beside_begin=_begins((len(op.beside) for op in ops) if beside else None),
        beside=np.array([other for other, _ in beside], np.int32),
        beside_bytes=np.array([nbytes for _, nbytes in beside], np.int64),
    )


def _begins(counts: Iterable[int] | None) -> NDArray[np.int64]:
    """Where rows of so many entries begin, and the number of all; empty where there are none."""
    return np.cumsum([] if counts is None else [0, *counts], dtype=np.int64)


def _all_parts(tensor: Any) -> tuple[tuple[int, ...], ...]:
    """The parts of a tensor, and the whole as one that all others of its consumers read."""
    reading = {op for row in tensor.parts for op in row[1:]}
    whole = [op for op in tensor.consumers if op not in reading]
    return (*tensor.parts, (tensor.nbytes, *whole)) if whole else tensor.parts
