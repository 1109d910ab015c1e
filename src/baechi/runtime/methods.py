"""Methods of a model, run so that what they call of it is the placed model.

`placed.generate(...)` is the model's own method on the model itself: its properties, its `super()`
and its other methods are as ever. But while the method runs, in its thread alone, the model's
`__call__` is the placed module's:

    placed.generate(ids)
      method of the model        self(...) -> Switch -> placed(...)
        placed forward           self(...) -> Switch -> the model's own, as a trace wants it

`self.forward(...)` and calls of submodules are the model's own: they run where their weights are.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock, get_ident
from typing import Any, Final, final

import torch
from torch import nn

# Where torch keeps what a compiled module does when it is called; it is never pickled or copied.
_CALL: Final = "_compiled_call_impl"
_LOCK: Final = Lock()

Way = Callable[..., Any] | None  # what runs instead of the model; None is the model


def routed(value: Any, model: nn.Module, placed: Callable[..., Any]) -> Any:
    """The value; if it is a method of the model, then one for which the model is the placed one.

    Args:
        value: An attribute of the model.
        model: The model.
        placed: What its calls go to.
    """
    if not (inspect.ismethod(value) and value.__self__ is model):
        return value

    if inspect.isgeneratorfunction(value):

        @functools.wraps(value)
        def method(*args: Any, **kwargs: Any) -> Any:
            rows = value(*args, **kwargs)
            while True:  # between two rows the thread is the caller's
                with _running(model, placed):
                    try:
                        row = next(rows)
                    except StopIteration as end:
                        return end.value
                yield row
    else:

        @functools.wraps(value)
        def method(*args: Any, **kwargs: Any) -> Any:
            with _running(model, placed):
                return value(*args, **kwargs)

    return method


@final
class _Switch:
    """What a model does when it is called: in a thread that runs a method of it, what that wants.

    Attributes:
        ways: Of every thread, the innermost method's last.
    """

    def __init__(self, model: nn.Module) -> None:
        self.before: Way = vars(model).get(_CALL)
        self.ways: dict[int, list[Way]] = {}
        self._own: Callable[..., Any] = self.before or model._call_impl
        # Its Python is nothing that a compiler around the call could compile.
        self._away: Callable[..., Any] = torch.compiler.disable(self._placed)  # type: ignore[no-untyped-call]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.ways.get(get_ident(), [None])[-1] is None:
            return self._own(*args, **kwargs)
        return self._away(*args, **kwargs)

    def _placed(self, *args: Any, **kwargs: Any) -> Any:
        ways = self.ways[get_ident()]
        way = ways[-1]
        assert way is not None
        ways.append(None)
        try:
            return way(*args, **kwargs)
        finally:
            ways.pop()


@contextmanager
def _running(model: nn.Module, way: Way) -> Iterator[None]:
    """In this thread the model's calls go this way inside the block."""
    with _LOCK:
        switch = vars(model).get(_CALL)
        if not isinstance(switch, _Switch):
            switch = vars(model)[_CALL] = _Switch(model)
        ways = switch.ways.setdefault(get_ident(), [])
        ways.append(way)
    try:
        yield
    finally:
        with _LOCK:
            ways.pop()
            if not ways:
                del switch.ways[get_ident()]
            if not switch.ways and vars(model).get(_CALL) is switch:
                vars(model)[_CALL] = switch.before
                if switch.before is None:
                    del vars(model)[_CALL]
