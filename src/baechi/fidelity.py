"""What torch's tracers lose without a word: kept in the graph, or refused.

    a custom autograd.Function   its forward is inlined and its backward forgotten: kept as one node
    reentrant checkpointing      is such a function around a callable: traced through
    a buffer that is replaced    the new value is forgotten: written into the buffer
    torch.inference_mode         lets gradients through: traced as `torch.no_grad`
    Tensor.register_hook, and a module's backward hooks, are forgotten: refused
    a tensor put into the model  stays there as a fake: taken out
    torch.func in a failed trace leaves its transforms on: ended

Seen with torch 2.13; `tests/test_fidelity.py` tells when a tracer keeps one of them itself.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import _SingleLevelFunction
from torch.autograd.grad_mode import inference_mode
from torch.export.custom_ops import _call_custom_autograd_function_in_pre_dispatch as _held
from torch.fx.experimental.proxy_tensor import track_tensor_tree
from torch.nn.modules._functions import BackwardHookFunction
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointFunction

_Function = type[torch.autograd.Function]


@contextmanager
def faithful(*, keep: bool = True) -> Iterator["Kept"]:
    """While a tracer runs: keep what it would lose.

    Args:
        keep: Whether the tracer can take custom functions as nodes; else they are refused.
    """
    kept = Kept(keep)
    with (
        _replaced(_SingleLevelFunction, "apply", classmethod(kept.apply)),
        _replaced(torch.Tensor, "register_hook", _refuse_hook),
        _replaced(inference_mode, "__enter__", _enter_no_grad),
        _replaced(inference_mode, "__exit__", _exit_no_grad),
    ):
        yield kept


@final
class Kept:
    """Custom functions of one capture, as targets of fx nodes."""

    def __init__(self, keep: bool) -> None:
        self._keep = keep
        self._targets: dict[_Function, Callable[..., Any]] = {}

    def apply(self, function: _Function, *args: Any) -> Any:
        """What `Function.apply` does while a tracer runs."""
        leaves = pytree.tree_leaves(args)
        traced = any(isinstance(leaf, FakeTensor | fx.Proxy) for leaf in leaves)
        if traced and function is CheckpointFunction:
            run, _, *rest = args  # the callable, whether to keep the random state, its arguments
            return run(*rest)
        if traced and function is BackwardHookFunction:
            raise NotImplementedError("a module has a backward hook, which a trace would lose")
        proxy = next((leaf for leaf in leaves if isinstance(leaf, fx.Proxy)), None)
        if traced and not self._keep:
            raise NotImplementedError(
                f"the custom autograd function {function.__name__} would lose its backward"
            )
        if proxy is not None:
            return proxy.tracer.create_proxy("call_function", self._target(function), args, {})
        mode = _proxy_mode()
        if not traced or mode is None:
            return _apply(function, args)
        # As torch's own `allow_in_pre_dispatch_graph`: below the tracer, for the shapes alone.
        pre = torch._C.DispatchKey.PreDispatch
        include = torch._C._dispatch_tls_local_include_set().remove(pre)
        exclude = torch._C._dispatch_tls_local_exclude_set() | torch._C.DispatchKeySet(pre)
        with torch._C._ForceDispatchKeyGuard(include, exclude), torch._C.DisableTorchFunction():
            result = _apply(function, args)
        self._target(function)
        name = str(list(self._targets).index(function))
        row = (name, *pytree.tree_map(mode.tracer.unwrap_proxy, args))
        # The only function that the verifier of torch.export lets pass.
        node = mode.tracer.create_proxy("call_function", _held, row, {})
        track_tensor_tree(result, node, constant=None, tracer=mode.tracer)
        return result

    def restore(self, module: fx.GraphModule) -> None:
        """Give the nodes of an exported graph the functions that they stand for."""
        targets = list(self._targets.values())
        for node in module.graph.nodes:
            if node.op == "call_function" and node.target is _held:
                name, *args = node.args
                node.target, node.args = targets[int(name)], tuple(args)

    def _target(self, function: _Function) -> Callable[..., Any]:
        def target(*args: Any) -> Any:
            return function.apply(*args)  # type: ignore[no-untyped-call]

        target.__module__, target.__qualname__ = function.__module__, function.__qualname__
        target.__name__ = function.__name__
        return self._targets.setdefault(function, target)


def _proxy_mode() -> Any:
    """What torch.export records with before autograd, if it does."""
    key = torch._C._TorchDispatchModeKey.PROXY
    return torch._ops._get_dispatch_mode_pre_dispatch(key)  # type: ignore[no-untyped-call]


def _apply(function: Any, args: tuple[Any, ...]) -> Any:
    return super(_SingleLevelFunction, function).apply(*args)


_register_hook: Any = torch.Tensor.register_hook


def _refuse_hook(self: Any, hook: Callable[..., Any]) -> Any:
    if isinstance(self, FakeTensor):
        raise NotImplementedError("forward calls Tensor.register_hook, which a trace would lose")
    return _register_hook(self, hook)


def _enter_no_grad(self: Any) -> None:
    self.before = torch.is_grad_enabled()
    if self.mode:
        torch.set_grad_enabled(False)


def _exit_no_grad(self: Any, *error: Any) -> None:  # noqa: ARG001
    torch.set_grad_enabled(self.before)


@contextmanager
def buffers_in_place(model: nn.Module, *, keep: bool = True) -> Iterator[None]:
    """Run a forward so that each buffer is the same tensor after, with what replaced it inside.

    Raises:
        NotImplementedError: The new value has another shape or type; or nothing shall be kept.
    """
    owners = [(module, dict(module._buffers)) for module in model.modules()]
    yield
    for module, before in owners:
        for name, buffer in before.items():
            value = module._buffers.get(name)
            if value is buffer or buffer is None:
                continue
            module._buffers[name] = buffer
            shape = None if value is None else (value.shape, value.dtype)
            if value is None or not keep or shape != (buffer.shape, buffer.dtype):
                raise NotImplementedError(f"forward replaces buffer {name!r}, which would be lost")
            with torch.no_grad():
                buffer.copy_(value)


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Trace inside; the model and the state of torch.func are as before."""
    attributes = [(module, dict(vars(module))) for module in model.modules()]
    depth = torch._C._functorch.get_dynamic_layer_stack_depth()
    hooks_off = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    try:
        yield
    finally:
        if hooks_off is None:
            torch._C._autograd._saved_tensors_hooks_enable()
        torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
        for module, before in attributes:
            for name, value in list(vars(module).items()):
                if value is not before.get(name) and _holds_fake(value):
                    if name in before:
                        vars(module)[name] = before[name]
                    else:
                        del vars(module)[name]


def _holds_fake(value: Any) -> bool:
    return any(isinstance(leaf, FakeTensor | fx.Proxy) for leaf in pytree.tree_leaves(value))


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute of a class has another value; after, it is as it was."""
    own = name in vars(owner)
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
