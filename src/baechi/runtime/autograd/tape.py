"""A tape that can run: its generated forward, and the backward of the graph that it recorded.

    forward     slots -> cut off -> generated code -> publish -> slots
    backward    gradients of what it published -> autograd -> gradients of what entered
    recompute   what a checkpointed one kept -> cut off -> generated code -> its graph

Each tape is an autograd graph of its own (`docs/runtime.md`, Running it). Which slot holds what is
settled once, by `binding`; here values are only moved.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Final, final

import torch
from torch import fx
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree

from baechi.runtime.autograd.step import CutTensor, Recomputation, Record, Step
from baechi.runtime.torch_compile import CompiledTape, located
from baechi.torch_support.torch_internals import (
    TapeEnd,
    cut_off,
    gradients,
    keeping_graphs,
    run_first,
)

# Gradients of a parameter's readers that are held together and not added up as they come, which
# takes some 50 us for each.
_WORTH_BYTES: Final = 2**15


@final
@dataclass(frozen=True)
class Entry:
    """A tensor that may enter with a gradient."""

    argument: int  # of the function, that holds it
    leaf: int  # its index among the argument's tensors
    value: int  # whose flag says whether it needs a gradient; -1 for a parameter
    grad: int  # the slot that gets its gradient
    given: bool  # whether it is the caller's tensor
    keeps_strides: bool  # whether its gradient is handed on without a dense copy


@final
@dataclass(frozen=True)
class Output:
    """A value that leaves the tape."""

    result: int  # its index among the function's results; -1 if the caller or the model gives it
    given: Any  # then that value: the index of the caller's tensor, or the model's own tensor
    value: int  # its number
    bare: bool  # whether it is a tensor and not a structure of several
    slots: tuple[int, ...]  # where it goes
    results: tuple[int, ...]  # where else, for the caller


@final
@dataclass(frozen=True)
class TapeCode:
    """A tape as code."""

    index: int  # of the tape
    device: int  # logical
    place: torch.device  # its torch device
    nodes: tuple[fx.Node, ...]  # those that it runs
    draws: bool  # whether one of them draws random numbers
    # The generated function, of a list of arguments that it empties; and its arguments, with
    # parameters, buffers and submodules in place.
    function: Callable[[list[Any]], tuple[Any, ...]]
    template: tuple[Any, ...]
    fills: tuple[tuple[int, int], ...]  # (argument, slot) of values of other tapes
    inputs: tuple[int, ...]  # the caller's tensors that begin here
    written: frozenset[int]  # those that some operator writes
    given: tuple[tuple[int, int], ...]  # (argument, index) of the caller's tensors
    entries: tuple[Entry, ...]  # the inputs that may have a gradient
    outputs: tuple[Output, ...]  # the values that leave
    # How many results of the function, its last, are aliases through which the gradient of one
    # reader comes in its turn.
    exits: int
    # For each exit, and then for each tensor of each output that the function makes, the slots of
    # the gradients that come back, in the order in which they are added up.
    seeds: tuple[tuple[int, ...], ...]
    # (entry, slots) of gradients of what enters that other tapes' readers send, as summands before
    # those of this one.
    gathered: tuple[tuple[int, tuple[int, ...]], ...]
    large: bool  # whether these are many bytes, so that each should go as soon as it is used
    # (parameter, slot of its gradient) of those that no entry stands for.
    parameters: tuple[tuple[torch.nn.Parameter, int], ...]
    # (slot of the sum, slot) of what is added up after its backward, in this order.
    sums: tuple[tuple[int, int], ...]
    # (number of the parameter, slot) of what is then added to the totals over all micro-batches.
    totals: tuple[tuple[int, int], ...]
    recomputation: Recomputation | None  # if it is checkpointed
    # Slots that nobody reads after its forward; their values live until the code is done with them.
    last: tuple[int, ...] = ()

    def forward(self, step: Step) -> None:
        """Run the operators.

        Raises:
            ExecutionError: An operator failed; names it and the model's own line.
        """
        arguments = list(self.template)
        slots = step.slots
        for argument, slot in self.fills:
            arguments[argument] = slots[slot]
        for slot in self.last:
            slots[slot] = None
        mine: dict[int, torch.Tensor] = {}
        if self.inputs:
            mine = {index: self._bring(step, index) for index in self.inputs}
            for argument, index in self.given:
                arguments[argument] = mine[index]
            passed = {output.given for output in self.outputs if isinstance(output.given, int)}
            mine = {index: mine[index] for index in passed}  # the code alone shall hold the rest
        again = self.recomputation if step.differentiate else None
        kept = None if again is None else again.keep(arguments, self.place, draws=self.draws)
        record = self._cut(step, arguments) if step.differentiate else Record()
        results = self._call(arguments)
        leaving = self._publish(step, results, mine)
        if again is not None:
            if again.leaving or any(tensor.requires_grad for tensor in leaving):
                step.kept[self.index] = kept
        elif step.differentiate:
            self._remember(step, leaving, record)

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
        with kept.world(self.place):
            if not step.keep:
                kept.arguments = []  # the code alone shall hold them
            record = self._cut(step, arguments)
            results = self._call(arguments)
            leaving = list(results[len(results) - self.exits :]) if self.exits else []
            for output in (output for output in self.outputs if output.result >= 0):
                value, tensors = detached(results[output.result])
                leaving += tensors
                for slot in again.leaving.intersection(output.slots):
                    step.crossing[slot] = value
            self._remember(step, leaving, record)

    def _call(self, arguments: list[Any]) -> tuple[Any, ...]:
        try:
            return self.function(arguments)
        except Exception as error:
            raise located(error, self.nodes, self.function, self.device) from error

    def _bring(self, step: Step, index: int) -> torch.Tensor:
        """A tensor that the caller gave, where this tape is.

        A metered step counts a copy of it; but the caller must see what is written into his own.
        """
        tensor = step.inputs[index]
        if step.meter is not None and index not in self.written and tensor.device == self.place:
            return step.meter.copy(self.device, tensor, moved=False)
        moved = step.fetched.pop(index, tensor).to(self.place)
        if index in self.written and moved is not tensor:
            step.moved[index] = moved.detach()
        if step.meter is not None:
            step.meter.hold(self.device, moved)
        return moved

    def _cut(self, step: Step, arguments: list[Any]) -> Record:
        """Cut off what enters; a record with the edges of its gradients."""
        record = Record([None] * len(self.entries))
        self._enter(step, arguments, record)
        if step.apart:
            self._part(arguments, record)
        return record

    def _enter(self, step: Step, arguments: list[Any], record: Record) -> None:
        """Cut off what enters from the graph that made it."""
        entering: dict[int, torch.Tensor] = {}  # by the entry's index
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
            bare = value.requires_grad and (entry.value >= 0 or step.apart)
            entering[number] = value.detach() if bare else value
        if not entering:
            return
        # Each by itself, where gradients are to come as soon as their readers have made them.
        alone = [
            n
            for n, tensor in (entering.items() if self._readers else ())
            if tensor.nbytes * self._readers.get(self.entries[n].grad, 0) >= _WORTH_BYTES
        ]
        together = [n for n in entering if n not in alone]
        found: dict[int, torch.Tensor] = {}
        for numbers in filter(None, (together, *([n] for n in alone))):
            found.update(zip(numbers, cut_off([entering[n] for n in numbers]), strict=True))
        for number in alone:
            run_first(found[number])
            record.shares[self.entries[number].grad] = found[number]
        for number, source in entering.items():
            entry, tensor = self.entries[number], found[number]
            record.entered[number] = get_gradient_edge(tensor)
            if entry.given or entry.value < 0:  # the caller may write it
                record.cuts.append(CutTensor(source, tensor))
            if entry.argument in flat:
                leaves, _ = flat[entry.argument]
                leaves[tensor_slots(leaves)[entry.leaf]] = tensor
            else:
                arguments[entry.argument] = tensor
        for argument, (leaves, spec) in flat.items():
            arguments[argument] = pytree.tree_unflatten(leaves, spec)

    def _part(self, arguments: list[Any], record: Record) -> None:
        """Cut parameters off from the caller's graph.

        A parameter's own node belongs to the stream on which it was first used, and a gradient that
        comes to it makes that stream wait; that node has the caller's hooks, too. A graph that is
        kept must not keep it either.
        """
        wanted = {id(p): p for p, _ in self.parameters if p.requires_grad}
        places: dict[int, list[int]] = defaultdict(list)
        for place, argument in enumerate(arguments):
            if id(argument) in wanted:
                places[id(argument)].append(place)
        found = [wanted[key] for key in places]
        bare = cut_off([parameter.detach() for parameter in found]) if found else ()
        for parameter, tensor in zip(found, bare, strict=True):
            record.parameters[parameter] = get_gradient_edge(tensor)
            record.cuts.append(CutTensor(parameter, tensor))
            for place in places[id(parameter)]:
                arguments[place] = tensor

    def _publish(
        self, step: Step, results: tuple[Any, ...], mine: Mapping[int, torch.Tensor]
    ) -> list[torch.Tensor]:
        """Give others what they read, cut off from this graph; what leaves with it."""
        leaving = list(results[len(results) - self.exits :]) if self.exits else []
        flags = step.flags
        for output in self.outputs:
            if output.result < 0:
                value = mine[output.given] if isinstance(output.given, int) else output.given
                if flags[output.value] is True:
                    value = value.detach()
            else:
                value = results[output.result]
                if step.differentiate and output.bare:
                    leaving.append(value)
                    flags[output.value] = value.requires_grad
                    value = value.detach() if value.requires_grad else value
                elif step.differentiate:
                    value, tensors = detached(value)
                    leaving += tensors
                    flags[output.value] = tuple(tensor.requires_grad for tensor in tensors)
            for slot in output.slots:
                step.slots[slot] = value
            for result in output.results:
                step.results[result] = value
        return leaving

    def _remember(self, step: Step, leaving: Sequence[torch.Tensor], record: Record) -> None:
        """Keep the edges of a graph that was recorded, if it has any that a gradient can come to.

        What only led to others, such as to the indices of a sort, is let go of. No gradient comes
        to a view of its input that a custom function's forward hands out, though it asks for one.
        """
        pairs = zip(leaving, self.seeds, strict=True)
        ends = [
            tensor if tensor.requires_grad and slots and not _leads_nowhere(tensor) else None
            for tensor, slots in pairs
        ]
        if all(tensor is None for tensor in ends) and not self.gathered:
            return
        record.published = [None if end is None else get_gradient_edge(end) for end in ends]
        step.records[self.index] = record
        if self.large or step.meter is not None:  # small models are metered as large ones run
            for number, tensor in reversed([*enumerate(ends)]):  # the engine takes the last first
                if tensor is not None:
                    seeds: list[torch.Tensor | None] = []
                    end = TapeEnd.apply(seeds, tensor)  # type: ignore[no-untyped-call]
                    record.published[number] = get_gradient_edge(end)
                    record.ends[number] = end.detach(), seeds

    def backward(self, step: Step) -> None:
        """Go backward over the recorded graph; the gradients of what was published are there."""
        self.differentiate(step)
        self.add_up(step)

    def add_up(self, step: Step) -> None:
        """Add this tape's gradients of parameters, and those that waited for them, to the sums."""
        for total, slot in () if step.separate else self.sums:
            step.grads[total] = step.taken((total, slot))
        totals = step.totals
        if totals is not None:
            for number, slot in self.totals:
                totals.add(number, step.taken((slot,)))

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
        for cut in record.cuts:
            cut.sync_version()
        outputs, seeds = self._collect(step, record)
        inputs: list[Any] = []
        targets: list[tuple[int, bool]] = []  # a slot, and whether its gradient gets its own room
        for edge, entry in zip(record.entered, self.entries, strict=True):
            if edge is not None:
                inputs.append(edge)
                targets.append((entry.grad, not entry.keeps_strides))
        for parameter, slot in self.parameters:
            if parameter.requires_grad:
                inputs.append(record.parameters.get(parameter, parameter))
                targets.append((slot, False))
        shares = {} if step.separate else record.shares
        del record
        if not outputs or not inputs:
            return
        kept = step.keep and isinstance(self.function, CompiledTape)
        try:
            adding = self._adding(step, shares) if shares else nullcontext()
            with keeping_graphs() if kept else nullcontext(), adding:
                found = gradients(outputs, seeds, inputs, keep=step.keep)
        except Exception as error:
            raise located(error, self.nodes, self.function, self.device) from error
        for (slot, alone), gradient in zip(targets, found, strict=True):
            if slot not in shares:
                step.grads[slot] = compact(gradient) if alone else gradient

    @cached_property
    def _readers(self) -> dict[int, int]:
        """The slots of gradients that are added up after it, and how many would wait together.

        They are of parameters that it reads several times, or that other tapes read, too. On GPUs
        there are none.
        """
        if self.place.type != "cpu":
            return {}
        added = Counter(total for total, _ in self.sums)
        home = {total: total for total in added} | {slot: total for total, slot in self.sums}
        own = (entry.grad for entry in self.entries if entry.value < 0)
        return {slot: 1 + added[home[slot]] for slot in own if slot in home}

    @contextmanager
    def _adding(self, step: Step, shares: Mapping[int, torch.Tensor]) -> Iterator[None]:
        """Add up gradients of parameters as they come: the engine would hold each to its end."""
        waiting: dict[int, deque[int]] = defaultdict(deque)  # by the sum, in order
        for total, slot in self.sums:
            waiting[total].append(slot)
        home = {slot: total for total, slots in waiting.items() for slot in slots}

        def come(slot: int, gradient: torch.Tensor) -> torch.Tensor | None:
            grads, total = step.grads, home.get(slot, slot)
            grads[slot] = compact(gradient)
            slots = waiting[total]
            while slots and grads[slots[0]] is not None:
                if grads[total] is None and total in shares:
                    break
                grads[total] = step.taken((total, slots.popleft()))
            # In its place the engine holds what is there anyway, of the same form.
            return shares[slot].detach() if gradient.layout is torch.strided else None

        hooks = [shares[slot].register_hook(partial(come, slot)) for slot in shares]  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _collect(self, step: Step, record: Record) -> tuple[list[GradientEdge], list[torch.Tensor]]:
        """The edges at which backward begins, and their gradients, which nothing else holds."""
        edges: list[GradientEdge] = []
        seeds: list[torch.Tensor] = []
        for number, edge in enumerate(record.published):
            seed = step.taken(self.seeds[number])
            if edge is None or seed is None:
                continue
            if number in record.ends:
                token, waiting = record.ends[number]
                waiting.append(seed)
                seed = token
            edges.append(edge)
            seeds.append(seed)
        for entry, slots in self.gathered:
            edge, seed = record.entered[entry], step.taken(slots)
            if edge is not None and seed is not None:
                edges.append(edge)
                seeds.append(seed)
        return edges, seeds


def _leads_nowhere(tensor: torch.Tensor) -> bool:
    base = tensor._base if tensor.is_leaf else None
    return base is not None and base.requires_grad


def tensor_slots(leaves: Sequence[Any]) -> list[int]:
    """The indices of the tensors."""
    return [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]


def detached(value: Any) -> tuple[Any, list[torch.Tensor]]:
    """A structure without its graph, and its tensors with theirs."""
    tensors: list[torch.Tensor] = []

    def detach(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        return tensor.detach()

    return pytree.tree_map_only(torch.Tensor, detach, value), tensors


def compact(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """The gradient in room of its own, if it is a part of a larger storage.

    A concatenation gives back parts of the one gradient that it got. On one tape they share it
    until the last is used; between tapes, which may be far apart, each would keep all of it.
    """
    if gradient is None or gradient.layout is not torch.strided:
        return gradient
    try:
        shares = gradient.untyped_storage().nbytes() > gradient.nbytes
    except NotImplementedError:  # a batch of gradients (is_grads_batched), which has no storage
        shares = False
    return gradient.clone() if shares else gradient
