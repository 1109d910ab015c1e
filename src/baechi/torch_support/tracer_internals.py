"""Private names of torch's tracers, of fake tensors and of operators.

Seen to work with torch 2.11 and 2.13; `tests/torch_support/test_tracer_internals.py` names the one
that a new version breaks.
"""

import io
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import replace
from functools import cache
from importlib import import_module
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
from torch.autograd.function import _SingleLevelFunction
from torch.export.custom_ops import _call_custom_autograd_function_in_pre_dispatch
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import track_tensor_tree
from torch.fx.graph import _PyTreeCodeGen
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

__all__ = ["FakeTensor", "FakeTensorMode", "HigherOrderOperator", "OpOverload", "OpOverloadPacket"]
__all__ += ["TorchDispatchMode", "enable_python_dispatcher"]
__all__ += ["decompositions", "fake_kernels", "suggest_memory_format", "track_tensor_tree"]

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


# The nodes of a trace that switch a mode.
SET_GRADIENTS: Any = torch._C._set_grad_enabled
ENTER_AUTOCAST: Any = torch.amp.autocast_mode._enter_autocast
EXIT_AUTOCAST: Any = torch.amp.autocast_mode._exit_autocast


@contextmanager
def switches_kept() -> Iterator[None]:
    """Let torch.export leave the nodes that switch a mode, and make no block of what is between.

    Of blocks inside of others it loses some (`test_torch_still_loses_blocks_inside_of_blocks`).
    """
    with ExitStack() as stack:
        for kind in ("set_grad", "autocast"):
            name = f"replace_{kind}_with_hop_pass"
            passes = import_module(f"torch._export.passes.{name}")
            stack.enter_context(patch.object(passes, name, lambda *given: given))
        yield


# An operator as the dispatcher calls it, its arguments, its keyword arguments, and its result.
Seen = Callable[[Any, tuple[Any, ...], Mapping[str, Any], Any], None]


@final
class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells of every operator that runs inside, a `while_loop`'s among them, after it ran."""

    supports_higher_order_operators = True

    def __init__(self, seen: Seen) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen = seen

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if isinstance(func, HigherOrderOperator):
            args = tuple(self._watched(a) if callable(a) else a for a in args)
        result = func(*args, **(kwargs or {}))
        self._seen(func, args, kwargs or {}, result)
        return result

    def _watched(self, part: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with self:
                return part(*args)

        return run


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
    modes = (type(mode) for mode in _function_modes())
    return next((kind.__name__ for kind in modes if kind is not DeviceContext), "")


def layers_fuse() -> bool:
    """Whether torch's layers may take fused kernels: not beside any mode, such as a device's."""
    if not torch.backends.mha.get_fastpath_enabled():
        return False
    return not any(type(mode) is DeviceContext for mode in _function_modes())


def _function_modes() -> Sequence[Any]:
    """The modes that see torch's functions, mostly none."""
    if not torch._C._len_torch_function_stack():
        return ()
    return _get_current_function_mode_stack()  # type: ignore[no-untyped-call, no-any-return]


def tracer_errors() -> tuple[type[Exception], ...]:
    """The errors by which a tracer says that it cannot follow what the model's Python asks."""
    from torch._subclasses import fake_tensor
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    fake = (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException)
    return GuardOnDataDependentSymNode, *fake, fx.proxy.TraceError


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


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the warnings and logs of torch's tracers, which are about torch and not the model."""
    # torch gives many of its loggers a handler of their own.
    names = [name for name in logging.root.manager.loggerDict if name.split(".")[0] == "torch"]
    handlers = {handler for name in names for handler in logging.getLogger(name).handlers}
    # And torch.export prints the graph that it could not finish to stderr (2.13, _trace.py).
    with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        for handler in handlers:
            handler.addFilter(_nothing)
        try:
            yield
        finally:
            for handler in handlers:
                handler.removeFilter(_nothing)


def _nothing(record: logging.LogRecord) -> bool:  # noqa: ARG001
    return False
