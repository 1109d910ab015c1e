"""A placed model for one shape of call, and which calls these are."""

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn

from baechi.calls import Call
from baechi.devices import Cluster
from baechi.faithfulness import HOOKS
from baechi.graph import OpGraph
from baechi.metering import Meter
from baechi.partition import attribute
from baechi.placement import Placement
from baechi.runtime.executables import Executable
from baechi.traced import Traced


@final
@dataclass(frozen=True, eq=False)
class Specialization:
    """A placed model for one shape of call.

    Attributes:
        traced: What was traced.
        placement: Where it went.
        graph: What was placed, where known.
        cluster: On what, where known.
        executable: What runs.
    """

    traced: Traced
    placement: Placement
    graph: OpGraph | None
    cluster: Cluster | None
    executable: Executable

    @property
    def n_devices(self) -> int:
        """How many logical devices there are; those that are used, where more are unknown."""
        if self.cluster is not None:
            return len(self.cluster.devices)
        return max(self.placement.devices, default=0) + 1

    def hold_state(
        self, model: nn.Module, meter: Meter, optimizer: torch.optim.Optimizer | None
    ) -> None:
        """Count parameters, buffers, gradients and optimizer state on their logical devices."""
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        constants = self.traced.module.graph_module
        for op, device in zip(self.traced.ops, self.placement.devices, strict=False):
            for name in op.parameters:
                tensor = named[name] if name in named else attribute(constants, name)
                meter.hold(device, tensor)
                if tensor.grad is not None:
                    meter.hold(device, tensor.grad)
                if optimizer is not None:
                    for value in optimizer.state.get(tensor, {}).values():
                        if isinstance(value, torch.Tensor):
                            meter.hold(device, value)


def call_key(model: nn.Module, call: Call) -> tuple[Any, ...]:
    """Equal keys can run the same specialization: the call's own, submodules, modes and hooks."""
    modules = tuple(model.modules())
    every = [getattr(nn.modules.module, f"_global{kind}") for kind in HOOKS]
    own = [getattr(module, kind) for module in modules for kind in HOOKS]
    hooks = tuple(tuple(hooks) for hooks in (*every, *own) if hooks)
    return (call.key, modules, tuple(module.training for module in modules), hooks)
