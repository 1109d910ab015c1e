"""The CPU executor: a worker thread per logical device, so that devices run side by side.

    caller     start ───────────────────────────────────► all done
    worker 0     run[a b c]─(1)─┐            run[f g]
    worker 1                    └─(2)─►copy, run[d e]

A lane is a list of functions, made once. An event that another lane waits for (1) opens a gate, and
(2) the waiter closes it again as it passes. An error opens every gate: every lane goes on, finds
it, and stops.
"""

import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Final, final

import torch

from baechi.errors import ExecutionError
from baechi.records.instructions import Copy, Free, Place, Program, Wait
from baechi.runtime.autograd.binding import Bound
from baechi.runtime.autograd.step import Step
from baechi.tracing.calling_convention import INSIDE
from baechi.tracing.guards import Autocast

Action = Callable[[Step], None]
Actions = Sequence[tuple[Action, int]]  # each with its micro-batch
_State = Callable[[], contextlib.ExitStack]  # makes a context

_UNPLACED: Final = (
    "the module was unplaced within a step and has no workers any more: go backward before "
    "unplace()."
)


@final
class _Stopped(Exception):  # noqa: N818 (no error of its own: another lane has one)
    """Another lane failed."""


@final
class _Worker:
    """A thread that runs one task at a time; a task is awaited before the next is submitted.

    A lock is the fastest hand-over in Python: no queue, no condition, no polling. It is only a
    signal; the tasks that are not done yet are in a queue beside it. So a signal that is lost, or
    never given because of a Ctrl-C, does no harm.
    """

    def __init__(self, name: str, threads: int) -> None:
        self._start, self._done = threading.Lock(), threading.Lock()
        self._tasks: deque[Callable[[], None]] = deque()  # each is here until it has ended
        self._closed = False
        self._gone = False
        threading.Thread(target=self._serve, args=(threads,), name=name, daemon=True).start()
        self.submit(lambda: None)
        self.wait()  # it has its threads now

    def submit(self, task: Callable[[], None]) -> None:
        """Begin a task; an error if the worker was closed."""
        if self._closed:
            raise ExecutionError(_UNPLACED)
        self._tasks.append(task)
        _ring(self._start)

    def wait(self) -> None:
        """Return when the task has ended; an error if the worker was closed before it began."""
        while self._tasks:
            if self._gone:
                self._tasks.clear()
                raise ExecutionError(_UNPLACED)
            _ring(self._start)
            self._done.acquire()

    def close(self) -> None:
        """End the thread, after its task."""
        self._closed = True
        _ring(self._start)

    def _serve(self, threads: int) -> None:
        INSIDE.set(True)
        # torch sets a thread's number at its first look at it, from the process's: look, then set.
        torch.get_num_threads()
        torch.set_num_threads(threads)
        while True:
            while not self._tasks:
                if self._closed:
                    self._gone = True
                    _ring(self._done)
                    return
                self._start.acquire()
            self._tasks[0]()
            self._tasks.popleft()  # a step that is done must not be kept until the next
            _ring(self._done)


def _ring(bell: threading.Lock) -> None:
    """Let the waiter at the lock go on, now or when it comes."""
    with contextlib.suppress(RuntimeError):  # it is open already
        bell.release()


@final
class _Gates:
    """A gate for each wait; and the first error, which opens them all."""

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self._locks: list[threading.Lock] = []

    def add(self) -> int:
        """A new gate, closed."""
        self._locks.append(threading.Lock())
        self._locks[-1].acquire()
        return len(self._locks) - 1

    def reset(self) -> None:
        """Close all gates after a failure."""
        for gate in self._locks:
            gate.acquire(blocking=False)
        self.failure = None

    def wait(self, number: int, step: Step) -> None:  # noqa: ARG002 (an action)
        """Pass a gate when it is open, and close it."""
        self._locks[number].acquire()
        if self.failure is not None:
            raise _Stopped

    def open(self, numbers: Sequence[int], step: Step) -> None:  # noqa: ARG002 (an action)
        """Open some gates."""
        for number in numbers:
            _ring(self._locks[number])  # a failure may have opened it

    def fail(self, error: BaseException) -> None:
        """Keep the first error, and open every gate, so that all waiters see it."""
        if self.failure is None:
            self.failure = error
        for lock in self._locks:
            _ring(lock)


@final
class CpuExecutor:
    """A worker per logical device; a single device without workers runs in the caller's thread.

    `threads` are torch's per worker; None gives each an equal share of torch's own, and a single
    device all of them.

    Attributes:
        threads: torch threads per worker; None if there are no workers.
    """

    def __init__(self, program: Program, bound: Bound, n_devices: int, threads: int | None) -> None:
        self.bound = bound
        self._gates = _Gates()
        self._lanes = [_lanes(program, bound, i, self._gates) for i in range(len(program.phases))]
        self._workers: list[_Worker] = []
        self.threads: int | None = None
        used = sorted({tape.device for tape in program.tapes})
        if len(used) > 1 or threads is not None:
            total = torch.get_num_threads()
            share = threads or max(total // len(used), 1)
            self.threads = share
            self._workers = [_Worker(f"baechi-{device}", share) for device in range(n_devices)]
            # A worker's setting is also the process's default for threads to come: restore that.
            torch.set_num_threads(total)
            # They end with the executor, which neither they nor the actions keep alive.
            weakref.finalize(self, _close_all, self._workers)
        self._busy = threading.Lock()
        self._process = os.getpid()

    def close(self) -> None:
        """Stop the workers; the placed module does not run any more."""
        _close_all(self._workers)

    def meet(self, step: Step) -> None:
        """All that was done is done."""

    def run(self, steps: Sequence[Step], phase: int) -> None:
        """Do every lane's instructions, lanes side by side; there is a step per micro-batch.

        Raises:
            ExecutionError: An operator failed, this is a fork of the process with the workers, or
                they were stopped by `close`.
        """
        lanes = self._lanes[phase]
        if not self._workers:
            rows = chain.from_iterable(lanes)  # of the one device, in the caller's thread
            for action, batch in rows:
                action(steps[batch])
            return
        if os.getpid() != self._process:
            raise ExecutionError(
                "this placed module was made in another process, and its worker threads are not "
                "in this one: a fork takes only the thread that forks. Place the model here, or "
                "start processes with the 'spawn' method."
            )
        with self._busy:  # calls from two threads take turns
            self._run_side_by_side(steps, lanes)

    def _run_side_by_side(self, steps: Sequence[Step], lanes: Sequence[Actions]) -> None:
        gates, state = self._gates, _callers_state()
        if gates.failure is not None:  # a Ctrl-C came while the last failure was cleared away
            gates.reset()
        left = [device for device, actions in enumerate(lanes) if actions]
        while True:  # until all that was begun has ended, whatever happens here meanwhile
            try:
                while left and gates.failure is None:
                    device = left.pop()
                    task = partial(_run_lane, steps, lanes[device], state, gates)
                    self._workers[device].submit(task)
                for worker in self._workers:
                    worker.wait()
                break
            except BaseException as error:  # Ctrl-C: stop the workers, then let it through
                gates.fail(error)
        failure = gates.failure
        if failure is not None:
            gates.reset()
            raise failure


def _close_all(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.close()


def _run_lane(steps: Sequence[Step], actions: Actions, state: _State, gates: _Gates) -> None:
    try:
        with state():
            for action, batch in actions:
                action(steps[batch])
    except _Stopped:
        pass
    except BaseException as error:
        gates.fail(error)


def _lanes(program: Program, bound: Bound, number: int, gates: _Gates) -> list[Actions]:
    """The actions of each lane in a phase."""
    phase = program.phases[number]
    awaited: dict[tuple[int, int], list[int]] = {}  # the gates of every event, one for each waiter
    waits: dict[tuple[int, int], int] = {}
    for lane, rows in enumerate(phase.lanes):
        for position, row in enumerate(rows):
            if isinstance(row, Wait):
                waits[lane, position] = gate = gates.add()
                awaited.setdefault((row.lane, row.position), []).append(gate)
    lanes: list[Actions] = []
    for lane, rows in enumerate(phase.lanes):
        actions: list[tuple[Action, int]] = []
        for position, row in enumerate(rows):
            if isinstance(row, Wait):
                actions.append((partial(gates.wait, waits[lane, position]), 0))
            elif isinstance(row, Copy):
                moves = bound.copies[number][Place(row.tensor, row.dst)]
                actions.append((moves.hand_over, row.batch))
            elif isinstance(row, Free):
                clears = bound.frees[number][Place(row.tensor, row.device)]
                actions.append((clears.clear, row.batch))
            else:
                segment = phase.segments[row.segment]
                run = (
                    "recompute" if segment.again else "backward" if segment.backward else "forward"
                )
                tapes = (bound.tapes[tape] for tape in segment.tapes)
                actions += [(getattr(tape, run), row.batch) for tape in tapes]
            if (lane, position) in awaited:
                actions.append((partial(gates.open, awaited[lane, position]), 0))
        lanes.append(actions)
    return lanes


def _callers_state() -> _State:
    """Makes contexts of the caller's settings that torch keeps per thread, for workers."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    autocast = Autocast.current()

    def applied() -> contextlib.ExitStack:
        stack = contextlib.ExitStack()
        if inference:
            stack.enter_context(torch.inference_mode())
        stack.enter_context(torch.set_grad_enabled(grad))
        stack.enter_context(autocast.applied())
        return stack

    return applied
