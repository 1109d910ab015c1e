"""Cross-stream barriers at the ends of a phase, and the memory that is held until there.

    one       ──┐ ┌──►
    another   ──┼─┤►      one of them waits for all that are done, then all others for it
    a third   ──┘ └──►

So n streams need 2n waits and no n x n. Events are made once and recorded anew every time, which is
safe because a single thread launches, and records each before the waits for it.

The caching allocator returns memory to the stream on which it was allocated as soon as the host
drops it, whatever other streams still do with it. So a tensor that crosses streams is held until
the barrier at the end of its phase. What autograd has saved of it lives on, and is dropped when the
host reaches it in the backward; so the backward holds it again, to its own end.

Memory: what crosses lives to the end of its phase, and what autograd saved of it to the end of the
backward, at most its bytes longer than the placement says.
"""

import weakref
from collections.abc import Iterable
from typing import final

import torch

from baechi.torch_support.storages import distinct_storages, key_of


@final
class StreamBarriers:
    """Makes streams wait for each other."""

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


@final
class HeldStorages:
    """Storages that are held over a phase; between phases, weak references to them."""

    def __init__(self) -> None:
        self._strong: dict[int, torch.UntypedStorage] = {}
        self._weak: list[weakref.ref[torch.UntypedStorage]] = []

    def __len__(self) -> int:
        return len(self._strong)

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return any(key in self._strong for key in distinct_storages([tensor]))

    def add(self, tensor: torch.Tensor) -> None:
        """Hold a tensor's storages until `rest` or `wake`'s phase ends."""
        self._strong.update(distinct_storages([tensor]))

    def rest(self) -> None:
        """Drop all, but remember weakly what others keep alive: every stream has waited."""
        self._weak = [weakref.ref(storage) for storage in self._strong.values()]
        self._strong = {}

    def wake(self) -> None:
        """Hold again what is still alive."""
        for reference in self._weak:
            storage = reference()
            if storage is not None:
                self._strong[key_of(storage)] = storage
        self._weak = []
