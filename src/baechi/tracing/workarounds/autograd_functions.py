"""Custom autograd functions as nodes of a traced graph, each with its own backward.

A tracer inlines their forward, and autograd would then differentiate that: what a backward written
by hand says is lost. So while a tracer runs, `apply` records the function itself.

Seen with torch 2.13: https://github.com/pytorch/pytorch/issues/106388. To be removed when
`test_custom_functions.py::test_torch_still_loses_the_backward` fails on the oldest torch that
we take.
"""

from collections.abc import Callable
from typing import Any, Final, final

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import _SingleLevelFunction
from torch.export.custom_ops import _call_custom_autograd_function_in_pre_dispatch as _held
from torch.fx.experimental.proxy_tensor import track_tensor_tree
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointFunction


@final
class CustomFunctions:
    """Those of one capture, as targets of fx nodes."""

    # Whose `apply` to replace: the base's, as `apply = Mine.apply` may have been taken long ago.
    BASE: Final[Any] = _SingleLevelFunction

    def __init__(self) -> None:
        self._targets: dict[type, Callable[..., Any]] = {}

    def apply(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """`Function.apply` while a tracer runs.

        Raises:
            RuntimeError: The function cannot be kept.
        """
        leaves = pytree.tree_leaves((args, kwargs))
        proxy = next((leaf for leaf in leaves if isinstance(leaf, fx.Proxy)), None)
        traced = proxy is not None or any(isinstance(leaf, FakeTensor) for leaf in leaves)
        if not traced or function.__module__.startswith("torch._library"):  # behind one operator
            return _apply(function, *args, **kwargs)
        if function is CheckpointFunction and proxy is None:
            return _run_checkpointed(*args)
        if function is CheckpointFunction:
            raise RuntimeError(
                f"the backward of the autograd function {function.__name__} would be lost"
            )
        if proxy is not None:
            target = self._target(function)
            return proxy.tracer.create_proxy("call_function", target, args, kwargs)
        key = torch._C._TorchDispatchModeKey.PROXY
        mode: Any = torch._ops._get_dispatch_mode_pre_dispatch(key)  # type: ignore[no-untyped-call]
        if mode is None:
            return _apply(function, *args, **kwargs)
        return self._record(mode, function, *args, **kwargs)

    def _record(self, mode: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        # As torch's own `allow_in_pre_dispatch_graph`: below the tracer, for the shapes alone.
        pre = torch._C.DispatchKey.PreDispatch
        include = torch._C._dispatch_tls_local_include_set().remove(pre)
        exclude = torch._C._dispatch_tls_local_exclude_set() | torch._C.DispatchKeySet(pre)
        with torch._C._ForceDispatchKeyGuard(include, exclude), torch._C.DisableTorchFunction():
            result = _apply(function, *args, **kwargs)
        self._target(function)
        name = str(list(self._targets).index(function))
        args, kwargs = pytree.tree_map(mode.tracer.unwrap_proxy, (args, kwargs))
        # The only function that the verifier of torch.export lets pass.
        node = mode.tracer.create_proxy("call_function", _held, (name, *args), kwargs)
        track_tensor_tree(result, node, constant=None, tracer=mode.tracer)
        return result

    def restore(self, module: fx.GraphModule) -> None:
        """Give the nodes of an exported graph the functions that they stand for."""
        targets = list(self._targets.values())
        # Regions without gradients, or with autocast, are modules of their own.
        for part in module.modules():
            if isinstance(part, fx.GraphModule):
                for node in part.graph.find_nodes(op="call_function", target=_held):
                    name, *args = node.args
                    node.target, node.args = targets[int(name)], tuple(args)
                part.recompile()

    def _target(self, function: Any) -> Callable[..., Any]:
        def target(*args: Any, **kwargs: Any) -> Any:
            return function.apply(*args, **kwargs)

        target.__module__, target.__qualname__ = function.__module__, function.__qualname__
        target.__name__ = function.__name__
        return self._targets.setdefault(function, target)


def _apply(function: Any, *args: Any, **kwargs: Any) -> Any:
    return super(_SingleLevelFunction, function).apply(*args, **kwargs)


def _run_checkpointed(run: Callable[..., Any], _: bool, *args: Any) -> Any:
    """Reentrant checkpointing as if it were not there; it has gradients if its arguments have."""
    flows = any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
    with torch.set_grad_enabled(flows and torch.is_grad_enabled()):
        return run(*args)
