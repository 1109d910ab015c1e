"""The path of every gradient, from each reader of a value to its producer.

Each (tape, what entered, leaf) has a slot for its gradient where the tape is, and one where the
producer is if that is elsewhere; a tensor of the program carries it from one to the other.

Gradients are added up from the last reader to the first, as autograd does (`docs/runtime.md`, Bit
for bit): a value enters a tape once per reader, and leaves it through an alias for each outside
reader where it is read inside, too (an *exit*).
"""

import operator
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import pairwise
from typing import Any, Final, NamedTuple, TypeGuard, final

import torch
from torch import fx

from baechi.errors import ExecutionError
from baechi.records.graph import StepStructure
from baechi.records.instructions import Program
from baechi.runtime.autograd.tape import Entry
from baechi.tracing.fx_nodes import operator_name
from baechi.tracing.lowering import TracedModule
from baechi.tracing.node_facts import NodeFacts, Value, viewed
from baechi.tracing.partition import attribute
from baechi.tracing.subgraph import Extract, opaque_leaves

_CALLER: Final = sys.maxsize  # the caller read a result after everybody else
_HANDS_ON: Final = ("add", "sub", "rsub", "clone", "alias")  # pointwise, but no new gradient
# Their backward on a CPU is vectorized only where the gradient is dense, and rounds otherwise.
_ROUNDS: Final = ("gelu", "silu", "mish", "softplus", "elu", "selu", "celu")


@final
class Layout:
    """The positions of nodes in the program, operators on tapes, tensors between operators."""

    def __init__(self, module: TracedModule, structure: StepStructure, program: Program) -> None:
        self.module = module
        self.structure = structure
        self.program = program
        self.position = {n: i for i, n in enumerate(module.graph_module.graph.nodes)}
        self.output = module.graph_module.graph.output_node()
        self.op_of = {node: op for op, nodes in enumerate(module.nodes) for node in nodes}
        self.tape_of = {op: i for i, tape in enumerate(program.tapes) for op in tape.ops}
        # (producer, consumer) -> the tensors of the graph between them, ascending.
        self.between: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index, tensor in enumerate(structure.tensors):
            for consumer in () if tensor.order else tensor.consumers:
                self.between[tensor.producer, consumer].append(index)
        self.values: dict[fx.Node, int] = {}  # the number of what passes between tapes or callers

    def value(self, node: fx.Node) -> int:
        """The number of a node's value."""
        return self.values.setdefault(node, len(self.values))

    def nodes(self, tape: int) -> list[fx.Node]:
        """The nodes of a tape in program order, or in the tape's own where that differs."""
        ops = self.program.tapes[tape].ops
        nodes = [node for op in ops for node in self.module.nodes[op]]
        ascends = all(one < two for one, two in pairwise(ops))
        return sorted(nodes, key=self.position.__getitem__) if ascends else nodes

    def tape(self, node: fx.Node) -> int:
        """The tape that runs a node."""
        return self.tape_of[self.op_of[node]]

    def device(self, tape: int) -> int:
        """The device of a tape."""
        return self.program.tapes[tape].device

    def users(self, node: fx.Node) -> list[fx.Node]:
        """The nodes that run and read a node's value."""
        return [user for user in node.users if user in self.op_of]

    def users_in(self, node: fx.Node, tape: int) -> list[fx.Node]:
        """Those of them on a tape, in program order."""
        users = (user for user in self.users(node) if self.tape(user) == tape)
        return sorted(users, key=self.position.__getitem__)

    def via(self, value: fx.Node, reader: fx.Node) -> fx.Node | None:
        """The earlier reader of a value to whose backward a reader's gradient comes first."""
        found = self.module.routes.get(value, {}).get(reader)
        reaches = found is not None and self.program.twins[self.op_of[found]] >= 0
        return found if reaches else None

    def is_state(self, node: fx.Node) -> bool:
        """True if it names state that lies where its readers are."""
        return node.op == "get_attr" and node not in self.module.travelling

    def attribute(self, node: fx.Node) -> Any:
        """The model's own value behind a get_attr node."""
        return attribute(self.module.graph_module, str(node.target))

    def leaf(self, node: fx.Node) -> torch.nn.Module:
        """The submodule that a node calls."""
        return self.module.graph_module.get_submodule(str(node.target))


class _Gradient(NamedTuple):
    """A gradient of a reader at a position, and its slot where the producer is."""

    position: int
    tape: int
    home: int


@final
class Gradients:
    """The paths of all gradients.

    Attributes:
        n: The number of slots.
        carried: Tensor of the program -> (slot where it is made, slot where it is used).
        of_slot: The tensor whose gradient a slot is for.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._facts = layout.module.facts.nodes
        self.n = 0
        self.carried: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self.of_slot: dict[int, Value] = {}
        self._of: dict[tuple[fx.Node, int], list[_Gradient]] = defaultdict(list)
        # The same of those that come to a tape of a reader first.
        self._to: dict[tuple[fx.Node, int, int], list[_Gradient]] = defaultdict(list)
        self._gathered: dict[int, list[tuple[int, tuple[fx.Node, int, int]]]] = defaultdict(list)
        # Of every parameter (position, tape, slot) of its gradients.
        self._shares: dict[torch.nn.Parameter, list[tuple[int, int, int]]] = defaultdict(list)
        # Storages that a gradient flows through at some time: a write may begin it.
        facts = self._facts.values()
        self._graded = {v.storage for fact in facts for v in fact.values if v.requires_grad}
        self._readers: dict[int, list[fx.Node]] = defaultdict(list)  # of state, by identity
        for node in layout.position:
            if node.op == "get_attr":
                self._readers[id(layout.attribute(node))] += layout.users(node)
            elif node.op == "call_module":
                for weight in layout.leaf(node).parameters():
                    self._readers[id(weight)].append(node)
        self._lent: dict[str, fx.Node] = {}  # nodes that stand for weights of submodules, by name

    def _new(self) -> int:
        self.n += 1
        return self.n - 1

    # How a tape's code is made.

    def read_apart(self, nodes: Sequence[fx.Node]) -> frozenset[tuple[fx.Node, fx.Node]]:
        """(value from outside, reader on a tape): those whose gradient must be told apart.

        The last readers of a value share one gradient if they are on one tape: there autograd adds
        it up as in the unsplit model, also where an operator uses a value several times inside. So
        do all after one to which gradients of later readers come. So do all readers of a value that
        the tape writes, which must stay one. Parameters are told apart where the order of adding up
        matters.
        """
        written = {storage for node in nodes for storage in self._facts[node].writes}
        inside, position = set(nodes), self._layout.position
        readers: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for node in nodes:
            for argument in node.all_input_nodes:
                if argument in self._facts and argument not in inside:
                    readers[argument].append(node)
        apart: set[tuple[fx.Node, fx.Node]] = set()
        for value, rows in readers.items():
            facts = self._facts[value].values
            if not any(v.requires_grad for v in facts) or any(v.storage in written for v in facts):
                continue
            if value.op == "get_attr":
                alone = rows if self._is_spread(self._layout.attribute(value)) else []
            else:
                first = self._first_together(value, rows, inside)
                alone = [node for node in rows if position[node] < first]
            apart.update((value, node) for node in alone)
        return frozenset(apart)

    def _first_together(self, value: fx.Node, rows: Sequence[fx.Node], inside: Set[fx.Node]) -> int:
        """The position from which on the readers of a value on a tape share a gradient.

        That is after its last reader elsewhere whose gradient does not come to one of them.
        """
        layout, twins = self._layout, self._layout.program.twins
        via = {user: layout.via(value, user) for user in value.users}
        gathering = [layout.position[node] for node in via.values() if node in inside]
        others = {user for user in via if user not in inside and via[user] not in inside}
        users = (u for u in layout.users(value) if u in others and twins[layout.op_of[u]] >= 0)
        last = max((layout.position[user] for user in users), default=-1)
        ascends = all(layout.position[a] < layout.position[b] for a, b in pairwise(rows))
        if layout.output in others or not ascends:
            last = _CALLER  # the caller reads it, or the tape has another order than autograd
        return min(last, *gathering) if gathering else last

    def lent(self, nodes: Sequence[fx.Node]) -> dict[fx.Node, dict[str, fx.Node]]:
        """The weights, by name, whose gradients two submodules of a tape must tell apart.

        These stay whole, and would give one gradient for both.
        """
        found: dict[fx.Node, dict[str, fx.Node]] = {}
        called = [n for n in nodes if n.op == "call_module" and self._layout.structure.is_training]
        calls = {node: self._layout.leaf(node) for node in called}
        readers = Counter(id(weight) for leaf in calls.values() for weight in leaf.parameters())
        for node, leaf in calls.items():
            for name, weight in leaf.named_parameters():
                if readers[id(weight)] > 1 and weight.requires_grad and self._is_spread(weight):
                    path = f"{node.target}.{name}"
                    if path not in self._lent:
                        self._lent[path] = fx.Graph().get_attr(path)
                    found.setdefault(node, {})[name] = self._lent[path]
        return found

    def _is_spread(self, value: Any) -> bool:
        """True if gradients of a parameter's readers are added up one by one, as they come.

        That is with readers in several tapes; or with several micro-batches whose gradients
        autograd adds up one by one.
        """
        users, program = self._readers[id(value)], self._layout.program
        if program.batches > 1 and len(program.phases) > 1:
            return len(users) > 1
        return len({self._layout.tape(user) for user in users}) > 1

    def exits(
        self, nodes: Sequence[fx.Node], outputs: Sequence[fx.Node]
    ) -> list[tuple[fx.Node, int, fx.Node]]:
        """Ways out for the gradients of values that are read inside a tape after outside.

        Autograd adds up from the last reader to the first, and of two gradients the first gives
        their sum its strides. It takes what comes back to a tape first; an alias is in its turn,
        where it is made. That is after the last write into the value, as all readers outside are: a
        view would not follow one. A tape without a backward needs none.
        """
        twins, op_of = self._layout.program.twins, self._layout.op_of
        if all(twins[op_of[node]] < 0 for node in nodes):
            return []
        position = self._layout.position
        turns = {node: turn for turn, node in enumerate(nodes)}
        written = {s: position[node] for node in nodes for s in self._facts[node].writes}
        rows = []
        for node in outputs:
            values = self._facts[node].values
            if len(values) != 1 or not values[0].requires_grad:
                continue
            inside = [user for user in node.users if user in turns]
            for reader in self._layout.users(node):
                at = position[reader]
                later = [user for user in inside if position[user] > at]
                if later and reader not in turns and at > written.get(values[0].storage, -1):
                    rows.append((node, at, min(later, key=turns.__getitem__)))
        return sorted(rows, key=lambda row: (turns[row[2]], row[1], position[row[0]]))

    # Where gradients come from.

    def from_caller(self, node: fx.Node) -> tuple[int, ...]:
        """A slot for the caller's gradient of each tensor of a result."""
        program = self._layout.program
        target = self._layout.via(node, self._layout.output) or node
        loss, twin = len(program.names), program.twins[self._layout.op_of[target]]
        carriers = self._layout.between.get((loss, twin), [])
        slots = tuple(self._new() for _ in self._facts[node].values)
        for leaf, slot in enumerate(slots):
            self.of_slot[slot] = self._facts[node].values[leaf]
            found = self._coming(node, leaf, self._layout.tape(target))
            found.append(_Gradient(_CALLER, sys.maxsize, slot))
            if carriers:
                self.carried[carriers[0]].append((slot, slot))
        return slots

    def entries(self, tape: int, part: Extract) -> list[Entry]:
        """The values that may enter a tape with a gradient."""
        rows = []
        position, apart = self._layout.position, {*zip(part.inputs, part.readers, strict=True)}
        for argument, (node, reader) in enumerate(zip(part.inputs, part.readers, strict=True)):
            if self._layout.is_state(node):
                if reader is not None:
                    slot = self._new()
                    rows.append(Entry(argument, 0, -1, slot, given=False, keeps_strides=False))
                    parameter = self._layout.attribute(node)
                    self._shares[parameter].append((position[reader], tape, slot))
                continue
            mine = self._layout.users_in(node, tape)
            readers = [reader] if reader else [user for user in mine if (node, user) not in apart]
            for leaf, value in enumerate(self._facts[node].values):
                if value.storage in self._graded:
                    slot = self._from_reader(node, leaf, tape, readers)
                    if reader is None:
                        self._gathered[tape].append((len(rows), (node, leaf, tape)))
                    given, keeps = node.op == "placeholder", keeps_strides(node, self._facts)
                    value_number = self._layout.value(node)
                    rows.append(Entry(argument, leaf, value_number, slot, given, keeps))
        return rows

    def _from_reader(self, node: fx.Node, leaf: int, tape: int, readers: Sequence[fx.Node]) -> int:
        """A slot for the gradient of a tape's readers that share one, and its path."""
        position = self._layout.position[readers[-1]]
        slot = home = self._new()
        self.of_slot[slot] = self._facts[node].values[leaf]
        layout, twins = self._layout, self._layout.program.twins
        if node.op == "placeholder":
            self._of[node, leaf].append(_Gradient(position, tape, home))
            return slot  # the caller adds them up
        graded = [reader for reader in readers if twins[layout.op_of[reader]] >= 0]
        if not graded:
            return slot  # none of them has a backward, so nothing comes
        via = layout.via(node, graded[0])
        target = node if via is None else via
        mine, end = twins[layout.op_of[target]], layout.tape(target)
        theirs = [twins[layout.op_of[reader]] for reader in graded]
        carriers = [t for twin in theirs for t in layout.between.get((twin, mine), [])]
        if carriers and mine >= 0:
            if layout.device(end) != layout.device(tape):
                home = self._new()
            self.carried[carriers[0]].append((slot, home))
        elif self._facts[node].values[leaf].requires_grad:
            raise ExecutionError(
                f"the graph has no gradient for {node.name} from {readers[0].name}; it is not the "
                "training graph of this model. Trace the model and solve its graph again."
            )
        self._coming(node, leaf, end).append(_Gradient(position, tape, home))
        return slot

    def _coming(self, node: fx.Node, leaf: int, end: int) -> list[_Gradient]:
        """The gradients of a value that come to a tape, the producer's or a reader's."""
        return self._of[node, leaf] if end == self._layout.tape(node) else self._to[node, leaf, end]

    def share_parameters(
        self, tape: int, part: Extract
    ) -> tuple[tuple[torch.nn.Parameter, int], ...]:
        """The parameters that a tape reads as one, each with a slot for its gradient."""
        layout = self._layout
        rows = [
            (layout.attribute(node), layout.users_in(node, tape))
            for node, reader in zip(part.inputs, part.readers, strict=True)
            if layout.is_state(node) and reader is None
        ]
        nodes = layout.nodes(tape)
        lent = {id(layout.attribute(node)) for node in part.inputs if node in self._lent.values()}
        for name, leaf in opaque_leaves(layout.module.graph_module, nodes).items():
            users = [node for node in nodes if node.target == name]
            state = (*leaf.parameters(), *leaf.buffers())
            rows += [(value, users) for value in state if id(value) not in lent]
        last: dict[torch.nn.Parameter, int] = {}
        for value, users in rows:
            if _is_trained(value):
                positions = (layout.position[user] for user in users)
                last[value] = max(last.get(value, -1), *positions)
        slots = {parameter: self._new() for parameter in last}
        for parameter, slot in slots.items():
            self._shares[parameter].append((last[parameter], tape, slot))
        return tuple(slots.items())

    # Where they go.

    def of_parameters(self) -> dict[torch.nn.Parameter, tuple[int, tuple[int, ...]]]:
        """The device and the gradients of every parameter, in the order of summation."""
        found = {}
        for parameter, rows in self._shares.items():
            slots = tuple(slot for *_, slot in sorted(rows, reverse=True))
            found[parameter] = self._layout.device(rows[0][1]), slots
        return found

    def sums(self) -> tuple[dict[int, list[tuple[int, int]]], dict[int, list[tuple[int, int]]]]:
        """The terms that each tape's backward adds to gradients of parameters.

        First those of its own micro-batch, (slot of sum, slot). The order of adding up is that of
        `of_parameters`; each is added as soon as those before it have come, so that no more of them
        wait than must. Then those that it adds to the sums over all micro-batches, (number of the
        parameter, slot): the sum of its own where each has a loss of its own, as every backward of
        a loop makes one. One loss for all sends gradients to all readers of all micro-batches one
        by one: so are they added, when the last of a micro-batch has come.
        """
        program = self._layout.program
        segments = (row for phase in program.phases for row in phase.segments)
        order = [t for row in segments if row.backward and not row.again for t in row.tapes]
        rank = {tape: i for i, tape in enumerate(order)}
        sums: dict[int, list[tuple[int, int]]] = defaultdict(list)
        totals: dict[int, list[tuple[int, int]]] = defaultdict(list)
        joined = len(program.phases) > 1
        for number, shares in enumerate(self._shares.values()):
            # A tape that only reads it for a mask, or writes it without gradients, has no backward.
            rows = sorted((row for row in shares if row[1] in rank), reverse=True)
            tapes = {tape for _, tape, _ in rows}
            if len({self._layout.device(tape) for tape in tapes}) != 1:
                continue
            (_, latest, total), *others = rows
            if joined and program.batches > 1:
                latest = max(tapes, key=rank.__getitem__)
                totals[latest] += [(number, slot) for *_, slot in rows]
                continue
            for _, tape, slot in others:
                latest = max(latest, tape, key=rank.__getitem__)
                sums[latest].append((total, slot))
            if not joined:
                totals[latest].append((number, total))
        return sums, totals

    def of_input(self, node: fx.Node) -> tuple[int, ...]:
        """The gradients of a tensor that the caller gave, in the order of adding up."""
        return _in_order(self._of[node, 0])

    def gathered(self, tape: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """(entry of a tape, the gradients of later readers that it adds its own to)."""
        rows = ((entry, _in_order(self._to.get(key, ()))) for entry, key in self._gathered[tape])
        return tuple(row for row in rows if row[1])

    def seeds(self, part: Extract) -> tuple[tuple[int, ...], ...]:
        """The gradients that come back to each exit, and to each tensor of each output."""
        exits = set(part.exits)
        rows = [
            _in_order(g for g in self._of[node, 0] if g.position == position)
            for node, position in part.exits
        ]
        for node in part.outputs:
            for leaf in range(len(self._facts[node].values)):
                gradients = self._of[node, leaf]
                rows.append(_in_order(g for g in gradients if (node, g.position) not in exits))
        return tuple(rows)


def _is_trained(value: Any) -> TypeGuard[torch.nn.Parameter]:
    """True if it is a parameter, or is trained as one: a buffer that needs a gradient."""
    parameter = isinstance(value, torch.nn.Parameter)
    return parameter or (isinstance(value, torch.Tensor) and value.requires_grad)


def _in_order(gradients: Iterable[_Gradient]) -> tuple[int, ...]:
    """Their slots at home, from the last reader to the first."""
    rows = sorted(gradients, key=lambda g: (g.position, g.tape), reverse=True)
    return tuple(row.home for row in rows)


def keeps_strides(node: fx.Node, nodes: Mapping[fx.Node, NodeFacts]) -> bool:
    """True if the gradient that comes to a node must keep its strides (no contiguous copy).

        relu(x), x * y        not: a new gradient, dense whatever the old one was
        two readers           not: their sum is a new one, too
        batch_norm(x)         another kernel where the gradient is dense with channels last
        silu(x)               another loop where it is dense
        x.view(n), x + y      it is handed on, and another operator may be such a one
        weight.view(n)        not: a parameter's own gradient gets room of its own

    Other kernels walk through a dense copy of a part of a larger gradient in another order, and
    round otherwise. Without this, a batch norm of Cvt (channels last), the attention sinks of
    GPT-OSS and a joined SiLU differ from the unsplit model in their last bits (torch 2.13, CPU).
    """
    facts, target = nodes[node], node.target
    if _is_parameter(node, nodes):
        return False
    if len(facts.values) != 1:
        return True
    # The caller is a reader that gives one.
    read = (u not in nodes or any(v.requires_grad for v in nodes[u].values) for u in node.users)
    if sum(read) > 1:
        return False
    if not isinstance(target, torch._ops.OpOverload) or facts.writes:
        return True
    return torch.Tag.pointwise not in target.tags or operator_name(node) in _HANDS_ON + _ROUNDS


def _is_parameter(node: fx.Node, nodes: Mapping[fx.Node, NodeFacts]) -> bool:
    """True if it is a parameter or views of one, which together have every element once."""
    while (base := viewed(node, nodes)) is not None:
        mine, behind = nodes[node].values, nodes[base].values
        part = node.target is operator.getitem and len(behind) > 1
        if not part and sum(v.nbytes for v in mine) != sum(v.nbytes for v in behind):
            return False
        if any(nodes[user].writes for user in base.users if user in nodes):
            return False
        node = base
    return node.op == "get_attr"
