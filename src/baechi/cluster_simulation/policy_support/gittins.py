"""The Gittins index of jobs by GPU-time, over samples of what jobs need (Tiresias, NSDI'19)."""

from bisect import bisect_right
from collections.abc import Sequence
from decimal import ROUND_HALF_UP, Decimal
from functools import cache
from importlib.resources import files
from itertools import accumulate
from typing import Final, final

from baechi.errors import InputError

_DELTA: Final = 3250


@cache
def sampled_gpu_times() -> tuple[int, ...]:
    """1,001 GPU-times of jobs in seconds, ascending, as the Tiresias simulator ships them."""
    text = files("baechi.cluster_simulation.policy_support").joinpath("gpu_seconds.csv").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return tuple(sorted(int(line) for line in lines[1:]))


@final
class GittinsIndex:
    """The index by attained service: higher is more urgent, 0 beyond the samples.

    It is the chance to end within the next `delta` over what that costs.

    Args:
        samples: What jobs needed in all.
        delta: How far the index looks ahead.
        rounded: As the original computes it.

    Raises:
        InputError: There are no samples, or they are not positive.
    """

    def __init__(
        self, samples: Sequence[int], *, delta: int = _DELTA, rounded: bool = False
    ) -> None:
        if not samples or min(samples) < 1:
            raise InputError("the Gittins index needs samples of positive GPU-time.")
        self._samples = sorted(samples)
        sums = [0, *accumulate(self._samples)]
        count = len(self._samples)
        last = self._samples[-1] - 1
        self._index = []
        for sample in self._samples:
            attained = sample - 1
            here = bisect_right(self._samples, attained)
            ahead = attained + delta
            # The original takes all samples but the longest where the next look is beyond it.
            there = count - 1 if ahead > last else bisect_right(self._samples, ahead)
            left = count - here
            cost = sums[there] - sums[here] + delta * (count - there)
            if rounded:
                chance = _rounded((there - here) / left, 5)
                mean = cost // left
                self._index.append(_rounded(chance * 1_000_000 / mean, 4) if mean else 0.0)
            else:
                self._index.append((there - here) / cost if cost else 0.0)
        self._index.append(0.0)

    def __call__(self, attained: int) -> float:
        """The index of a job that has had so much."""
        return self._index[bisect_right(self._samples, attained)]


def _rounded(value: float, digits: int) -> float:
    """Rounded as Python 2 does, exact halves away from zero; Python 3 takes the even neighbor."""
    return float(Decimal(value).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP))
