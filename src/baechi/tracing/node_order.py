"""The order of a graph's nodes, once they are operators.

A tape runs nodes in the program's order, and autograd goes backward in the reverse of it; the clock
runs whole operators. Where one begins early, as `scores = q @ k` does that a later `scores += bias`
writes, its first nodes move behind what the clock runs before it. So its memory is there when the
clock says.

Complexity: O(nodes + steps): a node that may move is tried behind one node after another, up to its
first reader.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, final

from torch import fx

from baechi.tracing.fx_nodes import operator_name
from baechi.tracing.node_facts import Facts
from baechi.tracing.partition import Partition

# They read a shape alone, and send no gradient, whatever is written into their result.
_READS_SHAPE: Final = ("empty", "full", "new_", "ones", "zeros")


@final
@dataclass
class _Effects:
    """The storages that a node reads, makes or writes, and what else ties it to its place.

    `sends`: gradients come back through it. `ordered`: it draws, looks at values, or may.
    """

    sends: bool
    ordered: bool
    touches: set[int]
    writes: frozenset[int]

    def commute(self, other: "_Effects") -> bool:
        """True if two nodes may change places, one of which does not read the other.

        Neither writes what the other touches. No value gets gradients from both, since these are
        added up in the reverse of the program's order.
        """
        both = self.touches & other.touches
        tied = (self.ordered and other.ordered) or (both and self.sends and other.sends)
        return not tied and both.isdisjoint(self.writes | other.writes)


def order_nodes(facts: Facts, parts: Partition) -> bool:
    """Move nodes behind those of operators that the clock runs first, where no result changes.

    Returns:
        True if any moved: then the partition is one of the graph as it was.
    """
    moved = False
    effects = _effects(facts, parts)
    makers = {storage.node for storage in facts.storages}
    first = len(parts.nodes_of_op)  # the first operator that makes something from here on
    for node in reversed(parts.program):
        op = parts.op_of.get(node)
        if op is None or node.op in ("get_attr", "placeholder"):
            continue
        if first < op:
            passed = _passed(node, parts, effects)
            lower = [n for n in passed if n in makers and parts.op_of[n] < op]
            if lower:
                lower[-1].append(node)
                moved = True
        if node in makers:
            first = min(first, op)
    return moved


def _passed(node: fx.Node, parts: Partition, effects: Mapping[fx.Node, _Effects]) -> list[fx.Node]:
    """The nodes that follow a node and may come before it."""
    passed = []
    after = node.next
    while after is not parts.output:
        if after.op != "get_attr":
            own = parts.op_of[after] == parts.op_of[node] or after in node.users
            if own or not effects[node].commute(effects[after]):
                break
            passed.append(after)
        after = after.next
    return passed


def _effects(facts: Facts, parts: Partition) -> dict[fx.Node, _Effects]:
    rows = {}
    for node in parts.program:
        fact = facts.nodes[node]
        ordered = node.op == "call_module" or fact.random or fact.looks or fact.checks
        sends = any(value.requires_grad for value in fact.values)
        sends &= not operator_name(node).startswith(_READS_SHAPE)
        rows[node] = _Effects(sends, ordered, set(), fact.writes)
    for storage, positions in parts.touches.items():
        for position in positions:
            rows[parts.program[position]].touches.add(storage)
    return rows
