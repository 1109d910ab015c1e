"""Memory that crosses streams, held until all that use it have ended."""

import weakref
from collections import defaultdict
from typing import final

import torch

from baechi.torch_support.storages import distinct_storages, is_mine_alone, key_of


@final
class HeldStorages:
    """Storages that cross streams, held over a phase; between phases, weak references to them.

    What autograd has saved of them is dropped when the host reaches it in the backward, whatever
    other streams still do with it; so the backward holds it again, to its own end.

    Of several micro-batches, what has arrived on a device goes earlier: nobody else has it any
    more when a next turn begins there, and a later copy to there waits until that turn began.
    """

    def __init__(self) -> None:
        self._strong: dict[int, torch.UntypedStorage] = {}
        self._weak: list[weakref.ref[torch.UntypedStorage]] = []
        self._arrived: dict[int, set[int]] = defaultdict(set)  # keys, by logical device
        self._read: dict[int, tuple[torch.cuda.Event, list[torch.UntypedStorage]]] = {}

    def __len__(self) -> int:
        return len(self._strong)

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return bool(self._strong) and any(
            key in self._strong for key in distinct_storages([tensor])
        )

    def turn(self, device: int, stream: torch.cuda.Stream) -> None:
        """Note what the turns of a device until now were the last to read."""
        there = self._arrived[device]
        gone = [key for key in there if is_mine_alone(self._strong[key])]
        if gone:
            _, storages = self._read.get(device, (None, []))
            storages += map(self._strong.pop, gone)
            there.difference_update(gone)
            self._read[device] = stream.record_event(), storages

    def drop(self, device: int, stream: torch.cuda.Stream) -> None:
        """Let go of that, on the stream that has made it and now waits for those turns."""
        if device in self._read:
            stream.wait_event(self._read.pop(device)[0])

    def add(self, tensor: torch.Tensor, arrived: int | None = None) -> None:
        """Hold a tensor's storages until `rest`, or a copy's on a device until `drop`."""
        self._strong.update(storages := distinct_storages([tensor]))
        if arrived is not None:
            self._arrived[arrived].update(storages)

    def rest(self) -> None:
        """Drop all, but remember weakly what others keep alive."""
        self._weak = [weakref.ref(storage) for storage in self._strong.values()]
        self._strong = {}
        self._arrived.clear()
        self._read.clear()

    def wake(self) -> None:
        """Hold again what is still alive."""
        alive = [storage for reference in self._weak if (storage := reference()) is not None]
        self._strong.update((key_of(storage), storage) for storage in alive)
        self._weak = []
