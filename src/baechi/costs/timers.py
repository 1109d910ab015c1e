"""Timers of short runs on a CPU and on CUDA.

A run is what a `Preparation` hands out: `prepare(n)` makes `n` runs, each to be called once, and
everything that it does itself is outside of the reading.

On a CPU a reading is *held up*, and left out, where the calling thread was off its core for a part
of it. This finds contention in runs of several threads, too: a waiting thread sleeps, so that its
CPU time falls behind wall time. On CUDA, behind a kernel that spins until everything is queued:

    host     spin  e e' | flush  e op e' | flush  e op e' | ...        queued at once
    stream   [spin][e e'][flush][e op e'][flush][e op e']...           no gap of a launch between

docs/cost-model.md, "Where the numbers come from", has the rest.
"""

import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Final, final

import torch

from baechi.torch_support.graph_capture import CudaRecorder, capture_stream
from baechi.torch_support.torch_internals import spin
from baechi.tracing.pytrees import tensors_in

Run = Callable[[], Any]
Preparation = Callable[[int], Sequence[Run]]
Clock = Callable[[], int]

# Of one pass (`profiling`), two of which are made: enough rounds for a median, and no more than
# this long for one measurement.
ROUNDS: Final = (3, 20)
BUDGET_NS: Final = 30_000_000
# A reading of the clock takes some 0.1 us; a hundred times that makes its grain a percent at most.
_READING_NS: Final = 20_000
_MAX_REPEATS: Final = 50
# A first run may take several times longer than the next; above this it is a long one anyway.
_LONG_NS: Final = 20 * _READING_NS
# Longer than interrupts and the clocks themselves take, shorter than another process's turn.
_MAX_AWAY: Final = 0.05
# A thread clock with coarser ticks than this is useless for a reading.
_MAX_TICK_S: Final = 1e-6

_WARM_UPS: Final = 3
_FEW: Final = (_WARM_UPS, _WARM_UPS)
# About 1,024 launches can be pending (CUDA's launch queue); this many readings stay below it
# for ops of up to ten kernels.
_QUEUED: Final = 20
# The resolution of an event is about 0.5 us; below this it matters, so such runs are repeated.
_SHORT_NS: Final = 30_000
_REPEATS: Final = 20
# A queue holds readings of at most this much time: all its results are alive together.
_QUEUED_NS: Final = 2_000_000
# The results that a graph of repeated runs holds at most: its pool is kept as long as it is.
_HELD_BYTES: Final = 1 << 28
# Of the device; more that the allocator holds for nobody goes back before a capture, in which it
# gives nothing back. Pools of the graphs before are a part of that.
_UNUSED_SHARE: Final = 0.05
# What recording a pair of events takes of the host, generously.
_RECORDING_NS: Final = 20_000
# A spin too long costs time only; one too short leaves gaps.
_SPIN_MARGIN: Final = 2.0
# Until a GPU's clock is up: spins of so many cycles, for so long.
_RAMP_CYCLES: Final = 10_000_000
_RAMP_NS: Final = 200_000_000
NO_GRAPH: Final = "no CUDA graph repeats it"  # a remark
_SYNCHRONIZING: Final = "called a synchronizing CUDA operation"


@final
@dataclass(frozen=True, slots=True)
class Reading:
    """A measured time.

    Attributes:
        ns: Of one run: the median over the rounds that were not held up, or the lowest of all where
            there are none; without what an empty run costs, and never negative.
        held_up: Whether every round was held up by something else on the machine.
        launch_ns: On CUDA, for how long the host is busy with one run.
        remark: What is special in how it was measured.
    """

    ns: int
    held_up: bool = False
    launch_ns: int = 0
    remark: str = ""


@final
class CpuTimer:
    """A monotonic clock of the host. Launching an op is part of its time: the thread is busy."""

    def __init__(self, wall: Clock = time.perf_counter_ns, busy: Clock | None = None) -> None:
        self._wall = wall
        fine = time.get_clock_info("thread_time").resolution <= _MAX_TICK_S
        self._busy = busy or (time.thread_time_ns if fine else wall)
        self._clock_ns = statistics.median(self._read([]).ns for _ in range(200))
        # A run like any other, which calls a function with arguments, but does nothing.
        empty: list[Run] = [partial(_pair, None, None)] * _MAX_REPEATS
        several_ns = statistics.median(self._read(empty).ns for _ in range(200))
        self._call_ns = (several_ns - self._clock_ns) / _MAX_REPEATS

    def time(
        self, preparations: Sequence[Preparation], *, single: bool = False
    ) -> tuple[Reading, ...]:
        """The time of one run of each preparation.

        Args:
            preparations: Each makes as many runs as asked for, outside of the reading. Their
                readings take turns.
            single: One run per reading, because each needs preparing of its own.
        """
        repeats = [self._repeats(prepare, single) for prepare in preparations]
        rows = [
            [self._read(prepare(n)) for prepare, n in zip(preparations, repeats, strict=True)]
            for _ in rounds(wall=self._wall)
        ]
        columns = zip(*rows, strict=True)
        return tuple(self._summary(rows, n) for rows, n in zip(columns, repeats, strict=True))

    def _read(self, runs: Sequence[Run]) -> Reading:
        """The time of all runs together, one after the other, in this thread."""
        results = []  # live to the end of the reading, as in a step that goes on to its backward
        busy = self._busy()
        start = self._wall()
        for run in runs:
            results.append(run())  # noqa: PERF401 (a loop is what is measured)
        ns = self._wall() - start
        away_ns = ns - (self._busy() - busy)
        return Reading(ns, away_ns > _MAX_AWAY * ns)

    def _summary(self, rows: Sequence[Reading], repeats: int) -> Reading:
        free = [row.ns for row in rows if not row.held_up]
        # Where all were held up, the least delayed is nearest.
        readings = free or [min(row.ns for row in rows)]
        empty_ns = self._call_ns + self._clock_ns / repeats
        return Reading(median_ns(readings, repeats, empty_ns), held_up=not free)

    def _repeats(self, prepare: Preparation, single: bool) -> int:
        """The number of runs that make a reading long enough; the first run warms up."""
        if single or self._read(prepare(1)).ns > _LONG_NS:
            return 1
        once = max(min(self._read(prepare(1)).ns for _ in range(2)), 1)
        return min(-(-_READING_NS // once), _MAX_REPEATS)


def rounds(
    limits: tuple[int, int] = ROUNDS,
    budget_ns: int = BUDGET_NS,
    wall: Clock = time.perf_counter_ns,
) -> Iterator[int]:
    """Counts the rounds of a measurement, from the fewest to the most while there is time."""
    begin = wall()
    for index in range(limits[1]):
        if index >= limits[0] and wall() - begin > budget_ns:
            return
        yield index


def median_ns(readings_ns: Sequence[float], repeats: int, empty_ns: float) -> int:
    """The median time of one run, less that of an empty one, of readings of several runs each."""
    return max(round(statistics.median(readings_ns) / repeats - empty_ns), 0)


def _pair(first: None, second: None) -> tuple[None, None]:
    return first, second


@final
class CudaTimer:
    """Measures the time of a device's current stream, or of as much on several lanes at once."""

    def __init__(self, device: torch.device, lanes: int = 1) -> None:
        self._device = device
        self._lanes = _streams(device, lanes) if lanes > 1 else ()
        self._captures = _captures(device)
        self._total_bytes = torch.cuda.get_device_properties(device).total_memory
        self._cycles_per_ns = 0.0
        with torch.cuda.device(device):
            self._cycles_per_ns = self._spin_rate()
            self._pair_ns = self._graph_ns = self._around_ns(self._row)
            if self._lanes:  # whose forks and joins take less in a graph
                self._graph_ns = self._around_ns(self._captured)

    def time(
        self, preparations: Sequence[Preparation], *, single: bool = False
    ) -> tuple[Reading, ...]:
        """As that of a `CpuTimer`; the readings of each preparation come one after the other."""
        with torch.cuda.device(self._device):
            return tuple(self._time(prepare, single) for prepare in preparations)

    def _time(self, prepare: Preparation, single: bool) -> Reading:
        for _ in range(_WARM_UPS):
            self._clocked(prepare(1), wait=False)
        if self._makes_the_host_wait(prepare(1)):
            ns = median_ns([self._clocked(prepare(1)) for _ in rounds()], 1, 0.0)
            return Reading(ns, launch_ns=ns)
        launches = self.launched(prepare)
        least_ns, launch_ns = min(launches), max(launches)
        if self._lanes:
            launch_ns = len(self._lanes) * (launch_ns + _RECORDING_NS)
        first = min(self._queued(self._each(prepare, 2), launch_ns))
        if single or first > _SHORT_NS:
            # A single one evicts the cache, and brings back what would be in it.
            count = 1 if single else max(min(_QUEUED, int(_QUEUED_NS // first)), 1)
            most = -(-2 * _QUEUED // count)
            limits = ROUNDS if single else (min(3, most), most)
            queues = (self._each(prepare, count) for _ in rounds(limits))
            readings = [ns for queue in queues for ns in self._queued(queue, launch_ns)]
            return Reading(median_ns(readings, 1, self._pair_ns), launch_ns=least_ns)
        made_bytes = sum(tensor.nbytes for tensor in tensors_in(_call(prepare(1))))
        n = max(len(self._lanes), 1)
        repeats = max(min(_REPEATS, _HELD_BYTES // max(n * made_bytes, 1)), 1)
        remark, around_ns = "", self._graph_ns
        try:
            readings = self._queued([self._captured(prepare, repeats)] * _QUEUED, launch_ns)
        except RuntimeError as error:
            torch.cuda.synchronize(self._device)
            reason, *_ = str(error).split("\n")
            remark, around_ns = f"{NO_GRAPH} ({reason})", self._pair_ns
            repeats = -(-repeats // n)  # the launch queue is one for all lanes
            calls = [self._row(prepare, repeats) for _ in range(_QUEUED // 4)]
            readings = self._queued(calls, launch_ns * repeats)
        ns = median_ns(readings, repeats, around_ns / repeats)
        return Reading(ns, launch_ns=least_ns, remark=remark)

    def launched(self, prepare: Preparation, limits: tuple[int, int] = _FEW) -> list[int]:
        """For how long the host is busy with a run, of some, with the device idle before each."""
        return [self._clocked(prepare(1), wait=False) for _ in rounds(limits)]

    def _rows(self, prepare: Preparation, n: int) -> list[Sequence[Run]]:
        """So many runs for every lane."""
        if not self._lanes:
            return [prepare(n)]
        rows = []
        for lane in self._lanes:
            with torch.cuda.stream(lane):
                rows.append(prepare(n))
        torch.cuda.synchronize(self._device)
        return rows

    def _each(self, prepare: Preparation, n: int) -> list[Run]:
        """So many runs, each on all lanes at once."""
        rows = zip(*self._rows(prepare, n), strict=True)
        return [partial(self._at_once, runs) for runs in rows]

    def _row(self, prepare: Preparation, n: int) -> Run:
        """So many runs as one: each lane's in a row, beside those of the others."""
        return partial(self._at_once, [partial(_call, row) for row in self._rows(prepare, n)])

    def _at_once(self, runs: Sequence[Run]) -> list[Any]:
        if not self._lanes:
            return _call(runs)
        here = torch.cuda.current_stream(self._device)
        results = []
        for lane, run in zip(self._lanes, runs, strict=True):
            lane.wait_stream(here)
            with torch.cuda.stream(lane):
                results.append(run())
        for lane in self._lanes:
            here.wait_stream(lane)
        return results

    def _around_ns(self, repeated: Callable[[Preparation, int], Run]) -> float:
        """What a reading has in it beside its runs: forks, joins, gaps to the events around them.

        It is that of one of the shortest kernels, twice, less that of two.
        """
        launch_ns = max(len(self._lanes), 1) * _RECORDING_NS

        def tiny_ns(kernels: int) -> float:
            run = repeated(lambda n: [partial(spin, 1)] * n, kernels)
            rows = [self._queued([run] * _QUEUED, kernels * launch_ns) for _ in range(_WARM_UPS)]
            return statistics.median(ns for row in rows for ns in row)

        return max(2 * tiny_ns(1) - tiny_ns(2), 0.0)

    def _queued(self, runs: Sequence[Run], launch_ns: int) -> list[float]:
        """The stream's time between events around every run; the host queues one in `launch_ns`."""
        event: Any = partial(torch.cuda.Event, enable_timing=True)
        pairs = [(event(), event()) for _ in runs]
        torch.cuda.synchronize(self._device)
        spin_ns = len(runs) * (launch_ns + _RECORDING_NS) * _SPIN_MARGIN
        spin(int(spin_ns * self._cycles_per_ns))
        results = []
        for run, (before, after) in zip(runs, pairs, strict=True):
            before.record()
            results.append(run())
            after.record()
        torch.cuda.synchronize(self._device)
        return [before.elapsed_time(after) * 1e6 for before, after in pairs]

    def _captured(self, prepare: Preparation, repeats: int) -> Run:
        """A graph of so many runs.

        Raises:
            RuntimeError: It cannot be captured.
        """
        held = torch.cuda.memory_reserved(self._device)
        if held - torch.cuda.memory_allocated(self._device) > _UNUSED_SHARE * self._total_bytes:
            torch.cuda.empty_cache()
        recorder = CudaRecorder(self._device, self._captures)
        rows: list[Run] = []
        results: list[Any] = []
        # A backward runs on its forward's stream: that which is captured, or a lane forked from it.
        recorder.run(lambda: rows.append(self._row(prepare, repeats)))
        replay = recorder.record(lambda: results.append(_call(rows)), 0)
        replay()
        torch.cuda.synchronize(self._device)

        def repeated() -> Any:
            replay()
            return results  # the graph writes to these, so they live with it

        return repeated

    def _makes_the_host_wait(self, runs: Sequence[Run]) -> bool:
        before = torch.cuda.get_sync_debug_mode()
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Synchronization debug mode is a proto")
                torch.cuda.set_sync_debug_mode("error")
            _call(runs)
        except RuntimeError as error:
            if _SYNCHRONIZING not in str(error):
                raise
            return True
        finally:
            torch.cuda.set_sync_debug_mode(before)
        return False

    def _clocked(self, runs: Sequence[Run], *, wait: bool = True) -> int:
        """The host's nanoseconds until all is queued, or until the device is idle again."""
        torch.cuda.synchronize(self._device)
        begin = time.perf_counter_ns()
        results = _call(runs)
        if wait:
            torch.cuda.synchronize(self._device)
        elapsed_ns = time.perf_counter_ns() - begin
        torch.cuda.synchronize(self._device)
        del results
        return elapsed_ns

    def _spin_rate(self) -> float:
        """Cycles of the spinning kernel per nanosecond, at the clock of a GPU that is at work."""
        rate = spun_ns = 0.0
        while spun_ns < _RAMP_NS:
            took_ns = max(*self._queued([partial(spin, _RAMP_CYCLES)], 0), 1.0)
            rate = max(rate, _RAMP_CYCLES / took_ns)
            spun_ns += took_ns
        return rate


@cache
def _captures(device: torch.device) -> torch.cuda.Stream:
    """The stream for captures, one for all timers."""
    return capture_stream(device)


@cache
def _streams(device: torch.device, lanes: int) -> tuple[torch.cuda.Stream, ...]:
    """As many, for all timers."""
    return tuple(torch.cuda.Stream(device) for _ in range(lanes))  # type: ignore[no-untyped-call]


def _call(runs: Sequence[Run]) -> list[Any]:
    return [run() for run in runs]
