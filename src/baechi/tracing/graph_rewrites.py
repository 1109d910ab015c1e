"""Rewrites of a traced graph: no nodes without effect, and one read of a value per operator.

Nodes without effect (`without_effectless`) are checks, and casts to the type that is there. The
checks are of shapes and types, which a placed module compares at each call anyway. A cast that
returns its input unchanged separates one reader of that tensor from the others: autograd would sum
the gradients in another order than the model's, and so round differently.

Values that one operator reads twice (`read_once`), as `x * x` and `stack([x, x])` do: autograd adds
each of the two gradients by itself to those of the value's other readers:

    x * x, then x * s      (gradient of s's reader + one) + other

A reader on another tape gives back one gradient for each tensor that it reads, the sum of both. So
where a value has another reader, each further reading of an operator is of an alias of its own.
That is done for operators that are one node of autograd's graph, whose gradients come in the order
of its arguments. Attention and `einsum` are many nodes: there the sum may round otherwise.
"""

import operator
from typing import Any, Final

import torch
from torch import fx

from baechi.torch_support.tracer_internals import OpOverload
from baechi.tracing.fx_nodes import node_arguments

_CHECKS: Final = ("_guards_fn", "aten._assert_tensor_metadata.default")
_CASTS: Final = ("aten.to.dtype", "aten.to.dtype_layout", "aten.to.device")


def without_effectless(module: fx.GraphModule) -> fx.GraphModule:
    """The module, changed in place: the same values from fewer nodes."""
    # Regions without gradients, or with autocast, are modules of their own.
    for part in [part for part in module.modules() if isinstance(part, fx.GraphModule)]:
        for node in list(part.graph.nodes):
            if str(node.target) in _CHECKS:
                part.graph.erase_node(node)
            elif str(node.target) in _CASTS and _gives_what_it_gets(node):
                (before,) = node.all_input_nodes
                node.replace_all_uses_with(before)
                part.graph.erase_node(node)
        part.recompile()
    return module


def _gives_what_it_gets(cast: fx.Node) -> bool:
    """True if type, device and layout stay, and neither a copy nor other strides are requested."""
    given = node_arguments(cast)
    asked = [given.get("copy"), given.get("memory_format")]
    if any(value not in (None, False, torch.preserve_format) for value in asked):
        return False
    (before,) = cast.all_input_nodes
    forms = [_form(node.meta.get("val")) for node in (before, cast)]
    return forms[0] is not None and forms[0] == forms[1]


def _form(value: Any) -> tuple[Any, ...] | None:
    if not isinstance(value, torch.Tensor):
        return None
    return value.dtype, value.device, value.layout


_PYTHONS: Final = frozenset({operator.add, operator.sub, operator.mul, operator.truediv})
_TORCHS: Final = frozenset({torch.add, torch.sub, torch.mul, torch.div, torch.cat, torch.stack})
_JOINS: Final = frozenset({torch.ops.aten.cat.default, torch.ops.aten.stack.default})


def read_once(module: fx.GraphModule) -> fx.GraphModule:
    """The module, changed in place: such operators read aliases beside the value itself."""
    for node in list(module.graph.nodes):
        for value in node.all_input_nodes if _is_one_node(node) else ():
            n = sum(given is value for given in _flat(node.args))
            if n > 1 and len(value.users) > 1 and value.op != "get_attr":
                _read_aliases(node, value, n)
    module.recompile()
    return module


def _read_aliases(node: fx.Node, value: fx.Node, n: int) -> None:
    """Let a node read a value once, and aliases of it in the n - 1 places after the first.

    Autograd goes backward over the latest alias first, so that is the second place's.
    """
    aliases: list[fx.Node] = []
    with node.graph.inserting_before(node):
        for _ in range(n - 1):
            alias = node.graph.call_function(torch.ops.aten.alias.default, (value,))
            alias.meta = {**node.meta, "val": value.meta.get("val")}
            aliases.append(alias)
    readings = iter([value, *reversed(aliases)])
    node.args = fx.node.map_arg(node.args, lambda one: next(readings) if one is value else one)


def _flat(args: Any) -> list[Any]:
    return [leaf for arg in args for leaf in (arg if isinstance(arg, list | tuple) else (arg,))]


def _is_one_node(node: fx.Node) -> bool:
    """True if an operator is one node of autograd's graph, which returns gradients in order."""
    target = node.target
    if node.op != "call_function":
        return False
    if isinstance(target, OpOverload):
        pointwise = torch.Tag.pointwise in target.tags and not target._schema.is_mutable
        return pointwise or target in _JOINS
    return target in _PYTHONS or target in _TORCHS
