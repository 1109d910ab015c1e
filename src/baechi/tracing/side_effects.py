"""Side effects of a forward on its model and on torch, while a tracer runs it.

A tracer runs the model's Python on tensors without values. After each run nothing of it is left: a
tensor that forward puts elsewhere is removed, a write into a real tensor is undone, and what it
registers with a module, or replaces there, is refused.
`docs/runtime.md`, "What a trace keeps", has the effects on a placed model.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, final

import torch
from torch import nn
from torch.utils import _pytree as pytree

from baechi.errors import TraceError
from baechi.torch_support.torch_internals import (
    state_of,
    version_of,
    without_gradient_hooks,
)
from baechi.torch_support.tracer_internals import (
    FakeTensor,
    FunctionMode,
    tracers_ended,
    untraced,
)
from baechi.tracing.fake_tensors import fakes_removed
from baechi.tracing.model_notes import (
    NotedTensor,
    Notes,
    draws_kept,
    undo_writes,
    undone_if_it_fails,
)
from baechi.tracing.truth_values import model_line

_REGISTER: Final = (
    "Register it (torch.nn.Parameter in an attribute, ParameterList, ModuleList), give it as an "
    "argument, or let it need none (requires_grad_(False))."
)


@contextmanager
def state_kept(model: nn.Module) -> Iterator[None]:
    """Run a forward inside; each buffer is the same tensor after, and no parameter is a new one.

    In a parameter's place may be what forward computes, as weight dropout puts it there.

    Raises:
        RuntimeError: Forward has replaced one.
    """
    before = [
        (f"{path}.{name}".lstrip("."), own, name, tensor)
        for path, module in model.named_modules()
        for own in state_of(module)[1:]
        for name, tensor in own.items()
    ]
    replaced = []
    try:
        yield
    finally:
        for path, own, name, tensor in before:
            now = own.get(name)
            is_parameter = isinstance(tensor, nn.Parameter)
            computed = is_parameter and not isinstance(now, nn.Parameter)
            if now is not tensor and not computed:
                own[name] = tensor
                replaced.append(f"{'parameter' if is_parameter else 'buffer'} {path!r}")
    if replaced:
        raise RuntimeError(
            f"forward replaces {replaced[0]}, which would be lost; let it write into the "
            "tensor that is there (`copy_`), or put it in a submodule, which then stays whole; if "
            "it is made once, run the model before you place it"
        )


@contextmanager
def unchanged(model: nn.Module) -> Iterator[Notes]:
    """Trace inside; the model and the state of torch.func are as before.

    If it succeeds, what forward notes in attributes, lists and dicts stays, as after a call. Yields
    the notes of before.

    Raises:
        TraceError: Forward made a parameter, a buffer or a submodule.
    """
    before = [(path, module, _snapshot(module)) for path, module in model.named_modules()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    known, notes = _state_of(model), Notes(model)
    try:
        with (
            draws_kept(model),
            tracers_ended(),
            fakes_removed(model),
            undone_if_it_fails(notes),
        ):
            yield notes
    finally:
        notes.undo_writes()
        for parameter, gradient in gradients:
            if parameter.grad is not gradient:
                parameter.grad = gradient
        made = [
            f"{path}.{name}".lstrip(".")
            for path, module, own in before
            for name in _restore(module, own, known)
        ]
    if made:
        raise TraceError(
            f"forward makes {made[0]!r}, a parameter, buffer or submodule; the placed model would "
            "make it anew in each call. Run the model once, on the largest sizes if it makes a new "
            "one for larger ones, then trace it."
        )


def _state_of(module: nn.Module) -> set[int]:
    return {id(tensor) for tensor in (*module.parameters(), *module.buffers())}


def _snapshot(module: nn.Module) -> tuple[list[dict[str, Any]], set[str], dict[str, Any]]:
    rows = [dict(row) for row in state_of(module)]
    return rows, set(module._non_persistent_buffers_set), vars(module).copy()


def _restore(module: nn.Module, before: tuple[Any, ...], known: set[int]) -> list[str]:
    """Let a module have the parameters, buffers and submodules that it had; names of the others.

    A submodule in the place of another is none of those where it has the model's own state alone:
    forward has chosen another way to compute with it, and noted that.
    """
    rows, volatile, attributes = before
    made: list[str] = []
    for now, then in zip(state_of(module), rows, strict=True):
        for name, value in now.items():
            if value is then.get(name):
                continue
            if not isinstance(value, nn.Module) or not _state_of(value) <= known:
                made.append(name)
        if len(now) != len(then) or made:
            now.clear()
            now.update(then)
    if made:
        module._non_persistent_buffers_set.clear()
        module._non_persistent_buffers_set.update(volatile)
        for name in attributes.keys() - vars(module).keys():
            vars(module)[name] = attributes[name]
    return made


def refuse_hidden_parameters(model: nn.Module, leaves: Iterable[nn.Module]) -> None:
    """Refuse parameters of submodules that stay whole which are not registered: no gradient."""
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
class OutsideTensors(FunctionMode):
    """Watches what forward reads beside its arguments, and the model's parameters and buffers.

    To a tracer such a tensor is a constant. So a gradient that flows into it would be lost, and it
    would be written when the model is traced, besides in each call.

    Attributes:
        stand_ins: What stands for the model's own tensors while it is traced, by their ids: forward
            may find these in a list or a dict, too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stand_ins: dict[int, torch.Tensor] = {}
        self._written: dict[int, NotedTensor] = {}

    def run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a function, with what it reads and writes noted."""
        if kwargs.get("generator") not in (None, torch.default_generator):
            raise RuntimeError(
                "forward draws from a torch.Generator of its own, which is in no plan; put it in a "
                "submodule, which then stays whole, or draw without `generator`"
            )
        real = list(filter(_is_real, pytree.tree_leaves((args, kwargs))))
        if not real:
            return func(*args, **kwargs)
        if any(id(tensor) in self.stand_ins for tensor in real):
            args, kwargs = pytree.tree_map(
                lambda leaf: self.stand_ins.get(id(leaf), leaf), (args, kwargs)
            )
            return self.run(func, args, kwargs)
        writes = _may_write(func, kwargs)
        for tensor in real if writes else ():
            if id(tensor) not in self._written:
                with untraced():
                    copy = tensor.detach().clone()
                self._written[id(tensor)] = tensor, version_of(tensor), tensor, copy
        result = func(*args, **kwargs)
        graded = [tensor for tensor in real if tensor.requires_grad]
        if torch.is_grad_enabled() and graded:
            rows = pytree.tree_leaves((result, args[:1] if writes else ()))
            if any(isinstance(row, FakeTensor) and row.requires_grad for row in rows):
                raise TraceError(
                    f"forward reads a tensor of shape {list(graded[0].shape)} that needs a "
                    f"gradient and is no parameter of the model, at {model_line()}: its gradient "
                    f"would be lost. {_REGISTER}"
                )
        return result

    def close(self) -> None:
        """Let all be as it was before it was written."""
        undo_writes(self._written.values())


def _is_real(value: Any) -> bool:
    real = isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)
    return real and not value.is_inference()


def _may_write(func: Any, kwargs: dict[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    inplace = name.endswith("_") and not name.endswith("__")
    special = name == "__setitem__" or name.startswith("__i")
    return inplace or special or "norm" in name or "out" in kwargs


@contextmanager
def gradients_kept(model: nn.Module) -> Iterator[None]:
    """Run backwards inside; the gradients of parameters are those of before in the end.

    A backward of the model's own, such as that of reversible layers, may add to them, too.
    """
    kept = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in kept:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient


@contextmanager
def values_kept(model: nn.Module) -> Iterator[None]:
    """Run steps inside; gradients, and the values of buffers, are those of before in the end.

    No hook of a parameter runs, as some step an optimizer.
    """
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    with gradients_kept(model), without_gradient_hooks(model.parameters()):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)


def step_roots(outputs: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """What a step goes backward from: the model's own loss, or each output that has a gradient.

    What is returned twice has one gradient.
    """
    roots = list({id(tensor): tensor for tensor in outputs if tensor.requires_grad}.values())
    return next(([root] for root in roots if root.dim() == 0), roots)
