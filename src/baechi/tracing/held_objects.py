"""What Python objects hold, compared by identity: some nanoseconds for each thing held."""

from collections.abc import Iterable, Iterator
from typing import Any, final

from baechi._core import same_contents


@final
class HeldObjects:
    """What dicts, lists, sets and other objects hold now.

    Equal things that are not the very ones count as others, but for elements of sets. What a thing
    holds that is held counts where it is among the holders itself.

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
