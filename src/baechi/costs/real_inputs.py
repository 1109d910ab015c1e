"""The real inputs of an operator that fails on made-up ones: the model is run up to it."""

import copy
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import fx
from torch.utils import _pytree as pytree

from baechi.tracing.lowering import TracedModule


def real_operands(
    module: TracedModule, nodes: Sequence[fx.Node], device: torch.device
) -> dict[fx.Node, Any]:
    """The values that an operator reads in a run of the traced model on its example.

    The model itself stays as it is: state that is written is copied first. Needs the memory of a
    forward up to there.

    Args:
        module: The traced model; its parameters must have values.
        nodes: The operator's.
        device: Where the values shall be.
    """
    inside = set(nodes)
    wanted = {node for inner in nodes for node in inner.all_input_nodes if node not in inside}
    runner = _Prefix(module, inside)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        runner.run_up_to(nodes[-1])
    facts = module.facts.nodes
    return {
        node: _anew(runner.env[node], device, [v.requires_grad for v in facts[node].values])
        for node in wanted
        if facts[node].values
    }


@final
class _Prefix(fx.Interpreter):
    """Runs what comes before an operator and does not need it."""

    def __init__(self, module: TracedModule, without: set[fx.Node]) -> None:
        super().__init__(module.graph_module, garbage_collect_values=False)
        self._without = set(without)
        self._copies: dict[str, Any] = {}
        tensors = [*module.call.tensors, *module.model.parameters()]
        self._home = next((tensor.device for tensor in tensors), torch.device("cpu"))
        self.args_iter = iter([tensor.detach().clone() for tensor in module.call.tensors])
        self._graph = module.graph_module.graph

    def run_up_to(self, last: fx.Node) -> None:
        for node in self._graph.nodes:
            if node is last:
                return
            if any(argument in self._without for argument in node.all_input_nodes):
                self._without.add(node)
            if node not in self._without or node.op == "placeholder":  # which takes its turn
                self.env[node] = self.run_node(node)

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


def _anew(value: Any, device: torch.device, differentiable: Sequence[bool]) -> Any:
    """The value's tensors as leaves of their own, with the same strides."""
    flags = iter(differentiable)
    return pytree.tree_map_only(
        torch.Tensor,
        lambda t: t.detach().clone().to(device).requires_grad_(next(flags)),
        value,
    )
