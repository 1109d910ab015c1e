"""Modes of an operator that forward switched on or off around it, gradients and autocast."""

from collections.abc import Callable, Mapping
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

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function in these modes, one around the other, as a compiler knows them.

        Autocast is without its cache, which all threads share.
        """
        run = function if self.gradients else torch.no_grad()(function)
        for kind, dtype in self.autocast.items():
            run = partial(_cast, kind, dtype, run)
        return run


@final
class Under:
    """An operator in modes of its own, as the target of a node."""

    __name__ = __qualname__ = "under"

    def __init__(self, operator: Callable[..., Any], modes: Modes) -> None:
        self.operator, self._modes, self._run = operator, modes, modes.around(operator)

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
