"""Nested values as flat lists of tensors and structures.

Tuples, and subclasses of lists and dicts that pytree knows, are opened by pytree. Lists, dicts and
dataclasses, what else pytree knows, such as a TensorDict, and objects of any class where they are
looked into, such as a cache of keys, are objects: one that is found twice stays one. Other
subclasses of lists and dicts, which may hold attributes besides, are not looked into.

A call may change the objects among its arguments. A trace runs on copies of them; their contents
afterwards are what a call must leave in the caller's objects: tensors that it computed, numbers as
they were in the trace.
"""

import dataclasses
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from types import EllipsisType, NoneType
from typing import Any, Final, final

import torch
from torch import fx
from torch.utils import _pytree as pytree

from baechi.torch_support.symbolic_sizes import SYMBOLIC

_SEQUENCES: Final = (list, deque)
_CONTAINERS: Final = (*_SEQUENCES, dict, OrderedDict, defaultdict)

Labels = tuple[Any, ...]  # keys of a dict, positions in a list, or names of attributes


def is_container(value: Any) -> bool:
    """True if it is a plain list, dict or deque, not of a subclass."""
    return type(value) in _CONTAINERS


def _can_hold(value: Any) -> bool:
    """True if the value can hold others, which `_contents` returns."""
    # A subclass of a container may have attributes beside its items; slots are not looked into.
    if isinstance(value, _CONTAINERS) or not hasattr(value, "__dict__"):
        return False
    try:
        object.__new__(type(value))
    except TypeError:  # it holds more than Python sees, as random.Random does
        return False
    return True


def is_record(value: Any) -> bool:
    """True of an object that is what its attributes are."""
    return _can_hold(value) and not isinstance(value, torch.nn.Module)


def _contents(value: Any) -> tuple[Labels, tuple[Any, ...]]:
    """The current contents of an object: labels, and the values themselves."""
    if isinstance(value, _SEQUENCES):
        return tuple(range(len(value))), tuple(value)
    own = value if isinstance(value, dict) else vars(value)
    return tuple(own), tuple(own.values())


def _empty(like: Any) -> Any:
    """A new object of the same class that holds nothing; its `__init__` does not run."""
    if isinstance(like, defaultdict):
        return defaultdict(like.default_factory)
    if isinstance(like, deque):
        return deque(maxlen=like.maxlen)
    return type(like)() if is_container(like) else object.__new__(type(like))


def _refill(value: Any, labels: Labels, values: Sequence[Any]) -> None:
    """Let an object hold this and nothing else; it stays the same object."""
    if isinstance(value, _SEQUENCES):
        value.clear()
        value.extend(values)
        return
    own = value if isinstance(value, dict) else vars(value)
    own.clear()
    own.update(zip(labels, values, strict=True))


Change = tuple[int, Labels, tuple[Any, ...]]  # of an object, by its number


@final
class ObjectChanges:
    """The objects of a call, as `Parts` finds them, with what they hold now."""

    def __init__(self, objects: Sequence[Any]) -> None:
        self.objects = tuple(objects)
        self._before = [_contents(each) for each in self.objects]

    def found(self) -> tuple[Change, ...]:
        """The new contents of objects that now hold other values; tensors count by identity."""
        now = [_contents(each) for each in self.objects]
        return tuple(
            (number, *after)
            for number, (before, after) in enumerate(zip(self._before, now, strict=True))
            if _differs(before, after)
        )


def _differs(before: tuple[Labels, tuple[Any, ...]], after: tuple[Labels, tuple[Any, ...]]) -> bool:
    if before[0] != after[0]:
        return True
    (one, form), (two, other) = (
        pytree.tree_flatten(values, is_container) for values in (before[1], after[1])
    )
    return form != other or any(a is not b for a, b in zip(one, two, strict=True))


def change(objects: Sequence[Any], changes: Iterable[Change]) -> None:
    """Let the objects hold what they held after `changes`."""
    for number, labels, values in changes:
        _refill(objects[number], labels, values)


@final
@dataclass(frozen=True, slots=True)
class _Slot:
    """The place of a tensor in a structure."""

    index: int


@final
@dataclass(frozen=True, slots=True)
class Number:
    """The place of a number that a tensor carries.

    An int is its first size, a float its value.
    """

    index: int


@final
@dataclass(frozen=True)
class _Object:
    """A list, a dict, or an object of any class, without its tensors."""

    like: Any
    labels: Labels
    values: "Structure"


@final
@dataclass(frozen=True)
class _Again:
    """An object that is known already, by its number; or a weak reference to it."""

    number: int
    weak: bool = False


_PLAIN: Final = (
    *(NoneType, bool, int, float, complex, str, bytes, range, slice, EllipsisType, Enum, _Again),
    Number,
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
    *SYMBOLIC,  # of a trace with symbols, which refuses what it cannot compute
)


@final
@dataclass(frozen=True)
class Structure:
    """A nested value without its tensors; `fill` puts tensors back.

    Attributes:
        leaves: Tensor slots and constants, in pytree order.
        spec: The structure by which pytree puts them together.
    """

    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec

    @property
    def is_tensor(self) -> bool:
        """True if the value is a tensor, with nothing around it."""
        return self.spec.is_leaf() and isinstance(self.leaves[0], _Slot)

    @cached_property
    def constants(self) -> tuple[Any, ...]:
        """The leaves that are no tensors, with None in the tensors' places."""
        return tuple(None if isinstance(leaf, _Slot) else leaf for leaf in self._flat())

    @cached_property
    def places(self) -> tuple[int, ...]:
        """The places of `constants` that are constants."""
        return tuple(i for i, leaf in enumerate(self._flat()) if not isinstance(leaf, _Slot))

    def _flat(self) -> Iterator[Any]:
        for leaf in self.leaves:
            if isinstance(leaf, _Object):
                yield from leaf.values._flat()
            else:
                yield leaf

    def mapped(self, change: Callable[[Any], Any]) -> "Structure":
        """The structure with `change(constant)` for each constant, in the order of `constants`."""
        leaves = tuple(
            replace(leaf, values=leaf.values.mapped(change))
            if isinstance(leaf, _Object)
            else leaf
            if isinstance(leaf, _Slot)
            else change(leaf)
            for leaf in self.leaves
        )
        return Structure(leaves, self.spec)

    @cached_property
    def form(self) -> tuple[Any, ...]:
        """Equal for what is nested in the same way, in objects of the same classes."""
        inner = (leaf for leaf in self.leaves if isinstance(leaf, _Object))
        rows = ((type(leaf.like), leaf.labels, leaf.values.form) for leaf in inner)
        return (str(self.spec), *rows)

    def fill(self, tensors: Sequence[Any], objects: Sequence[Any] = ()) -> Any:
        """The nested value with `tensors` in its slots, and `objects` where these were given.

        Other objects are new ones of their classes, whose `__init__` does not run.
        """
        first = self.leaves[0] if len(self.leaves) == 1 else None
        if type(first) is _Slot and self.spec.is_leaf():
            return tensors[first.index]
        return self._fill(tensors, list(objects))

    def _fill(self, tensors: Sequence[Any], objects: list[Any]) -> Any:
        leaves = [_filled(leaf, tensors, objects) for leaf in self.leaves]
        return pytree.tree_unflatten(leaves, self.spec)


def _filled(leaf: Any, tensors: Sequence[Any], objects: list[Any]) -> Any:
    if isinstance(leaf, _Slot):
        return tensors[leaf.index]
    if isinstance(leaf, Number):
        carrier = tensors[leaf.index]
        return carrier.shape[0] if carrier.dim() else carrier.item()
    if isinstance(leaf, _Again):
        known = objects[leaf.number]
        return weakref.ref(known) if leaf.weak else known
    if not isinstance(leaf, _Object):
        return leaf
    value = _empty(leaf.like)
    objects.append(value)
    _refill(value, leaf.labels, leaf.values._fill(tensors, objects))
    return value


@final
class Parts:
    """The tensors (fx proxies, too) and objects of what is taken apart, in the order found.

    Args:
        look_into: Whether to look into objects of any class: `fill` makes new ones.
        given: Objects that `fill` is given instead.
    """

    def __init__(self, *, look_into: bool = False, given: Sequence[Any] = ()) -> None:
        self.tensors: list[Any] = []
        self.objects: list[Any] = list(given)
        self._is_object = _is_object if look_into else _is_plain_object
        self._number = {id(each): i for i, each in enumerate(given)}

    def structure(self, value: Any, named: dict[str, Any] | None = None) -> Structure:
        """Of a value of any kind; of a call, the dict of named arguments belongs to no caller."""
        reordered = False

        def is_leaf(each: Any) -> bool:
            nonlocal reordered
            reordered |= isinstance(each, OrderedDict) and not is_container(each)
            return each is not named and _is_leaf(each)

        leaves, spec = pytree.tree_flatten(value, is_leaf)
        if reordered:  # what `fill` makes of a ModelOutput is in the order of its class's fields
            value = pytree.tree_unflatten(leaves, spec)
            named = named if named is None else value[1]
            leaves, spec = pytree.tree_flatten(value, is_leaf)
        return Structure(tuple(map(self._slot, leaves)), spec)

    def arguments(self, positional: tuple[Any, ...], named: dict[str, Any]) -> Structure:
        """Of a call."""
        return self.structure((positional, named), named)

    def _slot(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor | fx.Proxy):
            self.tensors.append(leaf)
            return _Slot(len(self.tensors) - 1)
        if isinstance(leaf, weakref.ref) and id(leaf()) in self._number:
            return _Again(self._number[id(leaf())], weak=True)
        if not self._is_object(leaf):
            return leaf
        if id(leaf) in self._number:
            return _Again(self._number[id(leaf)])
        self._number[id(leaf)] = len(self.objects)
        self.objects.append(leaf)
        labels, values = _contents(leaf)
        return _Object(_empty(leaf), labels, self.structure(values))


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of a nested value, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    parts = Parts()
    parts.structure(value)
    return parts.tensors


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """The nested value with the function's results in place of its tensors, taken in order."""
    parts = Parts()
    structure = parts.structure(value)
    return structure.fill([function(tensor) for tensor in parts.tensors])


def _is_leaf(value: Any) -> bool:
    """True if pytree must not open it: it would turn a size into a tuple."""
    return is_container(value) or isinstance(value, torch.Size) or _is_opened_object(value)


def _is_opened_object(value: Any) -> bool:
    """True if pytree would make a new one of an object that forward may change (a TensorDict)."""
    known = type(value) in pytree.SUPPORTED_NODES and not isinstance(value, tuple)
    return known and _can_hold(value)


def is_plain(value: Any) -> bool:
    """True if a trace may hold the value as it is."""
    return isinstance(value, _PLAIN) or (callable(value) and not _has_tensors(value, set()))


def _has_tensors(value: Any, seen: set[int]) -> bool:
    """True of an object that holds tensors, as a batch of graphs does that can be called, too."""
    if id(value) in seen or isinstance(value, torch.nn.Module) or not _can_hold(value):
        return isinstance(value, torch.Tensor)
    seen.add(id(value))
    rows = pytree.tree_leaves(list(_contents(value)[1]))
    return any(_has_tensors(row, seen) for row in rows)


def _is_object(value: Any) -> bool:
    """True if the attributes of the value can be read."""
    return _is_plain_object(value) or (not is_plain(value) and _can_hold(value))


def _is_plain_object(value: Any) -> bool:
    """True if the object is nothing but its contents: a list, a dict, a dataclass."""
    record = dataclasses.is_dataclass(value) and hasattr(value, "__dict__")
    if record and not isinstance(value, (type, *_CONTAINERS)):
        return True
    return is_container(value) or _is_opened_object(value)


MARK: Final = object()  # in place of a tensor or a constant


def mark_paths(value: Any, seen: set[int]) -> Iterator[tuple[str, ...]]:
    """The path of each mark, in the order of `Parts`; `seen` are the objects known already."""
    rows, _ = pytree.tree_flatten_with_path(value, lambda v: _is_leaf(v) or bool(_unnamed(v)))
    for path, leaf in rows:
        keys = tuple(str(getattr(entry, "key", getattr(entry, "idx", entry))) for entry in path)
        if leaf is MARK:
            yield keys
        elif not _is_leaf(leaf) and (flatten := _unnamed(leaf)):
            for index, held in enumerate(flatten(leaf)[0]):
                yield from ((*keys, str(index), *inner) for inner in mark_paths(held, seen))
        elif id(leaf) not in seen:
            seen.add(id(leaf))
            for label, held in zip(*_contents(leaf), strict=True):
                yield from ((*keys, str(label), *inner) for inner in mark_paths(held, seen))


def _unnamed(value: Any) -> Any:
    """What takes a value apart whose class is registered with pytree without names; else None."""
    node = pytree.SUPPORTED_NODES.get(type(value))
    return None if node is None or node.flatten_with_keys_fn else node.flatten_fn
