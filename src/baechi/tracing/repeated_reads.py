"""Values that one operator reads twice, as `x * x` and `stack([x, x])` do.

Autograd adds each of the two gradients by itself to those of the value's other readers:

    x * x, then x * s      (gradient of s's reader + one) + other

A reader on another tape gives back one gradient for each tensor that it reads, the sum of both. So
where a value has another reader, each further reading of an operator is of an alias of its own. The
aliases are made in the order in which the operator's own nodes in autograd's graph come: attention
is many in one. Where a reading is used twice inside, nothing helps, and nothing is done.
"""

import operator
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

_PYTHONS: Final = frozenset({operator.add, operator.sub, operator.mul, operator.truediv})
_TORCHS: Final = frozenset({torch.add, torch.sub, torch.mul, torch.div, torch.cat, torch.stack})
_JOINS: Final = frozenset({torch.ops.aten.cat.default, torch.ops.aten.stack.default})


def read_once(module: fx.GraphModule) -> fx.GraphModule:
    """The module, changed in place: such operators read aliases beside the value itself."""
    for node in list(module.graph.nodes):
        for value in node.all_input_nodes if node.op == "call_function" else ():
            n = sum(given is value for given in _flat(node.args))
            if n > 1 and len(value.users) > 1 and value.op != "get_attr":
                order = range(n) if _is_one_node(node.target) else _coming(node, value, n)
                if order:
                    _read_aliases(node, value, order)
    module.recompile()
    return module


def _read_aliases(node: fx.Node, value: fx.Node, order: Sequence[int]) -> None:
    """Let a node read a value once, and aliases of it in the other places.

    Args:
        node: The reader.
        value: What it reads.
        order: Its places among the arguments, in the order in which their gradients come. That of
            the value itself comes first, and then autograd goes backward over the latest alias.
    """
    aliases: list[fx.Node] = []
    with node.graph.inserting_before(node):
        for _ in order[1:]:
            alias = node.graph.call_function(torch.ops.aten.alias.default, (value,))
            alias.meta = {**node.meta, "val": value.meta.get("val")}
            aliases.append(alias)
    readings = dict(zip(order, [value, *reversed(aliases)], strict=True))
    places = iter(range(len(order)))
    node.args = fx.node.map_arg(
        node.args, lambda one: readings[next(places)] if one is value else one
    )


def _coming(node: fx.Node, value: fx.Node, n: int) -> list[int]:
    """In which order the gradients of a value's n places come; empty where nobody can tell.

    The operator runs on made-up tensors, and its part of autograd's graph is read: the latest node
    comes first, and the gradients that one node gives come in their order.
    """
    example = value.meta.get("val")
    target: Any = node.target
    pure = isinstance(target, torch._ops.OpOverload) and not target._schema.is_mutable
    if not (pure and isinstance(example, FakeTensor)):
        return []
    readings: list[torch.Tensor] = []

    def made_up(one: fx.Node) -> Any:
        made = pytree.tree_map_only(torch.Tensor, _leaf, one.meta.get("val"))
        if one is value:
            readings.append(made)
        return made

    try:
        with example.fake_mode, torch.enable_grad():
            args = fx.node.map_arg(node.args, made_up)
            result = target(*args, **fx.node.map_arg(node.kwargs, made_up))
    except Exception:  # whatever a fake tensor cannot do
        return []
    ends = {id(reading): place for place, reading in enumerate(readings)}
    rows: list[tuple[int, int, int]] = []  # (-number of the node, number of its gradient, place)
    tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    left = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set(left)
    while left:
        step: Any = left.pop()
        for number, (before, _) in enumerate(step.next_functions):
            place = ends.get(id(getattr(before, "variable", None)))
            if place is not None:
                rows.append((-step._sequence_nr(), number, place))
            elif before is not None and before not in seen:
                seen.add(before)
                left.append(before)
    places = [place for *_, place in sorted(rows)]
    return places if sorted(places) == list(range(n)) else []


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    """One of the same form with no history, that needs a gradient if it can."""
    differentiable = tensor.is_floating_point() or tensor.is_complex()
    return torch.empty_like(tensor).requires_grad_(differentiable)


def _flat(args: Any) -> list[Any]:
    return [leaf for arg in args for leaf in (arg if isinstance(arg, list | tuple) else (arg,))]


def _is_one_node(target: Any) -> bool:
    """Whether an operator is one node of autograd's graph, which gives gradients in order."""
    if isinstance(target, torch._ops.OpOverload):
        pointwise = torch.Tag.pointwise in target.tags and not target._schema.is_mutable
        return pointwise or target in _JOINS
    return target in _PYTHONS or target in _TORCHS
