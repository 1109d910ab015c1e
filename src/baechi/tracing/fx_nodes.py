"""Nodes of traced graphs: names of operators, arguments by name, and the model's own lines."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import fx

from baechi.torch_support.tracer_internals import OpOverload

# Beginnings of lines of a stack in torch and in what watches it here.
_NOT_THE_MODELS: Final = tuple(f'File "{Path(file).parent}' for file in (torch.__file__, __file__))


def operator_name(node: fx.Node) -> str:
    """`embedding` for `aten.embedding.default`, `torch.nn.functional.embedding`, `.embedding`."""
    if isinstance(node.target, OpOverload):
        return node.target._schema.name.partition("::")[2]
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def node_arguments(node: fx.Node) -> dict[str, Any]:
    """A node's arguments by name, in the operator's order, defaults included.

    Where names are unknown, as of a method's arguments, positions replace them.
    """
    if isinstance(node.target, OpOverload):
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
    target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of a call by name, in the schema's order, defaults included."""
    schema = target._schema.arguments
    given = {**dict(zip([row.name for row in schema], args, strict=False)), **kwargs}
    return {row.name: given.get(row.name, row.default_value) for row in schema}


def op_name(node: fx.Node) -> str:
    """`h.0.mlp.c_fc/addmm_2`: the owning submodule's path and the node."""
    if node.op == "placeholder":
        return f"input:{node.name}"
    if node.op == "get_attr":
        return f"state:{_own_path(str(node.target))}"
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = _own_path(str(stack[-1][0])) if stack else ""
    return f"{path}/{node.name}" if path else node.name


def _own_path(path: str) -> str:
    """A path in the user's model, without the flat module around it."""
    path = path.removeprefix("L['self'].")
    return "" if path == "model" else path.removeprefix("model.")


def op_and_line(node: fx.Node) -> str:
    """The operator's name with its source line, if known."""
    source = source_line(node)
    return f"{op_name(node)} ({source})" if source else op_name(node)


def source_line(node: fx.Node) -> str:
    """`modeling_gpt2.py:680 in forward: hidden_states = ...`, from the tracer's own record.

    The innermost line that is neither torch's own, such as that of a layer in `torch.nn`, nor ours.
    """
    lines = str(node.meta.get("stack_trace") or "").strip().splitlines()
    places = [i for i, line in enumerate(lines) if line.strip().startswith('File "')]
    own = [i for i in places if not lines[i].strip().startswith(_NOT_THE_MODELS)]
    places = own or places
    if not places:
        return ""
    place = lines[places[-1]].strip()
    file, line, function = [*place.split(", ", 2), "", ""][:3]
    name = Path(file[6:].strip('"')).name
    code = lines[places[-1] + 1].strip() if places[-1] + 1 < len(lines) else ""
    return f"{name}:{line.removeprefix('line ')} {function}: {code}"
