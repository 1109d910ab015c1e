"""Comparisons of random numbers, as by LayerDrop: `torch.rand([]) < self.layerdrop`.

Where layers are dropped with a probability of 0, all numbers that may be drawn answer alike.
"""

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, Final, final

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from baechi.torch_support.torch_internals import version_of

_DRAWS: Final = (torch.rand, torch.rand_like, torch.Tensor.uniform_)
_FROM_0_TO_1: Final = ((), (0,), (0, 1))  # the bounds of `uniform_`
# What they draw at least, and at most in doubles.
_EXTREMES: Final = (0.0, math.nextafter(1.0, 0.0))
_COMPARISONS: Final = {
    name: compare
    for compare in (operator.lt, operator.le, operator.gt, operator.ge)
    for name in (compare.__name__, f"__{compare.__name__}__")
}
_EITHER: Final = frozenset((False, True))


@final
class DrawnFractions:
    """The random numbers of 0 to below 1 that a model draws while it is watched."""

    def __init__(self) -> None:
        self._version: Any = WeakTensorKeyDictionary()  # of each when it was drawn

    def answers(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        result: Any,
    ) -> frozenset[bool]:
        """The answers that a comparison of such numbers may have; none of another function."""
        if func in _DRAWS:
            if func is not torch.Tensor.uniform_ or (args[1:] in _FROM_0_TO_1 and not kwargs):
                self._version[result] = version_of(result)
            return frozenset()
        compare = _COMPARISONS.get(getattr(func, "__name__", ""))
        if compare is None or len(args) != 2 or not isinstance(args[0], torch.Tensor):
            return frozenset()
        drawn, bound = args
        if self._version.get(drawn) != version_of(drawn):
            return frozenset()
        if not isinstance(bound, int | float):
            return _EITHER
        return frozenset(compare(number, bound) for number in _EXTREMES)
