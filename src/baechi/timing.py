"""The CPU's clock: short runs are repeated, an empty loop is subtracted, the median is kept.

A run is what a `Preparation` hands out: `prepare(n)` makes `n` runs, each to be called once, and
everything that it does itself is outside of the reading.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol, final

Run = Callable[[], Any]
Preparation = Callable[[int], Sequence[Run]]

# Enough rounds for a median and its quartiles, and no more than this long for one measurement.
ROUNDS: Final = (5, 40)
BUDGET_NS: Final = 60_000_000
# A reading of the clock takes some 0.1 us; a hundred times that makes its grain a percent at most.
READING_NS: Final = 20_000
MAX_REPEATS: Final = 50


@final
@dataclass(frozen=True, slots=True)
class Reading:
    """A measured time.

    Attributes:
        ns: The median over the rounds, without what an empty run costs; never negative.
        spread_ns: Half the distance of the quartiles.
    """

    ns: int
    spread_ns: int = 0


class Timer(Protocol):
    """Measures runs on one device."""

    def time(
        self, preparations: Sequence[Preparation], *, single: bool = False
    ) -> tuple[Reading, ...]:
        """How long one run of each preparation takes.

        Args:
            preparations: Each makes as many runs as asked for, outside of the reading. Their
                readings take turns.
            single: One run per reading, because each needs preparing of its own.
        """


@final
class CpuTimer:
    """A monotonic clock of the host. Launching an op is part of its time: the thread is busy."""

    def __init__(self) -> None:
        self._clock_ns = statistics.median(read([]) for _ in range(200))
        empty = [_empty_run()] * MAX_REPEATS
        several_ns = statistics.median(read(empty) for _ in range(200))
        self._call_ns = (several_ns - self._clock_ns) / MAX_REPEATS

    def time(
        self, preparations: Sequence[Preparation], *, single: bool = False
    ) -> tuple[Reading, ...]:
        """As in `Timer`."""
        repeats = [1 if single else _repeats(prepare) for prepare in preparations]
        rows = [
            [read(prepare(n)) for prepare, n in zip(preparations, repeats, strict=True)]
            for _ in rounds()
        ]
        return tuple(
            summary(readings, n, self._call_ns + self._clock_ns / n)
            for readings, n in zip(zip(*rows, strict=True), repeats, strict=True)
        )


def read(runs: Sequence[Run]) -> int:
    """Nanoseconds that all runs take together, one after the other, in this thread."""
    results = []  # live to the end of the reading, as in a step that goes on to its backward
    start = time.perf_counter_ns()
    for run in runs:
        results.append(run())  # noqa: PERF401 (a loop is what is measured)
    return time.perf_counter_ns() - start


def rounds(limits: tuple[int, int] = ROUNDS, budget_ns: int = BUDGET_NS) -> Iterator[int]:
    """Counts the rounds of a measurement: at least so many, at most so many, in about that time."""
    begin = time.perf_counter_ns()
    for index in range(limits[1]):
        if index >= limits[0] and time.perf_counter_ns() - begin > budget_ns:
            return
        yield index


def summary(readings_ns: Sequence[float], repeats: int, empty_ns: float) -> Reading:
    """The median and spread of readings that each hold so many runs."""
    each = [reading / repeats for reading in readings_ns]
    quartiles = statistics.quantiles(each, n=4, method="inclusive") if len(each) > 1 else [0, 0, 0]
    spread = (quartiles[2] - quartiles[0]) / 2
    return Reading(max(round(statistics.median(each) - empty_ns), 0), round(spread))


@contextmanager
def no_collections() -> Iterator[None]:
    """Keep Python's garbage collector out of the readings."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _repeats(prepare: Preparation) -> int:
    """How many runs make a reading long enough; the first run warms up."""
    read(prepare(1))
    once = max(min(read(prepare(1)) for _ in range(2)), 1)
    return min(-(-READING_NS // once), MAX_REPEATS)


def _empty_run() -> Run:
    """A run like any other, which calls a function with arguments, but does nothing."""
    return partial(_pair, None, None)


def _pair(first: None, second: None) -> tuple[None, None]:
    return first, second
