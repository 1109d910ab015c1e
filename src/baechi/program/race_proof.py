"""Proof that a program has no race, whatever the speeds of its lanes.

Instruction a happens before b if both are on one lane and a is earlier, or if b's lane has waited
for a, directly or through other lanes. If two instructions access one place and at least one of
them writes, updates or frees it, they must be ordered: then every interleaving of the lanes has the
same result. `_Checker` visits the instructions in an order that the waits allow (a deadlock has
none) and keeps vector clocks: the number of instructions of each lane that happened before a lane's
current one. Each access is compared with the earlier accesses to its place.

Source: vector clocks as in FastTrack (Flanagan, Freund, PLDI 2009), on one run of plain data; since
a program has no branches, one run represents all.

Complexity: O(waits * lanes + accesses).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NoReturn, TypeAlias, final

from baechi.errors import InputError
from baechi.records.instructions import Copy, Program, Run, Segment, Wait

# Places without a device: state, updated in place on its operators' device, and the graph of a tape
# that runs again, made then and used by its backward; and, where a phase goes both ways, what the
# forward of a tape leaves for that.
_STATE: Final = -1
_GRAPH: Final = -2
_LEFT: Final = -3
_Key: TypeAlias = tuple[int, int, int]  # tensor, device, batch
_Event: TypeAlias = tuple[int, int]  # an instruction: (lane, position)


@final
@dataclass(slots=True)
class _Touched:
    """Accesses to a place."""

    written: tuple[_Event, ...] = ()  # the last write, if there was one
    since: list[_Event] = field(default_factory=list)  # reads after the last write
    freed: _Event | None = None


def check_program(program: Program) -> None:
    """Prove the program, phase by phase.

    Raises:
        InputError: A value may be read before it is written, written while it is read, freed before
            its last use, twice or never; a copy or a segment is missing or on a wrong lane; or
            the lanes deadlock. The text names the instruction.
    """
    tapes_run: tuple[list[int], ...] = ([], [], [])
    for number, phase in enumerate(program.phases):
        _Checker(program, number).check()
        for segment in phase.segments:
            tapes_run[segment.backward + segment.again].extend(segment.tapes)
    trains = len(program.phases) > 1 or program.is_training
    _check_tapes(program, tapes_run if trains else tapes_run[:1])


def _check_tapes(program: Program, tapes_run: Sequence[Sequence[int]]) -> None:
    """Check that operators are on one tape, and tapes run once, back and again at most once."""
    ops = sorted(op for tape in program.tapes for op in tape.ops)
    if ops != list(range(len(program.names))):
        raise InputError(
            f"the tapes of this program hold {len(ops)} ops, {len(set(ops))} different ones, of "
            f"{len(program.names)}; each must be on one tape. Compile the placement again."
        )
    whole = {i for i, t in enumerate(program.tapes) if any(program.twins[op] >= 0 for op in t.ops)}
    again = {i for i, tape in enumerate(program.tapes) if tape.again >= 0}
    wanted = [set(range(len(program.tapes))), whole, again]
    phases = ("forward", "backward", "recomputation")
    for what, tapes, every in zip(phases, tapes_run, wanted, strict=False):
        if sorted(tapes) != sorted(every):
            raise InputError(
                f"the {what} runs tapes {sorted(tapes)} where each of {sorted(every)} must run "
                "once. Compile the placement again."
            )


@final
class _Checker:
    """Checker of one phase, instruction by instruction."""

    def __init__(self, program: Program, number: int) -> None:
        self._program = program
        self._number = number
        self._phase = program.phases[number]
        self._touched: dict[_Key, _Touched] = {}
        self._ran: set[tuple[int, int]] = set()
        self._both = len({segment.backward for segment in self._phase.segments}) > 1
        # In which order batches come; the last turn of each segment, and of each lane and batch.
        self._sign = -1 if number else 1
        self._batch_of: dict[tuple[str, int], int] = {}
        self._latest: dict[tuple[int, int, bool], int] = {}
        self._now = [[0] * len(program.lanes) for _ in program.lanes]

    def check(self) -> None:
        """Prove the phase."""
        phase = self._phase
        if len(phase.lanes) != len(self._program.lanes):
            raise InputError(
                f"a phase has {len(phase.lanes)} lanes and its program {len(self._program.lanes)}; "
                "give each lane its instructions."
            )
        for place in phase.given:
            self._touched[place.tensor, place.device, place.batch] = _Touched()
        self._go()
        self._check_end()
        self._check_launch()

    def _go(self) -> None:
        """Visit every instruction as soon as its lane reaches it and its wait is satisfied."""
        lanes = self._phase.lanes
        position = [0] * len(lanes)
        awaited = {(r.lane, r.position) for rows in lanes for r in rows if isinstance(r, Wait)}
        clock_at: dict[_Event, list[int]] = {}  # after each awaited instruction
        waiting: dict[_Event, list[int]] = {}  # the lanes that wait for each
        ready = [lane for lane, rows in enumerate(lanes) if rows]
        while ready:
            lane = ready.pop()
            rows = lanes[lane]
            here = position[lane]
            while here < len(rows):
                row = rows[here]
                at = lane, here
                if isinstance(row, Wait):
                    self._check_wait(at, row)
                    event = row.lane, row.position
                    clock = clock_at.get(event)
                    if clock is None:
                        waiting.setdefault(event, []).append(lane)
                        break
                    self._now[lane] = list(map(max, self._now[lane], clock))
                elif isinstance(row, Run):
                    self._check_run(at, row)
                elif isinstance(row, Copy):
                    self._check_copy(at, row)
                else:
                    self._free(at, (row.tensor, row.device, row.batch))
                self._now[lane][lane] = here + 1
                if at in awaited:
                    clock_at[at] = self._now[lane].copy()
                    ready += waiting.pop(at, ())
                here += 1
            position[lane] = here
        stuck = [lane for lane, rows in enumerate(lanes) if position[lane] < len(rows)]
        if stuck:
            names = "; ".join(self._name((lane, position[lane])) for lane in stuck)
            raise InputError(f"deadlock: these wait for each other or for nothing: {names}.")

    def _check_wait(self, at: _Event, row: Wait) -> None:
        lanes = self._phase.lanes
        if not 0 <= row.lane < len(lanes) or not 0 <= row.position < len(lanes[row.lane]):
            where = f"lane {row.lane}, instruction {row.position}"
            raise InputError(f"{self._raw(at)} waits for what does not exist: {where}.")

    def _check_run(self, at: _Event, row: Run) -> None:
        if not 0 <= row.segment < len(self._phase.segments):
            raise InputError(f"{self._raw(at)} runs a segment that does not exist.")
        segment: Segment = self._phase.segments[row.segment]
        own = self._program.lanes[at[0]]
        if own.copies or own.device != segment.device:
            raise InputError(f"{self._name(at)} is on device {segment.device}'s segment.")
        batch = row.batch
        if not 0 <= batch < self._program.batches:
            raise InputError(f"{self._raw(at)} is for batch {batch}, which does not exist.")
        if (row.segment, batch) in self._ran:
            raise InputError(f"{self._name(at)} runs a segment that has run.")
        self._ran.add((row.segment, batch))
        if self._program.batches > 1:
            self._check_turn(at, row, segment)
        for tensor in segment.reads:
            self._read(at, (tensor, segment.device, batch))
        for tensor in segment.writes:
            self._write(at, (tensor, segment.device, batch))
        for state in segment.updates:
            self._update(at, state)
        for tape in segment.tapes:
            self._check_graph(at, segment, tape, batch)

    def _check_graph(self, at: _Event, segment: Segment, tape: int, batch: int) -> None:
        """Check what the runs of a tape leave for one another besides tensors."""
        runs_again = self._program.tapes[tape].again >= 0
        left, graph = (tape, _LEFT, batch), (tape, _GRAPH, batch)
        if self._both and not segment.backward:
            self._write(at, left)
        elif self._both and (segment.again or not runs_again):
            self._read(at, left)
        if segment.again:
            self._write(at, graph)
        elif segment.backward and runs_again:
            self._read(at, graph)

    def _check_turn(self, at: _Event, row: Run, segment: Segment) -> None:
        """Check that batches come in their order, and the sums of gradients so in theirs.

        Sums and state are of one device, so of one lane: there the batches of a segment ascend, or
        descend where the phase goes backward alone; the segments of a batch ascend, forward and
        backward; and so do the batches that update some state.
        """
        states = () if segment.again else [("state", state) for state in segment.updates]
        for key in [("segment", row.segment), *states]:
            last = self._batch_of.get(key, row.batch)
            if (row.batch - last) * self._sign < 0:
                raise InputError(f"{self._name(at)} comes after batch {last} of {key[0]} {key[1]}.")
            self._batch_of[key] = row.batch
        lane = at[0], row.batch, segment.backward
        if self._latest.get(lane, -1) > row.segment:
            raise InputError(f"{self._name(at)} comes after segment {self._latest[lane]}.")
        self._latest[lane] = row.segment

    def _check_copy(self, at: _Event, row: Copy) -> None:
        own = self._program.lanes[at[0]]
        beside = any(other.copies for other in self._program.lanes)
        if row.src == row.dst or own.device != row.dst or own.copies != beside:
            raise InputError(f"{self._name(at)} is on the wrong lane.")
        self._read(at, (row.tensor, row.src, row.batch))
        self._write(at, (row.tensor, row.dst, row.batch))

    def _unordered(self, lane: int, events: Iterable[_Event]) -> _Event | None:
        """The first event that need not have happened before the lane's current instruction."""
        now = self._now[lane]
        for event in events:
            if now[event[0]] <= event[1] and event[0] != lane:
                return event
        return None

    def _read(self, at: _Event, key: _Key) -> None:
        touched = self._touched.get(key)
        if touched is None:
            self._object(at, key, "reads it before anybody writes it")
        if touched.freed is not None:
            self._object(at, key, "reads it after a free", touched.freed)
        if write := self._unordered(at[0], touched.written):
            self._object(at, key, "may read it before", write)
        touched.since.append(at)

    def _write(self, at: _Event, key: _Key) -> None:
        if key in self._touched:
            self._object(at, key, "writes what was written, given or freed")
        self._touched[key] = _Touched((at,))

    def _update(self, at: _Event, state: int) -> None:
        touched = self._touched.setdefault((state, _STATE, 0), _Touched())
        if other := self._unordered(at[0], touched.written):
            what = f"updates state {state} while another may: {self._name(other)}."
            raise InputError(f"{self._name(at)} {what}")
        touched.written = (at,)

    def _free(self, at: _Event, key: _Key) -> None:
        touched = self._touched.get(key)
        if touched is None:
            self._object(at, key, "frees what nobody wrote")
        if touched.freed is not None:
            self._object(at, key, "frees it a second time", touched.freed)
        if event := self._unordered(at[0], (*touched.written, *touched.since)):
            self._object(at, key, "may free it before", event)
        touched.freed = at

    def _check_end(self) -> None:
        """Check that exactly the kept values remain."""
        batches = range(self._program.batches)
        turns = {(i, batch) for i in range(len(self._phase.segments)) for batch in batches}
        if missing := turns - self._ran:
            segments = sorted({segment for segment, _ in missing})
            raise InputError(f"segments {segments} never run. Compile the placement again.")
        kept = {(place.tensor, place.device, place.batch) for place in self._phase.kept}
        for key, touched in sorted(self._touched.items()):
            if key[1] < 0:
                continue
            if touched.freed is None and key not in kept:
                raise InputError(f"{self._place(key)} is never freed.")
            if touched.freed is not None and key in kept:
                raise InputError(f"{self._name(touched.freed)}: {self._place(key)} is kept.")
        for key in sorted(kept - self._touched.keys()):
            raise InputError(f"{self._place(key)}, which is kept, is never written.")

    def _check_launch(self) -> None:
        """Check that the launch order has every instruction once, after those that it waits for."""
        lanes = self._phase.lanes
        done = [0] * len(lanes)
        for lane in self._phase.launch:
            if not 0 <= lane < len(lanes) or done[lane] >= len(lanes[lane]):
                raise InputError(f"the launch order goes on where lane {lane} has ended.")
            row = lanes[lane][done[lane]]
            if isinstance(row, Wait) and done[row.lane] <= row.position:
                what = self._name((lane, done[lane]))
                raise InputError(f"{what} is launched before what it waits for.")
            done[lane] += 1
        if done != [len(rows) for rows in lanes]:
            raise InputError("the launch order leaves instructions out.")

    def _object(self, at: _Event, key: _Key, what: str, other: _Event | None = None) -> NoReturn:
        where = f": {self._name(other)}" if other else ""
        raise InputError(f"{self._name(at)}: {self._place(key)}: {what}{where}.")

    def _place(self, key: _Key) -> str:
        number, device, batch = key
        text = f"tensor {number} on device {device}"
        if device in (_GRAPH, _LEFT):
            text = f"the graph of tape {number}"
        return text if self._program.batches == 1 else f"{text}, batch {batch}"

    def _name(self, at: _Event) -> str:
        """An instruction with its phase and lane, in words."""
        row = self._phase.lanes[at[0]][at[1]]
        return f"{self._raw(at)} ({self._program.describe(self._number, row)})"

    def _raw(self, at: _Event) -> str:
        phase, lane = self._program.phase_name(self._number), self._program.lane_name(at[0])
        return f"{phase}, {lane}, instruction {at[1]}"
