"""The devices of parameters and buffers, which later plans of other shapes of call keep.

An optimizer keeps its state beside a parameter, and nothing moves that along. So the first plan
decides where a parameter lives, and later plans place operators around it.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from baechi.records.cluster import Cluster, Constraints
from baechi.traced.traced_model import Traced
from baechi.tracing.lowering import TracedModule
from baechi.tracing.partition import attribute
from baechi.tracing.subgraph import opaque_leaves

ParameterDevices = Mapping[torch.Tensor, int]


def devices_of_state(module: TracedModule, devices: Sequence[int]) -> dict[torch.Tensor, int]:
    """Every parameter, buffer and constant with the logical device of the operators that own it.

    `devices` are those of every operator, or of more.
    """
    homes: dict[torch.Tensor, int] = {}
    for nodes, device in zip(module.nodes, devices, strict=False):
        for tensor in _state_of(module, nodes):
            homes.setdefault(tensor, device)
    return homes


def _state_of(module: TracedModule, nodes: Sequence[fx.Node]) -> list[torch.Tensor]:
    inside = set(nodes)
    tensors = []
    for node in nodes:
        for argument in [node, *node.all_input_nodes]:
            # A buffer that travels lives where its own operator is.
            if argument.op == "get_attr" and (
                argument in inside or argument not in module.travelling
            ):
                value: Any = attribute(module.graph_module, str(argument.target))
                tensors += [value] if isinstance(value, torch.Tensor) else []
    for leaf in opaque_leaves(module.graph_module, nodes).values():
        tensors += [*leaf.parameters(), *leaf.buffers()]
    return tensors


def pinned(
    traced: Traced, cluster: Cluster, homes: ParameterDevices, constraints: Constraints | None
) -> Constraints | None:
    """The constraints, and that every reader of a pinned tensor runs in the memory that has it.

    `homes` are the tensors that must stay, with their devices.
    """
    forbidden: dict[str, set[str]] = defaultdict(set)
    for op, nodes in zip(traced.ops, traced.module.nodes, strict=True):
        for tensor in _state_of(traced.module, nodes):
            if tensor in homes:
                home = cluster.devices[homes[tensor]]
                forbidden[op.name].update(
                    device.name
                    for device in cluster.devices
                    if device is not home and not (home.pool and device.pool == home.pool)
                )
    if not forbidden:
        return constraints
    rest = constraints or Constraints()
    for name, devices in rest.forbidden.items():
        forbidden[name].update(devices)
    return replace(rest, forbidden={name: tuple(rows) for name, rows in forbidden.items()})
