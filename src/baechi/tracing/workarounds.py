"""Workarounds for defects of torch, seen with torch 2.11 to 2.13; each with what ends it.

Custom autograd functions (https://github.com/pytorch/pytorch/issues/106388)
    A tracer inlines their forward, and autograd would then differentiate that: what a backward
    written by hand says is lost. So while a tracer runs, `apply` records the function itself, as a
    node; from torch 2.14 on, where `apply` may have been taken before, its `forward` does.
    `test_torch_still_loses_the_backward` fails when torch is mended.

CTC losses with tensors for lengths (https://github.com/pytorch/pytorch/issues/183396)
    Fake tensors lack their shapes. What such a loss keeps for its backward depends on the longest
    target; here it is as long as all targets together, or as a row of them, which is a bound. The
    loss itself has the right shape. `test_torch_still_lacks_the_shapes` fails when torch is mended.

Sizes of images that are resized (`torch.nn.functional.interpolate`)
    `upsample_*.vec` in C++, with antialiasing `_upsample_*`, makes ints of its input's sizes, which
    were symbols before.
    `test_torch_still_fixes_the_sizes_of_images` fails when torch is mended.

`torch.linspace` with a symbol for its number of elements
    Its schema has an int there, which would fix the size. It is recorded all the same, and fake
    tensors make an empty one. `test_torch_still_fixes_the_elements_of_linspace` fails when torch is
    mended.

The cache of casts of blocks under autocast
    A tracer turns it off, and `torch.autocast` in forward takes that for the state around it.
    `test_torch_still_exports_autocast_without_its_cache` fails when torch is mended.

Checks of values by `torch._check*`, as of `x[mask].numel()`
    An export takes an equality for a fact, by which it knows the outcome, or fails where sizes are
    symbols. So each is recorded as the check of a tensor.
    `test_torch_still_takes_checks_for_facts` fails when torch is mended.

Checkpoints in checkpoints (`torch.utils.checkpoint`, not reentrant)
    What the outer one does to keep the arguments of the inner one turns gradients off in an export
    for all that follows. A trace keeps nothing, so it leaves checkpoints out (`checkpointed`).
    `test_torch_still_turns_gradients_off_in_nested_checkpoints` fails when torch is mended.

`torch.vmap`
    An export keeps its parts as functions that enter and leave a level of functorch, between which
    nothing else may run. Below autograd there are operators on whole batches, which are kept.
    `test_torch_still_exports_the_levels_of_vmap` fails when torch is mended.

`Tensor.contiguous` (https://github.com/pytorch/pytorch/issues/186381)
    It leaves no node where a fake tensor is contiguous already, as the kernel's result may not be.
    So it is recorded there, too, and where `is_contiguous` says so; `fx_nodes.without_layouts`
    keeps it where something relies on it. What `stride` says is refused where it may not hold.
    `test_torch_still_loses_contiguous` fails when torch is mended.

`torch.func.functional_call` (https://github.com/pytorch/pytorch/issues/164759)
    A module that two others share keeps the tensors that stood for its own. `called_with` names
    each of its places once.
    `test_torch_still_loses_the_weights_of_shared_modules` fails when torch is mended.

Submodules whose call ends with an error (`torch/fx/_symbolic_trace.py`, `call_module`)
    An export stays in such a one, and fails at the end of what called it, also where forward
    catches the error (`try: layer(x, mask)`, `except TypeError: layer(x)`).
    `test_torch_still_stays_in_what_failed` fails when torch is mended.
"""

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import wraps
from pathlib import Path
from typing import Any, Final, final
from unittest.mock import patch

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree
from torch.utils import checkpoint
from torch.utils.checkpoint import CheckpointFunction

from baechi.errors import TraceError
from baechi.torch_support.symbolic_sizes import is_equality, is_unbacked
from baechi.torch_support.torch_internals import state_of
from baechi.torch_support.tracer_internals import (
    FakeTensor,
    FunctionBase,
    below_export,
    export_mode,
    fake_kernels,
    held_function,
    recorded_below_autograd,
    tracer_errors,
    track_tensor_tree,
)
from baechi.tracing.fx_nodes import layout_maker, silently_written
from baechi.tracing.model_code import OURS, package_of


@final
class HeldNodes:
    """Custom autograd functions, observers and the like of one capture, as targets of fx nodes."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._targets: dict[Any, Callable[..., Any]] = {}
        self._applied: Any = None

    def apply(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """`Function.apply` while a tracer runs."""
        proxy, traced = _proxy_in(args, kwargs)
        if not traced or function.__module__.startswith("torch._library"):  # behind one operator
            return self._apply(function, *args, **kwargs)
        if function is CheckpointFunction:
            if proxy is None:
                return _run_checkpointed(self._model, *args)
            raise RuntimeError(
                f"the backward of the autograd function {function.__name__} would be lost"
            )
        if proxy is not None:
            target = self._target(function)
            return proxy.tracer.create_proxy("call_function", target, args, kwargs)
        mode = export_mode()
        if mode is None:
            return self._apply(function, *args, **kwargs)
        return self._record(mode, function, *args, **kwargs)

    def forward(self, function: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A function's `forward` while a tracer runs: called outside of `apply`, it is `apply`."""
        if function is self._applied:
            return forward
        # Its context comes first, unless the function sets that up by itself.
        skipped = int(function.setup_context is torch.autograd.Function.setup_context)

        @wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            _, traced = _proxy_in(args[skipped:], kwargs)
            if not traced:
                return forward(*args, **kwargs)
            return self.apply(function, *args[skipped:], **kwargs)

        return run

    def _apply(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        before, self._applied = self._applied, function
        try:
            native: Any = super(FunctionBase, function)
            return native.apply(*args, **kwargs)
        finally:
            self._applied = before

    def _record(self, mode: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        with below_export():
            result = self._apply(function, *args, **kwargs)
        name = self._named(function, self._target(function))
        args, kwargs = pytree.tree_map(mode.tracer.unwrap_proxy, (args, kwargs))
        node = mode.tracer.create_proxy("call_function", held_function, (name, *args), kwargs)
        track_tensor_tree(result, node, constant=None, tracer=mode.tracer)
        return result

    def observe(self, observer: Any, tensors: Sequence[Any]) -> None:
        """Record a call of an observer with these tensors; below export nothing is to be seen."""
        mode = export_mode()
        if mode is not None:
            arguments = (self._named(observer, observer), *map(mode.tracer.unwrap_proxy, tensors))
            mode.tracer.create_proxy("call_function", held_function, arguments, {}, name="observe")

    def spaced(
        self, own: Callable[..., Any], start: Any, end: Any, steps: Any, **options: Any
    ) -> Any:
        """`torch.linspace` while a tracer runs: its number of elements may be a symbol."""
        mode = export_mode()
        numbers = not any(isinstance(one, torch.Tensor) for one in (start, end))
        if mode is None or not isinstance(steps, torch.SymInt) or "out" in options or not numbers:
            return own(start, end, steps, **options)
        with below_export():
            result = torch.empty(steps, **options)
        dtype = {"dtype": options["dtype"]} if options.get("dtype") else {}
        kwargs = {**dtype, "device": result.device, "pin_memory": False}  # as of a number
        arguments = self._named(_LINSPACE, _LINSPACE), start, end, steps
        args = tuple(map(mode.tracer.unwrap_proxy, arguments))
        node = mode.tracer.create_proxy(
            "call_function", held_function, args, kwargs, name="linspace"
        )
        track_tensor_tree(result, node, constant=None, tracer=mode.tracer)
        return result

    def _named(self, key: Any, target: Callable[..., Any]) -> str:
        """What names a target in a trace."""
        self._targets.setdefault(key, target)
        return str(list(self._targets).index(key))

    def restore(self, module: fx.GraphModule) -> None:
        """Give the nodes of an exported graph the functions that they stand for."""
        targets = list(self._targets.values())
        for part in module.modules():
            if isinstance(part, fx.GraphModule):
                for node in part.graph.find_nodes(op="call_function", target=held_function):
                    name, *args = node.args
                    node.target, node.args = targets[int(name)], tuple(args)
                part.recompile()

    def _target(self, function: Any) -> Callable[..., Any]:
        def target(*args: Any, **kwargs: Any) -> Any:
            return function.apply(*args, **kwargs)

        target.__module__, target.__qualname__ = function.__module__, function.__qualname__
        target.__name__ = function.__name__
        return self._targets.setdefault(function, target)


_LINSPACE: Final = torch.ops.aten.linspace.default


def contiguous(own: Callable[..., Any], tensor: Any, **kwargs: Any) -> Any:
    """`Tensor.contiguous` while a tracer runs: a node also where it gives the tensor itself."""
    result = own(tensor, **kwargs)
    if result is not tensor or not _is_computed(tensor):
        return result
    with below_export(), torch.enable_grad():
        result = torch.ops.aten.alias.default(tensor)  # later reads of the tensor itself stay so
    return _record_contiguous(tensor, result, **kwargs)


def contiguity_read(own: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """`is_contiguous` while a tracer runs: what reads the tensor later relies on a true answer."""
    answer = own(tensor, *args, **kwargs)
    if answer and _by_the_model() and _is_computed(tensor):
        _record_contiguous(tensor, tensor, **kwargs)
    return answer


def strides_read(own: Callable[..., Any], tensor: Any, *args: Any) -> Any:
    """`stride` while a tracer runs: refused where the strides of a call may be others."""
    if _by_the_model() and _is_computed(tensor):
        maker = layout_maker(export_mode().tracer.unwrap_proxy(tensor).node)
        if maker is not None:
            raise RuntimeError(
                f"forward reads strides that the kernel of {maker.target} chooses; put it in a "
                "submodule, which then stays whole"
            )
    return own(tensor, *args)


def _by_the_model() -> bool:
    """True if what stands in for a method of tensors (`faithfulness`) is called by its code."""
    return package_of(sys._getframe(3)) not in OURS


def _is_computed(tensor: Any) -> bool:
    """True if an export has a node for it; the strides of state and arguments are as traced."""
    mode = export_mode()
    proxy = None if mode is None else mode.tracer.unwrap_proxy(tensor)
    return isinstance(proxy, fx.Proxy) and proxy.node.op == "call_function"


def is_of_new_leaves(tensor: torch.Tensor) -> bool:
    """True if it needs a gradient alone because forward sets `requires_grad` of what it computes.

    No node of an export says so.
    """
    nodes: list[Any] = [] if tensor.grad_fn is None else [tensor.grad_fn]
    leaves, seen = [] if nodes else [tensor], set(nodes)
    while nodes:
        node = nodes.pop()
        leaves += [node.variable] if hasattr(node, "variable") else []
        new = {each for each, _ in node.next_functions if each is not None} - seen
        nodes += new
        seen |= new
    return tensor.requires_grad and all(map(_is_computed, leaves))


def _record_contiguous(tensor: Any, result: Any, **kwargs: Any) -> Any:
    tracer, target = export_mode().tracer, torch.ops.aten.contiguous.default
    given = (tracer.unwrap_proxy(tensor),)
    node = tracer.create_proxy("call_function", target, given, kwargs, name="contiguous")
    return track_tensor_tree(result, node, constant=None, tracer=tracer)


def mapped(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`torch.vmap` while a tracer runs."""
    mode = export_mode()
    with nullcontext() if mode is None else recorded_below_autograd(mode):
        return own(*args, **kwargs)


def _proxy_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, bool]:
    """The first proxy among these, and whether a tracer runs them."""
    leaves = pytree.tree_leaves((args, kwargs))
    proxy = next((leaf for leaf in leaves if isinstance(leaf, fx.Proxy)), None)
    return proxy, proxy is not None or any(isinstance(leaf, FakeTensor) for leaf in leaves)


# What surrounds the forward of a checkpoint that is not reentrant, for `patch`; the second name is
# that of torch 2.14.
_AROUND: Final = "_checkpoint_without_reentrant_generator"
CHECKPOINT: Final = (checkpoint, _AROUND + "_impl" * hasattr(checkpoint, f"{_AROUND}_impl"))


def checkpointed(model: nn.Module, own: Any, *given: Any, **named: Any) -> Iterator[None]:
    """`CHECKPOINT` while a tracer runs: an export has what is inside, under its contexts, alone."""
    with _written_once(model):
        if export_mode() is None:
            yield from own(*given, **named)
        else:  # torch 2.14 has a name for what was the third
            contexts = named["context_fn"] if "context_fn" in named else given[2]
            with contexts()[0]:
                yield


@contextmanager
def _written_once(model: nn.Module) -> Iterator[None]:
    """Refuse writes into buffers in a checkpoint, which torch writes once more in the backward."""
    if not torch.is_grad_enabled():
        yield
        return
    mode = export_mode()
    nodes = [] if mode is None else mode.tracer.graph.nodes
    known, versions = len(nodes), [buffer._version for buffer in model.buffers()]
    yield
    silent = any(map(silently_written, list(nodes)[known:]))
    if silent or versions != [buffer._version for buffer in model.buffers()]:
        raise TraceError(
            "forward checkpoints what writes into buffers, as batch norms do when they train: the "
            "backward writes them once more, which the placed model would not. Turn this "
            "checkpointing off, and give place `checkpoint=`, which writes them once."
        )


def _run_checkpointed(model: nn.Module, run: Callable[..., Any], _: bool, *args: Any) -> Any:
    """Reentrant checkpointing as if it were not there; it has gradients if its arguments have."""
    flows = any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
    with torch.set_grad_enabled(flows and torch.is_grad_enabled()), _written_once(model):
        return run(*args)


def ctc_losses_known() -> AbstractContextManager[Any]:
    """Let fake tensors run `torch.nn.functional.ctc_loss`."""
    return patch.dict(fake_kernels, {torch.ops.aten._ctc_loss.Tensor: _ctc_shapes})


def caches_told() -> AbstractContextManager[Any]:
    """Let blocks under autocast have the cache that is on or off here, unless they say which."""
    cached, own = torch.is_autocast_cache_enabled(), torch.autocast.__init__

    @wraps(own)
    def told(
        self: torch.autocast,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        if cache_enabled is None and export_mode() is not None:
            cache_enabled = cached
        own(self, device_type, dtype, enabled, cache_enabled)

    return patch.object(torch.autocast, "__init__", told)


@contextmanager
def checks_kept() -> Iterator[None]:
    """Let an export keep what the model checks of values by `torch._check*`.

    An equality of a number of values is then no fact in the trace.
    """
    of_numbers: Any = torch._check_with
    of_tensors: Any = torch._check_tensor_all_with

    def is_the_models(condition: Any) -> bool:
        mode = export_mode()  # what kernels check by themselves is not recorded
        return mode is not None and isinstance(mode.tracer.unwrap_proxy(condition), fx.Proxy)

    def check_with(error: type[Exception], condition: Any, message: Any = None) -> None:
        if is_unbacked(condition) and is_the_models(condition):
            _assert(torch.scalar_tensor(condition, dtype=torch.bool))
            if is_equality(condition):
                return
        of_numbers(error, condition, message)

    def check_tensor(error: type[Exception], condition: Any, message: Any = None) -> None:
        traced = isinstance(condition, torch.Tensor) and is_the_models(condition)
        if traced and condition.dtype == torch.bool:
            _assert(condition.all())
        else:
            of_tensors(error, condition, message)

    with (
        patch.object(torch, "_check_with", check_with),
        patch.object(torch, "_check_tensor_all_with", check_tensor),
    ):
        yield


@contextmanager
def errors_followed() -> Iterator[None]:
    """Trace inside a model that may catch errors.

    Raises:
        RuntimeError: It caught one of a tracer, which its own run does not raise; what it did then
            is another branch.
    """
    call: Any = fx.Tracer.call_module
    raised: list[BaseException] = []

    def call_module(tracer: fx.Tracer, *args: Any) -> Any:
        depth = len(tracer.module_stack)
        try:
            return call(tracer, *args)
        finally:
            while len(tracer.module_stack) > depth:
                tracer.module_stack.popitem()

    def unknown(_: fx.Proxy) -> Any:
        raise fx.proxy.TraceError("a number of a symbolically traced variable is not known")

    def noted(kind: type[Exception]) -> Any:
        own: Any = kind.__init__

        def init(self: Exception, *args: Any, **kwargs: Any) -> None:
            own(self, *args, **kwargs)
            raised.append(self)

        return patch.object(kind, "__init__", init)

    with ExitStack() as stack:
        stack.callback(raised.clear)
        stack.enter_context(patch.object(fx.Tracer, "call_module", call_module))
        for kind in (*tracer_errors(), TraceError):
            stack.enter_context(noted(kind))
        for name in ("__len__", "__int__", "__float__", "__index__"):  # Python's own error is none
            stack.enter_context(patch.object(fx.Proxy, name, unknown, create=True))
        yield
        # Its traceback begins where it was caught.
        rows = [error.__traceback__ for error in raised]
        caught = (row for row in rows if row and package_of(row.tb_frame) not in OURS)
        for row in caught:
            file, line = Path(row.tb_frame.f_code.co_filename).name, row.tb_lineno
            raise RuntimeError(f"forward catches the error of a tracer (at {file}:{line})")


def _assert(truth: torch.Tensor) -> None:
    torch._assert_async(truth, "a check of the model fails")


def most_selected() -> AbstractContextManager[Any]:
    """Let fake tensors run `masked_select`: its result is as large as it may be.

    So is that of an index by one mask of all dimensions.
    """
    aten = torch.ops.aten
    kernels = {aten.masked_select.default: _all_selected, aten.index.Tensor: _indexed}
    return patch.dict(fake_kernels, kernels)


def may_take_most(node: fx.Node) -> bool:
    """True if a node's result, whose size values decide, is as large as it may be to those."""
    if node.target is torch.ops.aten.masked_select.default:
        return True
    if node.target is not torch.ops.aten.index.Tensor:
        return False
    given: Any = fx.node.map_arg(node.args, lambda each: each.meta.get("val"))
    return _is_whole(*given)


def _is_whole(values: torch.Tensor, indices: Sequence[Any]) -> bool:
    """True of an index by one mask of all dimensions."""
    (mask, *others) = indices
    return not (others or mask is None or mask.dtype != torch.bool or mask.dim() != values.dim())


_INDEX: Final = fake_kernels[torch.ops.aten.index.Tensor]


def _indexed(mode: Any, func: Any, values: torch.Tensor, indices: Sequence[Any]) -> torch.Tensor:
    if _is_whole(values, indices):
        return _all_selected(mode, func, values, indices[0])
    found: torch.Tensor = _INDEX(mode, func, values, indices)
    return found


def _all_selected(_mode: Any, _func: Any, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    shape = torch.broadcast_shapes(values.shape, mask.shape)  # type: ignore[no-untyped-call]
    return values.new_empty(math.prod(shape))


def _ctc_shapes(
    _mode: Any, _func: Any, log_probs: torch.Tensor, targets: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    steps, batch = (1, *log_probs.shape[:-1])[-2:]
    longest = targets.shape[-1]
    return log_probs.new_empty(batch), log_probs.new_empty(batch, steps, 2 * longest + 1)


def resized_by_symbols(arguments: Mapping[str, Any]) -> Any:
    """What is like the result of `upsample_*.vec`, whose C++ makes ints of symbolic sizes (2.13).

    It is that of the nearest neighbours: of the same sizes, layout and dtype, and autograd keeps no
    tensor for either. What torch has in Python for others expands by ints, too.
    """
    image, sizes, scales = (arguments[n] for n in ("input", "output_size", "scale_factors"))
    spatial = image.shape[2:]
    if sizes is None:
        sizes = [math.floor(size * scale) for size, scale in zip(spatial, scales, strict=True)]
    each = [None] * len(spatial) if scales is None else scales
    nearest = getattr(torch.ops.aten, f"upsample_nearest{len(spatial)}d").default
    return nearest(image, sizes, *each)


def called_with(
    module: nn.Module,
    state: Mapping[str, torch.Tensor],
    args: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """The result of a module where tensors, by name, stand for its parameters and buffers."""
    names = {id(t): name for name, t in (*module.named_parameters(), *module.named_buffers())}
    places = {
        f"{path}.{name}".lstrip("."): state[names[id(tensor)]]
        for path, part in module.named_modules()
        for row in state_of(part)[1:]
        for name, tensor in row.items()
        if tensor is not None
    }
    return torch.func.functional_call(module, places, tuple(args), kwargs, tie_weights=False)
