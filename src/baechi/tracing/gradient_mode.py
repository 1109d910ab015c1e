"""Whether forward asks if gradients are on: then a trace holds for the answer.

A trace is made with gradients on, whatever the caller's mode, so that its plan has a backward. To
the model's own code the caller's mode is told.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final
from unittest.mock import patch

import torch


@final
class GradientMode:
    """The caller's mode in one trace, and whether the model's code asked for it.

    Args:
        on: Whether the caller has gradients on.
    """

    def __init__(self, on: bool) -> None:
        self._on = on
        self._asked = False

    @property
    def told(self) -> bool | None:
        """What the model's code heard; None if it did not ask."""
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
