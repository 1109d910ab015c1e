"""Side effects of a forward on its model and on torch, while a tracer runs it.

A buffer that it replaces would be forgotten: the new value is written into the buffer. A tensor
that it puts elsewhere would stay as a fake: it is taken out (`fake_tensor_leaks`). One that is
there and is no buffer is real to a tracer, so a write would happen once too often: it is undone. A
parameter, buffer or submodule that it makes would be made in each call: it is refused. What
torch.func began where a trace failed is ended.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, final

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from baechi.errors import TraceError
from baechi.tracing.alias_analysis import Facts
from baechi.tracing.containers import is_container
from baechi.tracing.fake_tensor_leaks import entries, holders, rosters, taken_out
from baechi.tracing.value_guards import asker

_REGISTER: Final = (
    "Register it (torch.nn.Parameter in an attribute, ParameterList, ModuleList), give it as an "
    "argument, or let it need none (requires_grad_(False))."
)


@contextmanager
def buffers_in_place(
    model: nn.Module, *, keep: bool = True, replaced: list[str] | None = None
) -> Iterator[None]:
    """Run a forward so that each buffer is the same tensor after, with what replaced it inside.

    Args:
        model: The owner of the buffers.
        keep: Whether what replaces a buffer can be kept.
        replaced: Gets the names of those that were replaced.

    Raises:
        RuntimeError: The new value has another shape or type; or nothing shall be kept.
    """
    owners = [(path, module, dict(module._buffers)) for path, module in model.named_modules()]
    rows: list[tuple[str, torch.Tensor | None, Any]] = []
    try:
        yield
    finally:
        for path, module, before in owners:
            for name, buffer in before.items():
                value = module._buffers.get(name)
                if value is not buffer:
                    rows.append((f"{path}.{name}".lstrip("."), buffer, value))
                    module._buffers[name] = buffer
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for name, buffer, value in rows:
        if not keep or buffer is None or _form(value) != _form(buffer):
            raise RuntimeError(f"forward replaces buffer {name!r}, which would be lost")
        pairs.append((buffer, value))
    if replaced is not None:
        replaced[:] = [name for name, *_ in rows]
    olds = {buffer.untyped_storage()._cdata for buffer, _ in pairs}
    with torch.no_grad():
        # One may become what another was, before that is written.
        news = [v.clone() if v.untyped_storage()._cdata in olds else v for _, v in pairs]
        for (buffer, _), value in zip(pairs, news, strict=True):
            buffer.copy_(value)


def refuse_old_buffers(module: fx.GraphModule, facts: Facts, replaced: Sequence[str]) -> None:
    """Refuse a result that is a replaced buffer, or a view of one: it would have the new value.

    Args:
        module: The flat graph.
        facts: Of it.
        replaced: Names of buffers of the model.

    Raises:
        RuntimeError: There is one.
    """
    names = {f"model.{name}": name for name in replaced}
    olds = {
        value.storage: names[str(node.target)]
        for node in module.graph.find_nodes(op="get_attr")
        if str(node.target) in names
        for value in facts.nodes[node].values
    }
    for result in next(iter(module.graph.find_nodes(op="output"))).all_input_nodes:
        for value in facts.nodes[result].values:
            if value.storage in olds:
                raise RuntimeError(
                    f"forward returns what buffer {olds[value.storage]!r} was before it replaces "
                    "it; let it return a clone"
                )


def _form(value: Any) -> tuple[Any, ...]:
    return (value.shape, value.dtype) if isinstance(value, torch.Tensor) else ()


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Trace inside; the model and the state of torch.func are as before.

    Raises:
        TraceError: Forward made a parameter, a buffer or a submodule.
    """
    before = [(path, module, _roster(module)) for path, module in model.named_modules()]
    known = _state_of(model)
    loose = [(t, t._version, t.detach().clone()) for t in _loose(model)]
    depth = torch._C._functorch.get_dynamic_layer_stack_depth()
    hooks_off = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    hooks = nn.modules.module._global_buffer_registration_hooks
    registered = set(hooks)
    try:
        with taken_out(model):
            yield
    finally:
        for key in hooks.keys() - registered:  # an export that fails leaves one (torch 2.11)
            del hooks[key]
        if hooks_off is None:
            torch._C._autograd._saved_tensors_hooks_enable()
        torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
        for tensor, version, value in loose:
            if tensor._version != version:
                tensor.detach().copy_(value)
        made = [name for row in before for name in _restore(*row, known)]
    if made:
        raise TraceError(
            f"forward makes {made[0]!r}, a parameter, buffer or submodule that the model does not "
            "have yet; the placed model would make it anew in each call. Run the model once, then "
            "trace it."
        )


def _roster(module: nn.Module) -> tuple[Any, ...]:
    """Its parameters, buffers and submodules."""
    return (
        [dict(row) for row in rosters(module)],
        set(module._non_persistent_buffers_set),
        vars(module).copy(),
    )


def _state_of(module: nn.Module) -> set[int]:
    return {id(tensor) for tensor in (*module.parameters(), *module.buffers())}


def _restore(path: str, module: nn.Module, before: tuple[Any, ...], known: set[int]) -> list[str]:
    """Let a module have the parameters, buffers and submodules that it had; names of the others.

    A submodule in the place of another is none of those where it has the model's own state alone:
    forward has chosen another way to compute with it, and noted that.
    """
    rows, volatile, attributes = before
    made: list[str] = []
    for now, then in zip(rosters(module), rows, strict=True):
        for name, value in now.items():
            chosen = isinstance(value, nn.Module) and _state_of(value) <= known
            if value is not then.get(name) and not chosen:
                made.append(f"{path}.{name}".lstrip("."))
        if len(now) != len(then) or made:
            now.clear()
            now.update(then)
    if made:
        module._non_persistent_buffers_set.clear()
        module._non_persistent_buffers_set.update(volatile)
        for name in attributes.keys() - vars(module).keys():
            vars(module)[name] = attributes[name]
    return made


def _loose(model: nn.Module) -> list[torch.Tensor]:
    """The tensors in plain attributes of the model's modules, each once."""
    state = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    found: dict[int, torch.Tensor] = {}
    for holder in holders(model):
        rows = tuple(value for _, value in entries(holder))
        for leaf in pytree.tree_leaves(rows, is_leaf=is_container):
            counts = isinstance(leaf, torch.Tensor) and not leaf.is_inference()
            if counts and id(leaf) not in state:
                found[id(leaf)] = leaf
    return list(found.values())


def refuse_hidden_parameters(model: nn.Module, leaves: Iterable[nn.Module]) -> None:
    """Refuse parameters of submodules that stay whole which are not registered.

    Raises:
        TraceError: There is one; its gradient would be lost.
    """
    known = {id(tensor) for tensor in model.parameters()}
    parts = {id(part): part for leaf in leaves for part in leaf.modules()}.values()
    # A recurrent layer of torch has a list of its parameters, or of what stands for them.
    for module in (part for part in parts if not type(part).__module__.startswith("torch.")):
        for value in pytree.tree_leaves(vars(module)):
            rows = [value] if isinstance(value, nn.Parameter) else []
            rows += value.parameters() if isinstance(value, nn.Module) else []
            lost = [row for row in rows if row.requires_grad and id(row) not in known]
            if lost:
                raise TraceError(
                    f"a {type(module).__name__} holds a parameter of shape {list(lost[0].shape)} "
                    f"that is not registered with it: its gradient would be lost. {_REGISTER}"
                )


@final
class Outsiders(TorchFunctionMode):
    """Looks at what forward reads beside its arguments, and the model's parameters and buffers.

    To a tracer such a tensor is a constant. So a gradient that flows into it would be lost, and it
    would be written when the model is traced, besides in each call.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, tuple[torch.Tensor, int, torch.Tensor]] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        real = list(filter(_is_real, pytree.tree_leaves((args, kwargs))))
        if not real:
            return func(*args, **kwargs)
        if _may_write(func, kwargs):
            for tensor in real:
                if id(tensor) not in self._seen:
                    with _disable_current_modes(), torch._C.DisableTorchFunction():
                        copy = tensor.detach().clone()
                    self._seen[id(tensor)] = tensor, tensor._version, copy
        result = func(*args, **kwargs)
        if torch.is_grad_enabled():
            written = args[:1] if _may_write(func, kwargs) else ()
            self._refuse_gradient(real, (result, written))
        return result

    def _refuse_gradient(self, real: Sequence[torch.Tensor], result: Any) -> None:
        graded = [tensor for tensor in real if tensor.requires_grad]
        rows = pytree.tree_leaves(result) if graded else []
        if any(isinstance(row, FakeTensor) and row.requires_grad for row in rows):
            raise TraceError(
                f"forward reads a tensor of shape {list(graded[0].shape)} that needs a gradient "
                f"and is no parameter of the model, at {asker()}: its gradient would be lost. "
                f"{_REGISTER}"
            )

    def close(self) -> None:
        """Let all be as it was before it was written."""
        for tensor, version, value in self._seen.values():
            if tensor._version != version:
                tensor.detach().copy_(value)


def _is_real(value: Any) -> bool:
    real = isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)
    return real and not value.is_inference()


def _may_write(func: Any, kwargs: dict[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    inplace = name.endswith("_") and not name.endswith("__")
    special = name == "__setitem__" or name.startswith("__i")
    return inplace or special or "norm" in name or "out" in kwargs
