"""Checks shared by all constructors, each an `InputError` if it fails; and an immutable mapping."""

import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any, TypeVar, final

from baechi.errors import InputError

INT64_MAX = 2**63 - 1
MAX_THREADS = 1024  # per device: with many more, systems refuse, and the process ends
_K = TypeVar("_K")
_V = TypeVar("_V")


@final
class FrozenDict(Mapping[_K, _V]):
    """A mapping that cannot change; hashable when its values are; equal to any equal mapping."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[_K, _V] | None = None) -> None:
        self._items = dict(items or {})

    def __getitem__(self, key: _K) -> _V:
        return self._items[key]

    def __iter__(self) -> Iterator[_K]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self.items()))

    def __repr__(self) -> str:
        return repr(dict(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return (FrozenDict, (dict(self),))


def check_count(value: object, what: str) -> int:
    """`value` as an int in [0, 2**63); numpy integers are taken too."""
    count = _index(value)
    if count is None:
        raise InputError(
            f"{what} is {value!r}, a {type(value).__name__}; it must be an integer "
            "(nanoseconds or bytes)."
        )
    if not 0 <= count <= INT64_MAX:
        raise InputError(f"{what} is {count}; it must be between 0 and 2**63 - 1.")
    return count


def _index(value: object) -> int | None:
    """An integer of any type as an int; `None` for other values."""
    try:
        return None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:  # not an integer; or a class or a tensor of floats, which look like one
        return None


def check_positive(value: object, what: str, most: int = INT64_MAX) -> int:
    """`value` as a positive int of at most `most`."""
    count = _index(value)
    if count is None or not 1 <= count <= most:
        wanted = "a positive integer" if most == INT64_MAX else f"an integer from 1 to {most}"
        raise InputError(f"{what} is {value!r}; it must be {wanted}.")
    return count


def settle(
    record: object, check: Callable[[Any, str], object], names: Iterable[str], what: str
) -> None:
    """Set some fields of a frozen value to what `check` makes of them, as `<name> <what>`."""
    for name in names:
        object.__setattr__(record, name, check(getattr(record, name), f"{name} {what}"))


def check_threads(value: object, what: str) -> int:
    """`value` as a number of threads, at most `MAX_THREADS`."""
    return check_positive(value, what, MAX_THREADS)


def check_path(path: object) -> str | os.PathLike[str]:
    """`path`, if it is a text or a path."""
    if not isinstance(path, str | os.PathLike):
        raise InputError(f"the path is {path!r}, a {type(path).__name__}; give a str or a Path.")
    return path


def check_is(value: object, kind: type[_V], what: str) -> _V:
    """`value`, if it is of that class."""
    if not isinstance(value, kind):
        raise InputError(f"{what} is {value!r}, a {type(value).__name__}; give a {kind.__name__}.")
    return value


def check_choice(value: object, choices: tuple[str, ...], what: str) -> None:
    """Nothing, if the value is one of the choices."""
    if value not in choices:
        raise InputError(f"{what} is {value!r}; it must be one of {', '.join(choices)}.")


def check_row(values: object, what: str, kind: type | None = None) -> tuple[Any, ...]:
    """`values` as a tuple, each of that class where one is given."""
    if not isinstance(values, Iterable) or isinstance(values, str | bytes):
        raise InputError(f"{what} are {values!r}, a {type(values).__name__}; give a tuple of them.")
    row = tuple(values)
    if kind is not None and not set(map(type, row)) <= {kind}:
        wrong = next(value for value in row if type(value) is not kind)
        raise InputError(f"one of {what} is {wrong!r}; each must be a {kind.__name__}.")
    return row


def check_counts(values: Iterable[object], what: str) -> tuple[int, ...]:
    """All values as `check_count` gives them; fast where they are ints already."""
    row: tuple[Any, ...] = check_row(values, f"the values of {what}")
    if set(map(type, row)) <= {int} and (not row or (min(row) >= 0 and max(row) <= INT64_MAX)):
        return row
    return tuple(check_count(value, what) for value in row)


def check_pairs(values: object, what: str) -> tuple[tuple[int, ...], ...]:
    """`values` as a tuple of pairs of counts, whose first ones ascend."""
    rows = tuple(check_counts(row, what) for row in check_row(values, what))
    if any(len(row) != 2 for row in rows) or any(a[0] >= b[0] for a, b in pairwise(rows)):
        raise InputError(f"{what} is {rows}; give pairs, and by their first number, each once.")
    return rows


def check_name(value: object, what: str) -> str:
    """`value`, if it is a non-empty string."""
    if not isinstance(value, str) or not value:
        raise InputError(f"{what} is {value!r}; it must be a non-empty string.")
    return value
