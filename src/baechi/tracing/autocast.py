"""Which autocast is on where a model is called: a trace holds for one such state alone.

A cast that changes nothing is not in a trace, and shapes and bytes are those of the dtypes seen.
So a model that was traced without autocast is not what it is with it, or the other way round.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, final

import torch

_KINDS: Final = ("cpu", "cuda")


@final
@dataclass(frozen=True)
class Autocast:
    """The dtype that autocast casts to on each kind of device where it is on."""

    dtypes: tuple[tuple[str, torch.dtype], ...] = ()

    @staticmethod
    def current() -> "Autocast":
        """What is on in this thread."""
        on = [kind for kind in _KINDS if torch.is_autocast_enabled(kind)]
        return Autocast(tuple((kind, torch.get_autocast_dtype(kind)) for kind in on))

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """This state and no other, in this thread."""
        wanted, present = dict(self.dtypes), dict(Autocast.current().dtypes)
        with contextlib.ExitStack() as stack:
            for kind in _KINDS:
                dtype = wanted.get(kind)
                if dtype != present.get(kind):
                    stack.enter_context(torch.autocast(kind, dtype, enabled=dtype is not None))
            yield

    def __str__(self) -> str:
        """`autocast to bfloat16 on cpu`; empty where none is on."""
        rows = [f"{str(dtype).removeprefix('torch.')} on {kind}" for kind, dtype in self.dtypes]
        return f"autocast to {', '.join(rows)}" if rows else ""
