"""Contents of Python objects, compared by identity: some nanoseconds for each element."""

from collections.abc import Iterable, Iterator
from typing import Any, final

from baechi._core import same_contents


@final
class HeldObjects:
    """The elements of dicts, lists and sets, and attributes of other objects, as they are now.

    An equal element that is not the very same object counts as another one, except in sets. What an
    element holds itself does not count, unless it is among the holders, too.

    Args:
        holders: Dicts, lists and sets.
        attributes: Other objects, each with names of attributes that it has.
    """

    def __init__(
        self, holders: Iterable[Any], attributes: Iterable[tuple[Any, tuple[str, ...]]] = ()
    ) -> None:
        self._holders = list({id(holder): holder for holder in holders}.values())
        self._rows = list(map(_row, self._holders))
        for owner, names in attributes:
            self._holders.append(owner)
            self._rows.append(tuple(x for name in names for x in (name, getattr(owner, name))))

    def are_same(self) -> bool:
        """True if all hold what they held."""
        return same_contents(self._holders, self._rows)


def containers(values: Iterable[Any]) -> Iterator[Any]:
    """The dicts, lists and sets among values, and those that are inside."""
    for value in values:
        if isinstance(value, dict | list | set):
            yield value
        if isinstance(value, dict | list | tuple):
            yield from containers(value.values() if isinstance(value, dict) else value)


def _row(holder: Any) -> Any:
    if isinstance(holder, dict):
        return tuple(x for row in holder.items() for x in row)
    return tuple(holder) if isinstance(holder, list) else frozenset(holder)
