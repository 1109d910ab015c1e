"""Removal of a tracer's tensors from what a model keeps from one run to the next.

A tracer runs the model's Python on tensors without values. A cache that keeps one of them, such as
a dict of tables by length or a function with `functools.lru_cache`, would return it in the next
run: by another tracer, on real tensors, or the user's own. So after each run it is removed.

The search covers the attributes of the model's modules, with the lists, dicts and objects in them,
the lists and dicts of their classes and of the files that define these, and functions with
`functools.lru_cache` in all imported files: a model calls those of other files, and through
decorators. It finds functions that have a name in a file, a class or the model, or a decorator that
has one.

Complexity: one pass over these names, some 50 ms where `transformers` is imported.
"""

import functools
import gc
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import CellType, FunctionType, ModuleType
from typing import Any, Final

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from baechi.tracing.containers import is_container

# How many lists, dicts and objects of a model are looked into.
_MOST_HOLDERS: Final = 100_000
# Packages whose own caches keep no tensor of a model.
_NO_MODELS: Final = {"torch", "numpy", "sympy", "mpmath", "scipy", *sys.stdlib_module_names}
# What may hold a function with a cache in its `__wrapped__`, or as a function's closure.
_WRAPPERS: Final = (FunctionType, staticmethod, classmethod)


@contextmanager
def taken_out(model: nn.Module) -> Iterator[None]:
    """Run the model's Python on a tracer's tensors inside; none of them is left in it after that.

    Except parameters, buffers and submodules that forward makes: `unchanged` reports these.

    Args:
        model: The model, or a module that holds it.
    """
    known = {id(row) for module in model.modules() for row in rosters(module)}
    rows = [row for row in (*holders(model), *_tables(model)) if id(row) not in known]
    before = [(holder, dict(entries(holder))) for holder in rows]
    caches = [(row, row.cache_info().misses) for row in _cached_functions(rows)]
    try:
        yield
    finally:
        for cache, misses in caches:
            if cache.cache_info().misses != misses and _holds_fake(gc.get_referents(cache)):
                cache.cache_clear()
        for holder, own in before:
            _clean(holder, own)


def _cached_functions(rows: list[Any]) -> list[Any]:
    """Functions with `functools.lru_cache` in these lists and dicts, and in all files."""
    files = [
        row
        for name, row in list(sys.modules.items())
        if name.partition(".")[0] not in _NO_MODELS and issubclass(type(row), ModuleType)
    ]
    values = [value for file in files for value in list(vars(file).values())]
    kinds = {id(value): value for value in values if issubclass(type(value), type)}
    values += [value for kind in kinds.values() for value in list(vars(kind).values())]
    values += [value for row in rows for _, value in entries(row)]
    found: dict[int, Any] = {}
    seen: set[int] = set()
    while values:
        value = values.pop()
        if type(value) is functools._lru_cache_wrapper:
            found[id(value)] = value
        elif type(value) in _WRAPPERS and id(value) not in seen:
            seen.add(id(value))
            values.append(getattr(value, "__wrapped__", None))
            cells = getattr(value, "__closure__", None) or ()
            values += [cell.cell_contents for cell in cells if _is_filled(cell)]
    return list(found.values())


def _is_filled(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def holders(model: nn.Module) -> list[Any]:
    """Dicts of attributes, and lists and dicts, in which the model's modules keep something."""
    found: dict[int, Any] = {}
    left: deque[Any] = deque(vars(module) for module in model.modules())
    while left and len(found) < _MOST_HOLDERS:
        holder = left.popleft()
        if id(holder) not in found:
            found[id(holder)] = holder
            for _, value in entries(holder):
                if is_container(value):
                    left.append(value)
                elif _is_record(value):
                    left.append(vars(value))
    return list(found.values())


def rosters(module: nn.Module) -> list[dict[str, Any]]:
    """Its parameters, buffers and submodules."""
    return [module._parameters, module._buffers, module._modules]


def entries(holder: Any) -> list[tuple[Any, Any]]:
    """The keys of a list, a dict or a deque with their values."""
    return list(holder.items() if isinstance(holder, dict) else enumerate(holder))


def _tables(model: nn.Module) -> list[Any]:
    """The lists and dicts of the classes of the model's modules, and of the files of these."""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    kinds = {
        kind for kind in kinds if kind.__module__.partition(".")[0] not in ("torch", "builtins")
    }
    files = {kind.__module__ for kind in kinds} & sys.modules.keys()
    scopes: list[Mapping[str, Any]] = [vars(kind) for kind in kinds]
    scopes += [vars(sys.modules[name]) for name in files]
    found = {id(value): value for scope in scopes for value in scope.values()}
    return [value for value in found.values() if is_container(value)]


def _is_record(value: Any) -> bool:
    """True if it is an object that may hold tensors in attributes: a cache, a state."""
    apart = isinstance(value, torch.Tensor | nn.Module | ModuleType | FakeTensorMode)
    return not apart and not callable(value) and type(getattr(value, "__dict__", None)) is dict


def _clean(holder: Any, before: dict[Any, Any]) -> None:
    """Take a tracer's tensors out of a list or a dict again."""
    new = [key for key, value in entries(holder) if value is not before.get(key)]
    if not isinstance(holder, dict):
        if any(_holds_fake(holder[key]) for key in new):
            holder.clear()
            holder.extend(before.values())
        return
    for key in new:
        if _holds_fake(holder[key]):
            if key in before:
                holder[key] = before[key]
            else:
                del holder[key]


def _holds_fake(value: Any) -> bool:
    """True if it holds a tracer's tensor, also in the attributes of an object."""
    left, seen = [value], {id(value)}
    while left:
        for leaf in pytree.tree_leaves(left.pop()):
            if isinstance(leaf, FakeTensor | fx.Proxy):
                return True
            if _is_record(leaf) and id(leaf) not in seen and len(seen) < _MOST_HOLDERS:
                seen.add(id(leaf))
                left.append(vars(leaf))
    return False
