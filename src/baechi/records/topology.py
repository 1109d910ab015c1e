"""Cluster topologies: devices in nodes, nodes under switches, with one link per level.

A table of links has a million entries for 1,024 devices; most clusters of that size are regular,
and a topology describes them in a few lines. `Topology.cluster` builds the table for a chosen set
of devices.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

from baechi.errors import InputError
from baechi.records.cluster import PORTS, Cluster, Device, Link, check_pools
from baechi.units import parse_bytes
from baechi.validation import check_name

# The levels at which devices may be required to be together, from the nearest.
LEVELS: Final = ("node", "switch")


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
        for attribute in ("devices", "nodes", "switches"):
            object.__setattr__(self, attribute, tuple(getattr(self, attribute)))
        if not self.devices:
            raise InputError("a topology has no devices; give at least one.")
        for row, what in ((self.nodes, "nodes"), (self.switches, "switches")):
            if len(row) != len(self.devices):
                raise InputError(
                    f"{what} has {len(row)} entries for {len(self.devices)} devices; give the "
                    "name for every device."
                )
        names = set()
        switch_of: dict[str, str] = {}
        for device, node, switch in zip(self.devices, self.nodes, self.switches, strict=True):
            if not isinstance(device, Device):
                raise InputError(f"a device is {device!r}; give a baechi.Device.")
            if device.name in names:
                raise InputError(f"two devices are named {device.name!r}; names must be unique.")
            names.add(device.name)
            check_name(node, f"the node of {device.name!r}")
            check_name(switch, f"the switch of {device.name!r}")
            if switch_of.setdefault(node, switch) != switch:
                raise InputError(
                    f"node {node!r} is under switches {switch_of[node]!r} and {switch!r}; a node "
                    "is under one."
                )
        if not isinstance(self.node_link, Link):
            raise InputError(f"node_link is {self.node_link!r}; give a baechi.Link.")
        for link, what in ((self.switch_link, "switch_link"), (self.site_link, "site_link")):
            if link is not None and not isinstance(link, Link):
                raise InputError(f"{what} is {link!r}; give a baechi.Link or None.")
        if self.ports not in PORTS:
            raise InputError(f"ports is {self.ports!r}; it must be one of {', '.join(PORTS)}.")
        check_pools(self.devices)

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
        for count, what in (
            (switches, "switches"),
            (nodes_per_switch, "nodes_per_switch"),
            (devices_per_node, "devices_per_node"),
        ):
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise InputError(f"{what} is {count!r}; give at least one.")
        memory_bytes = parse_bytes(memory, what="memory")
        devices, at_node, at_switch = [], [], []
        for node in range(switches * nodes_per_switch):
            for index in range(devices_per_node):
                devices.append(Device(f"node{node}/{index}", memory_bytes, speed, kind))
                at_node.append(f"node{node}")
                at_switch.append(f"switch{node // nodes_per_switch}")
        return Topology(
            tuple(devices),
            tuple(at_node),
            tuple(at_switch),
            node_link,
            switch_link,
            site_link,
        )
