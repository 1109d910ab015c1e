"""The executor of a rank: its slice of the program, in one thread; and edges to other ranks.

    rank 0    run[a b c]─send─►      run[f g]
    rank 1                  receive─►run[d e]

`program/rank_slices.py` says why no ranks wait for each other for ever. At the end of a forward the
results go to all ranks, and the state of the random generator where somebody drew from it.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch

from baechi.errors import InputError
from baechi.processes.edges import Sender
from baechi.processes.tensor_messages import Flag, Message, receive, send, try_send
from baechi.processes.world import Ranks
from baechi.program.rank_slices import (
    GENERATOR,
    check_slices,
    early_sends,
    in_order,
    last_to_draw,
    run_slice,
    slice_of,
)
from baechi.records.instructions import Copy, Free, Instruction, Place, Program, Run
from baechi.runtime.autograd.binding import Bound, Moves
from baechi.runtime.autograd.step import Step, random_state, set_random_state


@final
class _Phase:
    """A rank's slice of a phase, as actions."""

    def __init__(
        self, program: Program, number: int, ranks: Ranks, random: int, bound: Bound
    ) -> None:
        self.phase = phase = program.phases[number]
        order = in_order(phase, random)
        slices = [slice_of(phase, order, rank) for rank in range(ranks.size)]
        check_slices(phase, order, slices)
        self.rows = slices[ranks.rank]
        self.sends = early_sends(phase, self.rows, ranks.rank)
        self.drawn = last_to_draw(phase, random)
        # By the index of a row the parameters that no later one adds to.
        self.whole: dict[int, list[int]] = {}
        added = {}
        for index, (row, _) in enumerate(self.rows if ranks.replicas > 1 else ()):
            if isinstance(row, Run) and (segment := phase.segments[row.segment]).backward:
                tapes = (bound.tapes[tape] for tape in segment.tapes)
                added.update({p: index for tape in tapes for p, _ in tape.totals})
        for parameter, index in added.items():
            self.whole.setdefault(index, []).append(parameter)


@final
class RankExecutor:
    """Runs the slice of one rank.

    Args:
        program: The program of all ranks.
        bound: It, bound to the model.
        ranks: The ranks.
        random: The number of the random generator among the states that segments update.
        message_bytes: The largest message of a step.
    """

    threads = None

    def __init__(
        self, program: Program, bound: Bound, ranks: Ranks, random: int, message_bytes: int
    ) -> None:
        if any(tape.written for tape in bound.tapes):
            raise InputError(
                "forward writes into an argument, and only one rank's would change. Let it write "
                "into a copy, or place the model in one process."
            )
        self.bound = bound
        self._program, self._ranks = program, ranks
        self._plan = ranks.key()  # all make the same plans
        numbers = range(len(program.phases))
        self._phases = [_Phase(program, i, ranks, random, bound) for i in numbers]
        self._ran: list[tuple[str, int, int]] = []  # what was done in the latest step
        self._means: dict[int, tuple[torch.Tensor, Callable[[], None]]] = {}  # under way
        self._pending: deque[RankCall] = deque()
        self._owners = sorted({row.device for row in bound.results.values()})
        ranks.reserve(message_bytes)

    def close(self) -> None:
        """Nothing: edges are of all plans."""

    def meet(self, step: Step) -> None:
        """All that was done is done."""

    def run(self, steps: Sequence[Step], phase: int) -> None:
        """Run the slice of a phase; there is a step per micro-batch.

        Raises:
            ExecutionError: An operator failed, here or on another rank; or a rank is gone.
        """
        with self._telling():
            self._run(steps, phase)
            if phase == 0:
                self._share_results(steps)
            self._share_generator(self._phases[phase].drawn)

    def averaged(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The means of gradients of parameters over the replicas; many are under way already."""
        if self._ranks.replicas == 1:
            return list(gradients)
        with self._telling():
            self._average(gradients, range(len(gradients)))
            means, self._means = self._means, {}
            for _, end in means.values():
                end()
        return [means[number][0] if number in means else None for number in range(len(gradients))]

    def _average(self, gradients: Sequence[torch.Tensor | None], numbers: Iterable[int]) -> None:
        """Begin with the means of some parameters; all replicas do so in one order."""
        for number in numbers:
            gradient = gradients[number]
            if gradient is not None and number not in self._means:
                mean = gradient.clone()
                self._means[number] = mean, self._ranks.average(mean)

    def begin(self, steps: Sequence[Step], finish: Callable[[], Any]) -> "RankCall":
        """Run the slice of a forward, whose results come when they are asked for.

        So a rank that has done its part goes on with later calls.
        """
        with self._telling():
            self._run(steps, 0)
        call = RankCall(self, steps, finish)
        self._pending.append(call)
        return call

    def end(self, call: "RankCall") -> None:
        """Give all ranks the results of a call, after those of all before it."""
        with self._telling():
            while call in self._pending:
                self._share_results(self._pending.popleft().steps)

    def ran(self) -> Sequence[Sequence[tuple[str, int, int]]]:
        """What each rank did in its latest step, by the clock; every rank calls this."""
        ahead = time.time_ns() - time.perf_counter_ns()
        mine = [(name, start + ahead, end + ahead) for name, start, end in self._ran]
        return self._ranks.told("a report", mine)

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Every rank learns of an error inside."""
        self._ranks.check()
        try:
            yield
        except BaseException as error:
            self._ranks.tell(error)
            raise

    def _run(self, steps: Sequence[Step], number: int) -> None:
        mine, ranks, run = self._phases[number], self._ranks, self._ranks.key()
        totals = steps[0].totals

        def key(row: Copy) -> tuple[int, ...]:
            return run, self._plan, number, row.tensor, row.batch

        def message(row: Copy) -> Message:
            if row.tensor == GENERATOR:
                return Message(key(row), [random_state(ranks.device)])
            moves = self._moves(number, row)
            return _sent(steps[row.batch], moves, key(row))

        def do(index: int) -> None:
            row, _ = mine.rows[index]
            start = time.perf_counter_ns()
            if isinstance(row, Copy):
                self._receive(steps, number, row, key(row))
                self._ran.append(("receive", start, time.perf_counter_ns()))
                return
            self._do(steps, number, row)
            if totals is not None:
                self._average(totals.rows, mine.whole.get(index, ()))
            if isinstance(row, Run):
                way = "backward" if mine.phase.segments[row.segment].backward else "forward"
                name = f"{way} of batch {row.batch}"
                self._ran.append((name, start, time.perf_counter_ns()))

        def sent(row: Copy, how: Callable[[Sender, Message], Any]) -> Any:
            start = time.perf_counter_ns()
            if found := (how(ranks.senders[row.dst], message(row)) is not False):
                self._ran.append(("send", start, time.perf_counter_ns()))
            return found

        if number == 0:
            self._ran = []
        run_slice(
            *(mine.rows, ranks.rank, mine.sends, do),
            *(lambda row: sent(row, send), lambda row: sent(row, try_send)),
        )

    def _moves(self, number: int, row: Copy) -> Moves:
        return self.bound.copies[number][Place(row.tensor, row.dst)]

    def _do(self, steps: Sequence[Step], number: int, row: Instruction) -> None:
        phase = self._program.phases[number]
        if isinstance(row, Free):
            self.bound.frees[number][Place(row.tensor, row.device)].clear(steps[row.batch])
            return
        assert isinstance(row, Run)
        segment = phase.segments[row.segment]
        for index in segment.tapes:
            getattr(self.bound.tapes[index], segment.way)(steps[row.batch])

    def _receive(self, steps: Sequence[Step], number: int, row: Copy, key: tuple[int, ...]) -> None:
        ranks = self._ranks
        edge = ranks.receivers[row.src]
        if row.tensor == GENERATOR:
            (state,), _ = receive(edge, key, torch.device("cpu"))
            assert state is not None
            set_random_state(ranks.device, state)
            return
        moves, step = self._moves(number, row), steps[row.batch]
        tensors, flags = receive(edge, key, ranks.device, moves.shapes)
        found = iter(tensors)
        for (_, slot), value, flag in zip(moves.slots, moves.values, flags, strict=True):
            step.flags[value.number] = flag
            step.slots[slot] = value.filled([next(found) for _ in value.shapes])
        for _, slot in moves.grads:
            step.grads[slot] = next(found)

    def _share_results(self, steps: Sequence[Step]) -> None:
        """Give all ranks the results, and whether they have gradients."""
        rows = [*enumerate(self.bound.results.values())]
        for owner in self._owners:
            mine = [(number, row) for number, row in rows if row.device == owner]
            flags: list[Flag] = []
            tensors: list[torch.Tensor | None] = []
            if owner == self._ranks.rank:
                for step in steps:
                    for number, row in mine:
                        flags.append(step.flags[row.value])
                        tensors += row.passed.taken_apart(step.results[number])
            found, told = self._ranks.share(owner, tensors, flags)
            if owner == self._ranks.rank:
                continue
            left, flag = iter(found), iter(told)
            for step in steps:
                for number, row in mine:
                    step.flags[row.value] = next(flag)
                    step.results[number] = row.passed.filled(
                        [next(left) for _ in row.passed.shapes]
                    )

    def _share_generator(self, owner: int | None) -> None:
        """Leave the random generators of all ranks as one for all would be."""
        if owner is not None:
            device = self._ranks.device
            (state,), _ = self._ranks.share(owner, [random_state(device)])
            assert state is not None
            set_random_state(device, state.cpu())


@final
@dataclass(eq=False)
class RankCall:
    """A forward under way on several ranks; this one has done its part."""

    executor: RankExecutor
    steps: Sequence[Step]
    finish: Callable[[], Any]

    def wait(self) -> None:
        """Return when its results are here."""
        self.executor.end(self)

    def end(self) -> Any:
        """What `finish` returns then."""
        self.wait()
        return self.finish()


def _sent(step: Step, moves: Moves, key: tuple[int, ...]) -> Message:
    tensors: list[torch.Tensor | None] = []
    for (slot, _), value in zip(moves.slots, moves.values, strict=True):
        tensors += value.taken_apart(step.slots[slot])
    tensors += [step.grads[slot] for slot, _ in moves.grads]
    return Message(key, tensors, [step.flags[value.number] for value in moves.values])
