"""What a forward does to its model and to torch, while a tracer runs it.

A buffer that it replaces would be forgotten: the new value is written into the buffer. A tensor
that it puts elsewhere into the model would stay there as a fake: it is taken out. One that is there
and is no buffer is real to a tracer, so a write would happen once too often: it is undone. What
torch.func began where a trace failed would go on: it is ended.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from baechi.propagation import Facts


@contextmanager
def buffers_in_place(
    model: nn.Module, *, keep: bool = True, replaced: list[str] | None = None
) -> Iterator[None]:
    """Run a forward so that each buffer is the same tensor after, with what replaced it inside.

    Args:
        model: Whose buffers.
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
    """Trace inside; the model and the state of torch.func are as before."""
    attributes = [(module, dict(vars(module))) for module in model.modules()]
    loose = [(tensor, tensor._version, tensor.detach().clone()) for tensor in _loose(model)]
    depth = torch._C._functorch.get_dynamic_layer_stack_depth()
    hooks_off = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    try:
        yield
    finally:
        if hooks_off is None:
            torch._C._autograd._saved_tensors_hooks_enable()
        torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
        for tensor, version, value in loose:
            if tensor._version != version:
                tensor.detach().copy_(value)
        for module, before in attributes:
            for name, value in list(vars(module).items()):
                if value is not before.get(name) and _holds_fake(value):
                    if name in before:
                        vars(module)[name] = before[name]
                    else:
                        del vars(module)[name]


def _loose(model: nn.Module) -> list[torch.Tensor]:
    """The tensors in plain attributes of the model's modules, each once."""
    state = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    found: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for leaf in pytree.tree_leaves(vars(module)):
            counts = isinstance(leaf, torch.Tensor) and not leaf.is_inference()
            if counts and id(leaf) not in state:
                found[id(leaf)] = leaf
    return list(found.values())


def _holds_fake(value: Any) -> bool:
    return any(isinstance(leaf, FakeTensor | fx.Proxy) for leaf in pytree.tree_leaves(value))
