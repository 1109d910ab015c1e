"""A traced model bound to a placement and to torch devices: what one call runs.

To autograd the whole step is one node, whose inputs are the caller's tensors and every parameter;
so `loss.backward()`, hooks, accumulation and any optimizer work as on the unsplit model.
"""

import sys
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import fx
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from baechi.calls import Call
from baechi.errors import ExecutionError, InputError
from baechi.extraction import extract, opaque_leaves
from baechi.lowering import TracedModule
from baechi.metering import Meter
from baechi.partition import attribute
from baechi.placement import Placement
from baechi.runtime.executors import make_executor
from baechi.runtime.segments import backward_order, cut
from baechi.runtime.steps import CALLER, Code, Published, Step, add_up
from baechi.traced import Traced
from baechi.training import backward_ops


@final
class Executable:
    """A traced model on its devices.

    Attributes:
        segments: What runs, in launch order.
        places: The torch device of every logical device.

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
        self.places = tuple(places)
        self.training = training
        n = len(traced.ops)
        forward = [op for op in placement.order if op < n]
        self.segments = cut(traced, placement.devices, forward)
        backward = backward_order(self.segments, self._backward_launch(traced, placement))
        self._executor = make_executor(self.segments, backward, places, threads)
        self._position = {n: i for i, n in enumerate(self._module.graph_module.graph.nodes)}
        self._homes = self._state_homes()
        self.settle()
        self._codes = [self._code(segment) for segment in self.segments]
        parameters = [p for code in self._codes for p in code.parameters]
        self._parameters = list(dict.fromkeys(parameters))
        graph = self._module.graph_module.graph
        self._placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        output = next(node for node in graph.nodes if node.op == "output")
        (self._returned,) = output.args
        self._kept = frozenset(output.all_input_nodes)
        self._readers: dict[fx.Node, dict[int, int]] = {}
        for code in self._codes:
            device = code.segment.device
            for node in dict.fromkeys(code.extract.inputs):
                row = self._readers.setdefault(node, {})
                row[device] = row.get(device, 0) + 1
        self._made_on = {node: s.device for s in self.segments for node in s.outputs}
        self._resident = {
            node: segment.device
            for segment in self.segments
            for node in segment.nodes
            if node.op == "get_attr"
        }
        facts = self._module.facts.nodes
        written = {storage for fact in facts.values() for storage in fact.writes}
        self._written = frozenset(
            node for node, fact in facts.items() if any(v.storage in written for v in fact.values)
        )
        self._travelling = {
            node: None
            for code in self._codes
            for node in code.extract.inputs
            if node.op == "get_attr" and node not in code.state
        }

    def _backward_launch(self, traced: Traced, placement: Placement) -> list[int]:
        """For every segment where in the placement's order its backward begins."""
        n = len(traced.ops)
        if not self.training:
            return [-segment.index for segment in self.segments]
        place = {op: i for i, op in enumerate(placement.order)}
        twin = {op: n + 1 + i for i, op in enumerate(backward_ops(traced.ops, traced.tensors))}
        last = len(placement.order)
        return [
            min((place[twin[op]] for op in segment.ops if op in twin), default=last)
            for segment in self.segments
        ]

    def _state_homes(self) -> list[tuple[torch.Tensor, torch.device]]:
        """Every parameter and buffer with the device of the operators that own it."""
        homes: dict[int, tuple[torch.Tensor, torch.device]] = {}
        for segment in self.segments:
            for tensor in self._state_tensors(segment.nodes):
                homes.setdefault(id(tensor), (tensor, self.places[segment.device]))
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
                # A buffer that travels lives where its own segment is.
                if argument.op == "get_attr" and (
                    argument in inside or not self._travels(argument)
                ):
                    tensors += _tensors(self._attribute(argument))
        for leaf in opaque_leaves(self._module.graph_module, nodes).values():
            tensors += [*leaf.parameters(), *leaf.buffers()]
        return tensors

    def _travels(self, node: fx.Node) -> bool:
        return node in self._module.travelling

    def _attribute(self, node: fx.Node) -> Any:
        return attribute(self._module.graph_module, str(node.target))

    def _code(self, segment: Any) -> Code:
        place = self.places[segment.device]
        device = place if place.type == "cuda" else None
        running = [node for node in segment.nodes if node.op not in ("get_attr", "placeholder")]
        outputs = [node for node in segment.outputs if node.op not in ("get_attr", "placeholder")]
        apart = self._read_apart(running)
        part = extract(
            self._module.graph_module,
            running,
            outputs,
            apart=apart,
            exits=self._exits(running, outputs),
            device=device,
            boxed=True,
        )
        inside = {node for node in segment.nodes if node.op == "get_attr"}
        state = {
            node: self._attribute(node)
            for node in part.inputs
            if node.op == "get_attr" and (node in inside or not self._travels(node))
        }
        parameters = [value for value in state.values() if isinstance(value, torch.nn.Parameter)]
        for leaf in opaque_leaves(self._module.graph_module, running).values():
            parameters += list(leaf.parameters())
        unique = tuple(dict.fromkeys(parameters))
        positions = tuple(
            -1 if reader is None else self._position[reader] for reader in part.readers
        )
        return Code(segment, part, state, unique, positions)

    def _read_apart(self, nodes: Sequence[fx.Node]) -> frozenset[fx.Node]:
        """Values from outside with gradients; not those that are written, which must stay one."""
        facts = self._module.facts.nodes
        written = {storage for node in nodes for storage in facts[node].writes}
        return frozenset(
            argument
            for node in nodes
            for argument in node.all_input_nodes
            if argument in facts
            and argument.op != "get_attr"
            and any(value.requires_grad for value in facts[argument].values)
            and not any(value.storage in written for value in facts[argument].values)
        ) - set(nodes)

    def _exits(
        self, nodes: Sequence[fx.Node], outputs: Sequence[fx.Node]
    ) -> list[tuple[fx.Node, int, fx.Node | None]]:
        """Ways out for the gradients of values that are read inside and outside a segment.

        Autograd adds up from the last reader to the first, and an alias is in its turn where it is
        made. Values that are written in place are left out: a view would not follow.
        """
        facts = self._module.facts.nodes
        inside = set(nodes)
        written = {storage for node in nodes for storage in facts[node].writes}
        rows = []
        for node in outputs:
            values = facts[node].values
            readers = [user for user in node.users if user in self._position]
            within = any(user in inside for user in readers)
            if not within or len(readers) < 3 or len(values) != 1 or not values[0].requires_grad:
                continue
            if values[0].storage in written:
                continue
            for reader in readers:
                if reader in inside:
                    continue
                position = sys.maxsize if reader.op == "output" else self._position[reader]
                after = (n for n in nodes if self._position[n] > position)
                rows.append((node, position, next(after, None)))
        order = {node: self._position[node] for node in nodes}
        end = len(self._position)
        return sorted(
            rows, key=lambda row: (end if row[2] is None else order[row[2]], row[1], order[row[0]])
        )

    def close(self) -> None:
        """Stop the workers."""
        self._executor.close()

    def __call__(self, call: Call, meter: Meter | None = None) -> Any:
        """The model's own return value for a call of the traced shape."""
        differentiate = self.training and torch.is_grad_enabled()
        if not differentiate:
            with torch.no_grad():
                step = self._step(call, False, meter)
                self._executor.forward(step, meter)
                values = [self._result(step, node) for node in self._returned]
            leaves, spec = pytree.tree_flatten(values)
            results = [
                self._executor.give(leaf) if isinstance(leaf, torch.Tensor) else leaf
                for leaf in leaves
            ]
            return self._finish(call, pytree.tree_unflatten(results, spec))
        step = self._step(call, True, meter)
        trained = [p for p in self._parameters if p.requires_grad]
        inputs = [tensor for tensor in call.tensors if tensor.requires_grad]
        plan = _Plan(self, step, meter, call, trained)
        seed = torch.empty(0, requires_grad=True)
        tokens = _StepFunction.apply(plan, seed, *inputs, *trained)  # type: ignore[no-untyped-call]
        values, plan.outputs = plan.outputs, []
        results = [
            _Result.apply(plan, slot, token, value)  # type: ignore[no-untyped-call]
            for slot, (token, value) in enumerate(zip(tokens, values, strict=True))
        ]
        del values
        assert plan.spec is not None
        return self._finish(call, pytree.tree_unflatten(plan.merge(results), plan.spec))

    def _step(self, call: Call, differentiate: bool, meter: Meter | None) -> Step:
        values = {}
        for node, tensor in zip(self._placeholders, call.tensors, strict=True):
            flag = differentiate and tensor.requires_grad
            values[node] = Published(tensor, CALLER, (flag,))
        for node in self._travelling:
            value = self._attribute(node)
            flags = (differentiate and getattr(value, "requires_grad", False),)
            values[node] = Published(value, CALLER, flags)
        return Step(
            self._codes,
            values,
            self._readers,
            self._resident,
            self._written,
            self._kept,
            differentiate,
            self._executor,
            meter,
        )

    def _result(self, step: Step, node: Any) -> Any:
        if not isinstance(node, fx.Node):
            return node
        return self._attribute(node) if node.op == "get_attr" else step.values[node].value

    def _finish(self, call: Call, values: Sequence[Any]) -> Any:
        """The caller's structure; what was an input or a parameter is that very object."""
        given = dict(zip(self._placeholders, call.tensors, strict=True))
        final_values = []
        for node, value in zip(self._returned, values, strict=True):
            own = given.get(node)
            if own is None and isinstance(node, fx.Node) and node.op == "get_attr":
                own = self._attribute(node)
            final_values.append(value if own is None else own)
        return self._module.returned.fill(final_values)

    def run_forward(self, step: Step, meter: Meter | None) -> list[Any]:
        """Run all segments; the returned values, cut off from their graphs."""
        self._executor.forward(step, meter)
        return [self._result(step, node) for node in self._returned]

    def run_backward(self, plan: "_Plan", keep: bool) -> list[torch.Tensor | None]:
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
        step = plan.step
        for slot in sorted(plan.gradients):
            node, leaf = plan.differentiable[slot]
            if plan.meter is not None:
                plan.meter.hold(self._made_on[node], plan.gradients[slot])
            step.seed_gradient(node, leaf, plan.gradients.pop(slot))
        self._executor.backward(step, keep, plan.meter)
        given = zip(self._placeholders, plan.call.tensors, strict=True)
        result = [_to(step.input_gradient(n), t.device) for n, t in given if t.requires_grad]
        rows = step.parameter_gradients
        for parameter in plan.trained:
            found = sorted(rows.pop(parameter, []), key=lambda row: -row[0])
            shares = [gradient for _, gradient in found]
            if plan.meter is None or not found:
                result.append(add_up(shares))
            else:
                with plan.meter.charged_to(self.segments[found[0][0]].device):
                    result.append(add_up(shares))
        return [None if g is None else self._executor.give(g) for g in result]


def move(tensor: torch.Tensor, place: torch.device) -> None:
    """Move a parameter or buffer and its gradient; it stays the same object for optimizers."""
    if tensor.device != place:
        tensor.data = tensor.data.to(place)
        if tensor.grad is not None:
            tensor.grad.data = tensor.grad.data.to(place)


def _to(tensor: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(device)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else []


@final
class _Plan:
    """One differentiable call, between its forward and its backward."""

    def __init__(
        self,
        executable: Executable,
        step: Step,
        meter: Meter | None,
        call: Call,
        trained: list[torch.nn.Parameter],
    ) -> None:
        self.executable = executable
        self.step = step
        self.meter = meter
        self.call = call
        self.trained = trained
        self.spent = False
        self.spec: pytree.TreeSpec | None = None
        self.differentiable: list[tuple[fx.Node, int]] = []
        self.outputs: list[torch.Tensor] = []
        self.gradients: dict[int, torch.Tensor] = {}  # of the outputs, as they arrive
        self._leaves: list[Any] = []
        self._slots: list[int] = []

    def take_apart(self, nodes: Sequence[Any], values: list[Any]) -> list[torch.Tensor]:
        """The tensors among the results that have gradients, each once."""
        self._leaves, self.spec = pytree.tree_flatten(values)
        slot_of: dict[tuple[fx.Node, int], int] = {}
        outputs: list[torch.Tensor] = []
        self._slots = [-1] * len(self._leaves)
        position = 0
        for node, value in zip(nodes, values, strict=True):
            count = 0
            for leaf in pytree.tree_leaves(value):
                if isinstance(leaf, torch.Tensor):
                    published = self.step.values.get(node)  # None: a parameter is returned
                    flags = () if published is None else published.differentiable
                    made = published is not None and published.device != CALLER
                    if made and flags[count]:
                        slot = slot_of.setdefault((node, count), len(outputs))
                        if slot == len(outputs):
                            outputs.append(leaf)
                            self.differentiable.append((node, count))
                        self._slots[position] = slot
                    count += 1
                position += 1
        return outputs

    def merge(self, outputs: Sequence[torch.Tensor]) -> list[Any]:
        """All leaves of the results, with autograd's own tensors where there are gradients."""
        merged = [
            leaf if slot < 0 else outputs[slot]
            for leaf, slot in zip(self._leaves, self._slots, strict=True)
        ]
        self._leaves = []  # the caller alone decides how long results live
        return merged


class _StepFunction(torch.autograd.Function):
    """A whole step as one autograd node; its outputs are tokens, one for each `_Result`."""

    @staticmethod
    def forward(
        ctx: Any,
        plan: _Plan,
        *tensors: torch.Tensor,  # noqa: ARG004 (named for autograd, found by the plan)
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.plan = plan
        with torch.enable_grad():
            values = plan.executable.run_forward(plan.step, plan.meter)
        outputs = plan.take_apart(plan.executable._returned, values)
        plan.step.values.clear()
        give = plan.executable._executor.give
        plan.outputs = [give(tensor.detach()) for tensor in outputs]
        return tuple(tensor.new_empty(0) for tensor in outputs)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        *tokens: torch.Tensor | None,  # noqa: ARG004 (the gradients are in the plan)
    ) -> tuple[Any, ...]:
        keep = _graph_is_kept()
        result = ctx.plan.executable.run_backward(ctx.plan, keep)
        return (None, None, *result)


class _Result(torch.autograd.Function):
    """One output of a step.

    Autograd holds what a node's backward is given until it ends. So the step's node is given
    tokens, and the gradients are put where it takes them as it needs them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        plan: _Plan,
        slot: int,
        token: torch.Tensor,  # noqa: ARG004 (the way to the step's node)
        value: torch.Tensor,
    ) -> torch.Tensor:
        ctx.plan, ctx.slot = plan, slot
        ctx.set_materialize_grads(False)
        return value.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[Any, ...]:
        if gradient is None:
            return (None, None, None, None)
        ctx.plan.gradients[ctx.slot] = gradient.detach()
        if gradient.requires_grad:  # a second derivative: the step refuses what hangs on a graph
            return (None, None, gradient.reshape(-1)[:0], None)
        return (None, None, gradient.new_empty(0), None)


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
