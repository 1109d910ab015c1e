"""A tape as CUDA graphs: recorded at its first run, and then replayed.

    forward     values -> static inputs -> replay -> static outputs, and flags as recorded
    backward    gradients -> static seeds -> replay -> static gradients

Nothing here is CUDA's own: `graph_capture` records on a GPU, and the tests record on a CPU.

Source of the scheme: `torch.cuda.make_graphed_callables`, for one autograd graph after the other.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import torch
from torch.utils import _pytree as pytree

from baechi.runtime.autograd.step import Record, Sizes, Step
from baechi.runtime.autograd.tape import Output, TapeCode
from baechi.torch_support.graph_capture import CudaRecorder
from baechi.torch_support.torch_internals import backward_id
from baechi.tracing.pytrees import tensors_in

Replay: TypeAlias = Callable[[], None]
LaunchPhase: TypeAlias = Callable[[Step, int], None]  # of a phase, on all lanes


@final
class Statics:
    """Tensors that stay where they are from step to step, and are alive as long as this.

    Attributes:
        buffers: Of copies between GPUs (`cuda_streams.room_of`).
    """

    def __init__(self) -> None:
        self._known: dict[int, torch.Tensor] = {}
        self.buffers: dict[Hashable, Any] = {}

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
class _Static:
    """Static tensors of one value, and where to write new ones.

    What is written to shares the memory but no version counter: to autograd nothing has changed.
    """

    def __init__(self, value: Any) -> None:
        self.tensors = tensors_in(value)
        self.targets = [tensor.data for tensor in self.tensors]

    def fill(self, value: Any) -> None:
        """Copy what is not there already."""
        rows = zip(self.tensors, self.targets, tensors_in(value), strict=True)
        for static, target, tensor in rows:
            if tensor is not static:
                target.copy_(tensor.detach(), non_blocking=tensor.is_cuda)


@final
@dataclass(frozen=True, slots=True)
class _Forward:
    """A recorded forward; each value with its number in the step's list of that name."""

    replay: Replay
    fills: list[tuple[int, _Static]]  # what other tapes made
    inputs: list[tuple[int, _Static]]
    slots: list[tuple[int, Any]]  # what it gives other tapes
    results: list[tuple[int, Any]]
    flags: list[tuple[int, Any]]
    records: list[Record | None]  # of all tapes
    own: Any  # the executor's state


@final
@dataclass(frozen=True, slots=True)
class _Backward:
    """A recorded backward, for some pattern of gradients that are there (`Statics.key`)."""

    replay: Replay
    seeds: list[tuple[int, _Static]]
    found: list[tuple[int, torch.Tensor]]


@final
@dataclass(frozen=True)
class WholeStep:
    """All tapes of a step, as the one tape that their lanes are in a common graph."""

    launch: LaunchPhase
    place: torch.device
    inputs: tuple[int, ...]
    outputs: tuple[Output, ...]
    seeds: tuple[tuple[int, ...], ...]  # of the caller's gradients
    index: int = -1
    fills: tuple[tuple[int, int], ...] = ()
    last: tuple[int, ...] = ()
    gathered: tuple[tuple[int, tuple[int, ...]], ...] = ()

    def forward(self, step: Step) -> None:
        """As `TapeCode.forward`."""
        self.launch(step, 0)

    def differentiate(self, step: Step) -> None:
        """As `TapeCode.differentiate`, with all that is added up."""
        self.launch(step, 1)

    backward = differentiate

    def add_up(self, step: Step) -> None:
        """Nothing is left to add up."""


@final
@dataclass(eq=False)
class GraphedTape:
    """A tape that is recorded at its first run and replayed at every other."""

    code: TapeCode | WholeStep
    recorder: CudaRecorder
    statics: Statics
    sizes: Sizes
    ranks: tuple[int, int]  # the places of its forward and its backward in the order of a step
    reason: str = ""  # why its forward runs eagerly after all; empty if it does not

    def __post_init__(self) -> None:
        self._forward: _Forward | None = None
        # Or why that one runs eagerly: others, and the forward, are replayed all the same.
        self._backwards: dict[tuple[int | None, ...], _Backward | str] = {}
        self._warm: set[tuple[bool, ...]] = set()  # which gradients there were in a backward
        rows = [*self.code.seeds, *(slots for _, slots in self.code.gathered)]
        self._seeds = tuple(dict.fromkeys(slot for row in rows for slot in row))

    @property
    def reasons(self) -> list[str]:
        """Why its forward, or some of its backwards, run eagerly."""
        rows = [self.reason, *(why for why in self._backwards.values() if isinstance(why, str))]
        return list(filter(None, rows))

    @property
    def is_captured(self) -> bool:
        """True unless its forward, or every backward so far, could not be captured."""
        backwards = self._backwards.values()
        some = any(isinstance(each, _Backward) for each in backwards)
        return not self.reason and (some or not backwards)

    def forward(self, step: Step) -> None:
        """Replay the forward; as `TapeCode.forward`."""
        if self._forward is None and not self.reason:
            self._forward = self._record_forward(step)
        if self.reason or self._forward is None:
            self.code.forward(step)
            return
        recorded = self._forward
        for slot, static in recorded.fills:
            static.fill(step.slots[slot])
        for index, static in recorded.inputs:
            static.fill(step.fetched.get(index, step.inputs[index]))
        recorded.replay()
        for slot in self.code.last:
            step.slots[slot] = None
        for slot, value in recorded.slots:
            step.slots[slot] = value
        for result, value in recorded.results:
            step.results[result] = value
        for number, flag in recorded.flags:
            step.flags[number] = flag
        step.graphed.add(self.code.index)

    def backward(self, step: Step) -> None:
        """Replay the backward; as `TapeCode.backward`."""
        if self.code.index not in step.graphed or self._forward is None:
            self.code.backward(step)
            return
        self._differentiate(step, self._forward)
        self.code.add_up(step)  # of other tapes, too, whose sums are elsewhere in each step

    def _differentiate(self, step: Step, forward: _Forward) -> None:
        pattern = tuple(self.statics.key(step.grads[slot]) for slot in self._seeds)
        if not any(forward.records) or all(key is None for key in pattern):
            return
        recorded = self._backwards.get(pattern)
        if recorded is None:
            graded = tuple(key is not None for key in pattern)
            # The eager calls had those of the first; of others the kernels run here first, with
            # all that reads what they make, which is elsewhere than when they are replayed.
            if self._backwards and graded not in self._warm:
                step.warms = backward_id()
            if step.warms != backward_id():
                recorded = self._backwards[pattern] = self._record_backward(step, forward)
            self._warm.add(graded)
        if not isinstance(recorded, _Backward):
            self._run_backward(step, forward)
            return
        for slot, static in recorded.seeds:
            static.fill(step.grads[slot])
            step.grads[slot] = None
        recorded.replay()
        for slot, gradient in recorded.found:
            step.grads[slot] = gradient

    def _record_forward(self, step: Step) -> _Forward | None:
        code, statics = self.code, self.statics
        given = list(step.inputs)
        scratch = Step(step.differentiate, None, given, self.sizes)
        scratch.apart = True
        scratch.flags = list(step.flags)
        fills, inputs = [], []
        for slot in dict.fromkeys(slot for _, slot in code.fills):
            value = step.slots[slot]
            if any(not isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value)):
                self.reason = "it reads a number that another tape computes"
                return None
            scratch.slots[slot] = value = pytree.tree_map_only(torch.Tensor, statics.of, value)
            fills.append((slot, _Static(value)))
        for index in code.inputs:
            tensor = step.fetched.get(index, step.inputs[index]).detach()
            tensor = tensor.to(code.place, copy=True)
            given[index] = statics.add(tensor)
            inputs.append((index, _Static(tensor)))
        replay = self._recorded(lambda: code.forward(scratch), self.ranks[0])
        if isinstance(replay, str):
            self.reason = replay
            return None
        outputs = code.outputs
        slots = [(s, scratch.slots[s]) for output in outputs for s in output.slots]
        results = [(r, scratch.results[r]) for output in outputs for r in output.results]
        flags = [(output.value, scratch.flags[output.value]) for output in outputs]
        for _, value in (*slots, *results):
            for tensor in tensors_in(value):
                statics.add(tensor)
        for record in filter(None, scratch.records):
            record.cuts.clear()  # a replay reads what is there then
        made = slots, results, flags
        return _Forward(replay, fills, inputs, *made, scratch.records, scratch.own)

    def _record_backward(self, step: Step, forward: _Forward) -> _Backward | str:
        scratch, seeds = self._scratch(forward), []
        for slot in self._seeds:
            gradient = step.grads[slot]
            if gradient is not None:
                scratch.grads[slot] = static = self.statics.of(gradient)
                seeds.append((slot, _Static(static)))
        replay = self._recorded(lambda: self.code.differentiate(scratch), self.ranks[1])
        if isinstance(replay, str):
            return f"a backward of {replay}"
        found = [(slot, g) for slot, g in enumerate(scratch.grads) if g is not None]
        for _, gradient in found:
            self.statics.add(gradient)
        return _Backward(replay, seeds, found)

    def _run_backward(self, step: Step, forward: _Forward) -> None:
        """Go backward eagerly over the graph of the recorded forward."""
        for record in filter(None, forward.records):
            for _, waiting in record.ends.values():
                waiting.clear()
        scratch = self._scratch(forward)
        for slot in self._seeds:
            scratch.grads[slot], step.grads[slot] = step.grads[slot], None
        self.recorder.run(lambda: self.code.differentiate(scratch))
        for slot, gradient in enumerate(scratch.grads):
            if gradient is not None:
                step.grads[slot] = gradient

    def _scratch(self, forward: _Forward) -> Step:
        """A step in which the tape's forward has run, and whose graph stays."""
        scratch = Step(True, None, (), self.sizes)
        scratch.records, scratch.own = list(forward.records), forward.own
        scratch.keep = True
        return scratch

    def _recorded(self, function: Callable[[], None], rank: int) -> Replay | str:
        """The function recorded; or the reason why not."""
        caching = torch.is_autocast_cache_enabled()
        if any(map(torch.is_autocast_enabled, ("cuda", "cpu"))):  # else compiled code would guard
            torch.set_autocast_cache_enabled(False)  # a cast weight must not come from outside
        try:
            return self.recorder.record(function, rank)
        except Exception as error:
            return "it could not be captured: " + str(error).partition("\n")[0]
        finally:
            torch.set_autocast_cache_enabled(caching)
