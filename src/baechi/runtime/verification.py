"""Comparison of a placed model with the unsplit one over one step.

    the model itself ──step──► outputs, gradients, buffers ◄──step── the placed model

If these differ, the operators of the trace run one by one, unsplit and then on their devices in the
order of the program. Each value and each gradient is compared when it is made; the first difference
names its operator.

Where operators draw random numbers on several devices, they draw in another order than the unsplit
model. Then the trace, which draws as the model does, stands in for it, and in both runs every
operator that draws starts from a seed of its own.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import nn

from baechi.errors import ExecutionError, InputError
from baechi.runtime.executable import Executable
from baechi.runtime.op_by_op import Difference, Operators, Values, difference
from baechi.torch_support.autograd_internals import gradient_hooks
from baechi.tracing.calling_convention import Call
from baechi.tracing.fx_nodes import op_name
from baechi.tracing.lowering import TracedModule
from baechi.tracing.pytrees import tensors_in
from baechi.tracing.workarounds import compact


@final
class Unsplit:
    """A copy of a model as it is before it is placed; takes memory for it on its present device."""

    def __init__(self, model: nn.Module) -> None:
        self._memo: dict[int, Any] = {}
        with torch.inference_mode(False):
            self.model = copy.deepcopy(model, self._memo)
            compact(self.model)

    def twin(self, value: Any) -> Any:
        """The copy of one of the model's tensors or submodules; other tensors beside the copy."""
        found = self._memo.get(id(value))
        if found is not None or not isinstance(value, torch.Tensor):
            return value if found is None else found
        home = next(iter([*self.model.parameters(), *self.model.buffers()]), value).device
        return value.to(home)


def verify(
    unsplit: Unsplit,
    executable: Executable,
    module: TracedModule,
    call: Call,
    *,
    every: bool = False,
) -> None:
    """Compare a step of the placed model with one of the unsplit model.

    Gradients, buffers and the random state stay as they were.

    Args:
        unsplit: The model as it was before it was placed.
        executable: The executable of the placed one; has a backward if it was placed for training.
        module: The traced model.
        call: The step's arguments; they are copied.
        every: Compare every operator, also where the step is the same.

    Raises:
        ExecutionError: An output, a gradient or a buffer differs; names the first operator.
        InputError: The model draws random numbers, and its devices draw others than its present
            one.
    """
    mode = module.gradients
    gpus = sorted({place.index for place in executable.places if place.type == "cuda"})
    with (
        torch.inference_mode(False),
        torch.set_grad_enabled(executable.training if mode is None else mode),
        torch.random.fork_rng(gpus),
    ):
        _Verification(unsplit, executable, module, call, torch.initial_seed()).run(every)


@final
@dataclass(frozen=True)
class _Outcome:
    """The outputs, gradients and buffers of a step."""

    outputs: tuple[torch.Tensor, ...]
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]

    def difference(self, other: "_Outcome") -> str:
        """The first difference from the other one; empty if there is none."""
        rows: list[tuple[str, torch.Tensor | None, torch.Tensor | None]] = [
            (f"output {i}", one, two)
            for i, (one, two) in enumerate(zip(self.outputs, other.outputs, strict=True))
        ]
        rows += [(f"the gradient of {n}", g, other.gradients[n]) for n, g in self.gradients.items()]
        rows += [(f"buffer {n}", b, other.buffers[n]) for n, b in self.buffers.items()]
        for name, one, two in rows:
            known = one if one is not None else two
            if known is None:
                continue
            # A gradient that only one of them has is compared with zero.
            pair = [torch.zeros_like(known) if t is None else t for t in (one, two)]
            text = difference(*pair)
            if text:
                return f"{name} has {text}"
        return ""


@final
class _Verification:
    """The state of one verification."""

    def __init__(
        self, unsplit: Unsplit, executable: Executable, module: TracedModule, call: Call, seed: int
    ) -> None:
        self._unsplit = unsplit
        self._executable = executable
        self._module = module
        self._call = call
        self._seed = seed
        self._model = module.model
        both = [*zip(self._model.buffers(), unsplit.model.buffers(), strict=True)]
        self._buffers = [(one, two, two.detach().clone()) for one, two in both]
        self._operators = Operators(module)

    def run(self, every: bool) -> None:
        """Compare, and name what differs."""
        used = {tape.device for tape in self._executable.program.tapes}
        hooks = [gradient_hooks(parameter) for parameter in self._model.parameters()]
        own = [(rows, dict(rows)) for rows in hooks if rows]
        for rows, _ in own:
            rows.clear()  # the copy has none
        try:
            expected = self._step(self._eager, self._unsplit.model)
            if self._operators.draws and self._drawn_elsewhere(used):
                self._compare_drawing(expected)
                return
            text = expected.difference(self._step(self._executable, self._model))
            if text or every:
                self._compare_operators(expected, text)
        finally:
            self._put_back()
            for rows, before in own:
                rows.update(before)

    def _drawn_elsewhere(self, used: set[int]) -> bool:
        kinds = {self._executable.places[device].type for device in used}
        tensors = [*self._unsplit.model.parameters(), *self._unsplit.model.buffers()]
        present = {tensor.device.type for tensor in [*tensors, *self._call.tensors]}
        if present and kinds != present:
            name = op_name(self._operators.nodes[self._operators.draws[0]])
            raise InputError(
                f"verify cannot compare {type(self._model).__name__}: {name} draws random numbers, "
                f"and {'/'.join(sorted(kinds))} draws others than {'/'.join(sorted(present))}, "
                "where the model is now. Move the model there before it is placed, or verify it "
                "without dropout (model.eval())."
            )
        return len(used) > 1

    def _compare_drawing(self, expected: _Outcome) -> None:
        text = expected.difference(self._step(self._traced(Values(), None), self._unsplit.model))
        if text:
            raise self._untrue(text)
        values = Values()
        alone = self._step(self._traced(values, self._seed), self._unsplit.model)
        first, placed = self._side_by_side(values, alone, self._seed)
        text = alone.difference(placed)
        if first is not None or text:
            raise self._differs(first, text or "a value has another result")

    def _compare_operators(self, expected: _Outcome, text: str) -> None:
        """Run the operators one by one, and name the first that differs."""
        values = Values()
        alone = self._step(self._traced(values, None), self._unsplit.model)
        first, placed = self._side_by_side(values, alone, None)
        text = text or alone.difference(placed)
        if first is None and not text:
            return
        again = Values()
        repeated = self._step(self._traced(again, None), self._unsplit.model)
        parted = [
            *self._operators.between(values, again),
            *self._operators.between_leaves(alone.gradients, repeated.gradients),
        ]
        unstable = _first(parted)
        if unstable is not None and (first is None or unstable.rank <= first.rank):
            raise ExecutionError(
                f"the placed {self._name} differs from the unsplit one ({text}), and the unsplit "
                f"one differs from itself: {unstable.text} the second time. Its result depends on "
                "more than its inputs; verify it with a fixed seed and without such state."
            )
        untrue = expected.difference(alone)
        if first is None and untrue:
            raise self._untrue(untrue)
        raise self._differs(first, text)

    @property
    def _name(self) -> str:
        return type(self._model).__name__

    def _untrue(self, text: str) -> ExecutionError:
        return ExecutionError(
            f"the placed {self._name} differs from the unsplit one as its trace does, before it is "
            f"split: {text}. The model's Python reads something that changes from call to call, or "
            "that tracing does not see; make it an argument or a buffer."
        )

    def _differs(self, first: Difference | None, text: str) -> ExecutionError:
        where = (
            "though no operator does where they run one by one, so they are not independent of "
            "when or beside what they run"
            if first is None
            else f"first at {first.text}"
        )
        return ExecutionError(
            f"the placed {self._name} differs from the unsplit one, {where} ({text}). An operator "
            "that depends on its device, its thread or on what ran before cannot be split off: "
            "keep it on the model's own device with constraints, or make it a function of its "
            "inputs."
        )

    # Steps.

    def _step(self, forward: Callable[[Call], Any], owner: nn.Module) -> _Outcome:
        self._put_back()
        torch.manual_seed(self._seed)
        call = replace(self._call, tensors=tuple(map(_copy, self._call.tensors)))
        outputs = tensors_in(forward(call))
        given = {f"argument {n}": t for n, t in zip(call.names, call.tensors, strict=True)}
        leaves = {**given, **dict(owner.named_parameters())}
        leaves = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
        roots = [tensor for tensor in outputs if tensor.requires_grad]
        gradients: dict[str, torch.Tensor | None] = {}
        if self._executable.training and roots and leaves:
            found = torch.autograd.grad(_total(roots), list(leaves.values()), allow_unused=True)
            gradients = dict(zip(leaves, found, strict=True))
        buffers = {name: buffer.detach().clone() for name, buffer in owner.named_buffers()}
        return _Outcome(tuple(tensor.detach() for tensor in outputs), gradients, buffers)

    def _put_back(self) -> None:
        with torch.no_grad():
            for one, two, value in self._buffers:
                one.copy_(value)
                two.copy_(value)

    def _eager(self, call: Call) -> Any:
        args, kwargs = call.structure.fill(call.tensors)
        return self._unsplit.model(*args, **kwargs)

    def _traced(self, values: Values, seed: int | None) -> Callable[[Call], Any]:
        return self._operators.unsplit(values, seed, self._unsplit.twin)

    # Comparisons.

    def _side_by_side(
        self, values: Values, alone: _Outcome, seed: int | None
    ) -> tuple[Difference | None, _Outcome]:
        """The first operator that differs on its device; and what the step gives."""
        found: list[Difference] = []
        with self._executable.running(lambda b: self._operators.split(b, values, found, seed)):
            placed = self._step(self._executable, self._model)
        found += self._operators.between_leaves(alone.gradients, placed.gradients)
        return _first(found), placed


def _first(found: Iterable[Difference]) -> Difference | None:
    return min(found, key=lambda difference: difference.rank, default=None)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor anew, for a run that may write into it."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _total(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A scalar that depends on every element of every tensor."""
    rows = [(t.abs() if t.is_complex() else t).double() for t in tensors]
    return torch.stack([(row**2).mean().cpu() for row in rows]).sum()
