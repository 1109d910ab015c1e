"""The values that a trace knows: integers and booleans made of shapes and constants alone.

A tracer runs a model on fake tensors, and there a question about a value is an error. A model that
asks whether the positions that it has just made are in order hears here what it hears when it runs:
positions depend on no input, so whatever it does then holds for every call of these shapes. Of what
depends on inputs, weights or random numbers nothing is known. The graph has the same operators.

Known are integers and booleans only, computed on the CPU: they are the same on every device.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, final

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

_FACTORIES: Final = frozenset(
    (torch.arange, torch.zeros, torch.ones, torch.full, torch.eye, torch.tensor)
)
_QUESTIONS: Final = frozenset(
    (
        *(torch.Tensor.__bool__, torch.Tensor.__int__, torch.Tensor.__index__),
        *(torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.equal, torch.equal),
    )
)
_DATA: Final[Any] = vars(torch._C.TensorBase)["data"].__get__
# Beginnings of names of what draws, of what leaves memory as it is, and of what reads strides.
_UNKNOWN: Final = ("rand", "bernoulli", "geometric", "multinomial", "empty", "new_empty", "resize")
_UNKNOWN_TOO: Final = ("as_strided", "set_", "__get__", "__set__")
_MOST: Final = 1 << 20  # elements: positions of long batches, but no masks of long sequences


@final
class KnownValues(TorchFunctionMode):
    """Keeps the values that are known while a tracer runs a model, and answers with them."""

    def __init__(self) -> None:
        super().__init__()
        # A value holds for as long as nothing writes into the tensor or a view of it.
        self._known: Any = WeakTensorKeyDictionary()  # tensor -> (version, value)
        self.answered = False

    def answers(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's value is known, to one who then relies on that."""
        known = self.value(tensor) is not None
        self.answered |= known
        return known

    def value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """What is in the tensor, if that is known."""
        version, value = self._known.get(tensor, (None, None))
        return value if version is not None and version == tensor._version else None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func == _DATA:
            self._known.pop(args[0], None)  # what is written there changes no version
        given = self._given(func, args, kwargs)
        if given is not None and func in _QUESTIONS:
            self.answered = True
            return _computed(func, *given)
        result = func(*args, **kwargs)
        if given is not None and any(map(_is_knowable, _rows(result))):
            with suppress(RuntimeError):  # of a copy, which may have other strides
                values = _rows(_computed(func, *given))
                for row, value in zip(_rows(result), values, strict=True):
                    if _is_knowable(row) and _form(value) == _form(row):
                        self._known[row] = (row._version, value)
        return result

    def _given(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The arguments with values for tensors, on the CPU; None if one is not known."""
        if isinstance(func, OpOverload | OpOverloadPacket):  # it may be anyone's, and do anything
            return None
        leaves, spec = pytree.tree_flatten((args, kwargs))
        known: list[Any] = []
        some = func in _FACTORIES
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                value = self.value(leaf)
                if value is None:
                    return None
                known.append(value)
                some = True
            elif isinstance(leaf, torch.device):
                known.append(torch.device("cpu"))
            elif _is_number(leaf):
                known.append(leaf)
            else:
                return None
        name = getattr(func, "__name__", "")
        if not some or name.startswith((*_UNKNOWN, *_UNKNOWN_TOO)):
            return None
        given, named = pytree.tree_unflatten(known, spec)
        return given, named


def _is_number(leaf: Any) -> bool:
    if isinstance(leaf, slice):
        return all(type(part) in (int, type(None)) for part in (leaf.start, leaf.stop, leaf.step))
    plain = (int, float, bool, type(None), type(...), torch.dtype, torch.layout)
    return type(leaf) in plain or isinstance(leaf, torch.memory_format)


def _rows(result: Any) -> list[Any]:
    return list(result) if isinstance(result, tuple | list) else [result]


def _is_knowable(result: Any) -> bool:
    if not isinstance(result, torch.Tensor) or result.is_floating_point() or result.is_complex():
        return False
    sizes = list(result.shape)  # of what depends on values they are symbols
    return all(type(size) is int for size in sizes) and result.numel() <= _MOST


def _form(value: Any) -> tuple[Any, ...]:
    return (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else ()


def _computed(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the function gives outside of the tracer, for copies: it may write into them."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        args, kwargs = pytree.tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
        return func(*args, **kwargs)
