"""The key of a loss function, by which plans of a step are kept: what it reads in Python.

Its code is looked into, and that of functions of the same program that it calls; not that of
installed libraries. What is found are variables of closures, globals, defaults, attributes, and
what an array holds.
Complexity: O(values found), at every step.
"""

import dis
import inspect
import sysconfig
from collections import deque
from collections.abc import Callable
from enum import Enum
from functools import lru_cache, partial
from types import CodeType, FunctionType, MemberDescriptorType, MethodType
from typing import Any, Final, final

import torch
from torch import nn

_PLAIN: Final = (int, float, complex, str, bytes, type(None), Enum, torch.dtype, torch.device)
_READS: Final = ("LOAD_ATTR", "LOAD_METHOD")
_LIBRARIES: Final = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))
_MOST_READ: Final = 1_000  # elements of a list or a dict; of a longer one none is looked at


@final
class _Itself:
    """Equal for the very same object alone, which it keeps: no other gets its address meanwhile."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


def key_of_loss(loss: Callable[..., Any] | None) -> Any:
    """Equal for losses that do the same: one code that finds the same values.

    A plan keeps what the loss read in Python when it was traced: variables, attributes, and what
    functions of the same program read that it calls. Tensors count by their identity, since plans
    read their contents anew.
    """
    return read_by(loss)[0]


def read_by(loss: Callable[..., Any] | None) -> tuple[Any, list[Any]]:
    """The key of a loss; and the lists and dicts that it reads, or may write into."""
    seen: dict[Any, Any] = {}
    key = _found(loss, frozenset(), seen)
    rows = [value for value in seen.values() if type(value) in (list, dict)]
    return key, [row for row in rows if len(row) < _MOST_READ]


def _found(value: Any, names: frozenset[str], seen: dict[Any, Any]) -> Any:
    """What code finds in a value that reads attributes of these names."""
    if isinstance(value, _PLAIN):
        return type(value), repr(value)
    if isinstance(value, MethodType):
        read = _names(inspect.unwrap(value.__func__).__code__)[1]
        return _found(value.__func__, frozenset(), seen), _found(value.__self__, read, seen)
    if (id(value), names) in seen or isinstance(value, torch.Tensor):
        return _Itself(value)
    seen[id(value), names] = value
    kind: Any = type(value)
    if isinstance(value, partial):
        inner = [value.func, *value.args, *value.keywords.items()]
    elif isinstance(value, dict | list | tuple | set | frozenset | deque):
        few = len(value) < _MOST_READ
        inner = [*value, *(value.values() if isinstance(value, dict) else ())] if few else []
    elif hasattr(kind, "__array_interface__") and value.size < _MOST_READ:  # of numpy
        inner = [repr(value.tolist())]
    elif isinstance(value, FunctionType) and not _is_own(value):
        kind, inner = _Itself(value), [getattr(value, "__wrapped__", None)]
    elif isinstance(value, FunctionType):
        kind, (read, names) = value.__code__, _names(value.__code__)
        inner = [cell.cell_contents for cell in value.__closure__ or ()]
        inner += [value.__defaults__, value.__kwdefaults__]
        inner += [value.__globals__.get(name) for name in sorted(read)]
    else:
        kind, inner = _Itself(value), _held(value, names)
    return kind, *(_found(row, names, seen) for row in inner)


def _held(value: Any, names: frozenset[str]) -> list[Any]:
    """What an object has under these names, with methods, and what code calls unnamed."""
    own, inner = dict(getattr(value, "__dict__", {})), []
    kind: Any = type(value)
    if isinstance(value, nn.Module):
        own |= value._modules
        forward = inspect.getattr_static(kind, "forward", None)
        inner += [MethodType(forward, value)] if isinstance(forward, FunctionType) else []
    for name in sorted(names | _special(kind)):
        held: Any = own[name] if name in own else inspect.getattr_static(kind, name, None)
        if name not in own:
            held = getattr(held, "fget", getattr(held, "__func__", held))
            if _is_own(held):
                held = MethodType(held, value)
            elif isinstance(held, MemberDescriptorType) and name != "__dict__":  # a slot
                held = getattr(value, name, None)
        inner.append(held)
    return inner


def _is_own(held: Any) -> bool:
    """True if it is a function of the program, and not of an installed library."""
    return isinstance(held, FunctionType) and not held.__code__.co_filename.startswith(_LIBRARIES)


@lru_cache(maxsize=256)
def _special(kind: type) -> frozenset[str]:
    """Methods that code calls without naming them, as `value[i]` and `float(value)` do."""
    rows = (row for base in kind.__mro__ for row in vars(base).items())
    return frozenset(n for n, held in rows if n[:2] == "__" and _is_own(held)) - {"__init__"}


@lru_cache(maxsize=256)
def _names(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """The names of the global variables and of the attributes that code reads."""
    rows = [(row.opname, row.argval) for row in dis.get_instructions(code)]
    inner = [_names(const) for const in code.co_consts if isinstance(const, CodeType)]
    read = {n for op, n in rows if op == "LOAD_GLOBAL"}
    named = {n for op, n in rows if op in _READS or (isinstance(n, str) and "getattr" in read)}
    return (
        frozenset(read).union(*(row[0] for row in inner)),
        frozenset(named).union(*(row[1] for row in inner)),
    )
