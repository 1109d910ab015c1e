"""What a trace would lose without a word, refused by name.

A trace keeps the operators that a call runs, and autograd differentiates those. Lost would be what
only autograd or Python sees: backward hooks, gradients made by hand, and hooks that look and
return nothing. What is inside a submodule that stays whole is not lost: it runs as it is. So where
a submodule can still stay whole, `watched` raises an error that sends a tracer to its next rung.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from baechi.errors import TraceError

_BACKWARD: Final = ("_backward_hooks", "_backward_pre_hooks")
_FORWARD: Final = ("_forward_hooks", "_forward_pre_hooks")
_BASE: Final[Any] = torch.autograd.function._SingleLevelFunction
_LOCK: Final = threading.RLock()  # one tracer at a time: it changes classes of torch
_INSTEAD: Final = "Remove it, or place the model without it"


class LostError(RuntimeError):
    """A rung cannot take this; the next may, which leaves a submodule whole."""


def refuse_unfaithful(model: nn.Module) -> None:
    """Refuse what no trace keeps.

    Raises:
        TraceError: The model is scripted, a parameter is lazy, or there is a backward hook or a
            hook on all modules.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise TraceError(
            f"the model is a {type(model).__name__} and has no Python to trace; give the module "
            "that was scripted."
        )
    for kind in (*_BACKWARD, *_FORWARD):
        if getattr(nn.modules.module, f"_global{kind}"):
            raise TraceError(
                f"torch has hooks on all modules ({_words(kind)}), which a placed model would not "
                "run. Remove them before tracing."
            )
    for name, module in model.named_modules():
        for kind in _BACKWARD:
            for hook in getattr(module, kind).values():
                raise TraceError(
                    f"{_title(model, name)} has a {_words(kind)[:-1]}, {_name(hook)}, which a "
                    f"placed model would not run. {_INSTEAD}; hooks on the placed module itself, "
                    "and post-accumulate hooks of parameters, work."
                )
    for name, parameter in model.named_parameters():
        refuse_hooked(name, parameter)
        if nn.parameter.is_lazy(parameter):
            raise TraceError(
                f"parameter {name!r} has no shape yet; run the model once, then trace it."
            )


def refuse_hooked(name: str, parameter: torch.Tensor) -> None:
    """Refuse a parameter whose gradient a hook changes: each part of a sum would be changed.

    Raises:
        TraceError: There is such a hook.
    """
    if parameter._backward_hooks:
        raise TraceError(
            f"parameter {name!r} has a hook on its gradient (register_hook), which would run once "
            "for every part of the model that reads it. Use register_post_accumulate_grad_hook, "
            "which runs as on the unsplit model."
        )


@contextmanager
def watched(model: nn.Module) -> Iterator[list[str]]:
    """While a tracer runs the model's Python: raise where something would be lost.

    Yields:
        What was lost without an error: hooks that returned nothing.
    """
    lost: list[str] = []
    with _LOCK, ExitStack() as stack:
        for name, module in model.named_modules():
            for kind in _FORWARD:
                hooks = getattr(module, kind)
                for key, hook in list(hooks.items()):
                    if not getattr(hook, "__module__", "").startswith("torch.nn."):
                        title = f"the {_words(kind)[:-1]} {_name(hook)} of {_title(model, name)}"
                        hooks[key] = _noting(hook, title, lost)
                        stack.callback(hooks.__setitem__, key, hook)
        # The base's, since `apply = MyFunction.apply` may have been taken long ago.
        apply = _here(_apply, lambda cls, *args, **kwargs: super(_BASE, cls).apply(*args, **kwargs))
        stack.enter_context(patch.object(_BASE, "apply", classmethod(apply), create=True))
        for name in ("register_hook", "retain_grad"):
            refused = _here(_refused(f"Tensor.{name}"), getattr(torch.Tensor, name))
            stack.enter_context(patch.object(torch.Tensor, name, refused))
        own = saved_tensors_hooks.__enter__
        enter = _here(_checked_enter(own), own)
        stack.enter_context(patch.object(saved_tensors_hooks, "__enter__", enter))
        yield lost


def refuse_lost(lost: list[str]) -> None:
    """Refuse hooks that returned nothing.

    Raises:
        TraceError: There are some.
    """
    if lost:
        raise TraceError(
            f"{lost[0]} returned nothing when the model was traced: a placed model would not run "
            f"it. {_INSTEAD}; or let it return the output (or the arguments), if all it does is "
            "in tensors: it is then traced with the model."
        )


def _here(checked: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
    """In this thread the one, in all others, which may be training, the other."""
    tracer = threading.get_ident()

    def either(*args: Any, **kwargs: Any) -> Any:
        return (checked if threading.get_ident() == tracer else own)(*args, **kwargs)

    return either


def _noting(hook: Callable[..., Any], title: str, lost: list[str]) -> Callable[..., Any]:
    def noting(*args: Any, **kwargs: Any) -> Any:
        result = hook(*args, **kwargs)
        if result is None and title not in lost:
            lost.append(title)
        return result

    return noting


def _apply(cls: type, *args: Any, **kwargs: Any) -> Any:
    """An autograd function's `apply` that raises where its backward counts."""
    values = [*args, *kwargs.values()]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    plain = not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors)
    # What has no tensors has proxies. What torch.library makes is behind one operator.
    if (tensors and plain) or cls.__module__.startswith("torch._library"):
        return super(_BASE, cls).apply(*args, **kwargs)
    if cls.__module__ == "torch.utils.checkpoint":
        raise TraceError(
            "the model uses reentrant checkpointing, whose gradients a trace would lose; give "
            "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
        )
    raise LostError(
        f"the backward of the autograd function {cls.__name__} would be lost; put it in a "
        "submodule, which then stays whole, or make it a torch.library.custom_op with "
        "register_autograd"
    )


def _refused(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:  # noqa: ARG001 (of any call)
        raise LostError(
            f"what {name} asks for inside forward would be lost; put it in a submodule, which then "
            "stays whole"
        )

    return refuse


def _checked_enter(own: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def enter(hooks: Any) -> Any:
        # torch's own, such as checkpointing's and `save_on_cpu`, change no value.
        if type(hooks) is saved_tensors_hooks or not type(hooks).__module__.startswith("torch."):
            _refused("saved_tensors_hooks")()
        return own(hooks)

    return enter


def _words(kind: str) -> str:
    return kind.strip("_").replace("_", " ")


def _title(model: nn.Module, name: str) -> str:
    return f"module {name!r}" if name else f"the {type(model).__name__}"


def _name(hook: Any) -> str:
    return getattr(hook, "__qualname__", type(hook).__name__)
