"""The CUDA executor: one thread launches everything, and events between streams order it.

    device 0           run[a b c]──(1)──────────────────run[f g]
    copies to 1                     └─►copy─(2)
    device 1           run[x y]              └─(3)─►run[d e]

(1) the lane that copies waits for the producer's; (2) the copy runs beside both that compute; (3)
the reader's lane waits for the copy. `docs/runtime.md` (On CUDA) says which stream owns what, and
when it is freed.
"""

import contextlib
import itertools
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, final

import torch
from torch.utils import _pytree as pytree

from baechi.records.instructions import Copy, Free, Program, Run, Segment, Wait
from baechi.runtime.autograd.binding import Bound, Moves
from baechi.runtime.autograd.step import Step, random_state, set_random_state
from baechi.runtime.executors.cuda_graphs import Graphs
from baechi.runtime.executors.graphed_tape import GraphedTape, Statics
from baechi.runtime.executors.held_storages import HeldStorages
from baechi.runtime.executors.lane_streams import Event, Lanes, Launch, Streams
from baechi.torch_support.storages import (
    crossings,
    cut_up,
    laid_out,
    once,
    spanned,
)
from baechi.torch_support.streams import (
    current_stream,
    is_captured,
    join,
    on_stream,
    wait_for,
)
from baechi.torch_support.torch_internals import backward_id, copies

Events = dict[Event, torch.cuda.Event]
Send = Callable[[int, Sequence[torch.Tensor]], Sequence[torch.Tensor]]


@final
@dataclass
class _StepRun:
    """The state of one step that runs."""

    callers: dict[torch.device, torch.cuda.Stream]  # of every GPU when the forward began
    own: Streams  # those of all other lanes
    graphs: Graphs | None = None  # the tapes as CUDA graphs, if the step is replayed
    captured: bool = False  # whether the caller captures a graph, which cannot wait for others
    events: Events = field(default_factory=dict)  # of the phase that runs
    held: HeldStorages = field(default_factory=HeldStorages)  # what crossed streams
    arrivals: dict[int, torch.cuda.Event] = field(default_factory=dict)  # of inputs that come


@final
class CudaExecutor:
    """Streams and events; the caller's thread launches every instruction.

    The first logical device of a GPU computes on the caller's current stream, the others on streams
    of their own. CPUs among the devices run inline; metered steps on CPUs alone run so, too,
    because their peaks must not depend on how threads meet. Calls from several threads take turns,
    but a GPU's thread of autograd waits for no other. With `graphs`, tapes run as CUDA graphs.
    """

    _unwarned: ClassVar["weakref.WeakSet[CudaExecutor]"] = weakref.WeakSet()

    def __init__(
        self,
        program: Program,
        bound: Bound,
        places: Sequence[torch.device],
        graphs: Graphs | None = None,
    ) -> None:
        self._program = program
        self.bound = bound
        self._places = tuple(places)
        self._graphs = graphs
        # A GPU's thread of autograd that goes backward inside a backward takes what waits for it,
        # another step's backward too (torch, torch/csrc/autograd/engine.cpp, thread_main).
        self._busy = threading.RLock()
        self._running: list[Step] = []
        self._ends: dict[torch.device, torch.cuda.Event] = {}  # of the last phase, where it matters
        self._lanes = lanes = Lanes(program, bound, places)
        self._gpus, self._shared, self._out = lanes.gpus, lanes.shared, lanes.out
        self._others = frozenset(self._gpus[1:])
        self._streams = lanes.streams
        if self._out or self._shared:
            # The step is one node, on one GPU, and gives gradients of parameters on several; and on
            # one with several lanes, submodules that stay whole give them where they run. That
            # their streams differ is no mistake, and the end of a phase has ordered them.
            torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
            self._unwarned.add(self)
            weakref.finalize(self, _warn_again, self._unwarned).atexit = False
        self._spare: list[Events] = []  # of no step that runs

    def close(self) -> None:
        """Let torch warn of streams again after the last of those for which it does not."""
        if self in self._unwarned:
            self._unwarned.discard(self)
            _warn_again(self._unwarned)

    def meet(self, step: Step) -> None:
        """Let the streams of this call, and of the forward's call, wait for each other."""
        if self._gpus:
            join(streams := self._callers(step.own), streams)

    def run(self, steps: Sequence[Step], phase: int) -> None:
        """Launch every instruction; there is a step per micro-batch.

        Raises:
            ExecutionError: An operator failed.
        """
        step = steps[0]
        alone, events = self._turn(step)
        try:
            captured = any(map(is_captured, self._gpus))
            run: _StepRun = self._begun(steps, alone, captured) if phase == 0 else step.own
            run.captured, run.events = captured, events
            run.held.wake()
            gradients = itertools.chain.from_iterable(each.grads for each in steps)
            for gradient in gradients if self._shared else ():
                if gradient is not None and gradient.device in self._shared:
                    run.held.add(gradient)  # the caller's memory, which lanes read that are not his
            whole = None if run.graphs is None else run.graphs.whole(step)
            self._launch_all(steps, phase, whole)
            # Theirs that are copied, until lanes wait for that.
            given = [(each.results, each.grads[:]) for each in steps]
            for each in steps:
                if phase == 0:
                    self._give_results(each, run)
                else:
                    self._give_gradients(each, run)
            self._ended(run)
            del given
            ended = phase == len(self._program.phases) - 1 and step.differentiate
            if ended and self._graphs is not None and not step.keep:
                self._graphs.end(step)
            run.held.rest()
        finally:
            self._turned(step, alone, events)

    def _launch_all(
        self, steps: Sequence[Step], phase: int, whole: GraphedTape | None = None
    ) -> None:
        """The instructions of a phase, between fences; or one graph of all, on the caller's stream.

        Their waits are in the graph, and the lanes' own streams have no part in its replays.
        """
        step = steps[0]
        run: _StepRun = step.own
        lanes = run.own if whole is None else [None] * len(self._lanes.places)
        streams = [
            run.callers.get(place) if own is None else own
            for place, own in zip(self._lanes.places, lanes, strict=True)
        ]
        others = [*filter(None, lanes), *self._out.values()] if whole is None else []
        every = self._fence(run, others)
        try:
            # Inputs of several micro-batches come one after another, which takes less memory.
            ahead = phase == 0 and len(steps) == 1
            pinned = self._fetch(step, run, streams) if ahead else ()
            if whole is None:
                self._launch_each(steps, phase, streams)
            else:
                for arrival in run.arrivals.values():
                    current_stream(self._gpus[0]).wait_event(arrival)
                (whole.backward if phase else whole.forward)(step)
            step.fetched.clear()
            # What came from pinned memory is over by now: it began first, and the caller may write.
            for event in (*pinned, *(lane.record_event() for lane in self._lanes.landing)):
                event.synchronize()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # CUDA may be unusable by what has failed
                join(every, every)
            run.held.rest()  # the error may outlive this, and its traceback has the step
            raise
        join(every, every)

    def _launch_each(self, steps: Sequence[Step], phase: int, streams: Streams) -> None:
        """The instructions of a phase, in the program's order."""
        run: _StepRun = steps[0].own
        flights = None if run.graphs is None else run.graphs.flights
        ends: dict[int, list[torch.cuda.Event]] = defaultdict(list)  # of batches in their slots
        for each in self._lanes.launches[phase]:
            here, stream = each.here, streams[each.lane]
            if flights is not None and stream is not None and here in flights.after:
                for event in ends[flights.after[here]]:
                    stream.wait_event(event)
            self._launch(steps, phase, each, streams)
            if flights is not None and stream is not None and here in flights.last:
                ends[flights.last[here]].append(stream.record_event())
            if each.awaited is not None:
                run.events[each.awaited].record(stream)

    def _together(self, step: Step, phase: int) -> None:
        """Launch a phase to be captured; or eagerly, where that fails."""
        alone, events = self._turn(step)
        try:
            if step.own is None:
                step.own = _StepRun(self._current(), self._lanes.captured)
            run: _StepRun = step.own
            run.captured, run.events = any(map(is_captured, self._gpus)), events
            run.held.wake()
            self._launch_all([step], phase)
            run.held.rest()
        finally:
            self._turned(step, alone, events)

    def _turn(self, step: Step) -> tuple[bool, Events]:
        """Whether no other thread runs a step, and events that no other step uses meanwhile.

        Who runs a step waits in it for the threads of autograd of other GPUs. If one of these
        waited in turn, to take another step backward, neither would go on.
        """
        alone = self._busy.acquire(blocking=not self._gpus or backward_id() < 0)
        self._running.append(step)
        try:
            events = self._spare.pop()
        except IndexError:
            events = {key: torch.cuda.Event() for key in self._lanes.awaited}  # type: ignore[no-untyped-call]
        return alone, events

    def _turned(self, step: Step, alone: bool, events: Events) -> None:
        """The end of a turn, in which others may begin."""
        self._spare.append(events)
        self._running.remove(step)
        if alone:
            self._busy.release()

    def _begun(self, steps: Sequence[Step], alone: bool, captured: bool) -> _StepRun:
        # In a graph that the caller captures, nothing else can be captured or replayed.
        may = alone and not captured
        replayed = self._graphs is not None and may and self._graphs.begin(steps[0], self._together)
        graphs = self._graphs if replayed else None
        whole = graphs is not None and graphs.whole(steps[0]) is not None
        inside = self._lanes.captured if captured or whole else ()  # made before a capture
        run = _StepRun(self._current(), inside if captured else self._lanes.own, graphs)
        for batch, step in enumerate(steps):
            if graphs is not None and graphs.flights is not None:
                step.slot = graphs.flights.slots[batch]
            step.own = run
            step.apart = step.apart or bool(self._gpus)
        return run

    def _ended(self, run: _StepRun) -> None:
        """Note the end of a phase that shares streams or memory with the next."""
        if run.captured:
            return
        if run.graphs is not None or self._streams:
            for gpu in self._gpus:
                if gpu not in self._ends:
                    self._ends[gpu] = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._ends[gpu].record(current_stream(gpu))
        if len(self._running) > 1 and self._gpus:  # others have begun: their lanes wait here
            join(callers := self._callers(run), [*callers, *self._streams])

    def _fetch(self, step: Step, run: _StepRun, streams: Streams) -> list[torch.cuda.Event]:
        """Begin to bring the caller's tensors to the GPUs that read them; those of pinned ones.

        Where a lane first reads it, a copy from a CPU would stop the host, and one from another GPU
        would make lanes of both wait for each other. The memory is the reader's, who waits.
        """
        pinned = []
        rows = zip(self._program.lanes, run.own, strict=True)
        copies = {lane.device: own for lane, own in rows if lane.copies and own is not None}
        for code in self.bound.tapes:
            for index in code.inputs:
                tensor, reader = step.inputs[index], streams[code.device]
                is_here = tensor.device == code.place
                if reader is None or is_here or tensor.layout is not torch.strided:
                    continue
                with on_stream(reader):
                    room = torch.empty_like(tensor, device=code.place, requires_grad=False)
                copying = copies.get(code.device, reader)
                if copying != reader:
                    wait_for(copying, reader)
                with on_stream(self._out.get(tensor.device)), on_stream(copying):
                    room.copy_(tensor.detach(), non_blocking=True)
                    run.arrivals[index] = event = copying.record_event()
                step.fetched[index] = room
                if not tensor.is_cuda and tensor.is_pinned() and not run.captured:
                    pinned.append(event)
        return pinned

    def _launch(self, steps: Sequence[Step], phase: int, each: Launch, streams: Streams) -> None:
        row, stream = each.row, streams[each.lane]
        if isinstance(row, Wait):
            if each.awaits is None:
                return
            event = steps[0].own.events[each.awaits]
            if stream is None:
                event.synchronize()
            else:
                stream.wait_event(event)
            return
        step = steps[row.batch]
        if isinstance(row, Free):
            each.bound.clear(step)
            return
        held = step.own.held if len(steps) > 1 and stream is not None else None
        with on_stream(stream), step.counting(each.device):
            if isinstance(row, Run):
                if held is not None:
                    held.turn(each.device, stream)
                self._run_tapes(step, each.bound)
            else:
                made = step.meter is not None or self._places[row.src] != self._places[row.dst]
                if held is not None:
                    held.drop(row.dst, stream)
                send = partial(self._send, step, row, streams, phase)
                move(step, each.bound, send, together=made)

    def _run_tapes(self, step: Step, segment: Segment) -> None:
        graphs, arrivals = step.own.graphs, step.own.arrivals
        for index in segment.tapes:
            tape = self.bound.tapes[index] if graphs is None else graphs.tape(step, index)
            code = self.bound.tapes[index]
            if segment.backward:
                getattr(tape, segment.way)(step)
                continue
            for event in filter(None, map(arrivals.get, code.inputs)):
                current_stream(code.place).wait_event(event)
            # All GPUs draw from the generator of the first: its state goes there and comes back.
            lent = code.draws and code.place in self._others and not step.own.captured
            if lent:
                set_random_state(code.place, random_state(self._gpus[0]))
            tape.forward(step)
            if lent:
                set_random_state(self._gpus[0], random_state(code.place))
            if graphs is not None and graphs.flights is not None:
                # The next micro-batch in its slot writes there.
                for result in (r for output in code.outputs for r in output.results):
                    value = step.results[result]
                    step.results[result] = pytree.tree_map_only(
                        torch.Tensor, lambda tensor: tensor.detach().clone(), value
                    )

    def _send(
        self,
        step: Step,
        row: Copy,
        streams: Streams,
        phase: int,
        number: int,
        tensors: Sequence[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        """The tensors of one crossing where they are read; the current stream is the lane's."""
        run: _StepRun = step.own
        key = (phase, number, row.tensor, row.dst)
        statics = None if run.graphs is None else run.graphs.statics(step)
        tensor = spanned(tensors)
        place, reader, maker = self._places[row.dst], streams[row.dst], streams[row.src]
        if step.meter is not None and tensor.device != place:
            step.meter.sent(tensor)
        elif step.meter is not None:
            tensor = step.meter.copy(row.dst, tensor)
        if tensor.device == place:
            moved = cut_up(tensor, tensors)
        elif reader is None or tensor.device.type != "cuda":  # to or from a CPU
            part = once(tensor)
            if tensor.layout is torch.strided and step.meter is None:
                there = self._through_pinned(part, place)
            else:
                if maker is not None:
                    maker.synchronize()
                there = part.to(place)  # at once: of pinned memory, too, which is the caller's
            moved = cut_up(laid_out(there, part, tensor), tensors)
        else:
            # A copy between GPUs runs on the current stream of its source and begins after what is
            # queued on that of its destination, which then waits for it (torch,
            # aten/src/ATen/native/cuda/Copy.cu): so this stream's waits hold for it, and it blocks
            # no stream that computes.
            out = self._out[tensor.device]
            with on_stream(out):
                wait_for(out, current_stream(place))
                if tensor.layout is torch.strided:
                    part = once(tensor)
                    room, moved = room_of(part, tensors, place, key, statics)
                    # Dense first: a strided copy across devices is a slow kernel.
                    dense = part if part.stride() == room.stride() else part.clone()
                    room.data.copy_(dense, non_blocking=True)
                else:
                    moved = cut_up(tensor.to(place), tensors)
        if reader is not None:  # all are views of one storage
            run.held.add(moved[0], None if tensor.device == place else row.dst)
        return moved

    def _through_pinned(self, part: torch.Tensor, place: torch.device) -> torch.Tensor:
        """The same on the other side, between a CPU and a GPU, and the host waits for nothing.

        torch gives pinned memory to others when the copies that it knows of have ended.
        """
        pinned = torch.empty_like(part, device="cpu", pin_memory=True)
        if not part.is_cuda:
            return pinned.copy_(part).to(place, non_blocking=True)
        lane = current_stream(self._gpus[0])
        source = self._out.get(part.device, lane)
        join([lane], [source])
        with on_stream(source):
            pinned.copy_(part, non_blocking=True)
        join([source], [lane])
        return pinned

    def _give_results(self, step: Step, run: _StepRun) -> None:
        """Results in memory that is the caller's."""
        if run.graphs is None and not (self._shared or run.held):
            return

        def given(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.detach().clone() if self._is_ours(tensor, run) else tensor

        step.results = [
            given(value)
            if isinstance(value, torch.Tensor)
            else pytree.tree_map_only(torch.Tensor, given, value)
            for value in step.results
        ]

    def _give_gradients(self, step: Step, run: _StepRun) -> None:
        """Gradients in memory that stays as it is; those of inputs in the caller's own."""
        slots: Iterable[int] = range(len(step.grads))
        if run.graphs is None:
            slots = itertools.chain.from_iterable(self.bound.input_grads)
        by_place: dict[torch.device, dict[int, torch.Tensor]] = defaultdict(dict)
        for slot in slots:
            gradient = step.grads[slot]
            if gradient is not None and self._is_ours(gradient, run):
                by_place[gradient.device][slot] = gradient
        for place, gradients in by_place.items():
            with on_stream(run.callers.get(place)):
                fresh = copies(list(gradients.values()))
            for slot, copied in zip(gradients, fresh, strict=True):
                step.grads[slot] = copied
        if by_place:
            self.meet(step)

    def _is_ours(self, tensor: torch.Tensor, run: _StepRun) -> bool:
        """True if its memory may belong to a stream other than the caller's, or to a graph."""
        return run.graphs is not None or tensor.device in self._shared or tensor in run.held

    def _current(self) -> dict[torch.device, torch.cuda.Stream]:
        return {gpu: current_stream(gpu) for gpu in self._gpus}

    def _callers(self, run: _StepRun) -> list[torch.cuda.Stream]:
        """The streams of this call's caller and of the forward's."""
        now = self._current()
        if now == run.callers:
            return list(now.values())
        return list(dict.fromkeys((*now.values(), *run.callers.values())))

    def _fence(self, run: _StepRun, lanes: Iterable[torch.cuda.Stream]) -> list[torch.cuda.Stream]:
        """Let every lane begin after the caller's streams; all that wait for all at the end.

        Autograd calls from a thread of its own, with current streams of its own; and it waits for
        what a node gives on the node's stream alone, though that may be on several GPUs.
        """
        for gpu, event in () if run.captured else self._ends.items():
            current_stream(gpu).wait_event(event)
        callers = self._callers(run)
        every = [*callers, *lanes]
        join(callers, every)
        return every


def room_of(
    part: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    place: torch.device,
    key: Hashable,
    statics: Statics | None,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """The buffer of a copy between GPUs, and the tensors to arrive in it.

    CUDA graphs have addresses in them, and know a static tensor by its identity: so a replayed step
    finds both as they were in the last.

    Args:
        part: The part to copy: `once(spanned(tensors))`.
        tensors: The tensors to arrive.
        place: On which torch device.
        key: The copy.
        statics: Of the step, if it is replayed.
    """
    first = min(t.storage_offset() for t in tensors)
    layout = [(t.dtype, t.shape, t.stride(), t.storage_offset() - first) for t in tensors]
    known = statics.buffers.get(key) if statics is not None else None
    if known is None or known[0] != layout:
        room = torch.empty_like(part, device=place)  # as it lies: its readers count on that
        known = (layout, room, cut_up(laid_out(room, part, spanned(tensors)), tensors))
    if statics is not None:
        statics.buffers[key] = known
        for tensor in known[2]:
            statics.add(tensor)
    room, arriving = known[1:]
    return room, arriving


def move(step: Step, moves: Moves, send: Send, *, together: bool) -> None:
    """Fill the slots on the other side; every crossing of a copy has a number.

    Args:
        step: The step with the slots.
        moves: Between which of them.
        send: Brings the tensors of a crossing, given its number, to the other side.
        together: Whether views of one tensor may be one crossing: not where nothing is copied.
    """
    number = itertools.count()
    values, spec = pytree.tree_flatten([step.slots[src] for src, _ in moves.slots])
    tensors = {i: value for i, value in enumerate(values) if isinstance(value, torch.Tensor)}
    apart = [(place,) for place in tensors]
    for members in crossings(tensors) if together else apart:
        sent = send(next(number), [tensors[place] for place in members])
        for place, tensor in zip(members, sent, strict=True):
            values[place] = tensor
    for (_, dst), value in zip(moves.slots, pytree.tree_unflatten(values, spec), strict=True):
        step.slots[dst] = value
    for src, dst in moves.grads:
        gradient = step.grads[src]
        step.grads[dst] = None if gradient is None else send(next(number), [gradient])[0]


def _warn_again(unwarned: Iterable[CudaExecutor]) -> None:
    """Switch torch's warning of streams on, as it is by default, if no executor is left."""
    if not any(True for _ in unwarned):
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(True)
