"""Fake tensors, with which a tracer runs a model: none is left where that run could put one."""

import functools
import gc
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FunctionType, ModuleType
from typing import Any, Final

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from baechi.torch_support.symbolic_sizes import SYMBOLIC
from baechi.torch_support.torch_internals import state_of
from baechi.torch_support.tracer_internals import FakeTensor
from baechi.tracing.model_notes import MOST_HOLDERS, entries, holders_in, is_record
from baechi.tracing.pytrees import is_container

# Packages whose own caches keep no tensor of a model. All else is looked into in every trace.
_NO_MODELS: Final = {
    *("baechi", "torch", "numpy", "sympy", "mpmath", "scipy", "networkx", "highspy", "rich"),
    *sys.stdlib_module_names,
}
# What may hold a function with a cache in its `__wrapped__`, or as a function's closure.
_WRAPPERS: Final = (FunctionType, staticmethod, classmethod)
# Of each file of an installed package, how many names it has and its functions with a cache. To
# look at all that transformers has takes as long as to trace a small model.
_LOOKED: Final[dict[str, tuple[int, dict[int, Any]]]] = {}
_INSTALLED: Final = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})


@contextmanager
def fakes_removed(model: nn.Module) -> Iterator[None]:
    """Run the model's Python on a tracer's tensors inside; none of them is left in it after that.

    Except parameters, buffers and submodules that forward makes: `unchanged` reports these.
    """
    known = {id(row) for module in model.modules() for row in state_of(module)}
    scopes = [value for scope in _scopes(model) for value in list(scope.values())]
    rows = {id(row): row for row in (*holders_in(model), *filter(is_container, scopes))}
    before = [(row, dict(entries(row))) for key, row in rows.items() if key not in known]
    values = [value for _, own in before for value in own.values()]
    caches = [(row, row.cache_info().misses) for row in _cached_functions(scopes + values)]
    try:
        yield
    finally:
        torch.clear_autocast_cache()  # a weight's cast may be a fake one
        for cache, misses in caches:
            if cache.cache_info().misses != misses and _holds_fake(gc.get_referents(cache)):
                cache.cache_clear()
        for holder, own in before:
            _clean(holder, own)


def _cached_functions(values: list[Any]) -> list[Any]:
    """Functions with `functools.lru_cache` among these values, and in all files.

    A file of an installed package is looked into again where it has more names or fewer.
    """
    found, values = dict[int, Any](), values.copy()
    for name, file in list(sys.modules.items()):
        if _is_of_no_model(name) or not issubclass(type(file), ModuleType):
            continue
        names = vars(file)
        if name not in _LOOKED and not str(names.get("__file__")).startswith(_INSTALLED):
            values += list(names.values())
            continue
        if name not in _LOOKED or _LOOKED[name][0] != len(names):
            _LOOKED[name] = len(names), _caches_in(list(names.values()))
        if caches := _LOOKED[name][1]:
            found |= caches
    return list((found | _caches_in(values)).values())


@functools.cache
def _is_of_no_model(name: str) -> bool:
    return name.partition(".")[0] in _NO_MODELS


def _caches_in(values: list[Any]) -> dict[int, Any]:
    """Functions with a cache among the values and in the classes of these, by their ids."""
    kinds = {id(value): value for value in values if issubclass(type(value), type)}
    values = values + [value for kind in kinds.values() for value in list(vars(kind).values())]
    found: dict[int, Any] = {}
    seen: set[int] = set()
    while values:
        inner: list[Any] = []
        for value in values:
            kind = type(value)
            if kind is functools._lru_cache_wrapper:
                found[id(value)] = value
            elif kind is FunctionType and not (value.__closure__ or value.__dict__):
                continue  # most are: it wraps nothing
            elif kind in _WRAPPERS and id(value) not in seen:
                seen.add(id(value))
                inner.append(getattr(value, "__wrapped__", None))
                for cell in getattr(value, "__closure__", None) or ():
                    with suppress(ValueError):  # it is empty
                        inner.append(cell.cell_contents)
        values = inner
    return found


def _scopes(model: nn.Module) -> list[Mapping[str, Any]]:
    """What the classes of the model's modules define, and the files of these."""
    kinds = {
        kind
        for module in model.modules()
        for kind in type(module).__mro__
        if kind.__module__.partition(".")[0] not in ("torch", "builtins")
    }
    files = {kind.__module__ for kind in kinds} & sys.modules.keys()
    return [*map(vars, kinds), *(vars(sys.modules[name]) for name in files)]


def _clean(holder: Any, before: dict[Any, Any]) -> None:
    """Remove a tracer's tensors from a list or a dict."""
    new = [key for key, value in entries(holder) if value is not before.get(key)]
    fakes = [key for key in new if _holds_fake(holder[key])]
    if fakes and not isinstance(holder, dict):
        holder.clear()
        holder.extend(before.values())
        return
    for key in fakes:
        if key in before:
            holder[key] = before[key]
        else:
            del holder[key]


def _holds_fake(value: Any) -> bool:
    """True if it holds a tracer's tensor or size, also in the attributes of an object."""
    left, seen = [value], set[int]()
    while left:
        for leaf in pytree.tree_leaves(left.pop()):
            if isinstance(leaf, (FakeTensor, fx.Proxy, *SYMBOLIC)):
                return True
            if is_record(leaf) and id(leaf) not in seen and len(seen) < MOST_HOLDERS:
                seen.add(id(leaf))
                left.append(vars(leaf))
    return False
