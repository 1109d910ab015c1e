"""Inputs for operators that run alone.

What follows from the example without any activation (positions, masks, token ids) keeps its values,
computed on the CPU. Everything else is made up: floats in (0.1, 1), so that logarithms, roots and
variances are numbers; booleans that are true; integers in range of what they index, drawn evenly,
so that neither every row nor a single one is read.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Final, final

import torch
from torch import fx

from baechi.tracing.fx_nodes import node_arguments, operator_name
from baechi.tracing.lowering import TracedModule
from baechi.tracing.model_code import is_torchs
from baechi.tracing.node_facts import Value
from baechi.tracing.partition import attribute
from baechi.tracing.pytrees import map_tensors, tensors_in
from baechi.tracing.subgraph import Extract, extract, opaque_leaves

# A known value larger than this is made up instead: evaluating must not need the model's memory.
_MAX_KNOWN_BYTES: Final = 1 << 28
# A value for an input node, given the nodes of an operator that read it.
Make = Callable[[fx.Node, Sequence[fx.Node]], Any]

_CLASSIFYING: Final = ("nll_loss", "nll_loss_nd", "cross_entropy_loss", "cross_entropy")
# Operators that index: name -> (what is indexed, the argument that says its dimension, the
# indices), by position. A sequence of indices is for one dimension each.
_INDEXING: Final[dict[str, tuple[int, int | None, int]]] = {
    **dict.fromkeys(
        ("embedding", "embedding_bag", "index", "index_put", *_CLASSIFYING), (0, None, 1)
    ),
    **dict.fromkeys(("gather", "scatter", "scatter_add", "scatter_reduce"), (0, 1, 2)),
    **dict.fromkeys(("index_select", "index_add", "index_copy", "index_fill"), (0, 1, 2)),
    "take_along_dim": (0, 2, 1),
}
# Products of a group of rows with a matrix each: (input, weight, where each group ends).
_GROUPED: Final = ("_grouped_mm", "grouped_mm", "grouped_mm_fallback")


def function_of(
    module: TracedModule,
    nodes: Sequence[fx.Node],
    device: torch.device,
    leaves: Mapping[str, torch.nn.Module],
) -> Extract:
    """An operator as a function of what it reads, with these opaque submodules.

    It gives what others read: what nobody does goes at once, as in a step.
    """
    inside = set(nodes)
    run = [n for n in nodes if n.op not in ("get_attr", "placeholder")]
    outputs = [n for n in run if any(user not in inside for user in n.users)]
    return extract(module.graph_module, nodes, outputs, device=device, leaves=leaves)


def looks_at_values(module: TracedModule, nodes: Sequence[fx.Node]) -> bool:
    """True if a submodule that no tracer takes is in an operator: what it does, values decide."""
    leaves = opaque_leaves(module.graph_module, nodes).values()
    return not all(is_torchs(leaf) for leaf in leaves)


@final
class ExampleInputs:
    """Makes the values that operators of a traced model read, on a device."""

    def __init__(self, module: TracedModule, device: torch.device) -> None:
        self._module = module
        self._device = device
        self._known: dict[fx.Node, Any] = {}
        placeholders = iter(module.call.tensors)
        for node in module.graph_module.graph.nodes:
            facts = module.facts.nodes.get(node)
            if node.op == "placeholder":
                tensor = next(placeholders)
                if not (tensor.is_floating_point() or tensor.is_complex() or tensor.is_meta):
                    self._known[node] = tensor.cpu()
            elif facts is not None and not facts.random and _is_knowable(facts.values):
                self._evaluate(node, facts.writes)

    def _evaluate(self, node: fx.Node, writes: frozenset[int]) -> None:
        if node.op == "get_attr":
            value = attribute(self._module.graph_module, str(node.target))
            if not (value.is_meta or isinstance(value, torch.nn.Parameter)):
                self._known[node] = value.detach().cpu()
            return
        known = all(argument in self._known for argument in node.all_input_nodes)
        if node.op == "call_function" and known and not writes:
            args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), self._given)
            try:
                with torch.no_grad():
                    value = node.target(*args, **kwargs)  # type: ignore[operator]
            except RuntimeError:  # what a CPU has no kernel for is made up
                return
            if not any(leaf.is_meta for leaf in tensors_in(value)):
                self._known[node] = value

    def _given(self, argument: Any) -> Any:
        """An argument as it is on the CPU."""
        if isinstance(argument, fx.Node):
            return self._known[argument]
        return torch.device("cpu") if isinstance(argument, torch.device) else argument

    def make(self, node: fx.Node, readers: Sequence[fx.Node]) -> Any:
        """A value for a node that the readers, nodes of one operator, read."""
        if node in self._known:
            # A copy: an operator may count in it.
            return map_tensors(lambda t: t.to(self._device, copy=True), self._known[node])
        for reader in readers:
            rows = self._grouped_rows(node, reader)
            if rows is not None:
                (ends,) = self._module.facts.nodes[node].values
                (groups,) = ends.shape
                even = torch.arange(1, groups + 1, device=self._device) * rows // groups
                return even.to(ends.dtype)
        direct = [reader for reader in readers if node in reader.all_input_nodes]
        limit = min((self._index_limit(node, reader) for reader in direct), default=1)
        return filled(self._module, node, lambda value: self._made_up(value, limit))

    def _made_up(self, value: Value, limit: int) -> torch.Tensor:
        extent = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride, strict=True) if n)
        if 0 in value.shape:
            extent = 0
        if value.dtype.is_floating_point or value.dtype.is_complex:
            flat = torch.rand(extent, device=self._device).mul_(0.9).add_(0.1).to(value.dtype)
        elif value.dtype is torch.bool:
            flat = torch.ones(extent, dtype=torch.bool, device=self._device)
        else:
            flat = torch.randint(0, limit, (extent,), device=self._device).to(value.dtype)
        # Detached, so no view of `flat`: without gradients, operators choose another kernel for a
        # weight that is a view of what needs none.
        tensor = flat.as_strided(value.shape, value.stride).detach()
        return tensor.requires_grad_(value.requires_grad)

    def _grouped_rows(self, node: fx.Node, reader: fx.Node) -> int | None:
        """The number of rows of `reader`'s groups, if `node` has their ends."""
        if operator_name(reader) not in _GROUPED or node not in reader.all_input_nodes:
            return None
        rows, _, ends = list(node_arguments(reader).values())[:3]
        if ends is not node or not isinstance(rows, fx.Node):
            return None
        return int(self._module.facts.nodes[rows].values[0].shape[0])

    def _index_limit(self, node: fx.Node, reader: fx.Node) -> int:
        """The number of valid indices if `reader` indexes something with `node`; else 1."""
        rule = _INDEXING.get(operator_name(reader).rstrip("_"))
        if rule is None:
            return 1
        whole, dimension, place = rule
        arguments = list(node_arguments(reader).values())
        if len(arguments) <= max(whole, place) or not isinstance(arguments[whole], fx.Node):
            return 1
        indexed = self._module.facts.nodes[arguments[whole]].values[0].shape
        indices = arguments[place]
        if isinstance(indices, list | tuple):
            axes = [axis for axis, index in enumerate(indices) if index is node]
        elif indices is not node:
            return 1
        elif operator_name(reader) in _CLASSIFYING:
            axes = [1 if len(indexed) > 1 else 0]
        else:
            given = arguments[dimension] if dimension is not None else 0
            axes = [given] if isinstance(given, int) else []
        return min((max(indexed[axis], 1) for axis in axes if indexed), default=1)


def filled(module: TracedModule, node: fx.Node, make: Callable[[Value], torch.Tensor]) -> Any:
    """A node's value with made tensors; numbers, devices and submodules are as they are."""
    facts = module.facts.nodes[node]
    if node.op == "get_attr" and not facts.values:
        return attribute(module.graph_module, str(node.target))
    assert facts.structure is not None
    return facts.structure.fill([make(value) for value in facts.values])


@final
class RealInputs:
    """The values that operators read in a run of a traced model on its example.

    The model stays as it is. Needs values of all parameters, and the memory of a forward. One run
    is for all operators that look at values; any other has a run of its own, without it.
    """

    def __init__(self, module: TracedModule) -> None:
        self._module = module

    def make(self, nodes: Sequence[fx.Node], device: torch.device, otherwise: Make) -> Make:
        """What makes the values that an operator reads; of other nodes as otherwise."""
        if looks_at_values(self._module, nodes):
            values = self._of_all[nodes[0]]
        else:
            (values,) = _Run(self._module, [nodes], alone=True).values.values()

        def anew(node: fx.Node) -> Any:
            """Its tensors as leaves of their own, with the same strides."""
            flags = iter([value.requires_grad for value in self._module.facts.nodes[node].values])
            return map_tensors(
                lambda t: t.detach().clone().to(device).requires_grad_(next(flags)), values[node]
            )

        made = {node: anew(node) for node in values}
        return lambda node, readers: made[node] if node in made else otherwise(node, readers)

    @cached_property
    def _of_all(self) -> dict[fx.Node, dict[fx.Node, Any]]:
        rows = [nodes for nodes in self._module.nodes if looks_at_values(self._module, nodes)]
        return _Run(self._module, rows).values


@final
class _Run(fx.Interpreter):
    """A run of the example, up to the last of some operators.

    Attributes:
        values: What each of them reads, by the first of its nodes.
    """

    def __init__(
        self, module: TracedModule, operators: Sequence[Sequence[fx.Node]], *, alone: bool = False
    ) -> None:
        super().__init__(module.graph_module, garbage_collect_values=False)
        without = {node for nodes in operators for node in nodes} if alone else set()
        self._copies: dict[str, Any] = {}
        tensors = [*module.call.tensors, *module.model.parameters()]
        self._home = next((tensor.device for tensor in tensors), torch.device("cpu"))
        self.args_iter = iter([tensor.detach().clone() for tensor in module.call.tensors])
        self.values: dict[fx.Node, dict[fx.Node, Any]] = {}
        called = ([n for n in nodes if n.op == "call_module" and not alone] for nodes in operators)
        left = {[*c, nodes[-1]][0]: nodes for c, nodes in zip(called, operators, strict=True)}
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            for node in module.graph_module.graph.nodes:
                if node in left:
                    self._note(module, left.pop(node))
                if not left:
                    break
                if any(argument in without for argument in node.all_input_nodes):
                    without.add(node)
                if node not in without or node.op == "placeholder":  # which takes its turn
                    self.env[node] = self.run_node(node)

    def _note(self, module: TracedModule, nodes: Sequence[fx.Node]) -> None:
        inside = set(nodes)
        read = {node for inner in nodes for node in inner.all_input_nodes if node not in inside}
        self.values[nodes[0]] = {
            node: map_tensors(lambda t: t.detach().clone(), self.env[node])
            for node in read & self.env.keys()
            if module.facts.nodes[node].values
        }

    def fetch_attr(self, target: str) -> Any:
        """A copy of the model's parameter, buffer or submodule, where the example is."""
        if target not in self._copies:
            value = super().fetch_attr(target)
            if isinstance(value, torch.Tensor):
                value = value.detach().to(self._home, copy=True)
            elif isinstance(value, torch.nn.Module):
                value = copy.deepcopy(value).to(self._home)
            self._copies[target] = value
        return self._copies[target]

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.fetch_attr(str(target))(*args, **kwargs)


def _is_knowable(values: Sequence[Value]) -> bool:
    """True if they may follow from the example: without gradients, and not too large."""
    if not values or any(value.requires_grad for value in values):
        return False
    return sum(value.nbytes for value in values) <= _MAX_KNOWN_BYTES
