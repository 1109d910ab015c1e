"""Values that one operator reads twice, as in `x * x`.

Autograd adds each of the two gradients by itself to those of the value's other readers:

    x * x, then x * s      (gradient of s's reader + one) + other

A reader on another tape gives back one gradient for each tensor that it reads, the sum of both. So
where a value has another reader, each further reading of an operator is of an alias of its own.
Only of operators that compute number by number: others may be many in one, with an order inside.
"""

import operator
from typing import Any, Final

import torch
from torch import fx

_PYTHONS: Final = frozenset({operator.add, operator.sub, operator.mul, operator.truediv})
_TORCHS: Final = frozenset({torch.add, torch.sub, torch.mul, torch.div})


def read_once(module: fx.GraphModule) -> fx.GraphModule:
    """The module, changed in place: such operators read aliases beside the value itself."""
    for node in list(module.graph.nodes):
        if not _is_pointwise(node.target):
            continue
        for argument in node.all_input_nodes:
            places = [place for place, given in enumerate(node.args) if given is argument]
            if len(places) < 2 or len(argument.users) < 2 or argument.op == "get_attr":
                continue
            args = list(node.args)
            with module.graph.inserting_before(node):
                for place in places[1:]:
                    args[place] = module.graph.call_function(
                        torch.ops.aten.alias.default, (argument,)
                    )
                    args[place].meta = {
                        **argument.meta,
                        **node.meta,
                        "val": argument.meta.get("val"),
                    }
            node.args = tuple(args)
    module.recompile()
    return module


def _is_pointwise(target: Any) -> bool:
    if isinstance(target, torch._ops.OpOverload):
        return torch.Tag.pointwise in target.tags and not target._schema.is_mutable
    return target in _PYTHONS or target in _TORCHS
