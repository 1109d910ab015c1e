"""The partition of fx nodes into operators.

An operator is a set of nodes that no placement may part:

1. **Mutation.** Everything that touches a storage up to its last in-place write, so that no copy
   is taken between two writes and autograd sees the write beside what it overwrites.
2. **Views** stay with the node that made their storage; a getitem with its tuple. Where a parameter
   is detached (as under `no_grad`) or repeated for one reader, that stays with the reader.
3. **Order.** An operator that sends several gradients to a value (`gradient_order`) stays with its
   maker where a view of the value is read later: what comes through the view cannot wait for it.
4. **Convexity.** What lies on a path between two parts of an operator belongs to it: the strongly
   connected components of the quotient graph. Operators that draw random numbers are in the order
   of their draws.

A get_attr node is an operator only where its value travels or is viewed; else it merely names the
state that its readers own.

Complexity: O(nodes + edges), with a sort.
"""

from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from operator import attrgetter
from typing import Any, final

import networkx
import torch
from torch import fx, nn

from baechi.torch_support.storages import memory_of
from baechi.tracing.node_facts import NOTHING, Facts, Value


@final
class UnionFind:
    """Disjoint sets; the smallest member is the representative."""

    def __init__(self, n: int) -> None:
        self._parent = list(range(n))

    def find(self, item: int) -> int:
        """The representative of the item's set."""
        while self._parent[item] != item:
            self._parent[item] = self._parent[self._parent[item]]
            item = self._parent[item]
        return item

    def union(self, items: Iterable[int]) -> None:
        """Make one set of the sets of all items."""
        roots = {self.find(item) for item in items}
        for root in roots:
            self._parent[root] = min(roots)


def living(graph: fx.Graph, facts: Facts) -> list[fx.Node]:
    """The nodes that are read by others or the output, or that write, draw or look at a value.

    So may submodules that stay whole, of which that is not known.
    """
    alive: set[fx.Node] = set(graph.output_node().all_input_nodes)
    for node in reversed(graph.nodes):
        stays = node in alive or node.op in ("placeholder", "call_module")
        if stays or facts.nodes.get(node, NOTHING).acts:
            alive.update((node, *node.all_input_nodes))
    return [node for node in graph.nodes if node in alive]


@final
class Partition:
    """The operators of a flat graph.

    Attributes:
        program: The nodes that matter, in program order, without the output.
        output: The output node.
        storage_of: The storage of every parameter, buffer and constant that a get_attr node names,
            by the memory it has in truth (`key_of`).
        position: Place of every node in the program.
        touches: For every storage the positions that read or write it, ascending.
        last_write: For every storage that is written the position of the last write.
        op_of: Operator of every node that runs.
        nodes_of_op: The nodes of every operator, in program order; operators in topological order.
    """

    def __init__(self, module: fx.GraphModule, facts: Facts) -> None:
        self._module = module
        self._facts = facts
        self.program = living(module.graph, facts)
        self.output = module.graph.output_node()
        self.storage_of = {
            memory_of(attribute(module, str(node.target))): facts.nodes[node].values[0].storage
            for node in self.program
            if node.op == "get_attr" and facts.nodes[node].values
        }
        self.position = {node: i for i, node in enumerate(self.program)}
        self._union = UnionFind(len(self.program))
        self._makers: dict[fx.Node, int] = {}  # of observers, the position of the last
        self._find_readers()
        self._join_writes()
        self._join_views()
        self._join_orders()
        self._join_cycles()
        self._number_ops()

    def _find_readers(self) -> None:
        """The positions of the nodes that touch each storage, in program order."""
        self.touches: dict[int, list[int]] = defaultdict(list)
        self.last_write: dict[int, int] = {}
        for position, node in enumerate(self.program):
            facts = self._facts.nodes[node]
            touched = set(facts.writes) | {v.storage for v in facts.values}
            for argument in node.all_input_nodes:
                touched |= {v.storage for v in self.values(argument)}
            if node.op == "call_module":
                leaf = self._module.get_submodule(str(node.target))
                own = {memory_of(tensor) for tensor in (*leaf.parameters(), *leaf.buffers())}
                touched |= {self.storage_of[key] for key in own & self.storage_of.keys()}
            for storage in sorted(touched):
                self.touches[storage].append(position)
            for storage in facts.writes:
                self.last_write[storage] = position

    def values(self, node: fx.Node) -> tuple[Value, ...]:
        """The tensors that a node yields."""
        return self._facts.nodes[node].values

    def is_source(self, storage: int) -> bool:
        """True if it belongs to a parameter, a buffer or a constant."""
        return self._facts.storages[storage].node is None

    def _join_writes(self) -> None:
        """Rule 1. A get_attr node only names a parameter or buffer, so it joins nothing."""
        for storage, last in sorted(self.last_write.items()):
            touching = [p for p in self.touches[storage] if p <= last]
            self._union.union(p for p in touching if self.program[p].op != "get_attr")

    def _join_views(self) -> None:
        """Rule 2. Views of a parameter join its get_attr node, which then is an operator."""
        for position, node in enumerate(self.program):
            if node.op in ("get_attr", "placeholder"):
                continue
            values = self.values(node)
            if self._facts.nodes[node].looks and not values:
                last = self._last_maker(node)
                self._union.union([position, last if last >= 0 else position])
                continue
            # A view is of its base, and a check of its tensor, whichever operator knows the sizes
            # that it is given.
            sized = bool(values) or self._facts.nodes[node].checks
            read = [n for n in node.all_input_nodes if not (sized and self._is_size(n))]
            inputs = [self.position[argument] for argument in read]
            roots = {self._union.find(p) for p in inputs}
            made = {v.storage for v in values if self._facts.storages[v.storage].node is node}
            is_view = bool(inputs) and not made and not self._facts.nodes[node].writes
            passes_on = not values and not self._facts.nodes[node].random
            if self._is_its_readers(node):
                self._union.union([position, *(self.position[user] for user in node.users)])
            elif (is_view or passes_on) and len(roots) == 1 and node.op != "call_module":
                self._union.union([position, *roots])

    def _is_its_readers(self, node: fx.Node) -> bool:
        """True if a node detaches or repeats a parameter, or repeats a view of one, for one reader.

        What comes back to a repeated one is small, but may be a part of something large.
        """
        users = self.users(node)
        source = node.all_input_nodes[0] if node.all_input_nodes else node
        if not (len(users) == len(node.users) == 1) or users[0].op == "output":
            return False
        if node.target is torch.ops.aten.detach.default:
            return source.op == "get_attr"
        repeats = node.target is torch.ops.aten.expand.default
        return repeats and self._facts.is_state(source) and self.values(source)[0].requires_grad

    def _is_size(self, node: fx.Node) -> bool:
        """True if a node yields integers and no tensor."""
        structure = self._facts.nodes[node].structure
        if self.values(node) or structure is None:
            return False
        return all(type(constant) is int for constant in structure.constants)

    def _last_maker(self, observer: fx.Node) -> int:
        """The last of the nodes that make what an observer, or the one before it, sees."""
        makers = [-1]
        for argument in observer.all_input_nodes:
            storages = (self._facts.storages[v.storage] for v in self.values(argument))
            makers += [self.position[s.node] for s in storages if s.node in self.position]
            makers.append(self._makers.get(argument, -1))
        self._makers[observer] = max(makers)
        return self._makers[observer]

    def _join_orders(self) -> None:
        """Rule 3."""
        for position, node in enumerate(self.program):
            for argument in self._facts.nodes[node].several:
                value = node.all_input_nodes[argument]
                storages = {v.storage for v in self.values(value)}
                later = (user for user in self.users(value) if self.position[user] > position)
                viewed = (v.storage in storages for user in later for v in self.values(user))
                if value.op not in ("get_attr", "placeholder") and any(viewed):
                    self._union.union((position, self.position[value]))

    def _join_cycles(self) -> None:
        """Rule 4, and the order of operators: by first node, producers first."""
        while True:
            self._op_roots = self._roots_that_run()
            graph = self._quotient()
            components = [c for c in networkx.strongly_connected_components(graph) if len(c) > 1]
            if not components:
                break
            for component in components:
                self._union.union(component)
        self._roots = list(networkx.lexicographical_topological_sort(graph))

    def _roots_that_run(self) -> set[int]:
        """All but get_attr nodes that merely name the state of the operators that read it.

        A parameter or a buffer is an operator of no time when views of it are taken, when it is
        returned, or when it is a buffer or constant that several operators only read.
        """
        members: dict[int, list[int]] = defaultdict(list)
        for position in range(len(self.program)):
            members[self._union.find(position)].append(position)
        returned = set(self.output.all_input_nodes)
        roots = set()
        for root, positions in members.items():
            nodes = [self.program[p] for p in positions]
            if any(node.op != "get_attr" for node in nodes):
                roots.add(root)
                continue
            node = nodes[0]
            readers = {self._union.find(self.position[u]) for u in self.users(node)}
            if node in returned or (len(readers) > 1 and self.travels(node)):
                roots.add(root)
        return roots

    def users(self, node: fx.Node) -> list[fx.Node]:
        """The nodes of the program that read the node's value."""
        return [user for user in node.users if user in self.position]

    def travels(self, node: fx.Node) -> bool:
        """True if a get_attr's value may be sent: not trained, never written, no submodule."""
        values = self.values(node)
        if not values or any(v.storage in self.last_write for v in values):
            return False
        value = attribute(self._module, str(node.target))
        return not (isinstance(value, nn.Parameter) or value.requires_grad)

    def _quotient(self) -> "networkx.DiGraph[int]":
        """Operators, and the order that they must keep."""
        graph: networkx.DiGraph[int] = networkx.DiGraph()
        graph.add_nodes_from(sorted(self._op_roots))
        for position, node in enumerate(self.program):
            target = self._union.find(position)
            if target not in self._op_roots:
                continue
            for argument in self.reads(node):
                source = self._union.find(self.position[argument])
                if source in self._op_roots and source != target:
                    graph.add_edge(source, target)
        for storage, last in self.last_write.items():
            writer = self._union.find(last)
            for position in self.touches[storage]:
                reader = self._union.find(position)
                if position > last and reader in self._op_roots and reader != writer:
                    graph.add_edge(writer, reader)
        drawing = (p for p, node in enumerate(self.program) if self._facts.nodes[node].random)
        for one, two in pairwise(self._union.find(position) for position in drawing):
            if one != two:
                graph.add_edge(one, two)
        return graph

    def reads(self, node: fx.Node) -> list[fx.Node]:
        """The nodes of the program whose values the node reads."""
        return [argument for argument in node.all_input_nodes if argument in self.position]

    def _number_ops(self) -> None:
        op_of_root = {root: op for op, root in enumerate(self._roots)}
        self.nodes_of_op: list[list[fx.Node]] = [[] for _ in self._roots]
        self.op_of: dict[fx.Node, int] = {}
        for position, node in enumerate(self.program):
            op = op_of_root.get(self._union.find(position))
            if op is not None:
                self.nodes_of_op[op].append(node)
                self.op_of[node] = op

    def home(self, storage: int) -> int | None:
        """The operator that a storage comes from; None for state that readers own."""
        origin = self._facts.storages[storage]
        if origin.node is not None:
            return self.op_of.get(origin.node)
        for position in self.touches[storage]:
            node = self.program[position]
            if node.op == "get_attr" and node in self.op_of:
                travels = self.travels(node) or node in self.output.all_input_nodes
                return self.op_of[node] if travels else None
        return None

    @property
    def travelling(self) -> frozenset[fx.Node]:
        """The get_attr nodes that run and whose values are sent to their readers."""
        return frozenset(n for n in self.op_of if n.op == "get_attr" and self.travels(n))

    def travels_as_tensor(self, storage: int) -> bool:
        """True if it is the get_attr of a buffer or constant that is sent to its readers."""
        return any(
            self.travels(self.program[p])
            for p in self.touches[storage]
            if self.program[p].op == "get_attr"
        )


def attribute(module: nn.Module, target: str) -> Any:
    """The value behind a get_attr node's dotted target."""
    return attrgetter(target)(module)
