"""Devices that each group may use: constraints resolved against a graph and a cluster.

Names become indices, and contradictions are refused. The result is a table of groups and devices;
placers read only that, and the limit on the number of devices.
"""

from collections.abc import Collection
from difflib import get_close_matches

import numpy as np
from numpy.typing import NDArray

from baechi.errors import InputError
from baechi.records.cluster import Cluster
from baechi.records.constraints import Constraints
from baechi.records.graph import OpGraph

# Maximum number of names listed in an error.
_LISTED = 8
# Maximum number of names searched for one like an unknown one, at about 20 us each.
_SEARCHED = 5_000


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
    targets = sorted({target for _, target in pinned.values()})
    if limit is not None and len(targets) > limit:
        raise InputError(
            f"ops are pinned to {len(targets)} devices ({listed(targets)}), but max_devices is "
            f"{limit}; raise it, or pin to fewer."
        )
    alone = [cluster.devices[device].name for device in np.flatnonzero(needed(allowed))]
    if limit is not None and len(alone) > limit:
        raise InputError(
            f"there are ops that may go to {listed(alone)} alone, but max_devices is {limit}; "
            "raise it, or forbid and exclude less."
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


def needed(allowed: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """True where a device is the only one that some group may use: one entry per device."""
    return np.asarray(allowed[:, allowed.sum(axis=0) == 1].any(axis=1))


def known_to(constraints: Constraints, cluster: Cluster) -> Constraints:
    """The constraints without the devices that the cluster does not have; pins stay."""
    names = {device.name for device in cluster.devices}
    forbidden = {
        name: tuple(device for device in devices if device in names)
        for name, devices in constraints.forbidden.items()
    }
    return Constraints(
        constraints.pins,
        {name: devices for name, devices in forbidden.items() if devices},
        tuple(device for device in constraints.excluded if device in names),
        constraints.max_devices,
        {name: nbytes for name, nbytes in constraints.margins.items() if name in names},
    )


def listed(names: Collection[str]) -> str:
    """The names, or the first of very many."""
    rows = [repr(name) for name in names][:_LISTED]
    more = len(names) - len(rows)
    return ", ".join(rows) + (f" and {more} more" if more else "")
