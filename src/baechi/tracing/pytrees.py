"""Nested values as flat lists of tensors and structures.

Tuples and what else pytree knows are opened by pytree. Lists, dicts and dataclasses, and objects of
any class where they are looked into, are objects: one that is found twice stays one.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from types import EllipsisType, NoneType
from typing import Any, final

import torch
from torch.utils import _pytree as pytree

from baechi.tracing.containers import Contents, can_hold, contents, empty, is_container, refill

_PLAIN = (
    *(NoneType, bool, int, float, complex, str, bytes, range, slice, EllipsisType, Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
)


@final
class _Slot:
    """The place of a tensor in a structure."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


@final
@dataclass(frozen=True)
class _Object:
    """A list, a dict, or an object of any class such as a cache of keys, without its tensors."""

    like: Any
    contents: Contents
    values: "Structure"

    def fill(self, tensors: Sequence[Any], objects: list[Any]) -> Any:
        """A new object of the class that holds these; its `__init__` does not run."""
        value = empty(self.like)
        objects.append(value)
        refill(value, self.contents, self.values._fill(tensors, objects))
        return value


@final
@dataclass(frozen=True)
class _Again:
    """An object that is known already, by its number."""

    number: int


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
    def n_tensors(self) -> int:
        """The number of tensors that `fill` takes."""
        return sum(isinstance(leaf, _Slot) for leaf in self._flat())

    @property
    def constants(self) -> tuple[Any, ...]:
        """The leaves that are no tensors, with None in the tensors' places."""
        return tuple(None if isinstance(leaf, _Slot) else leaf for leaf in self._flat())

    def _flat(self) -> Iterator[Any]:
        for leaf in self.leaves:
            if isinstance(leaf, _Object):
                yield from leaf.values._flat()
            else:
                yield leaf

    @property
    def form(self) -> tuple[Any, ...]:
        """Equal for what is nested in the same way, in objects of the same classes."""
        inner = (leaf for leaf in self.leaves if isinstance(leaf, _Object))
        rows = ((type(leaf.like), leaf.contents, leaf.values.form) for leaf in inner)
        return (str(self.spec), *rows)

    def fill(self, tensors: Sequence[Any], objects: Sequence[Any] = ()) -> Any:
        """The nested value with `tensors` in its slots, and `objects` where these were given."""
        return self._fill(tensors, list(objects))

    def _fill(self, tensors: Sequence[Any], objects: list[Any]) -> Any:
        leaves = [_filled(leaf, tensors, objects) for leaf in self.leaves]
        return pytree.tree_unflatten(leaves, self.spec)


def _filled(leaf: Any, tensors: Sequence[Any], objects: list[Any]) -> Any:
    if isinstance(leaf, _Object):
        return leaf.fill(tensors, objects)
    if isinstance(leaf, _Again):
        return objects[leaf.number]
    return tensors[leaf.index] if isinstance(leaf, _Slot) else leaf


def flatten(
    value: Any,
    is_tensor: Callable[[Any], bool],
    *,
    objects: bool = False,
    given: Sequence[Any] = (),
) -> tuple[list[Any], Structure]:
    """The tensors of a nested value, in order, and the structure around them.

    Args:
        value: Tuples, lists, dicts, dataclasses, and what pytree knows, of anything.
        is_tensor: A predicate for leaves that are tensors.
        objects: Whether to look into objects of other classes too: `fill` makes new ones.
        given: Objects that `fill` is given instead.
    """
    parts = Parts(is_tensor, objects, given)
    return parts.tensors, parts.structure(value)


@final
class Parts:
    """The tensors and objects of what is taken apart, in the order that they are found in."""

    def __init__(
        self, is_tensor: Callable[[Any], bool], look_into: bool, given: Sequence[Any] = ()
    ) -> None:
        self.tensors: list[Any] = []
        self.objects: list[Any] = list(given)
        self._is_tensor = is_tensor
        self._look_into = look_into
        self._number = {id(each): i for i, each in enumerate(given)}

    def structure(self, value: Any) -> Structure:
        """Of a value of any kind."""
        return self._structure(value, _is_leaf)

    def arguments(self, positional: tuple[Any, ...], named: dict[str, Any]) -> Structure:
        """Of a call, whose dict of named arguments belongs to no caller."""
        return self._structure(
            (positional, named), lambda value: value is not named and _is_leaf(value)
        )

    def _structure(self, value: Any, is_leaf: Callable[[Any], bool]) -> Structure:
        leaves, spec = pytree.tree_flatten(value, is_leaf)
        return Structure(tuple(map(self._slot, leaves)), spec)

    def _slot(self, leaf: Any) -> Any:
        if self._is_tensor(leaf):
            self.tensors.append(leaf)
            return _Slot(len(self.tensors) - 1)
        if not (_is_object(leaf) if self._look_into else _is_plain_object(leaf)):
            return leaf
        if id(leaf) in self._number:
            return _Again(self._number[id(leaf)])
        self._number[id(leaf)] = len(self.objects)
        self.objects.append(leaf)
        what, values = contents(leaf)
        return _Object(empty(leaf), what, self.structure(values))


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of a nested value, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    tensors, _ = flatten(value, lambda leaf: isinstance(leaf, torch.Tensor))
    return tensors


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """The nested value with the function's results in place of its tensors, taken in order."""
    tensors, structure = flatten(value, lambda leaf: isinstance(leaf, torch.Tensor))
    return structure.fill([function(tensor) for tensor in tensors])


def _is_leaf(value: Any) -> bool:
    """True if pytree must not open it: it would turn a size into a tuple."""
    return is_container(value) or isinstance(value, torch.Size)


def is_plain(value: Any) -> bool:
    """True if a trace may hold the value as it is."""
    return isinstance(value, (*_PLAIN, _Again, Contents)) or callable(value)


def _is_object(value: Any) -> bool:
    """True if the attributes of the value can be read."""
    return _is_plain_object(value) or (not is_plain(value) and can_hold(value))


def _is_plain_object(value: Any) -> bool:
    """True if the object is nothing but its contents: a list, a dict, a dataclass."""
    return is_container(value) or (
        dataclasses.is_dataclass(value) and not isinstance(value, type | _Again | Contents)
    )


def paths(value: Any, seen: set[int]) -> Iterator[tuple[str, ...]]:
    """The path of each tensor, in the order of `Parts`."""
    rows, _ = pytree.tree_flatten_with_path(value, _is_leaf)
    for path, leaf in rows:
        keys = tuple(str(getattr(entry, "key", getattr(entry, "idx", entry))) for entry in path)
        if isinstance(leaf, torch.Tensor):
            yield keys
        elif _is_object(leaf) and id(leaf) not in seen:
            seen.add(id(leaf))
            what, values = contents(leaf)
            for label, held in zip(what.labels, values, strict=True):
                yield from ((*keys, str(label), *inner) for inner in paths(held, seen))
