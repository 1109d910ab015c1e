"""Memory of what crosses between streams and devices.

    move            slots -> crossings: a tensor each, or the memory under several views of one
    CopyBuffers     buffers for what arrives, and the views that are cut out of them
    HeldStorages    what must live to the end of a phase

A step that is replayed finds buffers and views where they were in the last: its CUDA graphs have
addresses in them, and know a static tensor by its identity.

The caching allocator returns memory to its stream as soon as the host drops it, whatever other
streams still do with it. So a tensor that crosses streams is held until all have waited for each
other at the end of the phase. What autograd has saved of it lives on, to be dropped when the host
reaches it in the backward; so the backward holds it again, to its own end.
"""

import itertools
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, final

import torch
from torch.utils import _pytree as pytree

from baechi.runtime.autograd.binding import Moves
from baechi.runtime.autograd.step import Step
from baechi.runtime.executors.cuda_graphs import Statics
from baechi.torch_support.storages import crossings, cut_up, distinct_storages, key_of, laid_out

Send = Callable[[int, Sequence[torch.Tensor]], Sequence[torch.Tensor]]


@final
class CopyBuffers:
    """The buffers and views of every copy, by its key, where steps are replayed."""

    def __init__(self) -> None:
        self._rooms: dict[Hashable, tuple[Any, torch.Tensor, torch.Tensor]] = {}
        self._views: dict[Hashable, tuple[Any, torch.Tensor, tuple[torch.Tensor, ...]]] = {}

    def room(
        self,
        part: torch.Tensor,
        tensor: torch.Tensor,
        place: torch.device,
        key: Hashable,
        statics: Statics | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The buffer that `part`, which is `once(tensor)`, is copied to; the tensor in it.

        Args:
            part: The part to copy.
            tensor: The tensor to arrive.
            place: On which torch device.
            key: The copy and the kind of step.
            statics: Of the step, if it is replayed.
        """
        layout = (tensor.shape, tensor.dtype, tensor.stride())
        known = self._rooms.get(key) if statics is not None else None
        if known is None or known[0] != layout:
            room = torch.empty_like(part, device=place)  # as it lies: its readers count on that
            known = (layout, room, laid_out(room, part, tensor))
        if statics is not None:
            self._rooms[key] = known
            statics.add(known[2])
        return known[1:]

    def views(
        self,
        moved: torch.Tensor,
        tensors: Sequence[torch.Tensor],
        key: Hashable,
        statics: Statics | None,
    ) -> tuple[torch.Tensor, ...]:
        """The tensors to arrive, of one copy, `moved`, of what they span; else as in `room`."""
        room = self._rooms.get(key)
        if statics is None or room is None or room[2] is not moved or len(tensors) == 1:
            return cut_up(moved, tensors)
        layout = [(t.shape, t.stride(), t.storage_offset()) for t in tensors]
        known = self._views.get(key)
        if known is None or known[0] != layout or known[1] is not moved:
            known = (layout, moved, cut_up(moved, tensors))
            self._views[key] = known
        for view in known[2]:
            statics.add(view)
        return known[2]


def move(step: Step, moves: Moves, send: Send, *, together: bool) -> None:
    """Fill the slots on the other side; every crossing of a copy has a number.

    Args:
        step: The step with the slots.
        moves: Between which of them.
        send: Brings the tensors of a crossing, given its number, to the other side.
        together: Whether views of one tensor may be one crossing: not where nothing is copied.
    """
    number = itertools.count()
    values, spec = pytree.tree_flatten([step.slots[src] for src, _ in moves.slots])
    tensors = {i: value for i, value in enumerate(values) if isinstance(value, torch.Tensor)}
    apart = [(place,) for place in tensors]
    for members in crossings(tensors) if together else apart:
        sent = send(next(number), [tensors[place] for place in members])
        for place, tensor in zip(members, sent, strict=True):
            values[place] = tensor
    for (_, dst), value in zip(moves.slots, pytree.tree_unflatten(values, spec), strict=True):
        step.slots[dst] = value
    for src, dst in moves.grads:
        gradient = step.grads[src]
        step.grads[dst] = None if gradient is None else send(next(number), [gradient])[0]


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
        """Hold a tensor's storages until `rest`."""
        self._strong.update(distinct_storages([tensor]))

    def rest(self) -> None:
        """Drop all, but remember weakly what others keep alive."""
        self._weak = [weakref.ref(storage) for storage in self._strong.values()]
        self._strong = {}

    def wake(self) -> None:
        """Hold again what is still alive."""
        alive = [storage for reference in self._weak if (storage := reference()) is not None]
        self._strong.update((key_of(storage), storage) for storage in alive)
        self._weak = []
