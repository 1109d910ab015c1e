"""A program bound to a model: its tapes as code, its tensors as slots.

A tensor of the program stands for fx nodes: those of its producer that its readers read. Each
(node, tensor, device) has a slot of its own, so that a copy is "slot to slot" and a free clears
slots. `gradient_plan` does the same for what goes backward.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from typing import Any, Final, final

import torch
from torch import fx

from baechi.errors import ExecutionError
from baechi.processes.tensor_messages import Shape
from baechi.records.graph import StepStructure
from baechi.records.instructions import Copy, Free, Place, Program, Run
from baechi.runtime.autograd.gradient_plan import Gradients, Layout
from baechi.runtime.autograd.step import Recomputation, Sizes, Step, sharing_of
from baechi.runtime.autograd.tape import Entry, Output, TapeCode
from baechi.runtime.torch_compile import CompiledTape, CompileOptions
from baechi.torch_support.symbolic_sizes import is_backed
from baechi.tracing.fx_nodes import op_name
from baechi.tracing.lowering import TracedModule
from baechi.tracing.node_facts import Value
from baechi.tracing.pytrees import Parts, Structure, tensors_in
from baechi.tracing.subgraph import Extract, extract, located, opaque_leaves

# Gradients that leave a tape's outputs are let go of as they are used where there are so many
# bytes of them; below, the Python that this takes costs more than the memory is worth.
_LARGE_BYTES: Final = 1 << 18


@final
@dataclass(frozen=True)
class Passed:
    """A value that goes to another process as tensors: its own, and one for each number in it."""

    number: int  # of the value
    structure: Structure | None  # around its tensors; None for a tensor
    own: int  # how many tensors it has itself
    shapes: tuple[Shape, ...]

    def taken_apart(self, value: Any) -> list[torch.Tensor]:
        """The tensors of a value."""
        if len(self.shapes) == self.own:
            return tensors_in(value)
        parts = Parts()
        constants = parts.structure(value).constants
        return [*parts.tensors, *(torch.tensor(row) for row in constants if _is_number(row))]

    def filled(self, tensors: Sequence[Any]) -> Any:
        """The value with these tensors."""
        if self.structure is None:
            return tensors[0]
        numbers = (tensor.item() for tensor in tensors[self.own :])
        structure = self.structure.mapped(lambda row: next(numbers) if _is_number(row) else row)
        return structure.fill(tensors[: self.own])


def _is_number(constant: Any) -> bool:
    return type(constant) in (bool, int, float)


@final
@dataclass(frozen=True)
class Moves:
    """The values and gradients that a copy brings over: (from, to) of each."""

    slots: tuple[tuple[int, int], ...]
    grads: tuple[tuple[int, int], ...]
    values: tuple[Passed, ...]  # in the slots
    gradients: tuple[Shape | None, ...]  # of each gradient, if it is of a tensor

    @property
    def shapes(self) -> list[Shape | None]:
        """Those of the tensors of all, in order."""
        return [*(shape for value in self.values for shape in value.shapes), *self.gradients]

    def hand_over(self, step: Step) -> None:
        """Bring them to a device of the same memory."""
        for src, dst in self.slots:
            step.slots[dst] = step.slots[src]
        for src, dst in self.grads:
            step.grads[dst] = step.grads[src]


@final
@dataclass(frozen=True)
class Clears:
    """The slots of values and gradients that a free clears."""

    slots: tuple[int, ...]
    grads: tuple[int, ...]

    def clear(self, step: Step) -> None:
        """Let go of them."""
        for slot in self.slots:
            step.slots[slot] = None
        for slot in self.grads:
            step.grads[slot] = None


@final
@dataclass(frozen=True)
class BoundResult:
    """A value that the caller gets."""

    value: int  # its number
    device: int  # the logical device that makes it
    grads: tuple[int, ...]  # for each of its tensors the slot of the caller's gradient
    sharing: tuple[bool, ...]  # for each of its tensors whether others share its memory
    read: bool  # whether the model reads it, too
    passed: Passed  # itself, to be given to other processes


@final
@dataclass(frozen=True)
class Bound:
    """A program that can run."""

    tapes: tuple[TapeCode, ...]
    copies: tuple[dict[Place, Moves], ...]  # for each phase, by what arrives where
    frees: tuple[dict[Place, Clears], ...]  # for each phase, by what is freed where
    sizes: Sizes
    input_values: tuple[int, ...]  # the number of the value of each of the caller's tensors
    input_grads: tuple[tuple[int, ...], ...]  # for each the gradients to add up, in order
    # For each its device and the gradients to add up, in order.
    parameters: dict[torch.nn.Parameter, tuple[int, tuple[int, ...]]]
    results: dict[fx.Node, BoundResult]  # by what yields it, in the order of a step's results


def bind(
    module: TracedModule,
    structure: StepStructure,
    program: Program,
    places: Sequence[torch.device],
    options: CompileOptions | None = None,
) -> Bound:
    """The program, bound to a traced model and to the torch device of every logical device.

    With `options` of `torch.compile` every tape is compiled; None leaves them as generated.

    Raises:
        ExecutionError: The graph lacks a tensor that the model reads, or its gradient.
    """
    return _Binder(Layout(module, structure, program), places, options).bound()


@final
class _Binder:
    """The state of one `bind`."""

    def __init__(
        self, layout: Layout, places: Sequence[torch.device], options: CompileOptions | None
    ) -> None:
        self._layout = layout
        self._module = layout.module
        self._program = layout.program
        self._places = places
        self._options = options
        self._gradients = Gradients(layout)
        graph = self._module.graph_module.graph
        self._inputs = {node: i for i, node in enumerate(graph.find_nodes(op="placeholder"))}
        returned = dict.fromkeys(graph.output_node().all_input_nodes)
        self._returned = [node for node in returned if node in layout.op_of]
        made = (node for node in self._returned if node.op not in ("placeholder", "get_attr"))
        self._results = {node: i for i, node in enumerate(made)}
        self._slots: dict[tuple[fx.Node, int, int], int] = {}  # (node, tensor, device)

    def bound(self) -> Bound:
        """The bound program."""
        layout, gradients = self._layout, self._gradients
        parts = [self._extract(tape, boxed=True) for tape in range(len(self._program.tapes))]
        sharing = sharing_of(self._module, list(self._results))
        results = {
            node: BoundResult(
                layout.value(node),
                layout.device(layout.tape(node)),
                gradients.from_caller(node),
                sharing[node],
                bool(layout.users(node)),
                self._passed(node),
            )
            for node in self._results
        }
        shared = [gradients.share_parameters(tape, part) for tape, part in enumerate(parts)]
        entries = [gradients.entries(tape, part) for tape, part in enumerate(parts)]
        sums, totals = gradients.sums()
        tapes = [
            self._code(tape, part, entries[tape], shared[tape], (sums[tape], totals[tape]))
            for tape, part in enumerate(parts)
        ]
        inputs = tuple(layout.value(node) for node in self._inputs)
        copies, frees = self._instructions()
        last = self._last(tapes, frees[0])
        n_values = len(layout.values)
        return Bound(
            tuple(replace(tape, last=last[tape.index]) for tape in tapes),
            copies,
            frees,
            Sizes(len(self._slots), n_values, len(results), gradients.n, len(tapes)),
            inputs,
            tuple(gradients.of_input(node) for node in self._inputs),
            gradients.of_parameters(),
            results,
        )

    def _runs(self, tape: int) -> list[fx.Node]:
        """The nodes of a tape that are operators."""
        return [n for n in self._layout.nodes(tape) if n.op not in ("get_attr", "placeholder")]

    def _extract(self, tape: int, *, boxed: bool) -> Extract:
        nodes = self._runs(tape)
        outputs = [node for node in nodes if self._leaves(node, tape)]
        return extract(
            self._module.graph_module,
            nodes,
            outputs,
            apart=self._gradients.read_apart(nodes),
            exits=self._gradients.exits(nodes, outputs),
            device=self._places[self._layout.device(tape)],
            lent=self._gradients.lent(nodes),
            boxed=boxed,
            again=self._program.tapes[tape].again >= 0,
            dead=self._dead if boxed else frozenset(),  # a compiler has no use for it
        )

    @cached_property
    def _dead(self) -> frozenset[fx.Node]:
        """The ends of operators that no backward reaches, though autograd records them."""
        structure, facts = self._layout.structure, self._module.facts
        backwards = (op for op in structure.ops if op.phase == "backward")
        reached = {own for op in backwards for own in op.forward}
        nodes = [node for node in self._module.graph_module.graph.nodes if node in facts.nodes]
        last = {key: i for i, node in enumerate(nodes) for key in facts.nodes[node].writes}
        dead = set()
        for index, node in enumerate(nodes if reached else ()):
            row, op = facts.nodes[node], self._layout.op_of.get(node)
            if op is None or op in reached or node.op in ("placeholder", "get_attr"):
                continue
            if row.structure is None or not row.structure.is_tensor:
                continue
            (value,) = row.values
            if not value.requires_grad or node in self._returned:
                continue
            read = any(self._layout.op_of[user] != op for user in self._layout.users(node))
            if read and last.get(value.storage, -1) <= index:  # a leaf of autograd is not written
                dead.add(node)
        return frozenset(dead)

    def _leaves(self, node: fx.Node, tape: int) -> bool:
        """True if another tape, or the caller, reads the node's value."""
        users = self._layout.users(node)
        return node in self._returned or any(self._layout.tape(user) != tape for user in users)

    def _carrier(self, node: fx.Node, reader: fx.Node) -> int:
        """The tensor of the program that brings a node's value to one that reads it.

        Of several results of an operator it is the one that all readers of the node read, and
        fewest others, so that no device gets a value twice.
        """
        ends = self._layout.op_of[node], self._layout.op_of[reader]
        tensors = self._layout.between.get(ends)
        if not tensors:
            names = self._program.names
            raise ExecutionError(
                f"the graph has no tensor from {names[ends[0]]!r} to {names[ends[1]]!r}, which "
                "reads its result; it is not the graph of this model. Trace it again."
            )
        if len(tensors) == 1:
            return tensors[0]
        readers = {self._layout.op_of[user] for user in self._layout.users(node)} - {ends[0]}
        others = {t: {*self._layout.structure.tensors[t].consumers} for t in tensors}
        return min(tensors, key=lambda t: (len(readers - others[t]), len(others[t])))

    def _slot(self, node: fx.Node, tensor: int, device: int) -> int:
        return self._slots.setdefault((node, tensor, device), len(self._slots))

    def _code(
        self,
        tape: int,
        part: Extract,
        entries: Sequence[Entry],
        parameters: tuple[tuple[torch.nn.Parameter, int], ...],
        sums: tuple[Sequence[tuple[int, int]], Sequence[tuple[int, int]]],
    ) -> TapeCode:
        layout = self._layout
        device = layout.device(tape)
        template: list[Any] = [None] * len(part.inputs)
        fills, given = [], []
        for argument, (node, reader) in enumerate(zip(part.inputs, part.readers, strict=True)):
            if not layout.is_state(node) and layout.tape(node) != tape:
                user = reader if reader is not None else layout.users_in(node, tape)[0]
                fills.append((argument, self._slot(node, self._carrier(node, user), device)))
            elif node.op == "placeholder":
                given.append((argument, self._inputs[node]))
            else:
                template[argument] = located(layout.attribute(node), self._places[device])
        nodes = layout.nodes(tape)
        read = (node for node in nodes if node.op == "placeholder" and node.users)
        inputs = {node: self._inputs[node] for node in read}
        outputs = [self._output(node, tape, i) for i, node in enumerate(part.outputs)]
        passed = (n for n in nodes if n.op == "placeholder" or n in self._module.travelling)
        outputs += [self._output(node, tape, -1) for node in passed if self._leaves(node, tape)]
        return TapeCode(
            index=tape,
            device=device,
            place=self._places[device],
            nodes=tuple(nodes),
            draws=any(self._module.facts.nodes[node].random for node in nodes),
            function=self._function(tape, part),
            template=tuple(template),
            fills=tuple(fills),
            inputs=tuple(inputs.values()),
            written=frozenset(i for node, i in inputs.items() if self._is_written(node)),
            given=tuple(given),
            entries=tuple(entries),
            outputs=tuple(outputs),
            exits=len(part.exits),
            seeds=self._gradients.seeds(part),
            gathered=self._gradients.gathered(tape),
            large=self._graded_bytes(part.outputs) >= _LARGE_BYTES,
            parameters=parameters,
            sums=tuple(sums[0]),
            totals=tuple(sums[1]),
            recomputation=self._recomputation(tape, part)
            if self._program.tapes[tape].again >= 0
            else None,
        )

    def _function(self, tape: int, part: Extract) -> Callable[[list[Any]], tuple[Any, ...]]:
        nodes = self._runs(tape)
        if self._options is None or not nodes:
            return part.function
        count = f"{len(nodes)} operators from" if len(nodes) > 1 else "operator"
        label = f"{count} {op_name(nodes[0])} on logical device {self._layout.device(tape)}"
        plain = self._extract(tape, boxed=False).function
        dynamic = self._module.family is not None
        return CompiledTape(part.function, plain, self._options, nodes, label, dynamic=dynamic)

    def _recomputation(self, tape: int, part: Extract) -> Recomputation:
        """The recomputation of a checkpointed tape."""
        nodes = self._layout.nodes(tape)
        leaves = tuple(opaque_leaves(self._module.graph_module, nodes).values())
        crossing: list[tuple[int, int, int]] = []  # (argument, slot, the tape that reads it last)
        for argument, (node, reader) in enumerate(zip(part.inputs, part.readers, strict=True)):
            user = reader if reader is not None else self._layout.users_in(node, tape)[0]
            slots = self._crossing(node)
            if user in slots:
                readers = (other for other, slot in slots.items() if slot == slots[user])
                crossing.append((argument, slots[user], max(map(self._layout.tape, readers))))
        last = {slot: argument for argument, slot, _ in crossing}
        return Recomputation(
            copied=tuple(
                argument
                for argument, node in enumerate(part.inputs)
                if node.op == "get_attr"
                and not isinstance(self._layout.attribute(node), torch.nn.Parameter)
                and self._is_written(node)
            ),
            leaves=tuple(leaf for leaf in leaves if leaf.training and list(leaf.buffers())),
            crossing=tuple(
                (argument, slot, end == tape and last[slot] == argument)
                for argument, slot, end in crossing
            ),
            leaving=frozenset(
                slot for node in part.outputs for slot in self._crossing(node).values()
            ),
        )

    def _crossing(self, node: fx.Node) -> dict[fx.Node, int]:
        """The slot of each reader of a node that runs again, with it, on another tape."""
        layout, tapes = self._layout, self._program.tapes
        if node not in layout.op_of:
            return {}
        tape = layout.tape(node)
        unit, device = tapes[tape].again, layout.device(tape)
        return {
            user: self._slot(node, self._carrier(node, user), device)
            for user in layout.users(node)
            if layout.tape(user) != tape and tapes[layout.tape(user)].again == unit >= 0
        }

    def _is_written(self, node: fx.Node) -> bool:
        facts = self._module.facts
        return any(v.storage in facts.written for v in facts.nodes[node].values)

    def _graded_bytes(self, nodes: Sequence[fx.Node]) -> int:
        facts = self._module.facts
        values = {v for node in nodes for v in facts.nodes[node].values if v.requires_grad}
        return sum(facts.storages[storage].nbytes for storage in {v.storage for v in values})

    def _output(self, node: fx.Node, tape: int, result: int) -> Output:
        device = self._layout.device(tape)
        users = (user for user in self._layout.users(node) if self._layout.tape(user) != tape)
        slots = dict.fromkeys(self._slot(node, self._carrier(node, u), device) for u in users)
        structure = self._module.facts.nodes[node].structure
        bare = structure is not None and structure.is_tensor
        given: Any = self._inputs.get(node)
        if result < 0 and given is None:
            given = self._layout.attribute(node)
        number = (self._results[node],) if node in self._results else ()
        return Output(result, given, self._layout.value(node), bare, tuple(slots), number)

    def _instructions(
        self,
    ) -> tuple[tuple[dict[Place, Moves], ...], tuple[dict[Place, Clears], ...]]:
        """The effects of the program's copies and frees, phase by phase."""
        held: dict[Place, dict[fx.Node, int]] = defaultdict(dict)
        for (node, tensor, device), slot in self._slots.items():
            held[Place(tensor, device)][node] = slot
        copies: tuple[dict[Place, Moves], ...] = tuple({} for _ in self._program.phases)
        frees: tuple[dict[Place, Clears], ...] = tuple({} for _ in self._program.phases)
        # A tensor of the graph is a value or a gradient, depending on its producer.
        carried = self._gradients.carried
        for number, phase in enumerate(self._program.phases):
            for row in (row for rows in phase.lanes for row in rows):
                if isinstance(row, Copy):
                    src = held.get(Place(row.tensor, row.src), {})
                    dst = held.get(Place(row.tensor, row.dst), {})
                    moves = tuple((src[node], slot) for node, slot in dst.items())
                    grads = tuple(carried.get(row.tensor, ()))
                    values = tuple(map(self._passed, dst))
                    found = (self._gradients.of_slot.get(slot) for slot, _ in grads)
                    of = tuple(value and self._shape(value) for value in found)
                    copies[number][Place(row.tensor, row.dst)] = Moves(moves, grads, values, of)
                elif isinstance(row, Free):
                    place = Place(row.tensor, row.device)
                    side = 0 if self._is_made(place) else 1
                    cleared = tuple(pair[side] for pair in carried.get(row.tensor, ()))
                    frees[number][place] = Clears(tuple(held.get(place, {}).values()), cleared)
        return copies, frees

    def _passed(self, node: fx.Node) -> Passed:
        facts = self._module.facts.nodes[node]
        constants = () if facts.structure is None else facts.structure.constants
        numbers = (torch.tensor(row).dtype for row in constants if _is_number(row))
        shapes = (*map(self._shape, facts.values), *((dtype, ()) for dtype in numbers))
        return Passed(self._layout.value(node), facts.structure, len(facts.values), shapes)

    def _shape(self, value: Value) -> Shape:
        return value.dtype, self._sizes.get(value, value.shape)

    @cached_property
    def _sizes(self) -> dict[Value, tuple[int | None, ...]]:
        """Of every tensor where ranks send some, with None for a size that depends on values."""
        if all(place.type != "meta" for place in self._places):
            return {}
        found: dict[Value, tuple[int | None, ...]] = {}
        for node, facts in self._module.facts.nodes.items():
            rows: list[Any] = tensors_in(node.meta.get("val")) or [*facts.values]
            if node.op == "call_module":  # a part that stays whole, maybe for its values
                rows = []
            for value, row in zip_longest(facts.values, rows[: len(facts.values)]):
                sizes = [None] * len(value.shape) if row is None else row.shape
                pairs = zip(value.shape, sizes, strict=True)
                found[value] = tuple(n if is_backed(size) else None for n, size in pairs)
        return found

    def _last(
        self, tapes: Sequence[TapeCode], frees: Mapping[Place, Clears]
    ) -> dict[int, tuple[int, ...]]:
        """By tape the slots freed right after its segment that no later tape of it reads.

        Also those that this tape does not read: they may be views of what it does. Of several
        micro-batches, those that all free then.
        """
        phase = self._program.phases[0]
        last: dict[int, tuple[int, ...]] = {}
        for rows in phase.lanes:
            freed: dict[int, set[int]] = defaultdict(set)  # by batch
            for row in reversed(rows):
                if isinstance(row, Free):
                    freed[row.batch].update(frees[Place(row.tensor, row.device)].slots)
                    continue
                if isinstance(row, Run) and not phase.segments[row.segment].backward:
                    mine = freed[row.batch]
                    for tape in reversed(phase.segments[row.segment].tapes):
                        last[tape] = tuple(sorted(mine.intersection(last.get(tape, mine))))
                        mine -= {slot for _, slot in tapes[tape].fills}
                freed.clear()
        return last

    def _is_made(self, place: Place) -> bool:
        """True if a gradient stays where its reader made it, not where it is used."""
        structure, layout = self._layout.structure, self._layout
        producer = structure.tensors[place.tensor].producer
        if producer <= len(self._program.names):
            return True
        forward = structure.ops[producer].forward[0]
        return layout.device(layout.tape_of[forward]) == place.device
