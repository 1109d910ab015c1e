"""Modes of an operator that forward switched on or off around it, gradients and autocast."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any, final

import torch


@final
@dataclass(frozen=True)
class Modes:
    """What forward switched on or off around an operator.

    Attributes:
        gradients: Whether operators record what a backward needs.
        autocast: By kind of device the dtype that autocast casts to; None where it is off.
    """

    gradients: bool = True
    autocast: Mapping[str, torch.dtype | None] = field(default_factory=dict)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """These modes, in this thread; autocast without its cache, which all threads share."""
        with ExitStack() as stack:
            if not self.gradients:
                stack.enter_context(torch.no_grad())
            for kind, dtype in self.autocast.items():
                state = torch.autocast(kind, dtype, dtype is not None, cache_enabled=False)
                stack.enter_context(state)
            yield


@final
class Under:
    """An operator in modes of its own, as the target of a node."""

    __name__ = __qualname__ = "under"

    def __init__(self, operator: Callable[..., Any], modes: Modes) -> None:
        self.operator, self._modes = operator, modes
        self._run = operator if modes.gradients else torch.no_grad()(operator)
        for kind, dtype in modes.autocast.items():  # each by itself, as a compiler knows it
            self._run = partial(_cast, kind, dtype, self._run)

    def __repr__(self) -> str:
        known = isinstance(self.operator, FunctionType | BuiltinFunctionType)
        name = (
            f"{self.operator.__module__}.{self.operator.__qualname__}" if known else self.operator
        )
        return f"{name} under {dict(self._modes.autocast)}"  # in the key of an operator

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it."""
        return self._run(*args, **kwargs)


def _cast(
    kind: str, dtype: torch.dtype | None, run: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    with torch.autocast(kind, dtype, dtype is not None, cache_enabled=False):
        return run(*args, **kwargs)
