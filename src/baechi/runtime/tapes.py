"""A tape that can run: its generated forward, and the backward of the graph that it recorded.

    forward     slots -> enter -> generated code -> publish -> slots
    backward    gradients of what it published -> autograd -> gradients of what entered

Each tape is an autograd graph of its own. What enters is cut off from its producer's graph, and
only gradient edges are remembered, so no activation lives longer than autograd itself needs it.
Which slot holds what is settled once, by `binding`; here values are only moved.

A step belongs to one call; nothing in it is shared between calls.
"""

import linecache
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import fx
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge
from torch.utils import _pytree as pytree

from baechi.errors import ExecutionError
from baechi.metering import Meter
from baechi.naming import op_name, source_line

Edges = list[GradientEdge | None]


@final
class Step:
    """One call of a placed model.

    Attributes:
        differentiate: Whether to record what backward needs.
        meter: Counts memory, if asked to.
        inputs: The caller's tensors.
        slots: Values between tapes, by slot; each place of the program has its own.
        flags: For every value whether it needs a gradient; a tuple if it has several tensors.
        results: What the caller gets, by result.
        grads: Gradients between tapes, by slot.
        edges: For every tape what entered and what was published; None if nothing was recorded.
        keep: Whether the running backward leaves the graph for another.
    """

    __slots__ = (
        *("differentiate", "meter", "inputs", "slots", "flags", "results", "grads", "edges"),
        "keep",
    )

    def __init__(
        self,
        differentiate: bool,
        meter: Meter | None,
        inputs: Sequence[torch.Tensor],
        sizes: "Sizes",
    ) -> None:
        self.differentiate = differentiate
        self.meter = meter
        self.inputs = inputs
        self.slots: list[Any] = [None] * sizes.slots
        self.flags: list[bool | tuple[bool, ...]] = [False] * sizes.values
        self.results: list[Any] = [None] * sizes.results
        self.grads: list[torch.Tensor | None] = [None] * sizes.grads
        self.edges: list[tuple[Edges, Edges] | None] = [None] * sizes.tapes
        self.keep = False


@final
@dataclass(frozen=True)
class Sizes:
    """How long the lists of a step are."""

    slots: int
    values: int
    results: int
    grads: int
    tapes: int


@final
@dataclass(frozen=True)
class Entry:
    """A tensor that may enter with a gradient.

    Attributes:
        argument: Which argument of the function holds it.
        leaf: Which of the argument's tensors it is.
        value: Whose flag says whether it needs a gradient; -1 for a parameter.
        grad: The slot that gets its gradient.
    """

    argument: int
    leaf: int
    value: int
    grad: int


@final
@dataclass(frozen=True)
class Output:
    """A value that leaves the tape.

    Attributes:
        result: Which result of the function it is; -1 if it is given by the caller or by the model.
        given: That value: the index of the caller's tensor, or the model's own tensor.
        value: Its number.
        bare: Whether it is a tensor and not a structure of several.
        slots: Where it goes.
        results: Where else, for the caller.
    """

    result: int
    given: Any
    value: int
    bare: bool
    slots: tuple[int, ...]
    results: tuple[int, ...]


@final
@dataclass(frozen=True)
class TapeCode:
    """A tape as code.

    Attributes:
        index: Of the tape.
        device: Logical device.
        place: Its torch device.
        nodes: What it runs.
        function: The generated function.
        template: Its arguments, with parameters, buffers and submodules in place.
        fills: (argument, slot) of values of other tapes.
        given: (argument, index) of the caller's tensors.
        entries: What may enter with a gradient.
        outputs: What leaves.
        exits: How many results of the function, its last, are aliases through which the gradient
            of one reader comes in its turn.
        seeds: For each exit, and then for each tensor of each output that the function makes, the
            slots of the gradients that come back, in the order in which they are added up.
        parameters: (parameter, slot of its gradient) of those that no entry stands for.
    """

    index: int
    device: int
    place: torch.device
    nodes: tuple[fx.Node, ...]
    function: Callable[..., tuple[Any, ...]]
    template: tuple[Any, ...]
    fills: tuple[tuple[int, int], ...]
    given: tuple[tuple[int, int], ...]
    entries: tuple[Entry, ...]
    outputs: tuple[Output, ...]
    exits: int
    seeds: tuple[tuple[int, ...], ...]
    parameters: tuple[tuple[torch.nn.Parameter, int], ...]

    def forward(self, step: Step) -> None:
        """Run the operators.

        Raises:
            ExecutionError: One failed; names it and the model's own line.
        """
        arguments = list(self.template)
        slots = step.slots
        for argument, slot in self.fills:
            arguments[argument] = slots[slot]
        for argument, index in self.given:
            arguments[argument] = step.inputs[index].to(self.place)
        entered: Edges = []
        if step.differentiate and self.entries:
            entered = self._enter(step, arguments)
        try:
            results = self.function(*arguments)
        except Exception as error:
            raise self._located(error) from error
        del arguments
        if not step.differentiate:
            for output in self.outputs:
                value = self._value(step, output, results)
                for slot in output.slots:
                    slots[slot] = value
                for result in output.results:
                    step.results[result] = value
            return
        published = self._publish(step, results)
        if published:
            step.edges[self.index] = (entered, published)

    def _value(self, step: Step, output: Output, results: tuple[Any, ...]) -> Any:
        if output.result >= 0:
            return results[output.result]
        if isinstance(output.given, int):
            return step.inputs[output.given].to(self.place)
        return output.given

    def _enter(self, step: Step, arguments: list[Any]) -> Edges:
        """Cut off what enters from the graph that made it; the edges of its gradients."""
        tensors: list[torch.Tensor] = []
        taken: list[int] = []
        flat: dict[int, tuple[list[Any], pytree.TreeSpec]] = {}
        for number, entry in enumerate(self.entries):
            value = arguments[entry.argument]
            flag = step.flags[entry.value] if entry.value >= 0 else value.requires_grad
            if flag is False or (flag is not True and not flag[entry.leaf]):
                continue
            if flag is not True:
                leaves, _ = flat.setdefault(entry.argument, pytree.tree_flatten(value))
                value = leaves[_slots_of(leaves)[entry.leaf]]
            tensors.append(value)
            taken.append(number)
        edges: Edges = [None] * len(self.entries)
        if not tensors:
            return edges
        for number, tensor in zip(taken, cut_off(tensors), strict=True):
            entry = self.entries[number]
            assert tensor.grad_fn is not None  # the node that cuts off
            edges[number] = GradientEdge(tensor.grad_fn, tensor.output_nr)
            if entry.argument in flat:
                leaves, _ = flat[entry.argument]
                leaves[_slots_of(leaves)[entry.leaf]] = tensor
            else:
                arguments[entry.argument] = tensor
        for argument, (leaves, spec) in flat.items():
            arguments[argument] = pytree.tree_unflatten(leaves, spec)
        return edges

    def _publish(self, step: Step, results: tuple[Any, ...]) -> Edges:
        """Give others what they read, cut off from this graph; the edges of its gradients."""
        edges: Edges = []
        some = False
        for way in results[len(results) - self.exits :]:
            some |= way.requires_grad
            edges.append(get_gradient_edge(way) if way.requires_grad else None)
        slots = step.slots
        for output in self.outputs:
            value = self._value(step, output, results)
            flag: bool | tuple[bool, ...]
            if output.result < 0:
                flag = isinstance(output.given, int) and value.requires_grad
                value = value.detach() if flag else value
            elif output.bare:
                flag = value.requires_grad
                edges.append(get_gradient_edge(value) if flag else None)
                if flag:
                    value = value.detach()
                    some = True
            else:
                value, flag, rows = _apart(value)
                edges += rows
                some |= any(flag)
            step.flags[output.value] = flag
            for slot in output.slots:
                slots[slot] = value
            for result in output.results:
                step.results[result] = value
        return edges if some else []

    def backward(self, step: Step) -> None:
        """Go backward over the recorded graph; the gradients of what was published are there.

        Raises:
            ExecutionError: An operator's backward failed.
        """
        recorded = step.edges[self.index]
        if recorded is None:
            return
        entered, published = recorded
        grads = step.grads
        outputs: list[Any] = []
        seeds: list[torch.Tensor] = []
        for edge, slots in zip(published, self.seeds, strict=True):
            if edge is None:
                continue
            total = add_up([g for slot in slots if (g := grads[slot]) is not None])
            if total is not None:
                outputs.append(edge)
                seeds.append(total)
        if not step.keep:
            step.edges[self.index] = None
        inputs: list[Any] = []
        targets: list[int] = []
        for edge, entry in zip(entered, self.entries, strict=False):
            if edge is not None:
                inputs.append(edge)
                targets.append(entry.grad)
        for parameter, slot in self.parameters:
            if parameter.requires_grad:
                inputs.append(parameter)
                targets.append(slot)
        if not outputs or not inputs:
            return
        del recorded, entered, published
        try:
            # torch.autograd.grad, without its checks of what is right by construction: they take
            # as long as the engine itself.
            found = _engine_run_backward(
                tuple(outputs),
                tuple(seeds),
                step.keep,
                False,
                tuple(inputs),
                allow_unreachable=True,
                accumulate_grad=False,
            )
        except Exception as error:
            raise self._located(error) from error
        for slot, gradient in zip(targets, found, strict=True):
            grads[slot] = gradient

    def _located(self, error: Exception) -> ExecutionError:
        """The error with the operator that was running and the model's own line."""
        node = self._running(error)
        if node is None:
            where = f"one of {len(self.nodes)} operators from {self.nodes[0].name} on"
        else:
            source = source_line(node)
            where = f"{op_name(node)} ({source})" if source else op_name(node)
        return ExecutionError(
            f"{where} failed on logical device {self.device}: {type(error).__name__}: {error}"
        )

    def _running(self, error: Exception) -> fx.Node | None:
        """The node whose generated line the error came through; fx gives each a line of its own."""
        by_name = {node.name: node for node in self.nodes}
        for frame, number in traceback.walk_tb(error.__traceback__):
            if "eval_with_key" in frame.f_code.co_filename:
                line = linecache.getline(frame.f_code.co_filename, number)
                return by_name.get(line.split("=")[0].split(":")[0].strip())
        return None


def cut_off(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The same tensors as the beginning of a graph of their own.

    Leaves would do, but a leaf stays alive as long as its graph, and cannot be written in place.
    The node is the one that torch puts behind a `once_differentiable` backward: it shares storage
    and keeps nothing. Backward stops at its edges and never runs it.
    """
    node = torch._C._functions.DelayedError("a tape's backward stops here", len(tensors) + 1)
    seed = torch.empty(0, requires_grad=True)  # one input must need a gradient for all to have one
    found: Sequence[torch.Tensor] = node(seed, *tensors)
    return found[1:]


def add_up(gradients: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Their sum, in the given order, on the first one's device; None if there are none."""
    if not gradients:
        return None
    total = gradients[0]
    for gradient in gradients[1:]:
        total = total + gradient.to(total.device)
    return total


def _slots_of(leaves: Sequence[Any]) -> list[int]:
    return [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]


def _apart(value: Any) -> tuple[Any, tuple[bool, ...], Edges]:
    """A structure without its graph, which of its tensors had one, and their edges."""
    leaves, spec = pytree.tree_flatten(value)
    flags: list[bool] = []
    edges: Edges = []
    for slot in _slots_of(leaves):
        tensor = leaves[slot]
        flags.append(tensor.requires_grad)
        edges.append(get_gradient_edge(tensor) if tensor.requires_grad else None)
        leaves[slot] = tensor.detach()
    return pytree.tree_unflatten(leaves, spec), tuple(flags), edges
