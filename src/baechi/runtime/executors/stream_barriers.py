"""Streams that wait for each other at the ends of a phase.

    one       ──┐ ┌──►
    another   ──┼─┤►      one of them waits for all that are done, then all others for it
    a third   ──┘ └──►

So n streams need 2n waits and no n x n. Events are made once and recorded anew every time, which is
safe because the one launching thread records each before the waits that mean it.
"""

from collections.abc import Iterable
from typing import final

import torch


@final
class Fence:
    """Lets streams wait for streams."""

    def __init__(self) -> None:
        self._events: dict[torch.cuda.Stream, torch.cuda.Event] = {}

    def join(self, done: Iterable[torch.cuda.Stream], waiting: Iterable[torch.cuda.Stream]) -> None:
        """Let every stream of `waiting` go on after all that is launched on those of `done`."""
        first, *others = dict.fromkeys(done)
        rest = [stream for stream in dict.fromkeys(waiting) if stream != first]
        if not others and not rest:
            return
        for stream in others:
            first.wait_event(self._recorded(stream))
        event = self._recorded(first)
        for stream in rest:
            stream.wait_event(event)

    def _recorded(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = self._events.get(stream)
        if event is None:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._events[stream] = event
        event.record(stream)
        return event
