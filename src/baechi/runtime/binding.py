"""A program bound to a model: its tapes as code, its tensors as slots.

A tensor of the program stands for fx nodes: those of its producer that its readers read. Each
(node, tensor, device) has a slot of its own, so that a copy is "slot to slot" and a free clears
slots. A gradient belongs to one reader: each (tape, what entered, leaf) has a slot where the tape
is, and one where the producer is if that is elsewhere.

Gradients are added up from the last reader to the first, as autograd does, bit for bit: what is
read with a gradient enters once per reader, and a value that is also read inside its tape leaves
through an alias for each reader outside, made in the reader's turn (an *exit*).
"""

import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import fx

from baechi.errors import ExecutionError
from baechi.extraction import Extract, extract, opaque_leaves
from baechi.graph import OpGraph
from baechi.lowering import TracedModule
from baechi.partition import attribute
from baechi.runtime.program import Copy, Free, Program
from baechi.runtime.tapes import Entry, Output, Sizes, TapeCode

_ALL = -1  # the "position" of a gradient that stands for all readers together
_CALLER = sys.maxsize  # the caller's gradient comes first: he read the value last


@final
@dataclass(frozen=True)
class Moves:
    """What a copy or a free does: for values and for gradients, (from, to) or slots to clear."""

    slots: tuple[Any, ...]
    grads: tuple[Any, ...]


@final
@dataclass(frozen=True)
class Bound:
    """A program that can run.

    Attributes:
        tapes: As code.
        copies: By (phase, tensor, device).
        frees: By (phase, tensor, device).
        sizes: Of a step's lists.
        input_values: The number of the value of each of the caller's tensors.
        input_grads: For each of them the gradients to add up, in order.
        result_values: For each result the number of its value, and how it is given: a node that
            the caller or the model owns has no graph of its own.
        result_grads: For each result, for each of its tensors, the slot of the caller's gradient.
        parameters: Parameters with gradients, and those to add up, in order.
        results: The result of every returned node that is made by a tape.
    """

    tapes: tuple[TapeCode, ...]
    copies: dict[tuple[int, int, int], Moves]
    frees: dict[tuple[int, int, int], Moves]
    sizes: Sizes
    input_values: tuple[int, ...]
    input_grads: tuple[tuple[int, ...], ...]
    result_values: tuple[int, ...]
    result_grads: tuple[tuple[int, ...], ...]
    parameters: dict[torch.nn.Parameter, tuple[int, ...]]
    results: dict[fx.Node, int]


@final
@dataclass
class _Gradient:
    """A gradient on its way: of a reader at a position in a tape, to who made the value."""

    slot: int  # where the tape is
    position: int
    tape: int
    home: int  # the slot where the producer is


@final
class Binder:
    """Binds a program to a traced model."""

    def __init__(
        self,
        module: TracedModule,
        graph: OpGraph,
        program: Program,
        places: Sequence[torch.device],
    ) -> None:
        self._module = module
        self._graph = graph
        self._program = program
        self._places = places
        self._position = {n: i for i, n in enumerate(module.graph_module.graph.nodes)}
        self._op_of = {node: op for op, nodes in enumerate(module.nodes) for node in nodes}
        self._tape_of = {op: i for i, tape in enumerate(program.tapes) for op in tape.ops}
        nodes = module.graph_module.graph.nodes
        self._placeholders = [node for node in nodes if node.op == "placeholder"]
        output = next(node for node in nodes if node.op == "output")
        self._returned = list(dict.fromkeys(output.all_input_nodes))
        self._slots: dict[tuple[fx.Node, int, int], int] = {}  # (node, tensor, device)
        self._values: dict[fx.Node, int] = {}
        self._n_grads = 0
        # (node, leaf) -> the gradients of its readers.
        self._gradients: dict[tuple[fx.Node, int], list[_Gradient]] = defaultdict(list)
        self._carried: dict[int, list[tuple[int, int]]] = defaultdict(list)  # tensor -> (from, to)
        # Of every parameter (position, tape, slot) of its gradients; and those of whole tapes.
        self._shares: dict[torch.nn.Parameter, list[tuple[int, int, int]]] = defaultdict(list)
        self._whole: dict[int, list[tuple[torch.nn.Parameter, int]]] = defaultdict(list)
        # Storages that a gradient flows through at some time: a write may begin it.
        facts = module.facts.nodes.values()
        self._graded = {v.storage for fact in facts for v in fact.values if v.requires_grad}
        self._made = self._tensors_between()
        self._twin_of = {twin: op for op, twin in enumerate(program.twins) if twin >= 0}
        self._users: dict[int, list[fx.Node]] = defaultdict(list)  # of a parameter, by identity
        for node in nodes:
            if node.op == "get_attr":
                users = [user for user in node.users if user in self._op_of]
                self._users[id(self._attribute(node))] += users

    def _tensors_between(self) -> dict[tuple[int, int], list[int]]:
        """The tensors from one operator of the graph to another, ascending."""
        between: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index, tensor in enumerate(self._graph.tensors):
            for consumer in tensor.consumers:
                between[tensor.producer, consumer].append(index)
        return between

    def bind(self) -> Bound:
        """The bound program."""
        parts = [self._extract(tape) for tape in range(len(self._program.tapes))]
        reads = [self._reads(tape, part) for tape, part in enumerate(parts)]
        results = {
            node: index
            for index, node in enumerate(
                node
                for node in self._returned
                if node in self._op_of and node.op not in ("placeholder", "get_attr")
            )
        }
        result_grads = [self._caller_gradients(node) for node in results]
        self._share_parameters(parts)
        entries = [self._entries(tape, part) for tape, part in enumerate(parts)]
        tapes = [
            self._code(tape, part, reads[tape], entries[tape], results)
            for tape, part in enumerate(parts)
        ]
        inputs = [self._value(node) for node in self._placeholders]
        sizes = Sizes(len(self._slots), len(self._values), len(results), self._n_grads, len(tapes))
        copies, frees = self._instructions()
        return Bound(
            tuple(tapes),
            copies,
            frees,
            sizes,
            tuple(inputs),
            tuple(self._in_order(self._gradients[node, 0]) for node in self._placeholders),
            tuple(self._value(node) for node in results),
            tuple(map(tuple, result_grads)),
            {
                parameter: tuple(slot for *_, slot in sorted(rows, reverse=True))
                for parameter, rows in self._shares.items()
            },
            results,
        )

    # What a tape runs.

    def _nodes(self, tape: int) -> list[fx.Node]:
        nodes = [n for op in self._program.tapes[tape].ops for n in self._module.nodes[op]]
        return sorted(nodes, key=self._position.__getitem__)

    def _extract(self, tape: int) -> Extract:
        place = self._places[self._program.tapes[tape].device]
        nodes = self._nodes(tape)
        running = [node for node in nodes if node.op not in ("get_attr", "placeholder")]
        outputs = [node for node in running if self._leaves(node, tape)]
        return extract(
            self._module.graph_module,
            running,
            outputs,
            apart=self._read_apart(running),
            exits=self._exits(running, outputs),
            device=place if place.type == "cuda" else None,
        )

    def _leaves(self, node: fx.Node, tape: int) -> bool:
        """Whether another tape, or the caller, reads the node's value."""
        return node in self._returned or any(
            user in self._op_of and self._tape_of[self._op_of[user]] != tape for user in node.users
        )

    def _read_apart(self, nodes: Sequence[fx.Node]) -> frozenset[fx.Node]:
        """Values from outside with gradients; not those that are written, which must stay one.

        Parameters with three readers in several tapes are among them: of two the order is free.
        """
        facts = self._module.facts.nodes
        inside = set(nodes)
        written = {storage for node in nodes for storage in facts[node].writes}
        apart = set()
        for node in nodes:
            for argument in node.all_input_nodes:
                if argument in inside or argument not in facts:
                    continue
                values = facts[argument].values
                if not any(value.requires_grad for value in values):
                    continue
                if any(value.storage in written for value in values):
                    continue
                if argument.op != "get_attr" or self._is_spread(argument):
                    apart.add(argument)
        return frozenset(apart)

    def _is_spread(self, node: fx.Node) -> bool:
        """Whether a parameter has three readers or more, in several tapes."""
        users = self._users[id(self._attribute(node))]
        return len(users) > 2 and len({self._tape_of[self._op_of[user]] for user in users}) > 1

    def _exits(
        self, nodes: Sequence[fx.Node], outputs: Sequence[fx.Node]
    ) -> list[tuple[fx.Node, int, fx.Node | None]]:
        """Ways out for the gradients of values that are read inside and outside a tape.

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
                position = _CALLER if reader.op == "output" else self._position[reader]
                after = (n for n in nodes if self._position[n] > position)
                rows.append((node, position, next(after, None)))
        order = {node: self._position[node] for node in nodes}
        end = len(self._position)
        return sorted(
            rows, key=lambda row: (end if row[2] is None else order[row[2]], row[1], order[row[0]])
        )

    # What it reads.

    def _is_state(self, node: fx.Node) -> bool:
        """Whether it names state that is where its readers are."""
        return node.op == "get_attr" and node not in self._module.travelling

    def _reads(self, tape: int, part: Extract) -> list[int]:
        """The slot of every input that comes from another tape, else -1."""
        device = self._program.tapes[tape].device
        slots = []
        for node, reader in zip(part.inputs, part.readers, strict=True):
            if self._is_state(node) or self._tape_of[self._op_of[node]] == tape:
                slots.append(-1)
                continue
            users = [reader] if reader is not None else self._users_in(node, tape)
            tensor = self._carrier(node, self._op_of[users[0]])
            slots.append(self._slot(node, tensor, device))
        return slots

    def _users_in(self, node: fx.Node, tape: int) -> list[fx.Node]:
        users = (user for user in node.users if user in self._op_of)
        return sorted(
            (user for user in users if self._tape_of[self._op_of[user]] == tape),
            key=self._position.__getitem__,
        )

    def _carrier(self, node: fx.Node, reader: int) -> int:
        """The tensor of the program that brings a node's value to an operator."""
        tensors = self._made.get((self._op_of[node], reader))
        if not tensors:
            names = self._program.names
            raise ExecutionError(
                f"the graph has no tensor from {names[self._op_of[node]]!r} to {names[reader]!r}, "
                "which reads its result; it is not the graph of this model. Trace it again."
            )
        return tensors[0]

    def _slot(self, node: fx.Node, tensor: int, device: int) -> int:
        return self._slots.setdefault((node, tensor, device), len(self._slots))

    def _value(self, node: fx.Node) -> int:
        return self._values.setdefault(node, len(self._values))

    # Gradients.

    def _new_grad(self) -> int:
        self._n_grads += 1
        return self._n_grads - 1

    def _entries(self, tape: int, part: Extract) -> list[Entry]:
        """What may enter with a gradient, and where the gradient goes."""
        facts = self._module.facts.nodes
        entries = []
        for argument, (node, reader) in enumerate(zip(part.inputs, part.readers, strict=True)):
            position = _ALL if reader is None else self._position[reader]
            if self._is_state(node):
                if reader is not None:
                    slot = self._new_grad()
                    entries.append(Entry(argument, 0, -1, slot))
                    self._shares[self._attribute(node)].append((position, tape, slot))
                continue
            for leaf, value in enumerate(facts[node].values):
                if value.storage in self._graded:
                    readers = [reader] if reader is not None else self._users_in(node, tape)
                    gradient = self._gradient(node, leaf, position, tape, readers)
                    entries.append(Entry(argument, leaf, self._value(node), gradient.slot))
        return entries

    def _gradient(
        self, node: fx.Node, leaf: int, position: int, tape: int, readers: Sequence[fx.Node]
    ) -> _Gradient:
        """The gradient of a tape's reader, with a slot on both sides of its way."""
        slot = self._new_grad()
        gradient = _Gradient(slot, position, tape, slot)
        self._gradients[node, leaf].append(gradient)
        if node.op == "placeholder":
            return gradient
        ways = [
            tensors[0]
            for reader in readers
            if (tensors := self._gradient_tensors(node, self._op_of[reader]))
        ]
        if ways:
            if self._device(self._tape_of[self._op_of[node]]) != self._device(tape):
                gradient.home = self._new_grad()
            self._carried[ways[0]].append((slot, gradient.home))
        elif self._module.facts.nodes[node].values[leaf].requires_grad and any(
            self._program.twins[self._op_of[reader]] >= 0 for reader in readers
        ):
            raise ExecutionError(
                f"the graph has no gradient for {node.name} from {readers[0].name}; it is not the "
                "training graph of this model. Trace the model and solve its graph again."
            )
        return gradient

    def _gradient_tensors(self, node: fx.Node, reader: int) -> list[int]:
        twins = self._program.twins
        ends = twins[reader], twins[self._op_of[node]]
        return self._made.get(ends, []) if min(ends) >= 0 else []

    def _caller_gradients(self, node: fx.Node) -> list[int]:
        """Slots for the caller's gradients of a result; the program frees them."""
        loss, twin = len(self._program.names), self._program.twins[self._op_of[node]]
        slots = []
        for leaf in range(len(self._module.facts.nodes[node].values)):
            slot = self._new_grad()
            slots.append(slot)
            self._gradients[node, leaf].append(_Gradient(slot, _CALLER, sys.maxsize, slot))
            tensors = self._made.get((loss, twin), [])
            if tensors:
                self._carried[tensors[0]].append((slot, slot))
        return slots

    def _share_parameters(self, parts: Sequence[Extract]) -> None:
        """A slot for each tape's gradient of each parameter that it reads as one."""
        for tape, part in enumerate(parts):
            rows: dict[torch.nn.Parameter, int] = {}
            for node, reader in zip(part.inputs, part.readers, strict=True):
                if self._is_state(node) and reader is None:
                    value = self._attribute(node)
                    if isinstance(value, torch.nn.Parameter):
                        last = self._position[self._users_in(node, tape)[-1]]
                        rows[value] = max(last, rows.get(value, last))
            for name, leaf in self._opaque(tape).items():
                last = max(self._position[n] for n in self._nodes(tape) if n.target == name)
                for parameter in leaf.parameters():
                    rows[parameter] = max(last, rows.get(parameter, last))
            for parameter, position in rows.items():
                slot = self._new_grad()
                self._shares[parameter].append((position, tape, slot))
                self._whole[tape].append((parameter, slot))

    def _opaque(self, tape: int) -> dict[str, torch.nn.Module]:
        return opaque_leaves(self._module.graph_module, self._nodes(tape))

    def _in_order(self, gradients: Sequence[_Gradient]) -> tuple[int, ...]:
        """Their slots at home, from the last reader to the first."""
        rows = sorted(gradients, key=lambda g: (g.position, g.tape), reverse=True)
        return tuple(row.home for row in rows)

    # The code.

    def _code(
        self,
        tape: int,
        part: Extract,
        reads: Sequence[int],
        entries: Sequence[Entry],
        results: dict[fx.Node, int],
    ) -> TapeCode:
        template: list[Any] = [None] * len(part.inputs)
        fills, given = [], []
        inputs = {node: index for index, node in enumerate(self._placeholders)}
        for argument, node in enumerate(part.inputs):
            if reads[argument] >= 0:
                fills.append((argument, reads[argument]))
            elif node.op == "placeholder":
                given.append((argument, inputs[node]))
            else:
                template[argument] = self._attribute(node)
        outputs = self._outputs(tape, part, results, inputs)
        device = self._device(tape)
        return TapeCode(
            tape,
            device,
            self._places[device],
            tuple(self._nodes(tape)),
            part.function,
            tuple(template),
            tuple(fills),
            tuple(given),
            tuple(entries),
            outputs,
            len(part.exits),
            self._seeds(part),
            tuple(self._whole[tape]),
        )

    def _device(self, tape: int) -> int:
        return self._program.tapes[tape].device

    def _outputs(
        self, tape: int, part: Extract, results: dict[fx.Node, int], inputs: dict[fx.Node, int]
    ) -> tuple[Output, ...]:
        own = [
            node
            for node in self._nodes(tape)
            if node.op in ("placeholder", "get_attr")
            and not self._is_state(node)
            and self._leaves(node, tape)
        ]
        rows = []
        for result, node in enumerate([*part.outputs, *own]):
            made = result < len(part.outputs)
            slots = {
                self._slot(node, self._carrier(node, self._op_of[user]), self._device(tape)): None
                for user in node.users
                if user in self._op_of and self._tape_of[self._op_of[user]] != tape
            }
            structure = self._module.facts.nodes[node].structure
            bare = structure is not None and structure.spec.is_leaf() and structure.n_tensors == 1
            given = None if made else inputs.get(node)
            if not made and given is None:
                given = self._attribute(node)
            rows.append(
                Output(
                    result if made else -1,
                    given,
                    self._value(node),
                    bare,
                    tuple(slots),
                    (results[node],) if node in results else (),
                )
            )
        return tuple(rows)

    def _seeds(self, part: Extract) -> tuple[tuple[int, ...], ...]:
        """The gradients that come back to each exit, and to each tensor of each output."""
        rows = []
        exits = set(part.exits)
        for node, position in part.exits:
            there = [g for g in self._gradients[node, 0] if g.position == position]
            rows.append(self._in_order(there))
        for node in part.outputs:
            values = self._module.facts.nodes[node].values
            for leaf in range(len(values)):
                common = [g for g in self._gradients[node, leaf] if (node, g.position) not in exits]
                rows.append(self._in_order(common))
        return tuple(rows)

    def _attribute(self, node: fx.Node) -> Any:
        return attribute(self._module.graph_module, str(node.target))

    # The instructions.

    def _instructions(
        self,
    ) -> tuple[dict[tuple[int, int, int], Moves], dict[tuple[int, int, int], Moves]]:
        held: dict[tuple[int, int], list[tuple[fx.Node, int]]] = defaultdict(list)
        for (node, tensor, device), slot in self._slots.items():
            held[tensor, device].append((node, slot))
        copies: dict[tuple[int, int, int], Moves] = {}
        frees: dict[tuple[int, int, int], Moves] = {}
        for number, phase in enumerate(self._program.phases):
            carried = self._carried if number else {}
            for row in (row for rows in phase.lanes for row in rows):
                if isinstance(row, Copy):
                    there = {} if number else dict(held[row.tensor, row.src])
                    moves = [
                        (there[node], slot)
                        for node, slot in ([] if number else held[row.tensor, row.dst])
                    ]
                    grads = tuple(carried.get(row.tensor, ()))
                    copies[number, row.tensor, row.dst] = Moves(tuple(moves), grads)
                elif isinstance(row, Free):
                    held_here = [] if number else held[row.tensor, row.device]
                    producer = self._graph.tensors[row.tensor].producer
                    side = 0 if self._is_source(row, producer) else 1
                    cleared = tuple(pair[side] for pair in carried.get(row.tensor, ()))
                    slots = tuple(slot for _, slot in held_here)
                    frees[number, row.tensor, row.device] = Moves(slots, cleared)
        return copies, frees

    def _is_source(self, row: Free, producer: int) -> bool:
        """Whether a gradient is freed where its reader made it."""
        if producer <= len(self._program.names):
            return True  # the caller's
        return self._device(self._tape_of[self._twin_of[producer]]) == row.device
