"""From fx nodes to operators: which nodes are one operator, and what travels between operators.

An operator is a set of nodes that no placement may part:

1. **Mutation.** Everything that touches a storage up to its last in-place write, so that no copy
   is taken between two writes and autograd sees the write beside what it overwrites.
2. **Views** stay with the node that made their storage; a getitem with its tuple.
3. **Convexity.** What lies on a path between two parts of an operator belongs to it: the strongly
   connected components of the quotient graph.

Users of one parameter (or of a buffer that is written) share a group instead: they run on one
device but may be launched apart. Buffers and constants that are only read travel as tensors.
A tensor of the result is a storage, whichever views of it are read.

Complexity: O(nodes + edges), with a sort.
"""

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import networkx
import torch
from torch import fx, nn

from baechi.calls import Call, Structure
from baechi.propagation import Facts, Value
from baechi.traced import TracedOp, TracedTensor


@final
@dataclass(frozen=True)
class TracedModule:
    """The torch side of a `Traced`: what runs.

    Attributes:
        model: The user's model.
        graph_module: The flat graph over it.
        facts: What each node does.
        call: The example call, with its tensors.
        returned: The structure around the outputs.
        nodes: The fx nodes of every op, in program order.
        state: get_attr node to the user's own qualified name, for parameters and buffers.
    """

    model: nn.Module
    graph_module: fx.GraphModule
    facts: Facts
    call: Call
    returned: Structure
    nodes: tuple[tuple[fx.Node, ...], ...]
    state: Mapping[fx.Node, str]


def lower(
    model: nn.Module, module: fx.GraphModule, facts: Facts, call: Call, returned: Structure
) -> tuple[tuple[TracedOp, ...], tuple[TracedTensor, ...], tuple[Any, ...]]:
    """The operators and tensors of a flat graph, and the fields of its `TracedModule`."""
    lowering = _Lowering(model, module, facts, call)
    ops, tensors = lowering.run()
    nodes = tuple(map(tuple, lowering.nodes_of_op))
    return ops, tensors, (model, module, facts, call, returned, nodes, lowering.state)


@final
class _UnionFind:
    """Disjoint sets; the smallest member is the representative."""

    def __init__(self, n: int) -> None:
        self._parent = list(range(n))

    def find(self, item: int) -> int:
        while self._parent[item] != item:
            self._parent[item] = self._parent[self._parent[item]]
            item = self._parent[item]
        return item

    def union(self, items: Iterable[int]) -> None:
        roots = {self.find(item) for item in items}
        for root in roots:
            self._parent[root] = min(roots)


@final
class _Lowering:
    """One pass over one graph; the steps are the numbered rules of the module's docstring."""

    def __init__(self, model: nn.Module, module: fx.GraphModule, facts: Facts, call: Call) -> None:
        self._module = module
        self._facts = facts
        self._call = call
        self._program = [n for n in module.graph.nodes if n.op != "output"]
        self._output = next(n for n in module.graph.nodes if n.op == "output")
        self._drop_dead()
        self._position = {node: i for i, node in enumerate(self._program)}
        self._union = _UnionFind(len(self._program))
        self._owner = {
            id(t): name for name, t in [*model.named_buffers(), *model.named_parameters()]
        }
        self.state: dict[fx.Node, str] = {}
        for node in self._program:
            if node.op == "get_attr" and facts.nodes[node].values:
                name = self._owner.get(id(_attribute(module, str(node.target))))
                if name is not None:
                    self.state[node] = name
        self.nodes_of_op: list[list[fx.Node]] = []

    def run(self) -> tuple[tuple[TracedOp, ...], tuple[TracedTensor, ...]]:
        self._find_readers()
        self._join_writes()
        self._join_views()
        self._join_cycles()
        self._number_ops()
        tensors = self._tensors()
        return self._ops(tensors), tuple(t for t, _ in tensors)

    def _drop_dead(self) -> None:
        """Forget nodes that nobody uses and that neither write nor draw: assertions, mostly."""
        alive: set[fx.Node] = set(self._output.all_input_nodes)
        for node in reversed(self._program):
            facts = self._facts.nodes[node]
            if node in alive or facts.writes or facts.random or node.op == "placeholder":
                alive.add(node)
                alive.update(node.all_input_nodes)
        self._program = [node for node in self._program if node in alive]

    def _find_readers(self) -> None:
        """For every storage the positions of the nodes that touch it, in program order."""
        self._touches: dict[int, list[int]] = defaultdict(list)
        self._last_write: dict[int, int] = {}
        for position, node in enumerate(self._program):
            facts = self._facts.nodes[node]
            touched = set(facts.writes) | {v.storage for v in facts.values}
            for argument in self._arguments(node):
                touched |= {v.storage for v in self._facts.nodes[argument].values}
            if node.op == "call_module":
                touched |= set(self._leaf_storages(node))
            for storage in sorted(touched):
                self._touches[storage].append(position)
            for storage in facts.writes:
                self._last_write[storage] = position

    def _arguments(self, node: fx.Node) -> list[fx.Node]:
        return node.all_input_nodes

    def _leaf_storages(self, node: fx.Node) -> list[int]:
        """The storages of an opaque leaf's parameters and buffers that other nodes name too."""
        leaf = self._module.get_submodule(str(node.target))
        own = {id(t) for t in [*leaf.parameters(), *leaf.buffers()]}
        named = []
        for other in self._program:
            if other.op == "get_attr" and id(_attribute(self._module, str(other.target))) in own:
                named += [v.storage for v in self._facts.nodes[other].values]
        return named

    def _is_source(self, storage: int) -> bool:
        return self._facts.storages[storage].node is None

    def _join_writes(self) -> None:
        """Rule 1. A get_attr node only names a parameter or buffer, so it joins nothing."""
        for storage, last in sorted(self._last_write.items()):
            touching = [p for p in self._touches[storage] if p <= last]
            self._union.union(p for p in touching if self._program[p].op != "get_attr")

    def _join_views(self) -> None:
        """Rule 2. Views of a parameter join its get_attr node, which then is an operator."""
        for position, node in enumerate(self._program):
            if node.op in ("get_attr", "placeholder"):
                continue
            inputs = [self._position[argument] for argument in node.all_input_nodes]
            roots = {self._union.find(p) for p in inputs}
            values = self._facts.nodes[node].values
            made = {v.storage for v in values if self._facts.storages[v.storage].node is node}
            is_view = bool(inputs) and not made and not self._facts.nodes[node].writes
            passes_on = not values and not self._facts.nodes[node].random
            if (is_view or passes_on) and len(roots) == 1 and node.op != "call_module":
                self._union.union([position, *roots])

    def _is_op(self, position: int) -> bool:
        """Whether a node runs: a get_attr does only where several operators read its value."""
        return self._union.find(position) in self._op_roots

    def _join_cycles(self) -> None:
        """Rule 3, and the order of operators: by first node, producers first."""
        while True:
            self._op_roots = self._roots_that_run()
            graph = self._quotient()
            components = [c for c in networkx.strongly_connected_components(graph) if len(c) > 1]
            if not components:
                break
            for component in components:
                self._union.union(component)
        indegree = dict(graph.in_degree())
        ready = [root for root, degree in indegree.items() if degree == 0]
        heapq.heapify(ready)
        self._roots: list[int] = []
        while ready:
            root = heapq.heappop(ready)
            self._roots.append(root)
            for after in graph.successors(root):
                indegree[after] -= 1
                if indegree[after] == 0:
                    heapq.heappush(ready, after)

    def _roots_that_run(self) -> set[int]:
        """All but get_attr nodes that merely name the state of the operators that read it.

        A parameter or a buffer is an operator of no time when views of it are taken, when it is
        returned, or when it is a buffer or constant that several operators only read.
        """
        members: dict[int, list[int]] = defaultdict(list)
        for position in range(len(self._program)):
            members[self._union.find(position)].append(position)
        returned = set(self._output.all_input_nodes)
        roots = set()
        for root, positions in members.items():
            nodes = [self._program[p] for p in positions]
            if any(node.op != "get_attr" for node in nodes):
                roots.add(root)
                continue
            node = nodes[0]
            readers = {self._union.find(self._position[u]) for u in self._users(node)}
            if node in returned or (len(readers) > 1 and self._travels(node)):
                roots.add(root)
        return roots

    def _users(self, node: fx.Node) -> list[fx.Node]:
        return [user for user in node.users if user in self._position]

    def _travels(self, node: fx.Node) -> bool:
        """Whether a get_attr's value may be sent: no parameter, never written, no submodule."""
        values = self._facts.nodes[node].values
        if not values or any(v.storage in self._last_write for v in values):
            return False
        return not isinstance(_attribute(self._module, str(node.target)), nn.Parameter)

    def _quotient(self) -> "networkx.DiGraph[int]":
        """Operators, and who must come before whom."""
        graph: networkx.DiGraph[int] = networkx.DiGraph()
        graph.add_nodes_from(sorted(self._op_roots))
        for position, node in enumerate(self._program):
            target = self._union.find(position)
            if target not in self._op_roots:
                continue
            for argument in self._reads(node):
                source = self._union.find(self._position[argument])
                if source in self._op_roots and source != target:
                    graph.add_edge(source, target)
        for storage, last in self._last_write.items():
            writer = self._union.find(last)
            for position in self._touches[storage]:
                reader = self._union.find(position)
                if position > last and reader in self._op_roots and reader != writer:
                    graph.add_edge(writer, reader)
        return graph

    def _reads(self, node: fx.Node) -> list[fx.Node]:
        return [argument for argument in node.all_input_nodes if argument in self._position]

    def _number_ops(self) -> None:
        self._op_of_root = {root: op for op, root in enumerate(self._roots)}
        self.nodes_of_op = [[] for _ in self._roots]
        self._op_of: dict[fx.Node, int] = {}
        for position, node in enumerate(self._program):
            op = self._op_of_root.get(self._union.find(position))
            if op is not None:
                self.nodes_of_op[op].append(node)
                self._op_of[node] = op

    def _reads_between_ops(self) -> tuple[dict[int, set[int]], dict[int, set[int]]]:
        """Which operators read each storage of another; and which come after which without one.

        The second are tokens: a write of a parameter or buffer before a later read, or a view made
        by another operator than its base.
        """
        consumers: dict[int, set[int]] = defaultdict(set)
        tokens: dict[int, set[int]] = defaultdict(set)
        for node, op in self._op_of.items():
            for argument in self._reads(node):
                source = self._op_of.get(argument)
                if source is None:
                    continue
                homes = {
                    v.storage: self._home(v.storage) for v in self._facts.nodes[argument].values
                }
                for storage, home in homes.items():
                    if home is not None and home != op:
                        consumers[storage].add(op)
                if source != op and source not in homes.values():
                    tokens[source].add(op)
        for storage, last in self._last_write.items():
            writer = self._op_of[self._program[last]]
            if self._home(storage) != writer:
                later = [p for p in self._touches[storage] if p > last]
                readers = {self._op_of.get(self._program[p]) for p in later}
                tokens[writer] |= {r for r in readers if r is not None and r != writer}
        return consumers, {op: readers for op, readers in tokens.items() if readers}

    def _tensors(self) -> list[tuple[TracedTensor, int | None]]:
        """What travels, with its storage; tokens have no bytes and no storage."""
        consumers, tokens = self._reads_between_ops()
        kept = set()
        for node in self._output.all_input_nodes:
            kept |= {v.storage for v in self._facts.nodes[node].values}
        rows: list[tuple[TracedTensor, int | None]] = []
        for storage in sorted(set(consumers) | kept):
            home = self._home(storage)
            if home is None:
                continue
            source = self._is_source(storage)
            # A buffer that travels stays where it lives: kept, so that its bytes count once.
            tensor = TracedTensor(
                home,
                tuple(sorted(consumers[storage])),
                self._facts.storages[storage].nbytes,
                kept=storage in kept or (source and self._travelling(storage)),
                differentiable=self._differentiable(storage),
            )
            rows.append((tensor, storage))
        rows += [(TracedTensor(op, tuple(sorted(tokens[op])), 0), None) for op in sorted(tokens)]
        rows.sort(key=lambda row: (row[0].producer, row[1] is None, row[1] or 0))
        return rows

    def _home(self, storage: int) -> int | None:
        """The operator that a storage comes from; None for state that readers own."""
        origin = self._facts.storages[storage]
        if origin.node is not None:
            return self._op_of.get(origin.node)
        for position in self._touches[storage]:
            node = self._program[position]
            if node.op == "get_attr" and node in self._op_of:
                travels = self._travels(node) or node in self._output.all_input_nodes
                return self._op_of[node] if travels else None
        return None

    def _travelling(self, storage: int) -> bool:
        return any(
            self._travels(self._program[p])
            for p in self._touches[storage]
            if self._program[p].op == "get_attr"
        )

    def _differentiable(self, storage: int) -> bool:
        home = self._facts.storages[storage].node
        if home is None or home.op == "placeholder":
            return False
        op = self._op_of[home]
        return any(
            value.requires_grad
            for node in self.nodes_of_op[op]
            for value in self._facts.nodes[node].values
            if value.storage == storage
        )

    def _ops(self, tensors: Sequence[tuple[TracedTensor, int | None]]) -> tuple[TracedOp, ...]:
        tensor_of = {storage: i for i, (_, storage) in enumerate(tensors) if storage is not None}
        owned, groups = self._ownership()
        names: set[str] = set()
        ops = []
        for op, nodes in enumerate(self.nodes_of_op):
            facts = [self._facts.nodes[node] for node in nodes]
            saved = dict.fromkeys(s for fact in facts for s in fact.saved)
            inside = [s for s in saved if s not in tensor_of and not self._is_source(s)]
            inside = [s for s in inside if self._home(s) in (op, None)]
            trained, frozen, parameters = owned[op]
            anchor = self._anchor(nodes)
            name = _unique(_name(anchor), names)
            ops.append(
                TracedOp(
                    name=name,
                    nodes=tuple(node.name for node in nodes),
                    key=self._key(op),
                    parameters=tuple(parameters),
                    trained_bytes=trained,
                    frozen_bytes=frozen,
                    saves=tuple(sorted(tensor_of[s] for s in saved if s in tensor_of)),
                    saved_bytes=sum(self._facts.storages[s].nbytes for s in inside),
                    differentiable=any(
                        value.requires_grad
                        for node, fact in zip(nodes, facts, strict=True)
                        for value in fact.values
                        if node.op not in ("get_attr", "placeholder")
                    ),
                    random=any(fact.random for fact in facts),
                    group=groups.get(op),
                    source=_source_line(anchor),
                )
            )
        return tuple(ops)

    def _ownership(self) -> tuple[list[tuple[int, int, list[str]]], dict[int, str]]:
        """Per op the (trained bytes, frozen bytes, names) that it owns, and the ops' groups.

        State is counted once, by storage, at the first operator that uses it.
        """
        users: dict[int, list[int]] = defaultdict(list)
        names: dict[int, list[str]] = defaultdict(list)
        trained: dict[int, int] = defaultdict(int)
        frozen: dict[int, int] = defaultdict(int)
        labels: dict[int, str] = {}
        seen: set[int] = set()
        union = _UnionFind(len(self.nodes_of_op))
        for node in self._program:
            for label, tensor, storage in self._state_of(node):
                readers = self._readers(node, storage)
                if not readers:
                    continue
                key = storage if storage >= 0 else id(tensor) + len(self._facts.storages)
                users[key] += readers
                movable = node.op == "get_attr" and node in self._op_of and self._travels(node)
                if not movable and len(set(users[key])) > 1:
                    union.union(users[key])
                    labels[key] = labels.get(key, label)
                if key in seen:
                    continue
                seen.add(key)
                first = min(readers)
                names[first].append(label)
                nbytes = tensor.untyped_storage().nbytes()
                if tensor.requires_grad:
                    trained[first] += nbytes
                elif not movable:
                    frozen[first] += nbytes
        self._join_split_views(union)
        members: dict[int, list[int]] = defaultdict(list)
        for op in range(len(self.nodes_of_op)):
            members[union.find(op)].append(op)
        titles = {union.find(users[key][0]): label for key, label in sorted(labels.items())}
        groups = {
            op: f"shared:{titles.get(root, self.nodes_of_op[root][0].name)}"
            for root, ops in members.items()
            if len(ops) > 1
            for op in ops
        }
        rows = [(trained[op], frozen[op], names[op]) for op in range(len(self.nodes_of_op))]
        return rows, groups

    def _join_split_views(self, union: _UnionFind) -> None:
        """A view that could not join its base's operator at least shares its device."""
        for node, op in self._op_of.items():
            for value in self._facts.nodes[node].values:
                home = self._home(value.storage)
                if home is not None and home != op:
                    union.union([home, op])

    def _state_of(self, node: fx.Node) -> list[tuple[str, torch.Tensor, int]]:
        """(name, tensor, storage or -1) of every parameter, buffer and constant it stands for."""
        if node.op == "get_attr" and self._facts.nodes[node].values:
            tensor = _attribute(self._module, str(node.target))
            name = self.state.get(node, str(node.target))
            return [(name, tensor, self._facts.nodes[node].values[0].storage)]
        if node.op != "call_module":
            return []
        leaf = self._module.get_submodule(str(node.target))
        rows = []
        for tensor in [*leaf.parameters(), *leaf.buffers()]:
            storage = next(
                (
                    self._facts.nodes[other].values[0].storage
                    for other in self._program
                    if other.op == "get_attr"
                    and self._facts.nodes[other].values
                    and _attribute(self._module, str(other.target)) is tensor
                ),
                -1,
            )
            rows.append((self._owner.get(id(tensor), str(node.target)), tensor, storage))
        return rows

    def _readers(self, node: fx.Node, storage: int) -> list[int]:
        if node.op == "call_module":
            return [self._op_of[node]]
        readers = {self._op_of[u] for u in self._users(node) if u in self._op_of}
        for position in self._touches[storage]:
            touching = self._program[position]
            if touching in self._op_of and (touching.op != "get_attr" or touching is node):
                readers.add(self._op_of[touching])
        return sorted(readers)

    def _anchor(self, nodes: Sequence[fx.Node]) -> fx.Node:
        """The node that names the operator: the first that makes a storage, else the first."""
        for node in nodes:
            makes = any(
                self._facts.storages[v.storage].node is node for v in self._facts.nodes[node].values
            )
            if makes and node.op != "get_attr":
                return node
        return nodes[0]

    def _key(self, op: int) -> str:
        """Operators, arguments and shapes of an operator as text; names left out."""
        local = {node: i for i, node in enumerate(self.nodes_of_op[op])}

        def show(argument: Any) -> Any:
            if isinstance(argument, fx.Node):
                if argument in local:
                    return f"%{local[argument]}"
                values = self._facts.nodes[argument].values
                return "<" + " ".join(map(_show_value, values)) + ">"
            return repr(argument)

        rows = []
        for node in self.nodes_of_op[op]:
            if node.op in ("placeholder", "get_attr"):
                rows.append(f"{node.op}{[_show_value(v) for v in self._facts.nodes[node].values]}")
                continue
            target = str(node.target)
            if node.op == "call_module":
                target = repr(self._module.get_submodule(target))
            arguments = fx.node.map_aggregate((node.args, dict(node.kwargs)), show)
            rows.append(f"{node.op} {target}{arguments}")
        return "; ".join(rows)


def _attribute(module: nn.Module, target: str) -> Any:
    value: Any = module
    for part in target.split("."):
        value = getattr(value, part)
    return value


def _show_value(value: Value) -> str:
    grad = "'" if value.requires_grad else ""
    return f"{str(value.dtype)[6:]}{list(value.shape)}{list(value.stride)}{grad}"


def _unique(name: str, taken: set[str]) -> str:
    candidate, count = name, 1
    while candidate in taken:
        count += 1
        candidate = f"{name}#{count}"
    taken.add(candidate)
    return candidate


def _name(node: fx.Node) -> str:
    """`h.0.mlp.c_fc/addmm_2`: the owning submodule's path and the node."""
    if node.op == "placeholder":
        return f"input:{node.name}"
    if node.op == "get_attr":
        return f"state:{_own_path(str(node.target))}"
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = _own_path(str(stack[-1][0])) if stack else ""
    return f"{path}/{node.name}" if path else node.name


def _own_path(path: str) -> str:
    """A path in the user's model, without the flat module around it."""
    return path.removeprefix("L['self'].").removeprefix("model.").removeprefix("model")


def _source_line(node: fx.Node) -> str:
    """`modeling_gpt2.py:680 in forward: hidden_states = ...`, from the tracer's own record."""
    lines = str(node.meta.get("stack_trace") or "").strip().splitlines()
    places = [i for i, line in enumerate(lines) if line.strip().startswith('File "')]
    if not places:
        return ""
    place = lines[places[-1]].strip()
    file, line, function = [*place.split(", ", 2), "", ""][:3]
    name = Path(file[6:].strip('"')).name
    code = lines[places[-1] + 1].strip() if places[-1] + 1 < len(lines) else ""
    return f"{name}:{line.removeprefix('line ')} {function}: {code}"
