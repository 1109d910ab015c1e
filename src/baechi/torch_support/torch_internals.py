"""Private names of torch: the autograd engine, modules, the compiler, and CUDA.

Seen to work with torch 2.11 and 2.13; `tests/torch_support/test_torch_internals.py` names the one
that a new version breaks.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, _engine_run_backward
from torch.nn.utils import parametrize
from torch.utils import checkpoint
from torch.utils.hooks import RemovableHandle

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


def keeps_weights(module: nn.Module) -> bool:
    """True if `parametrize.cached()` is on, and the module has weights that it keeps."""
    on = parametrize._cache_enabled > 0
    return on and any(map(parametrize.is_parametrized, module.modules()))


def without_kept_weights() -> AbstractContextManager[Any]:
    """As without a `parametrize.cached()` around the block, which would keep a tracer's tensors."""
    return patch.multiple(parametrize, _cache_enabled=0, _cache={})


# `torch.compile`; its parts are imported when something is compiled.


def backend_named(name: Any) -> Any:
    """The compiler behind a backend's name; of a function that function."""
    from torch._dynamo import lookup_backend

    return lookup_backend(name)


def refusals() -> tuple[type[Exception], ...]:
    """The errors by which `torch.compile` says that it cannot compile a function."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    return TorchDynamoException, FailOnRecompileLimitHit


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
