"""The CPU executor: a worker thread per logical device, so that devices run side by side.

    caller     start ───────────────────────────────────► all done
    worker 0     run[a b c]─(1)─┐            run[f g]
    worker 1                    └─(2)─►copy, run[d e]

A lane is a list of functions, made once. An event that another lane waits for (1) opens a gate, a
lock with one opener and one waiter, and (2) the waiter closes it again as it passes; so gates need
no reset between calls. An error opens every gate: every lane goes on, finds it, and stops.
"""

import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Final, final

import torch

from baechi.errors import ExecutionError
from baechi.records.instructions import Copy, Free, Instruction, Place, Program, Run, Wait
from baechi.runtime.autograd.binding import Bound, Moves
from baechi.runtime.autograd.step_state import Step

Action = Callable[[Step], None]

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
        """Begin a task.

        Raises:
            ExecutionError: The worker was closed.
        """
        if self._closed:
            raise ExecutionError(_UNPLACED)
        self._tasks.append(task)
        _ring(self._start)

    def wait(self) -> None:
        """Return when the task has ended.

        Raises:
            ExecutionError: The worker was closed before it could begin.
        """
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
class CpuExecutor:
    """A worker per logical device; a single device without workers runs in the caller's thread.

    Args:
        program: The program to run.
        bound: To what.
        n_devices: Logical devices.
        threads: torch threads per worker; `None` gives each an equal share of torch's own, and a
            single device all of them.

    Attributes:
        threads: torch threads per worker; None if there are no workers.
    """

    def __init__(self, program: Program, bound: Bound, n_devices: int, threads: int | None) -> None:
        self._failure: BaseException | None = None
        self._gates: list[threading.Lock] = []
        self._lanes = [self._actions(program, bound, number) for number in range(2)]
        self._reset()
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
            weakref.finalize(self, _close_all, self._workers)
        self._busy = threading.Lock()
        self._process = os.getpid()

    def _actions(self, program: Program, bound: Bound, number: int) -> list[list[Action]]:
        """The actions of each lane in a phase."""
        if number >= len(program.phases):
            return []
        phase = program.phases[number]
        gates: dict[tuple[int, int], list[int]] = {}  # of every event, one for each who waits
        mine: dict[tuple[int, int], int] = {}
        for lane, rows in enumerate(phase.lanes):
            for position, row in enumerate(rows):
                if isinstance(row, Wait):
                    gates.setdefault((row.lane, row.position), []).append(len(self._gates))
                    mine[lane, position] = len(self._gates)
                    self._gates.append(threading.Lock())
        lanes: list[list[Action]] = []
        for lane, rows in enumerate(phase.lanes):
            actions: list[Action] = []
            for position, row in enumerate(rows):
                if isinstance(row, Wait):
                    actions.append(self._wait(mine[lane, position]))
                else:
                    actions += _actions_of(program, bound, number, row)
                if (lane, position) in gates:
                    actions.append(self._open(gates[lane, position]))
            lanes.append(actions)
        return lanes

    # The executor is not kept alive by its own actions: its workers end when it is dropped.

    def _wait(self, gate: int) -> Action:
        gates, weak = self._gates, weakref.ref(self)

        def wait(step: Step) -> None:  # noqa: ARG001
            gates[gate].acquire()
            executor = weak()
            if executor is None or executor._failure is not None:
                raise _Stopped

        return wait

    def _open(self, numbers: Sequence[int]) -> Action:
        gates = self._gates

        def open_gates(step: Step) -> None:  # noqa: ARG001
            for number in numbers:
                _ring(gates[number])  # a failure may have opened it

        return open_gates

    def _reset(self) -> None:
        """Close all gates, after a failure or at first."""
        for number in range(len(self._gates)):
            gate = threading.Lock()
            gate.acquire()
            self._gates[number] = gate
        self._failure = None

    def close(self) -> None:
        """Stop the workers; the placed module does not run any more."""
        _close_all(self._workers)

    def meet(self, step: Step) -> None:
        """All that was done is done."""

    def run(self, step: Step, phase: int) -> None:
        """Do every lane's instructions, lanes side by side.

        Raises:
            ExecutionError: An operator failed, this is a fork of the process with the workers, or
                they were stopped by `close`.
        """
        lanes = self._lanes[phase]
        if not self._workers:
            for action in chain.from_iterable(lanes):  # of the one device, in the caller's thread
                action(step)
            return
        if os.getpid() != self._process:
            raise ExecutionError(
                "this placed module was made in another process, and its worker threads are not "
                "in this one: a fork takes only the thread that forks. Place the model here, or "
                "start processes with the 'spawn' method."
            )
        with self._busy:  # calls from two threads take turns
            self._run_side_by_side(step, lanes, _ThreadState())

    def _run_side_by_side(
        self, step: Step, lanes: Sequence[Sequence[Action]], state: "_ThreadState"
    ) -> None:
        if self._failure is not None:  # a Ctrl-C came while the last failure was cleared away
            self._reset()
        left = [device for device, actions in enumerate(lanes) if actions]
        while True:  # until all that was begun has ended, whatever happens here meanwhile
            try:
                while left and self._failure is None:
                    device = left.pop()
                    self._workers[device].submit(self._task(step, lanes[device], state))
                for worker in self._workers:
                    worker.wait()
                break
            except BaseException as error:  # Ctrl-C: stop the workers, then let it through
                self._fail(error)
        failure = self._failure
        if failure is not None:
            self._reset()
            raise failure

    def _task(
        self, step: Step, actions: Sequence[Action], state: "_ThreadState"
    ) -> Callable[[], None]:
        def task() -> None:
            try:
                with state.applied():
                    for action in actions:
                        action(step)
            except _Stopped:
                pass
            except BaseException as error:
                self._fail(error)

        return task

    def _fail(self, error: BaseException) -> None:
        """Keep the first error, and open every gate, so that all waiters see it."""
        if self._failure is None:
            self._failure = error
        for gate in self._gates:
            _ring(gate)


def _actions_of(program: Program, bound: Bound, number: int, row: Instruction) -> list[Action]:
    """The actions of an instruction that is no wait."""
    if isinstance(row, Copy):
        return [_copy(bound.copies[number][Place(row.tensor, row.dst)])]
    if isinstance(row, Free):
        return [partial(let_go, freed=bound.frees[number][Place(row.tensor, row.device)])]
    assert isinstance(row, Run)
    segment = program.phases[number].segments[row.segment]
    tapes = [bound.tapes[tape] for tape in segment.tapes]
    if number:
        return [tape.recompute if segment.again else tape.backward for tape in tapes]
    return [tape.forward for tape in tapes]


def _close_all(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.close()


def _copy(moves: Moves) -> Action:
    """Hand values over: logical CPU devices share the machine's memory."""
    slots, grads = moves.slots, moves.grads

    def copy(step: Step) -> None:
        for src, dst in slots:
            step.slots[dst] = step.slots[src]
        for src, dst in grads:
            step.grads[dst] = step.grads[src]

    return copy


def let_go(step: Step, freed: Moves) -> None:
    """Empty the slots of what a program frees."""
    for slot in freed.slots:
        step.slots[slot] = None
    for slot in freed.grads:
        step.grads[slot] = None


@final
class _ThreadState:
    """The caller's settings that torch keeps per thread, to be applied in workers."""

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._autocast = torch.is_autocast_enabled("cpu")
        self._dtype = torch.get_autocast_dtype("cpu")
        self._caching = torch.is_autocast_cache_enabled()

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """The block runs under them."""
        with contextlib.ExitStack() as stack:
            if self._inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self._grad))
            if self._autocast:
                stack.enter_context(torch.autocast("cpu", self._dtype, cache_enabled=self._caching))
            yield
