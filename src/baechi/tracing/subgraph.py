"""A set of fx nodes as one function of flat Python code, to be measured or run by itself."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import fx

from baechi.traced.traced_model import Traced
from baechi.tracing.observers import Observer, without_observers
from baechi.tracing.truth_values import CHECK, check
from baechi.tracing.workarounds import called_with


@final
@dataclass(frozen=True)
class Extract:
    """Some nodes of a graph as a function.

    Attributes:
        function: Takes the values of `inputs`, in order, and returns those of `outputs`, a tuple.
            A boxed one takes them in one list, which it empties, so that the function alone
            decides how long they live.
        inputs: Nodes outside whose values it needs; get_attr nodes are among them. A node stands
            once for each reader that reads it apart, and once for the others.
        readers: For each input the node that reads it apart, or `None`: all others share it.
        outputs: Nodes inside whose values it gives, and after them those of `exits`.
        exits: (node, position) of the values that leave through an alias of their own.
    """

    function: Callable[..., tuple[Any, ...]]
    inputs: tuple[fx.Node, ...]
    readers: tuple[fx.Node | None, ...]
    outputs: tuple[fx.Node, ...]
    exits: tuple[tuple[fx.Node, int], ...] = ()


def extract(
    module: fx.GraphModule,
    nodes: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    *,
    apart: Set[tuple[fx.Node, fx.Node]] = frozenset(),
    exits: Sequence[tuple[fx.Node, int, fx.Node]] = (),
    device: torch.device,
    leaves: Mapping[str, torch.nn.Module] | None = None,
    lent: Mapping[fx.Node, Mapping[str, fx.Node]] | None = None,
    boxed: bool = False,
    again: bool = False,
    dead: Set[fx.Node] = frozenset(),
) -> Extract:
    """The function that runs `nodes`, in the given order, as straight-line generated code.

    Args:
        module: The graph module that owns the nodes.
        nodes: Nodes in program order, without placeholders; get_attr nodes become inputs.
        outputs: Those to return.
        apart: (input, reader): a reader that gets an argument of its own, so that its gradient
            can be told apart and added up in the order of the unsplit model.
        exits: (node, position, next): values that also leave through an alias, so that autograd
            adds the gradient of a reader at that program position up in its turn; the alias is
            made before `next` runs. In the order of `nodes`.
        device: Where the function runs: factories such as `arange` allocate there, and on a GPU
            the host checks truth values.
        leaves: Opaque submodules to call instead of the graph module's own, by qualified name.
        lent: Weights, by name, of which a node that calls a submodule gets arguments of its own.
        boxed: Whether the function takes its inputs in a list.
        again: Whether it runs again, so that observers see no graph: it is not the one of the
            backward.
        dead: Nodes whose results lead to no gradient: what autograd saved for them is let go of.
    """
    inside = {node for node in nodes if node.op not in ("get_attr", "placeholder")}
    inputs: dict[tuple[fx.Node, fx.Node | None], None] = {}
    lent = lent or {}
    for node in nodes:
        if node in inside:
            inputs.update(((weight, node), None) for weight in lent.get(node, {}).values())
            outside = [a for a in node.all_input_nodes if a not in inside]
            inputs.update(((a, node if (a, node) in apart else None), None) for a in outside)
    graph = fx.Graph()
    copy_of: dict[tuple[fx.Node, fx.Node | None], fx.Node] = {}
    box = graph.placeholder("arguments") if boxed else None
    for node, reader in inputs:
        name = node.name if reader is None else f"{node.name}_for_{reader.name}"
        copy_of[node, reader] = (
            graph.placeholder(name)
            if box is None
            else graph.create_node("call_method", "pop", (box, 0), name=name)
        )
    left: list[fx.Node] = []

    for node in nodes:
        if node in inside:
            while len(left) < len(exits) and exits[len(left)][2] is node:
                value = copy_of[exits[len(left)][0], None]
                left.append(graph.call_function(torch.ops.aten.alias.default, (value,)))

            def argument(old: fx.Node, node: fx.Node = node) -> fx.Node:
                return copy_of[old, node if (old, node) in apart else None]

            copy_of[node, None] = copy = graph.node_copy(node, argument)
            if node in lent:
                leaf = graph.create_node("get_attr", str(node.target))
                weights = {name: copy_of[weight, node] for name, weight in lent[node].items()}
                given = (leaf, weights, copy.args, copy.kwargs)
                graph.erase_node(copy)
                copy_of[node, None] = copy = graph.create_node(
                    "call_function", _with_weights, given, name=node.name
                )
            if isinstance(node.target, Observer):
                _detach(copy, node, set() if again else inside)
            _run_on(copy, device)
            if node in dead:
                copy_of[node, None] = graph.call_function(_without_graph, (copy,))
    graph.output((*(copy_of[node, None] for node in outputs), *left))
    called = opaque_leaves(module, nodes) if leaves is None else dict(leaves)
    return Extract(
        fx.GraphModule(called, graph).forward,
        inputs=tuple(node for node, _ in inputs),
        readers=tuple(reader for _, reader in inputs),
        outputs=tuple(outputs),
        exits=tuple((node, position) for node, position, _ in exits),
    )


def _with_weights(
    leaf: torch.nn.Module, weights: Mapping[str, Any], args: Sequence[Any], kwargs: Any
) -> Any:
    """The result of a submodule with others in place of some of its weights."""
    state = dict([*leaf.named_parameters(), *leaf.named_buffers()])
    return called_with(leaf, {**state, **weights}, args, kwargs)


def _without_graph(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, which needs a gradient or not as before: operators choose their kernels by it.

    It is no leaf of autograd, since autocast would keep its cast, and the cast the tensor.
    """
    if not tensor.requires_grad:
        return tensor
    leaf = tensor.detach().requires_grad_()
    return torch.ops.aten.alias.default(leaf)  # type: ignore[no-any-return]


def _detach(observer: fx.Node, original: fx.Node, inside: Set[fx.Node]) -> None:
    """Let an observer see without a graph what is not made here: here is a part of its gradient."""
    pairs = list(zip(original.args, observer.args, strict=True))
    with observer.graph.inserting_before(observer):
        observer.args = tuple(
            observer.graph.call_method("detach", (new,))
            if isinstance(old, fx.Node) and old not in inside
            else new
            for old, new in pairs
        )


def opaque_leaves(module: fx.GraphModule, nodes: Iterable[fx.Node]) -> dict[str, torch.nn.Module]:
    """The submodules that the nodes call, by qualified name."""
    targets = [str(node.target) for node in nodes if node.op == "call_module"]
    return {target: module.get_submodule(target) for target in targets}


def unsplit_part(traced: Traced, least: float = 0.5) -> str:
    """A sentence about the submodule that stays whole with most of the model's parameters.

    Empty where there is none of several parts, with a larger share of them than `least`.
    """
    module = traced.module
    total = sum(tensor.nbytes for tensor in module.model.parameters())
    for path, leaf in opaque_leaves(module.graph_module, module.graph_module.graph.nodes).items():
        parts = [part for part in leaf.modules() if any(True for _ in part.parameters(False))]
        share = sum(tensor.nbytes for tensor in leaf.parameters()) / total if parts else 0
        if len(parts) > 1 and share > least:
            line = traced.attempts[0].reason.rpartition(" (at ")[2].removesuffix(")")
            return (
                f"{path.removeprefix('model.')} of this {traced.name}, with {share:.0%} of its "
                f"parameters, stays on one device: it cannot be traced, for {line}. Let forward do "
                "without that line, such as a check of values, or a loss that could be computed "
                "outside (place without labels)."
            )
    return ""


def leaf_copies(
    module: fx.GraphModule, nodes: Iterable[fx.Node], device: torch.device
) -> dict[str, torch.nn.Module]:
    """Copies of the opaque leaves: they may update their buffers, or have no memory at all."""
    with without_observers(module):
        return {
            target: copy.deepcopy(leaf).to_empty(device=device)
            if any(tensor.is_meta for tensor in leaf.parameters())
            else copy.deepcopy(leaf).to(device)
            for target, leaf in opaque_leaves(module, nodes).items()
        }


def located(value: Any, device: torch.device) -> Any:
    """A graph that an operator runs, such as a branch of `torch.cond`, as it is on a device.

    Other values are given back as they are.
    """
    if not isinstance(value, fx.GraphModule):
        return value
    graph = fx.Graph()
    graph.output(graph.graph_copy(value.graph, {}))
    for node in graph.nodes:
        _run_on(node, device)
    moved = fx.GraphModule(value, graph)
    for target, inner in list(moved.named_children()):
        setattr(moved, target, located(inner, device))
    return moved


def _run_on(node: fx.Node, device: torch.device) -> None:
    def move(argument: Any) -> Any:
        return device if isinstance(argument, torch.device) else argument

    node.args = fx.node.map_aggregate(node.args, move)
    node.kwargs = fx.node.map_aggregate(node.kwargs, move)
    if device.type == "cuda" and str(node.target).startswith(CHECK):
        node.target = check
