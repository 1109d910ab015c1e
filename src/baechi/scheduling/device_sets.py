"""Sets of a few devices out of many, the most promising first.

A solve of 500 ops takes milliseconds on eight devices and seconds on a thousand, most of which end
up unused. So sets of 1, 2, 3, 4, 6, 8, 12, ... devices are made in
every node, under every switch and of all devices. Of each size and level, the sets with the lowest
bound on the step come first: the graph's work over the total speed of the set, or its longest chain
on the fastest device, whichever is longer. With devices of several kinds this is an estimate.

The solver's own choice of devices (`placers/device_choice.py`) differs: it has a problem of few
devices with all their links, and chooses exactly as many as may be used.

Complexity: O(levels * devices * log devices + ops + tensors).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, zip_longest
from typing import Final, final

from baechi.errors import InputError
from baechi.problem.problem_arrays import LIMIT, Problem
from baechi.problem.simulation import replay
from baechi.records.cluster import Cluster, Device, Topology
from baechi.records.constraints import Constraints
from baechi.records.graph import OpGraph
from baechi.scheduling.claims import Room
from baechi.scheduling.request import Wish
from baechi.scheduling.snapshot import Site

# Larger sets are only made where smaller ones have too little memory.
WIDE: Final = 64
# Sets of one size at one level that are offered.
_OFFERED: Final = 4


@final
@dataclass(frozen=True, slots=True)
class Candidate:
    """A set of devices.

    Attributes:
        rooms: Indices of the rooms, ascending.
        promise_ns: Bound on the step, see the module.
        memory_bytes: Their memory together.
    """

    rooms: tuple[int, ...]
    promise_ns: int
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
        tables = {"": tuple(op.time_ns for op in graph.ops), **graph.times}
        explicit = graph.explicit  # a forward need not share its device with late gradients
        arrays = explicit.arrays
        running = arrays.workspace.tolist()
        for op, nbytes in zip(arrays.producer.tolist(), arrays.nbytes.tolist(), strict=True):
            running[op] += nbytes
        for times in tables.values():
            # An op that takes no time holds nothing while it runs.
            running = [nbytes if time else 0 for nbytes, time in zip(running, times, strict=True)]
        # Late bytes are there at the end, with all others, unless their op takes no time.
        timed = [all(row) for row in zip(*tables.values(), strict=True)]
        late = sum(op.late_bytes for op, takes in zip(graph.ops, timed, strict=True) if takes)
        kept: dict[str, int] = {}
        most: dict[str, int] = {}
        for index, op in enumerate(explicit.ops):
            key = f"op:{index}" if op.group is None else f"group:{op.group}"
            kept[key] = kept.get(key, 0) + op.persistent_bytes
            most[key] = max(most.get(key, 0), running[index])
        return Demand(
            {kind: sum(times) for kind, times in tables.items()},
            {kind: _chain(graph, times) for kind, times in tables.items()},
            sum(op.persistent_bytes for op in explicit.ops) + late,
            max((nbytes + most[key] for key, nbytes in kept.items()), default=0),
            _single(graph),
        )


def _chain(graph: OpGraph, times: Sequence[int]) -> int:
    """The longest chain of ops, in ns."""
    producers = graph.arrays.producer.tolist()
    ends: list[int] = []
    for time_ns, inputs in zip(times, graph.op_inputs, strict=True):
        start = max((ends[producers[tensor]] for tensor in inputs), default=0)
        ends.append(start + time_ns)
    return max(ends, default=0)


def _single(graph: OpGraph) -> int:
    """The memory of one device that runs all ops in the order of their indices."""
    one = Cluster((Device("one", 0),), ((None,),))
    ops = range(len(graph.ops))
    return replay(Problem(graph, one), [0] * len(ops), ops).peaks()[0]


def candidates(
    demand: Demand, site: Site, rooms: Sequence[Room], wish: Wish
) -> Iterator[Candidate]:
    """Sets of devices that may hold the graph, in the order in which to try them.

    Raises:
        InputError: The wish asks for one node or switch, and the site does not know them.
    """
    limits = wish.constraints
    usable = _usable(rooms, limits)
    needs = _Needs(rooms, limits)
    work = {at: _time(demand.work_ns, rooms[at]) for at in usable}
    memory = {
        at: max(0, rooms[at].device.memory_bytes - limits.margins.get(rooms[at].device.name, 0))
        for at in usable
    }
    ranked = sorted(usable, key=lambda at: (work[at], -memory[at], at))
    roomy = sorted(usable, key=lambda at: (-memory[at], work[at], at))
    most = min(len(usable), limits.max_devices or len(usable))
    # The fastest single devices that hold all: no decision is slower than the best of them.
    single = [
        at for at in ranked if memory[at] >= demand.total_bytes and needs.of([at]) is not None
    ]
    # Where none holds all in the order of indices, another order may need less.
    alone = [at for at in single if memory[at] >= demand.single_bytes] or single
    by_size: dict[int, list[Candidate]] = {
        1: [Candidate((at,), work[at], memory[at]) for at in islice(alone, _OFFERED)]
    }
    for level in _levels(site, wish.same):
        for order in (ranked, roomy):
            offered: dict[int, list[Candidate]] = {}
            for members in _grouped(level, rooms, order):
                needed = needs.of(members)
                if needed is None:
                    continue
                rows = [*needed, *(at for at in members if at not in needed)]
                least = max(2, len(needed))
                for row in _prefixes(rows, least, most, rooms, work, memory, demand):
                    offered.setdefault(len(row.rooms), []).append(row)
            for size, found in offered.items():
                found.sort(key=lambda row: (row.promise_ns, -row.memory_bytes, row.rooms))
                by_size.setdefault(size, []).extend(found[:_OFFERED])
    # One of each size, then the second of each, and so on; powers of two before what is between.
    sizes = sorted(by_size, key=lambda size: (size & (size - 1) != 0, size))
    yield from _dealt([by_size[size] for size in sizes])


def parts(site: Site, rooms: Sequence[Room], wish: Wish) -> list[tuple[int, ...]]:
    """All rooms of each node or switch, as the wish has it, or of the cluster; most memory first.

    Without those where the constraints leave an op no place.
    """
    limits = wish.constraints
    needs = _Needs(rooms, limits)
    level = _levels(site, wish.same)[-1]
    found = [
        tuple(row)
        for row in _grouped(level, rooms, _usable(rooms, limits))
        if row and needs.of(row) is not None
    ]
    return sorted(found, key=lambda row: (-sum(rooms[at].device.memory_bytes for at in row), row))


def _usable(rooms: Sequence[Room], limits: Constraints) -> list[int]:
    excluded = set(limits.excluded)
    return [at for at, room in enumerate(rooms) if room.device.name not in excluded]


@final
class _Needs:
    """The rooms that the constraints need."""

    def __init__(self, rooms: Sequence[Room], limits: Constraints) -> None:
        self._names = [room.device.name for room in rooms]
        self._targets = sorted(set(limits.pins.values()))
        # Most ops are forbidden the same.
        self._banned = [frozenset(row) for row in sorted(set(limits.forbidden.values()))]

    def of(self, members: Sequence[int]) -> list[int] | None:
        """The targets of pins, then a room for each op that may use none of those before.

        `None` where one of them is not among the rooms.
        """
        if not self._targets and not self._banned:
            return []
        names = {self._names[at]: at for at in members}
        if not all(name in names for name in self._targets):
            return None
        chosen = sorted(names[name] for name in self._targets)
        for banned in self._banned:
            if all(self._names[at] in banned for at in chosen):
                other = next((at for name, at in names.items() if name not in banned), None)
                if other is None:
                    return None
                chosen.append(other)
        return chosen


def _levels(site: Site, same: str) -> list[tuple[str, ...] | None]:
    """For every level the name of each device's part; `None` for all devices together."""
    base = site.base
    if not isinstance(base, Topology):
        if same:
            raise InputError(
                f"all devices are wanted on one {same}, but the cluster does not say which {same} "
                "a device is on; give a baechi.Topology."
            )
        return [None]
    if same == "node":
        return [base.nodes]
    return [base.nodes, base.switches] if same else [base.nodes, base.switches, None]


def _grouped(
    level: tuple[str, ...] | None, rooms: Sequence[Room], order: Iterable[int]
) -> list[list[int]]:
    """The rooms of every part of a level, each in this order."""
    if level is None:
        return [list(order)]
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


def _prefixes(
    rows: Sequence[int],
    least: int,
    most: int,
    rooms: Sequence[Room],
    work: Mapping[int, int],
    memory: Mapping[int, int],
    demand: Demand,
) -> Iterator[Candidate]:
    """The first few of these rooms, for every size, where the memory may suffice."""
    most = min(most, len(rows))
    if most < least:
        return
    rates = list(accumulate(1 / max(1, work[at]) for at in rows[:most]))
    totals = list(accumulate(memory[at] for at in rows[:most]))
    largest = list(accumulate((memory[at] for at in rows[:most]), max))
    chains = list(accumulate((_time(demand.chain_ns, rooms[at]) for at in rows[:most]), min))
    found = 0
    for size in _sizes(most):
        short = totals[size - 1] < demand.total_bytes or largest[size - 1] < demand.largest_bytes
        if size < least or short:
            continue
        if size > WIDE and found:
            return
        found += 1
        promise = max(int(1 / rates[size - 1]), chains[size - 1])
        yield Candidate(tuple(sorted(rows[:size])), promise, totals[size - 1])


def _time(table: Mapping[str, int], room: Room) -> int:
    # Of a device that has next to no compute left the quotient may be endless.
    return int(min(table.get(room.device.kind, table[""]) / room.device.speed, LIMIT))


def _dealt(rows: Sequence[Sequence[Candidate]]) -> Iterator[Candidate]:
    """The first of every row, then the second; none twice."""
    seen = set()
    for turn in zip_longest(*rows):
        for candidate in turn:
            if candidate is not None and candidate.rooms not in seen:
                seen.add(candidate.rooms)
                yield candidate
