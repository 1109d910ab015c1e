"""Eager branches of a model while `torch.export` runs it: see `docs/runtime.md`, "Which branches".

`torch.compiler.is_exporting()` and `is_compiling()` return a flag (2.11 to 2.13), which
`torch.export` sets. Here it is a number whose truth value depends on the calling code: replacing
the functions would miss code that imported them by name, and `torch._dynamo.is_compiling` and the
like, which return the flag.

What forward asks of values is answered from those that are known (`known_values`).
"""

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, final
from unittest.mock import patch

import torch

from baechi.torch_support.torch_internals import refusals, script_casts
from baechi.torch_support.tracer_internals import (
    FakeTensor,
)
from baechi.tracing.known_values import KnownValues
from baechi.tracing.model_code import package_of
from baechi.tracing.questions import Questions


@final
class EagerBranches:
    """The answers given to a model's code in one trace, over all its attempts.

    Args:
        numbers: Whether forward may also read numbers that depend on arguments, each a question.
        choices: Whether it then knows what the arguments choose, as by a mask, or by a comparison
            of floats, whose values they must all repeat; otherwise only that there are some.
    """

    def __init__(self, *, numbers: bool = False, choices: bool = False) -> None:
        self._numbers = numbers
        self._choices = choices
        self._exporting: dict[tuple[CodeType, int], str] = {}
        self._last: tuple[CodeType, int] | None = None
        self._known = KnownValues(numbers, choices)
        self.nested = False  # whether there is a compiler inside, which reads what is around it
        self._all = False

    def __str__(self) -> str:
        """The functions that see an export, for the list of attempts."""
        names = "the model" if self._all else ", ".join(dict.fromkeys(self._exporting.values()))
        return f", export branches of {names}" if names else ""

    def give_way(self) -> bool:
        """After an error, let one more caller see the export, then all; False if all do already."""
        if self._all or not (self._last or self._known.answered or self.nested):
            return False
        if self.nested or self._last is None or self._last in self._exporting:
            self._all = True
        else:
            self._exporting[self._last] = self._last[0].co_qualname
        return True

    @property
    def questions(self) -> Questions:
        """What the last trace asked that depends on symbolic sizes or on arguments."""
        return self._known.questions.forget_unasked()

    @contextmanager
    def taken(
        self,
        tensors: Sequence[torch.Tensor],
        examples: Sequence[torch.Tensor],
        buffers: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
    ) -> Iterator[None]:
        """Run the model's Python inside a tracer, whose arguments stand for those of an example.

        So do its buffers, each in a pair with the model's own.
        """
        self._last = None
        known = self._known = KnownValues(self._numbers, self._choices)
        if self._all:
            yield
            return
        known.give(tensors, examples)
        if self._numbers:
            known.give_buffers(buffers)
        flag = _Flag()
        flag.branches, flag.thread = self, threading.get_ident()

        class Meta(type(FakeTensor)):  # type: ignore[misc]
            def __instancecheck__(cls, value: Any) -> bool:
                return isinstance(value, FakeTensor) and not known.answers(value)

        class Shown(FakeTensor, metaclass=Meta):
            """Tensors as the model's code sees them: fake, except where their value is known."""

        def seen(name: str) -> Any:
            if name != "FakeTensor":
                raise AttributeError(f"module 'torch._subclasses' has no attribute {name!r}")
            mine = threading.get_ident() == flag.thread
            is_torch = package_of(sys._getframe(1)) == "torch"
            return Shown if mine and not is_torch else FakeTensor

        script = torch.jit.ScriptFunction
        call = script.__call__

        def scripted(function: Any, *args: Any, **kwargs: Any) -> Any:
            # The check is in C++, on behalf of the caller. While exporting, the Python that was
            # scripted runs; otherwise the compiled code, parts of which autograd cannot see.
            if threading.get_ident() != flag.thread:
                return call(function, *args, **kwargs)
            if script_casts(function):
                raise TypeError(
                    f"{function.name} of torch.jit.script casts otherwise under autocast than the "
                    "function that it was made of; call that one"
                )
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
                known.refuse_counters()
            except refusals():  # of one inside, as in `torch.cond`: it reads all of this
                self.nested = True
                raise

    def answer(self, code: CodeType, instruction: int) -> bool:
        """The answer for one instruction of the code that checks for an export."""
        self._last = code, instruction
        return self._last in self._exporting


@final
class _Flag(int):
    """True to torch's own code in the tracer's thread; to most others 0, however they look."""

    branches: EagerBranches
    thread: int

    def __bool__(self) -> bool:
        if threading.get_ident() != self.thread:
            return False
        asker = sys._getframe(1)
        if package_of(asker) == "torch" or _keeps_results(asker):
            return True
        return self.branches.answer(asker.f_code, asker.f_lasti)


def _keeps_results(asker: FrameType) -> bool:
    """True if the asker has a function with `functools.lru_cache`, which an export does without.

    By what earlier calls left there, one size would have other operators than the next.
    """
    values = asker.f_locals.values()
    return any(isinstance(value, functools._lru_cache_wrapper) for value in values)


@contextmanager
def _seen_through(module: Any, name: str, seen: Callable[[str], Any]) -> Iterator[None]:
    """Let a function resolve a name of a module, possibly differently for each caller."""
    own = getattr(module, name)
    module.__getattr__ = seen
    delattr(module, name)
    try:
        yield
    finally:
        setattr(module, name, own)
        del module.__getattr__
