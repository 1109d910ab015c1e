"""The CUDA timer: events on the stream, behind a kernel that spins until everything is queued.

    host     spin  e e' | flush  e op e' | flush  e op e' | ...        queued at once
    stream   [spin][e e'][flush][e op e'][flush][e op e']...           no gap of a launch between

So what the host takes to launch an op, and the gaps while it does, are in no reading. What a pair
of events costs by itself is measured among the rest and subtracted. Short ops are captured in a
CUDA graph that repeats them; where a capture fails they are repeated as they are. An op that makes
the host wait cannot be queued: it is clocked by the host, from an idle device to an idle device.
"""

import statistics
import time
import warnings
from collections.abc import Sequence
from functools import cache, partial
from typing import Any, Final, final

import torch

from baechi.costs.cpu_timer import Preparation, Reading, Run, rounds, summary
from baechi.torch_support.graph_capture import CudaRecorder

_WARM_UPS: Final = 3
# About 1,024 launches can be pending (CUDA's launch queue); this many readings stay below it
# for ops of up to ten kernels.
_QUEUED: Final = 20
# The resolution of an event is about 0.5 us; below this it matters, so such runs are repeated.
_SHORT_NS: Final = 30_000
_REPEATS: Final = 20
# A queue holds readings of at most this much time: all its results are alive together.
_QUEUED_NS: Final = 2_000_000
# What recording a pair of events takes of the host, generously.
_RECORDING_NS: Final = 20_000
# A spin too long costs time only; one too short leaves gaps.
_SPIN_MARGIN: Final = 2.0
# Until a GPU's clock is up: spins of so many cycles, for so long.
_RAMP_CYCLES: Final = 10_000_000
_RAMP_NS: Final = 200_000_000
_SYNCHRONIZING: Final = "called a synchronizing CUDA operation"


@final
class CudaTimer:
    """Measures the stream's time on one device.

    Args:
        device: The device; its current stream is used.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._captures = _captures(device)
        self._cycles_per_ns = self._spin_rate()
        with torch.cuda.device(device):
            self._pair_ns = statistics.median(self._queued([_nothing] * _QUEUED, 0))

    def time(
        self, preparations: Sequence[Preparation], *, single: bool = False
    ) -> tuple[Reading, ...]:
        """As in `Timer`."""
        with torch.cuda.device(self._device):
            return tuple(self._time(prepare, single) for prepare in preparations)

    def _time(self, prepare: Preparation, single: bool) -> Reading:
        for _ in range(_WARM_UPS):
            launch_ns = self._clocked(prepare(1), wait=False)
        if self._makes_the_host_wait(prepare(1)):
            return Reading(summary([self._clocked(prepare(1)) for _ in rounds()], 1, 0.0))
        first = min(self._queued(prepare(2), launch_ns))
        if single:
            # Prepared one by one: each evicts the cache and brings back what would be in it.
            readings = [self._queued(prepare(1), launch_ns)[0] for _ in rounds()]
            return Reading(summary(readings, 1, self._pair_ns))
        if first > _SHORT_NS:
            count = max(min(_QUEUED, int(_QUEUED_NS // first)), 1)
            most = -(-2 * _QUEUED // count)
            readings = [
                t
                for _ in rounds((min(3, most), most))
                for t in self._queued(prepare(count), launch_ns)
            ]
            return Reading(summary(readings, 1, self._pair_ns))
        repeated = self._captured(prepare)
        if repeated is None:
            rows = [prepare(_REPEATS) for _ in range(_QUEUED // 4)]
            calls = [partial(_call, row) for row in rows]
            readings = self._queued(calls, launch_ns * _REPEATS)
        else:
            readings = self._queued([repeated] * _QUEUED, launch_ns)
        return Reading(summary(readings, _REPEATS, self._pair_ns / _REPEATS))

    def _queued(self, runs: Sequence[Run], launch_ns: int) -> list[float]:
        """Nanoseconds of the stream between the events around every run.

        Args:
            runs: The runs to queue.
            launch_ns: The approximate time in which the host queues one.
        """
        pairs = [[_event() for _ in range(2)] for _ in runs]
        torch.cuda.synchronize(self._device)
        spin_ns = len(runs) * (launch_ns + _RECORDING_NS) * _SPIN_MARGIN
        _spin(int(spin_ns * self._cycles_per_ns))
        results = []
        for run, (before, after) in zip(runs, pairs, strict=True):
            before.record()
            results.append(run())
            after.record()
        torch.cuda.synchronize(self._device)
        return [before.elapsed_time(after) * 1e6 for before, after in pairs]

    def _captured(self, prepare: Preparation) -> Run | None:
        """A graph that repeats the run, or `None` where it cannot be captured."""
        recorder = CudaRecorder(self._device, self._captures)
        runs: list[Run] = []
        results: list[Any] = []
        try:
            # A backward runs on its forward's stream: both are on the one that is captured.
            recorder.run(lambda: runs.extend(prepare(_REPEATS)))
            replay = recorder.record(lambda: results.extend(_call(runs)), 0)
            replay()
            torch.cuda.synchronize(self._device)
        except RuntimeError:
            torch.cuda.synchronize(self._device)
            return None

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
        """Cycles of the spinning kernel per nanosecond, at the clock of a GPU that is at work.

        One that was idle begins at a fraction of it, and spins would be too short by as much.
        """
        rate = spun_ns = 0.0
        with torch.cuda.device(self._device):
            while spun_ns < _RAMP_NS:
                pair = [_event() for _ in range(2)]
                torch.cuda.synchronize(self._device)
                pair[0].record()
                _spin(_RAMP_CYCLES)
                pair[1].record()
                torch.cuda.synchronize(self._device)
                took_ns = max(float(pair[0].elapsed_time(pair[1])) * 1e6, 1.0)
                rate = max(rate, _RAMP_CYCLES / took_ns)
                spun_ns += took_ns
        return rate


@cache
def _captures(device: torch.device) -> torch.cuda.Stream:
    """The stream on which timed runs of a device are captured: the same for every timer.

    torch never gives a stream back, and cuBLAS keeps a workspace for each.
    """
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _spin(cycles: int) -> None:
    """Keep the stream busy for so many cycles of the device's clock."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def _call(runs: Sequence[Run]) -> list[Any]:
    return [run() for run in runs]


def _nothing() -> None:
    """A run without work."""
