"""Private names of torch around single operators: what sees them, what their schemas say.

Seen to work with torch 2.11 and 2.13; `tests/torch_support/test_internals.py` names the one that a
new version breaks.
"""

from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["FakeTensorMode", "OpOverload", "Watch", "packet_of", "spin", "writes_arguments"]

# An operator as the dispatcher calls it, its arguments, its keyword arguments, and its result.
Seen = Callable[[Any, tuple[Any, ...], Mapping[str, Any], Any], None]


@final
class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells of every operator that runs inside, after it ran."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen = seen

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._seen(func, args, kwargs or {}, result)
        return result


def packet_of(operator: OpOverload) -> Any:
    """The operator without its overload, such as `torch.ops.aten.mm`."""
    return operator._overloadpacket


def writes_arguments(operator: OpOverload) -> bool:
    """True if the operator's schema says that it writes to one of its arguments."""
    return bool(operator._schema.is_mutable)


def spin(cycles: int) -> None:
    """Keep the current CUDA stream busy for so many cycles of the device's clock."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
