"""Devices, links and clusters: the *free* capacity of machines, as plain numbers."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Final, final

from baechi.errors import InputError
from baechi.units import parse_bytes
from baechi.validation import check_count, check_name, check_row

PORTS: Final = ("duplex", "shared", "none")
MAX_DEVICES: Final = 4096  # the table of their links has 16 million entries then


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

    Raises:
        InputError: An empty name, memory that cannot be read or is negative, a speed that is not
            positive and finite.
    """

    name: str
    memory_bytes: int
    speed: float = 1.0
    kind: str = ""
    pool: str = ""

    def __post_init__(self) -> None:
        check_name(self.name, "device name")
        memory_bytes = parse_bytes(self.memory_bytes, what=f"memory of device {self.name!r}")
        object.__setattr__(self, "memory_bytes", memory_bytes)
        numeric = isinstance(self.speed, int | float) and not isinstance(self.speed, bool)
        if not numeric or not _is_finite(self.speed) or self.speed <= 0:
            raise InputError(
                f"speed of device {self.name!r} is {self.speed!r}; it must be a positive, finite "
                "number (1.0 is a whole device). Leave out a device that has no compute left."
            )
        object.__setattr__(self, "speed", float(self.speed))
        for attribute in ("kind", "pool"):
            if not isinstance(getattr(self, attribute), str):
                value = getattr(self, attribute)
                raise InputError(f"{attribute} of device {self.name!r} is {value!r}, no string.")


@final
@dataclass(frozen=True, slots=True)
class Link:
    """A directed path between two devices.

    Attributes:
        latency_ns: Time of an empty transfer.
        bytes_per_s: Rate; a transfer takes `latency_ns + ceil(nbytes * 10**9 / bytes_per_s)`.
        overhead_ns: Time that the receiving device itself is busy with each transfer, whatever its
        size: the op that needs it first takes that much longer. Unlike latency, it cannot be
            hidden behind other work.

    Raises:
        InputError: The latency or the overhead is negative, or the rate is not finite and at least
            1 byte/s.
    """

    latency_ns: int
    bytes_per_s: int
    overhead_ns: int = 0

    def __post_init__(self) -> None:
        for name in ("latency_ns", "overhead_ns"):
            object.__setattr__(self, name, check_count(getattr(self, name), f"{name} of a link"))
        rate = self.bytes_per_s
        numeric = isinstance(rate, float) or hasattr(rate, "__index__")
        if not numeric or isinstance(rate, bool) or not _is_finite(rate) or rate < 1:
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
        devices = check_row(self.devices, "devices", Device)
        links = tuple(check_row(row, "links of a device") for row in check_row(self.links, "links"))
        object.__setattr__(self, "devices", devices)
        object.__setattr__(self, "links", links)
        if not devices:
            raise InputError("a cluster has no devices; give at least one.")
        names: set[str] = set()
        for name in (device.name for device in devices):
            if name in names:
                raise InputError(
                    f"two devices are named {name!r}; names must be unique. For two logical "
                    f"devices on one torch device write {name + '/a'!r} and {name + '/b'!r}."
                )
            names.add(name)
        if len(links) != len(devices) or any(len(row) != len(devices) for row in links):
            shape = [len(row) for row in links]
            raise InputError(
                f"links has rows of {shape} entries for {len(devices)} devices; "
                "give one row per source with one entry per destination."
            )
        equal = isinstance(links[0][-1], Link)
        for src, row in enumerate(links):
            # A table may have a million links; identical objects are checked only once.
            equal = equal and _others_equal(row, src, links[0][-1])
            if not set(map(type, row[src : src + 1] if equal else row)) <= {Link, NoneType}:
                wrong = next(link for link in row if type(link) not in (Link, NoneType))
                raise InputError(f"a link is {wrong!r}; give a baechi.Link or None.")
        if self.ports not in PORTS:
            raise InputError(f"ports is {self.ports!r}; it must be one of {', '.join(PORTS)}.")
        check_pools(devices)

    @property
    def uniform_link(self) -> Link | None:
        """The link shared by all pairs of devices; `None` if links differ or there is one device.

        O(devices**2) comparisons, which are of identity where the links are one object.
        """
        link = self.links[0][-1]
        if link is None or len(self.devices) == 1:
            return None
        equal = all(_others_equal(row, device, link) for device, row in enumerate(self.links))
        return link if equal else None

    @staticmethod
    def uniform(
        n: int, memory: int | str, link: Link, *, kind: str = "", speed: float = 1.0
    ) -> "Cluster":
        """`n` equal devices named `device0`, `device1`, ..., each pair joined by `link`.

        Raises:
            InputError: `n` is less than one or above `MAX_DEVICES`, or the memory cannot be read.
        """
        check_size(n)
        memory_bytes = parse_bytes(memory, what="memory")
        devices = [Device(f"device{i}", memory_bytes, speed, kind) for i in range(n)]
        return Cluster.connected(devices, link)

    @staticmethod
    def connected(devices: Sequence[Device], link: Link, *, ports: str = "duplex") -> "Cluster":
        """`devices`, each ordered pair joined by `link`."""
        n = len(check_row(devices, "devices", Device))
        row: list[Link | None] = [link] * n
        links = []
        for device in range(n):
            row[device] = None
            links.append(tuple(row))
            row[device] = link
        return Cluster(tuple(devices), tuple(links), ports)


def check_pools(devices: Iterable[Device]) -> None:
    """Check that the devices of each pool have the same memory.

    Raises:
        InputError: Two devices of a pool differ in their memory.
    """
    memory_of_pool: dict[str, Device] = {}
    for device in devices:
        if device.pool:
            first = memory_of_pool.setdefault(device.pool, device)
            if first.memory_bytes != device.memory_bytes:
                raise InputError(
                    f"devices {first.name!r} and {device.name!r} share pool {device.pool!r} "
                    f"but claim {first.memory_bytes} and {device.memory_bytes} bytes; "
                    "give both the pool's memory."
                )


def check_size(n: object) -> int:
    """`n`, checked as a number of devices of a cluster.

    Raises:
        InputError: It is not from 1 to `MAX_DEVICES`.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise InputError(f"a cluster of {n!r} devices; give at least one.")
    if n > MAX_DEVICES:
        raise InputError(
            f"a cluster of {n} devices would need a table of {n * (n - 1)} links, and may have "
            f"{MAX_DEVICES} devices at most; give the part of the cluster that one model can use."
        )
    return n


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return False


def _others_equal(row: tuple[Link | None, ...], device: int, link: Link | None) -> bool:
    """True if all links of a device's row but its own are equal to `link`."""
    return row.count(link) - (row[device] == link) == len(row) - 1
