"""The branches that a model takes while `torch.export` runs it: those of an eager run.

Models ask `torch.compiler.is_exporting()` and `is_compiling()`, or whether a tensor is a fake one,
and then prepare for other inputs than the example: they make masks that an eager run leaves out. A
trace is of one call, so to the model's code the answer is no; and to other threads. torch's own
code hears what is so: it leaves out what a tracer cannot take, such as a nested `torch.compile`.

Both functions return a flag of `torch.compiler` (2.11 to 2.13), which `torch.export` sets. Here it
is a number that looks who asks for its truth: to replace the functions would be too late for those
who imported them by name, and for `torch._dynamo.is_compiling` and the like, which pass it on.

Where the eager branch cannot be traced, who asked last before the error is told yes (`concede`).
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any, final
from unittest.mock import patch

import torch
from torch._dynamo.exc import TorchDynamoException
from torch._subclasses.fake_tensor import FakeTensor

from baechi.tracing.workarounds.known_values import KnownValues


@final
class EagerBranches:
    """What a model's code hears in one trace, whatever the number of tries."""

    def __init__(self) -> None:
        self._told: dict[tuple[CodeType, int], str] = {}
        self._last: tuple[CodeType, int] | None = None
        self._known = KnownValues()
        self.nested = False  # whether there is a compiler inside, which reads what is around it
        self._all = False

    def __str__(self) -> str:
        """Who is told that there is an export, for the list of attempts."""
        told = "the model" if self._all else ", ".join(dict.fromkeys(self._told.values()))
        return f", exporting said to {told}" if told else ""

    def concede(self) -> bool:
        """After an error: tell one asker more the truth, and then all; whether there was one."""
        if self._all or not (self._last or self._known.answered or self.nested):
            return False
        if self.nested or self._last is None or self._last in self._told:
            self._all = True
        else:
            self._told[self._last] = self._last[0].co_qualname
        return True

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Run the model's Python inside a tracer."""
        self._last = None
        if self._all:
            yield
            return
        known = self._known = KnownValues()
        flag = _Flag()
        flag.branches, flag.thread = self, threading.get_ident()

        class Meta(type(FakeTensor)):  # type: ignore[misc]
            def __instancecheck__(cls, value: Any) -> bool:
                return isinstance(value, FakeTensor) and not known.answers(value)

        class Shown(FakeTensor, metaclass=Meta):
            """What the model's code sees: fake tensors but those whose value is known."""

        def seen(name: str) -> Any:
            if name != "FakeTensor":
                raise AttributeError(f"module 'torch._subclasses' has no attribute {name!r}")
            mine = threading.get_ident() == flag.thread
            is_torch = _is_torch(sys._getframe(1).f_globals)
            return Shown if mine and not is_torch else FakeTensor

        script = torch.jit.ScriptFunction
        call = script.__call__

        def scripted(function: Any, *args: Any, **kwargs: Any) -> Any:
            # It asks in C++, as its caller. Told the truth, it runs the Python that was scripted;
            # else what was made of that, a part of which nobody could differentiate any more.
            if threading.get_ident() != flag.thread:
                return call(function, *args, **kwargs)
            with patch.object(torch.compiler, "_is_exporting_flag", True):
                return call(function, *args, **kwargs)

        with (
            patch.object(torch.compiler, "_is_compiling_flag", flag),
            patch.object(torch.compiler, "_is_exporting_flag", flag),
            patch.object(script, "__call__", scripted),
            _seen_through(torch._subclasses, "FakeTensor", seen),
            known,
        ):
            try:
                yield
            except TorchDynamoException:  # of one inside, as in `torch.cond`: it reads all of this
                self.nested = True
                raise

    def answer(self, code: CodeType, instruction: int) -> bool:
        """What the code hears that asks at one of its instructions."""
        self._last = code, instruction
        return self._last in self._told


@final
class _Flag(int):
    """True to torch's own code in the tracer's thread; to most others 0, however they look."""

    branches: EagerBranches
    thread: int

    def __bool__(self) -> bool:
        if threading.get_ident() != self.thread:
            return False
        asker = sys._getframe(1)
        if _is_torch(asker.f_globals):
            return True
        return self.branches.answer(asker.f_code, asker.f_lasti)


def _is_torch(scope: dict[str, Any]) -> bool:
    return str(scope.get("__name__", "")).partition(".")[0] == "torch"


@contextmanager
def _seen_through(module: Any, name: str, seen: Callable[[str], Any]) -> Iterator[None]:
    """Let a function say what a name of a module is, which may be something else to each."""
    own = getattr(module, name)
    module.__getattr__ = seen
    delattr(module, name)
    try:
        yield
    finally:
        setattr(module, name, own)
        del module.__getattr__
