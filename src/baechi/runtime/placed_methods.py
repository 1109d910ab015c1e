"""Methods of a model that call the model, run on the placed one.

`placed.generate(...)` is the model's own method on the model itself: its properties, its `super()`
and its other methods are as ever. But while the method runs, in its thread alone, the model's
`__call__` is the placed module's:

    placed.generate(ids)
      method of the model        self(...) -> Switch -> placed(...)
        placed forward           self(...) -> Switch -> the model's own, for a trace

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

from baechi.torch_support.module_internals import CALL, plain_call

_LOCK: Final = Lock()


@final
class Methods:
    """The methods of a model that is placed.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._switch: _Switch | None = None

    def routed(self, value: Any, placed: Callable[..., Any]) -> Any:
        """The value; if it is a method of the model, then one that calls the placed one.

        Args:
            value: An attribute of the model.
            placed: Where the calls go.
        """
        if not (inspect.ismethod(value) and value.__self__ is self._model):
            return value

        def steps(*args: Any, **kwargs: Any) -> Any:
            rows = value(*args, **kwargs)
            while True:  # between two rows the thread is the caller's
                with self._running(placed):
                    try:
                        row = next(rows)
                    except StopIteration as end:
                        return end.value
                yield row

        def method(*args: Any, **kwargs: Any) -> Any:
            with self._running(placed):
                return value(*args, **kwargs)

        return functools.wraps(value)(steps if inspect.isgeneratorfunction(value) else method)

    @contextmanager
    def _running(self, target: Callable[..., Any]) -> Iterator[None]:
        """In this thread the model's calls go this target inside the block."""
        slot = vars(self._model)
        with _LOCK:
            call = slot.get(CALL)
            if isinstance(call, _Switch):
                switch = call
            else:  # the same one each time: compilers around the call look at which it is
                switch = slot[CALL] = self._switch = self._switch or _Switch(self._model)
                switch.before = call
            targets = switch.targets.setdefault(get_ident(), [])
            targets.append(target)
        try:
            yield
        finally:
            with _LOCK:
                targets.pop()
                if not targets:
                    del switch.targets[get_ident()]
                if not switch.targets and slot.get(CALL) is switch:
                    del slot[CALL]
                    if switch.before is not None:
                        slot[CALL] = switch.before


@final
class _Switch:
    """The call of a model, redirected in threads that run one of its methods.

    Attributes:
        before: The call before, where it was not the model's own.
        targets: The callees of the methods in a thread, innermost last; None: the model's own.
    """

    def __init__(self, model: nn.Module) -> None:
        self.before: Callable[..., Any] | None = None
        self.targets: dict[int, list[Callable[..., Any] | None]] = {}
        self._own: Callable[..., Any] = plain_call(model)
        # A compiler around the call would not make a step of a placed model of it.
        self._call: Callable[..., Any] = torch.compiler.disable(self._chosen)  # type: ignore[no-untyped-call]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def _chosen(self, *args: Any, **kwargs: Any) -> Any:
        targets = self.targets.get(get_ident(), [])
        target = targets[-1] if targets else None
        if target is None:
            return (self.before or self._own)(*args, **kwargs)
        targets.append(None)
        try:
            return target(*args, **kwargs)
        finally:
            targets.pop()
