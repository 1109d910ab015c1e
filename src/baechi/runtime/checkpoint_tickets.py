"""A step inside of a `torch.utils.checkpoint` of the caller's, which runs the whole call again.

    forward     tapes, without the caller's hooks ──► the step saves its ticket, which hooks drop
    backward    the step asks for its ticket ──► checkpoint runs the caller's function again
                ──► another step, with a ticket of its own ──► that one goes backward

Checkpointing forgets what autograd saves, and gives back what a second run saves in its place.
Tapes are graphs of their own, and for each it would run everything again, in whichever thread. So
what they save is left to them, and a step as a whole saves one tensor. Its memory is all that holds
the step: with it go the tapes and what these have saved.
"""

import itertools
import sys
from typing import Any, Final, Generic, TypeVar, final
from weakref import WeakValueDictionary

import torch
from torch.utils import checkpoint

_NUMBERS: Final = itertools.count()
_T = TypeVar("_T")


def is_forgotten() -> bool:
    """Whether what autograd saves now goes to `torch.utils.checkpoint`."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and hooks[0].__module__ == checkpoint.__name__


@final
class _Memory(bytearray):
    """Memory of a tensor; it lives as long as any alias of the tensor, and keeps a value alive."""

    kept: Any


@final
class Tickets(Generic[_T]):
    """Tensors that stand for values, and hold them: a value lives as long as its tensor."""

    def __init__(self) -> None:
        self._values: WeakValueDictionary[int, _T] = WeakValueDictionary()

    def of(self, value: _T) -> torch.Tensor:
        """A new ticket, the only thing here that holds the value."""
        number = next(_NUMBERS)
        self._values[number] = value
        memory = _Memory(number.to_bytes(8, sys.byteorder))
        memory.kept = value
        return torch.frombuffer(memory, dtype=torch.int64)

    def value(self, ticket: torch.Tensor) -> _T | None:
        """What a ticket, or an alias of it, stands for; None for one that was given elsewhere."""
        return self._values.get(int(ticket))
