"""A traced model bound to a placement and to torch devices: what one call runs.

To autograd the whole step is one node, whose inputs are the caller's tensors and every parameter;
so `loss.backward()`, hooks, accumulation and any optimizer work as on the unsplit model.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, final

import torch
from torch import fx
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from baechi.calls import Call
from baechi.costs import OpCost, Profile
from baechi.errors import ExecutionError, InputError
from baechi.extraction import opaque_leaves
from baechi.graph import OpGraph
from baechi.lowering import TracedModule
from baechi.metering import Meter
from baechi.partition import attribute
from baechi.placement import Placement
from baechi.runtime.binding import Binder
from baechi.runtime.checking import check_program
from baechi.runtime.compiling import compile_program
from baechi.runtime.executors import make_executor
from baechi.runtime.tapes import Step, add_up
from baechi.traced import Traced


@final
class Executable:
    """A traced model on its devices.

    Attributes:
        program: What runs; proved.

    Args:
        traced: The model, with its module.
        placement: Of its training graph, or of its inference graph.
        places: The torch device of every logical device.
        training: Whether the placement has the backward too.
        threads: torch threads per CPU worker.
    """

    def __init__(
        self,
        traced: Traced,
        placement: Placement,
        places: Sequence[torch.device],
        training: bool,
        threads: int | None,
    ) -> None:
        self._module: TracedModule = traced.module
        self._places = places
        self.training = training
        graph = structure_of(traced, training)
        streams = any(place.type == "cuda" for place in places)
        # CPU workers share one generator: drawing in launch order makes a seed mean something.
        drawing = [i for i, op in enumerate(traced.ops) if op.random and not streams]
        self.program = compile_program(
            graph,
            replace(placement, graph_digest=graph.digest),
            copy_lanes=streams,
            in_turn=drawing,
        )
        check_program(self.program)
        self._homes = self._state_homes()
        self.settle()
        self._bound = Binder(self._module, graph, self.program, places).bind()
        self._executor = make_executor(self.program, self._bound, places, threads)
        nodes = self._module.graph_module.graph.nodes
        self._placeholders = [node for node in nodes if node.op == "placeholder"]
        output = next(node for node in nodes if node.op == "output")
        (self._returned,) = output.args
        self._given = {node: i for i, node in enumerate(self._placeholders)}
        self._frozen = [p for p in self._bound.parameters if not p.requires_grad]

    def _state_homes(self) -> list[tuple[torch.Tensor, torch.device]]:
        """Every parameter and buffer with the device of the operators that own it."""
        homes: dict[int, tuple[torch.Tensor, torch.device]] = {}
        for tape in self.program.tapes:
            nodes = [node for op in tape.ops for node in self._module.nodes[op]]
            for tensor in self._state_tensors(nodes):
                homes.setdefault(id(tensor), (tensor, self._places[tape.device]))
        return list(homes.values())

    def settle(self) -> None:
        """Move every parameter and buffer, and its gradient, to where this placement wants it."""
        for tensor, place in self._homes:
            move(tensor, place)

    def _state_tensors(self, nodes: Sequence[fx.Node]) -> list[torch.Tensor]:
        inside = set(nodes)
        tensors = []
        for node in nodes:
            for argument in [node, *node.all_input_nodes]:
                # A buffer that travels lives where its own operator is.
                if argument.op == "get_attr" and (
                    argument in inside or argument not in self._module.travelling
                ):
                    value = self._attribute(argument)
                    tensors += [value] if isinstance(value, torch.Tensor) else []
        for leaf in opaque_leaves(self._module.graph_module, nodes).values():
            tensors += [*leaf.parameters(), *leaf.buffers()]
        return tensors

    def _attribute(self, node: fx.Node) -> Any:
        return attribute(self._module.graph_module, str(node.target))

    def takes(self, call: Call) -> bool:
        """Whether every gradient that the call may need was planned for."""
        if not (self.training and torch.is_grad_enabled()):
            return True
        planned = zip(call.tensors, self._module.call.tensors, strict=True)
        thawed = any(parameter.requires_grad for parameter in self._frozen)
        return not thawed and all(mine.requires_grad <= own.requires_grad for mine, own in planned)

    def close(self) -> None:
        """Stop the workers."""
        self._executor.close()

    def __call__(self, call: Call, meter: Meter | None = None) -> Any:
        """The model's own return value for a call of the traced shape."""
        if not (self.training and torch.is_grad_enabled()):
            with torch.no_grad():
                step = self._step(call, False, meter)
                self._executor.run(step, 0)
            return self._finish(call, [self._executor.give(value) for value in step.results])
        step = self._step(call, True, meter)
        trained = [p for p in self._bound.parameters if p.requires_grad]
        inputs = [tensor for tensor in call.tensors if tensor.requires_grad]
        plan = _Plan(self, step, call, trained)
        seed = torch.empty(0, requires_grad=True)
        outputs = _StepFunction.apply(plan, seed, *inputs, *trained)  # type: ignore[no-untyped-call]
        return self._finish(call, plan.merge(outputs))

    def _step(self, call: Call, differentiate: bool, meter: Meter | None) -> Step:
        step = Step(differentiate, meter, call.tensors, self._bound.sizes)
        if differentiate:
            for value, tensor in zip(self._bound.input_values, call.tensors, strict=True):
                step.flags[value] = tensor.requires_grad
        return step

    def _finish(self, call: Call, results: Sequence[Any]) -> Any:
        """The caller's structure; what was an input or a parameter is that very object."""
        values: list[Any] = []
        for node in self._returned:
            if not isinstance(node, fx.Node):
                values.append(node)
            elif node in self._given:
                values.append(call.tensors[self._given[node]])
            elif node.op == "get_attr":
                values.append(self._attribute(node))
            else:
                values.append(results[self._bound.results[node]])
        return self._module.returned.fill(values)

    def run_backward(
        self, plan: "_Plan", gradients: Sequence[torch.Tensor | None], keep: bool
    ) -> list[torch.Tensor | None]:
        """Gradients of the plan's inputs and parameters, given those of its outputs.

        Raises:
            ExecutionError: The graph was freed by an earlier backward.
        """
        if plan.spent:
            raise ExecutionError(
                "this step's graph was freed by its first backward; to go backward twice, give "
                "retain_graph=True the first time."
            )
        plan.spent = not keep
        step, bound = plan.step, self._bound
        for slot, gradient in zip(plan.slots, gradients, strict=True):
            step.grads[slot] = gradient
        step.keep = keep
        self._executor.run(step, 1)
        result: list[torch.Tensor | None] = []
        for tensor, slots in zip(plan.call.tensors, bound.input_grads, strict=True):
            if tensor.requires_grad:
                total = add_up(_present(step, slots))
                result.append(None if total is None else total.to(tensor.device))
        shares = (bound.parameters[parameter] for parameter in plan.trained)
        result += [add_up(_present(step, slots)) for slots in shares]
        step.grads = [None] * len(step.grads)
        return [self._executor.give(gradient) for gradient in result]


def structure_of(traced: Traced, training: bool) -> OpGraph:
    """The graph of a step with made-up times: none for what the caller or the model gives."""
    module: TracedModule = traced.module
    given = ("placeholder", "get_attr")
    costs = [int(any(node.op not in given for node in nodes)) for nodes in module.nodes]
    rows = tuple(OpCost(forward_ns=cost, backward_ns=cost) for cost in costs)
    return traced.graph(Profile(traced.digest, "", rows), training=training)


def move(tensor: torch.Tensor, place: torch.device) -> None:
    """Move a parameter or buffer and its gradient; it stays the same object for optimizers."""
    if tensor.device != place:
        tensor.data = tensor.data.to(place)
        if tensor.grad is not None:
            tensor.grad.data = tensor.grad.data.to(place)


def _present(step: Step, slots: Sequence[int]) -> list[torch.Tensor]:
    return [gradient for slot in slots if (gradient := step.grads[slot]) is not None]


@final
class _Plan:
    """One differentiable call, between its forward and its backward."""

    def __init__(
        self, executable: Executable, step: Step, call: Call, trained: list[torch.nn.Parameter]
    ) -> None:
        self.executable = executable
        self.step = step
        self.call = call
        self.trained = trained
        self.spent = False
        self.slots: list[int] = []  # of the gradients of the outputs
        # For each result its leaves, the spec around them, and for each leaf the output it is.
        self._parts: list[tuple[list[Any], pytree.TreeSpec, list[int]]] = []

    def take_apart(self) -> list[torch.Tensor]:
        """The tensors among the results that have gradients."""
        executable, step = self.executable, self.step
        bound = executable._bound
        outputs: list[torch.Tensor] = []
        rows = zip(step.results, bound.result_values, bound.result_grads, strict=True)
        for result, value, grads in rows:
            flag = step.flags[value]
            leaves, spec = pytree.tree_flatten(result)
            places = [-1] * len(leaves)
            tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
            for leaf, i in enumerate(tensors):
                if flag is True or (flag is not False and flag[leaf]):
                    places[i] = len(outputs)
                    outputs.append(leaves[i])
                    self.slots.append(grads[leaf])
            self._parts.append((leaves, spec, places))
        step.slots, step.results, step.inputs = [], [], ()
        return outputs

    def merge(self, outputs: Sequence[torch.Tensor]) -> list[Any]:
        """The results, with autograd's own tensors where there are gradients."""
        merged = [
            pytree.tree_unflatten(
                [
                    leaf if place < 0 else outputs[place]
                    for leaf, place in zip(leaves, places, strict=True)
                ],
                spec,
            )
            for leaves, spec, places in self._parts
        ]
        self._parts = []  # the caller alone decides how long results live
        return merged


class _StepFunction(torch.autograd.Function):
    """A whole step as one autograd node."""

    @staticmethod
    def forward(
        ctx: Any,
        plan: _Plan,
        *tensors: torch.Tensor,  # noqa: ARG004 (named for autograd, found by the plan)
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.plan = plan
        executor = plan.executable._executor
        with torch.enable_grad():
            executor.run(plan.step, 0)
        outputs = plan.take_apart()
        return tuple(executor.give(tensor.detach()) for tensor in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        keep = _graph_is_kept()
        result = ctx.plan.executable.run_backward(ctx.plan, gradients, keep)
        return (None, None, *result)


def _graph_is_kept() -> bool:
    """Whether the running backward was called with `retain_graph=True`."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def check_places(n_devices: int, places: Sequence[torch.device]) -> None:
    """Refuse a list of torch devices that is too short for the placement.

    Raises:
        InputError: There are fewer torch devices than logical ones.
    """
    if len(places) < n_devices:
        raise InputError(
            f"the placement uses {n_devices} logical devices, but {len(places)} torch devices "
            "were given; name one for each, the same one several times if they share it."
        )
