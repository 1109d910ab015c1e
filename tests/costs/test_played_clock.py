"""CUDA's clock on a GPU that is played: it tells what kernels take, whatever launching takes."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baechi.costs import cuda_timer
from baechi.costs.cuda_timer import CudaTimer

DEVICE = torch.device("cuda", 0)
# About what an H100 does: cycles per ns when it was idle and when it is at work, and how long it
# takes from one to the other.
SLOW, FAST, RAMP_NS = 0.345, 1.98, 100e6


class Player:
    """A host and a stream of a GPU, each with a time of its own, in ns."""

    def __init__(self) -> None:
        self.host = self.stream = self.worked = 0.0
        self.streams = 0  # how many were made

    def launch(self, took: float, launching: float) -> None:
        self.host += launching
        self.stream = max(self.stream, self.host) + took
        self.worked += took

    def sleep(self, cycles: int) -> None:
        self.launch(cycles / (SLOW if self.worked < RAMP_NS else FAST), 2_000)

    def synchronize(self, _: Any = None) -> None:
        self.host = max(self.host, self.stream)


@dataclass
class Event:
    player: Player
    at: float = 0.0

    def record(self) -> None:
        self.player.launch(500, 1_000)
        self.at = self.player.stream

    def elapsed_time(self, end: "Event") -> float:
        return (end.at - self.at) / 1e6


@pytest.fixture
def player(monkeypatch: pytest.MonkeyPatch) -> Iterator[Player]:
    """Inside a test `torch.cuda` is the played GPU, which captures nothing."""
    mine = Player()

    class Recorder:
        def __init__(self, *_: Any) -> None:
            """Of no stream."""

        def run(self, function: Callable[[], None]) -> None:
            function()

        def record(self, *_: Any) -> None:
            raise RuntimeError("not permitted when stream is capturing")

    def stream(_: torch.device) -> object:
        mine.streams += 1
        return object()

    for name, value in {
        "Event": lambda **_: Event(mine),
        "Stream": stream,
        "_sleep": mine.sleep,
        "synchronize": mine.synchronize,
        "device": lambda _: contextlib.nullcontext(),
        "get_sync_debug_mode": lambda: 0,
        "set_sync_debug_mode": lambda _: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(cuda_timer, "CudaRecorder", Recorder)
    clock = SimpleNamespace(perf_counter_ns=lambda: int(mine.host))
    monkeypatch.setattr(cuda_timer, "time", clock)
    cuda_timer._captures.cache_clear()
    yield mine
    cuda_timer._captures.cache_clear()


def kernels(player: Player, took: float, launching: float) -> Callable[[int], Sequence[Any]]:
    return lambda n: [partial(player.launch, took, launching)] * n


@pytest.mark.parametrize("took", [2_000, 100_000, 3_000_000])
@pytest.mark.parametrize("launching", [3_000, 300_000])
def test_launching_is_in_no_reading(player: Player, took: float, launching: float) -> None:
    (reading,) = CudaTimer(DEVICE).time([kernels(player, took, launching)])
    assert reading.ns == pytest.approx(took, rel=0.01)


def test_timers_of_a_device_capture_on_one_stream(player: Player) -> None:
    first, second = CudaTimer(DEVICE), CudaTimer(DEVICE)
    assert first._captures is second._captures
    assert player.streams == 1
