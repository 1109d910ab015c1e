"""The text by which operators that do the same on the same shapes share their costs."""

from collections.abc import Sequence
from typing import Any

from torch import fx, nn

from baechi.tracing.fx_nodes import target_name
from baechi.tracing.model_code import is_torchs
from baechi.tracing.node_facts import Facts, Value
from baechi.tracing.partition import attribute


def operator_key(module: fx.GraphModule, facts: Facts, nodes: Sequence[fx.Node]) -> str:
    """Operators, arguments and shapes of an operator as text; names left out.

    Reads of the model's state are marked: they come from memory, not from an earlier operator.
    """
    local = {node: i for i, node in enumerate(nodes)}

    def show(argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            if argument in local:
                return f"%{local[argument]}"
            if argument.op == "get_attr" and not facts.nodes[argument].values:
                return _show_graph(attribute(module, str(argument.target)))
            values = " ".join(map(_show_value, facts.nodes[argument].values))
            structure = facts.nodes[argument].structure
            if not values and structure is not None:  # a number, such as a size
                values = repr(structure.constants)
            return f"<state {values}>" if facts.is_state(argument) else f"<{values}>"
        return repr(argument)

    rows = []
    for node in nodes:
        if node.op in ("placeholder", "get_attr"):
            rows.append(f"{node.op}{[_show_value(v) for v in facts.nodes[node].values]}")
            continue
        target = target_name(node)
        if node.op == "call_module":
            leaf = module.get_submodule(target)
            state = [*leaf.parameters(), *leaf.buffers()]
            target = "" if is_torchs(leaf) else f"{target} "  # whose values decide what it does
            target += f"{leaf!r} {[f'{t.dtype}{list(t.shape)}' for t in state]}"
        arguments = fx.node.map_aggregate((node.args, dict(node.kwargs)), show)
        rows.append(f"{node.op} {target}{arguments}")
    return "; ".join(rows)


def _show_graph(graph: Any) -> str:
    """The graph that an operator runs, such as a branch of `torch.cond`; names left out."""
    if not isinstance(graph, fx.GraphModule):
        return repr(graph)
    local = {node: i for i, node in enumerate(graph.graph.nodes)}
    rows = []
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            value = attribute(graph, str(node.target))
            rows.append(_show_graph(value) if isinstance(value, nn.Module) else str(value.shape))
        else:
            target = "" if node.op == "placeholder" else target_name(node)
            arguments = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: f"%{local[n]}")
            rows.append(f"{target}{arguments}")
    return f"{{{'; '.join(rows)}}}"


def _show_value(value: Value) -> str:
    grad = "'" if value.requires_grad else ""
    return f"{str(value.dtype)[6:]}{list(value.shape)}{list(value.stride)}{grad}"
