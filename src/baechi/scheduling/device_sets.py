"""Sets of a few devices out of many, the most promising first.

A solve of 500 ops takes milliseconds on eight devices and seconds on a thousand, most of which end
up unused. So sets of 1, 2, 3, 4, 6, 8, 12, ... devices are made in every node, under every switch
and of all devices. Of each size and level, the sets with the lowest bound on the step come first:
the graph's work over the total speed of the set, or its longest chain on the fastest device,
whichever is longer. With devices of several kinds this is an estimate.

Complexity: O(levels * devices * log devices + ops + tensors).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice, zip_longest
from typing import Final, final

import numpy as np

from baechi.errors import InputError
from baechi.problem.problem_arrays import LIMIT, Problem
from baechi.problem.simulation import replay
from baechi.records.cluster import Cluster, Constraints, Device, Topology
from baechi.records.graph import OpGraph
from baechi.scheduling.claims import PROFILES, Room, Wish
from baechi.scheduling.snapshot import Site

# Larger sets are only made where smaller ones have too little memory.
WIDE: Final = 64
# Sets of one size at one level that are offered.
_OFFERED: Final = 4
# What the names of a MIG device's instances end with.
_INSTANCES: Final = frozenset(
    f"{name}@{start}" for name, profile in PROFILES.items() for start in profile.starts
)


@final
@dataclass(frozen=True, slots=True)
class Candidate:
    """A set of devices: their rooms' indices, ascending, a bound on the step, and their memory."""

    rooms: tuple[int, ...]
    bound_ns: int
    memory_bytes: int


@final
@dataclass(frozen=True, slots=True)
class Demand:
    """The needs of a graph that decide where it may fit.

    Attributes:
        work_ns: The time of all ops, by kind of device.
        chain_ns: The time of the longest chain of ops, by kind of device.
        total_bytes: Memory that all groups keep for the whole step, or hold together at its end.
        largest_bytes: Most memory that one group needs when one of its ops runs.
        single_bytes: Memory that one device needs for the whole graph.
    """

    work_ns: Mapping[str, int]
    chain_ns: Mapping[str, int]
    total_bytes: int
    largest_bytes: int
    single_bytes: int

    @staticmethod
    def of(graph: OpGraph) -> "Demand":
        """The demand of a graph. O(kinds * (ops + tensors))."""
        one = Cluster((Device("one", 0),), ((None,),))
        ops = range(len(graph.ops))
        single_bytes = replay(Problem(graph, one), [0] * len(ops), ops).peaks()[0]
        tables = {"": graph.arrays.times, **graph.arrays.kind_times}
        timed = np.logical_and.reduce([times > 0 for times in tables.values()])
        arrays = graph.explicit.arrays  # a forward need not share its device with late gradients
        running = arrays.least_workspace.copy()
        np.add.at(running, arrays.producer, arrays.nbytes)
        running[~timed] = 0  # an op that takes no time holds nothing while it runs
        most = np.zeros(arrays.groups, np.int64)
        np.maximum.at(most, arrays.op_group, running)
        # Late bytes are there at the end, with all others, unless their op takes no time.
        late = sum(op.late_bytes for op, takes in zip(graph.ops, timed, strict=True) if takes)
        return Demand(
            {kind: sum(times.tolist()) for kind, times in tables.items()},
            {kind: _chain(graph, times.tolist()) for kind, times in tables.items()},
            int(arrays.persistent.sum()) + late,
            int((arrays.group_persistent + most).max(initial=0)),
            single_bytes,
        )


def _chain(graph: OpGraph, times: Sequence[int]) -> int:
    """The longest chain of ops, in ns."""
    producers = graph.arrays.producer.tolist()
    ends: list[int] = []
    for time_ns, inputs in zip(times, graph.op_inputs, strict=True):
        start = max((ends[producers[tensor]] for tensor in inputs), default=0)
        ends.append(start + time_ns)
    return max(ends, default=0)


def resolved(wish: Wish, graph: OpGraph, site: Site, rooms: Sequence[Room]) -> Wish:
    """The same wish, with constraints that hold on every set of rooms.

    A MIG device that is excluded or forbidden stands for its instances; a device that is forbidden
    to an op is forbidden to its group; a margin is that of all devices of its pool.

    Raises:
        InputError: The constraints name what is no op, group or device; or they pin to a MIG
            device, or give it a margin, instead of an instance.
    """
    limits = wish.constraints
    for name in sorted({*limits.pins, *limits.forbidden}):
        if name not in graph.op_index and name not in graph.groups:
            raise InputError(
                f"the constraints name {name!r}, but the graph has no op and no group of this name."
            )
    cut = {
        device.name
        for device, how in zip(site.base.devices, site.sharing, strict=True)
        if how == "mig"
    }
    single = {*limits.pins.values(), *limits.margins}
    named = {*single, *limits.excluded}.union(*limits.forbidden.values())
    for name in sorted(named - site.index.keys()):
        device, _, instance = name.rpartition("/")
        if device not in cut or instance not in _INSTANCES:
            raise InputError(f"the constraints name {name!r}, which is no device of the cluster.")
    for name in sorted(single & cut):
        raise InputError(
            f"the constraints pin to {name!r} or give it a margin, but it is cut into MIG "
            f"instances; name one of them, such as '{name}/3g@0'."
        )

    def instances(names: Sequence[str]) -> tuple[str, ...]:
        whole = cut.intersection(names)
        parts = (room.device.name for room in rooms if site.base.devices[room.place].name in whole)
        return (*(name for name in names if name not in whole), *(parts if whole else ()))

    banned: dict[str | tuple[str], set[str]] = {}
    for name, row in limits.forbidden.items():
        banned.setdefault(_group(graph, name), set()).update(instances(row))
    margins = dict(limits.margins)
    for place, pool in enumerate(site.pools if margins else ()):
        members = [site.base.devices[at].name for at in pool]
        most = max(limits.margins.get(name, 0) for name in members)
        if most:
            margins[site.base.devices[place].name] = most
    return replace(
        wish,
        constraints=Constraints(
            limits.pins,
            {name: tuple(banned[_group(graph, name)]) for name in sorted(limits.forbidden)},
            instances(limits.excluded),
            limits.max_devices,
            margins,
        ),
    )


def _group(graph: OpGraph, name: str) -> str | tuple[str]:
    """The group that a name of the constraints means; the op's, in a tuple, where it has none."""
    at = graph.op_index.get(name)
    group = name if at is None else graph.ops[at].group
    return (name,) if group is None else group


def candidates(
    demand: Demand, site: Site, rooms: Sequence[Room], wish: Wish
) -> Iterator[Candidate]:
    """Sets of devices that may hold the graph, in the order in which to try them.

    Raises:
        InputError: The wish asks for one node or switch, and the site does not know them.
    """
    limits = wish.constraints
    usable = _usable(rooms, limits)
    needed_of = _needs(rooms, limits)
    work = {at: _time(demand.work_ns, rooms[at]) for at in usable}
    memory = {
        at: max(0, rooms[at].device.memory_bytes - limits.margins.get(rooms[at].device.name, 0))
        for at in usable
    }
    ranked = sorted(usable, key=lambda at: (work[at], -memory[at], at))
    roomy = sorted(usable, key=lambda at: (-memory[at], work[at], at))

    def prefixes(members: Sequence[int]) -> Iterator[Candidate]:
        """The first few of these rooms, for every size, where the memory may suffice."""
        needed = needed_of(members)
        if needed is None:
            return
        rows = [*needed, *(at for at in members if at not in needed)][: limits.max_devices]
        rates = list(accumulate(1 / max(1, work[at]) for at in rows))
        totals = list(accumulate(memory[at] for at in rows))
        largest = list(accumulate((memory[at] for at in rows), max))
        chains = list(accumulate((_time(demand.chain_ns, rooms[at]) for at in rows), min))
        found = False
        for size in _sizes(len(rows)):
            last = size - 1
            if size < max(2, len(needed)):
                continue
            if totals[last] < demand.total_bytes or largest[last] < demand.largest_bytes:
                continue
            if size > WIDE and found:
                return
            found = True
            bound_ns = max(int(1 / rates[last]), chains[last])
            yield Candidate(tuple(sorted(rows[:size])), bound_ns, totals[last])

    # The fastest single devices that hold all: no decision is slower than the best of them.
    single = [
        at for at in ranked if memory[at] >= demand.total_bytes and needed_of([at]) is not None
    ]
    # Where none holds all in the order of indices, another order may need less.
    alone = [at for at in single if memory[at] >= demand.single_bytes] or single
    by_size: dict[int, list[Candidate]] = {
        1: [Candidate((at,), work[at], memory[at]) for at in islice(alone, _OFFERED)]
    }
    for level in levels(site, wish.same):
        for order in (ranked, roomy):
            offered: dict[int, list[Candidate]] = {}
            for members in _grouped(level, rooms, order):
                for row in prefixes(members):
                    offered.setdefault(len(row.rooms), []).append(row)
            for size, found in offered.items():
                found.sort(key=lambda row: (row.bound_ns, -row.memory_bytes, row.rooms))
                by_size.setdefault(size, []).extend(found[:_OFFERED])
    # One of each size, then the second of each, and so on; powers of two before what is between.
    sizes = sorted(by_size, key=lambda size: (size & (size - 1) != 0, size))
    seen = set()
    for turn in zip_longest(*(by_size[size] for size in sizes)):
        for candidate in turn:
            if candidate is not None and candidate.rooms not in seen:
                seen.add(candidate.rooms)
                yield candidate


def parts(site: Site, rooms: Sequence[Room], wish: Wish) -> list[tuple[int, ...]]:
    """All rooms of each node or switch, as the wish has it, or of the cluster; most memory first.

    Without those where the constraints leave an op no place.
    """
    limits = wish.constraints
    needed_of = _needs(rooms, limits)
    level = levels(site, wish.same)[-1]
    found = [
        tuple(row)
        for row in _grouped(level, rooms, _usable(rooms, limits))
        if needed_of(row) is not None
    ]
    return sorted(found, key=lambda row: (-sum(rooms[at].device.memory_bytes for at in row), row))


def _usable(rooms: Sequence[Room], limits: Constraints) -> list[int]:
    excluded = set(limits.excluded)
    return [at for at, room in enumerate(rooms) if room.device.name not in excluded]


def _needs(
    rooms: Sequence[Room], limits: Constraints
) -> Callable[[Sequence[int]], list[int] | None]:
    """Finds the rooms that the constraints need: targets of pins, then one for each op without.

    A room for each op that may use none of those before; `None` where one is not among the members.
    """
    names = [room.device.name for room in rooms]
    targets = sorted(set(limits.pins.values()))
    # Most ops are forbidden the same.
    forbidden = [frozenset(row) for row in sorted(set(limits.forbidden.values()))]

    def needed_of(members: Sequence[int]) -> list[int] | None:
        if not targets and not forbidden:
            return []
        places = {names[at]: at for at in members}
        if not all(name in places for name in targets):
            return None
        chosen = sorted(places[name] for name in targets)
        for banned in forbidden:
            if all(names[at] in banned for at in chosen):
                other = next((at for name, at in places.items() if name not in banned), None)
                if other is None:
                    return None
                chosen.append(other)
        return chosen

    return needed_of


def levels(site: Site, same: str) -> list[tuple[str, ...]]:
    """For every level the name of each device's part; the last may be all devices together."""
    base = site.base
    whole = ("",) * len(base.devices)
    if not isinstance(base, Topology):
        if same:
            raise InputError(
                f"all devices are wanted on one {same}, but the cluster does not say which {same} "
                "a device is on; give a baechi.Topology."
            )
        return [whole]
    if same == "node":
        return [base.nodes]
    return [base.nodes, base.switches] if same else [base.nodes, base.switches, whole]


def _grouped(
    level: tuple[str, ...], rooms: Sequence[Room], order: Iterable[int]
) -> list[list[int]]:
    """The rooms of every part of a level, each in this order."""
    parts: dict[str, list[int]] = {}
    for at in order:
        parts.setdefault(level[rooms[at].place], []).append(at)
    return list(parts.values())


def _sizes(most: int) -> Iterator[int]:
    """1, 2, 3, 4, 6, 8, 12, ... and the largest."""
    size = 1
    while size < most:
        yield size
        if size > 1 and size + size // 2 < most:
            yield size + size // 2
        size *= 2
    yield most


def _time(table: Mapping[str, int], room: Room) -> int:
    # Of a device that has next to no compute left the quotient may be endless.
    return int(min(table.get(room.device.kind, table[""]) / room.device.speed, LIMIT))
