"""The CUDA executor: one thread launches everything, and events between streams order it.

    device 0           run[a b c]──(1)──────────────────run[f g]
    copies to 1                     └─►copy─(2)
    device 1           run[x y]              └─(3)─►run[d e]

(1) the lane that copies waits for the producer's; (2) the copy runs beside both that compute; (3)
the reader's lane waits for the copy. Instructions are launched in the program's launch order, every
lane is a stream, and every wait an event. Memory that crosses lanes is told to torch's allocator
(`record_stream`), since autograd may let go of a copy at any time.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import torch
from torch.utils import _pytree as pytree

from baechi.metering import Meter
from baechi.runtime.binding import Bound, Moves
from baechi.runtime.program import Copy, Free, Instruction, Place, Program, Run, Wait
from baechi.runtime.steps import Step
from baechi.runtime.workers import forward_of, freed_after

Event = tuple[int, int, int]  # phase, lane, position


@final
class CudaExecutor:
    """Streams and events; the caller's thread launches every instruction.

    The first logical device of a GPU computes on the caller's current stream, the others on streams
    of their own. Every device copies what arrives there on another stream, so that copies block no
    computing. CPUs among the devices run inline; metered steps on CPUs alone run so, too, because
    their peaks must not depend on how threads meet.

    Args:
        program: What to run.
        bound: To what.
        places: The torch device of every logical device; CPUs may be among them.
    """

    def __init__(self, program: Program, bound: Bound, places: Sequence[torch.device]) -> None:
        self._program = program
        self._bound = bound
        self._places = tuple(places)
        seen: set[torch.device] = set()
        self._own: list[torch.cuda.Stream | None] = []
        for place in places:
            own = place.type == "cuda" and place in seen
            self._own.append(_stream(place) if own else None)
            seen.add(place)
        self._copies = [_stream(place) if place.type == "cuda" else None for place in places]
        gpus = sorted({p for p in places if p.type == "cuda"}, key=lambda p: p.index)
        self._out = {gpu: _stream(gpu) for gpu in gpus}  # where copies leave a GPU
        self._events: dict[Event, torch.cuda.Event] = {}
        self._actions: list[dict[int, list[Callable[[Step], None]]]] = []
        # What a launch has read is read on CPUs; a stream may still have to.
        last = {} if gpus else _last_reads(program, bound)
        for number, phase in enumerate(program.phases):
            self._actions.append({})
            for rows in phase.lanes:
                for position, row in enumerate(rows):
                    if isinstance(row, Run):
                        segment = phase.segments[row.segment]
                        tapes = [bound.tapes[t] for t in segment.tapes]
                        back = [t.recompute if segment.again else t.backward for t in tapes]
                        freed = freed_after(rows, position, bound) if number == 0 else frozenset()
                        freed |= last.get(row.segment, frozenset())
                        self._actions[-1][row.segment] = [
                            back[index] if number else forward_of(tapes, index, freed)
                            for index in range(len(tapes))
                        ]
            for row in (row for rows in phase.lanes for row in rows):
                if isinstance(row, Wait) and self._place(row.lane).type == "cuda":
                    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                    self._events[number, row.lane, row.position] = event

    def close(self) -> None:
        """Nothing runs between calls."""

    def _place(self, lane: int) -> torch.device:
        return self._places[self._program.lanes[lane].device]

    def _lane(self, lane: int) -> torch.cuda.Stream | None:
        """The stream of a lane; None on a CPU."""
        row = self._program.lanes[lane]
        place = self._places[row.device]
        if place.type != "cuda":
            return None
        if row.copies:
            return self._copies[row.device]
        return self._own[row.device] or torch.cuda.current_stream(place)

    def run(self, step: Step, phase: int) -> None:
        """Launch every instruction."""
        rows = self._program.phases[phase]
        position = [0] * len(rows.lanes)
        streams = [self._lane(lane) for lane in range(len(rows.lanes))]
        with self._fenced():
            for lane in rows.launch:
                self._launch(step, phase, rows.lanes[lane][position[lane]], lane, streams)
                event = self._events.get((phase, lane, position[lane]))
                if event is not None:
                    event.record(streams[lane])
                position[lane] += 1

    def _launch(
        self,
        step: Step,
        phase: int,
        row: Instruction,
        lane: int,
        streams: Sequence[torch.cuda.Stream | None],
    ) -> None:
        stream = streams[lane]
        if isinstance(row, Wait):
            event = self._events.get((phase, row.lane, row.position))
            if event is not None and stream is None:
                event.synchronize()
            elif event is not None and stream is not None:
                stream.wait_event(event)
        elif isinstance(row, Free):
            freed = self._bound.frees[phase][Place(row.tensor, row.device)]
            for slot in freed.slots:
                step.slots[slot] = None
            for slot in freed.grads:
                step.grads[slot] = None
        else:
            with _on(stream), _counting(step.meter, self._program.lanes[lane].device):
                if isinstance(row, Run):
                    for action in self._actions[phase][row.segment]:
                        action(step)
                else:
                    moves = self._bound.copies[phase][Place(row.tensor, row.dst)]
                    _move(step, moves, lambda t: self._bring(step.meter, t, row, streams))

    def _bring(
        self,
        meter: Meter | None,
        tensor: torch.Tensor,
        row: Copy,
        streams: Sequence[torch.cuda.Stream | None],
    ) -> torch.Tensor:
        """The tensor on the device that reads it; the current stream is the lane that copies."""
        place, reader, maker = self._places[row.dst], streams[row.dst], streams[row.src]
        if tensor.device == place and meter is not None:
            tensor = meter.copy(row.dst, tensor)
        if tensor.device == place:
            if reader is not None:
                tensor.record_stream(reader)
            return tensor
        if reader is None or tensor.device.type != "cuda":  # to or from a CPU
            if maker is not None:
                maker.synchronize()
            moved = tensor.to(place, non_blocking=reader is not None and tensor.is_pinned())
        else:
            # A copy between GPUs runs on the current stream of its source and begins after what is
            # queued on that of its destination (torch, aten/src/ATen/native/cuda/Copy.cu): so this
            # stream's waits hold for it, and it blocks nobody who computes.
            out = self._out[tensor.device]
            with torch.cuda.stream(out):
                out.wait_stream(torch.cuda.current_stream(place))
                # Dense first: a strided copy across devices is a slow kernel.
                dense = tensor.contiguous()
                moved = dense.to(place, non_blocking=True)
            tensor.record_stream(out)
        if reader is not None:
            moved.record_stream(reader)
        return moved

    def give(self, value: Any) -> Any:
        """The value, told to the allocator as used by the caller's stream."""
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, torch.Tensor) and leaf.is_cuda:
                leaf.record_stream(torch.cuda.current_stream(leaf.device))
        return value

    @contextlib.contextmanager
    def _fenced(self) -> Iterator[None]:
        """Every lane begins after the caller's streams, and they go on after every lane."""
        lanes = [s for s in (*self._own, *self._copies, *self._out.values()) if s is not None]
        for lane in lanes:
            lane.wait_stream(torch.cuda.current_stream(lane.device))
        try:
            yield
        finally:
            for lane in lanes:
                torch.cuda.current_stream(lane.device).wait_stream(lane)


def _last_reads(program: Program, bound: Bound) -> dict[int, frozenset[int]]:
    """For every segment of the forward the slots that nothing reads after it, in launch order."""
    phase = program.phases[0]
    left = [len(rows) for rows in phase.lanes]
    later: set[int] = set()
    last: dict[int, frozenset[int]] = {}
    for lane in reversed(phase.launch):
        left[lane] -= 1
        row = phase.lanes[lane][left[lane]]
        if isinstance(row, Copy):
            later.update(src for src, _ in bound.copies[0][Place(row.tensor, row.dst)].slots)
        elif isinstance(row, Run):
            tapes = phase.segments[row.segment].tapes
            read = {slot for tape in tapes for _, slot in bound.tapes[tape].fills}
            last[row.segment] = frozenset(read - later)
            later |= read
    return last


def _on(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


def _counting(meter: Meter | None, device: int) -> contextlib.AbstractContextManager[None]:
    """Count what is made inside; autograd takes the mode along to the thread of the GPU."""
    return contextlib.nullcontext() if meter is None else meter.counting(device)


def _move(step: Step, moves: Moves, bring: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Fill the slots on the other side."""
    for src, dst in moves.slots:
        step.slots[dst] = pytree.tree_map_only(torch.Tensor, bring, step.slots[src])
    for src, dst in moves.grads:
        gradient = step.grads[src]
        step.grads[dst] = None if gradient is None else bring(gradient)


def _stream(place: torch.device) -> torch.cuda.Stream:
    stream: torch.cuda.Stream = torch.cuda.Stream(place)  # type: ignore[no-untyped-call]
    return stream
