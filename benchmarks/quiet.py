"""Tells when a machine is disturbed, and waits until it is not.

Other machines on the same host take caches, memory and hyper-threads for seconds or minutes, which
no counter of this machine shows. A reference shows it: small matrix products on all threads take
as long as they did at their best, or they do not. What other programs of this machine take, and
what the host keeps back, the system counts (Linux, man 5 proc_stat).
"""

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, final

import torch

_SIZE: Final = 384  # products of some milliseconds, out of the second cache
_READINGS: Final = 15
_NEAR: Final = 1.2  # medians on a machine that does nothing else differ by up to 15 %
_OTHERS: Final = 0.05  # of a core, what other programs may take
_TICKS_NS: Final = 50_000_000  # the system counts in steps of 10 ms, a few at a time
_STAT: Final = Path("/proc/stat")
_IDLE: Final = (3, 4)  # columns of it: idle, and waiting for a disk
_GUESTS: Final = 8  # the columns from here on are in others, too


def reference_ns() -> float:
    """What the reference takes now, the median of a few readings."""
    factor = torch.ones(_SIZE, _SIZE)
    readings = []
    for _ in range(_READINGS):
        began = time.perf_counter_ns()
        factor @ factor @ factor
        readings.append(time.perf_counter_ns() - began)
    return statistics.median(readings)


def others_ns() -> int:
    """CPU time that was not this process's since the machine began; 0 where nobody counts it."""
    if not _STAT.exists():
        return 0
    columns = [int(number) for number in _STAT.read_text().split("\n", 1)[0].split()[1:]]
    busy = sum(number for i, number in enumerate(columns[:_GUESTS]) if i not in _IDLE)
    return busy * 1_000_000_000 // os.sysconf("SC_CLK_TCK") - time.process_time_ns()


@final
class Watch:
    """What came of a measurement.

    Attributes:
        calm: Whether the machine was quiet before, while and after it was made.
    """

    calm = False


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

    @contextlib.contextmanager
    def watching(self) -> Iterator[Watch]:
        """Waits until the machine is quiet; afterwards the watch says whether it remained so."""
        watch = Watch()
        before = self.wait()
        others, began = others_ns(), time.perf_counter_ns()
        yield watch
        took = time.perf_counter_ns() - began
        alone = others_ns() - others <= _OTHERS * took + _TICKS_NS
        watch.calm = before and alone and self.is_now()
