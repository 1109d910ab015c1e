"""Tapes that are recorded once and then replayed, with static inputs and outputs.

    forward     values -> static inputs -> replay -> static outputs, and flags as recorded
    backward    gradients -> static seeds -> replay -> static gradients

A recording has addresses in it. So what enters a tape is copied to where it was when the tape was
recorded, unless it lies there already, as what another recorded tape made does; and what leaves a
tape stays where it is from step to step. The autograd graph of a recorded forward is kept: its
saved tensors are static too, and any backward over it may be recorded later, for other outputs that
get a gradient, or be replayed twice.

Nothing here is CUDA's own: `graph_capture` records on a GPU, and the tests record on a CPU.

Source of the scheme: `torch.cuda.make_graphed_callables`, for one autograd graph after the other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, final

import torch
from torch.utils import _pytree as pytree

from baechi.runtime.autograd.step_state import Record, Sizes, Step
from baechi.runtime.autograd.tape import TapeCode

Replay: TypeAlias = Callable[[], None]


class Recorder(Protocol):
    """Records what one lane launches, in the order in which it will be replayed."""

    def record(self, function: Callable[[], None], rank: int) -> Replay:
        """Record what the function launches; it takes place when it is replayed first.

        Recordings share memory: what one has let go of, the next may take. That is right as long as
        they are made in the order in which a step replays them. One that is made late must have
        memory of its own, or an earlier one that follows it in a step would write into its results.

        Args:
            function: The function to record.
            rank: Its place in the order of a step.

        Raises:
            Exception: It cannot be recorded; nothing of it has taken place.
        """

    def run(self, function: Callable[[], None]) -> None:
        """Run it now, where recordings are made."""


@final
class Statics:
    """Tensors that stay where they are from step to step, and are alive as long as this."""

    def __init__(self) -> None:
        self._known: dict[int, torch.Tensor] = {}

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """Make a tensor a static one."""
        self._known[id(tensor)] = tensor
        return tensor

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself if it is static, else a static copy."""
        return tensor if id(tensor) in self._known else self.add(tensor.detach().clone())

    def key(self, tensor: torch.Tensor | None) -> int | None:
        """A key of static tensors, to tell them apart: None for None, 0 if it is not static.

        What was recorded with static gradients must get these: two may share memory, as those of
        both terms of a sum, or be memory that yet others read, and a copy would spoil that.
        """
        if tensor is None:
            return None
        return id(tensor) if id(tensor) in self._known else 0


@final
@dataclass(frozen=True, slots=True)
class _Static:
    """Static tensors of one value, and where to write new ones.

    What is written to shares the memory but no version counter: to autograd nothing has changed.
    """

    tensors: tuple[torch.Tensor, ...]
    targets: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, value: Any) -> "_Static":
        tensors = _tensors(value)
        return cls(tensors, tuple(tensor.data for tensor in tensors))

    def fill(self, value: Any) -> None:
        """Copy what is not there already."""
        rows = zip(self.tensors, self.targets, _tensors(value), strict=True)
        for static, target, tensor in rows:
            if tensor is not static:
                target.copy_(tensor.detach(), non_blocking=tensor.is_cuda)


def _tensors(value: Any) -> tuple[torch.Tensor, ...]:
    if isinstance(value, torch.Tensor):
        return (value,)
    leaves = pytree.tree_leaves(value)
    return tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))


@final
@dataclass(frozen=True, slots=True)
class _Forward:
    """A recorded forward.

    Attributes:
        replay: Launches it.
        fills: (slot, static) of what other tapes made.
        inputs: (index, static) of the caller's tensors.
        slots: (slot, value) of what it gives other tapes.
        results: (result, value) of what it gives the caller.
        flags: (value, flag).
        record: The record for its backward, if it has one.
    """

    replay: Replay
    fills: tuple[tuple[int, _Static], ...]
    inputs: tuple[tuple[int, _Static], ...]
    slots: tuple[tuple[int, Any], ...]
    results: tuple[tuple[int, Any], ...]
    flags: tuple[tuple[int, Any], ...]
    record: Record | None


@final
@dataclass(frozen=True, slots=True)
class _Backward:
    """A recorded backward, for some pattern of gradients that are there (`Statics.key`)."""

    replay: Replay
    seeds: tuple[tuple[int, _Static], ...]
    found: tuple[tuple[int, torch.Tensor], ...]


@final
class GraphedTape:
    """A tape that is recorded at its first run and replayed at every other.

    Attributes:
        reason: Why it runs eagerly after all; empty if it does not.
    """

    def __init__(
        self,
        code: TapeCode,
        recorder: Recorder,
        statics: Statics,
        sizes: Sizes,
        ranks: tuple[int, int],
    ) -> None:
        self.reason = ""
        self._ranks = ranks
        self._code = code
        self._recorder = recorder
        self._statics = statics
        self._sizes = sizes
        self._forward: _Forward | None = None
        self._backwards: dict[tuple[int | None, ...], _Backward] = {}
        self._seeds = tuple(dict.fromkeys(slot for row in code.seeds for slot in row))

    def forward(self, step: Step, last: Sequence[int] = ()) -> None:
        """Replay the forward; as `TapeCode.forward`."""
        if self._forward is None and not self.reason:
            self._forward = self._record_forward(step)
        if self.reason or self._forward is None:
            self._code.forward(step, last)
            return
        recorded = self._forward
        for slot, static in recorded.fills:
            static.fill(step.slots[slot])
        for index, static in recorded.inputs:
            static.fill(step.inputs[index])
        recorded.replay()
        for slot in last:
            step.slots[slot] = None
        for slot, value in recorded.slots:
            step.slots[slot] = value
        for result, value in recorded.results:
            step.results[result] = value
        for number, flag in recorded.flags:
            step.flags[number] = flag
        step.graphed.add(self._code.index)

    def backward(self, step: Step) -> None:
        """Replay the backward; as `TapeCode.backward`."""
        if self._code.index not in step.graphed or self._forward is None:
            self._code.backward(step)
            return
        self._differentiate(step, self._forward.record)
        self._code.add_up(step)  # of other tapes, too, whose sums are elsewhere in each step

    def _differentiate(self, step: Step, record: Record | None) -> None:
        pattern = tuple(self._statics.key(step.grads[slot]) for slot in self._seeds)
        if record is None or all(key is None for key in pattern):
            return
        recorded = self._backwards.get(pattern)
        if recorded is None:
            recorded = self._record_backward(step, record)
            if recorded is None:
                self._run_backward(step, record)
                return
            self._backwards[pattern] = recorded
        for slot, static in recorded.seeds:
            static.fill(step.grads[slot])
            step.grads[slot] = None
        recorded.replay()
        for slot, gradient in recorded.found:
            step.grads[slot] = gradient

    def _record_forward(self, step: Step) -> _Forward | None:
        code, statics = self._code, self._statics
        given = list(step.inputs)
        scratch = Step(step.differentiate, None, given, self._sizes)
        scratch.apart = True
        scratch.flags = list(step.flags)
        fills, inputs = [], []
        for slot in dict.fromkeys(slot for _, slot in code.fills):
            value = step.slots[slot]
            if any(not isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value)):
                self.reason = "it reads a number that another tape computes"
                return None
            value = pytree.tree_map_only(torch.Tensor, statics.of, value)
            scratch.slots[slot] = value
            fills.append((slot, _Static.of(value)))
        for index in code.inputs:
            tensor = statics.add(step.inputs[index].detach().to(code.place, copy=True))
            given[index] = tensor
            inputs.append((index, _Static.of(tensor)))
        replay = self._recorded(lambda: code.forward(scratch), self._ranks[0])
        if replay is None:
            return None
        outputs = code.outputs
        slots = tuple((s, scratch.slots[s]) for output in outputs for s in output.slots)
        results = tuple((r, scratch.results[r]) for output in outputs for r in output.results)
        flags = tuple((output.value, scratch.flags[output.value]) for output in outputs)
        for _, value in (*slots, *results):
            for tensor in _tensors(value):
                statics.add(tensor)
        record = scratch.records[code.index]
        return _Forward(replay, tuple(fills), tuple(inputs), slots, results, flags, record)

    def _record_backward(self, step: Step, record: Record) -> _Backward | None:
        scratch, seeds = self._scratch(record), []
        for slot in self._seeds:
            gradient = step.grads[slot]
            if gradient is not None:
                static = self._statics.of(gradient)
                scratch.grads[slot] = static
                seeds.append((slot, _Static.of(static)))
        replay = self._recorded(lambda: self._code.differentiate(scratch), self._ranks[1])
        if replay is None:
            return None
        found = [(slot, g) for slot, g in enumerate(scratch.grads) if g is not None]
        for _, gradient in found:
            self._statics.add(gradient)
        return _Backward(replay, tuple(seeds), tuple(found))

    def _run_backward(self, step: Step, record: Record) -> None:
        """Go backward eagerly over the graph of the recorded forward."""
        record.seeds.clear()
        scratch = self._scratch(record)
        for slot in self._seeds:
            scratch.grads[slot], step.grads[slot] = step.grads[slot], None
        self._recorder.run(lambda: self._code.differentiate(scratch))
        for slot, gradient in enumerate(scratch.grads):
            if gradient is not None:
                step.grads[slot] = gradient

    def _scratch(self, record: Record) -> Step:
        """A step in which the tape's forward has run, and whose graph stays."""
        scratch = Step(True, None, (), self._sizes)
        scratch.records[self._code.index] = record
        scratch.keep = True
        return scratch

    def _recorded(self, function: Callable[[], None], rank: int) -> Replay | None:
        """The function recorded; or `None`, and the reason is noted."""
        caching = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # a cast weight must not come from outside
        try:
            return self._recorder.record(function, rank)
        except Exception as error:
            self.reason = "it could not be captured: " + str(error).partition("\n")[0]
            return None
        finally:
            torch.set_autocast_cache_enabled(caching)
