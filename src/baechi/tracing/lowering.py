"""The lowering of a partition of fx nodes to operators and the tensors between them.

A tensor of the result is a storage, whichever views of it are read.

Complexity: O(nodes + edges), with a sort.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import final

from torch import fx, nn

from baechi.traced.operators import TracedOp, TracedTensor
from baechi.tracing.calling_convention import Call
from baechi.tracing.families import Family
from baechi.tracing.fx_nodes import (
    is_one_node,
    op_name,
    operator_name,
    source_line,
)
from baechi.tracing.gradient_order import Routes, find_routes, routed
from baechi.tracing.guards import Attributes
from baechi.tracing.node_facts import Facts, Value
from baechi.tracing.node_order import order_nodes
from baechi.tracing.operator_key import operator_key
from baechi.tracing.partition import Partition
from baechi.tracing.pytrees import Structure
from baechi.tracing.questions import Questions
from baechi.tracing.shared_casts import cached_casts
from baechi.tracing.state_ownership import Owned, StateOwnership, crossing_bytes


@final
@dataclass(frozen=True)
class TracedModule:
    """The torch side of a `Traced`: the user's model, the flat graph over it, and the example call.

    Attributes:
        returned: The structure around the outputs.
        nodes: The fx nodes of every op, in program order.
        travelling: get_attr nodes whose values are sent to their readers; the state behind all
            others is where its readers are.
        attributes: Of the model's modules, for whose values this holds.
        routes: By value the readers whose gradients come to an earlier reader's backward, with it.
        gradients: The mode of gradients that forward read; None if it read none.
        family: The calls of other sizes that it runs, too; None if there are none.
        reads: The attributes that forward read of modules, by owner and name.
        questions: What forward asked about values of arguments, where there is no family.
        sets: The attributes that forward sets, by name.
    """

    model: nn.Module
    graph_module: fx.GraphModule
    facts: Facts
    call: Call
    returned: Structure
    nodes: tuple[tuple[fx.Node, ...], ...]
    travelling: frozenset[fx.Node]
    attributes: Attributes
    routes: Routes = field(default_factory=dict)
    gradients: bool | None = None
    family: Family | None = None
    reads: Set[tuple[int, str]] = frozenset()
    questions: Questions = field(default_factory=Questions)
    sets: tuple[str, ...] = ()

    def answers(self, call: Call) -> bool:
        """True if forward would ask the arguments of a call what it asked, with the same answers.

        The call is of the traced shape, or of the family and carries its ints.
        """
        if self.family is not None:
            return self.family.answers(call)
        return self.questions.hold(list(map(int, self.questions.sizes)), call.tensors)


def lower(
    model: nn.Module,
    module: fx.GraphModule,
    facts: Facts,
    call: Call,
    returned: Structure,
    attributes: Attributes,
    *,
    ordered: bool = False,
) -> tuple[tuple[TracedOp, ...], tuple[TracedTensor, ...], TracedModule]:
    """The operators and tensors of a flat graph, which loses its other nodes.

    Unless they are `ordered`, as in a graph that was lowered before, its nodes are (`node_order`).
    """
    parts = Partition(module, facts)
    living = {*parts.program, parts.output}
    for node in reversed(module.graph.nodes):
        if node not in living:
            module.graph.erase_node(node)
    if not ordered and order_nodes(facts, parts):
        parts = Partition(module, facts)  # operators have the order of their nodes
    lowering = Lowering(model, module, facts, parts, call)
    rows = lowering.tensors()
    ops = lowering.ops(rows)
    routes = find_routes(facts, parts)
    if str(call.autocast):  # the same operator costs something else
        ops = tuple(replace(op, key=f"{op.key} with {call.autocast}") for op in ops)
    nodes = tuple(map(tuple, parts.nodes_of_op))
    traced = TracedModule(
        model, module, facts, call, returned, nodes, parts.travelling, attributes, routes
    )
    return ops, routed(rows, facts, parts, routes), traced


@final
class Lowering:
    """The operators and tensors of one partition."""

    def __init__(
        self,
        model: nn.Module,
        module: fx.GraphModule,
        facts: Facts,
        parts: Partition,
        call: Call,
    ) -> None:
        self._module = module
        self._facts = facts
        self._parts = parts
        self._state = StateOwnership(model, module, facts, parts)
        values = (value for fact in facts.nodes.values() for value in fact.values)
        cast = call.autocast.dtypes if call.autocast.cached else ()
        self._casts = cached_casts(parts.nodes_of_op, facts, cast)
        self._graded = {value.storage for value in values if value.requires_grad}

    def _reads_between_ops(
        self,
    ) -> tuple[dict[int, dict[fx.Node, set[int]]], dict[int, set[int]]]:
        """The views of each storage that other operators read; and readers' order without one.

        The second are tokens: a write of a parameter or buffer before a later read, or a view made
        by another operator than its base.
        """
        views: dict[int, dict[fx.Node, set[int]]] = defaultdict(dict)
        tokens: dict[int, set[int]] = defaultdict(set)
        for node, op in self._parts.op_of.items():
            for argument in self._parts.reads(node):
                source = self._parts.op_of.get(argument)
                if source is None:
                    continue
                homes = {
                    v.storage: self._parts.home(v.storage) for v in self._parts.values(argument)
                }
                for storage, home in homes.items():
                    if home is not None and home != op:
                        views[storage].setdefault(argument, set()).add(op)
                if source != op and source not in homes.values():
                    tokens[source].add(op)
        for storage, last in self._parts.last_write.items():
            writer = self._parts.op_of[self._parts.program[last]]
            if self._parts.home(storage) != writer:
                later = [p for p in self._parts.touches[storage] if p > last]
                readers = {self._parts.op_of.get(self._parts.program[p]) for p in later}
                tokens[writer] |= {r for r in readers if r is not None and r != writer}
        return views, {op: readers for op, readers in tokens.items() if readers}

    def tensors(self) -> list[tuple[TracedTensor, int | None]]:
        """The tensors between operators, with storages; tokens have no bytes and no storage."""
        views, tokens = self._reads_between_ops()
        shapes: dict[int, set[tuple[int, ...]]] = defaultdict(set)  # of what the caller gets
        for node in self._parts.output.all_input_nodes:
            for value in self._parts.values(node):
                shapes[value.storage].add(value.shape)
        kept = shapes.keys()
        inputs = self._module.graph.find_nodes(op="placeholder")
        arguments = [value for node in inputs for value in self._parts.values(node)]
        given = {value.storage for value in arguments} & self._facts.written
        wanted = {value.storage for value in arguments if value.requires_grad}
        rows: list[tuple[TracedTensor, int | None]] = []
        for storage in sorted(set(views) | kept):
            home = self._parts.home(storage)
            if home is None:
                continue
            source = self._parts.is_source(storage)
            readers = sorted(set().union(*views[storage].values()))
            # Of a returned view to the view, and not to its base.
            differentiable = storage in wanted or any(
                value.requires_grad and value.storage == storage for value in self._results(home)
            )
            tensor = TracedTensor(
                home,
                tuple(readers),
                crossing_bytes(self._facts, self._parts, storage),
                # A buffer that travels stays where it lives: kept, so that its bytes count once.
                # So is an argument that forward writes: the caller reads it.
                kept=storage in kept
                or (source and self._parts.travels_as_tensor(storage))
                or (storage in given and not differentiable),
                differentiable=differentiable,
                gradient_bytes=self._gradient_bytes(
                    home, readers, {storage}, differentiable, expands=storage not in kept
                ),
                scalar=shapes.get(storage) == {()},
                parts=self._read_parts(storage, home, views[storage]),
            )
            rows.append((tensor, storage))
        returned = self._returned_elsewhere()
        for op in sorted(tokens.keys() | returned):
            readers = sorted(tokens.get(op, ()))
            flows = op in returned or self._passes_gradient(op, set(readers))
            made = self._gradient_bytes(op, readers, None, flows)
            rows.append((TracedTensor(op, tuple(readers), 0, op in returned, flows, made), None))
        rows.sort(key=lambda row: (row[0].producer, row[1] is None, row[1] or 0))
        return rows

    def _read_parts(
        self, storage: int, home: int, views: Mapping[fx.Node, Set[int]]
    ) -> tuple[tuple[int, ...], ...]:
        """The views of a storage as bytes and readers; nothing if all read the whole.

        A view that another operator made counts as the whole.
        """
        whole = self._facts.storages[storage].nbytes
        rows = []
        for node, readers in views.items():
            values = [value for value in self._parts.values(node) if value.storage == storage]
            nbytes = sum(value.nbytes for value in values)
            made_here = self._parts.op_of.get(node) == home
            rows.append((min(nbytes, whole) if made_here else whole, *sorted(readers)))
        return tuple(rows) if any(nbytes < whole for nbytes, *_ in rows) else ()

    def _gradient_bytes(
        self,
        op: int,
        readers: Sequence[int],
        storages: set[int] | None,
        differentiable: bool,
        *,
        expands: bool = False,
    ) -> tuple[int, ...]:
        """The bytes each reader sends back to an operator: one gradient per value that it reads.

        The values are those in some storages, or all of the operator's. A sum sends a view that
        repeats its own gradient, which `expands` takes as it is: for one reader of a tensor, since
        two such views that are added up are as large as the tensor.
        """
        if not differentiable:
            return ()
        sent = dict.fromkeys(readers, 0)
        for node in self._parts.nodes_of_op[op]:
            values = [
                value
                for value in self._parts.values(node)
                if value.storage in self._graded and (storages is None or value.storage in storages)
            ]
            nbytes = sum(value.nbytes for value in values)
            users = [(self._parts.op_of.get(user), user) for user in self._parts.users(node)]
            for reader in sorted(sent.keys() & dict(users).keys() - {op}):
                mine = [user for own, user in users if own == reader]
                repeated = self._repeated(node, mine[0]) if expands and len(mine) == 1 else 0
                if repeated:
                    sent[reader] += repeated
                    expands = False
                else:
                    whole = nbytes * (2 if self._has_complex_gradient(node, mine) else 1)
                    sent[reader] += max(whole, self._folded_bytes(mine))
        return tuple(sent.values())

    def _repeated(self, node: fx.Node, user: fx.Node) -> int:
        """The bytes of the gradient that a sum repeats, if the node's backward reads it as it is.

        Kernels of matrix products, norms and their like make it dense: 0 for these, and for no sum.
        """
        mine, result = self._parts.values(node), self._parts.values(user)
        if operator_name(user) != "sum" or len(mine) != 1 or mine[0].dtype != result[0].dtype:
            return 0
        made = self._facts.storages[mine[0].storage].node is node
        written = mine[0].storage in self._parts.last_write
        handed_on = is_one_node(node) and made and not written
        return sum(value.nbytes for value in result) if handed_on else 0

    def _folded_bytes(self, users: Sequence[fx.Node]) -> int:
        """The bytes of the gradient of what is unfolded: `col2im` has the memory of the patches."""
        rows = (self._parts.values(user) for user in users if operator_name(user) == "im2col")
        return max((value.nbytes for row in rows for value in row), default=0)

    def _has_complex_gradient(self, node: fx.Node, users: Sequence[fx.Node]) -> bool:
        """True if its gradient is the real part of a complex tensor, whose memory it holds.

        So it is of a real tensor of which some operator, such as `rfft`, makes a complex one.
        """
        mine = self._parts.values(node)
        results = [value for user in users for value in self._parts.values(user)]
        seen = all(operator_name(user) == "view_as_complex" for user in users)
        real = not any(value.dtype.is_complex for value in mine)
        return real and not seen and any(value.dtype.is_complex for value in results)

    def _returned_elsewhere(self) -> set[int]:
        """Operators that return a view with a gradient of what another one made."""
        found = set()
        for node in self._parts.output.all_input_nodes:
            op = self._parts.op_of.get(node)
            homes = {self._parts.home(v.storage) for v in self._parts.values(node)}
            if op is not None and op not in homes and node.op != "get_attr":
                found |= {op} if self._needs_gradient(node) else set()
        return found

    def _passes_gradient(self, op: int, readers: set[int]) -> bool:
        """True if a reader of the operator's results sends a gradient back to it."""
        return any(
            self._parts.op_of.get(user) in readers
            for node in self._parts.nodes_of_op[op]
            if node.op != "get_attr" and self._needs_gradient(node)
            for user in self._parts.users(node)
        )

    def _needs_gradient(self, node: fx.Node) -> bool:
        """True if a gradient flows back through its results, even if a write introduced it."""
        return any(value.storage in self._graded for value in self._parts.values(node))

    def _results(self, op: int) -> Iterator[Value]:
        """The values that an operator computes."""
        for node in self._parts.nodes_of_op[op]:
            if node.op not in ("placeholder", "get_attr"):
                yield from self._parts.values(node)

    def _is_read(self, op: int) -> bool:
        """True if another operator or the caller reads a result of one."""
        users = (user for node in self._parts.nodes_of_op[op] for user in node.users)
        return any(self._parts.op_of.get(user) != op for user in users)

    def _has_backward(self, op: int) -> bool:
        return self._is_read(op) and any(value.requires_grad for value in self._results(op))

    def ops(self, tensors: Sequence[tuple[TracedTensor, int | None]]) -> tuple[TracedOp, ...]:
        """The operators, with these tensors between them."""
        tensor_of = {storage: i for i, (_, storage) in enumerate(tensors) if storage is not None}
        owned, groups = self.ownership(tensors)
        inside = self.saved_inside(tensor_of)
        names: set[str] = set()
        ops = []
        for op, nodes in enumerate(self._parts.nodes_of_op):
            facts = [self._facts.nodes[node] for node in nodes]
            saved = dict.fromkeys(s for fact in facts for s in fact.saved)
            saved.update(dict.fromkeys(self._given(nodes)))
            own = owned[op]
            anchor = self._anchor(nodes)
            name = _unique(op_name(anchor), names)
            ops.append(
                TracedOp(
                    name=name,
                    nodes=tuple(node.name for node in nodes),
                    key=operator_key(self._module, self._facts, nodes),
                    parameters=tuple(own.names),
                    trained_bytes=own.trained,
                    frozen_bytes=own.frozen,
                    cast_bytes=self._casts[op].own_bytes,
                    rewritten_bytes=self._rewritten_bytes(nodes),
                    shared_bytes=sum(own.shared.values()),
                    saves=tuple(sorted(tensor_of[s] for s in saved if s in tensor_of)),
                    saved_bytes=inside[op],
                    differentiable=self._has_backward(op),
                    random=any(fact.random for fact in facts),
                    group=groups.get(op),
                    source=source_line(anchor),
                    trained=tuple(own.parameters),
                    lent=tuple(own.lent),
                )
            )
        return tuple(ops)

    def _rewritten_bytes(self, nodes: Sequence[fx.Node]) -> int:
        """Bytes that it reads of the state that forward writes, and of leaves all buffers."""
        given = [argument for node in nodes for argument in node.all_input_nodes]
        read = {value.storage for node in given for value in self._parts.values(node)}
        rows = (self._facts.storages[storage] for storage in read & self._facts.written)
        leaves = (self._module.get_submodule(str(n.target)) for n in nodes if n.op == "call_module")
        buffers = (buffer for leaf in leaves for buffer in leaf.buffers())
        return sum(r.nbytes for r in rows if r.attribute) + sum(b.nbytes for b in buffers)

    def _given(self, nodes: Sequence[fx.Node]) -> Iterator[int]:
        """What the caller gives with a gradient: it is kept, to see whether he writes it since."""
        for argument in (argument for node in nodes for argument in node.all_input_nodes):
            if argument.op == "placeholder":
                yield from (v.storage for v in self._parts.values(argument) if v.requires_grad)

    def saved_inside(self, tensor_of: Mapping[int, int]) -> list[int]:
        """Bytes that autograd saves of each operator besides tensors between operators.

        Less casts of weights that autocast keeps anyway.
        """
        found = []
        for op, nodes in enumerate(self._parts.nodes_of_op):
            saved = dict.fromkeys(s for node in nodes for s in self._facts.nodes[node].saved)
            inside = (s for s in saved if s not in tensor_of and not self._parts.is_source(s))
            inside = (s for s in inside if self._parts.home(s) in (op, None) and self._is_read(op))
            nbytes = sum(self._facts.storages[s].nbytes for s in inside)
            found.append(nbytes - self._casts[op].saved_bytes)
        return found

    def ownership(
        self, tensors: Sequence[tuple[TracedTensor, int | None]]
    ) -> tuple[list[Owned], dict[int, str]]:
        """The state each op owns, with casts of it that are kept, and the groups of ops.

        A group shares a parameter or a counter.
        """
        read = [row for row, _ in tensors if row.consumers or row.kept]
        linked = {op for row in read for op in (row.producer, *row.consumers)}
        backward = set(filter(self._has_backward, range(len(self._parts.nodes_of_op))))
        owned, groups = self._state.of(backward, linked)
        for own, casts in zip(owned, self._casts, strict=True):
            own.frozen += casts.nbytes
        return owned, groups

    def _anchor(self, nodes: Sequence[fx.Node]) -> fx.Node:
        """The node that names the operator: the first that makes a storage, else the first."""
        storages = self._facts.storages
        for node in nodes:
            makes = any(storages[v.storage].node is node for v in self._parts.values(node))
            if makes and node.op != "get_attr":
                return node
        return nodes[0]


def _unique(name: str, taken: set[str]) -> str:
    """The name, with a number if it is taken already; it is taken then."""
    candidate, count = name, 1
    while candidate in taken:
        count += 1
        candidate = f"{name}#{count}"
    taken.add(candidate)
    return candidate
