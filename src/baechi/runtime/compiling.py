"""From a placement to its program: which lane does what, and what waits for what.

1. `cutting` cuts the forward and the backward into pieces, and forward pieces into tapes.
2. `_Writer` writes the instructions in launch order and keeps a vector clock per lane: how many
   instructions of every lane have ended before what the lane does next. A wait is written only
   where the clock does not know yet, the latest first, so none implies another.
3. `_Writer.frees` puts every free where all uses are first known to have ended; what no lane learns
   until the end of the phase is freed there, after waits that delay nobody.

Complexity: O((ops + reads) * lanes), with a binary search per free.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final, TypeAlias, final

from baechi.errors import InputError
from baechi.graph import OpGraph
from baechi.placement import Placement, Schedule
from baechi.runtime.cutting import Arrival, Clock, Event, Piece, cut, tapes_of
from baechi.runtime.program import (
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
from baechi.training import mirrored, recomputed


def compile_program(
    graph: OpGraph,
    placement: Placement,
    *,
    copy_lanes: bool = False,
    one_thread: bool = False,
    in_turn: Sequence[int] = (),
    schedule: Schedule | None = None,
) -> Program:
    """The program of a placement of this graph.

    Args:
        graph: Of a training step or of an inference.
        placement: Of the graph.
        copy_lanes: Whether each device copies what arrives on a lane of its own, beside what it
            computes. A tensor is then freed by the device that holds it, which is what allocators
            that are bound to a stream need; else by the lane that knows first.
        one_thread: Whether one thread is to do everything in launch order. Then what leaves is
            copied as soon as it is made, and everything is freed right after its last use.
        in_turn: Forward operators whose segments run one after another, on whichever devices, in
            launch order, as those that draw from one random generator do.
        schedule: Of the placement. The launch order is then the clock's own, and pieces end where
            the clock sends something: with one thread no device holds more than the clock says.

    Raises:
        InputError: The placement is of another graph, or its order is not topological.
    """
    if placement.graph_digest != graph.digest:
        raise InputError(
            f"the placement is of another graph (digest {placement.graph_digest[:12]}...) than "
            f"this one (digest {graph.digest[:12]}...); solve this graph."
        )
    return _Compiler(
        graph, placement, copy_lanes, one_thread, frozenset(in_turn), schedule
    ).program()


@final
class _Compiler:
    """What `compile_program` knows on its way."""

    def __init__(
        self,
        graph: OpGraph,
        placement: Placement,
        copy_lanes: bool,
        one_thread: bool,
        in_turn: frozenset[int],
        schedule: Schedule | None,
    ) -> None:
        self._graph = graph
        self._schedule = schedule
        self._one_thread = one_thread
        self._devices = placement.devices
        self._copy_lanes = copy_lanes
        self._in_turn = in_turn
        self._n, self._twins = mirrored(graph)
        self._units = recomputed(graph)
        self._again = {op: at for at, unit in self._units.items() for op in unit.ops}
        self._backward = {op: twin for op, twin in enumerate(self._twins) if twin >= 0}
        n_devices = max(placement.devices, default=0) + 1
        self._lanes = [Lane(device) for device in range(n_devices)]
        if copy_lanes:
            self._lanes += [Lane(device, copies=True) for device in range(n_devices)]
        self._orders = [[op for op in placement.order if op < self._n]]
        if self._n < len(graph.ops):
            self._orders.append([op for op in placement.order if op > self._n])
        self._check_order(placement.order)

    def _check_order(self, order: Sequence[int]) -> None:
        rank = {op: i for i, op in enumerate(order)}
        for tensor in self._graph.tensors:
            for consumer in tensor.consumers:
                if rank[consumer] < rank[tensor.producer]:
                    names = (self._graph.ops[op].name for op in (consumer, tensor.producer))
                    raise InputError(
                        "the placement's order runs {!r} before {!r}, whose tensor it reads; "
                        "an order must be topological.".format(*names)
                    )

    def program(self) -> Program:
        """The whole program."""
        clock = None if self._schedule is None else Clock(self._graph, self._schedule)
        events = [
            cut(self._graph, self._devices, order, self._copy_lanes, clock, self._units.keys())
            for order in self._orders
        ]
        if self._one_thread:
            events = [self._at_once(row) for row in events]
        if clock is not None:
            events = [sorted(row, key=clock.start_ns) for row in events]
        pieces = [[event for event in row if isinstance(event, Piece)] for row in events]
        backward_piece: dict[int, int] = {}
        if len(pieces) > 1:
            piece_of = {op: i for i, piece in enumerate(pieces[1]) for op in piece.ops}
            backward_piece = {op: piece_of[twin] for op, twin in self._backward.items()}
        tapes: list[Tape] = []
        forward: list[list[int]] = []
        backward: list[list[int]] = [[] for _ in pieces[-1]]
        for piece in pieces[0]:
            rows = tapes_of(self._graph, piece.ops, backward_piece, self._again)
            forward.append(list(range(len(tapes), len(tapes) + len(rows))))
            for number, (index, _) in zip(forward[-1], rows, strict=True):
                if index is not None:
                    backward[index].append(number)
            tapes += [Tape(piece.device, ops, self._again.get(ops[0], -1)) for _, ops in rows]
        # A tape's readers are in tapes after it, so going backward they come first.
        runs = [forward, [sorted(row, reverse=True) for row in backward]]
        again: dict[int, list[int]] = {}
        for index, tape in enumerate(tapes):
            again.setdefault(tape.again, []).append(index)
        for piece, row in zip(pieces[-1], runs[-1], strict=True):
            row += [tape for op in piece.ops if op in self._units for tape in again[op]]
        phases = [
            self._phase(number, row, runs[number], tapes) for number, row in enumerate(events)
        ]
        return Program(
            self._graph.digest,
            tuple(op.name for op in self._graph.ops[: self._n]),
            self._twins,
            tuple(self._lanes),
            tuple(tapes),
            tuple(phases),
        )

    def _at_once(self, events: Sequence[Event]) -> list[Event]:
        """The same events, each arrival right after the piece that makes what arrives."""
        arrivals: dict[int, list[Arrival]] = {}
        for event in events:
            if isinstance(event, Arrival):
                producer = self._graph.tensors[event.tensor].producer
                arrivals.setdefault(producer, []).append(event)
        rows: list[Event] = []
        for event in events:
            if isinstance(event, Piece):
                rows.append(event)
                for op in event.ops:
                    rows += arrivals.get(op, [])
        return rows

    def _phase(
        self, number: int, events: Sequence[Event], runs: Sequence[Sequence[int]], tapes: list[Tape]
    ) -> Phase:
        members = set(self._orders[number])
        tape_of: dict[int, int] = {}
        for index, tape in enumerate(tapes):
            tape_of.update((self._twins[op] if number else op, index) for op in tape.ops)
        tape_of.update((op, -1) for op in self._units)
        given, values = self._values(members, tape_of)
        kept = {t for t in values if self._graph.tensors[t].kept}
        segments = self._segments(number, events, runs, values)
        writer = _Writer(len(self._lanes), self._copy_lanes, self._one_thread)
        for place in given:
            writer.give(place)
        index = 0
        for event in events:
            if isinstance(event, Arrival):
                producer = self._graph.tensors[event.tensor].producer
                writer.copy(Copy(event.tensor, self._devices[producer], event.device))
            else:
                writer.run(index, segments[index])
                index += 1
        keep = tuple(Place(t, self._devices[self._graph.tensors[t].producer]) for t in sorted(kept))
        lanes, launch = writer.written(frozenset(keep))
        return Phase(tuple(segments), lanes, launch, tuple(given), keep)

    def _values(self, members: set[int], tape_of: dict[int, int]) -> tuple[list[Place], set[int]]:
        """What the caller gives, and every tensor that leaves its tape."""
        given: dict[Place, None] = {}
        values: set[int] = set()
        for index, tensor in enumerate(self._graph.tensors):
            readers = tuple(op for op in tensor.consumers if op in members)
            if tensor.producer in self._units:
                continue  # it is in the graph of its tape
            if tensor.producer in members:
                own = tape_of[tensor.producer]
                if tensor.kept or any(tape_of[op] != own for op in readers):
                    values.add(index)
            elif tensor.producer == self._n and readers:
                given.update((Place(index, self._devices[op]), None) for op in readers)
                values.add(index)
        return list(given), values

    def _segments(
        self,
        number: int,
        events: Sequence[Event],
        runs: Sequence[Sequence[int]],
        values: set[int],
    ) -> list[Segment]:
        shared = self._shared_state() if number == 0 else {}
        segments = []
        pieces = [event for event in events if isinstance(event, Piece)]
        for piece, row in zip(pieces, runs, strict=True):
            inside = set(piece.ops)
            reads = {
                tensor
                for op in piece.ops
                for tensor in self._graph.op_inputs[op]
                if tensor in values and self._graph.tensors[tensor].producer not in inside
            }
            writes = {t for op in piece.ops for t in self._graph.op_outputs[op] if t in values}
            updates = {shared[op] for op in piece.ops if op in shared}
            again = piece.ops[0] in self._units
            ran = {op for at in piece.ops for op in self._units[at].ops} if again else inside
            if (number == 0 or again) and ran & self._in_turn:
                updates.add(len(self._graph.groups))
            read, written, updated = (tuple(sorted(s)) for s in (reads, writes, updates))
            segments.append(Segment(piece.device, tuple(row), read, written, updated, again))
        return segments

    def _shared_state(self) -> dict[int, int]:
        """The group of every forward operator that has company there: it may share state."""
        shared: dict[int, int] = {}
        for index, members in enumerate(self._graph.groups.values()):
            forward = [op for op in members if op < self._n]
            if len(forward) > 1:
                shared.update((op, index) for op in forward)
        return shared


_Written: TypeAlias = tuple[tuple[tuple[Instruction, ...], ...], tuple[int, ...]]
_STATE: Final = -1  # the "device" of state that is updated in place: it is where its readers are


@final
class _Writer:
    """Writes a phase's instructions in launch order."""

    def __init__(self, n_lanes: int, copy_lanes: bool, one_thread: bool) -> None:
        self._copy_lanes = copy_lanes
        self._holder_frees = copy_lanes
        self._one_thread = one_thread
        self._lanes: list[list[Instruction]] = [[] for _ in range(n_lanes)]
        # After each of them: [lane][other] is how much of the other had ended by then, ascending.
        self._known: list[list[list[int]]] = [[[] for _ in range(n_lanes)] for _ in range(n_lanes)]
        self._now = [[0] * n_lanes for _ in range(n_lanes)]
        self._launch: list[tuple[int, int]] = []  # (lane, position)
        self._launched: list[list[int]] = [[] for _ in range(n_lanes)]  # place in `_launch`
        # (lane, position) of everything that touched a place; the last write of it.
        self._uses: dict[Place, list[tuple[int, int]]] = {}
        self._written: dict[Place, tuple[int, int]] = {}

    def give(self, place: Place) -> None:
        """What is there before the phase begins."""
        self._uses[place] = []

    def run(self, index: int, segment: Segment) -> None:
        """A segment, after what it reads."""
        lane = segment.device
        reads = [Place(tensor, segment.device) for tensor in segment.reads]
        state = [Place(index, _STATE) for index in segment.updates]
        done = self._write(lane, Run(index), [*reads, *state])
        for tensor in segment.writes:
            place = Place(tensor, segment.device)
            self._uses[place] = [done]
            self._written[place] = done
        for place in state:
            self._written[place] = done

    def copy(self, row: Copy) -> None:
        """A copy, after what it copies was written."""
        lane = row.dst + (len(self._lanes) // 2 if self._copy_lanes else 0)
        done = self._write(lane, row, [Place(row.tensor, row.src)])
        place = Place(row.tensor, row.dst)
        self._uses[place] = [done]
        self._written[place] = done

    def _write(self, lane: int, row: Instruction, reads: Sequence[Place]) -> tuple[int, int]:
        """An instruction after the last writes of what it reads; where it is."""
        self._wait(lane, [self._written[place] for place in reads if place in self._written])
        done = self._append(lane, row)
        for place in reads:
            if place.device != _STATE:
                self._uses[place].append(done)
        return done

    def _wait(self, lane: int, events: Sequence[tuple[int, int]]) -> None:
        """Wait for what the lane does not know to have ended, the latest launched first."""
        now = self._now[lane]
        for other, position in sorted(events, key=lambda e: -self._launched[e[0]][e[1]]):
            if now[other] <= position:
                theirs = [row[position] for row in self._known[other]]
                self._now[lane] = list(map(max, now, theirs))
                self._append(lane, Wait(other, position))
                now = self._now[lane]

    def _append(self, lane: int, row: Instruction) -> tuple[int, int]:
        position = len(self._lanes[lane])
        self._lanes[lane].append(row)
        self._now[lane][lane] = position + 1
        for row_of_other, ended in zip(self._known[lane], self._now[lane], strict=True):
            row_of_other.append(ended)
        self._launched[lane].append(len(self._launch))
        self._launch.append((lane, position))
        return lane, position

    def written(self, kept: frozenset[Place]) -> _Written:
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
            free = Free(place.tensor, place.device)
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

    def _freed_at_once(self, kept: frozenset[Place]) -> _Written:
        """The same, each free right after the last use, which waits for those not known of."""
        before: dict[tuple[int, int], list[Wait]] = {}
        after: dict[tuple[int, int], list[Free]] = {}
        for place in sorted(self._uses.keys() - kept, key=lambda p: (p.tensor, p.device)):
            uses = self._uses[place]
            last = max(uses, key=lambda use: self._launched[use[0]][use[1]])
            after.setdefault(last, []).append(Free(place.tensor, place.device))
            before.setdefault(last, []).extend(
                Wait(lane, position)
                for lane, position in uses
                if lane != last[0] and self._known[last[0]][lane][last[1]] <= position
            )
        return self._with_frees(before, after)

    def _first_to_know(self, holder: int, need: Sequence[int]) -> tuple[int, int] | None:
        """The instruction after which a lane knows that all this has ended, launched first."""
        best: tuple[int, int] | None = None
        lanes = [holder] if self._holder_frees else range(len(self._lanes))
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
    ) -> _Written:
        """Put waits and frees in, and let waits name the positions that instructions have then."""
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
