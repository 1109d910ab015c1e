"""Private names of `torch.nn.Module`.

Seen to work with torch 2.11 and 2.13; `tests/torch_support/test_internals.py` names the one that a
new version breaks.
"""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn

# Where torch keeps what a compiled module does when it is called; it is never pickled or copied.
CALL: Final = "_compiled_call_impl"


def plain_call(module: nn.Module) -> Callable[..., Any]:
    """The call of a module that is not compiled: hooks and forward."""
    call: Callable[..., Any] = module._call_impl
    return call


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """The module's own buffers, by name; a write changes the module."""
    return module._buffers


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The module's own parameters, by name; a write changes the module."""
    return module._parameters


def submodules_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """The module's own submodules, by name; a write changes the module."""
    return module._modules


def share_state(module: nn.Module, owner: nn.Module) -> None:
    """Make the parameters, buffers and submodules of `owner` those of `module`, too."""
    module._parameters = owner._parameters
    module._buffers = owner._buffers
    module._modules = owner._modules
    module._non_persistent_buffers_set = owner._non_persistent_buffers_set


def hooks_of(module: nn.Module, kind: str) -> dict[int, Callable[..., Any]]:
    """The module's hooks of one kind, such as `_forward_hooks`."""
    hooks: dict[int, Callable[..., Any]] = getattr(module, kind)
    return hooks


def global_hooks(kind: str) -> dict[int, Callable[..., Any]]:
    """The hooks of one kind, such as `_forward_hooks`, on all modules."""
    hooks: dict[int, Callable[..., Any]] = getattr(nn.modules.module, f"_global{kind}")
    return hooks
