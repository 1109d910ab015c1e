"""Whose gradients are added up as they come, in the order in which they lie in memory.

    row.expand(n, -1)     each row's gradient is a sum over n rows
    x + bias              the bias gets the sum over what it was repeated for

A kernel takes other steps through a part of a larger storage than through a dense copy of it, and
then rounds otherwise. Views, sums and concatenations hand the gradient on as it is. What computes
with it makes a dense one, whatever it was.

Complexity: O(nodes + edges).
"""

from collections.abc import Mapping
from math import prod

from torch import fx

from baechi.propagation import NodeFacts, Value

# Of operators, of functions of Python and of torch, and of methods; in place or not.
_SUMS = frozenset({"add", "iadd", "radd", "sub", "isub", "rsub"})
_JOINS = frozenset({"cat", "concat", "concatenate", "stack", "clone", "contiguous", "to", "alias"})


def added_up(nodes: Mapping[fx.Node, NodeFacts]) -> frozenset[fx.Node]:
    """The nodes for which, or for what they are made of, a gradient is added up as it comes.

    Args:
        nodes: What every node of a graph does, in program order.
    """
    found: set[fx.Node] = set()
    for node, facts in nodes.items():
        if len(facts.values) != 1 or not facts.values[0].requires_grad:
            continue
        result = facts.values[0]
        read = [argument for argument in node.all_input_nodes if argument in nodes]
        for argument in read:
            value = next(iter(nodes[argument].values), None)
            if value is None or not value.requires_grad:
                continue
            repeats = _repeats(node, value, result)
            if repeats or (argument in found and _hands_on(node, value, result)):
                found.add(node)
    return frozenset(found)


def _repeats(node: fx.Node, value: Value, result: Value) -> bool:
    """Whether the node's result has elements of the value several times."""
    if prod(value.shape) >= prod(result.shape):
        return False
    return value.storage == result.storage or _name(node) in _SUMS


def _hands_on(node: fx.Node, value: Value, result: Value) -> bool:
    """Whether the value gets the gradient of the node's result as it is, or a part of it."""
    if value.storage == result.storage:
        return prod(value.shape) == prod(result.shape)
    return _name(node) in _SUMS | _JOINS


def _name(node: fx.Node) -> str:
    target = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return name.partition(".")[0].rstrip("_")
