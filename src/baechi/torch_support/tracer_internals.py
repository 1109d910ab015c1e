"""Private names of torch's tracers: operators, fake tensors, dispatch, `torch.export`, torch.func.

Seen to work with torch 2.11 and 2.13; `tests/torch_support/test_torch_internals.py` names the one
that a new version breaks.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import nn
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_impls import op_implementations_dict as fake_kernels
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.function import _SingleLevelFunction
from torch.export.custom_ops import _call_custom_autograd_function_in_pre_dispatch
from torch.fx.experimental.proxy_tensor import track_tensor_tree
from torch.jit._script import RecursiveScriptModule
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "OpOverload",
    "OpOverloadPacket",
    "RecursiveScriptModule",
    "TorchDispatchMode",
    "fake_kernels",
    "track_tensor_tree",
]

# The class whose `apply` every `torch.autograd.Function` inherits.
FunctionBase: Any = _SingleLevelFunction
# The only function that the verifier of torch.export lets pass; its node may stand for any other.
held_function: Any = _call_custom_autograd_function_in_pre_dispatch
# An operator as the dispatcher calls it, its arguments, its keyword arguments, and its result.
Seen = Callable[[Any, tuple[Any, ...], Mapping[str, Any], Any], None]


@final
class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells of every operator that runs inside, after it ran."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen = seen

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._seen(func, args, kwargs or {}, result)
        return result


def packet_of(operator: OpOverload) -> Any:
    """The operator without its overload, such as `torch.ops.aten.mm`."""
    return operator._overloadpacket


def writes_arguments(operator: OpOverload) -> bool:
    """True if the operator's schema says that it writes to one of its arguments."""
    return bool(operator._schema.is_mutable)


def has_own_operators(kind: Any) -> bool:
    """True if a class of tensors overrides torch's functions (`__torch_function__`)."""
    own = kind.__torch_function__
    usual = torch.Tensor.__torch_function__.__func__  # type: ignore[attr-defined]
    return own is not torch._C._disabled_torch_function_impl and own.__func__ is not usual


@contextmanager
def untraced() -> Iterator[None]:
    """Run operators inside as if no tracer were there."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def export_mode() -> Any:
    """The mode by which `torch.export` records operators; None where it does not run."""
    key = torch._C._TorchDispatchModeKey.PROXY
    return torch._ops._get_dispatch_mode_pre_dispatch(key)  # type: ignore[no-untyped-call]


@contextmanager
def below_export() -> Iterator[None]:
    """Run operators inside on fake tensors for the shapes alone: `torch.export` records none.

    As torch's own `allow_in_pre_dispatch_graph`.
    """
    pre = torch._C.DispatchKey.PreDispatch
    include = torch._C._dispatch_tls_local_include_set().remove(pre)
    exclude = torch._C._dispatch_tls_local_exclude_set() | torch._C.DispatchKeySet(pre)
    with torch._C._ForceDispatchKeyGuard(include, exclude), torch._C.DisableTorchFunction():
        yield


@contextmanager
def tracers_ended() -> Iterator[None]:
    """Trace inside; what a tracer that failed began is over afterwards.

    That is levels of torch.func, a ban on hooks of saved tensors, and a hook on all modules (2.11).
    """
    depth = torch._C._functorch.get_dynamic_layer_stack_depth()
    banned = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    hooks = nn.modules.module._global_buffer_registration_hooks
    known = set(hooks)
    try:
        yield
    finally:
        for key in hooks.keys() - known:
            del hooks[key]
        if banned is None:
            torch._C._autograd._saved_tensors_hooks_enable()
        torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
