"""Segments of a placement, and tapes of segments.

    order of device 0    a b c        f g        a segment ends where an output must leave,
    order of device 1           d e              and begins where an input arrives

Segments are ordered by their ends, which is a topological order of the operators, so each depends
only on earlier ones, and lanes that run their segments in this order cannot deadlock.

Complexity: O(ops + reads), with a sort of the arrivals at each op.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TypeAlias, final

from baechi.records.graph import StepStructure
from baechi.records.instructions import Place
from baechi.records.placement import Schedule
from baechi.validation import FrozenDict


@final
@dataclass(frozen=True, slots=True)
class Piece:
    """Operators that a device runs without interruption, in the placement's order."""

    device: int
    ops: tuple[int, ...]


Event: TypeAlias = Place | Piece  # a place to which a copy of its tensor arrives, or a piece


@final
@dataclass
class _Open:
    """An unfinished piece; `known` counts, per device, the pieces that ended before it."""

    known: list[int]
    ops: list[int] = field(default_factory=list)
    arrivals: list[int] = field(default_factory=list)
    leaving: bool = False


@final
class Clock:
    """Start times of pieces and transfers in the schedule of a step."""

    def __init__(self, step: StepStructure, schedule: Schedule) -> None:
        self._step = step
        self._spans = {span.op: span for span in schedule.spans}
        self._sent = {(row.tensor, row.dst): row.start_ns for row in schedule.transfers}
        self._leaving: dict[int, list[int]] = {}
        for row in sorted(schedule.transfers, key=lambda row: row.start_ns):
            self._leaving.setdefault(row.src, []).append(row.start_ns)

    def start_ns(self, event: Event) -> int:
        """Start of a piece or of an arrival's transfer; at once if there is no transfer."""
        if isinstance(event, Piece):
            return self._spans[event.ops[0]].start_ns
        made = self._spans[self._step.tensors[event.tensor].producer].end_ns
        return self._sent.get((event.tensor, event.device), made)

    def sends_between(self, device: int, op: int, later: int) -> bool:
        """True if a transfer from the device begins after one op's start, by another's."""
        moments = self._leaving.get(device, [])
        ends = (self._spans[op].start_ns, self._spans[later].start_ns)
        first, last = (bisect_right(moments, end) for end in ends)
        return first < last


@final
@dataclass
class Cutter:
    """Cutter of a phase into pieces and arrivals.

    An output that must leave ends a piece; but operators that take no time may still follow it.
    Operators that run others forward again are alone in their pieces.

    Args:
        step: The step.
        devices: Device of every operator.
        order: The operators of the phase, topological; inputs made by others are there already.
        apart: Whether copies run in parallel with the operators. Then every arrival begins a piece.
            Else a copy that could be made before the current piece began is made there.
        clock: If given, a piece also ends where the clock begins to send something from its
            device, so that tensors waiting only to be sent are freed then.
        instant: Operators that take no time.
    """

    step: StepStructure
    devices: Sequence[int]
    order: Sequence[int]
    apart: bool
    clock: Clock | None
    instant: Set[int]

    def __post_init__(self) -> None:
        self._rank = {op: i for i, op in enumerate(self.order)}
        self._events: list[Event] = []
        self._open: dict[int, _Open] = {}
        n = max((self.devices[op] for op in self.order), default=-1) + 1
        self._ended = [[0] * n for _ in range(n)]  # pieces known to have ended, per device
        self._after: dict[int, tuple[int, ...]] = {}  # the same, at the end of an op's piece
        self._here: set[tuple[int, int]] = set()

    def cut(self) -> list[Event]:
        """The pieces and arrivals in launch order."""
        for op in self.order:
            self._add(op)
        for device in sorted(self._open, key=lambda d: self._rank[self._open[d].ops[0]]):
            self._close(device)
        return self._events

    def _add(self, op: int) -> None:
        """Put the next operator into its device's piece, or into a new one."""
        device = self.devices[op]
        missing = self._missing(op, device)
        producers = [self.step.tensors[tensor].producer for tensor in missing]
        for producer in producers:
            if producer not in self._after:
                self._close(self.devices[producer])
        if device in self._open and self._is_over(self._open[device], op, producers):
            self._close(device)
        piece = self._open.get(device)
        if piece is None:
            known = self._ended[device]
            for producer in producers:
                known = list(map(max, known, self._after[producer]))
            self._ended[device] = known
            piece = self._open[device] = _Open(list(known))
        self._here.update((tensor, device) for tensor in missing)
        arriving = [tensor for tensor in missing if not self.step.tensors[tensor].order]
        if self.apart:
            self._events += [Place(tensor, device) for tensor in arriving]
        else:
            piece.arrivals += arriving
        piece.ops.append(op)
        piece.leaving |= self._leaves(op, device)

    def _close(self, device: int) -> None:
        """End the device's piece."""
        piece = self._open.pop(device)
        self._events += [Place(tensor, device) for tensor in piece.arrivals]
        self._events.append(Piece(device, tuple(piece.ops)))
        self._ended[device][device] += 1
        after = tuple(self._ended[device])
        for op in piece.ops:
            self._after[op] = after

    def _missing(self, op: int, device: int) -> list[int]:
        """Its inputs that are only on other devices, in sending order."""
        missing = [
            tensor
            for tensor in self.step.op_inputs[op]
            if (producer := self.step.tensors[tensor].producer) in self._rank
            and self.devices[producer] != device
            and (tensor, device) not in self._here
        ]
        return sorted(missing, key=lambda t: (self._rank[self.step.tensors[t].producer], t))

    def _is_over(self, piece: _Open, op: int, producers: Sequence[int]) -> bool:
        """True if the operator, which needs what others make, cannot be in the piece."""
        last = piece.ops[-1]
        sends = self.clock is not None and self.clock.sends_between(self.devices[op], last, op)
        late = any(
            self.apart or self._after[other][home] > piece.known[home]
            for other in producers
            for home in [self.devices[other]]
        )
        recomputes = (last in self.step.units) != (op in self.step.units)
        return recomputes or late or sends or (piece.leaving and op not in self.instant)

    def _leaves(self, op: int, device: int) -> bool:
        return any(
            consumer in self._rank and self.devices[consumer] != device
            for tensor in self.step.op_outputs[op]
            for consumer in self.step.tensors[tensor].consumers
        )


Key: TypeAlias = tuple[int, int, int]  # level, -(backward piece), recompute op or -1


def tapes_of(
    step: StepStructure,
    ops: Sequence[int],
    backward_piece: Mapping[int, int],
    again: Mapping[int, int] = FrozenDict(),
    in_turn: Set[int] = frozenset(),
) -> list[tuple[int | None, tuple[int, ...]]]:
    """The tapes of a forward piece, in an order in which they can run.

    Each is (backward piece or None, operators). (level, -backward piece) never decreases along an
    edge (`docs/runtime.md`, How tapes are found). Recomputed operators have separate tapes for each
    operator that recomputes them.

    Operators of a tape ascend: autograd adds up gradients in the reverse order of the forward's
    operators, and sums must equal the unsplit model's. If the piece has no backward, they are in
    the placement's order, so that no more memory is held than planned.

    Args:
        step: The step.
        ops: Operators of the piece, in topological order.
        backward_piece: The piece of every operator's backward, if it has one.
        again: The recompute operator of every operator whose forward runs again.
        in_turn: Operators that ascend in every tape, such as those that draw random numbers.
    """
    inside = set(ops)
    last_piece: dict[int, int] = {}
    for op in (op for op in ops if op in again):
        last_piece[again[op]] = max(last_piece.get(again[op], 0), backward_piece.get(op, 0))
    key_of: dict[int, Key | None] = {}
    for op in ops:
        producers = (step.tensors[tensor].producer for tensor in step.op_inputs[op])
        before = [key for p in producers if p in inside and (key := key_of[p]) is not None]
        last = max(before, default=None)
        unit = again.get(op, -1)
        if op in backward_piece:
            rank = (-backward_piece[op], unit)
        elif unit >= 0:
            rank = (-last_piece[unit], unit)
        elif last is None:
            key_of[op] = None
            continue
        else:
            rank = (last[1], -1)  # free choice: next to its last input
        level = 0 if last is None else last[0] + (last[1:] > rank)
        key_of[op] = (level, *rank)
    first = min((key for key in key_of.values() if key is not None), default=None)
    for op in reversed(ops):  # without inputs: next to its first reader
        if key_of[op] is None:
            outputs = (step.tensors[tensor] for tensor in step.op_outputs[op])
            readers = (c for tensor in outputs for c in tensor.consumers if c in inside)
            keys = [key for c in readers if (key := key_of[c]) is not None]
            chosen = min(keys, default=first)
            key_of[op] = None if chosen is None else (*chosen[:2], -1)
    tapes: dict[Key | None, list[int]] = {}
    for op in sorted(ops):
        tapes.setdefault(key_of[op], []).append(op)
    if None in tapes:
        drawing = [op for op in ops if op in in_turn]
        return [(None, tuple(ops if drawing == sorted(drawing) else sorted(ops)))]
    rows = [tuple(tapes[key]) for key in sorted(key for key in tapes if key is not None)]
    return [
        (next((backward_piece[op] for op in row if op in backward_piece), None), row)
        for row in rows
    ]
