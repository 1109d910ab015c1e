"""Arguments that a call may change: lists, dicts, and objects such as a cache of keys.

A trace runs on copies of them. Their contents afterwards are what a call must leave in the caller's
objects: tensors that it computed, numbers as they were in the trace.
"""

import dataclasses
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import Any, Final, final

from torch.utils import _pytree as pytree

# A subclass before its base.
_CONTAINERS: Final = (OrderedDict, dict, list, deque)
_EXACT: Final = frozenset((*_CONTAINERS, defaultdict))


@final
@dataclasses.dataclass(frozen=True)
class Contents:
    """The contents of an object.

    Attributes:
        keys: Of its items, if it is a dict.
        n_items: The number of items among the values; the others are attributes.
        names: Of its attributes; None if these are its items.
    """

    keys: tuple[Any, ...]
    n_items: int
    names: tuple[str, ...] | None

    @property
    def labels(self) -> tuple[Any, ...]:
        """Of all values."""
        return (*(self.keys or range(self.n_items)), *(self.names or ()))


def is_container(value: Any) -> bool:
    """True if it is a plain list, dict or deque, not of a subclass."""
    return type(value) in _EXACT


def can_hold(value: Any) -> bool:
    """True if the value can hold others; `contents` returns them."""
    if isinstance(value, _CONTAINERS):
        return True
    slotted = dataclasses.is_dataclass(value) and not isinstance(value, type)
    if not (slotted or hasattr(value, "__dict__")):
        return False
    try:
        object.__new__(type(value))
    except TypeError:  # it holds more than Python sees, as random.Random does
        return False
    return True


def contents(value: Any) -> tuple[Contents, tuple[Any, ...]]:
    """The current contents of an object, and the values themselves: items, then attributes."""
    keys: tuple[Any, ...] = ()
    items: tuple[Any, ...] = ()
    if isinstance(value, dict):
        base = _dict_class(value)
        keys, items = tuple(base.keys(value)), tuple(base.values(value))
    elif isinstance(value, list | deque):
        items = tuple(value)
    if _is_its_own_dict(value):
        return Contents(keys, len(items), None), items
    attributes = {} if is_container(value) else _attributes(value)
    return Contents(keys, len(items), tuple(attributes)), (*items, *attributes.values())


def _dict_class(value: dict[Any, Any]) -> Any:
    """The class whose methods no subclass has replaced."""
    return OrderedDict if isinstance(value, OrderedDict) else dict


def _is_its_own_dict(value: Any) -> bool:
    """True if `value.x` is `value["x"]`, as in classes called AttrDict."""
    return getattr(value, "__dict__", None) is value


def _attributes(value: Any) -> dict[str, Any]:
    own = getattr(value, "__dict__", None)
    if own is None and dataclasses.is_dataclass(value):  # one with slots
        names = (field.name for field in dataclasses.fields(value))
        return {name: getattr(value, name) for name in names if hasattr(value, name)}
    return dict(own or {})


def empty(like: Any) -> Any:
    """A new object of the same class that holds nothing; its `__init__` does not run."""
    kind = type(like)
    base = next((base for base in _CONTAINERS if issubclass(kind, base)), object)
    new: Any = base.__new__(kind)
    if isinstance(like, defaultdict):
        new.default_factory = like.default_factory
    elif isinstance(like, deque):
        deque.__init__(new, (), like.maxlen)
    if _is_its_own_dict(like):
        new.__dict__ = new
    return new


def refill(value: Any, what: Contents, values: Sequence[Any]) -> None:
    """Let an object hold this and nothing else; it stays the same object."""
    items, attributes = values[: what.n_items], values[what.n_items :]
    if isinstance(value, list | deque):
        value.clear()
        value.extend(items)
    elif isinstance(value, dict):
        base = _dict_class(value)
        base.clear(value)
        base.update(value, zip(what.keys, items, strict=True))
    if what.names is None or is_container(value):
        return
    named = zip(what.names, attributes, strict=True)
    own = getattr(value, "__dict__", None)
    if own is None:
        for name, attribute in named:
            object.__setattr__(value, name, attribute)
    else:
        own.clear()
        own.update(named)


Change = tuple[int, Contents, tuple[Any, ...]]  # of an object, by its number


@final
class Watched:
    """Objects with what they hold now.

    Args:
        objects: All objects that `contents` can read.
    """

    def __init__(self, objects: Sequence[Any]) -> None:
        self.objects = tuple(objects)
        self._before = [contents(each) for each in self.objects]

    def changes(self) -> tuple[Change, ...]:
        """The new contents of objects that now hold other values; tensors count by identity."""
        now = [contents(each) for each in self.objects]
        return tuple(
            (number, *after)
            for number, (before, after) in enumerate(zip(self._before, now, strict=True))
            if _differs(before, after)
        )


def _differs(
    before: tuple[Contents, tuple[Any, ...]], after: tuple[Contents, tuple[Any, ...]]
) -> bool:
    if before[0] != after[0]:
        return True
    (one, form), (two, other) = (
        pytree.tree_flatten(values, is_container) for values in (before[1], after[1])
    )
    return form != other or any(a is not b for a, b in zip(one, two, strict=True))


def change(objects: Sequence[Any], changes: Iterable[Change]) -> None:
    """Let the objects hold what they held after `changes`."""
    for number, what, values in changes:
        refill(objects[number], what, values)
