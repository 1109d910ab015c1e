"""Devices that each group may use: constraints resolved against a graph and a cluster.

Names become indices, and contradictions are refused. The result is a table of groups and devices;
placers read only that, and the limit on the number of devices.
"""

from collections.abc import Collection, Sequence
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
            raise InputError(f"{what} names device {name!r}; the cluster has {_list(device_of)}.")
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
    _check_places(graph, allowed)
    if constraints.max_devices is not None:
        targets = sorted({target for _, target in pinned.values()})
        _check_limit(constraints.max_devices, cluster, allowed, targets)
    return allowed


def _hint(graph: OpGraph, name: str) -> str:
    """A hint on an unknown op or group: a submodule, similar names, or some examples."""
    inside = [op for op in graph.op_index if op.startswith((f"{name}/", f"{name}."))]
    if inside:
        return f"; it is a submodule's, so name its ops: {_list(inside)}."
    known = list(dict.fromkeys([*graph.op_index, *graph.groups]))
    alike = get_close_matches(name, known[:_SEARCHED], 3)
    return f". Did you mean {_list(alike)}?" if alike else f", only {_list(known)}."


def needed(allowed: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """True where a device is the only one that some group may use: one entry per device."""
    return np.asarray(allowed[:, allowed.sum(axis=0) == 1].any(axis=1))


def _check_places(graph: OpGraph, allowed: NDArray[np.bool_]) -> None:
    """Check that every group has a device."""
    somewhere = np.asarray(allowed.any(axis=0))
    if not somewhere.all():
        op = graph.ops[int(np.argmin(somewhere[graph.arrays.op_group]))]
        raise InputError(
            f"op {op.name!r} may go to no device: all are forbidden to it or to its group, or "
            "excluded; leave it at least one."
        )


def _check_limit(
    limit: int, cluster: Cluster, allowed: NDArray[np.bool_], targets: Sequence[str]
) -> None:
    """Check that groups with a single allowed device need no more devices than the limit."""
    if len(targets) > limit:
        raise InputError(
            f"ops are pinned to {len(targets)} devices ({_list(targets)}), but max_devices is "
            f"{limit}; raise it, or pin to fewer."
        )
    alone = [cluster.devices[device].name for device in np.flatnonzero(needed(allowed))]
    if len(alone) > limit:
        raise InputError(
            f"there are ops that may go to {_list(alone)} alone, but max_devices is {limit}; raise "
            "it, or forbid and exclude less."
        )


def check_devices(
    graph: OpGraph,
    cluster: Cluster,
    constraints: Constraints,
    allowed: NDArray[np.bool_],
    devices: NDArray[np.int64],
) -> None:
    """Check that the devices of the ops violate no constraint, margins aside.

    Raises:
        InputError: One is violated; the text names it.
    """
    here = allowed[devices, graph.arrays.op_group]
    if not here.all():
        op = int(np.argmin(here))
        raise InputError(why_not(graph, cluster, constraints, op, int(devices[op])))
    used = np.unique(devices).tolist()
    if constraints.max_devices is not None and len(used) > constraints.max_devices:
        raise InputError(
            f"the placement uses {len(used)} devices "
            f"({_list([cluster.devices[device].name for device in used])}), but max_devices is "
            f"{constraints.max_devices}."
        )


def why_not(
    graph: OpGraph, cluster: Cluster, constraints: Constraints, op: int, device: int
) -> str:
    """The constraint that keeps the op from a device that it may not use."""
    name, target = graph.ops[op].name, cluster.devices[device].name
    if target in constraints.excluded:
        return f"op {name!r} is on {target!r}, which the constraints exclude for all."
    group = graph.ops[op].group
    members = (op,) if group is None else graph.groups[group]
    subjects = [graph.ops[member].name for member in members]
    # A group's name applies where no op has it.
    if group is not None and group not in graph.op_index:
        subjects.append(group)
    for subject in subjects:
        whose = f"op {name!r}" if subject == name else f"{subject!r}, with which {name!r} shares it"
        if target in constraints.forbidden.get(subject, ()):
            return f"op {name!r} is on {target!r}, which the constraints forbid to {whose}."
        if constraints.pins.get(subject, target) != target:
            return (
                f"op {name!r} is on {target!r}, but the constraints pin {whose} to "
                f"{constraints.pins[subject]!r}."
            )
    return f"op {name!r} is on {target!r}, which the constraints forbid to op {name!r}."


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


def _list(names: Collection[str]) -> str:
    rows = [repr(name) for name in names][:_LISTED]
    more = len(names) - len(rows)
    return ", ".join(rows) + (f" and {more} more" if more else "")
