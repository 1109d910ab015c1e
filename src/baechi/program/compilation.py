"""Compilation of a placement into a program: instructions per lane, with waits and frees.

1. `cutting` cuts the forward and the backward into pieces, and forward pieces into tapes.
2. `emission` writes the instructions in launch order, with waits and frees.

Complexity: O((ops + reads) * lanes), with a binary search per free.
"""

from collections.abc import Sequence, Set
from typing import final

from baechi.errors import InputError
from baechi.program.cutting import Arrival, Clock, Event, Piece, cut, tapes_of
from baechi.program.emission import Writer
from baechi.records.graph import StepStructure
from baechi.records.instructions import (
    Copy,
    Lane,
    Phase,
    Place,
    Program,
    Segment,
    Tape,
)
from baechi.records.placement import Placement, Schedule


def compile_program(
    structure: StepStructure,
    placement: Placement,
    *,
    instant: Set[int] = frozenset(),
    copy_lanes: bool = False,
    one_thread: bool = False,
    in_turn: Sequence[int] = (),
    schedule: Schedule | None = None,
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

    Raises:
        InputError: The placement is of another step, or its order is not topological.
    """
    if len(placement.devices) != len(structure.ops):
        raise InputError(
            f"the placement is of another graph: it has {len(placement.devices)} ops, and this "
            f"step has {len(structure.ops)}; solve the graph of this step."
        )
    return _Compiler(
        structure, placement, instant, copy_lanes, one_thread, frozenset(in_turn), schedule
    ).program()


@final
class _Compiler:
    """State of `compile_program`."""

    def __init__(
        self,
        structure: StepStructure,
        placement: Placement,
        instant: Set[int],
        copy_lanes: bool,
        one_thread: bool,
        in_turn: frozenset[int],
        schedule: Schedule | None,
    ) -> None:
        self._step = structure
        self._digest = placement.graph_digest
        self._instant = instant
        self._schedule = schedule
        self._one_thread = one_thread
        self._devices = placement.devices
        self._copy_lanes = copy_lanes
        self._in_turn = in_turn
        self._n, self._twins, self._units = structure.n_forward, structure.twins, structure.units
        self._again = {op: at for at, unit in self._units.items() for op in unit}
        self._backward = {op: twin for op, twin in enumerate(self._twins) if twin >= 0}
        n_devices = max(placement.devices, default=0) + 1
        self._lanes = [Lane(device) for device in range(n_devices)]
        if copy_lanes:
            self._lanes += [Lane(device, copies=True) for device in range(n_devices)]
        self._orders = [[op for op in placement.order if op < self._n]]
        if structure.is_training:
            self._orders.append([op for op in placement.order if op > self._n])
        self._check_order(placement.order)

    def _check_order(self, order: Sequence[int]) -> None:
        rank = {op: i for i, op in enumerate(order)}
        for tensor in self._step.tensors:
            for consumer in tensor.consumers:
                if rank[consumer] < rank[tensor.producer]:
                    names = (self._step.ops[op].name for op in (consumer, tensor.producer))
                    raise InputError(
                        "the placement's order runs {!r} before {!r}, whose tensor it reads; "
                        "an order must be topological.".format(*names)
                    )

    def program(self) -> Program:
        """The whole program."""
        clock = None if self._schedule is None else Clock(self._step, self._schedule)
        events = [
            cut(
                *(self._step, self._devices, order, self._copy_lanes),
                *(clock, self._units.keys(), self._instant),
            )
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
            rows = tapes_of(self._step, piece.ops, backward_piece, self._again, self._in_turn)
            forward.append(list(range(len(tapes), len(tapes) + len(rows))))
            for number, (index, _) in zip(forward[-1], rows, strict=True):
                if index is not None:
                    backward[index].append(number)
            tapes += [Tape(piece.device, ops, self._again.get(ops[0], -1)) for _, ops in rows]
        # A tape's readers are in later tapes, so they come first in the backward.
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
            self._digest,
            tuple(op.name for op in self._step.ops[: self._n]),
            self._twins,
            tuple(self._lanes),
            tuple(tapes),
            tuple(phases),
        )

    def _at_once(self, events: Sequence[Event]) -> list[Event]:
        """The same events, each arrival right after the piece that makes its tensor."""
        arrivals: dict[int, list[Arrival]] = {}
        for event in events:
            if isinstance(event, Arrival):
                producer = self._step.tensors[event.tensor].producer
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
        kept = {t for t in values if self._step.tensors[t].kept}
        segments = self._segments(number, events, runs, values)
        writer = Writer(len(self._lanes), self._copy_lanes, self._one_thread)
        for place in given:
            writer.give(place)
        index = 0
        for event in events:
            if isinstance(event, Arrival):
                producer = self._step.tensors[event.tensor].producer
                writer.copy(Copy(event.tensor, self._devices[producer], event.device))
            else:
                writer.run(index, segments[index])
                index += 1
        keep = tuple(Place(t, self._devices[self._step.tensors[t].producer]) for t in sorted(kept))
        lanes, launch = writer.written(frozenset(keep))
        return Phase(tuple(segments), lanes, launch, tuple(given), keep)

    def _values(self, members: set[int], tape_of: dict[int, int]) -> tuple[list[Place], set[int]]:
        """The caller's values, and every tensor that leaves its tape."""
        given: dict[Place, None] = {}
        values: set[int] = set()
        for index, tensor in enumerate(self._step.tensors):
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
                for tensor in self._step.op_inputs[op]
                if tensor in values and self._step.tensors[tensor].producer not in inside
            }
            writes = {t for op in piece.ops for t in self._step.op_outputs[op] if t in values}
            updates = {shared[op] for op in piece.ops if op in shared}
            again = piece.ops[0] in self._units
            ran = {op for at in piece.ops for op in self._units[at]} if again else inside
            if (number == 0 or again) and ran & self._in_turn:
                updates.add(len(self._step.groups))
            read, written, updated = (tuple(sorted(s)) for s in (reads, writes, updates))
            segments.append(Segment(piece.device, tuple(row), read, written, updated, again))
        return segments

    def _shared_state(self) -> dict[int, int]:
        """The group of every forward operator with others in it, with which it may share state."""
        shared: dict[int, int] = {}
        for index, members in enumerate(self._step.groups.values()):
            forward = [op for op in members if op < self._n]
            if len(forward) > 1:
                shared.update((op, index) for op in forward)
        return shared
