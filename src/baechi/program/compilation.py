"""Compilation of a placement into a program: instructions per lane, with waits and frees.

1. `cutting` cuts the forward and the backward into pieces, and forward pieces into tapes.
2. With micro-batches every piece has a turn for each. `_in_order` takes the order of turns that was
   asked for, but for what has to be in order: data, writes of state, sums of gradients.
3. `_Writer` writes the instructions of a phase in launch order. It keeps a vector clock per lane:
   the number of instructions of every lane that have ended before its next one. `docs/runtime.md`
   (Waits and frees) says where it writes these.

Complexity: O((instructions + reads) * lanes), with a binary search per free.
"""

import heapq
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import pairwise, repeat
from typing import Final, TypeAlias, final

from baechi.problem.cutting import Clock, Cutter, Event, Piece, tapes_of
from baechi.records.graph import OpGraph, StepStructure
from baechi.records.instructions import (
    Copy,
    Free,
    Instruction,
    Lane,
    Phase,
    Place,
    Program,
    Run,
    Segment,
    Tape,
    Wait,
)
from baechi.records.placement import Placement, Schedule

# The instructions of every lane, and the lanes in launch order of the instructions.
Written: TypeAlias = tuple[tuple[tuple[Instruction, ...], ...], tuple[int, ...]]
Turns: TypeAlias = Sequence[tuple[int, int]]  # (piece, micro-batch)
Order: TypeAlias = Callable[[Sequence[Sequence[int]]], Turns]
_STATE: Final = -1  # the "device" of state updated in place: the device of its readers


def compile_program(
    structure: StepStructure,
    placement: Placement,
    *,
    instant: Set[int] = frozenset(),
    copy_lanes: bool = False,
    one_thread: bool = False,
    in_turn: Sequence[int] = (),
    schedule: Schedule | None = None,
    batches: int = 1,
    joined: bool = True,
    writers: Set[int] | None = None,
    order: Order | None = None,
) -> Program:
    """The program of a placement of this step.

    Args:
        structure: Structure of a training or inference step; may be a graph, whose costs are
            ignored.
        placement: Placement of the step.
        instant: Operators that take no time: they may follow an output that must leave.
        copy_lanes: Whether each device copies incoming tensors on a separate lane, in parallel with
            its operators. A tensor is then freed by the device that holds it, as stream-bound
            allocators require; else by the first lane whose clock covers its uses.
        one_thread: Whether one thread runs everything in launch order. Then outputs are copied as
            soon as they are made, and everything is freed right after its last use.
        in_turn: Forward operators whose segments run in launch order across all devices, such as
            those that draw from one random generator.
        schedule: Schedule of the placement. The launch order is then the clock's, and pieces end
            where the clock sends something: with one thread no device exceeds the predicted memory.
        batches: Number of micro-batches.
        joined: Whether the caller computes one loss for all, between a phase forward and a phase
            backward. Else each has a loss of its own, and the step is one phase.
        writers: Forward operators that write state; with several batches, those that share state
            with one of these take turns batch by batch. By default all that may share any.
        order: Makes an order of turns from the operators of every piece: those of the forward, the
            loss alone, those of the backward. By default batch by batch. In a phase that goes
            backward alone the last batch is the first.

    Raises:
        InputError: The placement is of another step, parts a group, or its order is not
            topological.
    """
    structure.check_placement(placement.devices, placement.order)
    options = (
        copy_lanes,
        one_thread,
        frozenset(in_turn),
        schedule,
        batches,
        joined,
        writers,
        order,
    )
    return _Compiler(structure, placement, instant, *options).program()


def instant_ops(graph: OpGraph) -> Set[int]:
    """The ops that take no time."""
    return {op for op, row in enumerate(graph.ops) if row.time_ns == 0}


@final
@dataclass(frozen=True)
class _Compiler:
    """The arguments of `compile_program`."""

    step: StepStructure
    placement: Placement
    instant: Set[int]
    copy_lanes: bool
    one_thread: bool
    in_turn: Set[int]
    schedule: Schedule | None
    batches: int
    joined: bool
    writers: Set[int] | None
    order: Order | None

    def program(self) -> Program:
        """The whole program."""
        step, order, devices = self.step, self.placement.order, self.placement.devices
        n_devices = max(devices, default=0) + 1
        lanes = [Lane(device) for device in range(n_devices)]
        if self.copy_lanes:
            lanes += [Lane(device, copies=True) for device in range(n_devices)]
        orders = [[op for op in order if op < step.n_forward]]
        if step.is_training:
            orders.append([op for op in order if op > step.n_forward])
        clock = None if self.schedule is None else Clock(step, self.schedule)
        events = [
            Cutter(step, devices, row, self.copy_lanes, clock, self.instant).cut() for row in orders
        ]
        if self.one_thread:
            events = [self._at_once(row) for row in events]
        if clock is not None:
            events = [sorted(row, key=clock.start_ns) for row in events]
        pieces = [[event for event in row if isinstance(event, Piece)] for row in events]
        backward_piece: dict[int, int] = {}
        if len(pieces) > 1:
            piece_of = {op: i for i, piece in enumerate(pieces[1]) for op in piece.ops}
            twins = enumerate(step.twins)
            backward_piece = {op: piece_of[twin] for op, twin in twins if twin >= 0}
        again = {op: at for at, unit in step.units.items() for op in unit}
        tapes: list[Tape] = []
        forward: list[list[int]] = []
        backward: list[list[int]] = [[] for _ in pieces[-1]]
        for piece in pieces[0]:
            rows = tapes_of(step, piece.ops, backward_piece, again, self.in_turn)
            forward.append(list(range(len(tapes), len(tapes) + len(rows))))
            for number, (index, _) in zip(forward[-1], rows, strict=True):
                if index is not None:
                    backward[index].append(number)
            tapes += [Tape(piece.device, ops, again.get(ops[0], -1)) for _, ops in rows]
        # A tape's readers are in later tapes, so they come first in the backward.
        runs = [forward, [sorted(row, reverse=True) for row in backward]]
        unit_tapes: dict[int, list[int]] = {}
        for index, tape in enumerate(tapes):
            unit_tapes.setdefault(tape.again, []).append(index)
        for piece, run in zip(pieces[-1], runs[-1], strict=True):
            run += [tape for op in piece.ops if op in step.units for tape in unit_tapes[op]]
        drafts = [
            self._draft(number, set(orders[number]), row, runs[number], tapes)
            for number, row in enumerate(events)
        ]
        ops = [[piece.ops for piece in row] for row in pieces]
        written = [draft.rows for draft in drafts]
        if self.batches > 1 or not self.joined:
            drafts, written = self._unrolled(drafts, ops)
        phases = map(self._phase, drafts, written, repeat(len(lanes)))
        return Program(
            self.placement.graph_digest,
            tuple(op.name for op in step.ops[: step.n_forward]),
            step.twins,
            tuple(lanes),
            tuple(tapes),
            tuple(phases),
            self.batches,
        )

    def _unrolled(
        self, drafts: list["_Draft"], ops: Sequence[Sequence[tuple[int, ...]]]
    ) -> tuple[list["_Draft"], list[list[Copy | Run]]]:
        """The phases, one where every micro-batch has a loss, and their rows for all of these."""
        n, trains = len(ops[0]), len(drafts) > 1
        rows = [*ops[0], *([(self.step.n_forward,), *ops[1]] if trains else ())]
        turns = list(self.order(rows) if self.order else self._batch_by_batch(len(rows)))
        forward = [(piece, batch) for piece, batch in turns if piece < n]
        backward = [(piece - n - 1, batch) for piece, batch in turns if piece > n]
        parts = [forward, backward]
        if trains and not self.joined:
            drafts = [drafts[0].followed_by(drafts[1])]
            parts = [[(at - (at > n), batch) for at, batch in turns if at != n]]
        written = []
        for number, (draft, part) in enumerate(zip(drafts, parts, strict=False)):
            blocks = draft.blocks(self.one_thread)
            in_order = self._in_order(draft, part, descending=number > 0)
            written.append(
                [replace(row, batch=batch) for piece, batch in in_order for row in blocks[piece]]
            )
        return drafts, written

    def _batch_by_batch(self, n: int) -> Iterator[tuple[int, int]]:
        for batch in range(self.batches):
            yield from ((piece, batch) for piece in range(n))

    def _in_order(self, draft: "_Draft", turns: Turns, *, descending: bool) -> Turns:
        """The turns, each as early as it was asked for, after those that have to come before it.

        These are of the batch before; of its inputs; on its device, the pieces before it, since
        they make what sums of gradients begin with; and for state that is written in place, all of
        the batch before.
        """
        batches = range(self.batches)[::-1] if descending else range(self.batches)
        segments = draft.segments
        maker = {tensor: i for i, row in enumerate(segments) for tensor in row.writes}
        forward = {t: i for i, row in enumerate(segments) if not row.backward for t in row.tapes}
        chains: list[list[tuple[int, int]]] = []
        states: dict[int, list[int]] = defaultdict(list)
        homes: dict[tuple[int, bool], list[int]] = defaultdict(list)
        for index, row in enumerate(segments):
            chains.append([(index, batch) for batch in batches])
            before = {maker[tensor] for tensor in row.reads if tensor in maker}
            if row.backward:
                before |= {forward[tape] for tape in row.tapes if tape in forward}
            chains += [[(at, batch), (index, batch)] for at in before for batch in batches]
            homes[row.device, row.backward].append(index)
            for state in () if row.again else row.updates:
                states[state].append(index)
        chains += [[(at, batch) for at in row] for row in homes.values() for batch in batches]
        chains += [[(at, batch) for batch in batches for at in row] for row in states.values()]
        after: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        missing: dict[tuple[int, int], int] = defaultdict(int)
        for chain in chains:
            for one, two in pairwise(chain):
                after[one].append(two)
                missing[two] += 1
        rank = {turn: i for i, turn in enumerate(turns)}
        ready = [(rank[turn], turn) for turn in rank if not missing[turn]]
        heapq.heapify(ready)
        found = []
        while ready:
            _, turn = heapq.heappop(ready)
            found.append(turn)
            for other in after[turn]:
                missing[other] -= 1
                if not missing[other]:
                    heapq.heappush(ready, (rank[other], other))
        return found

    def _at_once(self, events: Sequence[Event]) -> list[Event]:
        """The same events, each arrival right after the piece that makes its tensor."""
        arrivals: dict[int, list[Place]] = {}
        for event in events:
            if isinstance(event, Place):
                producer = self.step.tensors[event.tensor].producer
                arrivals.setdefault(producer, []).append(event)
        rows: list[Event] = []
        for event in events:
            if isinstance(event, Piece):
                rows.append(event)
                for op in event.ops:
                    rows += arrivals.get(op, [])
        return rows

    def _draft(
        self,
        number: int,
        members: Set[int],
        events: Sequence[Event],
        runs: Sequence[Sequence[int]],
        tapes: Sequence[Tape],
    ) -> "_Draft":
        tape_of: dict[int, int] = {}
        for index, tape in enumerate(tapes):
            tape_of.update((self.step.twins[op] if number else op, index) for op in tape.ops)
        tape_of.update((op, -1) for op in self.step.units)
        given, values = self._values(members, tape_of)
        kept = (tensor for tensor in sorted(values) if self.step.tensors[tensor].kept)
        keep = [Place(tensor, self._home(tensor)) for tensor in kept]
        shared = {} if number else self._shared_state()
        segments: list[Segment] = []
        rows: list[Copy | Run] = []
        for event in events:
            if isinstance(event, Place):
                rows.append(Copy(event.tensor, self._home(event.tensor), event.device))
            else:
                tapes_run = runs[len(segments)]
                rows.append(Run(len(segments)))
                segments.append(self._segment(number, event, tapes_run, values, shared))
        return _Draft(segments, rows, given, keep)

    def _phase(self, draft: "_Draft", rows: Iterable[Copy | Run], n_lanes: int) -> Phase:
        """The phase that has these instructions, and waits and frees besides."""
        batches = range(self.batches)
        given, kept = (
            tuple(replace(place, batch=batch) for batch in batches for place in places)
            for places in (draft.given, draft.kept)
        )
        writer = _Writer(given, n_lanes, self.copy_lanes, self.one_thread)
        for row in rows:
            if isinstance(row, Copy):
                writer.copy(row)
            else:
                writer.run(row, draft.segments[row.segment])
        lanes, launch = writer.written(set(kept))
        return Phase(tuple(draft.segments), lanes, launch, given, kept)

    def _home(self, tensor: int) -> int:
        return self.placement.devices[self.step.tensors[tensor].producer]

    def _values(self, members: Set[int], tape_of: dict[int, int]) -> tuple[list[Place], set[int]]:
        """The caller's values, and every tensor that leaves its tape."""
        given: dict[Place, None] = {}
        values: set[int] = set()
        for index, tensor in enumerate(self.step.tensors):
            readers = tuple(op for op in tensor.consumers if op in members)
            if tensor.producer in self.step.units:
                continue  # it is in the graph of its tape
            if tensor.producer in members:
                own = tape_of[tensor.producer]
                if tensor.kept or any(tape_of[op] != own for op in readers):
                    values.add(index)
            elif tensor.producer == self.step.n_forward and readers:
                given.update((Place(index, self.placement.devices[op]), None) for op in readers)
                values.add(index)
        return list(given), values

    def _segment(
        self,
        number: int,
        piece: Piece,
        tapes: Sequence[int],
        values: set[int],
        shared: Mapping[int, int],
    ) -> Segment:
        inside = set(piece.ops)
        reads = {
            tensor
            for op in piece.ops
            for tensor in self.step.op_inputs[op]
            if tensor in values and self.step.tensors[tensor].producer not in inside
        }
        writes = {t for op in piece.ops for t in self.step.op_outputs[op] if t in values}
        updates = {shared[op] for op in piece.ops if op in shared}
        again = piece.ops[0] in self.step.units
        ran = {op for at in piece.ops for op in self.step.units[at]} if again else inside
        if (number == 0 or again) and ran & self.in_turn:
            updates.add(len(self.step.groups))
        read, written, updated = (tuple(sorted(s)) for s in (reads, writes, updates))
        return Segment(piece.device, tuple(tapes), read, written, updated, again, number > 0)

    def _shared_state(self) -> dict[int, int]:
        """The group of every forward operator with others in it, with which it may share state."""
        shared: dict[int, int] = {}
        for index, members in enumerate(self.step.groups.values()):
            forward = [op for op in members if op < self.step.n_forward]
            writers = None if self.batches == 1 else self.writers
            if len(forward) > 1 and (writers is None or not writers.isdisjoint(forward)):
                shared.update((op, index) for op in forward)
        return shared


@final
@dataclass(frozen=True)
class _Draft:
    """The runs and copies of a phase, as they are for one micro-batch."""

    segments: list[Segment]
    rows: list[Copy | Run]
    given: list[Place]
    kept: list[Place]

    def followed_by(self, other: "_Draft") -> "_Draft":
        """Both as one phase."""
        n = len(self.segments)
        later = [Run(n + row.segment) if isinstance(row, Run) else row for row in other.rows]
        return _Draft(
            [*self.segments, *other.segments],
            [*self.rows, *later],
            [*self.given, *other.given],
            [*self.kept, *other.kept],
        )

    def blocks(self, at_once: bool) -> list[list[Copy | Run]]:
        """The instructions of every turn: copies of what it is the first to read, then its run.

        If `at_once`, before those of what it makes.
        """
        found: list[list[Copy | Run]] = [[] for _ in self.segments]
        maker = {tensor: i for i, row in enumerate(self.segments) for tensor in row.writes}
        arriving: dict[int, list[Copy | Run]] = defaultdict(list)
        for row in self.rows:
            if isinstance(row, Run):
                device = self.segments[row.segment].device
                found[row.segment] = [*arriving.pop(device, ()), row, *found[row.segment]]
            elif at_once and row.tensor in maker:
                found[maker[row.tensor]].append(row)
            else:
                arriving[row.dst].append(row)
        return found


@final
class _Writer:
    """Writer of a phase's instructions in launch order."""

    def __init__(
        self, given: Iterable[Place], n_lanes: int, copy_lanes: bool, one_thread: bool
    ) -> None:
        self._copy_lanes = copy_lanes
        self._one_thread = one_thread
        self._lanes: list[list[Instruction]] = [[] for _ in range(n_lanes)]
        # After each: [lane][other] counts the ended instructions of the other lane, ascending.
        self._known: list[list[list[int]]] = [[[] for _ in range(n_lanes)] for _ in range(n_lanes)]
        self._now = [[0] * n_lanes for _ in range(n_lanes)]
        self._launch: list[tuple[int, int]] = []  # (lane, position)
        self._launched: list[list[int]] = [[] for _ in range(n_lanes)]  # position in `_launch`
        # (lane, position) of every access to a place; its last write.
        self._uses: dict[Place, list[tuple[int, int]]] = {place: [] for place in given}
        self._written: dict[Place, tuple[int, int]] = {}

    def run(self, row: Run, segment: Segment) -> None:
        """Write the turn of a segment, after the writes of its inputs."""
        device = segment.device
        reads = [Place(tensor, device, row.batch) for tensor in segment.reads]
        writes = [Place(tensor, device, row.batch) for tensor in segment.writes]
        state = [Place(index, _STATE) for index in segment.updates]
        self._write(device, row, [*reads, *state], [*writes, *state])

    def copy(self, row: Copy) -> None:
        """Write a copy, after the write of its source."""
        lane = row.dst + (len(self._lanes) // 2 if self._copy_lanes else 0)
        src, dst = (Place(row.tensor, device, row.batch) for device in (row.src, row.dst))
        self._write(lane, row, [src], [dst])

    def _write(
        self, lane: int, row: Instruction, reads: Sequence[Place], writes: Sequence[Place]
    ) -> None:
        """Write an instruction after the last writes of what it reads."""
        self._wait(lane, [self._written[place] for place in reads if place in self._written])
        done = lane, len(self._lanes[lane])
        self._append(lane, row)
        for place in reads:
            if place.device != _STATE:
                self._uses[place].append(done)
        for place in writes:
            self._written[place] = done
            if place.device != _STATE:
                self._uses[place] = [done]

    def _wait(self, lane: int, events: Sequence[tuple[int, int]]) -> None:
        """Wait for events not yet known to have ended, latest launched first."""
        now = self._now[lane]
        for other, position in sorted(events, key=lambda e: -self._launched[e[0]][e[1]]):
            if now[other] <= position:
                theirs = [row[position] for row in self._known[other]]
                self._now[lane] = list(map(max, now, theirs))
                self._append(lane, Wait(other, position))
                now = self._now[lane]

    def _append(self, lane: int, row: Instruction) -> None:
        position = len(self._lanes[lane])
        self._lanes[lane].append(row)
        self._now[lane][lane] = position + 1
        for row_of_other, ended in zip(self._known[lane], self._now[lane], strict=True):
            row_of_other.append(ended)
        self._launched[lane].append(len(self._launch))
        self._launch.append((lane, position))

    def written(self, kept: Set[Place]) -> Written:
        """The lanes and the launch order, with all frees."""
        if self._one_thread:
            return self._freed_at_once(kept)
        after: dict[tuple[int, int], list[Free]] = {}
        late: dict[int, list[tuple[Free, list[int]]]] = {}
        for place, uses in self._uses.items():
            if place in kept:
                continue
            need = [0] * len(self._lanes)
            for lane, position in uses:
                need[lane] = max(need[lane], position + 1)
            free = Free(place.tensor, place.device, place.batch)
            spot = self._first_to_know(place.device, need)
            if spot is None:
                late.setdefault(place.device, []).append((free, need))
            else:
                after.setdefault(spot, []).append(free)
        for lane in sorted(late):
            needs = list(map(max, zip(*(need for _, need in late[lane]), strict=True)))
            self._wait(lane, [(other, n - 1) for other, n in enumerate(needs) if n])
            last = (lane, len(self._lanes[lane]) - 1)
            after.setdefault(last, []).extend(free for free, _ in late[lane])
        return self._with_frees({}, after)

    def _freed_at_once(self, kept: Set[Place]) -> Written:
        """The same, with each free right after the last use, which waits for the other uses."""
        before: dict[tuple[int, int], list[Wait]] = {}
        after: dict[tuple[int, int], list[Free]] = {}
        left = self._uses.keys() - kept
        for place in sorted(left, key=lambda p: (p.batch, p.tensor, p.device)):
            uses = self._uses[place]
            last = max(uses, key=lambda use: self._launched[use[0]][use[1]])
            after.setdefault(last, []).append(Free(place.tensor, place.device, place.batch))
            before.setdefault(last, []).extend(
                Wait(lane, position)
                for lane, position in uses
                if lane != last[0] and self._known[last[0]][lane][last[1]] <= position
            )
        return self._with_frees(before, after)

    def _first_to_know(self, holder: int, need: Sequence[int]) -> tuple[int, int] | None:
        """The first launched instruction after which its lane knows that all of this has ended."""
        best: tuple[int, int] | None = None
        lanes = [holder] if self._copy_lanes else range(len(self._lanes))
        for lane in lanes:
            known = zip(self._known[lane], need, strict=True)
            position = max(bisect_left(ended, n) for ended, n in known if n)
            if position < len(self._lanes[lane]) and (
                best is None or self._launched[lane][position] < self._launched[best[0]][best[1]]
            ):
                best = (lane, position)
        return best

    def _with_frees(
        self,
        before: dict[tuple[int, int], list[Wait]],
        after: dict[tuple[int, int], list[Free]],
    ) -> Written:
        """Insert waits and frees, and renumber the positions in waits accordingly."""
        moved: list[list[int]] = []
        for lane, rows in enumerate(self._lanes):
            shift, places = 0, []
            for position in range(len(rows)):
                shift += len(before.get((lane, position), ()))
                places.append(position + shift)
                shift += len(after.get((lane, position), ()))
            moved.append(places)
        lanes: list[list[Instruction]] = [[] for _ in self._lanes]
        launch: list[int] = []
        for lane, position in self._launch:
            rows = [*before.get((lane, position), ()), self._lanes[lane][position]]
            lanes[lane] += [
                Wait(row.lane, moved[row.lane][row.position]) if isinstance(row, Wait) else row
                for row in rows
            ]
            frees = after.get((lane, position), ())
            lanes[lane] += frees
            launch += [lane] * (len(rows) + len(frees))
        return tuple(map(tuple, lanes)), tuple(launch)
