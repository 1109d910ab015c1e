"""What crosses streams, held until every stream has waited for every other.

The caching allocator gives memory back to the stream on which it was taken, at the moment when the
host lets go of it, whatever other streams still do with it. So whoever else uses a tensor must have
been waited for by then. A phase ends with all streams waiting for all: what crossed in it is held
until there. What autograd has saved goes on living, and is let go of in the backward, when the host
comes to it; so the backward holds it again, to its own end.

Memory: what crosses lives to the end of its phase, and what autograd saved of it to the end of the
backward, at most its bytes longer than the placement says.
"""

import weakref
from typing import final

import torch

from baechi.torch_support.storages import storages


@final
class Held:
    """Holds storages over a phase, and knows over the next which of them live."""

    def __init__(self) -> None:
        self._strong: dict[int, torch.UntypedStorage] = {}
        self._weak: list[weakref.ref[torch.UntypedStorage]] = []

    def __len__(self) -> int:
        return len(self._strong)

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return any(storage._cdata in self._strong for storage in storages(tensor))

    def add(self, tensor: torch.Tensor) -> None:
        """Hold a tensor's storages until `rest` or `wake`'s phase ends."""
        self._strong.update((storage._cdata, storage) for storage in storages(tensor))

    def rest(self) -> None:
        """Let go, but know what others keep alive: every stream has waited for every other."""
        self._weak = [weakref.ref(storage) for storage in self._strong.values()]
        self._strong = {}

    def wake(self) -> None:
        """Hold again what is still alive."""
        for reference in self._weak:
            storage = reference()
            if storage is not None:
                self._strong[storage._cdata] = storage
        self._weak = []
