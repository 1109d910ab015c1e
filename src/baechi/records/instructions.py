"""A placement as a program: the runs, copies, waits and frees of every device.

    device 0   run[a b c]────┐                  wait ► free ► run[f g]
    device 1                 └─►wait ► copy ► run[d e]──►

A program is plain data. Executors run it and decide nothing; `race_proof` proves that in every
interleaving of its lanes each value is read after it is written and freed after its last use.
Where a step has several micro-batches, an instruction is for one of them, its `batch`.
docs/runtime.md defines the terms: lane, segment, tape, phase, and what runs forward again. Values
that stay inside one tape are not part of the program.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias, final


@final
@dataclass(frozen=True, slots=True)
class Run:
    """Run a segment of the phase: a turn."""

    segment: int
    batch: int = 0


@final
@dataclass(frozen=True, slots=True)
class Copy:
    """Bring a tensor from one device to another."""

    tensor: int
    src: int
    dst: int
    batch: int = 0


@final
@dataclass(frozen=True, slots=True)
class Wait:
    """Wait until a lane has done its instruction at a position."""

    lane: int
    position: int


@final
@dataclass(frozen=True, slots=True)
class Free:
    """Free a tensor on a device."""

    tensor: int
    device: int
    batch: int = 0


Instruction: TypeAlias = Run | Copy | Wait | Free


@final
@dataclass(frozen=True, slots=True)
class Tape:
    """Operators whose forward is one autograd graph.

    Attributes:
        ops: Forward operators, in execution order; ascending where there is a backward.
        again: The operator of the graph that runs them forward again; -1 if they keep their graph.
    """

    device: int
    ops: tuple[int, ...]
    again: int = -1


@final
@dataclass(frozen=True, slots=True)
class Segment:
    """Operators that a device runs without interruption.

    Attributes:
        tapes: Indices of the program's tapes, in execution order.
        reads: Tensors made by other segments or by the caller.
        writes: Tensors made for other segments, for the caller, or for another of its tapes.
        updates: State that it may write in place: groups of operators, and one number beyond them
            for what draws random numbers in turn.
        again: Whether it is in the backward and runs its tapes forward again.
        backward: Whether it is in the backward.
    """

    device: int
    tapes: tuple[int, ...]
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    updates: tuple[int, ...] = ()
    again: bool = False
    backward: bool = False

    @property
    def way(self) -> Literal["forward", "backward", "recompute"]:
        """What it does with its tapes."""
        return "recompute" if self.again else "backward" if self.backward else "forward"


@final
@dataclass(frozen=True, slots=True)
class Place:
    """A tensor in the memory of a device."""

    tensor: int
    device: int
    batch: int = 0


@final
@dataclass(frozen=True, slots=True)
class Lane:
    """A queue of instructions of a device that copies incoming tensors, or else computes."""

    device: int
    copies: bool = False


@final
@dataclass(frozen=True, slots=True)
class Phase:
    """Instructions from a call to its return.

    Attributes:
        segments: In launch order.
        lanes: The instructions of every lane of the program.
        launch: The lane of every instruction, in an order in which one thread may launch all: the
            placement's own, and no instruction before one that it waits for.
        given: Values that the caller provides.
        kept: Values that are left for the caller.
    """

    segments: tuple[Segment, ...]
    lanes: tuple[tuple[Instruction, ...], ...]
    launch: tuple[int, ...]
    given: tuple[Place, ...] = ()
    kept: tuple[Place, ...] = ()


@final
@dataclass(frozen=True, slots=True)
class Program:
    """Instructions that run a placement.

    Attributes:
        graph_digest: `OpGraph.digest` of its graph.
        names: Of the forward operators.
        twins: The backward operator of every forward operator, or -1.
        tapes: The tapes, in the order in which forward segments name them.
        phases: The forward; and the backward if there is one. Or one with both, whose caller has
            nothing to do between them.
        batches: The number of micro-batches. Every segment has a turn for each, from the first to
            the last; in a phase that is the backward alone from the last to the first.
    """

    graph_digest: str
    names: tuple[str, ...]
    twins: tuple[int, ...]
    lanes: tuple[Lane, ...]
    tapes: tuple[Tape, ...]
    phases: tuple[Phase, ...]
    batches: int = 1

    @property
    def is_training(self) -> bool:
        """True if it goes backward."""
        return any(row.backward for phase in self.phases for row in phase.segments)

    def ops_of(self, segment: Segment) -> Iterator[int]:
        """Operators of the graph that a segment runs, in order."""
        if segment.again:
            yield from dict.fromkeys(self.tapes[tape].again for tape in segment.tapes)
            return
        for tape in segment.tapes:
            ops = self.tapes[tape].ops
            if segment.backward:
                yield from (self.twins[op] for op in reversed(ops) if self.twins[op] >= 0)
            else:
                yield from ops

    def explain(self) -> str:
        """The program as readable text: every lane, line by line."""
        lines = []
        for number, phase in enumerate(self.phases):
            tapes = _many(sum(len(segment.tapes) for segment in phase.segments), "tape")
            what = self.phase_name(number)
            lines.append(f"{what}: {_many(len(phase.segments), 'segment')}, {tapes}")
            for lane, rows in enumerate(phase.lanes):
                if rows:
                    lines.append(f"  {self.lane_name(lane)}")
                for position, row in enumerate(rows):
                    lines.append(f"    {position:4d}  {self.describe(number, row)}")
        return "\n".join(lines)

    def phase_name(self, number: int) -> str:
        """`forward`, `backward` or `step`."""
        kinds = {segment.backward for segment in self.phases[number].segments}
        return "step" if len(kinds) > 1 else "backward" if number else "forward"

    def lane_name(self, lane: int) -> str:
        """`device 1` for its computing lane, `copies to device 1` for its copying lane."""
        row = self.lanes[lane]
        return f"copies to device {row.device}" if row.copies else f"device {row.device}"

    def describe(self, phase: int, row: Instruction) -> str:
        """An instruction in words."""
        match row:
            case Run():
                segment = self.phases[phase].segments[row.segment]
                ops = [op for tape in segment.tapes for op in self.tapes[tape].ops]
                forward = segment.again or not segment.backward
                ends = [self.names[op] for op in (ops if forward else reversed(ops))]
                what = " ... ".join(dict.fromkeys([ends[0], ends[-1]])) if ends else "nothing"
                tapes = f", {len(segment.tapes)} tapes" if len(segment.tapes) > 1 else ""
                verb = "recompute" if segment.again else "run"
                text = f"{verb} segment {row.segment}: {what} ({_many(len(ops), 'op')}{tapes})"
                if segment.writes:
                    more = ", ..." if len(segment.writes) > 6 else ""
                    text += f" -> tensors {', '.join(map(str, segment.writes[:6]))}{more}"
            case Copy():
                text = f"copy tensor {row.tensor} from device {row.src} to device {row.dst}"
            case Wait():
                return f"wait for {self.lane_name(row.lane)}, {row.position}"
            case Free():
                text = f"free tensor {row.tensor} on device {row.device}"
        return text if self.batches == 1 else f"{text}, batch {row.batch}"


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count != 1 else ''}"
