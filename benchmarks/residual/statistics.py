"""Means over seeds, with 95 % confidence intervals."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Final

# Student's t at 97.5 % for 1, 2, ... degrees of freedom; beyond them the normal distribution's.
_T: Final = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and half the width of its interval; NaN for the width of a single value."""
    if len(values) < 2:
        return fmean(values), math.nan
    t = _T[len(values) - 2] if len(values) - 2 < len(_T) else 1.96
    return fmean(values), t * stdev(values) / math.sqrt(len(values))
