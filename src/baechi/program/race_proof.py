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
from typing import Final, final

from baechi.errors import InputError
from baechi.records.instructions import Copy, Free, Program, Run, Segment, Wait

# Places without a device: state, updated in place on its operators' device, and the graph of a tape
# that runs again, made then and used by its backward.
_STATE: Final = -1
_GRAPH: Final = -2


@final
@dataclass(slots=True)
class _Touched:
    """Accesses to a place: (lane, position) of each."""

    written: tuple[int, int] | None = None
    since: list[tuple[int, int]] = field(default_factory=list)  # reads after the last write
    freed: tuple[int, int] | None = None


def check_program(program: Program) -> None:
    """Prove the program, phase by phase.

    Raises:
        InputError: A value may be read before it is written, written while it is read, freed before
            its last use, twice or never; a copy or a segment is missing or on a wrong lane; or
            the lanes deadlock. The text names the instruction.
    """
    tapes_run: list[list[int]] = []
    for number in range(len(program.phases)):
        _Checker(program, number).check()
        segments = program.phases[number].segments
        tapes_run.append([t for segment in segments if not segment.again for t in segment.tapes])
    again = [t for phase in program.phases for s in phase.segments if s.again for t in s.tapes]
    _check_tapes(program, [*tapes_run, again] if len(program.phases) > 1 else tapes_run)


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
        self._touched: dict[tuple[int, int], _Touched] = {}
        self._ran: set[int] = set()
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
            self._touched[place.tensor, place.device] = _Touched()
        self._go()
        self._check_end()
        self._check_launch()

    def _go(self) -> None:
        """Visit every instruction as soon as its lane reaches it and its wait is satisfied."""
        lanes = self._phase.lanes
        position = [0] * len(lanes)
        awaited = {(r.lane, r.position) for rows in lanes for r in rows if type(r) is Wait}
        clock_at: dict[tuple[int, int], list[int]] = {}  # after each awaited instruction
        waiting: dict[int, list[tuple[int, int]]] = {}  # lane -> (waiting lane, position)
        ready = [lane for lane, rows in enumerate(lanes) if rows]
        while ready:
            lane = ready.pop()
            rows = lanes[lane]
            here = position[lane]
            while here < len(rows):
                row = rows[here]
                if type(row) is Wait:
                    self._check_wait(lane, here, row)
                    clock = clock_at.get((row.lane, row.position))
                    if clock is None:
                        waiting.setdefault(row.lane, []).append((lane, row.position))
                        break
                    self._now[lane] = list(map(max, self._now[lane], clock))
                elif type(row) is Run:
                    self._check_run(lane, here, row)
                elif type(row) is Copy:
                    self._check_copy(lane, here, row)
                elif type(row) is Free:
                    self._free(lane, here, row.tensor, row.device)
                self._now[lane][lane] = here + 1
                if (lane, here) in awaited:
                    clock_at[lane, here] = self._now[lane].copy()
                here += 1
            position[lane] = here
            woken = [who for who, wanted in waiting.get(lane, ()) if wanted < here]
            waiting[lane] = [entry for entry in waiting.get(lane, ()) if entry[1] >= here]
            ready += woken
        stuck = [lane for lane, rows in enumerate(lanes) if position[lane] < len(rows)]
        if stuck:
            names = "; ".join(self._name(lane, position[lane]) for lane in stuck)
            raise InputError(f"deadlock: these wait for each other or for nothing: {names}.")

    def _check_wait(self, lane: int, here: int, row: Wait) -> None:
        lanes = self._phase.lanes
        if not 0 <= row.lane < len(lanes) or not 0 <= row.position < len(lanes[row.lane]):
            raise InputError(f"{self._name(lane, here)} waits for what does not exist.")

    def _check_run(self, lane: int, here: int, row: Run) -> None:
        if not 0 <= row.segment < len(self._phase.segments):
            raise InputError(f"{self._raw(lane, here)} runs a segment that does not exist.")
        segment: Segment = self._phase.segments[row.segment]
        own = self._program.lanes[lane]
        if own.copies or own.device != segment.device:
            raise InputError(f"{self._name(lane, here)} is on device {segment.device}'s segment.")
        if row.segment in self._ran:
            raise InputError(f"{self._name(lane, here)} runs a segment that has run.")
        self._ran.add(row.segment)
        for tensor in segment.reads:
            self._read(lane, here, tensor, segment.device)
        for tensor in segment.writes:
            self._write(lane, here, tensor, segment.device)
        for state in segment.updates:
            self._update(lane, here, state)
        if self._number == 0:
            return
        for tape in segment.tapes:
            if segment.again:
                self._write(lane, here, tape, _GRAPH)
            elif self._program.tapes[tape].again >= 0:
                self._read(lane, here, tape, _GRAPH)

    def _check_copy(self, lane: int, here: int, row: Copy) -> None:
        own = self._program.lanes[lane]
        beside = any(other.copies for other in self._program.lanes)
        if row.src == row.dst or own.device != row.dst or own.copies != beside:
            raise InputError(f"{self._name(lane, here)} is on the wrong lane.")
        self._read(lane, here, row.tensor, row.src)
        self._write(lane, here, row.tensor, row.dst)

    def _unordered(self, lane: int, events: Iterable[tuple[int, int]]) -> tuple[int, int] | None:
        """The first event that need not have happened before the lane's current instruction."""
        now = self._now[lane]
        for event in events:
            if now[event[0]] <= event[1] and event[0] != lane:
                return event
        return None

    def _read(self, lane: int, here: int, tensor: int, device: int) -> None:
        touched = self._touched.get((tensor, device))
        if touched is None:
            self._object(lane, here, tensor, device, "reads it before anybody writes it")
        assert touched is not None
        if touched.freed is not None:
            self._object(lane, here, tensor, device, "reads it after a free", touched.freed)
        if touched.written is not None and self._unordered(lane, (touched.written,)):
            self._object(lane, here, tensor, device, "may read it before", touched.written)
        touched.since.append((lane, here))

    def _write(self, lane: int, here: int, tensor: int, device: int) -> None:
        if (tensor, device) in self._touched:
            self._object(lane, here, tensor, device, "writes what was written, given or freed")
        self._touched[tensor, device] = _Touched((lane, here))

    def _update(self, lane: int, here: int, state: int) -> None:
        touched = self._touched.setdefault((state, _STATE), _Touched())
        if touched.written is not None and self._unordered(lane, (touched.written,)):
            name = self._name(*touched.written)
            raise InputError(
                f"{self._name(lane, here)} updates state {state} while another may: {name}."
            )
        touched.written = (lane, here)

    def _free(self, lane: int, here: int, tensor: int, device: int) -> None:
        touched = self._touched.get((tensor, device))
        if touched is None:
            self._object(lane, here, tensor, device, "frees what nobody wrote")
        assert touched is not None
        if touched.freed is not None:
            self._object(lane, here, tensor, device, "frees it a second time", touched.freed)
        written = () if touched.written is None else (touched.written,)
        event = self._unordered(lane, (*written, *touched.since))
        if event is not None:
            self._object(lane, here, tensor, device, "may free it before", event)
        touched.freed = (lane, here)

    def _check_end(self) -> None:
        """Check that exactly the kept values remain."""
        missing = set(range(len(self._phase.segments))) - self._ran
        if missing:
            raise InputError(f"segments {sorted(missing)} never run. Compile the placement again.")
        kept = {(place.tensor, place.device) for place in self._phase.kept}
        for (tensor, device), touched in sorted(self._touched.items()):
            if device < 0:
                continue
            if touched.freed is None and (tensor, device) not in kept:
                raise InputError(f"tensor {tensor} on device {device} is never freed.")
            if touched.freed is not None and (tensor, device) in kept:
                what = self._name(*touched.freed)
                raise InputError(f"{what}: tensor {tensor} on device {device} is kept.")
        for place in sorted(kept - self._touched.keys()):
            raise InputError(f"tensor {place[0]}, kept on device {place[1]}, is never written.")

    def _check_launch(self) -> None:
        """Check that the launch order has every instruction once, after those that it waits for."""
        lanes = self._phase.lanes
        done = [0] * len(lanes)
        for lane in self._phase.launch:
            if not 0 <= lane < len(lanes) or done[lane] >= len(lanes[lane]):
                raise InputError(f"the launch order goes on where lane {lane} has ended.")
            row = lanes[lane][done[lane]]
            if isinstance(row, Wait) and done[row.lane] <= row.position:
                raise InputError(
                    f"{self._name(lane, done[lane])} is launched before what it waits for."
                )
            done[lane] += 1
        if done != [len(rows) for rows in lanes]:
            raise InputError("the launch order leaves instructions out.")

    def _object(
        self,
        lane: int,
        here: int,
        tensor: int,
        device: int,
        what: str,
        other: tuple[int, int] | None = None,
    ) -> None:
        where = f": {self._name(*other)}" if other is not None else ""
        place = f"tensor {tensor} on device {device}"
        if device == _GRAPH:
            place = f"the graph of tape {tensor}"
        raise InputError(f"{self._name(lane, here)}: {place}: {what}{where}.")

    def _name(self, lane: int, here: int) -> str:
        """An instruction with its phase and lane, in words."""
        row = self._phase.lanes[lane][here]
        return f"{self._raw(lane, here)} ({self._program.describe(self._number, row)})"

    def _raw(self, lane: int, here: int) -> str:
        what = "backward" if self._number else "forward"
        known = 0 <= lane < len(self._program.lanes)
        name = self._program.lane_name(lane) if known else f"lane {lane}"
        return f"{what}, {name}, instruction {here}"
