"""The CPU executor: a worker thread per logical device, so that devices run side by side.

    caller     begin ───────────────────────────────────► all ended
    worker 0     run[a b c]─(1)─┐            run[f g]
    worker 1                    └─(2)─►copy, run[d e]

A lane is a list of functions, made once, and waits (2) for events of other lanes of its call (1).
Calls may be under way side by side: a worker goes on with the oldest one whose event is there, so
the oldest always can. An error in a lane ends the others of its call at their next wait.
"""

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Final, final

import torch

from baechi.errors import ExecutionError
from baechi.records.instructions import Copy, Free, Place, Program, Wait
from baechi.runtime.autograd.binding import Bound
from baechi.runtime.autograd.step import Step
from baechi.tracing.calling_convention import INSIDE
from baechi.tracing.guards import Autocast

Action = Callable[[Step], None]
_State = Callable[[], contextlib.ExitStack]  # makes a context

_UNPLACED: Final = (
    "the module was unplaced within a step or a stream and has no workers any more: go backward, "
    "or take all outputs, before unplace()."
)


@final
class _Phase:
    """The lanes of a phase: actions, each with its micro-batch; and events, by number.

    Instead of an action, True is that an event has come, and False the wait for it.
    """

    def __init__(self, program: Program, bound: Bound, number: int) -> None:
        phase = program.phases[number]
        # Of every event that is awaited, its lane and position, the lanes that wait.
        awaited: dict[tuple[int, int], list[int]] = {}
        for lane, rows in enumerate(phase.lanes):
            for row in rows:
                if isinstance(row, Wait):
                    awaited.setdefault((row.lane, row.position), []).append(lane)
        events = {event: index for index, event in enumerate(awaited)}
        self.waiting = list(awaited.values())
        self.lanes: list[list[tuple[Action | bool, int]]] = []
        for lane, rows in enumerate(phase.lanes):
            actions: list[tuple[Action | bool, int]] = []
            for position, row in enumerate(rows):
                if isinstance(row, Wait):
                    actions.append((False, events[row.lane, row.position]))
                elif isinstance(row, Copy):
                    moves = bound.copies[number][Place(row.tensor, row.dst)]
                    actions.append((moves.hand_over, row.batch))
                elif isinstance(row, Free):
                    clears = bound.frees[number][Place(row.tensor, row.device)]
                    actions.append((clears.clear, row.batch))
                else:
                    segment = phase.segments[row.segment]
                    tapes = (bound.tapes[tape] for tape in segment.tapes)
                    actions += [(getattr(tape, segment.way), row.batch) for tape in tapes]
                if (lane, position) in events:
                    actions.append((True, events[lane, position]))
            self.lanes.append(actions)


@final
class _Lane:
    """A lane of a call, and how far it has come."""

    def __init__(self, call: "RunningCall", actions: Sequence[tuple[Action | bool, int]]) -> None:
        self.call = call
        self._actions = actions
        self._position = 0

    @property
    def may_go_on(self) -> bool:
        """True if it does not wait."""
        action, number = self._actions[self._position]
        call = self.call
        return action is not False or call.came[number] or call.failure is not None

    def advance(self, worker: "_Worker") -> bool:
        """Go on to the next wait for what is not there, if other lanes are; True at the end."""
        call = self.call
        try:
            with call.state():
                for action, number in self._actions[self._position :]:
                    if action is False:
                        while not call.came[number] and call.failure is None:
                            if len(worker.lanes) > 1:
                                return False
                            worker.sleep()
                        if call.failure is not None:
                            return True
                    elif action is True:
                        call.tell(number)
                    else:
                        action(call.steps[number])
                    self._position += 1
        except BaseException as error:
            call.fail(error)
        return True


@final
class _Worker:
    """A thread that runs lanes; of those that need not wait the oldest.

    A lock is the fastest hand-over in Python: no queue, no condition, no polling. It is only a
    signal; the lanes that have not ended are in a list beside it. So a signal that is lost, or
    never given because of a Ctrl-C, does no harm.
    """

    def __init__(self, name: str, threads: int) -> None:
        self._bell = threading.Lock()
        self.lanes: list[_Lane] = []  # each is here until it has ended
        self._closed = False
        self.gone = False
        begun = threading.Event()
        threading.Thread(target=self._serve, args=(threads, begun), name=name, daemon=True).start()
        begun.wait()  # it has its threads now

    def submit(self, lane: _Lane) -> None:
        """Begin a lane; an error if the worker was closed."""
        if self._closed:
            raise ExecutionError(_UNPLACED)
        self.lanes.append(lane)
        self.wake()

    def wake(self) -> None:
        """Let it look for a lane that may go on."""
        _ring(self._bell)

    def sleep(self) -> None:
        """Return when there may be something to do."""
        self._bell.acquire()

    def close(self) -> None:
        """End the thread, after its lanes."""
        self._closed = True
        self.wake()

    def _serve(self, threads: int, begun: threading.Event) -> None:
        INSIDE.set(True)
        # torch sets a thread's number at its first look at it, from the process's: look, then set.
        torch.get_num_threads()
        torch.set_num_threads(threads)
        begun.set()
        lanes = self.lanes
        while lanes or not self._closed:
            ready = next((i for i in range(len(lanes)) if lanes[i].may_go_on), -1)
            if ready < 0:
                self.sleep()
            elif lanes[ready].advance(self):
                ended = lanes[ready].call.ended
                del lanes[ready]  # a step that is done must not be kept until the next
                _ring(ended)
        self.gone = True
        for lane in lanes:  # too late
            _ring(lane.call.ended)


def _ring(bell: threading.Lock) -> None:
    """Let the waiter at the lock go on, now or when it comes."""
    try:  # noqa: SIM105 (ten times a step, and `suppress` takes as long as all else here)
        bell.release()
    except RuntimeError:  # it is open already
        pass


@final
class RunningCall:
    """A phase of a call under way.

    Attributes:
        steps: One for each micro-batch.
        came: Whether an event has come, by its number.
        failure: The first error.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        phase: _Phase,
        workers: Sequence[_Worker],
        finish: Callable[[], Any] = lambda: None,
    ) -> None:
        self.steps, self._finish = steps, finish
        self._phase, self._workers = phase, workers
        self.came = [False] * len(phase.waiting)
        self.failure: BaseException | None = None
        self.state = _callers_state()
        self.ended = threading.Lock()
        rows = zip(workers, phase.lanes, strict=False)
        self._lanes = [(worker, _Lane(self, actions)) for worker, actions in rows if actions]
        self._rest = self._lanes[::-1]

    def begin(self) -> None:
        """Submit the lanes that are not begun, unless one has failed."""
        while self._rest and self.failure is None:
            worker, lane = self._rest.pop()
            worker.submit(lane)

    def tell(self, event: int) -> None:
        """Let those go on that wait for an event."""
        self.came[event] = True
        for lane in self._phase.waiting[event]:
            self._workers[lane].wake()

    def fail(self, error: BaseException) -> None:
        """Keep the first error, and let every lane see it."""
        if self.failure is None:
            self.failure = error
        for worker, _ in self._lanes:
            worker.wake()

    def wait(self) -> None:
        """Return when all lanes that were begun have ended."""
        for worker, lane in tuple(self._lanes):
            while lane in worker.lanes:
                if worker.gone:
                    worker.lanes.clear()
                    self.fail(ExecutionError(_UNPLACED))
                    break
                worker.wake()
                self.ended.acquire()
        _ring(self.ended)  # another thread may wait, too
        self._lanes.clear()  # each of which holds the call

    def end(self) -> Any:
        """What `finish` returns when it has ended; or raises its error."""
        self.wait()
        if self.failure is not None:
            raise self.failure
        return self._finish()


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
        self._phases = [_Phase(program, bound, i) for i in range(len(program.phases))]
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
        if not self._workers:
            rows = chain.from_iterable(self._phases[phase].lanes)  # of one device, in this thread
            for action, batch in rows:
                assert not isinstance(action, bool)
                action(steps[batch])
            return
        with self._busy:  # calls from two threads take turns
            call = self._call(steps, phase)
            while True:  # until all that was begun has ended, whatever happens here meanwhile
                try:
                    call.begin()
                    call.wait()
                    break
                except BaseException as error:  # Ctrl-C: stop the lanes, then let it through
                    call.fail(error)
            call.end()

    def begin(self, steps: Sequence[Step], finish: Callable[[], Any]) -> RunningCall:
        """Begin a forward that may be under way beside others; its `end` gives the result."""
        call = self._call(steps, 0, finish)
        try:
            call.begin()
        except BaseException as error:
            call.fail(error)
            raise
        return call

    def _call(self, steps: Sequence[Step], phase: int, *finish: Callable[[], Any]) -> RunningCall:
        if os.getpid() != self._process:
            raise ExecutionError(
                "this placed module was made in another process, and its worker threads are not "
                "in this one: a fork takes only the thread that forks. Place the model here, or "
                "start processes with the 'spawn' method."
            )
        return RunningCall(steps, self._phases[phase], self._workers, *finish)


def _close_all(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.close()


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
