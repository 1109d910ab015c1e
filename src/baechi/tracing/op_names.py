"""Readable names of operators, and keys that are equal for operators of equal cost."""

import operator
from collections.abc import Sequence
from pathlib import Path
from types import FunctionType
from typing import Any, Final

import torch
from torch import fx, nn

from baechi.tracing.alias_analysis import Facts, Value

_TORCH: Final = str(Path(torch.__file__).parent)


def op_key(module: fx.GraphModule, facts: Facts, nodes: Sequence[fx.Node]) -> str:
    """Operators, arguments and shapes of an operator as text; names left out.

    Reads of the model's state are marked: they come from memory, not from an earlier operator.
    """
    local = {node: i for i, node in enumerate(nodes)}

    def show(argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            if argument in local:
                return f"%{local[argument]}"
            if argument.op == "get_attr" and not facts.nodes[argument].values:
                return _show_graph(operator.attrgetter(str(argument.target))(module))
            values = " ".join(map(_show_value, facts.nodes[argument].values))
            return f"<state {values}>" if facts.is_state(argument) else f"<{values}>"
        return repr(argument)

    rows = []
    for node in nodes:
        if node.op in ("placeholder", "get_attr"):
            rows.append(f"{node.op}{[_show_value(v) for v in facts.nodes[node].values]}")
            continue
        target = _show_target(node.target)
        if node.op == "call_module":
            leaf = module.get_submodule(target)
            state = [*leaf.parameters(), *leaf.buffers()]
            target = f"{leaf!r} {[f'{t.dtype}{list(t.shape)}' for t in state]}"
        arguments = fx.node.map_aggregate((node.args, dict(node.kwargs)), show)
        rows.append(f"{node.op} {target}{arguments}")
    return "; ".join(rows)


def _show_target(target: Any) -> str:
    if isinstance(target, FunctionType):  # its text would have its address
        return f"{target.__module__}.{target.__qualname__}"
    return str(target)


def _show_graph(graph: Any) -> str:
    """The graph that an operator runs, such as a block under autocast; names left out."""
    if not isinstance(graph, fx.GraphModule):
        return repr(graph)
    local = {node: i for i, node in enumerate(graph.graph.nodes)}
    rows = []
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            value = operator.attrgetter(str(node.target))(graph)
            rows.append(_show_graph(value) if isinstance(value, nn.Module) else str(value.shape))
        else:
            target = "" if node.op == "placeholder" else _show_target(node.target)
            arguments = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: f"%{local[n]}")
            rows.append(f"{target}{arguments}")
    return f"{{{'; '.join(rows)}}}"


def _show_value(value: Value) -> str:
    grad = "'" if value.requires_grad else ""
    return f"{str(value.dtype)[6:]}{list(value.shape)}{list(value.stride)}{grad}"


def unique(name: str, taken: set[str]) -> str:
    """The name, with a number if it is taken already; it is taken then."""
    candidate, count = name, 1
    while candidate in taken:
        count += 1
        candidate = f"{name}#{count}"
    taken.add(candidate)
    return candidate


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


def source_line(node: fx.Node) -> str:
    """`modeling_gpt2.py:680 in forward: hidden_states = ...`, from the tracer's own record.

    The innermost line that is not torch's own, such as that of a layer in `torch.nn`.
    """
    lines = str(node.meta.get("stack_trace") or "").strip().splitlines()
    places = [i for i, line in enumerate(lines) if line.strip().startswith('File "')]
    own = [i for i in places if not lines[i].strip().startswith(f'File "{_TORCH}')]
    places = own or places
    if not places:
        return ""
    place = lines[places[-1]].strip()
    file, line, function = [*place.split(", ", 2), "", ""][:3]
    name = Path(file[6:].strip('"')).name
    code = lines[places[-1] + 1].strip() if places[-1] + 1 < len(lines) else ""
    return f"{name}:{line.removeprefix('line ')} {function}: {code}"
