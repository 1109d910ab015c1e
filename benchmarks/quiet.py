"""Tells when a machine is disturbed, and waits until it is not.

Other machines on the same host take caches, memory and hyper-threads for seconds or minutes, which
no counter of this machine shows. A reference shows it: small matrix products on all threads take
as long as they did at their best, or they do not.
"""

import statistics
import time
from collections.abc import Callable
from typing import Final, final

import torch

_SIZE: Final = 384  # products of some milliseconds, out of the second cache
_READINGS: Final = 15
_NEAR: Final = 1.2  # medians on a machine that does nothing else differ by up to 15 %


def reference_ns() -> float:
    """What the reference takes now, the median of a few readings."""
    factor = torch.ones(_SIZE, _SIZE)
    readings = []
    for _ in range(_READINGS):
        began = time.perf_counter_ns()
        factor @ factor @ factor
        readings.append(time.perf_counter_ns() - began)
    return statistics.median(readings)


@final
class Quiet:
    """The best that the reference did, and how much longer one is ready to wait.

    Args:
        patience_s: Seconds to wait in all; 0 only looks.
        warm_up_s: Seconds that the reference runs at the beginning, to know its best.
        pause_s: Seconds between two looks.
        reference: What is timed, in ns.
    """

    def __init__(
        self,
        patience_s: float,
        warm_up_s: float = 3.0,
        pause_s: float = 0.5,
        reference: Callable[[], float] = reference_ns,
    ) -> None:
        self._left_s = patience_s
        self._pause_s = pause_s
        self._reference = reference
        self._best_ns = reference()
        end = time.monotonic() + warm_up_s
        while time.monotonic() < end:
            self.is_now()

    def is_now(self) -> bool:
        """Whether the reference is near its best."""
        now_ns = self._reference()
        self._best_ns = min(self._best_ns, now_ns)
        return now_ns <= _NEAR * self._best_ns

    def wait(self) -> bool:
        """Whether the machine is quiet, after waiting for that as long as patience lasts."""
        while not (quiet := self.is_now()) and self._left_s > 0:
            time.sleep(self._pause_s)
            self._left_s -= self._pause_s
        return quiet
