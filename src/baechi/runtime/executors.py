"""Who runs the segments of a step: workers on CPUs, streams on CUDA devices.

An executor adds no decision of its own. It runs each logical device's segments in launch order and
makes every segment wait for those that it reads from:

    CPU    a worker thread per logical device, with its share of torch's threads;
           a gate per segment that other devices wait for
    CUDA   one thread launches everything; a compute lane per logical device, a copy lane beside
           it, and events between them

Launch order is topological, so no two devices wait for each other.
"""

import contextlib
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, final

import torch

from baechi.errors import ExecutionError
from baechi.metering import Meter
from baechi.runtime.segments import Segment
from baechi.runtime.steps import CALLER, Step

Run = Callable[[int], None]


class Executor(Protocol):
    """Runs the segments of a step on their devices."""

    def bring(self, tensor: torch.Tensor, src: int, dst: int) -> torch.Tensor:
        """The tensor on logical device `dst`, ready before what runs there next."""

    def forward(self, step: Step, meter: Meter | None) -> None:
        """Run every segment's forward."""

    def backward(self, step: Step, keep: bool, meter: Meter | None) -> None:
        """Run every segment's backward."""

    def give(self, tensor: torch.Tensor) -> torch.Tensor:
        """A result, safe for the caller to use and to free."""

    def close(self) -> None:
        """Stop what the executor started."""


@final
class _Gate:
    """Closed until its segment has run; may be opened again without harm."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def open(self) -> None:
        with contextlib.suppress(RuntimeError):  # open already
            self._lock.release()

    def wait(self) -> None:
        self._lock.acquire()
        self.open()


def _serve(
    tasks: "queue.SimpleQueue[Callable[[], None] | None]", threads: int, ready: threading.Event
) -> None:
    # torch sets a thread's number at its first look at it, from the process's: look, then set.
    torch.get_num_threads()
    torch.set_num_threads(threads)
    ready.set()
    while (task := tasks.get()) is not None:
        task()
        del task  # a step that is done must not wait for the next to be freed


@final
class _Worker:
    """A thread that runs what it is given, in order."""

    def __init__(self, name: str, threads: int) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        ready = threading.Event()
        arguments = (self._tasks, threads, ready)
        threading.Thread(target=_serve, args=arguments, name=name, daemon=True).start()
        ready.wait()

    def submit(self, task: Callable[[], None]) -> None:
        self._tasks.put(task)

    def close(self) -> None:
        self._tasks.put(None)


@final
class CpuExecutor:
    """A worker per logical device; a single device without workers runs in the caller's thread.

    Args:
        segments: In launch order.
        backward: Segment indices in the launch order of the backward.
        n_devices: Logical devices.
        threads: torch threads per worker; `None` gives each an equal share of torch's own, and a
            single device all of them.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        backward: Sequence[int],
        n_devices: int,
        threads: int | None,
    ) -> None:
        self._segments = segments
        self._forward = _by_device(segments, range(len(segments)), n_devices)
        self._backward = _by_device(segments, backward, n_devices)
        self._forward_waits = [segment.waits for segment in segments]
        self._backward_waits = _reader_waits(segments)
        self._workers: list[_Worker] = []
        used = sorted({segment.device for segment in segments})
        if len(used) > 1 or threads is not None:
            total = torch.get_num_threads()
            share = threads or max(total // len(used), 1)
            self._workers = [_Worker(f"baechi-{device}", share) for device in range(n_devices)]
            # A worker's setting is also the process's default for threads to come: restore that.
            torch.set_num_threads(total)
            weakref.finalize(self, _close_all, self._workers)
        self._busy = threading.Lock()

    def bring(self, tensor: torch.Tensor, src: int, dst: int) -> torch.Tensor:  # noqa: ARG002
        """The same tensor: logical CPU devices share the machine's memory."""
        return tensor

    def give(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same tensor."""
        return tensor

    def forward(self, step: Step, meter: Meter | None) -> None:
        """Run every segment's forward, devices side by side."""
        self._run(step.forward, self._forward, self._forward_waits, meter)

    def backward(self, step: Step, keep: bool, meter: Meter | None) -> None:
        """Run every segment's backward, devices side by side."""

        def run(index: int) -> None:
            step.backward(index, keep)

        self._run(run, self._backward, self._backward_waits, meter)

    def close(self) -> None:
        """Stop the workers; the placed module does not run any more."""
        _close_all(self._workers)

    def _run(
        self,
        run: Run,
        programs: Sequence[Sequence[int]],
        waits: Sequence[Sequence[int]],
        meter: Meter | None,
    ) -> None:
        state = _ThreadState()
        if not self._workers:
            for device, program in enumerate(programs):
                with state.applied(device, meter):
                    for index in program:
                        run(index)
            return
        with self._busy:  # calls from two threads take turns
            _Parallel(run, programs, waits, state, meter).run(self._workers)


def _close_all(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.close()


def _by_device(
    segments: Sequence[Segment], order: Sequence[int], n_devices: int
) -> list[list[int]]:
    programs: list[list[int]] = [[] for _ in range(n_devices)]
    for index in order:
        programs[segments[index].device].append(index)
    return programs


def _reader_waits(segments: Sequence[Segment]) -> list[tuple[int, ...]]:
    """For every segment the segments on other devices whose backwards feed its own."""
    waits: list[set[int]] = [set() for _ in segments]
    for segment in segments:
        for _, source in segment.sources:
            if segments[source].device != segment.device:
                waits[source].add(segment.index)
    return [tuple(sorted(readers)) for readers in waits]


@final
class _ThreadState:
    """The caller's settings that torch keeps per thread, to be applied in workers."""

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._autocast = torch.is_autocast_enabled("cpu")
        self._autocast_dtype = torch.get_autocast_dtype("cpu")

    @contextlib.contextmanager
    def applied(self, device: int, meter: Meter | None) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self._inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self._grad))
            if self._autocast:
                stack.enter_context(torch.autocast("cpu", self._autocast_dtype))
            if meter is not None:
                stack.enter_context(meter.counting(device))
            yield


@final
class _Parallel:
    """One pass over all segments by all workers."""

    def __init__(
        self,
        run: Run,
        programs: Sequence[Sequence[int]],
        waits: Sequence[Sequence[int]],
        state: _ThreadState,
        meter: Meter | None,
    ) -> None:
        self._run_segment = run
        self._programs = programs
        self._waits = waits
        self._state = state
        self._meter = meter
        self._gates = {index: _Gate() for row in waits for index in row}
        self._error: BaseException | None = None
        self._done: queue.SimpleQueue[None] = queue.SimpleQueue()

    def run(self, workers: Sequence[_Worker]) -> None:
        active = [device for device, program in enumerate(self._programs) if program]
        for device in active:
            workers[device].submit(lambda device=device: self._run_device(device))  # type: ignore[misc]
        left = len(active)
        while left:
            try:
                self._done.get()
                left -= 1
            except BaseException as error:  # Ctrl-C: stop the workers, then let it through
                self._fail(error)
        if self._error is not None:
            raise self._error

    def _run_device(self, device: int) -> None:
        try:
            with self._state.applied(device, self._meter):
                for index in self._programs[device]:
                    for source in self._waits[index]:
                        self._gates[source].wait()
                    if self._error is not None:
                        return
                    self._run_segment(index)
                    gate = self._gates.get(index)
                    if gate is not None:
                        gate.open()
        except BaseException as error:
            self._fail(error)
        finally:
            self._done.put(None)

    def _fail(self, error: BaseException) -> None:
        """Keep the first error, and let everybody who waits go on to see it."""
        if self._error is None:
            self._error = error
        for gate in self._gates.values():
            gate.open()


@final
class CudaExecutor:
    """Streams and events; the caller's thread launches every segment in launch order.

    The first logical device of a GPU computes on the caller's current stream, the others on lanes
    of their own. Copies run on copy lanes of both sides, so they block no compute. What crosses
    lanes is told to torch's allocator (`record_stream`).

    Args:
        segments: In launch order.
        backward: Segment indices in the launch order of the backward.
        places: The torch device of every logical device; CPUs may be among them.
    """

    def __init__(
        self, segments: Sequence[Segment], backward: Sequence[int], places: Sequence[torch.device]
    ) -> None:
        self._segments = segments
        self._backward = tuple(backward)
        self._places = tuple(places)
        seen: set[torch.device] = set()
        self._own: list[torch.cuda.Stream | None] = []
        for place in places:
            own = place.type == "cuda" and place in seen
            self._own.append(_stream(place) if own else None)
            seen.add(place)
        self._gpus = sorted({p for p in places if p.type == "cuda"}, key=lambda p: p.index)
        self._copies = {gpu: _stream(gpu) for gpu in self._gpus}

    def close(self) -> None:
        """Nothing runs between calls."""

    def _lane(self, device: int) -> torch.cuda.Stream | None:
        place = self._places[device]
        if place.type != "cuda":
            return None
        return self._own[device] or torch.cuda.current_stream(place)

    def bring(self, tensor: torch.Tensor, src: int, dst: int) -> torch.Tensor:
        """The tensor on `dst`'s device; `dst`'s lane waits for it."""
        place, lane = self._places[dst], self._lane(dst)
        made = self._made_by(tensor, src)
        if tensor.device == place:
            if lane is not None and made is not None and made != lane:
                lane.wait_stream(made)
                tensor.record_stream(lane)
            return tensor
        if lane is None or made is None:  # to or from a CPU
            if made is not None:
                made.synchronize()
            moved = tensor.to(place, non_blocking=lane is not None and tensor.is_pinned())
            if lane is not None:
                lane.wait_stream(torch.cuda.current_stream(place))
                moved.record_stream(lane)
            return moved
        # Dense on the source's lane first: a strided copy across devices is a slow kernel.
        with torch.cuda.stream(made):
            dense = tensor.contiguous()
        out, into = self._copies[tensor.device], self._copies[place]
        out.wait_stream(made)
        with torch.cuda.stream(into), torch.cuda.stream(out):
            moved = dense.to(place, non_blocking=True)
        dense.record_stream(out)
        moved.record_stream(lane)
        lane.wait_stream(into)
        return moved

    def _made_by(self, tensor: torch.Tensor, src: int) -> torch.cuda.Stream | None:
        if tensor.device.type != "cuda":
            return None
        if src != CALLER and self._places[src] == tensor.device:
            return self._lane(src)
        return torch.cuda.current_stream(tensor.device)

    def forward(self, step: Step, meter: Meter | None) -> None:  # noqa: ARG002
        """Launch every segment's forward."""
        with self._fenced():
            for segment in self._segments:
                with self._on(segment.device):
                    step.forward(segment.index)

    def backward(self, step: Step, keep: bool, meter: Meter | None) -> None:  # noqa: ARG002
        """Launch every segment's backward."""
        with self._fenced():
            for index in self._backward:
                with self._on(self._segments[index].device):
                    step.backward(index, keep)

    def give(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, told to the allocator as used by the caller's stream."""
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return tensor

    @contextlib.contextmanager
    def _fenced(self) -> Iterator[None]:
        """Every lane begins after the caller's streams, and they go on after every lane."""
        lanes = [*(s for s in self._own if s is not None), *self._copies.values()]
        for lane in lanes:
            lane.wait_stream(torch.cuda.current_stream(lane.device))
        try:
            yield
        finally:
            for lane in lanes:
                torch.cuda.current_stream(lane.device).wait_stream(lane)

    @contextlib.contextmanager
    def _on(self, device: int) -> Iterator[None]:
        lane = self._lane(device)
        if lane is None:
            yield
        else:
            with torch.cuda.stream(lane):
                yield


def _stream(place: torch.device) -> torch.cuda.Stream:
    stream: torch.cuda.Stream = torch.cuda.Stream(place)  # type: ignore[no-untyped-call]
    return stream


def make_executor(
    segments: Sequence[Segment],
    backward: Sequence[int],
    places: Sequence[torch.device],
    threads: int | None,
) -> Any:
    """The executor for these torch devices, one per logical device.

    Raises:
        ExecutionError: The devices are neither CPUs nor CUDA.
    """
    kinds = {place.type for place in places}
    if kinds == {"cpu"}:
        return CpuExecutor(segments, backward, len(places), threads)
    if kinds <= {"cpu", "cuda"}:
        return CudaExecutor(segments, backward, places)
    raise ExecutionError(f"no executor runs devices of kinds {', '.join(sorted(kinds))}.")
