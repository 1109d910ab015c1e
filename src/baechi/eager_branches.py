"""The branches that a model takes while `torch.export` runs it: those of an eager run.

Models ask `torch.compiler.is_exporting()` and `is_compiling()`, and then prepare for inputs other
than the example: they make masks that an eager run leaves out, or loops into products. A trace is
of one call, so to the model's code the answer is no; and to other threads. torch's own code hears
what is so: it leaves out what a tracer cannot take, such as a nested `torch.compile`.

Both functions return a flag of `torch.compiler` (2.11 to 2.13), which `torch.export` sets. Here it
is a number that looks who asks for its truth: to replace the functions would be too late for those
who imported them by name, and for `torch._dynamo.is_compiling` and the like, which pass it on.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final
from unittest.mock import patch

import torch


@final
class Asked:
    """Whether a model's code asked if it is exported or compiled."""

    def __init__(self) -> None:
        self.by_model = False

    @contextmanager
    def answering_no(self) -> Iterator[None]:
        """Run the model's Python inside a tracer."""
        flag = _Flag()
        flag.asked = self
        flag.thread = threading.get_ident()
        with (
            patch.object(torch.compiler, "_is_compiling_flag", flag),
            patch.object(torch.compiler, "_is_exporting_flag", flag),
        ):
            yield


@final
class _Flag(int):
    """True to torch's own code in the tracer's thread; to all others 0, whatever they do to it."""

    asked: Asked
    thread: int

    def __bool__(self) -> bool:
        if threading.get_ident() != self.thread:
            return False
        asker = sys._getframe(1).f_globals.get("__name__", "")
        if asker.partition(".")[0] == "torch":
            return True
        self.asked.by_model = True
        return False
