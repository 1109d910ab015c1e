"""Coarsening once more: plain Python, and nothing is kept up to date from round to round.

The rules are those of `baechi.problem.coarsening`; `coarsen` is what its first level must be.
"""

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, final

from baechi.problem.problem_arrays import Problem
from baechi.records.cluster import Cluster
from baechi.records.graph import Op, OpGraph, Tensor

# The largest memory holds this many of the largest groups that fusing makes: then first fit wastes
# at most about an eighth of a device, and a graph that fills devices has several lumps for each.
_GROUPS_PER_DEVICE: Final = 8


@final
@dataclass(frozen=True)
class Coarse:
    """A coarse graph and the fine one that it stands for.

    Attributes:
        fine: The graph before.
        members: For every op of the coarse graph its fine ops, in topological order.
    """

    fine: OpGraph
    members: tuple[tuple[int, ...], ...]

    @cached_property
    def graph(self) -> OpGraph:
        """The coarse graph.

        A coarse op takes the sum of its members' times, launches and persistent bytes. Its
        workspace is the peak, while its members run in order, of their workspaces and of the
        tensors that never leave it; all other tensors are the coarse graph's. It is named after
        its first member.
        """
        part_of = _part_of(self.members, len(self.fine.ops))
        groups = _group_names(self.fine, self.members)
        ops = tuple(
            Op(
                self.fine.ops[row[0]].name,
                sum(self.fine.ops[op].time_ns for op in row),
                sum(self.fine.ops[op].persistent_bytes for op in row),
                _peak(self.fine, row, part_of),
                groups[part],
                launch_ns=sum(self.fine.ops[op].launch_ns for op in row),
            )
            for part, row in enumerate(self.members)
        )
        tensors = tuple(
            Tensor(
                part_of[tensor.producer],
                tuple({part_of[c] for c in tensor.consumers} - {part_of[tensor.producer]}),
                tensor.nbytes,
                tensor.kept,
            )
            for tensor in self.fine.tensors
            if not _is_internal(tensor, part_of)
        )
        times = {
            kind: tuple(sum(row[op] for op in members) for members in self.members)
            for kind, row in self.fine.times.items()
        }
        return OpGraph(ops, tensors, times)


def coarsen(graph: OpGraph, cluster: Cluster) -> Coarse:
    """The graph with its chains, idle ops and cheap ops fused."""
    names: dict[str, int] = {}
    parts = _Parts(
        members=[(op,) for op in range(len(graph.ops))],
        group=[
            op if row.group is None else names.setdefault(row.group, op)
            for op, row in enumerate(graph.ops)
        ],
        absorbed=[0] * len(graph.ops),
    )
    costs = _costs(graph, cluster)
    while True:
        joined = _round(graph, parts, costs)
        if len(joined.members) == len(parts.members):
            return Coarse(graph, tuple(joined.members))
        parts = joined


@final
@dataclass(frozen=True)
class _Parts:
    """The parts between two rounds, in topological order.

    Attributes:
        members: Ops of every part, ascending.
        group: Group of every part; any number that no other group has.
        absorbed: Time that every part has taken in as cheap.
    """

    members: list[tuple[int, ...]]
    group: list[int]
    absorbed: list[int]


@final
@dataclass(frozen=True)
class _Costs:
    """What the rules ask about ops and links.

    Attributes:
        times: The longest time of every op on any device.
        idle: Whether an op has no time and no persistent bytes.
        link: The smallest latency with its overhead, and the smallest ns per byte; `None` where
            nothing is sent.
        limit: The most bytes of a group that fusing makes.
    """

    times: list[int]
    idle: list[bool]
    link: tuple[int, float] | None
    limit: int

    def send_ns(self, nbytes: int) -> float:
        """The least time to send so much; 0 where nothing is sent."""
        return 0.0 if self.link is None else self.link[0] + nbytes * self.link[1]


def _costs(graph: OpGraph, cluster: Cluster) -> _Costs:
    problem = Problem(graph, cluster)
    times = problem.durations.max(axis=0).tolist()
    idle = [not times[op] and not row.persistent_bytes for op, row in enumerate(graph.ops)]
    links = [
        link
        for src, row in enumerate(cluster.links)
        for dst, link in enumerate(row)
        if link is not None and problem.device_pool[src] != problem.device_pool[dst]
    ]
    cheapest = (
        (
            min(link.latency_ns + link.overhead_ns for link in links),
            1e9 / max(link.bytes_per_s for link in links),
        )
        if links
        else None
    )
    limit = max(problem.pool_memory) // _GROUPS_PER_DEVICE
    return _Costs(times, idle, cheapest, limit)


# For every part its neighbors on one side, and the bytes that flow between.
_Neighbors = list[dict[int, int]]


def _neighbors(graph: OpGraph, parts: _Parts) -> tuple[_Neighbors, _Neighbors]:
    """Predecessors and successors."""
    part_of = _part_of(parts.members, len(graph.ops))
    before: _Neighbors = [{} for _ in parts.members]
    after: _Neighbors = [{} for _ in parts.members]
    for tensor in graph.tensors:
        u = part_of[tensor.producer]
        for v in {part_of[consumer] for consumer in tensor.consumers} - {u}:
            nbytes = after[u].get(v, 0) + tensor.nbytes
            after[u][v] = before[v][u] = nbytes
    return before, after


@final
class _Groups:
    """The groups of the parts, which grow during a round."""

    def __init__(self, graph: OpGraph, parts: _Parts, sides: tuple[_Neighbors, _Neighbors]) -> None:
        self._union = _Union(1 + max(parts.group, default=0))
        self._load = _group_loads(graph, parts)
        self._group = parts.group
        self._sides = sides
        self._parts: dict[int, list[int]] = {}
        for part, group in enumerate(parts.group):
            self._parts.setdefault(group, []).append(part)

    def join(self, u: int, v: int, limit: int) -> bool:
        """Joins the groups of two parts if they may be one; whether they are one then."""
        a, b = (self._union.find(self._group[part]) for part in (u, v))
        if a == b:
            return True
        load = self._load[a] + self._load[b]
        if load > limit or not self._touch(self._group[u], self._group[v]):
            return False
        self._load[self._union.join(a, b)] = load
        return True

    def _touch(self, a: int, b: int) -> bool:
        """Whether each part of the group with fewer parts has a neighbor in the other."""
        few, many = sorted((a, b), key=lambda group: (len(self._parts[group]), group))
        return all(
            any(self._group[w] == many for side in self._sides for w in side[part])
            for part in self._parts[few]
        )


def _round(graph: OpGraph, parts: _Parts, costs: _Costs) -> _Parts:
    """The parts after one round of joining neighbors; as many as before if no rule applies."""
    before, after = _neighbors(graph, parts)
    n = len(parts.members)
    union, groups = _Union(n), _Groups(graph, parts, (before, after))
    absorbed = list(parts.absorbed)
    joined: set[int] = set()

    def join(u: int, v: int, cheap_ns: int = 0) -> None:
        if groups.join(u, v, costs.limit):
            joined.update((u, v))
            a, b = union.find(u), union.find(v)
            if a != b:
                absorbed[union.join(a, b)] = absorbed[a] + absorbed[b] + cheap_ns

    for u in range(n):
        v = _chained(u, before, after, parts.group)
        if v is None and all(costs.idle[op] for op in parts.members[u]):
            v = _idle_target(before[u], after[u])
        if v is not None:
            join(u, v)
    for u in range(n):
        time_ns = sum(costs.times[op] for op in parts.members[u])
        for side in (before[u], after[u]):
            # What has joined in this round is looked at in the next, with all that it has become.
            if len(side) == 1 and u not in joined:
                ((v, nbytes),) = side.items()
                if absorbed[union.find(v)] + absorbed[u] + time_ns <= costs.send_ns(nbytes):
                    join(u, v, time_ns)
    return _joined(graph, parts, union, absorbed)


def _chained(u: int, before: _Neighbors, after: _Neighbors, group: list[int]) -> int | None:
    """The part that the rules `chain` and `mates` join `u` to."""
    outside = [v for v in after[u] if group[v] != group[u]]
    if not outside:
        return next(iter(after[u])) if len(after[u]) == 1 else None
    v = min(outside)
    if any(group[w] != group[v] for w in outside):
        return None
    parents = [w for w in before[v] if group[w] != group[v]]
    return v if max(parents) == u and all(group[w] == group[u] for w in parents) else None


def _idle_target(before: dict[int, int], after: dict[int, int]) -> int | None:
    """The part that the rule `idle` joins a part with these neighbors to."""
    sides = [side for side in (before, after) if len(side) == 1]
    if not sides:
        return None
    side = max(sides, key=lambda side: sum(side.values()))
    return next(iter(side))


def _group_loads(graph: OpGraph, parts: _Parts) -> dict[int, int]:
    """Bytes of every group: persistent, all outputs, and the largest workspace."""
    load = dict.fromkeys(parts.group, 0)
    workspace = dict.fromkeys(parts.group, 0)
    for group, row in zip(parts.group, parts.members, strict=True):
        for op in row:
            outputs = sum(graph.tensors[tensor].nbytes for tensor in graph.op_outputs[op])
            load[group] += graph.ops[op].persistent_bytes + outputs
            workspace[group] = max(workspace[group], graph.ops[op].net_workspace_bytes)
    return {group: load[group] + workspace[group] for group in load}


def _joined(graph: OpGraph, parts: _Parts, union: "_Union", absorbed: list[int]) -> _Parts:
    """The parts joined as `union` says, except for those that would lie on a cycle."""
    sets: dict[int, list[int]] = {}
    for part in range(len(parts.members)):
        sets.setdefault(union.find(part), []).append(part)
    clusters = _acyclic(graph, parts, list(sets.values()))
    members = [_merged(parts, row) for row in clusters]
    order = _topological(members, _links(graph, members))
    groups = _joined_groups(graph, members)
    return _Parts(
        [members[part] for part in order],
        [groups[part] for part in order],
        [
            parts.absorbed[clusters[part][0]]
            if len(clusters[part]) == 1
            else absorbed[union.find(clusters[part][0])]
            for part in order
        ],
    )


def _merged(parts: _Parts, row: list[int]) -> tuple[int, ...]:
    return tuple(sorted(op for part in row for op in parts.members[part]))


# For every part its successors, with repetitions.
_Links = list[list[int]]


def _links(graph: OpGraph, members: Sequence[tuple[int, ...]]) -> _Links:
    part_of = _part_of(members, len(graph.ops))
    after: _Links = [[] for _ in members]
    for tensor in graph.tensors:
        u = part_of[tensor.producer]
        after[u] += {part_of[consumer] for consumer in tensor.consumers} - {u}
    return after


def _topological(members: Sequence[tuple[int, ...]], after: _Links) -> list[int]:
    """The parts in topological order, by first member, without those on or behind a cycle."""
    waiting = Counter(v for row in after for v in row)
    ready = [(row[0], part) for part, row in enumerate(members) if not waiting[part]]
    heapq.heapify(ready)
    order = []
    while ready:
        _, part = heapq.heappop(ready)
        order.append(part)
        for v in after[part]:
            waiting[v] -= 1
            if not waiting[v]:
                heapq.heappush(ready, (members[v][0], v))
    return order


def _acyclic(graph: OpGraph, parts: _Parts, sets: list[list[int]]) -> list[list[int]]:
    """The sets, some of them split into their parts so that they make no cycle."""
    while True:
        members = [_merged(parts, row) for row in sets]
        done = {part for s in _topological(members, _links(graph, members)) for part in sets[s]}
        if len(done) == len(parts.members):
            return sets
        first = min(set(range(len(parts.members))) - done)
        sets = [
            piece for row in sets for piece in ([[part] for part in row] if first in row else [row])
        ]


def _joined_groups(graph: OpGraph, members: Sequence[tuple[int, ...]]) -> list[int]:
    """For every part its group, where parts that share a group of the graph share one."""
    union = _Union(len(members))
    first: dict[str, int] = {}
    for part, row in enumerate(members):
        for op in row:
            name = graph.ops[op].group
            if name is not None:
                union.join(part, first.setdefault(name, part))
    return [union.find(part) for part in range(len(members))]


def _group_names(graph: OpGraph, members: Sequence[tuple[int, ...]]) -> list[str | None]:
    """The same as names, of the first group of the graph in each; `None` where a part is alone."""
    groups = _joined_groups(graph, members)
    sizes = Counter(groups)
    names: dict[int, str] = {}
    for group, row in zip(groups, members, strict=True):
        for op in row:
            name = graph.ops[op].group
            if name is not None:
                names.setdefault(group, name)
    return [names[group] if sizes[group] > 1 else None for group in groups]


def _part_of(members: Sequence[tuple[int, ...]], n: int) -> list[int]:
    part_of = [0] * n
    for part, row in enumerate(members):
        for op in row:
            part_of[op] = part
    return part_of


def _is_internal(tensor: Tensor, part_of: list[int]) -> bool:
    """Whether a tensor lives and dies inside its part."""
    part = part_of[tensor.producer]
    inside = all(part_of[consumer] == part for consumer in tensor.consumers)
    return inside and bool(tensor.consumers) and not tensor.kept


def _peak(graph: OpGraph, row: tuple[int, ...], part_of: list[int]) -> int:
    """The most bytes that a part needs while its ops run in order, besides the coarse tensors."""
    live = peak = 0
    for op in row:
        for tensor in graph.op_outputs[op]:
            if _is_internal(graph.tensors[tensor], part_of):
                live += graph.tensors[tensor].nbytes
        peak = max(peak, live + graph.ops[op].net_workspace_bytes)
        for tensor in graph.op_inputs[op]:
            consumers = graph.tensors[tensor].consumers
            if consumers[-1] == op and _is_internal(graph.tensors[tensor], part_of):
                live -= graph.tensors[tensor].nbytes
    return peak


@final
class _Union:
    """Disjoint sets of 0 .. n - 1; a set's root is its smallest element."""

    def __init__(self, n: int) -> None:
        self._parent = list(range(n))

    def find(self, x: int) -> int:
        parent = self._parent
        while parent[x] != x:
            parent[x] = parent[parent[x]]
            x = parent[x]
        return x

    def join(self, a: int, b: int) -> int:
        """Joins the sets of `a` and `b`; the root of the result."""
        low, high = sorted((self.find(a), self.find(b)))
        self._parent[high] = low
        return low
