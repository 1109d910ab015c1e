"""A step as autograd sees it: one node whose inputs are the caller's tensors and every parameter.

    inputs, parameters -> `StepFunction` -> a token per output -> `Result` -> output

So `loss.backward()`, hooks, accumulation and any optimizer work as on the unsplit model.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, final

import torch
from torch.utils import _pytree as pytree

from baechi.errors import ExecutionError
from baechi.runtime.autograd.binding import Bound
from baechi.runtime.autograd.output_hooks import Hooks, Watched
from baechi.runtime.autograd.shared_outputs import bases_of
from baechi.runtime.autograd.step_outputs import Result, Seeds, may_be_written
from baechi.runtime.autograd.step_state import Step
from baechi.runtime.checkpoint_tickets import Tickets, is_forgotten
from baechi.runtime.executors.executor import Executor
from baechi.runtime.torch_compile import CompiledTape
from baechi.torch_support.saved_tensors import unhooked
from baechi.tracing.calling_convention import Call


@final
@dataclass(frozen=True)
class Way:
    """A program bound to the model, and who runs it.

    Attributes:
        bound: The program.
        executor: Who runs it.
        tickets: Of its steps inside of checkpoints.
    """

    bound: Bound
    executor: Executor
    tickets: "Tickets[Plan]" = field(default_factory=Tickets, repr=False)


@final
class Plan:
    """One differentiable call, between its forward and its backward."""

    def __init__(
        self,
        way: Way,
        step: Step,
        call: Call,
        trained: list[torch.nn.Parameter],
        hooked: frozenset[torch.nn.Parameter],
    ) -> None:
        self.way = way
        self.step = step
        self.call = call
        self.trained = trained
        self.hooked = hooked  # those whose gradients had hooks when the forward ran
        self.spent = False
        self.seeds = Seeds(way.bound.sizes.grads, step.meter)
        self.graded = [tensor.requires_grad for tensor in call.tensors]  # a write may change that
        self.outputs: list[torch.Tensor] = []  # the tensors among the results with gradients
        self.slots: list[tuple[int, int]] = []  # of each its gradient's slot, and its device
        self._families: list[int] = []  # of each with whom it may share memory
        self._hooks: dict[int, tuple[Hooks, int]] = {}  # of some, and the tapes that run them
        self._watched: list[tuple[Watched, int]] = []
        # For each result its leaves, the spec around them, and for each leaf the output it is.
        self._parts: list[tuple[list[Any], pytree.TreeSpec, list[int]]] = []

    def forward(self) -> None:
        """Run the forward, and take its results apart."""
        step, way = self.step, self.way
        with torch.enable_grad():
            way.executor.run(step, 0)
        step.write_back()
        families = way.bound.families.of
        rows = zip(step.results, way.bound.results.items(), strict=True)
        for number, (value, (node, row)) in enumerate(rows):
            flag = step.flags[row.value]
            leaves, spec = pytree.tree_flatten(value)
            places = [-1] * len(leaves)
            tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
            for leaf, i in enumerate(tensors):
                if flag is True or (flag is not False and flag[leaf]):
                    places[i] = len(self.outputs)
                    if (number, leaf) in step.hooks:
                        self._hooks[places[i]] = step.hooks[number, leaf]
                    self.outputs.append(leaves[i])
                    self.slots.append((row.grads[leaf], row.device))
                    self._families.append(families[node][leaf])
                    leaves[i] = None
            self._parts.append((leaves, spec, places))
        step.slots, step.results, step.inputs = [], [], ()

    def merge(self, tokens: Sequence[torch.Tensor]) -> list[Any]:
        """The results, with autograd's own tensors where there are gradients."""
        outputs = self._outputs_behind(tokens)
        merged = []
        for leaves, spec, places in self._parts:
            for i, place in enumerate(places):
                if place >= 0:
                    leaves[i] = outputs[place]
            merged.append(pytree.tree_unflatten(leaves, spec))
        self._parts = []  # the caller alone decides how long results live
        return merged

    def _outputs_behind(self, tokens: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs, each behind its token; what is a view of another is made after that one."""
        values, self.outputs = self.outputs, []
        found = list(values)
        bases: Sequence[int | torch.Tensor | None] = [None] * len(values)
        if any(family >= 0 for family in self._families):
            given = self.way.bound.families.given(self.call.tensors)
            bases = bases_of(values, self._families, given)
        for number in sorted(range(len(values)), key=lambda n: isinstance(bases[n], int)):
            base, value = bases[number], values[number]
            if isinstance(base, int):
                base = value if base == number else found[base]
            found[number] = Result.apply(  # type: ignore[no-untyped-call]
                self.seeds, self.slots[number], tokens[number], value, [base]
            )
            if base is not None and base is not value:
                may_be_written(found[number])
            if number in self._hooks:
                hooks, tape = self._hooks[number]
                self._watched.append((Watched(found[number], hooks), tape))
        return found

    def rewrite(self, indices: Sequence[int]) -> None:
        """Tell autograd that the forward wrote into some of the caller's tensors, with a gradient.

        What the caller has saved of one is then another. Tapes themselves count these writes
        already, in what is cut off or, where it needed no gradient before, in the tensor itself.
        """
        origins = self.step.origins
        known = [[origin.source._version for origin in row] for row in origins]
        for tensor, graded in ((self.call.tensors[index], self.graded[index]) for index in indices):
            if tensor.requires_grad:
                version = tensor._version
                Rewritten.apply(tensor)  # type: ignore[no-untyped-call]
                if not graded:
                    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))
        for row, versions in zip(origins, known, strict=True):
            row[:] = [
                replace(origin, version=origin.version + origin.source._version - version)
                for origin, version in zip(row, versions, strict=True)
            ]

    def backward(self, seeds: Seeds, keep: bool) -> list[torch.Tensor | None]:
        """Gradients of the inputs and the parameters, given those of the outputs.

        Args:
            seeds: The gradients of the outputs: of this step, or of one that this has run again.
            keep: Whether to leave the graph for another backward.

        Raises:
            ExecutionError: The graph was freed by an earlier backward, or a parameter has a hook
                that cannot be run once.
        """
        if self.spent:
            raise ExecutionError(
                "this step's graph was freed by its first backward; to go backward twice, give "
                "retain_graph=True the first time."
            )
        for parameter in self.trained:
            if parameter._backward_hooks and parameter not in self.hooked:
                raise ExecutionError(
                    f"a hook was registered on the gradient of a parameter (of shape "
                    f"{list(parameter.shape)}) between forward and backward; register it before "
                    "the forward."
                )
        self.spent = not keep
        step, bound = self.step, self.way.bound
        step.grads, step.keep = seeds.taken(), keep
        self._watch()
        try:
            self.way.executor.run(step, 1)
        finally:
            for watched, _ in self._watched:
                watched.end()
        result: list[torch.Tensor | None] = []
        rows = zip(self.call.tensors, self.graded, bound.input_grads, strict=True)
        for tensor, graded, slots in rows:
            if graded:
                total = self._taken(slots)
                result.append(None if total is None else total.to(tensor.device))
        for parameter in self.trained:
            device, slots = bound.parameters[parameter]
            if step.meter is None:
                result.append(self._taken(slots))
            else:
                with step.meter.charged_to(device):
                    result.append(self._taken(slots))
            if result[-1] is None and parameter._backward_hooks:
                raise ExecutionError(
                    f"a parameter (of shape {list(parameter.shape)}) whose gradient has a hook "
                    "gets none in this backward: the loss does not depend on it. torch would run "
                    "the hook with None; use register_post_accumulate_grad_hook, or remove it."
                )
        self.way.executor.meet(step)
        step.grads = []
        return result

    def _watch(self) -> None:
        """Let outputs that the model reads, too, take note of their gradients.

        Raises:
            ExecutionError: Somebody asks for one of a tape that autograd does not go through.
        """
        for watched, tape in self._watched:
            function = self.way.bound.tapes[tape].function
            hidden = tape in self.step.graphed or isinstance(function, CompiledTape)
            if watched.begin() and hidden:
                raise ExecutionError(
                    "an output that the model reads itself has a hook (register_hook) or retains "
                    "its gradient (retain_grad), and it comes from a tape that is compiled or "
                    "replayed, whose gradients nobody sees. Place the model without compile= and "
                    "cuda_graphs=."
                )

    def given(self) -> list[torch.Tensor]:
        """The inputs and parameters that get a gradient."""
        pairs = zip(self.call.tensors, self.graded, strict=True)
        return [*(tensor for tensor, graded in pairs if graded), *self.trained]

    def _taken(self, slots: Sequence[int]) -> torch.Tensor | None:
        """The sum of some gradients, which the step forgets: autograd then keeps it uncopied."""
        total: torch.Tensor | None = None
        for slot in slots:
            gradient, self.step.grads[slot] = self.step.grads[slot], None
            if gradient is not None:
                total = gradient if total is None else total + gradient.to(total.device)
        return total


class StepFunction(torch.autograd.Function):
    """A whole step as one autograd node; its outputs are tokens, one for each `Result`."""

    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan,
        *tensors: torch.Tensor,  # noqa: ARG004 (named for autograd, found by the plan)
    ) -> tuple[torch.Tensor, ...]:
        """Run the step's forward."""
        ctx.set_materialize_grads(False)
        ctx.seeds = plan.seeds
        ctx.plan = None if is_forgotten() else plan
        if ctx.plan is None:
            ctx.origin = plan.way.tickets, plan.trained, plan.graded
            with unhooked():
                plan.forward()
            ctx.save_for_backward(plan.way.tickets.of(plan))
        else:
            plan.forward()
        return tuple(tensor.new_empty(0) for tensor in plan.outputs)

    @staticmethod
    def backward(ctx: Any, *tokens: torch.Tensor | None) -> tuple[Any, ...]:
        """Run the step's backward; the gradients themselves are in the step."""
        plan = _ran_again(ctx) if ctx.plan is None else ctx.plan
        with torch.no_grad():
            gradients = plan.backward(ctx.seeds, _graph_is_kept())
        if torch.is_grad_enabled():  # create_graph=True
            gradients = _once([*plan.given(), *tokens], gradients)
        return (None, None, *gradients)


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


def _once(
    origins: Sequence[torch.Tensor | None], gradients: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """The gradients, as what must not be differentiated: of how they came about there is no graph.

    They hang on all that they depend on, whether the caller's gradients have a graph or not: a
    loss that has a gradient in it would else go backward without that part of it.
    """
    found = [gradient for gradient in gradients if gradient is not None]
    given = [tensor for tensor in origins if tensor is not None]
    node = torch._C._functions.DelayedError(
        "a placed model has no second derivatives (create_graph=True): differentiate the unsplit "
        "model, model = placed.unplace(), for a loss that has gradients in it",
        len(given) + len(found),
    )
    rows = iter(node(*given, *found)[len(given) :])
    return [None if gradient is None else next(rows) for gradient in gradients]


def _ran_again(ctx: Any) -> Plan:
    """The step that a checkpoint of the caller's has run in the place of this one.

    Raises:
        ExecutionError: It is a step of another kind.
    """
    tickets, trained, graded = ctx.origin
    (ticket,) = ctx.saved_tensors
    plan: Plan | None = tickets.value(ticket)
    same = plan is not None and plan.graded == graded and len(plan.trained) == len(trained)
    if plan is None or not same or any(map(operator.is_not, plan.trained, trained)):
        raise ExecutionError(
            "torch.utils.checkpoint ran this call of the placed model again to go backward, and it "
            "was another call: the mode, an attribute, or what needs a gradient has changed since "
            "the forward. Change these after the backward."
        )
    return plan


def _graph_is_kept() -> bool:
    """Whether the running backward was called with `retain_graph=True`."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())
