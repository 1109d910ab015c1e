"""Nodes of an exported graph that have no effect: checks, and casts to the type that is there.

The checks are of shapes and types, by which a placed module tells its calls apart anyway. A cast
that gives out the very tensor that it gets separates one reader of that tensor from the others:
autograd would add up its gradients in another order than the model's, and so round otherwise.
"""

from typing import Any, Final

import torch
from torch import fx

from baechi.tracing.fx_operators import node_arguments

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
    """Whether type, device and layout stay, and neither a copy nor other strides are asked for."""
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
