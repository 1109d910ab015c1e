"""Micro-batches: copies of the graph of one micro-batch, and the segments that take turns.

A step of M micro-batches is M copies of the graph. Copies of an op share a device and their state:

    batch 0    F ──► loss ──► B          an edge without bytes from each copy to the next keeps
               ┊              ┊          updates of state in the order of the batches
    batch 1    F ──► loss ──► B

- Persistent bytes are there once. Late bytes, the gradients of parameters, are allocated by the
  first copy; another copy's are held beside them until they are added: to the end of the op, or of
  the last tape that has its group, where gradients of a shared parameter meet. The second
  copy's are added in memory of their own, one after the other, since others may hold the first.
- Index order is batch-major: a scheduler that breaks ties by index prefers the lower batch, and in
  it what comes first. With one loss for all batches (`joined`), all forward ops come before it, and
  backward ops after it from the last batch to the first, as autograd goes through a concatenation.

A *turn* is a segment with a batch. `Turns` are the turns of a placed graph as a graph of their own:
a turn is an op, on the one device that it may use.

Copies of an op in another order than that of the batches, or of turns, would gain nothing: if the
k-th to run of every op is called batch k, no op waits longer, and no tensor lives longer.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise
from typing import final

import numpy as np
from numpy.typing import NDArray

from baechi import _core
from baechi.errors import InputError
from baechi.problem.coarsening import Coarse, graph_of
from baechi.problem.problem_arrays import ArrayGraph, Problem
from baechi.problem.segments import by_tape, segments_of
from baechi.records.cluster import Constraints
from baechi.records.graph import OpGraph
from baechi.records.graph_arrays import GraphArrays
from baechi.records.placement import Placement

# Op a, op b and a number of batches: b of batch i + number waits for a of batch i.
Link = tuple[int, int, int]


@final
@dataclass(frozen=True, eq=False)
class Unrolled:
    """The copies of a graph, as columns.

    Attributes:
        one: The graph of one micro-batch, in its explicit form.
        late: True for the tensors that are late bytes.
        microbatches: The number of copies.
        joined: The op of which there is one for all batches: the loss; -1 if there is none.
        links: Order of copies beside that of the tensors.
        until: For every op, the op with which its late bytes have been added to the first copy's.
        ranked: Another index order, a row per batch. It need not be topological, for schedulers
            that break ties by index and need no more of it.
    """

    one: GraphArrays
    late: NDArray[np.bool_]
    microbatches: int
    joined: int = -1
    links: tuple[Link, ...] = ()
    until: NDArray[np.int32] | None = None
    ranked: NDArray[np.int32] | None = None

    @cached_property
    def position(self) -> NDArray[np.int32]:
        """The op that is the copy of an op (column) in a batch (row)."""
        if self.ranked is not None:
            return self.ranked
        n, loss = self.one.ops, self.joined
        batch = np.arange(self.microbatches, dtype=np.int32)[:, None]
        op = np.arange(n, dtype=np.int32)
        if loss < 0:
            return batch * n + op
        after = self.microbatches * loss - loss + (self.microbatches - 1 - batch) * (n - loss - 1)
        rows = np.where(op < loss, batch * loss + op, after + op)
        rows[:, loss] = self.microbatches * loss
        return rows.astype(np.int32)

    @cached_property
    def arrays(self) -> GraphArrays:
        """The columns of all copies, and of a tensor without bytes for every link."""
        one, where = self.one, self.position
        size = int(where.max(initial=-1)) + 1
        # The copy that allocates late bytes, and the tensors that others hold for themselves.
        first = self.microbatches - 1 if self.joined >= 0 else 0
        until = np.arange(one.ops, dtype=np.int32) if self.until is None else self.until
        held = np.flatnonzero(self.late & (until[one.producer] != one.producer))
        added = self.late.copy()
        added[held] = False
        counts = np.diff(one.consumer_begin)
        more = counts + np.isin(np.arange(one.tensors), held)
        readers = np.insert(one.consumers, one.consumer_begin[held], until[one.producer[held]])
        sums = one.workspace.copy()
        if self.until is not None:
            np.maximum.at(sums, until[one.producer[self.late]], one.nbytes[self.late])
        rooms = [one.workspace.copy(), sums]
        for room in rooms:
            np.add.at(room, one.producer[added], one.nbytes[added])
        copies = [
            (one.nbytes, one.kept, counts, one.consumers, one.workspace)
            if batch == first
            else (
                *(one.nbytes * ~added, one.kept * ~self.late, more, readers),
                rooms[abs(batch - first) == 1],
            )
            for batch in range(self.microbatches)
        ]
        pairs = [
            (where[batch, op], where[batch + lag, other])
            for op, other, lag in self.links
            for batch in range(self.microbatches)
            if 0 <= batch + lag < self.microbatches
        ]
        makers, waiters = np.array(pairs, np.int32).reshape(-1, 2).T
        none = np.zeros(len(pairs), np.int64)
        sizes = np.concatenate([*(row[2] for row in copies), none + 1])
        consumers = np.concatenate(
            [*(at[row[3]] for at, row in zip(where, copies, strict=True)), waiters]
        )
        if self.ranked is not None:
            consumers = consumers[np.lexsort((consumers, np.repeat(np.arange(len(sizes)), sizes)))]

        def summed(rows: Sequence[NDArray[np.int64]] | NDArray[np.int64]) -> NDArray[np.int64]:
            total = np.zeros(size, np.int64)
            for at, row in zip(where, np.broadcast_to(rows, where.shape), strict=True):
                total[at] += row
            return total

        persistent, group = np.zeros(size, np.int64), np.zeros(size, np.int32)
        persistent[where[0]] = one.persistent
        group[where] = one.op_group
        return GraphArrays(
            times=summed(one.times),
            kind_times={kind: summed(row) for kind, row in one.kind_times.items()},
            persistent=persistent,
            workspace=summed([row[4] for row in copies]),
            launch=summed(one.launch),
            op_group=group,
            producer=np.concatenate([where[:, one.producer].reshape(-1), makers]),
            nbytes=np.concatenate([*(row[0] for row in copies), none]),
            kept=np.concatenate([*(row[1] for row in copies), none]).astype(np.uint8),
            consumer_begin=np.concatenate([none[:0], [0], np.cumsum(sizes)]).astype(np.int64),
            consumers=consumers,
        )

    def problem(self, one: Problem, allowed: NDArray[np.bool_] | None = None) -> Problem:
        """The copies on the cluster of a problem of one micro-batch, under its constraints.

        `allowed` are the devices of every group; by default those that the problem allows it.
        """
        name = f"{self.microbatches} of {one.source.digest}"
        source = ArrayGraph(self.arrays, name, lambda: self.graph(one.graph))
        if allowed is None:
            allowed = one.allowed
        elif one.constraints is None:
            return Problem(source, one.cluster, Constraints(), allowed)
        return Problem(source, one.cluster, one.constraints, allowed)

    def graph(self, one: OpGraph) -> OpGraph:
        """The copies as values: the first has the names of `one`, copy i of an op `name@i`.

        Raises:
            InputError: An op is named like a copy of another.
        """
        size = len(self.arrays.times)
        names, groups = [""] * size, [""] * size
        for op, row in enumerate(one.ops):
            group = row.group
            if group is None:
                group = f"{row.name}@"
                while group in one.groups:
                    group += "@"
            for batch, at in enumerate(self.position[:, op].tolist()):
                names[at] = names[at] or (f"{row.name}@{batch}" if batch else row.name)
                groups[at] = group
        return graph_of(self.arrays, names, groups)


def unrolled(
    graph: OpGraph,
    microbatches: int,
    *,
    joined: bool = False,
    segments: Sequence[Sequence[int]] | None = None,
) -> Unrolled:
    """The copies of a graph, for a step of several micro-batches.

    Args:
        graph: The graph of one micro-batch.
        microbatches: Their number.
        joined: Whether there is one loss for all of them, if the graph trains, in place of one for
            each.
        segments: The ops that run without interruption, in order: when those of a tape end, the
            late bytes of a later batch have been added (when the last that has no lower index than
            their op ends). By default every op is alone.
    """
    loss = graph.n_forward if joined and graph.is_training else -1
    one = graph.explicit.arrays
    rows = [(op,) for op in range(one.ops)] if segments is None else segments
    until, group = np.empty(one.ops, np.int32), one.op_group.tolist()
    latest: dict[int, int] = {}
    for row in reversed(rows if segments is None else list(chain(*by_tape(graph, rows)))):
        for op in row:
            end = next(last for last in reversed(row) if last >= op)
            until[op] = max(end, latest.get(group[op], end))
        for op in row:
            latest.setdefault(group[op], int(until[op]))
    first = [row[0] for row in rows if row[0] != loss]
    links = tuple((op, op, -1 if 0 <= loss < op else 1) for op in first)
    late = np.arange(one.tensors) >= len(graph.tensors)
    return Unrolled(one, late, microbatches, loss, links, until)


def _let_go(
    tensors: NDArray[np.int64],
    made: NDArray[np.int64],
    begun: NDArray[np.int64],
    read: NDArray[np.int64],
    turns: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The tensors that arrive on a device, and when the launching thread lets go of each.

    That is with the first arrival of one that is made after the turn behind the last reader's has
    begun. All times are positions in the order of launches.

    Args:
        tensors: The tensor of each reading there.
        made: When the turn of its maker begins.
        begun: When the turn of its reader begins, with which it arrives.
        read: When it is read.
        turns: When the turns of the device begin, and the end of the step.
    """
    there, at = np.unique(tensors, return_inverse=True)
    makes, first = np.empty(len(there), np.int64), np.full(len(there), turns[-1])
    last = np.zeros(len(there), np.int64)
    makes[at] = made
    np.minimum.at(first, at, begun)
    np.maximum.at(last, at, read)
    order = np.argsort(makes)
    soonest = np.minimum.accumulate(np.append(first[order], turns[-1])[::-1])[::-1]
    behind = turns[np.searchsorted(turns, last, side="right")]
    return there, soonest[np.searchsorted(makes[order], behind, side="right")]


@final
@dataclass(frozen=True, eq=False)
class Turns:
    """The turns of a placed graph.

    Attributes:
        graph: The graph of one micro-batch.
        problem: The same with its cluster and constraints.
        placement: Its placement; the order does not matter here.
        segments: The ops of every segment, in their order.
        microbatches: Their number.
        joined: Whether there is one loss for all batches.
        gpus: The GPU of every device, where streams hold what crosses (docs/runtime.md); empty
            where none is on one.
    """

    graph: OpGraph
    problem: Problem
    placement: Placement
    segments: tuple[tuple[int, ...], ...]
    microbatches: int
    joined: bool = False
    gpus: tuple[str | None, ...] = ()

    def __post_init__(self) -> None:
        home = self.placement.devices
        if sorted(chain(*self.segments)) != list(range(len(home))) or not all(self.segments):
            raise InputError("segments must have every op of the graph once, and none be empty.")
        for row in self.segments:
            if len({home[op] for op in row}) > 1:
                names = [self.graph.ops[op].name for op in row]
                raise InputError(f"a segment is on one device, but {names} are on several.")
        makers, readers = self.problem.arrays.edges()
        if (self._part_of[makers] > self._part_of[readers]).any():
            raise InputError("segments must be in topological order: one reads what a later makes.")
        if self._loss >= 0 and len(self.segments[self._loss]) > 1:
            raise InputError("a loss that is joined must be alone in its segment.")

    @cached_property
    def _part_of(self) -> NDArray[np.int32]:
        part_of = np.empty(len(self.graph.ops), np.int32)
        for index, row in enumerate(self.segments):
            part_of[list(row)] = index
        return part_of

    @property
    def _loss(self) -> int:
        """The segment of a loss that is joined, or -1."""
        joined = self.joined and self.graph.is_training
        return int(self._part_of[self.graph.n_forward]) if joined else -1

    @cached_property
    def homes(self) -> tuple[int, ...]:
        """The device of every segment."""
        return tuple(self.placement.devices[row[0]] for row in self.segments)

    @cached_property
    def ops(self) -> tuple[Unrolled, Problem]:
        """The copies of all ops, on their devices."""
        joined, segments = self.joined, self.segments
        copies = unrolled(self.graph, self.microbatches, joined=joined, segments=segments)
        pinned = self._pinned(self.problem.arrays, self.placement.devices)
        return copies, copies.problem(self.problem, pinned)

    def clocked(self, order: Sequence[tuple[int, int]]) -> tuple[int, list[int]]:
        """The step of all copies in this order, and the peak of every pool.

        It is that by the clock, or as one thread launches the turns, whichever is more.
        """
        copies, problem = self.ops
        timeline = problem.timeline()
        timeline.fold(*launches(copies, self.placement.devices, self.segments, order))
        launched = self.launched_peaks(order)
        return timeline.makespan(), list(map(max, timeline.peaks(), launched))

    def launched_peaks(self, order: Sequence[Sequence[int]]) -> list[int]:
        """The peak of every pool where one thread launches all turns in this order.

        An allocator gives and takes as the host launches, whatever runs meanwhile. So a copy is
        there when its tensor's turn has been launched, and stays while turns of other devices are
        that the clock has run by then. On a GPU what has arrived stays until another arrives that
        is made after the turn behind its last reader's has begun; what another lane reads, or is
        kept to another phase, stays to the end.
        """
        copies, problem = self.ops
        arrays, pool = copies.arrays, np.array(problem.device_pool)
        where, rank = launches(copies, self.placement.devices, self.segments, order)
        tensors, index = np.arange(arrays.tensors), arrays.per_consumer(np.arange(arrays.tensors))
        makers, readers = arrays.edges()
        stays = (arrays.kept > 0) | (np.diff(arrays.consumer_begin) == 0)
        gpus, n = np.array([str(gpu or "") for gpu in self.gpus or [None] * len(pool)]), len(rank)
        other, on = where[makers] != where[readers], gpus[where]
        arrives, leaves = (other & (on[ends] != "") for ends in (readers, makers))
        devices_of, where = where, pool[where]
        position, ends = np.empty((2, n), np.int64)
        position[rank] = np.arange(n)
        sizes = [len(self.segments[at]) for at, _ in order]
        ends[rank] = np.repeat(np.cumsum(sizes), sizes)  # of its turn
        begins, home, sent = (row[arrays.producer] for row in (position, where, ends))
        gone = sent.copy()  # when what is sent has left
        np.maximum.at(gone, index[leaves], ends[readers[leaves]])
        until = np.zeros((len(problem.pool_memory), arrays.tensors), np.int64)
        np.maximum.at(until, (where[readers], index), position[readers] + 1)
        begun = ends - np.repeat(sizes, sizes)[position]
        passes = arrives & (on[makers] != on[readers]) & (not self.joined)
        stay = arrives & ~passes
        until[where[readers[stay]], index[stay]] = n
        for device in np.unique(devices_of[readers[passes]]).tolist():
            mine = passes & (devices_of[readers] == device)
            turns = np.append(np.unique(begun[devices_of == device]), n)
            made, came, read = begun[makers[mine]], begun[readers[mine]], position[readers[mine]]
            there, taken = _let_go(index[mine], made, came, read, turns)
            np.maximum.at(until, (np.full(len(there), pool[device]), there), taken)
        copied = until > 0
        copied[home, tensors] = False
        last = np.maximum(until[home, tensors], np.where(copied.any(axis=0), gone, 0))
        change = np.zeros((len(until), n + 1), np.int64)
        np.add.at(change, (home, begins), arrays.nbytes)
        np.subtract.at(change, (home, np.where(stays, n, last)), arrays.nbytes)
        at, tensor = copied.nonzero()
        np.add.at(change, (at, sent[tensor]), arrays.nbytes[tensor])
        np.subtract.at(change, (at, until[at, tensor]), arrays.nbytes[tensor])
        live = np.cumsum(change, axis=1)[:, :n]
        live[where[rank], np.arange(n)] += arrays.workspace[rank]
        state = np.zeros(len(live), np.int64)
        np.add.at(state, where, arrays.persistent)
        return [int(peak) for peak in live.max(axis=1, initial=0) + state]

    def _pinned(self, arrays: GraphArrays, devices: Sequence[int]) -> NDArray[np.bool_]:
        """True for the device of every group."""
        allowed = np.zeros((len(self.problem.cluster.devices), arrays.groups), np.bool_)
        allowed[list(devices), arrays.op_group] = True
        return allowed

    @cached_property
    def _one(self) -> tuple[GraphArrays, NDArray[np.bool_], Problem]:
        """The segments of one micro-batch as ops; which of their tensors are late bytes."""
        first = [self.homes.index(device) for device in self.homes]
        coarse = Coarse(self.problem, self._part_of, np.array(first, np.int32))
        return coarse.arrays, coarse.tensors >= len(self.graph.tensors), coarse.lumped()

    @cached_property
    def _lines(self) -> tuple[Link, ...]:
        """The order of a device's segments in a batch, as a program keeps it for its sums.

        Those for which none waits, such as gradients of parameters apart, may be later.
        """
        n, lines = self.graph.n_forward, defaultdict[tuple[int, int], list[int]](list)
        for at in np.unique(self._one[0].edges()[0]).tolist():
            op = self.segments[at][0]
            lines[self.homes[at], (op > n) - (op < n)].append(at)
        return tuple((*pair, 0) for line in lines.values() for pair in pairwise(line))

    def capped(self, most: int = 0, *, urgent: bool = False) -> tuple[Unrolled, Problem]:
        """The turns as ops, with at most so many batches in flight on a device; 0 is no limit.

        A batch is in flight on a device from its first segment there to its last. With `urgent`,
        index order is by depth: turns for which none waits are last, and of the others that with
        the longest path before it is first. So a backward turn comes before a forward one, and
        both before one that only makes gradients of parameters.
        """
        arrays, late, one = self._one
        links = self._lines
        if most:
            rows = list(enumerate(self.homes))
            on = [[row for row, other in rows if other == home] for home in set(self.homes)]
            links += tuple((own[-1], own[0], most) for own in on)
        copies = Unrolled(arrays, late, self.microbatches, self._loss, links)
        if urgent:
            copies = replace(copies, ranked=self._by_depth(copies.position))
        return copies, copies.problem(one, self._pinned(arrays, self.homes))

    def _by_depth(self, position: NDArray[np.int32]) -> NDArray[np.int32]:
        """The index order of urgent turns, given the usual one."""
        arrays = self._one[0]
        makers, readers = arrays.edges()
        order = np.argsort(makers, kind="stable")
        ends = (makers[order], readers[order], np.zeros(len(makers)))
        depth = np.array(_core.longest_paths(arrays.times.astype(np.float64), *ends)[0])
        depth[np.bincount(makers, minlength=arrays.ops) == 0] = -1
        turns, first = np.unique(position.reshape(-1), return_index=True)
        rank = np.empty(len(turns), np.int32)
        rank[np.lexsort((turns, -np.tile(depth, self.microbatches)[first]))] = turns
        return rank[position]

    def order_of(self, copies: Unrolled, ops: Iterable[int]) -> tuple[tuple[int, int], ...]:
        """The turns that these ops are, with the batches of every segment in order.

        It is a topological order as that of the ops is one: the k-th turn of a segment comes after
        the k-th turns of those that it reads from.
        """
        segment = np.empty(copies.arrays.ops, np.int64)
        segment[copies.position] = np.arange(len(self.segments))
        past, loss = [0] * len(self.segments), self._loss
        turns = []
        for at in segment[list(ops)].tolist():
            turns.append((at, self.microbatches - 1 - past[at] if 0 <= loss < at else past[at]))
            past[at] += 1
        return tuple(turns)


def launches(
    copies: Unrolled,
    devices: Sequence[int],
    segments: Sequence[Sequence[int]],
    turns: Iterable[Sequence[int]],
) -> tuple[NDArray[np.int32], ...]:
    """Devices of the copies of all ops, and an order: that of these turns."""
    where = np.empty(copies.arrays.ops, np.int32)
    where[copies.position] = np.array(devices, np.int32)
    rows = [copies.position[batch, list(segments[at])] for at, batch in turns]
    return where, np.concatenate([where[:0], *rows])


def copies_of(graph: OpGraph, placement: Placement) -> tuple[OpGraph, Placement]:
    """The graph of all micro-batches, and the placement of it: as `simulate` runs them.

    Op i of batch b has the index `b * len(graph.ops) + i`.

    Raises:
        InputError: The turns are of other segments than those of the placed graph.
    """
    segments, count = segments_of(graph, placement), placement.microbatches
    if len(placement.turns) != len(segments) * count:
        raise InputError(
            f"the placement has {len(placement.turns)} turns, but the placed graph has "
            f"{len(segments)} segments for each of {count} micro-batches; solve again."
        )
    copies = unrolled(graph, count, segments=segments)
    whole = copies.graph(graph.explicit)
    rows = launches(copies, placement.devices, segments, placement.turns)
    devices, order = (tuple(row.tolist()) for row in rows)
    return whole, Placement(whole.digest, devices, order, placement.placer, placement.stats)
