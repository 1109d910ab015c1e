"""Effects that only Python or autograd sees: kept by a trace, or refused by name.

A trace keeps the operators that a call runs, and autograd differentiates those. It would lose
backward hooks and gradients made by hand; hooks that return nothing become nodes (`observers`).
Nothing is lost inside a submodule that stays whole, since that runs as it is. So where a submodule
can still stay whole, `watched` raises an error that is no `TraceError`, and the ladder tries its
next rung.

Seen with torch 2.13; `tests/tracing/test_faithfulness.py` has a case of each.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from types import FrameType
from typing import Any, Final, NoReturn
from unittest.mock import patch

import torch
from torch import fx, nn
from torch.autograd.grad_mode import inference_mode
from torch.autograd.graph import saved_tensors_hooks

from baechi.errors import TraceError
from baechi.torch_support.torch_internals import attention_kernels, hooks_of
from baechi.torch_support.tracer_internals import (
    APPLY_IS_NATIVE,
    TRACER_CHECK,
    VMAP,
    FakeTensor,
    FunctionBase,
    held_nodes_kept,
    layers_fuse,
)
from baechi.tracing.calling_convention import Call
from baechi.tracing.guards import GradientMode
from baechi.tracing.model_code import OURS, package_of
from baechi.tracing.observers import FORWARD, observes, recording, serves_inside
from baechi.tracing.workarounds import (
    CHECKPOINT,
    HeldNodes,
    checkpointed,
    contiguity_read,
    contiguous,
    is_of_new_leaves,
    mapped,
    strides_read,
)

_BACKWARD: Final = ("_backward_hooks", "_backward_pre_hooks")
HOOKS: Final = (*_BACKWARD, *FORWARD)
# What changes the state of a generator, which happens when a tracer runs, and in no call.
_SEEDING: Final = {"manual_seed", "seed", "set_rng_state", "fork_rng"}
_LOCK: Final = threading.RLock()  # one tracer at a time: it changes classes of torch
# By which a module's attributes are read all at once.
_WHOLE: Final = ("__dict__", "__getstate__", "__reduce__")
_INSTEAD: Final = "Remove it, or place the model without it"


def refuse_unfaithful(model: nn.Module) -> None:
    """Refuse what no trace keeps.

    Raises:
        TraceError: The model or a part of it is scripted, a parameter is lazy, or there is a
            backward hook or a hook on all modules.
    """
    refuse_scripted(model)
    for kind in HOOKS:
        if hooks_of(None, kind):
            raise TraceError(
                f"torch has hooks on all modules ({_words(kind)}), which a placed model would not "
                "run. Remove them before tracing."
            )
    for name, module in model.named_modules():
        for kind in _BACKWARD:
            for hook in hooks_of(module, kind).values():
                raise TraceError(
                    f"{_title(model, name)} has a {_words(kind)[:-1]}, {_name(hook)}, which a "
                    f"placed model would not run. {_INSTEAD}; forward hooks on the placed module, "
                    "and hooks on parameters, work."
                )
    for name, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise TraceError(
                f"parameter {name!r} has no shape yet; run the model once, then trace it."
            )


def refuse_scripted(model: nn.Module) -> None:
    """Raise a `TraceError` for a model that is scripted or has a scripted part."""
    if isinstance(model, torch.jit.ScriptModule):
        raise TraceError(
            f"the model is a {type(model).__name__} and has no Python to trace; give the module "
            "that was scripted."
        )
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise TraceError(
                f"module {name!r} comes from torch.jit (script, trace, load) and has no Python to "
                "trace; put the module that it was made of in its place."
            )


@contextmanager
def watched(model: nn.Module, mode: GradientMode) -> Iterator[HeldNodes]:
    """While a tracer runs the model's Python: keep what it would lose, or raise.

    Yields the custom functions that became nodes. The model's code sees the caller's `mode`.

    Raises:
        RuntimeError: Something would be lost, unless a submodule stays whole.
        TraceError: A hook returned nothing, at the end.
    """
    lost: list[str] = []
    functions = HeldNodes(model)
    with _LOCK, ExitStack() as stack:
        for name, module in model.named_modules():
            for kind in FORWARD:
                hooks = hooks_of(module, kind)
                for number, (key, hook) in enumerate(list(hooks.items())):
                    if not serves_inside(hook):
                        title = f"the {_words(kind)[:-1]} {_name(hook)} of {_title(model, name)}"
                        hooks[key] = (
                            recording(hook, (kind, key, number), title, functions.observe)
                            if observes(hook)
                            else _noting(hook, title, lost)
                        )
                        stack.callback(hooks.__setitem__, key, hook)

        def replace(owner: Any, name: str, checked: Callable[..., Any]) -> None:
            function = _here(checked, getattr(owner, name))
            stack.enter_context(patch.object(owner, name, function))

        stack.enter_context(held_nodes_kept())
        # Of the base, as `apply = Mine.apply` may have been taken long ago; it leaves alone what is
        # not being traced.
        apply = classmethod(functions.apply)
        stack.enter_context(patch.object(FunctionBase, "apply", apply, create=True))
        if APPLY_IS_NATIVE:

            def look_up(function: Any, name: str) -> Any:
                found = type.__getattribute__(function, name)
                return functions.forward(function, found) if name == "forward" else found

            stack.enter_context(patch.object(type(FunctionBase), "__getattribute__", look_up))
        for name in ("register_hook", "retain_grad"):
            replace(torch.Tensor, name, _refused)
        for owner in (torch, torch.random):
            for name in _SEEDING & vars(owner).keys():
                replace(owner, name, _seeded)
        replace(saved_tensors_hooks, "__enter__", _saving)
        # Every public way to compute gradients calls this function.
        replace(torch.autograd, "_engine_run_backward", _gradients)
        stack.enter_context(patch.object(torch.Tensor, "data", _data(), create=True))
        for name in ("data", "grad", "requires_grad"):  # assigned to a proxy, it is the proxy's
            stack.enter_context(patch.object(fx.Proxy, name, _assigned(name), create=True))
        replace(nn.TransformerEncoder, "forward", partial(_unnested, mode))
        replace(*VMAP, mapped)
        stack.enter_context(checkpoints_watched(model))
        replace(torch.Tensor, "contiguous", contiguous)
        replace(torch, "linspace", functions.spaced)
        replace(torch.Tensor, "is_contiguous", contiguity_read)
        replace(torch.Tensor, "stride", strides_read)
        attend = partial(_attended, attention_kernels())
        replace(nn.functional, "scaled_dot_product_attention", attend)
        # Layers ask both to choose torch's fused kernels, which an eager run takes.
        replace(torch.overrides, "has_torch_function", _overridden)
        replace(*TRACER_CHECK, lambda _: False)
        replace(inference_mode, "__enter__", _enter_no_grad)
        replace(inference_mode, "__exit__", _exit_no_grad)
        replace(torch, "is_grad_enabled", partial(_grad_enabled, mode))
        for name, without in _TELLING.items():
            stack.enter_context(
                patch.object(torch.Tensor, name, _telling(mode, name, without), create=True)
            )
        yield functions
    if lost:
        raise TraceError(
            f"{lost[0]} returned nothing when the model was traced, though by its code it returns "
            "something. Let it end without `return`: then it runs in every call, and is not traced."
        )


def checkpoints_watched(model: nn.Module) -> AbstractContextManager[Any]:
    """Refuse checkpoints of the model's whose backward would do more than compute gradients."""
    return patch.object(*CHECKPOINT, _here(partial(checkpointed, model), getattr(*CHECKPOINT)))


def _noting(hook: Callable[..., Any], title: str, lost: list[str]) -> Callable[..., Any]:
    def noting(*args: Any, **kwargs: Any) -> Any:
        result = hook(*args, **kwargs)
        if result is None and title not in lost:
            lost.append(title)
        return result

    return noting


def _here(checked: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
    """`checked(own, ...)` in this thread, `own` in every other thread (which may be training)."""
    tracer = threading.get_ident()

    def either(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == tracer:
            return checked(own, *args, **kwargs)
        return own(*args, **kwargs)

    return either


def _refuse(name: str) -> NoReturn:
    raise RuntimeError(
        f"what {name} asks for inside forward would be lost; put it in a submodule, which then "
        "stays whole"
    )


def _refused(own: Any, *_: Any, **__: Any) -> NoReturn:
    _refuse(f"Tensor.{own.__name__}")


def _seeded(own: Any, *args: Any, **kwargs: Any) -> Any:
    """Refused to all but torch itself, whose checkpointing does it, and Baechi."""
    if package_of(sys._getframe(2)) not in OURS:
        _refuse(f"torch.{own.__name__}")
    return own(*args, **kwargs)


def _attended(outside: Sequence[bool], own: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
    """What `torch.nn.attention.sdpa_kernel` in forward chooses, which is about all threads."""

    def decided(value: Any) -> Any:
        return bool(value) if isinstance(value, torch.SymBool) else value

    # Its C++ takes no symbol, as of `is_causal=length > 1`.
    args, kwargs = fx.node.map_aggregate((args, kwargs), decided)
    inside, on_cpu = attention_kernels(), isinstance(query, torch.Tensor) and query.is_cpu
    # A CPU has flash attention, which is the first, and plain products, the last.
    mask = kwargs.get("attn_mask", args[2] if len(args) > 2 else None)
    if on_cpu and isinstance(mask, torch.Tensor) and is_of_new_leaves(mask):
        return _by_products(query, *args, **kwargs)  # no flash attention with gradients of masks
    if inside == outside or (on_cpu and inside[0] == outside[0]):
        return own(query, *args, **kwargs)
    if any(inside[:-1]) or isinstance(query, fx.Proxy):
        _refuse("torch.nn.attention.sdpa_kernel")
    return _by_products(query, *args, **kwargs)


def _by_products(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Any:
    """What `SDPBackend.MATH` runs."""
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        zeros = torch.zeros_like(attn_mask, dtype=query.dtype)
        attn_mask = zeros.masked_fill_(attn_mask.logical_not(), -torch.inf)
    given = (query, key, value, attn_mask, dropout_p, is_causal)
    return torch.ops.aten._scaled_dot_product_attention_math(*given, **options)[0]


def _unnested(
    mode: GradientMode,
    own: Callable[..., Any],
    encoder: Any,
    src: Any,
    mask: Any = None,
    src_key_padding_mask: Any = None,
    is_causal: Any = None,
) -> Any:
    """Without gradients such an encoder may drop what is padding: it gives zeros there, then."""
    layers = not encoder.layers[0].training and layers_fuse()
    given = src_key_padding_mask is not None and mask is None
    if given and layers and getattr(encoder, "use_nested_tensor", False):
        frozen = not any(parameter.requires_grad for parameter in encoder.parameters())
        if not mode.read() or frozen:
            raise RuntimeError(
                "a TransformerEncoder in evaluation mode drops padding where nothing needs a "
                "gradient, which no trace does: it has to stay whole. Make it with "
                "enable_nested_tensor=False"
            )
    return own(encoder, src, mask, src_key_padding_mask, is_causal)


def _grad_enabled(mode: GradientMode, own: Callable[[], bool]) -> bool:
    """What the model's code, or torch's layers for it, read is noted."""
    return mode.read() and own() if _models(sys._getframe(2)) else own()


def _models(caller: FrameType) -> bool:
    """True if it runs the model's code, or that of torch's layers for it."""
    name = str(caller.f_globals.get("__name__", ""))
    return name.partition(".")[0] not in OURS or name.startswith("torch.nn.modules.")


# Attributes of computed tensors that tell whether gradients are on, with their values otherwise.
_TELLING: Final = {"requires_grad": False, "grad_fn": None, "is_leaf": True}


def _telling(mode: GradientMode, name: str, without: Any) -> property:
    """Such an attribute while a tracer runs: what the model's code reads of it is noted."""
    own: Any = getattr(torch._C.TensorBase, name)
    is_leaf: Any = torch._C.TensorBase.is_leaf
    tracer = threading.get_ident()

    def read(tensor: Any) -> Any:
        value = own.__get__(tensor)
        if value is without or threading.get_ident() != tracer or not _models(sys._getframe(1)):
            return value
        return value if is_leaf.__get__(tensor) or mode.read() else without

    return property(read, own.__set__)


def _overridden(own: Callable[[Any], bool], tensors: Any) -> bool:
    """To torch's layers what an eager run is told: the tracer is no override."""
    caller = sys._getframe(2).f_globals.get("__name__", "")
    return not layers_fuse() if str(caller).startswith("torch.nn.modules.") else own(tensors)


def _saving(own: Callable[[Any], Any], hooks: Any) -> Any:
    # torch's own, such as checkpointing's and `save_on_cpu`, change no value.
    if type(hooks) is saved_tensors_hooks or not type(hooks).__module__.startswith("torch."):
        _refuse("saved_tensors_hooks")
    return own(hooks)


def _gradients(own: Callable[..., Any], *args: Any, accumulate_grad: bool, **kwargs: Any) -> Any:
    if accumulate_grad:
        _refuse("backward()")
    gradients = own(*args, accumulate_grad=accumulate_grad, **kwargs)
    _, _, _, create_graph, *_ = args
    if create_graph:
        return gradients
    # The tracer has recorded how they came about; nothing shall flow through that.
    return tuple(None if grad is None else grad.detach() for grad in gradients)


def _enter_no_grad(_: Any, block: Any) -> None:
    """Inference mode lets gradients through in a trace; `torch.no_grad` does not."""
    block.before = torch.is_grad_enabled()
    if block.mode:
        torch.set_grad_enabled(False)


def _exit_no_grad(_: Any, block: Any, *__: Any) -> None:
    torch.set_grad_enabled(block.before)


def _data() -> property:
    """`Tensor.data` while a tracer runs, which would see its values as a constant."""
    own: Any = torch._C.TensorBase.data
    tracer = threading.get_ident()

    def is_traced(tensor: Any) -> bool:
        return isinstance(tensor, FakeTensor) and threading.get_ident() == tracer

    def read(tensor: Any) -> Any:
        return tensor.detach() if is_traced(tensor) else own.__get__(tensor)

    def write(tensor: Any, value: Any) -> None:
        # To fx the model's own tensors are real, and forward would write into them once, now.
        in_forward = threading.get_ident() == tracer and _models(sys._getframe(1))
        if in_forward or is_traced(tensor):
            _refuse("Tensor.data = ...")
        own.__set__(tensor, value)

    return property(read, write)


def _assigned(name: str) -> property:
    """An attribute of proxies that can be read, and not assigned."""

    def read(proxy: fx.Proxy) -> fx.Proxy:
        return fx.proxy.Attribute(proxy, name)

    return property(read, lambda *_: _refuse(f"Tensor.{name} = ..."))


def refuse_new_leaves(
    call: Call, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> None:
    """Refuse an argument or a leaf in the result that begins to need a gradient in forward.

    The caller would see that gradient. The tensors are the tracer's, after forward.
    """
    for name, given, tensor in zip(call.names, call.tensors, inputs, strict=True):
        if tensor.requires_grad and tensor.is_leaf and not given.requires_grad:
            raise TraceError(
                f"forward sets requires_grad of its argument {name!r}, which the placed model "
                "would not do to the caller's. Let the caller set it, or let forward detach the "
                "argument first."
            )
    for tensor in outputs:
        new = isinstance(tensor, torch.Tensor) and tensor.requires_grad and tensor.is_leaf
        if new and not isinstance(tensor, nn.Parameter) and all(tensor is not t for t in inputs):
            raise TraceError(
                f"forward returns a tensor of shape {list(tensor.shape)} whose requires_grad it "
                "sets itself: the placed model would give it no gradient. Let it return what it "
                "computed, or let the caller set requires_grad."
            )


def _words(kind: str) -> str:
    return kind.strip("_").replace("_", " ")


def _title(model: nn.Module, name: str) -> str:
    return f"module {name!r}" if name else f"the {type(model).__name__}"


def _name(hook: Any) -> str:
    return getattr(hook, "__qualname__", type(hook).__name__)


@contextmanager
def reads_noted(model: nn.Module) -> Iterator[set[tuple[int, str]]]:
    """Trace inside; gets in the end what was read of modules: names, by ids of module and dict.

    Who takes a module's `__dict__`, or copies it, may read all; torch's own code does not.
    """
    found: set[tuple[int, str]] = set()
    get = nn.Module.__getattribute__

    def read(module: Any, name: str) -> Any:
        # By its dict: torch.export shows a shared module as proxies that have it, too.
        if name not in _WHOLE:
            found.add((id(get(module, "__dict__")), name))
        elif package_of(sys._getframe(1)) not in OURS:
            found.add((id(get(module, "__dict__")), "__dict__"))
        return get(module, name)

    with _LOCK, patch.object(nn.Module, "__getattribute__", read):
        yield found
    owners = {id(vars(module)): id(module) for module in model.modules()}
    others = (m for m in model.modules() if type(m).__getattribute__ is not get)
    found |= {(id(vars(module)), "__dict__") for module in others}  # whose own may go around this
    found |= {(owners[own], name) for own, name in found if own in owners}
