"""Guards on plain attributes of a model's modules: a rate, a flag, the active adapter.

A trace is valid for their values, as it is for the modes of modules: after `dropout.p = 0.1` or
`adapter.disabled = True` the model is another program. Functions and tensors count, too: a tensor
by its identity, since a placed model reads its contents. So does an attribute that hides one of the
module's class, as `layer.forward = f` does.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from operator import attrgetter, is_, itemgetter
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Final, final

import torch
from torch import nn
from torch.utils import _pytree as pytree

_ITSELF: Final = (MethodType, partial, torch.Tensor)  # compared by identity
_PLAIN: Final = (
    *(bool, int, float, complex, str, bytes, type(None), Enum, torch.dtype),
    *(FunctionType, BuiltinFunctionType, *_ITSELF),
)
_OF_TORCH: Final = frozenset(vars(nn.Module()))  # modes, hooks, parameters: checked elsewhere
_COMPILED: Final = "_compiled_call_impl"  # whether it is compiled: the same program


@final
@dataclass(frozen=True, slots=True)
class _Row:
    """The plain attributes of one module: where they are, which, and their values."""

    path: str
    owner: Any  # the module's own dict; or the module, for attributes of its class
    names: tuple[str, ...]
    read: Callable[[Any], Any]
    values: Any
    tensors: tuple[torch.Tensor, ...]  # compared by identity

    @classmethod
    def of(cls, path: str, owner: Any, names: Iterable[str]) -> "_Row":
        names = tuple(names)
        read = _reader(owner, names)
        values = read(owner)
        same = {id(leaf): leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, _ITSELF)}
        return cls(path, owner, names, read, copy.deepcopy(values, same), _tensors(values))

    def holds(self) -> bool:
        """True if all still have their values."""
        return _holds(self.read, self.owner, self.values, self.tensors)

    def changed(self) -> dict[str, Any]:
        """The value that each had of those that have another, or are gone."""
        values = self.values if len(self.names) > 1 else (self.values,)
        pairs = zip(self.names, values, strict=True)
        return {
            name: value
            for name, value in pairs
            if not _holds(_reader(self.owner, (name,)), self.owner, value, _tensors(value))
        }


@final
@dataclass(frozen=True, slots=True)
class _Names:
    """The attributes that a module itself has."""

    path: str
    module: nn.Module
    own: dict[str, Any]
    names: frozenset[str]
    n: int

    @classmethod
    def of(cls, path: str, module: nn.Module) -> "_Names":
        own = vars(module)
        return cls(path, module, own, frozenset(own), len(own))

    def hiding(self) -> list[str]:
        """Those that came since, and hide what the module's class has."""
        new = sorted(self.own.keys() - self.names - {_COMPILED})
        return [name for name in new if hasattr(type(self.module), name)]


@final
class Attributes:
    """The plain attributes of a model's modules as they are now.

    Plain are numbers, strings, flags, functions, and lists, tuples, sets and dicts of these. Other
    objects are not looked into. Attributes that come later count if they hide one of the class.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._rows = [
            _Row.of(path, owner, names)
            for path, module in model.named_modules()
            for owner, names in ((vars(module), _own(module)), (module, _of_class(module)))
            if names
        ]
        self._names = [_Names.of(path, module) for path, module in model.named_modules()]

    def settled(self) -> "Attributes":
        """These without the ones that have changed since, which forward sets itself."""
        rows = [(row, {} if row.holds() else row.changed()) for row in self._rows]
        return self._with(
            (
                _Row.of(row.path, row.owner, kept) if changed else row
                for row, changed in rows
                if (kept := [name for name in row.names if name not in changed])
            ),
            (_Names.of(row.path, row.module) for row in self._names),
        )

    def outside(self, leaves: Iterable[nn.Module]) -> "Attributes":
        """These without those of submodules that stay whole: their Python reads what is there."""
        modules = [module for leaf in leaves for module in leaf.modules()]
        whole = {id(owner) for module in modules for owner in (module, vars(module))}
        return self._with(
            (row for row in self._rows if id(row.owner) not in whole),
            (row for row in self._names if id(row.module) not in whole),
        )

    def hold(self) -> bool:
        """True if all are unchanged; takes about 0.4 us a module."""
        for names in self._names:
            if len(names.own) != names.n and names.hiding():
                return False
        return all(row.holds() for row in self._rows)

    def changed(self) -> str:
        """One that is not as it was, for people; empty if there is none."""
        for row in self._rows:
            if not row.holds():
                name, was = min(row.changed().items(), key=itemgetter(0))
                owner = row.owner
                read = owner.get if isinstance(owner, dict) else partial(getattr, owner)
                now = read(name, "gone")
                title = f"{row.path}.{name}".lstrip(".")
                if isinstance(was, torch.Tensor):
                    return f"{title} was another tensor"
                return f"{title} was {was!r} and is {now!r}"
        for names in self._names:
            for name in names.hiding():
                title = f"{names.path}.{name}".lstrip(".")
                return f"{title} was its class's and is {names.own[name]!r}"
        return ""

    def _with(self, rows: Iterable[_Row], names: Iterable[_Names]) -> "Attributes":
        found = object.__new__(Attributes)
        found._rows, found._names = list(rows), list(names)
        return found


def _own(module: nn.Module) -> list[str]:
    return [name for name, v in vars(module).items() if name not in _OF_TORCH and _is_plain(v)]


def _of_class(module: nn.Module) -> list[str]:
    """Plain attributes of its classes, but for torch's, that it does not have itself."""
    found: dict[str, Any] = {}
    for kind in type(module).__mro__:
        if not kind.__module__.startswith("torch."):
            found = {**vars(kind), **found}
    return [
        name
        for name, value in found.items()
        if name not in vars(module)
        and not name.startswith("__")
        and not isinstance(value, FunctionType | BuiltinFunctionType)
        and _is_plain(value)
    ]


def _reader(owner: Any, names: tuple[str, ...]) -> Callable[[Any], Any]:
    return itemgetter(*names) if isinstance(owner, dict) else attrgetter(*names)


def _holds(
    read: Callable[[Any], Any], owner: Any, value: Any, tensors: Sequence[torch.Tensor]
) -> bool:
    """True if the value read is equal, with these tensors; not-a-number equals itself."""
    try:
        now = read(owner)
        if (now,) != (value,):
            return False
    except Exception:  # deleted, or compared with what has no one truth, such as a tensor
        return False
    return not tensors or all(map(is_, _tensors(now), tensors))


def _tensors(value: Any) -> tuple[torch.Tensor, ...]:
    leaves = pytree.tree_leaves(value)
    return tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(_is_plain(key) and _is_plain(row) for key, row in value.items())
    return isinstance(value, _PLAIN)
