"""A graph and a cluster as the flat arrays that the C++ core reads.

The core adds times and bytes without looking for overflow; `Problem` proves beforehand that no sum
that it can meet reaches 2**62.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from baechi import _core
from baechi.devices import PORTS, Cluster
from baechi.errors import InputError
from baechi.graph import OpGraph
from baechi.units import format_bytes

LIMIT: Final = 2**62


@final
@dataclass(frozen=True, eq=False)
class Problem:
    """What a placer decides about: a graph and a cluster, checked together.

    Attributes:
        graph: The operators and tensors.
        cluster: The devices and links.

    Raises:
        InputError: They are no graph and no cluster, or times or bytes add up to 2**62 or more.
    """

    graph: OpGraph
    cluster: Cluster

    def __post_init__(self) -> None:
        for value, kind in ((self.graph, OpGraph), (self.cluster, Cluster)):
            if not isinstance(value, kind):
                raise InputError(
                    f"a {type(value).__name__} stands where a baechi.{kind.__name__} belongs; the "
                    "order is graph, cluster, placement."
                )
        self._check_times()
        self._check_bytes()

    def _check_times(self) -> None:
        links = [link for row in self.cluster.links for link in row if link is not None]
        latency_ns = max((link.latency_ns for link in links), default=0)
        rate = min((link.bytes_per_s for link in links), default=LIMIT)
        nbytes = sum(tensor.nbytes for tensor in self.graph.tensors)
        sent_ns = nbytes * 10**9 // rate + len(self.graph.tensors) * (1 + latency_ns)
        # Per op also the hand-over inside a pool, which costs the link's latency.
        waits_ns = sent_ns * len(self.cluster.devices) + latency_ns * len(self.graph.ops)
        total_ns = sum(self.durations.max(axis=0).tolist()) + waits_ns
        if total_ns >= LIMIT:
            raise InputError(
                f"the step may take {total_ns} ns, more than 2**62 (146 years): a time, a latency "
                "or a tensor is too large, or a speed or a rate too small. Are they in ns, "
                "bytes and bytes per second?"
            )

    def _check_bytes(self) -> None:
        pools = len(self.pool_devices)
        total = sum(op.persistent_bytes + op.workspace_bytes for op in self.graph.ops)
        total += pools * sum(tensor.nbytes for tensor in self.graph.tensors)
        if total >= LIMIT:
            raise InputError(
                f"the ops and tensors take {total} bytes ({format_bytes(total)}), more than 2**62. "
                "Are they in bytes?"
            )

    @cached_property
    def device_class(self) -> NDArray[np.int32]:
        """Per device the row of `durations`: devices of one kind and speed share it."""
        return np.array([self._classes.index(key) for key in self._class_of], np.int32)

    @cached_property
    def _class_of(self) -> list[tuple[str, float]]:
        times = self.graph.times
        return [(d.kind if d.kind in times else "", d.speed) for d in self.cluster.devices]

    @cached_property
    def _classes(self) -> list[tuple[str, float]]:
        return list(dict.fromkeys(self._class_of))

    @cached_property
    def durations(self) -> NDArray[np.int64]:
        """The time of every op on every class of devices: `ceil(time / speed)`.

        A speed of exactly 1.0 leaves the time as it is; any other divides it as IEEE doubles.
        """
        rows = []
        for kind, speed in self._classes:
            has_times = kind in self.graph.times
            times = self.graph.times[kind] if has_times else [op.time_ns for op in self.graph.ops]
            row = np.array(times, np.int64)
            if speed != 1.0:
                with np.errstate(over="ignore"):
                    scaled = np.ceil(row.astype(np.float64) / speed)
                if scaled.size and scaled.max() >= LIMIT:
                    op = self.graph.ops[int(scaled.argmax())]
                    raise InputError(
                        f"op {op.name!r} would take more than 2**62 ns (146 years) at speed "
                        f"{speed!r}; leave out a device that has next to no compute left."
                    )
                row = scaled.astype(np.int64)
            rows.append(row)
        return np.array(rows, np.int64).reshape(len(rows), len(self.graph.ops))

    @cached_property
    def device_pool(self) -> tuple[int, ...]:
        """The memory pool of every device; one without a pool is alone in its own."""
        pools: dict[str, int] = {}
        row = []
        for index, device in enumerate(self.cluster.devices):
            # No device is named like the key of a pool: pools have two leading characters more.
            key = f"p:{device.pool}" if device.pool else f"d:{index}"
            row.append(pools.setdefault(key, len(pools)))
        return tuple(row)

    @cached_property
    def pool_devices(self) -> tuple[tuple[int, ...], ...]:
        """The devices of every pool."""
        rows: list[list[int]] = [[] for _ in range(1 + max(self.device_pool))]
        for device, pool in enumerate(self.device_pool):
            rows[pool].append(device)
        return tuple(map(tuple, rows))

    @cached_property
    def pool_memory(self) -> tuple[int, ...]:
        """The memory of every pool."""
        return tuple(self.cluster.devices[row[0]].memory_bytes for row in self.pool_devices)

    @cached_property
    def op_group(self) -> tuple[int, ...]:
        """The group of every op, counted by first op; an op without one is alone in its own."""
        groups: dict[str, int] = {}
        row: list[int] = []
        count = 0
        for op in self.graph.ops:
            group = count if op.group is None else groups.setdefault(op.group, count)
            row.append(group)
            count += group == count
        return tuple(row)

    @cached_property
    def group_ops(self) -> tuple[tuple[int, ...], ...]:
        """The ops of every group, ascending."""
        rows: list[list[int]] = []
        for op, group in enumerate(self.op_group):
            if group == len(rows):
                rows.append([])
            rows[group].append(op)
        return tuple(map(tuple, rows))

    @cached_property
    def group_persistent(self) -> tuple[int, ...]:
        """The persistent bytes of every group."""
        ops = self.graph.ops
        return tuple(sum(ops[op].persistent_bytes for op in row) for row in self.group_ops)

    @cached_property
    def group_bytes(self) -> tuple[int, ...]:
        """The memory of every group: persistent bytes, all outputs, and its largest workspace."""
        outputs = [0] * len(self.graph.ops)
        for tensor in self.graph.tensors:
            outputs[tensor.producer] += tensor.nbytes
        workspace = [op.workspace_bytes for op in self.graph.ops]
        return tuple(
            persistent + sum(outputs[op] for op in row) + max(workspace[op] for op in row)
            for persistent, row in zip(self.group_persistent, self.group_ops, strict=True)
        )

    def group_name(self, op: int) -> str:
        """How an error names the op, or the group that it cannot leave."""
        group = self.graph.ops[op].group
        return f"op {self.graph.ops[op].name!r}" if group is None else f"group {group!r}"

    @cached_property
    def core(self) -> _core.Problem:
        """The same for C++."""
        ops, tensors = self.graph.ops, self.graph.tensors
        sizes = np.array([len(tensor.consumers) for tensor in tensors], np.int64)
        links = [link for row in self.cluster.links for link in row]
        return _core.Problem(
            workspace=np.array([op.workspace_bytes for op in ops], np.int64),
            group=np.array(self.op_group, np.int32),
            group_persistent=np.array(self.group_persistent, np.int64),
            producer=np.array([tensor.producer for tensor in tensors], np.int32),
            nbytes=np.array([tensor.nbytes for tensor in tensors], np.int64),
            kept=np.array([tensor.kept for tensor in tensors], np.uint8),
            consumer_begin=np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)]),
            consumers=np.array([c for tensor in tensors for c in tensor.consumers], np.int32),
            device_class=self.device_class,
            durations=self.durations.reshape(-1),
            pool=np.array(self.device_pool, np.int32),
            memory=np.array(self.pool_memory, np.int64),
            latency=np.array([link.latency_ns if link else 0 for link in links], np.int64),
            rate=np.array([link.bytes_per_s if link else 0 for link in links], np.int64),
            ports=PORTS.index(self.cluster.ports),
        )

    def timeline(self, headroom: float = 0.0) -> _core.Timeline:
        """A fresh timeline of the core.

        Args:
            headroom: The share of every memory that groups of several ops leave free when they
                come to a device, for what their later ops will need there.
        """
        timeline = _core.Timeline(self.core)
        for pool, memory_bytes in enumerate(self.pool_memory):
            timeline.hold_back(pool, int(memory_bytes * headroom))
        return timeline
