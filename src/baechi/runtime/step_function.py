"""The one autograd node of a step: its inputs are the caller's tensors and every parameter.

    inputs, parameters -> `StepFunction` -> a token per output -> `OutputFunction` -> output

So `loss.backward()`, hooks, accumulation and any optimizer work as on the unsplit model.
"""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias, final

import torch
from torch.utils import _pytree as pytree

from baechi.errors import ExecutionError
from baechi.runtime.autograd.binding import BoundResult
from baechi.runtime.autograd.step import OutputFunction, Step
from baechi.runtime.executors.cpu_workers import CpuExecutor
from baechi.runtime.executors.cuda_streams import CudaExecutor
from baechi.torch_support.torch_internals import (
    allow_writes,
    gradient_hooks,
    is_graph_kept,
    set_version,
    version_of,
    watch_hooks,
)
from baechi.tracing.calling_convention import Call

Executor: TypeAlias = CpuExecutor | CudaExecutor


@final
@dataclass(eq=False)
class Plan:
    """One differentiable call, between its forward and its backward."""

    executor: Executor
    step: Step
    call: Call
    trained: list[torch.nn.Parameter]
    hooked: frozenset[torch.nn.Parameter]  # whose gradients had hooks when the forward ran

    def __post_init__(self) -> None:
        self.spent = False
        self.graded = [t.requires_grad for t in self.call.tensors]  # a write may change that
        self.outputs: list[torch.Tensor] = []  # the tensors among the results with gradients
        self._origins: list[tuple[BoundResult, int]] = []  # of each its result, and its leaf there
        # The outputs that the model reads, too, and the hooks on their gradients.
        self._partial: list[tuple[weakref.ref[torch.Tensor], Mapping[int, Any]]] = []
        # For each result its leaves, the spec around them, and for each leaf the output it is.
        self._parts: list[tuple[list[Any], pytree.TreeSpec, list[int]]] = []

    def forward(self) -> None:
        """Run the forward, and take its results apart."""
        step = self.step
        with torch.enable_grad():
            self.executor.run(step, 0)
        step.write_back()
        for value, row in zip(step.results, self.executor.bound.results.values(), strict=True):
            flag = step.flags[row.value]
            leaves, spec = pytree.tree_flatten(value)
            places = [-1] * len(leaves)
            tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
            for leaf, i in enumerate(tensors):
                if flag is True or (flag is not False and flag[leaf]):
                    places[i] = len(self.outputs)
                    self.outputs.append(leaves[i])
                    self._origins.append((row, leaf))
                    leaves[i] = None
            self._parts.append((leaves, spec, places))
        step.slots, step.results, step.inputs = [], [], ()

    def merge(self, tokens: Sequence[torch.Tensor]) -> list[Any]:
        """The results, with autograd's own tensors, each behind its token, if with gradients."""
        values, self.outputs = self.outputs, []
        outputs: list[torch.Tensor] = []
        for token, value, (row, leaf) in zip(tokens, values, self._origins, strict=True):
            base = row.sharing[leaf].base(value, self.call.tensors)
            slot = row.grads[leaf], row.device
            output = OutputFunction.apply(self.step, slot, token, value, [base])  # type: ignore[no-untyped-call]
            if base is not None and base is not value:
                allow_writes(output)  # it is the base's history that they change
            outputs.append(output)
            if row.read:
                self._partial.append((weakref.ref(output), watch_hooks(output)))
        merged = []
        for leaves, spec, places in self._parts:
            rows = zip(leaves, places, strict=True)
            found = [leaf if place < 0 else outputs[place] for leaf, place in rows]
            merged.append(pytree.tree_unflatten(found, spec))
        self._parts = []  # the caller alone decides how long results live
        return merged

    def rewrite(self, indices: Sequence[int]) -> None:
        """Mark the caller's tensors that the forward wrote into, with a gradient, as written.

        What the caller has saved of one is then another. Tapes themselves count these writes
        already, in what is cut off or, where it needed no gradient before, in the tensor itself.
        """
        cuts = [cut for row in self.step.cut_tensors for cut in row]
        known = [version_of(cut.source) for cut in cuts]
        for tensor, graded in ((self.call.tensors[index], self.graded[index]) for index in indices):
            if tensor.requires_grad:
                version = version_of(tensor)
                Rewritten.apply(tensor)  # type: ignore[no-untyped-call]
                if not graded:
                    set_version(tensor, version)
        for cut, version in zip(cuts, known, strict=True):
            cut.version += version_of(cut.source) - version

    def backward(self, keep: bool) -> list[torch.Tensor | None]:
        """Gradients of the inputs and the parameters; `keep` leaves the graph for another backward.

        Raises:
            ExecutionError: The graph was freed by an earlier backward; a parameter has a hook that
                cannot be run once; or an output has one that would see a part of its gradient.
        """
        if self.spent:
            raise ExecutionError(
                "this step's graph was freed by its first backward; to go backward twice, give "
                "retain_graph=True the first time."
            )
        for parameter in self.trained:
            if gradient_hooks(parameter) and parameter not in self.hooked:
                raise ExecutionError(
                    f"a hook was registered on the gradient of a parameter (of shape "
                    f"{list(parameter.shape)}) between forward and backward; register it before "
                    "the forward."
                )
        for reference, hooks in self._partial:
            output = reference()
            if hooks or (output is not None and output.retains_grad):
                raise ExecutionError(
                    "an output has a hook (register_hook) or retains its gradient (retain_grad), "
                    "and the model reads it itself, too: outside of the model its gradient is a "
                    "part of the whole. Compute such gradients with the unsplit model, model = "
                    "placed.unplace()."
                )
        self.spent = not keep
        step, bound = self.step, self.executor.bound
        step.keep = keep
        self.executor.run(step, 1)
        result: list[torch.Tensor | None] = []
        rows = zip(self.call.tensors, self.graded, bound.input_grads, strict=True)
        for tensor, graded, slots in rows:
            if graded:
                total = step.taken(slots)
                result.append(None if total is None else total.to(tensor.device))
        for parameter in self.trained:
            device, slots = bound.parameters[parameter]
            with step.counting(device):
                result.append(step.taken(slots))
            if result[-1] is None and gradient_hooks(parameter):
                raise ExecutionError(
                    f"a parameter (of shape {list(parameter.shape)}) whose gradient has a hook "
                    "gets none in this backward: the loss does not depend on it. torch would run "
                    "the hook with None; use register_post_accumulate_grad_hook, or remove it."
                )
        self.executor.meet(step)
        step.grads = [None] * len(step.grads)
        return result


class StepFunction(torch.autograd.Function):
    """A whole step as one autograd node; its outputs are tokens, one for each `OutputFunction`."""

    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan,
        *tensors: torch.Tensor,  # noqa: ARG004 (named for autograd, found by the plan)
    ) -> tuple[torch.Tensor, ...]:
        """Run the step's forward."""
        ctx.set_materialize_grads(False)
        ctx.plan = plan
        plan.forward()
        return tuple(tensor.new_empty(0) for tensor in plan.outputs)

    @staticmethod
    def backward(ctx: Any, *tokens: torch.Tensor | None) -> tuple[Any, ...]:  # noqa: ARG004
        """Run the step's backward; the gradients themselves are in the step.

        Raises:
            ExecutionError: It was called with `create_graph=True`.
        """
        if torch.is_grad_enabled():
            raise ExecutionError(
                "a placed model has no second derivatives (create_graph=True): differentiate the "
                "unsplit model, model = placed.unplace(), for a loss that has gradients in it."
            )
        return (None, None, *ctx.plan.backward(is_graph_kept()))


class Rewritten(torch.autograd.Function):
    """A tensor of the caller's, from when the forward wrote into it.

    It has new values and its old history: a backward from it would pass the forward by.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself."""
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> NoReturn:  # noqa: ARG004 (as autograd wants it)
        """Refuse.

        Raises:
            ExecutionError: Always.
        """
        raise ExecutionError(
            "the placed model wrote into one of its arguments, and something after it depends on "
            "that argument's new values: there is no graph of these outside of the model. Let "
            "forward return them, or give it a copy of the argument (x.clone())."
        )
