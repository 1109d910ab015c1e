"""The streams of a program's lanes, and its launches in order: what is the same in every step.

The first logical device of a GPU computes on the caller's current stream, every other lane on a
stream of its own, which programs share. `docs/runtime.md` (On CUDA) says which owns what.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, TypeAlias, final

import torch

from baechi.records.instructions import Copy, Free, Instruction, Place, Program, Run, Wait
from baechi.runtime.autograd.binding import Bound
from baechi.torch_support.graph_capture import capture_stream
from baechi.torch_support.streams import shared_stream

Event: TypeAlias = tuple[int, int, int]  # phase, lane, position
Streams: TypeAlias = Sequence[torch.cuda.Stream | None]


@final
@dataclass(frozen=True, slots=True)
class Launch:
    """An instruction where its phase launches it."""

    row: Instruction
    lane: int
    here: tuple[int, int]  # its lane, and its place there
    device: int  # of the lane
    bound: Any  # a run's segment, a copy's moves, or what a free lets go of
    awaits: Event | None  # what a wait waits for, if the host or a stream has to
    awaited: Event | None  # its own, if others wait for it


@final
class Lanes:
    """A program's lanes on torch devices.

    Attributes:
        gpus: Those in use; others get no context.
        places: The torch device of every lane.
        own: The stream of every lane; None where that is the caller's, or there is none.
        landing: Those that bring a CPU what it reads, and in later phases what it adds up.
        shared: GPUs on which several lanes compute.
        out: Where copies leave a GPU.
        awaited: The events for which the host or a stream waits.
        launches: The instructions of every phase, in the program's order.
    """

    def __init__(self, program: Program, bound: Bound, places: Sequence[torch.device]) -> None:
        self._program = program
        self.places = [places[lane.device] for lane in program.lanes]
        pairs = list(zip(program.lanes, self.places, strict=True))
        rows = zip(pairs, *(phase.lanes for phase in program.phases), strict=True)
        used = [pair for pair, *instructions in rows if any(instructions)]
        in_use = {place for _, place in used if place.type == "cuda"}
        self.gpus = gpus = sorted(in_use, key=lambda gpu: gpu.index)
        seen: Counter[torch.device] = Counter()
        self.own: list[torch.cuda.Stream | None] = []
        for lane, there in pairs:
            # What a CPU gets is brought beside what computes.
            place = gpus[0] if lane.copies and gpus and there.type != "cuda" else there
            own = (lane, there) in used and place.type == "cuda" and (lane.copies or place in seen)
            self.own.append(shared_stream(place, seen[place]) if own else None)
            if (lane, there) in used:
                seen[place] += 1
        streams = list(zip(pairs, self.own, strict=True))
        self.landing = [own for (_, place), own in streams if own and place.type == "cpu"]
        self.shared = frozenset(
            place for (lane, place), own in streams if own is not None and not lane.copies
        )
        self.out = {gpu: shared_stream(gpu, -1) for gpu in gpus if len(gpus) > 1}
        self.awaited: list[Event] = [
            (number, row.lane, row.position)
            for number, phase in enumerate(program.phases)
            for row in chain.from_iterable(phase.lanes)
            if isinstance(row, Wait)
            and (self.own[row.lane] is not None or self.places[row.lane].type == "cuda")
        ]
        self.launches = [self._launches_of(phase, bound) for phase in range(len(program.phases))]

    @property
    def streams(self) -> list[torch.cuda.Stream]:
        """All that are not the callers'."""
        return [stream for stream in (*self.own, *self.out.values()) if stream is not None]

    @cached_property
    def captured(self) -> Streams:
        """Those of lanes that are captured, which no other thread may use meanwhile."""
        pairs = zip(self._program.lanes, self.own, strict=True)
        return [own and capture_stream(own.device, computes=not lane.copies) for lane, own in pairs]

    def _launches_of(self, phase: int, bound: Bound) -> list[Launch]:
        rows, awaited = self._program.phases[phase], set(self.awaited)
        position = [0] * len(rows.lanes)
        found = []
        for lane in rows.launch:
            here = (lane, position[lane])
            row = rows.lanes[lane][position[lane]]
            position[lane] += 1
            ready: Any = None
            waits = (phase, row.lane, row.position) if isinstance(row, Wait) else None
            if isinstance(row, Run):
                ready = rows.segments[row.segment]
            elif isinstance(row, Copy):
                ready = bound.copies[phase][Place(row.tensor, row.dst)]
            elif isinstance(row, Free):
                ready = bound.frees[phase][Place(row.tensor, row.device)]
            own = (phase, *here)
            device = self._program.lanes[lane].device
            awaits = waits if waits in awaited else None
            found.append(
                Launch(row, lane, here, device, ready, awaits, own if own in awaited else None)
            )
        return found
