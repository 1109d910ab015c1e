"""The one autograd node of a step: its inputs are the caller's tensors and the parameters' token.

    parameters -> `LeavesFunction` -> token
    inputs, token -> `StepFunction` -> a token per output -> `OutputFunction` -> output

So `loss.backward()`, hooks, accumulation and any optimizer work as on the unsplit model.
"""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, final

import torch
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from baechi.errors import ExecutionError
from baechi.runtime.autograd.binding import Bound, BoundResult
from baechi.runtime.autograd.step import OutputFunction, Step, Totals
from baechi.runtime.executors.cpu_workers import CpuExecutor
from baechi.runtime.executors.cuda_streams import CudaExecutor
from baechi.runtime.executors.rank_slice import RankExecutor
from baechi.torch_support.streams import current_stream
from baechi.torch_support.torch_internals import (
    GRADIENT_HOOKS,
    backward_id,
    gradient_hooks,
    is_graph_kept,
    run_first,
    watch_hooks,
)
from baechi.tracing.calling_convention import Call
from baechi.tracing.guards import HeldObjects

Executor: TypeAlias = CpuExecutor | CudaExecutor | RankExecutor
# Nodes of parameters that wait for a step: as many as calls that one loss may be of.
_MOST_FREE: Final = 4
# The last backward through a step that reads a parameter repeatedly.
_BACKWARD: Final[Any] = WeakIdKeyDictionary()


@final
class Leaves:
    """The parameters that steps train, as long as these stay so and have the same hooks.

    To give a node hundreds of inputs takes as long as some operators do. So one node for all of
    them outlives the steps, of which each has it for itself: what steps of one backward add up is
    each parameter's gradient, in the order in which they go backward.

    Attributes:
        trained: The parameters that need a gradient now.
        hooked: Those whose gradients have hooks.
        bound: The program whose steps these are.
        slots: The slot of each one's gradient.
        spread: Device and slots of what is added up at the end, into the first.
        repeated: Parameter and slot of every further one of these, an input of the node by itself.
        owners: The parameter of each of the node's inputs.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], bound: Bound) -> None:
        self.trained = [parameter for parameter in parameters if parameter.requires_grad]
        hooks = [(p, getattr(p, GRADIENT_HOOKS)) for p in self.trained]
        self.hooked = frozenset(parameter for parameter, own in hooks if own)
        self.bound = bound
        homes = [bound.parameters[parameter] for parameter in self.trained]
        self.slots = [slots[0] for _, slots in homes]
        self.spread = [home for home in homes if len(home[1]) > 1]
        pairs = zip(self.trained, homes, strict=True)
        self.repeated = [(parameter, slot) for parameter, (_, own) in pairs for slot in own[1:]]
        self.owners = (*self.trained, *(parameter for parameter, _ in self.repeated))
        # One without hooks may be frozen: no tape makes a gradient of it, and torch needs none.
        plain = HeldObjects((), ((p, (GRADIENT_HOOKS,)) for p, own in hooks if own is None))
        others = (p for p in parameters if not p.requires_grad or gradient_hooks(p))
        rows = ((p, ("requires_grad", GRADIENT_HOOKS)) for p in others)
        self._held = HeldObjects((own for _, own in hooks if own is not None), rows, plain)
        self._gpus = {p.device for p in self.trained if p.is_cuda}
        self._streams: list[Any] = []  # of which the nodes are
        self._free: list[torch.Tensor] = []

    def are_same(self) -> bool:
        """True if the same parameters are trained, with the same hooks."""
        return self._held.are_same()

    def take(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """A token of the parameters' node for a step, and where the step puts it in the end."""
        streams = [current_stream(gpu) for gpu in self._gpus]
        if streams != self._streams:
            self._streams, self._free = streams, []
        if not self._free:
            self._free.append(self._made())
        return self._free.pop(), self._free

    def _made(self) -> torch.Tensor:
        if not self.trained:
            return torch.empty(0, requires_grad=True)
        frozen = [parameter for parameter in self.trained if not parameter.requires_grad]
        for parameter in frozen:  # for now: a later step may take the node when they no longer are
            parameter.requires_grad_(True)
        try:
            token: torch.Tensor = LeavesFunction.apply(*self.owners)  # type: ignore[no-untyped-call]
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)
        run_first(token)
        return token

    def enter_backward(self) -> bool:
        """Note the running backward; true if it is in one already for a parameter read repeatedly.

        Then autograd has gradients of another step of it.
        """
        current = backward_id()
        before = {_BACKWARD.get(parameter) for parameter, _ in self.repeated}
        _BACKWARD.update((parameter, current) for parameter, _ in self.repeated)
        return current in before


@final
@dataclass(eq=False)
class Plan:
    """One differentiable call, between its forward and its backward.

    There is a step, and a part of the call, for each micro-batch.
    """

    executor: Executor
    steps: Sequence[Step]
    calls: Sequence[Call]
    leaves: Leaves

    def __post_init__(self) -> None:
        self.token, self._free = self.leaves.take()
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
        self._parts: list[list[tuple[list[Any], pytree.TreeSpec | None]]] = []

    def __del__(self, most: int = _MOST_FREE) -> None:
        """Give the node of the parameters to a step to come."""
        if len(self._free) < most:  # Python may have cleared this file's names, at its end
            self._free.append(self.token)

    def forward(self) -> None:
        """Run the forward, and take its results apart."""
        with torch.enable_grad():
            self.executor.run(self.steps, 0)
        for step in self.steps:
            step.write_back()
            self._parts.append([])
            for value, row in zip(step.results, self.executor.bound.results.values(), strict=True):
                flag = step.flags[row.value]
                bare = isinstance(value, torch.Tensor)
                leaves, spec = ([value], None) if bare else pytree.tree_flatten(value)
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
        return [
            [pytree.tree_unflatten(leaves, spec) if spec else leaves[0] for leaves, spec in row]
            for row in parts
        ]

    def backward(self, keep: bool) -> list[torch.Tensor | None]:
        """Gradients of token and inputs; `keep` leaves the graph for another backward.

        The token's has those of the parameters.

        Raises:
            ExecutionError: The graph was freed by an earlier backward; a parameter has a hook that
                cannot be run once; or an output has one that would see a part of its gradient.
        """
        if self.spent:
            raise ExecutionError(
                "this step's graph was freed by its first backward; to go backward twice, give "
                "retain_graph=True the first time."
            )
        leaves = self.leaves
        for parameter in () if leaves.are_same() else leaves.trained:
            if gradient_hooks(parameter) and parameter not in leaves.hooked:
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
        totals = None if len(self.steps) == 1 else Totals([None] * len(bound.parameters))
        # Autograd adds up the readers of all calls one by one.
        alone = totals is None and not isinstance(self.executor, RankExecutor)
        separate = alone and leaves.enter_backward()
        for step in self.steps:
            step.keep = keep
            step.totals = totals
            step.separate = separate
        self.executor.run(self.steps, 1)
        end: Any = self.token.new_empty(0)
        result: list[torch.Tensor | None] = [end]
        for batch, index, tensor in self.graded:
            total = self.steps[batch].taken(bound.input_grads[index])
            result.append(None if total is None else total.to(tensor.device))
        end.gradients = self._of_parameters(totals)
        rows = zip(leaves.owners, end.gradients, strict=True) if leaves.hooked else ()
        graded = {parameter for parameter, gradient in rows if gradient is not None}
        for parameter in leaves.hooked - graded:
            if gradient_hooks(parameter):
                raise ExecutionError(
                    f"a parameter (of shape {list(parameter.shape)}) whose gradient has a hook "
                    "gets none in this backward: the loss does not depend on it. torch would run "
                    "the hook with None; use register_post_accumulate_grad_hook, or remove it."
                )
        self.executor.meet(self.steps[0])
        for step in self.steps:
            step.totals, step.grads = None, [None] * len(step.grads)
        return result

    def _of_parameters(self, totals: Totals | None) -> tuple[torch.Tensor | None, ...]:
        """The gradients of the inputs of the parameters' node, in their order."""
        leaves = self.leaves
        if totals is not None:
            found = sum_up(self.steps[::-1], self.executor, totals)
            return *map(found.__getitem__, leaves.trained), *(None for _ in leaves.repeated)
        (step,) = self.steps
        for device, slots in () if step.separate else leaves.spread:
            with step.counting(device):
                step.grads[slots[0]] = step.taken(slots)
        own = _averaged(self.executor, tuple(map(step.grads.__getitem__, leaves.slots)))
        return *own, *(step.grads[slot] for _, slot in leaves.repeated)


class LeavesFunction(torch.autograd.Function):
    """Parameters as one node; its output is a token, whose gradient has those of all of them.

    A parameter with several gradients is an input for each.
    """

    @staticmethod
    def forward(ctx: Any, *parameters: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        """The token."""
        return parameters[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, token: Any) -> Any:  # noqa: ARG004
        """The gradients, which the token lets go of: what others hold would not become `.grad`."""
        gradients, token.gradients = token.gradients, None
        return gradients


def sum_up(
    steps: Sequence[Step], executor: Executor, totals: Totals
) -> dict[torch.nn.Parameter, torch.Tensor | None]:
    """The gradients of parameters: the totals, and what no tape has added to them, in order."""
    bound = executor.bound
    for number, (device, slots) in enumerate(bound.parameters.values()):
        for step in steps:
            with step.counting(device):
                for slot in slots:
                    totals.add(number, step.taken((slot,)))
    return dict(zip(bound.parameters, _averaged(executor, totals.rows), strict=True))


def _averaged(
    executor: Executor, rows: Sequence[torch.Tensor | None]
) -> Sequence[torch.Tensor | None]:
    return executor.averaged(rows) if isinstance(executor, RankExecutor) else rows


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
        return (None, *ctx.plan.backward(is_graph_kept()))
