"""A graph, a cluster and constraints as the flat arrays that the C++ core reads.

The core adds times and bytes without overflow checks; `Problem` proves beforehand that no such sum
can reach 2**62. Of constraints, placers read only `allowed` and `max_devices`.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import InitVar, dataclass, replace
from difflib import get_close_matches
from functools import cached_property
from itertools import pairwise
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from baechi import _core
from baechi.errors import InputError
from baechi.records.cluster import PORTS, Cluster, Constraints, Link, lane_kind, lanes_of
from baechi.records.graph import OpGraph
from baechi.records.graph_arrays import GraphArrays, exact_sum
from baechi.units import format_bytes
from baechi.validation import check_is

LIMIT: Final = 2**62
# Maximum number of names listed in an error.
_LISTED: Final = 8
# Maximum number of names searched for one like an unknown one, at about 20 us each.
_SEARCHED: Final = 5_000
# Maximum number of parts that a problem keeps; a search asks for the same few again and again.
_MOST_PARTS: Final = 16


@final
@dataclass(frozen=True, eq=False)
class ArrayGraph:
    """A graph as arrays, of which there is an `OpGraph` only where someone asks for one.

    Attributes:
        arrays: Its columns.
        digest: Of its placements; not that of the `OpGraph`.
        as_values: A function that returns the `OpGraph`.
    """

    arrays: GraphArrays
    digest: str
    as_values: Callable[[], OpGraph]


@final
@dataclass(frozen=True, eq=False)
class Problem:
    """The input of a placer: a graph, a cluster and constraints, checked together.

    Attributes:
        source: The operators and tensors: an `OpGraph`, in its explicit form (`OpGraph.explicit`),
            or the arrays of one.
        cluster: The devices and links.
        constraints: Constraints besides memory; `None` is none.
        narrowed: With constraints, the value of `allowed` in place of the devices that they name.

    Raises:
        InputError: An argument has the wrong type, times or bytes add up to 2**62 or more, or the
            constraints use an unknown name or contradict each other.
    """

    source: OpGraph | ArrayGraph
    cluster: Cluster
    constraints: Constraints | None = None
    narrowed: InitVar[NDArray[np.bool_] | None] = None

    def __post_init__(self, narrowed: NDArray[np.bool_] | None) -> None:
        for value, kind in ((self.source, OpGraph), (self.cluster, Cluster)):
            if not isinstance(value, (kind, ArrayGraph)):
                raise InputError(
                    f"a {type(value).__name__} stands where a baechi.{kind.__name__} belongs; the "
                    "order is graph, cluster, placement."
                )
        if isinstance(self.source, OpGraph):
            object.__setattr__(self, "source", self.source.explicit)
        if self.constraints is not None:
            check_is(self.constraints, Constraints, "constraints")
            if narrowed is None:
                narrowed = allowed_devices(self.graph, self.cluster, self.constraints)
            self.__dict__["allowed"] = narrowed
        self._check_sums()

    @property
    def graph(self) -> OpGraph:
        """The operators and tensors as values."""
        return self.source if isinstance(self.source, OpGraph) else self.source.as_values()

    @property
    def arrays(self) -> GraphArrays:
        """The operators and tensors as columns."""
        return self.source.arrays

    def _check_sums(self) -> None:
        latency, rate = self.links
        paths = rate > 0
        latency_ns = int(np.where(paths, latency, 0).max())
        overhead_ns = int(self.overheads.max(initial=0))
        slowest = int(np.where(paths, rate, LIMIT).min())
        arrays = self.arrays
        sent_ns = arrays.total_tensor_bytes * 10**9 // slowest
        sent_ns += arrays.tensors * (1 + latency_ns + overhead_ns)
        # Each op may also have a hand-over inside a pool, which costs the link's latency.
        waits_ns = sent_ns * len(self.cluster.devices) + latency_ns * arrays.ops
        total_ns = exact_sum(self.durations.max(axis=0)) + exact_sum(arrays.launch) + waits_ns
        if total_ns >= LIMIT:
            raise InputError(
                f"the step may take {total_ns} ns, more than 2**62 (146 years): a time, a latency, "
                "an overhead or a tensor is too large, or a speed or a rate too small. Are they in "
                "ns, bytes and bytes per second?"
            )
        total = arrays.total_op_bytes + len(self.pool_devices) * arrays.total_tensor_bytes
        if total >= LIMIT:
            raise InputError(
                f"the ops and tensors take {total} bytes ({format_bytes(total)}), more than 2**62. "
                "Are they in bytes?"
            )

    @cached_property
    def allowed(self) -> NDArray[np.bool_]:
        """True where a device may take a group: a row per device, a column per group."""
        return np.broadcast_to(np.True_, (len(self.cluster.devices), self.arrays.groups))

    @property
    def max_devices(self) -> int | None:
        """Limit on the number of devices in use; `None` where it excludes none."""
        limit = None if self.constraints is None else self.constraints.max_devices
        return limit if limit is not None and limit < len(self.cluster.devices) else None

    @property
    def most_devices(self) -> int:
        """Maximum number of devices in use."""
        return self.max_devices or len(self.cluster.devices)

    @cached_property
    def free_devices(self) -> tuple[int, ...]:
        """The devices that may take every group."""
        return tuple(np.flatnonzero(self.allowed.all(axis=1)).tolist())

    @cached_property
    def largest_memory(self) -> NDArray[np.int64]:
        """The largest memory of the devices that may take a group, per group."""
        memory = np.array(self.device_memory, np.int64)
        return np.asarray(np.where(self.allowed, memory[:, None], -1).max(axis=0))

    @cached_property
    def group_colors(self) -> NDArray[np.int32]:
        """A number per group, equal where the same devices are allowed; empty where all are."""
        if self.constraints is None or self.allowed.all():
            return np.empty(0, np.int32)
        _, color = np.unique(self.allowed, axis=1, return_inverse=True)
        return color.reshape(-1).astype(np.int32)

    def within(self, devices: Sequence[int]) -> "Problem":
        """The problem with all other devices excluded and no limit on their number."""
        constraints = replace(self.constraints or Constraints(), max_devices=None)
        allowed = self.allowed.copy()
        allowed[np.setdiff1d(np.arange(len(allowed)), devices)] = False
        return Problem(self.source, self.cluster, constraints, allowed)

    def on(self, devices: Sequence[int]) -> "Problem":
        """The problem of a cluster of only these devices, renumbered in their order.

        They must include every device that is the only one for some group.
        """
        rows = self.cluster.links
        cluster = Cluster(
            tuple(self.cluster.devices[device] for device in devices),
            tuple(tuple(rows[src][dst] for dst in devices) for src in devices),
            self.cluster.ports,
        )
        if self.constraints is None:
            return Problem(self.source, cluster)
        # A pool keeps its margin even if the device that set it is left out.
        margins = {
            self.cluster.devices[device].name: self.pool_margin[self.device_pool[device]]
            for device in devices
        }
        constraints = replace(self.constraints, margins=margins)
        return Problem(self.source, cluster, constraints, self.allowed[list(devices)])

    @cached_property
    def lanes(self) -> tuple[int, ...]:
        """How many lanes of its GPU may be used, per device; 1 where no times depend on that."""
        names = [device.lane_of for device in self.cluster.devices]
        if not any(names) or all(lanes_of(kind)[1] == 1 for kind in self.arrays.kind_times):
            return (1,) * len(names)
        usable = Counter(names[device] for device in np.flatnonzero(self.allowed.any(axis=1)))
        return tuple(max(1, usable[name]) if name else 1 for name in names)

    def in_use(self, devices: Sequence[int] | NDArray[np.int32]) -> "Problem":
        """The problem without the lanes that a placement leaves idle, which slow no other down."""
        if max(self.lanes) == 1:
            return self
        used = np.unique(devices).tolist()
        names = [self.cluster.devices[device].lane_of for device in used]
        busy = Counter(names)
        idle = any(
            name and busy[name] < self.lanes[at] for at, name in zip(used, names, strict=True)
        )
        if not idle:
            return self
        found = self._parts.get(tuple(used))
        if found is None:
            if len(self._parts) >= _MOST_PARTS:
                self._parts.clear()
            found = self._parts[tuple(used)] = self.within(used)
        return found

    @cached_property
    def _parts(self) -> dict[tuple[int, ...], "Problem"]:
        return {}  # by the devices in use

    @cached_property
    def at_full_speed(self) -> "Problem":
        """The problem as if lanes took nothing from each other."""
        if max(self.lanes) == 1:
            return self
        times = self.arrays.kind_times.items()
        alone = {kind: row for kind, row in times if lanes_of(kind)[1] == 1}
        arrays = replace(self.arrays, kind_times=alone)
        source = ArrayGraph(arrays, self.source.digest, lambda: self.graph)
        return Problem(source, self.cluster, self.constraints, self.allowed)

    @cached_property
    def _classes(self) -> tuple[list[tuple[str, float]], NDArray[np.int32]]:
        """Kind ("" without times of its own) and speed of every class; the class per device."""
        times, pairs = self.arrays.kind_times, zip(self.cluster.devices, self.lanes, strict=True)
        keys = [(_timed(times, d.kind, lanes), d.speed) for d, lanes in pairs]
        rows = {key: row for row, key in enumerate(dict.fromkeys(keys))}
        return list(rows), np.array([rows[key] for key in keys], np.int32)

    @property
    def device_class(self) -> NDArray[np.int32]:
        """The row of `durations` of every device; devices of one kind and speed share a row."""
        return self._classes[1]

    @cached_property
    def durations(self) -> NDArray[np.int64]:
        """The time of every op on every class of devices: `ceil(time / speed)`.

        A speed of exactly 1.0 leaves the time as it is; any other divides it as IEEE doubles.
        """
        arrays = self.arrays
        classes, _ = self._classes
        rows = np.empty((len(classes), arrays.ops), np.int64)
        for at, (kind, speed) in enumerate(classes):
            times = arrays.kind_times.get(kind, arrays.times)
            if speed == 1.0:
                rows[at] = times
                continue
            with np.errstate(over="ignore"):
                scaled = np.ceil(times.astype(np.float64) / speed)
            if scaled.size and scaled.max() >= LIMIT:
                op = self.graph.ops[int(scaled.argmax())]
                raise InputError(
                    f"op {op.name!r} would take more than 2**62 ns (146 years) at speed "
                    f"{speed!r}; leave out a device that has next to no compute left."
                )
            rows[at] = scaled
        return rows

    @cached_property
    def _links(self) -> list[Link | None]:
        """Per source and destination, row by row; only one where all pairs have equal links."""
        link = self.cluster.uniform_link
        return [link for row in self.cluster.links for link in row] if link is None else [link]

    @cached_property
    def links(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Latency and rate per source and destination, row by row; rate 0 is no path.

        One number each where all pairs of devices have equal links.
        """
        rows = [(link.latency_ns, link.bytes_per_s) if link else (0, 0) for link in self._links]
        latency, rate = np.array(rows, np.int64).T
        return latency.copy(), rate.copy()

    @cached_property
    def overheads(self) -> NDArray[np.int64]:
        """Overhead of a transfer for its receiver, likewise; empty where no link has any."""
        rows = [0 if link is None else link.overhead_ns for link in self._links]
        return np.array(rows if any(rows) else [], np.int64)

    @cached_property
    def device_host(self) -> tuple[int, ...]:
        """The host of every device, -1 without one; empty if nothing takes a host's time."""
        names = [device.host for device in self.cluster.devices]
        number = {name: host for host, name in enumerate(dict.fromkeys(filter(None, names)))}
        takes = bool(number) and bool(self.arrays.launch.any() or len(self.overheads))
        return tuple(number.get(name, -1) for name in names) if takes else ()

    def launch_ns(self, device: int) -> NDArray[np.int64]:
        """The time of its host for every op on a device, without what is sent for it."""
        arrays = self.arrays
        if not self.device_host or self.device_host[device] < 0:
            return np.zeros_like(arrays.launch)
        if self.cluster.devices[device].launches_ahead:
            return arrays.launch
        return np.array(np.minimum(arrays.launch, self.durations[self.device_class[device]]))

    @cached_property
    def device_pool(self) -> tuple[int, ...]:
        """The memory pool of every device; one without a pool is alone in its own."""
        return tuple(np.unique(self.cluster.memories, return_inverse=True)[1].tolist())

    @cached_property
    def pool_devices(self) -> tuple[tuple[int, ...], ...]:
        """The devices of every pool."""
        return places(np.array(self.device_pool, np.int32))

    @cached_property
    def pool_memory(self) -> tuple[int, ...]:
        """The memory of every pool, less its margin."""
        devices = self.cluster.devices
        rows = zip(self.pool_devices, self.pool_margin, strict=True)
        return tuple(max(0, devices[row[0]].memory_bytes - margin) for row, margin in rows)

    @cached_property
    def device_memory(self) -> tuple[int, ...]:
        """The memory of every device, less its margin: all of its pool's."""
        return tuple(self.pool_memory[pool] for pool in self.device_pool)

    @cached_property
    def device_share(self) -> tuple[int, ...]:
        """The memory of every device, of which those of a pool have equal shares."""
        rows = zip(self.device_memory, self.device_pool, strict=True)
        return tuple(memory // len(self.pool_devices[pool]) for memory, pool in rows)

    @cached_property
    def device_work(self) -> tuple[int, ...]:
        """The time of all ops on every device."""
        totals = [exact_sum(row) for row in self.durations]
        return tuple(totals[row] for row in self.device_class)

    @cached_property
    def pool_margin(self) -> tuple[int, ...]:
        """Free bytes to leave in every pool: the largest margin of its devices."""
        if self.constraints is None or not self.constraints.margins:
            return (0,) * len(self.pool_devices)
        margins = self.constraints.margins
        names = [device.name for device in self.cluster.devices]
        return tuple(max(margins.get(names[d], 0) for d in row) for row in self.pool_devices)

    @cached_property
    def op_group(self) -> tuple[int, ...]:
        """The group of every op, counted by first op; an op without one is alone in its own."""
        return tuple(self.arrays.op_group.tolist())

    @cached_property
    def group_ops(self) -> tuple[tuple[int, ...], ...]:
        """The ops of every group, ascending."""
        return places(self.arrays.op_group)

    @cached_property
    def group_bytes(self) -> tuple[int, ...]:
        """The memory of every group: persistent bytes, all outputs, and its largest workspace."""
        arrays = self.arrays
        most = np.zeros(arrays.groups, np.int64)
        np.maximum.at(most, arrays.op_group, arrays.workspace)
        sums = arrays.group_persistent + most
        np.add.at(sums, arrays.op_group[arrays.producer], arrays.nbytes)
        return tuple(sums.tolist())

    def group_name(self, op: int) -> str:
        """The name of the op, or of its group, in an error."""
        group = self.graph.ops[op].group
        return f"op {self.graph.ops[op].name!r}" if group is None else f"group {group!r}"

    @cached_property
    def core(self) -> _core.Problem:
        """The problem for C++."""
        latency, rate = self.links
        free = self.constraints is None or self.allowed.all()
        return _core.Problem(
            graph=self.arrays.core,
            device_class=self.device_class,
            durations=self.durations.reshape(-1),
            pool=np.array(self.device_pool, np.int32),
            memory=np.array(self.pool_memory, np.int64),
            latency=latency,
            rate=rate,
            overhead=self.overheads,
            ports=PORTS.index(self.cluster.ports),
            launch=self.arrays.launch if self.device_host else np.empty(0, np.int64),
            host=np.array(self.device_host, np.int32),
            ahead=np.array([row.launches_ahead for row in self.cluster.devices], np.uint8),
            allowed=np.empty(0, np.uint8) if free else self.allowed.reshape(-1).view(np.uint8),
            max_devices=self.most_devices,
        )

    def timeline(self, headroom: float = 0.0) -> _core.Timeline:
        """A fresh timeline of the core.

        Groups of several ops leave the headroom, a share of every memory, free when they are
        placed, for the needs of their later ops there.
        """
        timeline = _core.Timeline(self.core)
        for pool, memory_bytes in enumerate(self.pool_memory):
            timeline.hold_back(pool, int(memory_bytes * headroom))
        return timeline


def allowed_devices(
    graph: OpGraph, cluster: Cluster, constraints: Constraints
) -> NDArray[np.bool_]:
    """True where a device may take a group: a row per device, a column per group.

    Raises:
        InputError: An op, group or device is unknown, or the constraints contradict each other.
    """
    device_of = {device.name: index for index, device in enumerate(cluster.devices)}
    op_group = graph.arrays.op_group
    allowed = np.ones((len(device_of), graph.arrays.groups), np.bool_)

    def device(name: str, what: str) -> int:
        if name not in device_of:
            raise InputError(f"{what} names device {name!r}; the cluster has {listed(device_of)}.")
        return device_of[name]

    def group(name: str, what: str) -> int:
        members = graph.groups.get(name, ())
        op = graph.op_index.get(name, members[0] if members else None)
        if op is None:
            raise InputError(
                f"{what} names {name!r}, but the graph has no op and no group of this name"
                f"{_hint(graph, name)}"
            )
        return int(op_group[op])

    for name in constraints.margins:
        device(name, "a margin")
    for name in constraints.excluded:
        allowed[device(name, "excluded")] = False
    for name, row in constraints.forbidden.items():
        what = f"forbidden[{name!r}]"
        allowed[[device(other, what) for other in row], group(name, what)] = False
    pinned: dict[int, tuple[str, str]] = {}
    for name, target in constraints.pins.items():
        column, at = group(name, "a pin"), device(target, f"the pin of {name!r}")
        first, other = pinned.setdefault(column, (name, target))
        if other != target:
            raise InputError(
                f"{first!r} is pinned to {other!r} and {name!r} to {target!r}, but they are in one "
                "group; pin the group once."
            )
        if not allowed[at, column]:
            raise InputError(
                f"{name!r} is pinned to {target!r}, where the constraints also forbid it; drop "
                "the pin, or the entry in forbidden or excluded."
            )
        allowed[:, column] = False
        allowed[at, column] = True
    somewhere = np.asarray(allowed.any(axis=0))
    if not somewhere.all():
        op = graph.ops[int(np.argmin(somewhere[op_group]))]
        raise InputError(
            f"op {op.name!r} may go to no device: all are forbidden to it or to its group, or "
            "excluded; leave it at least one."
        )
    limit = constraints.max_devices
    alone = [cluster.devices[device].name for device in np.flatnonzero(needed(allowed))]
    if limit is not None and len(alone) > limit:
        raise InputError(
            f"there are ops that may go to {listed(alone)} alone, but max_devices is {limit}; "
            "raise it, pin to fewer, or forbid and exclude less."
        )
    return allowed


def _hint(graph: OpGraph, name: str) -> str:
    """A hint on an unknown op or group: a submodule, similar names, or some examples."""
    inside = [op for op in graph.op_index if op.startswith((f"{name}/", f"{name}."))]
    if inside:
        return f"; it is a submodule's, so name its ops: {listed(inside)}."
    known = list(dict.fromkeys([*graph.op_index, *graph.groups]))
    alike = get_close_matches(name, known[:_SEARCHED], 3)
    return f". Did you mean {listed(alike)}?" if alike else f", only {listed(known)}."


def _timed(times: Collection[str], kind: str, lanes: int) -> str:
    """The kind of whose times those of so many lanes are; "" for those of no kind.

    The fewest lanes that are known and no fewer than these; if there are none, one at full speed.
    """
    known = (lanes_of(row) for row in times) if lanes > 1 else ()
    enough = [number for name, number in known if name == kind and number >= lanes]
    return lane_kind(kind, min(enough)) if enough else kind if kind in times else ""


def places(values: NDArray[np.int32]) -> tuple[tuple[int, ...], ...]:
    """The places of every value from 0 to the largest, ascending."""
    order = np.argsort(values, kind="stable").tolist()
    bounds = pairwise([0, *np.cumsum(np.bincount(values)).tolist()])
    return tuple(tuple(order[i:j]) for i, j in bounds)


def needed(allowed: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """True where a device is the only one that some group may use: one entry per device."""
    return np.asarray(allowed[:, allowed.sum(axis=0) == 1].any(axis=1))


def listed(names: Collection[str]) -> str:
    """The names, or the first of very many."""
    rows = [repr(name) for name in names][:_LISTED]
    more = len(names) - len(rows)
    return ", ".join(rows) + (f" and {more} more" if more else "")
