"""Nodes whose incoming gradient must keep its strides (no contiguous copy).

    row.expand(n, -1)     each row's gradient is a sum, in the order of memory
    batch_norm(x)         another kernel where the gradient is dense with channels last
    relu(x), x * y        a new gradient, dense whatever the old one was
    two readers           their sum is a new one, too

A gradient that is a part of a larger storage is copied into a dense one where it leaves a tape. A
kernel walks through the dense copy in another order and may round otherwise, so these nodes get the
part itself. Views, sums and concatenations hand their gradient on unchanged. Without this, a batch
norm of Cvt (channels last) and the attention sinks of GPT-OSS differ from the unsplit model in
their last bits (torch 2.13, CPU).

Complexity: O(nodes + edges).
"""

from collections.abc import Mapping
from math import prod
from typing import Final

import torch
from torch import fx

from baechi.tracing.alias_analysis import NodeFacts, Value
from baechi.tracing.fx_nodes import operator_name

# Of operators, of functions of Python and of torch, and of methods; in place or not.
_SUMS: Final = frozenset({"add", "iadd", "radd", "sub", "isub", "rsub"})
_HANDS_ON: Final = _SUMS | {"cat", "concat", "stack", "clone", "contiguous", "to", "alias"}


def keeping_strides(nodes: Mapping[fx.Node, NodeFacts]) -> frozenset[fx.Node]:
    """The nodes whose gradients must keep their strides.

    Args:
        nodes: The facts of every node of a graph, in program order.
    """
    found: set[fx.Node] = set()
    for node, facts in nodes.items():
        if any(value.requires_grad for value in facts.values) and _stays(node, nodes, found):
            found.add(node)
    return frozenset(found)


def _stays(node: fx.Node, nodes: Mapping[fx.Node, NodeFacts], found: set[fx.Node]) -> bool:
    results = nodes[node].values
    if len(results) != 1:
        return True
    if sum(_is_graded(user, nodes) for user in node.users) > 1:
        return False
    rows = [
        (source, value)
        for source in node.all_input_nodes
        for value in (nodes[source].values if source in nodes else ())
        if value.requires_grad
    ]
    views = [row for row in rows if row[1].storage == results[0].storage]
    if views:
        return any(_is_seen_whole(value, results[0], source in found) for source, value in views)
    name = operator_name(node).rstrip("_")
    if name in _HANDS_ON:
        repeated = prod(results[0].shape) if name in _SUMS else 0
        return any(source in found or prod(value.shape) < repeated for source, value in rows)
    return not isinstance(node.target, torch._ops.OpOverload) or (
        torch.Tag.pointwise not in node.target.tags
    )


def _is_graded(user: fx.Node, nodes: Mapping[fx.Node, NodeFacts]) -> bool:
    """True if a gradient comes from a reader; the caller is one."""
    return user not in nodes or any(value.requires_grad for value in nodes[user].values)


def _is_seen_whole(value: Value, view: Value, stays: bool) -> bool:
    """True if a view passes its gradient to a node that needs its strides, or sums it."""
    whole, seen = prod(value.shape), prod(view.shape)
    return whole < seen or (whole == seen and stays)
