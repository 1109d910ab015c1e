"""Operators of traced graphs: their plain names, and their arguments by name."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx


def operator_name(node: fx.Node) -> str:
    """`embedding` for `aten.embedding.default`, `torch.nn.functional.embedding`, `.embedding`."""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name.partition("::")[2]
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def node_arguments(node: fx.Node) -> dict[str, Any]:
    """A node's arguments by name, in the operator's order, defaults included.

    Where names are unknown, as of a method's arguments, positions replace them.
    """
    if isinstance(node.target, torch._ops.OpOverload):
        return schema_arguments(node.target, node.args, node.kwargs)
    owner = node.graph.owning_module
    assert owner is not None  # a traced graph belongs to its module
    try:
        normalized = node.normalized_arguments(owner, None, None, True)
    except RuntimeError:  # several schemas fit, of `torch.tanh` for one
        normalized = None
    if normalized is not None:
        return dict(normalized.kwargs)
    return {**{str(place): value for place, value in enumerate(node.args)}, **node.kwargs}


def schema_arguments(
    target: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of a call by name, in the schema's order, defaults included."""
    schema = target._schema.arguments
    given = {**dict(zip([row.name for row in schema], args, strict=False)), **kwargs}
    return {row.name: given.get(row.name, row.default_value) for row in schema}
