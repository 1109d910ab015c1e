"""Compilation of a placement into a program: instructions per lane, with waits and frees.

1. `cutting` cuts the forward and the backward into pieces, and forward pieces into tapes.
2. With micro-batches every piece has a turn for each. `_in_order` takes the order of turns that was
   asked for, but for what has to be in order: data, writes of state, sums of gradients.
3. `InstructionWriter` writes the instructions of a phase in launch order.

Complexity: O((instructions + reads) * lanes), and O(turns log(turns)) for their order.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import pairwise, product, repeat
from typing import Any, TypeAlias, final

import networkx

from baechi.problem.cutting import Clock, Cutter, Event, Piece, tapes_of
from baechi.program.instruction_writer import InstructionWriter
from baechi.records.graph import StepStructure
from baechi.records.instructions import (
    Copy,
    Lane,
    Phase,
    Place,
    Program,
    Run,
    Segment,
    Tape,
)
from baechi.records.placement import Placement, Schedule

Turns: TypeAlias = Sequence[tuple[int, int]]  # (piece, micro-batch)
Order: TypeAlias = Callable[[Sequence[Sequence[int]]], Turns]


def compile_program(structure: StepStructure, placement: Placement, **options: Any) -> Program:
    """The program of a placement of this step.

    Args:
        structure: Structure of a training or inference step; may be a graph, whose costs are
            ignored.
        placement: Placement of the step.
        options: Of `Compiler`.

    Raises:
        InputError: The placement is of another step, parts a group, or its order is not
            topological.
    """
    structure.check_placement(placement.devices, placement.order)
    return Compiler(structure, placement, **options).program()


@final
@dataclass(frozen=True, kw_only=True)
class Compiler:
    """The makers of a program, and how it is to run.

    Attributes:
        step: The structure.
        placement: Of it.
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
    """

    step: StepStructure = field(kw_only=False)
    placement: Placement = field(kw_only=False)
    instant: Set[int] = frozenset()
    copy_lanes: bool = False
    one_thread: bool = False
    in_turn: Set[int] = frozenset()
    schedule: Schedule | None = None
    batches: int = 1
    joined: bool = True
    writers: Set[int] | None = None
    order: Order | None = None

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
        by_batch = product(range(self.batches), range(len(rows)))
        turns = list(self.order(rows) if self.order else ((at, batch) for batch, at in by_batch))
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
        rank = {turn: i for i, turn in enumerate(turns)}
        waits: networkx.DiGraph[tuple[int, int]] = networkx.DiGraph()
        waits.add_nodes_from(rank)
        waits.add_edges_from(pair for chain in chains for pair in pairwise(chain))
        return list(networkx.lexicographical_topological_sort(waits, rank.__getitem__))

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
        writer = InstructionWriter(given, n_lanes, self.copy_lanes, self.one_thread)
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
            if tensor.order or tensor.producer in self.step.units:
                continue  # nothing is handed over, or it is in the graph of its tape
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
