"""The CPU timer: repeats of short runs, less an empty loop, by their median.

A run is what a `Preparation` hands out: `prepare(n)` makes `n` runs, each to be called once, and
everything that it does itself is outside of the reading.

A reading is *held up* where the calling thread was off its core for a part of it: something else
ran there. Such readings are left out. This finds contention in runs of several threads, too: a
waiting thread sleeps, so that its CPU time falls behind wall time.
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
Clock = Callable[[], int]

# Of one pass (`repetition`), two of which are made: enough rounds for a median, and no more than
# this long for one measurement.
ROUNDS: Final = (3, 20)
BUDGET_NS: Final = 30_000_000
# A reading of the clock takes some 0.1 us; a hundred times that makes its grain a percent at most.
READING_NS: Final = 20_000
MAX_REPEATS: Final = 50
# A first run may take several times longer than the next; above this it is a long one anyway.
_LONG_NS: Final = 20 * READING_NS
# Longer than interrupts and the clocks themselves take, shorter than another process's turn.
_MAX_AWAY: Final = 0.05
# A thread clock with coarser ticks than this is useless for a reading.
_MAX_TICK_S: Final = 1e-6


@final
@dataclass(frozen=True, slots=True)
class Reading:
    """A measured time.

    Attributes:
        ns: The median over the rounds that were not held up, or the lowest of all where there are
            none; without what an empty run costs, and never negative.
        held_up: Whether every round was held up by something else on the machine.
    """

    ns: int
    held_up: bool = False


class Timer(Protocol):
    """Measures runs on one device."""

    def time(
        self, preparations: Sequence[Preparation], *, single: bool = False
    ) -> tuple[Reading, ...]:
        """The time of one run of each preparation.

        Args:
            preparations: Each makes as many runs as asked for, outside of the reading. Their
                readings take turns.
            single: One run per reading, because each needs preparing of its own.
        """


@final
@dataclass(frozen=True, slots=True)
class Sample:
    """One reading of several runs.

    Attributes:
        ns: Their total time.
        held_up: Whether the calling thread was off its core meanwhile.
    """

    ns: int
    held_up: bool


@final
class CpuTimer:
    """A monotonic clock of the host. Launching an op is part of its time: the thread is busy.

    Args:
        wall: Nanoseconds that go by.
        busy: Nanoseconds that the calling thread has had a core for; absent: the system's, where
            it is fine enough.
    """

    def __init__(self, wall: Clock = time.perf_counter_ns, busy: Clock | None = None) -> None:
        self._wall = wall
        fine = time.get_clock_info("thread_time").resolution <= _MAX_TICK_S
        self._busy = busy or (time.thread_time_ns if fine else wall)
        self._clock_ns = statistics.median(self.read([]).ns for _ in range(200))
        empty = [_empty_run()] * MAX_REPEATS
        several_ns = statistics.median(self.read(empty).ns for _ in range(200))
        self._call_ns = (several_ns - self._clock_ns) / MAX_REPEATS

    def time(
        self, preparations: Sequence[Preparation], *, single: bool = False
    ) -> tuple[Reading, ...]:
        """As in `Timer`."""
        repeats = [self._repeats(prepare, single) for prepare in preparations]
        rows = [
            [self.read(prepare(n)) for prepare, n in zip(preparations, repeats, strict=True)]
            for _ in rounds(wall=self._wall)
        ]
        return tuple(
            self._reading(samples, n)
            for samples, n in zip(zip(*rows, strict=True), repeats, strict=True)
        )

    def read(self, runs: Sequence[Run]) -> Sample:
        """The time of all runs together, one after the other, in this thread."""
        results = []  # live to the end of the reading, as in a step that goes on to its backward
        busy = self._busy()
        start = self._wall()
        for run in runs:
            results.append(run())  # noqa: PERF401 (a loop is what is measured)
        ns = self._wall() - start
        away_ns = ns - (self._busy() - busy)
        return Sample(ns, away_ns > _MAX_AWAY * ns)

    def _reading(self, samples: Sequence[Sample], repeats: int) -> Reading:
        free = [sample.ns for sample in samples if not sample.held_up]
        # Where all were held up, the least delayed is nearest.
        readings = free or [min(sample.ns for sample in samples)]
        empty_ns = self._call_ns + self._clock_ns / repeats
        return Reading(summary(readings, repeats, empty_ns), held_up=not free)

    def _repeats(self, prepare: Preparation, single: bool) -> int:
        """The number of runs that make a reading long enough; the first run warms up."""
        if single or self.read(prepare(1)).ns > _LONG_NS:
            return 1
        once = max(min(self.read(prepare(1)).ns for _ in range(2)), 1)
        return min(-(-READING_NS // once), MAX_REPEATS)


def rounds(
    limits: tuple[int, int] = ROUNDS,
    budget_ns: int = BUDGET_NS,
    wall: Clock = time.perf_counter_ns,
) -> Iterator[int]:
    """Counts the rounds of a measurement.

    Args:
        limits: The fewest rounds and the most.
        budget_ns: No further round begins after this time, but for the fewest.
        wall: Nanoseconds that go by.
    """
    begin = wall()
    for index in range(limits[1]):
        if index >= limits[0] and wall() - begin > budget_ns:
            return
        yield index


def summary(readings_ns: Sequence[float], repeats: int, empty_ns: float) -> int:
    """The median time of one run in ns, never negative.

    Args:
        readings_ns: Of several runs each.
        repeats: The runs of a reading.
        empty_ns: The time of a run that does nothing.
    """
    return max(round(statistics.median(readings_ns) / repeats - empty_ns), 0)


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


def _empty_run() -> Run:
    """A run like any other, which calls a function with arguments, but does nothing."""
    return partial(_pair, None, None)


def _pair(first: None, second: None) -> tuple[None, None]:
    return first, second
