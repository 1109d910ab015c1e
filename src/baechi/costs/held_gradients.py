"""Memory of gradients that autograd holds while other operators go backward.

The step graph has a gradient from each reader's backward to the producer's, as large as what was
read. Autograd goes backward node by node, in the reverse of the program, and holds more:

    a part of a tensor      its gradient becomes one of the whole tensor where the part was taken:
                            in a loop over time, long before the tensor's own operator
    a sum of such           the old sum, what is added and the new one are there together
    cat, stack              their inputs' gradients are parts of one tensor, which stays until the
                            last of them is used

Both are counted for all operators whose nodes lie between. They are held where the whole tensor or
the joined one was made, so not where an operator between lies on another device.

Complexity: O(nodes + edges), with a sort, and the nodes between for each tensor that is held.
"""

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Final, NamedTuple, final

from torch import fx

from baechi.traced.traced_model import Traced
from baechi.tracing.fx_nodes import operator_name
from baechi.tracing.node_facts import Value, viewed

_ANYWHERE: Final = -1  # the "operator" of what is held on a device that is not known
_JOINS: Final = frozenset({"cat", "concat", "stack"})
# They give the gradient that they get to what they read.
_HAND_ON: Final = _JOINS | {"add", "clone", "contiguous", "alias", "sum"}


class Held(NamedTuple):
    """Bytes that an operator's backward needs beside what it makes.

    Its scratch is gone at its end. What is held for other operators, the rows `beside` of operators
    and bytes, is on their devices alone. The backward of one that joins takes `least_ns`, though it
    has no kernel: what takes no time has nothing beside what it makes, but a part that leaves its
    tape is copied beside the whole. So does that of one with several readers: their gradients are
    beside the sum of them.
    """

    workspace_bytes: int
    beside: tuple[tuple[int, int], ...]
    least_ns: int


def held_gradients(traced: Traced, scratch: Sequence[int]) -> list[Held]:
    """What the backward of every operator of a trace needs, with its own scratch, in this process.

    The scratch is in bytes for each operator.
    """
    graph = _Gradients(traced, scratch)
    graph.add_parts()
    graph.add_joins()
    running = [0] * len(traced.ops)
    beside: dict[int, Counter[int]] = {}
    ending = [Counter({_ANYWHERE: nbytes}) for nbytes in scratch]
    for held, at_end, op in zip(graph.running, graph.ending, graph.ops, strict=True):
        running[op] = max(running[op], held.total())
        beside[op] = held & beside.get(op, held)  # while each of its nodes runs
        ending[op] |= at_end
    rows = []
    for op, ends in enumerate(ending):
        most = ends.most_common(2)
        ((holder, nbytes),) = most[:1] or [(_ANYWHERE, 0)]
        elsewhere = beside.get(op, Counter[int]()).copy()
        elsewhere[holder] += nbytes - sum(second for _, second in most[1:])
        apart = tuple(sorted(_apart(traced, op, elsewhere)))
        rows.append(Held(running[op] + nbytes, apart, int(op in graph.joining)))
    return rows


def _apart(traced: Traced, op: int, held: Counter[int]) -> Iterator[tuple[int, int]]:
    """What is held for operators that may be on another device than this one."""
    group = traced.ops[op].group
    for other, nbytes in held.items():
        together = group is not None and group == traced.ops[other].group
        if nbytes and other not in (op, _ANYWHERE) and not together:
            yield other, nbytes


class _State(NamedTuple):
    """A parameter: where its parts are first and last taken, and bytes of their gradients."""

    first: int
    last: int
    node: fx.Node
    waiting: int


@final
@dataclass
class _Gradients:
    """The flat graph of a trace, as its backward goes over it.

    Attributes:
        ops: The operators of the nodes that compute, in program order.
        running: What is held beside the scratch of each, by the operator whose device it is on.
        ending: What is held at the end of each, if that is the most, by the same.
    """

    traced: Traced
    scratch: Sequence[int]

    def __post_init__(self) -> None:
        module = self.traced.module
        self._facts = module.facts.nodes
        self._place = {node: i for i, node in enumerate(module.graph_module.graph.nodes)}
        self._op_of = {node: op for op, nodes in enumerate(module.nodes) for node in nodes}
        self._users = {
            node: [self._place[user] for user in node.users if self._is_graded(user)]
            for node in self._place
        }
        # Nodes that compute, in program order, with their operators.
        rows = sorted(
            (self._place[node], op)
            for op in self.traced.differentiated
            for node in module.nodes[op]
            if viewed(node, self._facts) is None
        )
        self._positions = [place for place, _ in rows]
        self.ops = [op for _, op in rows]
        self._nodes = [*self._place]
        self._rank = {op: rank for rank, op in enumerate(self.ops)}  # of its last that computes
        self.running = [Counter[int]() for _ in rows]
        self.ending = [Counter[int]() for _ in rows]
        # Bytes of the gradients that come to each operator, and of those that go from it, by the
        # operator to which they go.
        self._came = [0] * len(self.traced.ops)
        self._sent = [Counter[int]() for _ in self.traced.ops]
        for tensor in self.traced.tensors:
            if tensor.differentiable:
                for op, nbytes in zip(tensor.consumers, tensor.sent_back, strict=True):
                    self._sent[op][tensor.producer] += nbytes
                    self._came[tensor.producer] += nbytes
        self.joining = {
            op
            for op in self.traced.differentiated
            if op in self.traced.gathered_bytes
            or any(operator_name(node) in _JOINS for node in module.nodes[op])
        }

    def add_parts(self) -> None:
        """Add gradients of whole tensors that come from parts of them."""
        taken: dict[fx.Node, list[int]] = {}
        for node, place in self._place.items():
            base = viewed(node, self._facts)
            if base is None or not self._is_graded(node) or len(self._values(base)) != 1:
                continue
            if self._nbytes(node) < self._nbytes(base) or len(self._values(node)) > 1:
                taken.setdefault(base, []).append(place)
        states: list[_State] = []
        for base, places in taken.items():
            nbytes, holder = self._nbytes(base), self._op_of.get(base, _ANYWHERE)
            between = self._between(self._place[base] + 1, places[-1])
            if not between:
                continue  # the operator's own backward was measured with them
            waiting = self._waiting(base) if base.op == "get_attr" else []
            several = base.op != "get_attr" and len(places) > 1
            if base.op == "get_attr":
                nbytes_waiting = sum(size for _, size in waiting)
                states.append(_State(places[0], places[-1], base, nbytes_waiting))
            known = 0
            for rank in reversed(between):
                while waiting and waiting[-1][0] > self._positions[rank]:
                    known += waiting.pop()[1]
                self.running[rank][holder] += max(nbytes - known, 0)
                if several:  # from other tapes they are added up before the tape's first operator
                    self._end(rank, holder, 2 * nbytes - self._made(rank))
            own = self._rank.get(self._op_of.get(base, -1))
            if several and own is not None:  # which may be the whole tensor's own
                parts = sorted(self._read_bytes(self._nodes[place]) for place in places)
                beside = 3 * nbytes - sum(parts[:2]) - self._made(own)
                self._end(own, holder, beside)
            for place in places:
                rank = bisect_right(self._positions, place)
                if rank < len(self.ops):  # its backward ends where the part's becomes the whole's
                    total = nbytes if place == places[-1] else 2 * nbytes
                    self._end(rank, holder, total)
        self._add_mingled(sorted(states, key=attrgetter("first", "last")))

    def _add_mingled(self, states: Sequence[_State]) -> None:
        """Add what others hold while one parameter becomes the whole, if parts are taken in turn.

        The graph has one after the other: first that which comes later in the program.
        """
        for i, one in enumerate(states):
            end = bisect_right(states, one.last, key=attrgetter("first"))
            for other in states[i + 1 : end]:
                early, late = sorted((one, other), key=lambda row: self._place[row.node])
                waiting = (early, late, late.waiting), (late, early, self._nbytes(early.node))
                for own, held, nbytes in waiting:
                    rank = self._rank.get(self._op_of.get(own.node, -1))
                    if rank is not None:
                        self.running[rank][self._op_of.get(held.node, _ANYWHERE)] += nbytes

    def _waiting(self, state: fx.Node) -> list[tuple[int, int]]:
        """Where parts of a parameter are taken, and the bytes of their readers' gradients.

        In the graph these wait for the parameter's own operator. That goes backward last, while
        autograd puts them together where the parts were taken: by the first of several that one
        reads. None if the operator makes other tensors, too.
        """
        op = self._op_of.get(state, -1)
        nodes = self.traced.module.nodes[op] if op >= 0 else ()
        if op < 0 or any(n is not state and viewed(n, self._facts) is None for n in nodes):
            return []
        first: dict[int, int] = {}  # of each reader
        for node in nodes:
            for reader in {self._op_of.get(user, op) for user in node.users} - {op}:
                first[reader] = min(first.get(reader, self._place[node]), self._place[node])
        rows: list[tuple[int, int]] = []
        for tensor in self.traced.made[op]:
            if tensor.differentiable:
                places = (first.get(c, self._place[state]) for c in tensor.consumers)
                rows += zip(places, tensor.sent_back, strict=True)
        return sorted(rows)

    def add_joins(self) -> None:
        """Add gradients of joined tensors, of which the graph has the parts.

        There they are beside what comes to the tensor's operator, which is as large, or is less if
        only a part of the tensor is read. So it is held without being counted only where more has
        come since: gradients of parameters, those that wait for operators further down, what goes
        in and out of an operator, and its scratch. There all of it is counted, but for a part.
        """
        inner: set[fx.Node] = set()
        begun: dict[int, int] = defaultdict(int)  # of joins whose parts are views' gradients
        for node, place in reversed(self._place.items()):
            if operator_name(node) not in _JOINS or node in inner or not self._is_graded(node):
                continue
            parts = [source for source in node.all_input_nodes if self._is_graded(source)]
            if not parts:  # they have a gradient only since something was written into them
                continue
            joined = set[fx.Node]()
            last = min(self._last_use(source, place, joined) for source in parts)
            inner |= joined
            # Of a part that is joined itself a copy may hold this one's parts elsewhere.
            holder = _ANYWHERE if joined else self._op_of[node]
            # Of those that keep it one at least is here, and in the graph.
            nbytes, least = self._nbytes(node), min(map(self._nbytes, parts))
            beside = min(nbytes, self._came[self._op_of[node]])
            come, waiting = 0, Counter[int]()  # bytes, and those for operators further down
            seen = set[int]()
            for rank in reversed(self._between(last, place - 1)):
                op = self.ops[rank]
                if op not in seen:
                    seen.add(op)
                    come += self.traced.ops[op].trained_bytes + self._sent[op].total()
                    waiting.update(self._sent[op])
                come -= waiting.pop(op, 0)
                now = come + self._came[op] + self.scratch[op]
                self.running[rank][holder] += nbytes - least if now > beside else 0
            own = self._owner(last)
            if own is not None:
                begun[own] += nbytes - least if come > beside else 0
        for rank, held in begun.items():  # first the views' gradients become one of the whole
            op = self.ops[rank]
            whole = self.traced.gathered_bytes.get(op, 0) - self._made(rank)
            most = max(self.ending[rank].values(), default=0)
            self._end(rank, _ANYWHERE, held + max(most, whole, self.scratch[op]))

    def _end(self, rank: int, holder: int, nbytes: int) -> None:
        """So much is held for an operator at the end of one, or more."""
        self.ending[rank] |= Counter({holder: nbytes})

    def _owner(self, place: int) -> int | None:
        """The rank of the operator that a view at a position belongs to; None if it is no view."""
        node = self._nodes[place]
        if viewed(node, self._facts) is None:
            return None
        return self._rank.get(self._op_of.get(node, -1))

    def _between(self, first: int, last: int) -> range:
        """The ranks of nodes that compute from one position to another."""
        return range(bisect_left(self._positions, first), bisect_right(self._positions, last))

    def _made(self, rank: int) -> int:
        """Bytes of gradients that the graph has for what an operator's backward makes."""
        op = self.ops[rank]
        return self._sent[op].total() + self.traced.ops[op].shared_bytes

    def _last_use(self, node: fx.Node, reader: int, joins: set[fx.Node]) -> int:
        """The position down to which a reader's gradient of a node is held."""
        place, base = self._place[node], viewed(node, self._facts)
        others = [other for other in self._users[node] if other != reader]
        if others:  # it is added to theirs
            return min(max(others), reader)
        if base is not None and len(self._values(base)) > 1:  # one of several results
            return self._place[base]
        if base is not None and self._nbytes(node) >= self._nbytes(base):
            return self._last_use(base, place, joins)
        if base is None and operator_name(node) in _HAND_ON:
            if operator_name(node) in _JOINS:
                joins.add(node)
            sources = filter(self._is_graded, node.all_input_nodes)
            return min((self._last_use(one, place, joins) for one in sources), default=place)
        return 0 if node.op in ("placeholder", "get_attr") else place

    def _values(self, node: fx.Node) -> tuple[Value, ...]:
        return self._facts[node].values if node in self._facts else ()

    def _is_graded(self, node: fx.Node) -> bool:
        return node.op == "output" or any(value.requires_grad for value in self._values(node))

    def _read_bytes(self, node: fx.Node) -> int:
        """Of a view that gives out several parts, those that are read; of another, all."""
        if len(self._values(node)) == 1:
            return self._nbytes(node)
        return sum(self._nbytes(user) for user in node.users if self._is_graded(user))

    def _nbytes(self, node: fx.Node) -> int:
        return sum(value.nbytes for value in self._values(node))
