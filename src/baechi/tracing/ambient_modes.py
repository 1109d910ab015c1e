"""Autocast and the gradient mode around a call: a trace is valid for one state of each.

A cast that changes nothing is not in a trace, and shapes and bytes are those of the dtypes seen.
So a model that was traced without autocast is not what it is with it, or the other way round.

A trace is made with gradients on, whatever the caller's mode, so that its plan has a backward. The
model's own code sees the caller's mode; if it reads it, the trace is valid for that mode alone.
"""

import contextlib
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, final
from unittest.mock import patch

import torch

_KINDS: Final = ("cpu", "cuda")


@final
@dataclass(frozen=True)
class Autocast:
    """The dtype that autocast casts to on each kind of device where it is on."""

    dtypes: tuple[tuple[str, torch.dtype], ...] = ()

    @staticmethod
    def current() -> "Autocast":
        """The modes of this thread."""
        on = [kind for kind in _KINDS if torch.is_autocast_enabled(kind)]
        return Autocast(tuple((kind, torch.get_autocast_dtype(kind)) for kind in on))

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Exactly this state, in this thread."""
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


@final
class GradientMode:
    """The caller's mode in one trace, and whether the model's code read it.

    Args:
        on: Whether the caller has gradients on.
    """

    def __init__(self, on: bool) -> None:
        self._on = on
        self._asked = False

    @property
    def told(self) -> bool | None:
        """The mode that the model's code read; None if it read none."""
        return self._on if self._asked else None

    def ask(self) -> bool:
        """The caller's mode, for which the trace then holds."""
        self._asked = True
        return self._on

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Run the model's Python inside a tracer."""
        own, tracer = torch.is_grad_enabled, threading.get_ident()

        def is_grad_enabled() -> bool:
            asker = str(sys._getframe(1).f_globals.get("__name__", "")).partition(".")[0]
            if threading.get_ident() != tracer or asker in ("torch", "baechi"):
                return own()
            return self.ask() and own()

        with patch.object(torch, "is_grad_enabled", is_grad_enabled):
            yield
