"""A tape that can run: its generated forward, and the backward of the graph that it recorded.

    forward     slots -> cut off -> generated code -> publish -> slots
    backward    gradients of what it published -> autograd -> gradients of what entered
    recompute   what a checkpointed one kept -> cut off -> generated code -> its graph

Each tape is an autograd graph of its own. What enters is cut off from its producer's graph, and
only gradient edges are remembered, so no activation lives longer than autograd itself needs it.
Which slot holds what is settled once, by `binding`; here values are only moved.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import fx
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree

from baechi.runtime.autograd.graph_edges import (
    CutTensor,
    Entry,
    Output,
    compact,
    cut_off,
    detached,
    part,
    tensor_slots,
)
from baechi.runtime.autograd.recompute import Recomputation, dropped
from baechi.runtime.autograd.step_state import Edges, Record, Step
from baechi.runtime.failures import located, running_node
from baechi.runtime.torch_compile import CompiledTape
from baechi.torch_support.torch_internals import TapeEnd, gradients, keeping_graphs


@final
@dataclass(frozen=True)
class TapeCode:
    """A tape as code.

    Attributes:
        index: Of the tape.
        device: Logical device.
        place: Its torch device.
        nodes: The nodes that it runs.
        function: The generated function, of a list of arguments that it empties.
        template: Its arguments, with parameters, buffers and submodules in place.
        fills: (argument, slot) of values of other tapes.
        inputs: The caller's tensors that begin here.
        shown: Those of them that leave as they are.
        written: Those that some operator writes.
        given: (argument, index) of the caller's tensors.
        entries: The inputs that may have a gradient.
        outputs: The values that leave.
        exits: How many results of the function, its last, are aliases through which the gradient
            of one reader comes in its turn.
        seeds: For each exit, and then for each tensor of each output that the function makes, the
            slots of the gradients that come back, in the order in which they are added up.
        large: Whether these are many bytes, so that each should go as soon as it is used.
        by_hand: Whether an operator's backward is custom Python.
        parameters: (parameter, slot of its gradient) of those that no entry stands for.
        sums: (slot of the sum, slot) of what is added up after its backward, in this order.
        recomputation: Its recomputation, if it is checkpointed.
    """

    index: int
    device: int
    place: torch.device
    nodes: tuple[fx.Node, ...]
    function: Callable[[list[Any]], tuple[Any, ...]]
    template: tuple[Any, ...]
    fills: tuple[tuple[int, int], ...]
    inputs: tuple[int, ...]
    shown: tuple[int, ...]
    written: frozenset[int]
    given: tuple[tuple[int, int], ...]
    entries: tuple[Entry, ...]
    outputs: tuple[Output, ...]
    exits: int
    seeds: tuple[tuple[int, ...], ...]
    large: bool
    by_hand: bool
    parameters: tuple[tuple[torch.nn.Parameter, int], ...]
    sums: tuple[tuple[int, int], ...] = ()
    recomputation: Recomputation | None = None

    def forward(self, step: Step, last: Sequence[int] = ()) -> None:
        """Run the operators.

        Args:
            step: The call.
            last: Slots that nobody reads after this; their values live until the code is done with
                them.

        Raises:
            ExecutionError: An operator failed; names it and the model's own line.
        """
        arguments = list(self.template)
        slots = step.slots
        for argument, slot in self.fills:
            arguments[argument] = slots[slot]
        for slot in last:
            slots[slot] = None
        mine = {index: self._bring(step, index) for index in self.inputs} if self.inputs else {}
        for argument, index in self.given:
            arguments[argument] = mine[index]
        mine = {index: mine[index] for index in self.shown}  # the rest the code alone shall hold
        again = self.recomputation if step.differentiate else None
        kept = None if again is None else again.keep(arguments, self.place)
        entered = self._enter(step, arguments) if step.differentiate and self.entries else []
        apart = self._part(step, arguments) if step.differentiate and step.apart else {}
        try:
            with nullcontext() if again is None or again.opaque else dropped():
                results = self.function(arguments)
        except Exception as error:
            raise located(error, self.nodes, self.function, self.device) from error
        if step.differentiate:
            leaving = self._publish(step, results, mine)
            if again is None:
                self._remember(step, leaving, entered, apart)
            elif again.leaving or any(tensor.requires_grad for tensor in leaving):
                step.kept[self.index] = kept
            return
        for output in self.outputs:
            value = self._value(output, results, mine)
            for slot in output.slots:
                slots[slot] = value
            for result in output.results:
                step.results[result] = value

    def recompute(self, step: Step) -> None:
        """Run the operators again, with what they read then, and record their graph.

        Raises:
            ExecutionError: An operator failed, or what it read was written since.
        """
        kept, again = step.kept[self.index], self.recomputation
        if kept is None or again is None:
            return
        if not step.keep:
            step.kept[self.index] = None
        arguments = kept.taken(again, step.crossing)
        step.cut_tensors[self.index] = []
        with kept.world(self.place):
            if not step.keep:
                kept.arguments = []  # the code alone shall hold them
            entered = self._enter(step, arguments) if self.entries else []
            apart = self._part(step, arguments) if step.apart else {}
            try:
                results = self.function(arguments)
            except Exception as error:
                raise located(error, self.nodes, self.function, self.device) from error
            leaving = list(results[len(results) - self.exits :]) if self.exits else []
            for output in (output for output in self.outputs if output.result >= 0):
                value, tensors = detached(results[output.result])
                leaving += tensors
                for slot in again.leaving.intersection(output.slots):
                    step.crossing[slot] = value
            self._remember(step, leaving, entered, apart)

    def _bring(self, step: Step, index: int) -> torch.Tensor:
        """A tensor that the caller gave, where this tape is.

        A metered step counts a copy of it; but the caller must see what is written into his own.
        """
        tensor = step.inputs[index]
        if step.meter is not None and index not in self.written and tensor.device == self.place:
            return step.meter.copy(self.device, tensor, moved=False)
        moved = tensor.to(self.place)
        if index in self.written and moved is not tensor:
            step.moved[index] = moved.detach()
        if step.meter is not None:
            step.meter.hold(self.device, moved)
        return moved

    def _value(
        self, output: Output, results: tuple[Any, ...], mine: Mapping[int, torch.Tensor]
    ) -> Any:
        if output.result >= 0:
            return results[output.result]
        return mine[output.given] if isinstance(output.given, int) else output.given

    def _enter(self, step: Step, arguments: list[Any]) -> Edges:
        """Cut off what enters from the graph that made it; the edges of its gradients."""
        tensors: list[torch.Tensor] = []
        taken: list[int] = []
        outer: list[int] = []  # which of them the caller may write
        flat: dict[int, tuple[list[Any], pytree.TreeSpec]] = {}
        for number, entry in enumerate(self.entries):
            value = arguments[entry.argument]
            flag = step.flags[entry.value] if entry.value >= 0 else value.requires_grad
            if flag is False or (flag is not True and not flag[entry.leaf]):
                continue
            if flag is not True:
                leaves, _ = flat.setdefault(entry.argument, pytree.tree_flatten(value))
                value = leaves[tensor_slots(leaves)[entry.leaf]]
            # What the caller gives may hang on a graph that leads to this tape's parameters: to
            # these the engine would go through it. A graph that is kept must not keep a parameter's
            # own node, which is of one stream.
            if entry.given or entry.value < 0:
                outer.append(len(tensors))
            bare = value.requires_grad and (entry.value >= 0 or step.apart)
            tensors.append(value.detach() if bare else value)
            taken.append(number)
        edges: Edges = [None] * len(self.entries)
        if not tensors:
            return edges
        found = cut_off(tensors)
        step.cut_tensors[self.index] += [CutTensor.of(tensors[i], found[i]) for i in outer]
        for number, tensor in zip(taken, found, strict=True):
            entry = self.entries[number]
            assert tensor.grad_fn is not None  # the node that cuts off
            edges[number] = GradientEdge(tensor.grad_fn, tensor.output_nr)
            if entry.argument in flat:
                leaves, _ = flat[entry.argument]
                leaves[tensor_slots(leaves)[entry.leaf]] = tensor
            else:
                arguments[entry.argument] = tensor
        for argument, (leaves, spec) in flat.items():
            arguments[argument] = pytree.tree_unflatten(leaves, spec)
        return edges

    def _part(self, step: Step, arguments: list[Any]) -> dict[torch.nn.Parameter, GradientEdge]:
        """Cut parameters off from the caller's graph; the edges of their gradients."""
        wanted = [parameter for parameter, _ in self.parameters if parameter.requires_grad]
        edges, cut_tensors = part(wanted, arguments)
        step.cut_tensors[self.index] += cut_tensors
        return edges

    def _publish(
        self, step: Step, results: tuple[Any, ...], mine: Mapping[int, torch.Tensor]
    ) -> list[torch.Tensor]:
        """Give others what they read, cut off from this graph; what leaves with it."""
        leaving = list(results[len(results) - self.exits :]) if self.exits else []
        slots, flags = step.slots, step.flags
        for output in self.outputs:
            value = self._value(output, results, mine)
            if output.result < 0:
                if flags[output.value] is True:
                    value = value.detach()
            elif output.bare:
                leaving.append(value)
                flags[output.value] = value.requires_grad
                if value.requires_grad:
                    value = value.detach()
            else:
                value, tensors = detached(value)
                leaving += tensors
                flags[output.value] = tuple(tensor.requires_grad for tensor in tensors)
            for slot in output.slots:
                slots[slot] = value
            for result in output.results:
                step.results[result] = value
        return leaving

    def _remember(
        self,
        step: Step,
        leaving: Sequence[torch.Tensor],
        entered: Edges,
        apart: dict[torch.nn.Parameter, GradientEdge],
    ) -> None:
        """The edges of a graph that was recorded, if it has any that a gradient can come to.

        What only led to others, such as to the indices of a sort, is let go of.
        """
        pairs = zip(leaving, self.seeds, strict=True)
        ends = [tensor if tensor.requires_grad and slots else None for tensor, slots in pairs]
        graded = [tensor for tensor in ends if tensor is not None]
        if not graded:
            return
        published = [None if tensor is None else get_gradient_edge(tensor) for tensor in ends]
        record = step.records[self.index] = Record(entered, published, apart)
        if self.large or step.meter is not None:  # small models are metered as large ones run
            end = TapeEnd.apply(record.seeds, *graded)  # type: ignore[no-untyped-call]
            record.end = get_gradient_edge(end), end.detach()

    def backward(self, step: Step) -> None:
        """Go backward over the recorded graph; the gradients of what was published are there.

        Raises:
            ExecutionError: An operator's backward failed.
        """
        self.differentiate(step)
        self.add_up(step)

    def add_up(self, step: Step) -> None:
        """Add this tape's gradients of parameters, and those that waited for them, to the sums."""
        grads = step.grads
        for total, slot in self.sums:
            gradient, grads[slot] = grads[slot], None
            if gradient is not None:
                so_far = grads[total]
                grads[total] = gradient if so_far is None else so_far + gradient

    def differentiate(self, step: Step) -> None:
        """The backward of this tape alone, without the gradients that other tapes have made.

        Raises:
            ExecutionError: An operator's backward failed.
        """
        record = step.records[self.index]
        if record is None:
            return
        if not step.keep:
            step.records[self.index] = None
        for cut in step.cut_tensors[self.index]:
            cut.sync_version()
        if not step.keep:
            step.cut_tensors[self.index] = []
        outputs, seeds = self._collect(step, record)
        inputs: list[Any] = []
        targets: list[tuple[int, bool]] = []  # a slot, and whether its gradient gets its own room
        for edge, entry in zip(record.entered, self.entries, strict=False):
            if edge is not None:
                inputs.append(edge)
                targets.append((entry.grad, not entry.keeps_strides))
        for parameter, slot in self.parameters:
            if parameter.requires_grad:
                inputs.append(record.parameters.get(parameter, parameter))
                targets.append((slot, False))
        del record
        if not outputs or not inputs:
            return
        kept = step.keep and isinstance(self.function, CompiledTape)
        watch: AbstractContextManager[Any] = nullcontext(())
        if torch.is_anomaly_enabled():
            watch = running_node(outputs)
        try:
            with keeping_graphs() if kept else nullcontext(), watch as running:
                found = gradients(outputs, seeds, inputs, keep=step.keep)
        except Exception as error:
            raise located(error, self.nodes, self.function, self.device, running) from error
        for (slot, alone), gradient in zip(targets, found, strict=True):
            step.grads[slot] = compact(gradient) if alone else gradient

    def _collect(
        self, step: Step, record: Record
    ) -> tuple[tuple[Any, ...], tuple[torch.Tensor, ...]]:
        """The edges at which backward begins, and their gradients, which nothing else holds."""
        outputs: list[Any] = []
        seeds: list[torch.Tensor] = []
        grads = step.grads
        for edge, slots in zip(record.published, self.seeds, strict=True):
            total = None
            for slot in slots:
                gradient, grads[slot] = grads[slot], None
                if gradient is not None:
                    total = gradient if total is None else total + gradient
            if edge is None:
                continue
            if record.end is not None:
                record.seeds.append(total)
            elif total is not None:
                outputs.append(edge)
                seeds.append(total)
        if record.end is None:
            return tuple(outputs), tuple(seeds)
        if all(seed is None for seed in record.seeds):
            record.seeds.clear()
            return (), ()
        if self.by_hand and any(seed is None for seed in record.seeds):
            # Behind the end every operator runs, and a backward in Python makes zeros of nothing.
            graded = (edge for edge in record.published if edge is not None)
            pairs = zip(graded, record.seeds, strict=True)
            found = [(edge, seed) for edge, seed in pairs if seed is not None]
            record.seeds.clear()
            return tuple(edge for edge, _ in found), tuple(seed for _, seed in found)
        return (record.end[0],), (record.end[1],)
