"""Private names of torch: the autograd engine, modules, the compiler, CUDA, and the tracers.

Seen to work with torch 2.11 and 2.13; `tests/torch_support/test_torch_internals.py` names the one
that a new version breaks.
"""

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from threading import get_ident
from traceback import FrameSummary, StackSummary
from types import SimpleNamespace
from typing import Any, Final, final
from unittest.mock import patch

import torch
from torch import fx, nn
from torch._decomp import decompositions
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_impls import op_implementations_dict as fake_kernels
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.meta_utils import MetaTensorDescriber
from torch.autograd.function import _SingleLevelFunction, once_differentiable
from torch.autograd.graph import GradientEdge, _engine_run_backward
from torch.export.custom_ops import _call_custom_autograd_function_in_pre_dispatch
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import track_tensor_tree
from torch.fx.graph import _PyTreeCodeGen
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import checkpoint
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.hooks import RemovableHandle

__all__ = ["FakeTensor", "FakeTensorMode", "HigherOrderOperator", "OpOverload", "OpOverloadPacket"]
__all__ += ["TorchDispatchMode", "enable_python_dispatcher"]
__all__ += ["decompositions", "fake_kernels", "suggest_memory_format", "track_tensor_tree"]

# The autograd engine.


def gradients(
    outputs: Sequence[GradientEdge],
    seeds: Sequence[torch.Tensor],
    inputs: Sequence[GradientEdge | torch.Tensor],
    *,
    keep: bool,
) -> tuple[torch.Tensor | None, ...]:
    """`torch.autograd.grad` without its checks, which take as long as the engine itself.

    `seeds` are the gradients of the outputs. None comes back for an input that is not reached.
    """
    found: tuple[torch.Tensor | None, ...] = _engine_run_backward(
        *(tuple(outputs), tuple(seeds), keep, False, tuple(inputs)),
        allow_unreachable=True,
        accumulate_grad=False,
    )
    return found


class TapeEnd(torch.autograd.Function):
    """The end of a tape's graph: what leaves it, and where its backward begins.

    What the engine is given stays alive as long as it runs. So it is given nothing, and this takes
    the gradients out of a list: then each lives until it is used.
    """

    @staticmethod
    def forward(ctx: Any, seeds: list[torch.Tensor | None], *tensors: torch.Tensor) -> torch.Tensor:
        """A token for all that leaves."""
        ctx.seeds = seeds
        return tensors[0].new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: torch.Tensor) -> tuple[Any, ...]:
        """The gradients in the list."""
        seeds = tuple(ctx.seeds)
        ctx.seeds.clear()
        return (None, *seeds)


_KEPT: Final = (
    "a loss reads a tensor that a hook kept of a placed model, and gradients flow from the model's "
    "outputs alone. Let forward return it (hooks may keep values, `output.detach()`), or work on "
    "placed.unplace()."
)


def cut_off(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The same tensors as the beginning of a graph of their own.

    Leaves would do, but a leaf stays alive as long as its graph, and cannot be written in place.
    This node (torch's own, for `once_differentiable`) shares storage and keeps nothing; backward
    stops at its edges and never runs it.
    """
    node = torch._C._functions.DelayedError(_KEPT, len(tensors) + 1)
    seed = torch.empty(0, requires_grad=True)  # one input must need a gradient for all to have one
    found: Sequence[torch.Tensor] = node(seed, *tensors)
    return found[1:]


def backward_id() -> int:
    """The number of the backward that runs in this thread; -1 outside of one."""
    return int(torch._C._current_graph_task_id())


def run_first(token: torch.Tensor) -> None:
    """Let a backward run the node behind a tensor before all others that it could, as leaves'."""
    node: Any = token.grad_fn
    node._set_sequence_nr(2**64 - 1)


def is_graph_kept() -> bool:
    """True if the running backward was called with `retain_graph=True`."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def version_of(tensor: torch.Tensor) -> int:
    """The number of in-place writes to the tensor's memory."""
    return tensor._version


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Set the number of in-place writes to the tensor's memory, for all its aliases."""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


GRADIENT_HOOKS: Final = "_backward_hooks"  # the attribute that has them, or None


def gradient_hooks(tensor: torch.Tensor) -> dict[int, Any]:
    """The hooks that `register_hook` gave a tensor."""
    return tensor._backward_hooks or {}


def accumulation_hooks(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The hooks that `register_post_accumulate_grad_hook` gave a tensor."""
    return tuple((getattr(tensor, "_post_accumulate_grad_hooks", None) or {}).values())


@contextmanager
def without_gradient_hooks(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Go backward inside without the hooks of tensors, such as optimizers in the backward."""
    both = (hooks for t in tensors for hooks in (t._backward_hooks, t._post_accumulate_grad_hooks))
    with ExitStack() as stack:
        for hooks in filter(None, both):  # autograd has the dictionary itself
            stack.enter_context(patch.dict(hooks, clear=True))
        yield


def watch_hooks(tensor: torch.Tensor) -> dict[int, Any]:
    """A dict that gets all hooks that a tensor with a graph is ever given.

    The hooks run though the tensor is dropped, and so does the dict outlive it.
    """
    hooks: OrderedDict[int, Any] = OrderedDict()
    tensor._backward_hooks = hooks
    assert tensor.grad_fn is not None  # it has a graph
    tensor.grad_fn._register_hook_dict(tensor)
    return hooks


# Hooks on what autograd saves.


def _saved_tensor_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)  # the innermost pack, unpack


def is_hooked() -> bool:
    """True if saved-tensor hooks are active now."""
    return _saved_tensor_hooks() is not None


def is_checkpointed() -> bool:
    """True if `torch.utils.checkpoint(use_reentrant=False)` receives what autograd saves now."""
    hooks = _saved_tensor_hooks()
    return hooks is not None and hooks[0].__module__ == checkpoint.__name__


@contextmanager
def unhooked() -> Iterator[None]:
    """Run the block without the saved-tensor hooks that are on around it, such as checkpointing's.

    The hooks belong to the caller's code; checkpointing would rerun all of that for a tensor that
    the block saved.
    """
    hooks = []
    while (top := _saved_tensor_hooks()) is not None:
        hooks.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pair in reversed(hooks):
            torch._C._autograd._push_saved_tensors_default_hooks(*pair)


# Modules.

# Where torch keeps what a compiled module does when it is called; it is never pickled or copied.
CALL: Final = "_compiled_call_impl"


def plain_call(module: nn.Module) -> Callable[..., Any]:
    """The call of a module that is not compiled: hooks and forward."""
    call: Callable[..., Any] = module._call_impl
    return call


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """The module's own buffers, by name; a write changes the module."""
    return module._buffers


def state_of(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The module's own submodules, parameters and buffers, by name."""
    return module._modules, module._parameters, module._buffers


def default_store() -> Any:
    """The store through which the processes of `torch.distributed` found each other."""
    return torch.distributed.distributed_c10d._get_default_store()


def become(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Give a tensor the memory, device and dtype of another, which gets those of the first.

    The first stays the same Python object with its attributes and hooks. Assigning to `.data` and
    `torch.utils.swap_tensors` refuse a tensor on meta, or one with weak references, as tracers
    leave them.
    """
    hooks, after = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    torch._C._swap_tensor_impl(tensor, other)
    if hooks:  # autograd has them beside the memory, too
        tensor._backward_hooks = hooks
    if after:
        tensor._post_accumulate_grad_hooks = after


def hooks_given() -> int:
    """The number of hooks that modules, tensors and nodes were ever given."""
    return RemovableHandle.next_id


def hooks_of(module: nn.Module | None, kind: str) -> dict[int, Callable[..., Any]]:
    """The module's hooks of one kind, such as `_forward_hooks`; of None those on all modules."""
    if module is None:
        hooks: dict[int, Callable[..., Any]] = getattr(nn.modules.module, f"_global{kind}")
    else:
        hooks = getattr(module, kind)
    return hooks


# `torch.compile`; its parts are imported when something is compiled.


def backend_named(name: Any) -> Any:
    """The compiler behind a backend's name; of a function that function."""
    from torch._dynamo import lookup_backend

    return lookup_backend(name)


def refusals() -> tuple[type[Exception], ...]:
    """The errors by which `torch.compile` says that it cannot compile a function."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    return TorchDynamoException, FailOnRecompileLimitHit


def tracer_errors() -> tuple[type[Exception], ...]:
    """The errors by which a tracer says that it cannot follow what the model's Python asks."""
    from torch._subclasses import fake_tensor
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    fake = (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException)
    return GuardOnDataDependentSymNode, *fake, fx.proxy.TraceError


def script_casts(function: Any) -> bool:
    """True if TorchScript, in this state of autocast, casts in a function by rules of its own."""
    graph = function.graph.copy()
    torch._C._jit_pass_autocast(graph)  # type: ignore[attr-defined]
    return "aten::_autocast_to_" in str(graph)


def inductor_options(mode: str | None) -> dict[str, Any]:
    """Inductor's options in one of its modes, and whether it records CUDA graphs."""
    from torch._inductor import config, list_mode_options

    options = {} if mode is None else list_mode_options(mode)
    return {"triton.cudagraphs": config.triton.cudagraphs, **options}


def keeping_graphs(**settings: bool) -> AbstractContextManager[Any]:
    """The context to compile a function, or run its backward, whose graph may be used twice.

    Buffers that a backward writes over would rule a second one (`retain_graph=True`) out. The
    settings are more of AOTAutograd's.
    """
    from torch._functorch import config

    patch: AbstractContextManager[Any] = config.patch({"donated_buffer": False, **settings})
    return patch


# CUDA: what `torch.cuda`'s functions of a stream come down to. A build without CUDA has none of it.

# What tells the current stream of a GPU, by its index, from others; and what makes one current, and
# its GPU, given that.
current_stream_key: Final[Any] = getattr(torch._C, "_cuda_getCurrentStream", None)
set_stream: Final[Any] = getattr(torch._C, "_cuda_setStream", None)
# Make a GPU the current one, given its index, and return the one before; the second does not begin
# to use a GPU for that.
exchange_device: Final[Any] = getattr(torch._C, "_cuda_exchangeDevice", None)
restore_device: Final[Any] = getattr(torch._C, "_cuda_maybeExchangeDevice", None)
is_current_captured: Final[Any] = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)
# Each reads a setting, without the objects that `torch.backends` has around it: to what fp32 is
# rounded, and all by which torch chooses among kernels of an operator.
precision_settings: Final[Mapping[str, Callable[[], str]]] = {
    f"{place} {name}": partial(torch._C._get_fp32_precision_getter, backend, op)
    for place, backend in (("cuda", "cuda"), ("cpu", "mkldnn"))
    for name, op in (("matmul", "matmul"), ("convolution", "conv"), ("recurrent", "rnn"))
}
_attention_settings: Final[tuple[Callable[[], bool], ...]] = (
    torch._C._get_flash_sdp_enabled,
    torch._C._get_mem_efficient_sdp_enabled,
    torch._C._get_cudnn_sdp_enabled,
    torch._C._get_math_sdp_enabled,
)
kernel_settings: Final[tuple[Callable[[], Any], ...]] = (
    torch._C._get_deterministic_algorithms,
    torch._C._get_deterministic_algorithms_warn_only,
    torch._C._get_cudnn_enabled,
    torch._C._get_cudnn_benchmark,
    torch._C._get_cudnn_deterministic,
    *_attention_settings,
    *precision_settings.values(),
)


def attention_kernels() -> tuple[bool, ...]:
    """Which kernels attention may take; the last are plain products."""
    return tuple(read() for read in _attention_settings)


def abandon_pool(device: int, pool: Any) -> None:
    """Tell the allocator that a capture into a pool is over, though its end failed.

    Raises:
        RuntimeError: No capture into this pool was begun.
    """
    torch._C._cuda_endAllocateToPool(device, pool)
    torch._C._cuda_releasePool(device, pool)


def spin(cycles: int) -> None:
    """Keep the current CUDA stream busy for so many cycles of the device's clock."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def is_profiled() -> bool:
    """Whether a profiler of torch runs, which lengthens launches."""
    return bool(torch._C._autograd._profiler_enabled())


def copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A copy of each gradient; of strided ones in one call: x - 0 is x, where it is -0, too."""
    if all(tensor.layout is torch.strided for tensor in tensors):
        return list(torch._foreach_sub(list(tensors), 0))
    return [tensor.clone() for tensor in tensors]


# Tracers.

# The class whose `apply` all custom functions inherit. From torch 2.14 on it is C++'s own, and who
# took `Mine.apply` before passes a patch by: only the look-up of `forward` is still to be seen.
APPLY_IS_NATIVE: Final = not isinstance(vars(torch.autograd.Function)["apply"], classmethod)
FunctionBase: Any = torch.autograd.Function if APPLY_IS_NATIVE else _SingleLevelFunction
# The only function that the verifier of torch.export lets pass; its node may stand for any other.
held_function: Any = _call_custom_autograd_function_in_pre_dispatch


@contextmanager
def held_nodes_kept() -> Iterator[None]:
    """Trace inside; a node of `held_function` stays though nothing reads it."""
    effects = fx.node._side_effectful_functions
    new = held_function not in effects
    effects.add(held_function)
    try:
        yield
    finally:
        if new:
            effects.discard(held_function)


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


class FunctionMode(TorchFunctionMode):
    """Runs every function of torch that is called inside, as `run` has it."""

    def run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a function."""
        return func(*args, **kwargs)

    @final
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self.run(func, args, kwargs or {})


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
def shown_on_cpu() -> Iterator[None]:
    """Let fake tensors made in this thread stand for tensors on the CPU, wherever these are."""
    describe, tracer = MetaTensorDescriber.describe_tensor, get_ident()

    def on_cpu(self: Any, tensor: torch.Tensor, **options: Any) -> Any:
        found = describe(self, tensor, **options)
        return replace(found, device=torch.device("cpu")) if get_ident() == tracer else found

    with patch.object(MetaTensorDescriber, "describe_tensor", on_cpu):
        yield


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
def recorded_below_autograd(mode: Any) -> Iterator[None]:
    """Let `torch.export`, whose mode it is, record operators inside as autograd hands them on."""
    flags = False, mode._allow_fake_constant, mode._error_on_data_dependent_ops
    below = proxy_tensor.ProxyTorchDispatchMode(mode.tracer, mode.tracing_mode, *flags)
    with below_export(), below:
        yield


def decomposed_in_cpp(operator: OpOverload, *args: Any) -> Any:
    """The result of an operator's decomposition in C++, whose parts may be decomposed in Python."""
    with enable_python_dispatcher():
        return operator._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args)


@cache
def is_composite(operator: OpOverload) -> bool:
    """True if autograd sees the operators that it calls, and not itself."""
    key = "CompositeImplicitAutograd"
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator._name, key)


# By which `nn.MultiheadAttention` avoids its fused kernel in a trace.
TRACER_CHECK: Final = (nn.modules.activation, "_is_make_fx_tracing")
VMAP: Final = (torch._functorch.apis, "vmap_impl")
_TORCH: Final = str(Path(torch.__file__).parent)
_OURS: Final = str(Path(__file__).parents[1])


_Frames = tuple[tuple[str, int, str], ...]  # files, lines and functions, the innermost first


def _models_frames() -> _Frames:
    # As torch's own, without most of torch's frames, nine of ten.
    rows, frame = [], sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "forward" or not code.co_filename.startswith(_TORCH):
            rows.append((code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(rows)


@final
class _Lines(list[str]):
    def format(self) -> list[str]:
        return self


@contextmanager
def frugal_export() -> Iterator[None]:
    """Export inside without what nobody reads: code after each pass, and torch's lines of a stack.

    A graph module generates its code when it is called, or when it is changed after the block.
    """
    recompile, tracer = fx.GraphModule.recompile, get_ident()
    kept = fx.proxy.TracerBase._filter_traceback_frames

    def postponed(module: fx.GraphModule) -> Any:
        if get_ident() != tracer:
            return recompile(module)
        if isinstance(module.graph._codegen, _PyTreeCodeGen):
            info = module.graph._codegen.pytree_info
            module._in_spec, module._out_spec = info.in_spec, info.out_spec
        type(module).forward = run  # each has a class of its own
        return None

    def run(module: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        recompile(module)
        return module.forward(*args, **kwargs)

    @cache  # equal stacks, as of equal layers, become text once
    def lines(tracer: fx.Tracer, frames: _Frames) -> _Lines:
        rows = [FrameSummary(*frame, lookup_line=False) for frame in reversed(frames)]
        found = kept(tracer, StackSummary.from_list(rows))
        if found and found[-1].filename.startswith(_OURS):  # a loss, which is no `forward`
            found += rows[rows.index(found[-1]) + 1 :][:1]
        return _Lines(found.format())

    stack = SimpleNamespace(extract=lambda: SimpleNamespace(summary=_models_frames))
    with (
        patch.object(fx.GraphModule, "recompile", postponed),
        patch.object(fx.proxy, "CapturedTraceback", stack),
        patch.object(fx.proxy.TracerBase, "_filter_traceback_frames", lines),
        patch.object(proxy_tensor, "_extract_tensor_metadata", lambda _: None),  # as `val`
        # It would keep the last trace's graph, and an LSTM's weights with it, until another comes.
        patch.dict(proxy_tensor._FAKE_TENSOR_ID_TO_PROXY_MAP_FOR_EXPORT),
    ):
        yield


def foreign_tracer() -> str:
    """The name of a tracer, transform or mode of torch that runs now; else empty.

    Other than Dynamo, and devices as modes, which say where tensors are made. Modes below Python
    see what the caller's thread runs.
    """
    if torch.compiler.is_compiling():
        return "torch.export"
    if torch._C._get_tracing_state() is not None:
        return "torch.jit.trace"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "torch.func"
    modes: Any = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return next((type(mode).__name__ for mode in modes if type(mode) is not DeviceContext), "")


def keeps_weights(module: nn.Module) -> bool:
    """True if `parametrize.cached()` is on, and the module has weights that it keeps."""
    on = parametrize._cache_enabled > 0
    return on and any(map(parametrize.is_parametrized, module.modules()))


def without_kept_weights() -> AbstractContextManager[Any]:
    """As without a `parametrize.cached()` around the block, which would keep a tracer's tensors."""
    return patch.multiple(parametrize, _cache_enabled=0, _cache={})


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
        _end_levels(depth)


def _end_levels(depth: int) -> None:
    """As `pop_dynamic_layer_stack_and_undo_to_depth`, which in torch 2.11 ends two at a time."""
    levels = torch._C._functorch
    while levels.get_dynamic_layer_stack_depth() > depth:
        kind = levels.peek_interpreter_stack().key().name.lower().replace("functionalize", "func")
        getattr(levels, f"_{kind}_decrement_nesting")()
