"""Calls of a placed module from several threads: they run side by side, and who plans runs alone.

A trace replaces parameters, hooks and functions of the model for as long as it lasts. A call that
looked at the model meanwhile would find another one.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition, get_ident
from typing import final


@final
class Turns:
    """Who may look at a model. A thread that is inside already need not wait for itself."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._calls: Counter[int] = Counter()  # by thread
        self._planner: int | None = None

    @contextmanager
    def side_by_side(self) -> Iterator[None]:
        """Run the block when nobody plans."""
        me = get_ident()
        with self._changed:
            while self._planner not in (None, me):
                self._changed.wait()
            self._calls[me] += 1
        try:
            yield
        finally:
            with self._changed:
                self._calls[me] -= 1
                if not self._calls[me]:
                    del self._calls[me]
                    self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Run the block when no other thread calls or plans."""
        me = get_ident()
        with self._changed:
            while self._planner is not None or self._calls.keys() - {me}:
                self._changed.wait()
            self._planner = me
        try:
            yield
        finally:
            with self._changed:
                self._planner = None
                self._changed.notify_all()
