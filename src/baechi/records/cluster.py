"""Devices, links, clusters and topologies: the *free* capacity of machines, as plain numbers.

And the constraints on placements there besides memory.
"""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, Final, final

from baechi.errors import InputError
from baechi.units import parse_bytes
from baechi.validation import (
    FrozenDict,
    check_choice,
    check_count,
    check_is,
    check_name,
    check_positive,
    check_row,
    settle,
)

PORTS: Final = ("duplex", "shared", "none")
MAX_DEVICES: Final = 4096  # the table of their links has 16 million entries then
# The thread that launches for all GPUs of a process.
HOST: Final = "python"
# What a tensor handed over to a GPU takes of that thread: an event recorded, a stream that waits, a
# copy launched, each as long as a launch is taken to be. A guess for a host that nobody probes: a
# slow one beside an H200 took 115 us for a further segment forward, with its one operator.
HANDOVER_NS: Final = 15_000
# The levels at which devices may be required to be together, from the nearest.
LEVELS: Final = ("node", "switch")
_LANES: Final = re.compile(r"(.+), (\d+) lanes")


@final
@dataclass(frozen=True, slots=True)
class Device:
    """Free capacity of one device.

    Attributes:
        name: Unique in its cluster. For `apply`, a torch device (`"cuda:0"`, `"cpu:1"`), where a
            suffix tells several logical devices of one torch device apart (`"cuda:0/a"`).
        memory_bytes: Residual memory; a string such as `"10GiB"` is read at construction.
        speed: Residual share of compute: an op takes `ceil(time_ns / speed)`.
        kind: Hardware kind, to find per-kind times in `OpGraph.times`.
        pool: Devices of one non-empty pool (streams of one GPU) share one memory.
        lane_of: Devices of one non-empty name are lanes of one GPU: where several are in use, ops
            take what `OpGraph.times` has for their `lane_kind`.
        host: Devices of one non-empty host share the thread, or the lock, that launches their ops:
            each takes `Op.launch_ns` of it.
        launches_ahead: Whether the host may launch an op long before it starts, as on streams of
            GPUs; then it also does the work of what the device receives (`Link.overhead_ns`). Else
            a launch is the first part of its op, as on CPUs, whose workers share Python's lock.

    Raises:
        InputError: An empty name, memory that cannot be read or is negative, a speed that is not
            positive and finite.
    """

    name: str
    memory_bytes: int
    speed: float = 1.0
    kind: str = ""
    pool: str = ""
    host: str = ""
    launches_ahead: bool = True
    lane_of: str = ""

    def __post_init__(self) -> None:
        check_name(self.name, "device name")
        memory_bytes = parse_bytes(self.memory_bytes, what=f"memory of device {self.name!r}")
        object.__setattr__(self, "memory_bytes", memory_bytes)
        hint = " 1.0 is a whole device; leave out a device that has no compute left."
        speed = check_positive_float(self.speed, f"speed of device {self.name!r}", hint)
        object.__setattr__(self, "speed", speed)
        for attribute in ("kind", "pool", "host", "lane_of"):
            check_is(getattr(self, attribute), str, f"{attribute} of device {self.name!r}")
        check_is(self.launches_ahead, bool, f"launches_ahead of device {self.name!r}")


@final
@dataclass(frozen=True, slots=True)
class Link:
    """A directed path between two devices.

    Attributes:
        latency_ns: Time of an empty transfer.
        bytes_per_s: Rate; a transfer takes `latency_ns + ceil(nbytes * 10**9 / bytes_per_s)`.
        overhead_ns: Time that the receiving device itself is busy with each transfer, whatever its
            size: the op that needs it first takes that much longer. Unlike latency, it cannot be
            hidden behind other work. Where the device has a host that launches ahead, it is that
            host's time instead, before the op's launch.

    Raises:
        InputError: The latency or the overhead is negative, or the rate is not finite and at least
            1 byte/s.
    """

    latency_ns: int
    bytes_per_s: int
    overhead_ns: int = 0

    def __post_init__(self) -> None:
        settle(self, check_count, ("latency_ns", "overhead_ns"), "of a link")
        rate = self.bytes_per_s
        numeric = isinstance(rate, float) or hasattr(rate, "__index__")
        if not numeric or isinstance(rate, bool) or not 1 <= rate <= sys.float_info.max:
            raise InputError(
                f"bytes_per_s of a link is {rate!r}; it must be a finite rate of at least 1. "
                "Where there is no path, give None instead of a Link."
            )
        object.__setattr__(self, "bytes_per_s", check_count(int(rate), "bytes_per_s of a link"))

    def transfer_ns(self, nbytes: int) -> int:
        """The time to send `nbytes` over a free link."""
        return self.latency_ns - (-nbytes * 10**9 // self.bytes_per_s)


@final
@dataclass(frozen=True, slots=True)
class Cluster:
    """Devices and the links between them.

    Attributes:
        devices: `device` means an index into them everywhere.
        links: `links[src][dst]`; `None` is no path. The diagonal is not read.
        ports: How transfers of one device contend: `"duplex"`, one send and one receive port
            (the default); `"shared"`, one port for both; `"none"`, no contention.

    Raises:
        InputError: No devices, two of one name, a table of another shape, an unknown `ports`, or
            devices of one pool with different memory.
    """

    devices: tuple[Device, ...]
    links: tuple[tuple[Link | None, ...], ...]
    ports: str = "duplex"

    def __post_init__(self) -> None:
        devices = _check_devices(self)
        links = tuple(check_row(row, "links of a device") for row in check_row(self.links, "links"))
        object.__setattr__(self, "links", links)
        shape = [len(row) for row in links]
        if shape != [len(devices)] * len(devices):
            raise InputError(
                f"links has rows of {shape} entries for {len(devices)} devices; "
                "give one row per source with one entry per destination."
            )
        for row in links:
            if not set(map(type, row)) <= {Link, NoneType}:
                wrong = next(link for link in row if type(link) not in (Link, NoneType))
                raise InputError(f"a link is {wrong!r}; give a baechi.Link or None.")

    @property
    def uniform_link(self) -> Link | None:
        """The link shared by all pairs of devices; `None` if links differ or there is one device.

        O(devices**2) comparisons, which are of identity where the links are one object.
        """
        link, n = self.links[0][-1], len(self.devices)
        if link is None or n == 1:
            return None
        # The diagonal is not read.
        others = (row.count(link) - (row[src] == link) for src, row in enumerate(self.links))
        return link if all(count == n - 1 for count in others) else None

    @property
    def memories(self) -> list[int]:
        """The first device of each device's pool; the device itself where it is in none."""
        first: dict[str, int] = {}
        return [
            first.setdefault(device.pool, index) if device.pool else index
            for index, device in enumerate(self.devices)
        ]

    @staticmethod
    def uniform(
        n: int, memory: int | str, link: Link, *, kind: str = "", speed: float = 1.0
    ) -> "Cluster":
        """`n` equal devices named `device0`, `device1`, ..., each pair joined by `link`.

        Raises:
            InputError: `n` is less than one or above `MAX_DEVICES`, or the memory cannot be read.
        """
        check_positive(n, "the number of devices", MAX_DEVICES)
        memory_bytes = parse_bytes(memory, what="memory")
        devices = [Device(f"device{i}", memory_bytes, speed, kind) for i in range(n)]
        return Cluster.connected(devices, link)

    @staticmethod
    def connected(devices: Sequence[Device], link: Link, *, ports: str = "duplex") -> "Cluster":
        """`devices`, each ordered pair joined by `link`."""
        n = len(check_row(devices, "devices", Device))
        links = tuple((link,) * i + (None,) + (link,) * (n - 1 - i) for i in range(n))
        return Cluster(tuple(devices), links, ports)


@final
@dataclass(frozen=True, slots=True)
class Topology:
    """Devices with their nodes and switches, and the link for each level that two may share.

    Attributes:
        devices: The devices, as in a `Cluster`.
        nodes: The node of every device.
        switches: The switch of every device; a node is under one.
        node_link: Between two devices of a node.
        switch_link: Between two devices of two nodes under one switch; `None` is no path.
        site_link: Between two devices under two switches; `None` is no path.
        ports: As in a `Cluster`.

    Raises:
        InputError: No devices, two of one name, a list of another length, a node under two
            switches, an unknown `ports`, or devices of one pool with different memory.
    """

    devices: tuple[Device, ...]
    nodes: tuple[str, ...]
    switches: tuple[str, ...]
    node_link: Link
    switch_link: Link | None = None
    site_link: Link | None = None
    ports: str = "duplex"

    def __post_init__(self) -> None:
        devices = _check_devices(self)
        for attribute in ("nodes", "switches"):
            row = check_row(getattr(self, attribute), attribute)
            object.__setattr__(self, attribute, row)
            if len(row) != len(devices):
                raise InputError(
                    f"{attribute} has {len(row)} entries for {len(devices)} devices; give the "
                    "name for every device."
                )
        switch_of: dict[str, str] = {}
        for device, node, switch in zip(devices, self.nodes, self.switches, strict=True):
            check_name(node, f"the node of {device.name!r}")
            check_name(switch, f"the switch of {device.name!r}")
            if switch_of.setdefault(node, switch) != switch:
                raise InputError(
                    f"node {node!r} is under switches {switch_of[node]!r} and {switch!r}; a node "
                    "is under one."
                )
        check_is(self.node_link, Link, "node_link")
        for link, what in ((self.switch_link, "switch_link"), (self.site_link, "site_link")):
            if link is not None:
                check_is(link, Link, what)

    def cluster(self, where: Sequence[int] | None = None) -> Cluster:
        """The cluster of the devices at these places, in this order; of all if absent.

        O(devices + nodes * devices): devices of a node share a row of links.
        """
        places = range(len(self.devices)) if where is None else where
        return Cluster(
            tuple(self.devices[place] for place in places), self.links(places), self.ports
        )

    def links(self, places: Sequence[int]) -> tuple[tuple[Link | None, ...], ...]:
        """`Cluster.links` of the devices at these places; the diagonal holds the node's link."""
        of_node: dict[str, list[int]] = {}
        of_switch: dict[str, list[int]] = {}
        for index, place in enumerate(places):
            of_node.setdefault(self.nodes[place], []).append(index)
            of_switch.setdefault(self.switches[place], []).append(index)
        rows: dict[str, tuple[Link | None, ...]] = {}
        for node, members in of_node.items():
            row = [self.site_link] * len(places)
            for index in of_switch[self.switches[places[members[0]]]]:
                row[index] = self.switch_link
            for index in members:
                row[index] = self.node_link
            rows[node] = tuple(row)
        return tuple(rows[self.nodes[place]] for place in places)

    @staticmethod
    def grid(
        switches: int,
        nodes_per_switch: int,
        devices_per_node: int,
        memory: int | str,
        *,
        node_link: Link,
        switch_link: Link | None = None,
        site_link: Link | None = None,
        kind: str = "",
        speed: float = 1.0,
    ) -> "Topology":
        """Equal devices named `node0/0`, `node0/1`, ... under `switch0`, `switch1`, ..."""
        check_positive(switches, "switches")
        check_positive(nodes_per_switch, "nodes_per_switch")
        check_positive(devices_per_node, "devices_per_node")
        memory_bytes = parse_bytes(memory, what="memory")
        nodes = range(switches * nodes_per_switch)
        places = [(node, index) for node in nodes for index in range(devices_per_node)]
        return Topology(
            tuple(Device(f"node{n}/{i}", memory_bytes, speed, kind) for n, i in places),
            tuple(f"node{node}" for node, _ in places),
            tuple(f"switch{node // nodes_per_switch}" for node, _ in places),
            *(node_link, switch_link, site_link),
        )


def lane_kind(kind: str, lanes: int) -> str:
    """The kind of each of so many lanes of a GPU of a kind, for times while all are busy."""
    return kind if lanes == 1 else f"{kind}, {lanes} lanes"


def lanes_of(kind: str) -> tuple[str, int]:
    """What `lane_kind` made a kind of."""
    found = _LANES.fullmatch(kind)
    return (found[1], int(found[2])) if found else (kind, 1)


def check_positive_float(value: object, what: str, hint: str = "") -> float:
    """`value` as a float, if it is a positive, finite number."""
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    if not numeric or not 0 < value <= sys.float_info.max:  # type: ignore[operator]
        raise InputError(f"{what} is {value!r}; it must be a positive, finite number.{hint}")
    return float(value)  # type: ignore[arg-type]


def _check_devices(group: Any) -> tuple[Device, ...]:
    """The devices of a cluster or topology, checked together with its ports, and set as a tuple."""
    devices = check_row(group.devices, "devices", Device)
    object.__setattr__(group, "devices", devices)
    if not devices:
        raise InputError(f"a {type(group).__name__.lower()} has no devices; give at least one.")
    names: set[str] = set()
    first_of_pool: dict[str, Device] = {}
    for device in devices:
        if device.name in names:
            raise InputError(
                f"two devices are named {device.name!r}; names must be unique. For two logical "
                f"devices on one torch device write {device.name + '/a'!r} and "
                f"{device.name + '/b'!r}."
            )
        names.add(device.name)
        first = first_of_pool.setdefault(device.pool, device) if device.pool else device
        if first.memory_bytes != device.memory_bytes:
            raise InputError(
                f"devices {first.name!r} and {device.name!r} share pool {device.pool!r} "
                f"but claim {first.memory_bytes} and {device.memory_bytes} bytes; "
                "give both the pool's memory."
            )
    check_choice(group.ports, PORTS, "ports")
    return devices


@final
@dataclass(frozen=True, slots=True)
class Constraints:
    """Constraints on the placements of a graph on a cluster, written with names.

    Ops of one group share a device, so what holds for an op holds for its group. A name is an op's;
    where no op has it, a group's. Names are looked up when the constraints meet a graph and a
    cluster, in `solve` and `simulate`.

    Attributes:
        pins: Op or group to the device where it must run.
        forbidden: Op or group to the devices where it must not.
        excluded: Devices that must stay empty.
        max_devices: Maximum number of devices in use; `None` is no limit.
        margins: Device to bytes of its memory that stay free; a string such as `"1GiB"` is read at
            construction. The margin of a pool is the largest of its devices'.

    Raises:
        InputError: A name is empty, a margin negative, `max_devices` below 1, or a list of devices
            is a string.
    """

    pins: Mapping[str, str] = field(default_factory=FrozenDict)
    forbidden: Mapping[str, tuple[str, ...]] = field(default_factory=FrozenDict)
    excluded: tuple[str, ...] = ()
    max_devices: int | None = None
    margins: Mapping[str, int] = field(default_factory=FrozenDict)

    def __post_init__(self) -> None:
        checks: tuple[tuple[str, str, Callable[[Any, str], Any], str], ...] = (
            ("pins", "a pinned op", check_name, "the device of pin {!r}"),
            ("forbidden", "an op with forbidden devices", _names, "forbidden[{!r}]"),
            ("margins", "a device with a margin", parse_bytes, "margin of device {!r}"),
        )
        for attribute, key, check, entry in checks:
            rows = getattr(self, attribute)
            if not isinstance(rows, Mapping):
                kind = type(rows).__name__
                raise InputError(f"{attribute} is {rows!r}, a {kind}; give a mapping by name.")
            known = {check_name(n, key): check(row, entry.format(n)) for n, row in rows.items()}
            object.__setattr__(self, attribute, FrozenDict(known))
        object.__setattr__(self, "excluded", _names(self.excluded, "excluded"))
        if self.max_devices is not None:
            count = check_positive(self.max_devices, "max_devices")
            object.__setattr__(self, "max_devices", count)


def _names(value: Any, what: str) -> tuple[str, ...]:
    """Device names, sorted, without repetition."""
    if isinstance(value, str) or not isinstance(value, Sequence | set | frozenset):
        raise InputError(f"{what} is {value!r}; give a list of device names.")
    return tuple(sorted({check_name(name, f"a device of {what}") for name in value}))
