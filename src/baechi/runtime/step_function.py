"""The one autograd node of a step: its inputs are the caller's tensors and every parameter.

    inputs, parameters -> `StepFunction` -> a token per output -> `OutputFunction` -> output

So `loss.backward()`, hooks, accumulation and any optimizer work as on the unsplit model.
"""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import torch
from torch.utils import _pytree as pytree

from baechi.errors import ExecutionError
from baechi.runtime.autograd.binding import Bound, BoundResult
from baechi.runtime.autograd.step import OutputFunction, Step, Totals
from baechi.runtime.executors.cpu_workers import CpuExecutor
from baechi.runtime.executors.cuda_streams import CudaExecutor
from baechi.torch_support.torch_internals import (
    gradient_hooks,
    is_graph_kept,
    watch_hooks,
)
from baechi.tracing.calling_convention import Call

Executor: TypeAlias = CpuExecutor | CudaExecutor


@final
@dataclass(eq=False)
class Plan:
    """One differentiable call, between its forward and its backward.

    There is a step, and a part of the call, for each micro-batch.
    """

    executor: Executor
    steps: Sequence[Step]
    calls: Sequence[Call]
    trained: list[torch.nn.Parameter]
    hooked: frozenset[torch.nn.Parameter]  # whose gradients had hooks when the forward ran

    def __post_init__(self) -> None:
        self.spent = False
        # From the last to the first, in which order autograd adds up.
        self.graded = [
            (batch, index, tensor)
            for batch in reversed(range(len(self.calls)))
            for index, tensor in enumerate(self.calls[batch].tensors)
            if tensor.requires_grad
        ]
        # The tensors among the results with gradients; of each its step, its result, its number
        # among the tensors there, and its place in a list.
        self.outputs: list[tuple[torch.Tensor, Step, BoundResult, int, list[Any], int]] = []
        # The outputs that the model reads, too, and the hooks on their gradients.
        self._partial: list[tuple[weakref.ref[torch.Tensor], Mapping[int, Any]]] = []
        # The results of each micro-batch, taken apart.
        self._parts: list[list[tuple[list[Any], pytree.TreeSpec]]] = []

    def forward(self) -> None:
        """Run the forward, and take its results apart."""
        with torch.enable_grad():
            self.executor.run(self.steps, 0)
        for step in self.steps:
            step.write_back()
            self._parts.append([])
            for value, row in zip(step.results, self.executor.bound.results.values(), strict=True):
                flag = step.flags[row.value]
                leaves, spec = pytree.tree_flatten(value)
                self._parts[-1].append((leaves, spec))
                tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
                for number, i in enumerate(tensors):
                    if flag is True or (flag is not False and flag[number]):
                        self.outputs.append((leaves[i], step, row, number, leaves, i))
                        leaves[i] = None
            step.slots, step.results, step.inputs = [], [], ()

    def merge(self, tokens: Sequence[torch.Tensor]) -> list[list[Any]]:
        """The results, with autograd's own tensors, each behind its token, if with gradients."""
        outputs, self.outputs = self.outputs, []
        for token, (value, step, row, number, leaves, i) in zip(tokens, outputs, strict=True):
            slot, shared = (row.grads[number], row.device), row.sharing[number]
            leaves[i] = output = OutputFunction.apply(step, slot, token, value, shared)  # type: ignore[no-untyped-call]
            if row.read:
                self._partial.append((weakref.ref(output), watch_hooks(output)))
        parts, self._parts = self._parts, []  # the caller alone decides how long results live
        return [[pytree.tree_unflatten(leaves, spec) for leaves, spec in row] for row in parts]

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
        bound = self.executor.bound
        totals = Totals([None] * len(bound.parameters))
        for step in self.steps:
            step.keep = keep
            step.totals = totals
        self.executor.run(self.steps, 1)
        result: list[torch.Tensor | None] = []
        for batch, index, tensor in self.graded:
            total = self.steps[batch].taken(bound.input_grads[index])
            result.append(None if total is None else total.to(tensor.device))
        found = sum_up(self.steps[::-1], bound, totals)
        for parameter in self.trained:
            result.append(found[parameter])
            if result[-1] is None and gradient_hooks(parameter):
                raise ExecutionError(
                    f"a parameter (of shape {list(parameter.shape)}) whose gradient has a hook "
                    "gets none in this backward: the loss does not depend on it. torch would run "
                    "the hook with None; use register_post_accumulate_grad_hook, or remove it."
                )
        self.executor.meet(self.steps[0])
        for step in self.steps:
            step.totals, step.grads = None, [None] * len(step.grads)
        return result


def sum_up(
    steps: Sequence[Step], bound: Bound, totals: Totals
) -> dict[torch.nn.Parameter, torch.Tensor | None]:
    """The gradients of parameters: the totals, and what no tape has added to them, in order."""
    for number, (device, slots) in enumerate(bound.parameters.values()):
        for step in steps:
            with step.counting(device):
                for slot in slots:
                    totals.add(number, step.taken((slot,)))
    return dict(zip(bound.parameters, totals.rows, strict=True))


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
        return tuple(tensor.new_empty(0) for tensor, *_ in plan.outputs)

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
