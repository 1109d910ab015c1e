"""The CPU executor: a worker thread per logical device, so that devices run side by side.

    caller     submit ───────────────────────────────────► all done
    worker 0     [a b c]─(1)─┐            [f g]
    worker 1                 └─(2)─►[d e]

(1) a segment that ran opens its gate; (2) a segment waits at the gates of those that it reads from
on other devices. An error opens every gate: everybody goes on, sees it, and stops.
"""

import contextlib
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import final

import torch

from baechi.metering import Meter
from baechi.runtime.segments import Segment
from baechi.runtime.steps import Step

Run = Callable[[int], None]


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
