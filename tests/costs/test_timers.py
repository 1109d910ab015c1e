"""Timers: of a CPU on a machine whose time is made, and of CUDA on a GPU that is played.

The GPU tells what kernels take, whatever launching takes.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baechi.costs import timers
from baechi.costs.timers import CpuTimer, CudaTimer, Reading, median_ns, rounds


class Machine:
    """A clock that moves when something runs, and one that stands still while others do."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.away_ns = 0
        self.timer = CpuTimer(lambda: self.now_ns, lambda: self.now_ns - self.away_ns)

    def reading(self, ns: int, *others_ns: int) -> Reading:
        """Of a run of `ns`, where others run for so long in the midst of it, round by round."""
        turns = [0, *others_ns]  # the first run warms up

        def run() -> None:
            other = turns.pop(0) if len(turns) > 1 else turns[0]
            self.now_ns += ns + other
            self.away_ns += other

        (reading,) = self.timer.time([lambda n: [run] * n])
        return reading


LONG_NS = 20_000_000  # so few rounds, of a run each


def test_a_reading_is_a_median_without_what_is_empty() -> None:
    assert median_ns([100, 1000, 120, 110, 130], 10, 2.0) == 10
    assert median_ns([5], 1, 10.0) == 0
    assert len(list(rounds((3, 7), budget_ns=0))) == 3
    assert len(list(rounds((3, 7), budget_ns=10**12))) == 7


def test_the_readings_of_several_preparations_take_turns() -> None:
    order: list[str] = []

    def prepare(name: str) -> Any:
        return lambda n: [lambda: order.append(name)] * n

    CpuTimer().time([prepare("a"), prepare("b")], single=True)
    assert "".join(order) == "ab" * (len(order) // 2)


@pytest.mark.parametrize("ns", [100, 5_000, LONG_NS])
def test_a_run_takes_what_it_takes(ns: int) -> None:
    assert Machine().reading(ns) == Reading(ns)


def test_rounds_in_which_something_else_ran_are_left_out() -> None:
    others = (4_000_000, 4_000_000, 0)
    assert Machine().reading(LONG_NS, *others) == Reading(LONG_NS)


def test_a_little_of_the_system_s_own_is_not_something_else() -> None:
    others = (LONG_NS // 100, 0, LONG_NS // 100)
    assert Machine().reading(LONG_NS, *others) == Reading(LONG_NS + LONG_NS // 100)


def test_where_something_else_ran_all_the_time_the_shortest_is_nearest_and_it_is_said() -> None:
    others = (9_000_000, 2_000_000, 4_000_000)
    assert Machine().reading(LONG_NS, *others) == Reading(LONG_NS + 2_000_000, held_up=True)


def test_short_runs_are_repeated_within_a_reading() -> None:
    machine = Machine()
    counts: list[int] = []

    def prepare(n: int) -> Any:
        counts.append(n)

        def run() -> None:
            machine.now_ns += 1_000

        return [run] * n

    machine.timer.time([prepare])
    assert set(counts[3:]) == {20}
    machine.timer.time([prepare], single=True)
    assert counts[-1] == 1


DEVICE = torch.device("cuda", 0)
# About what an H100 does: cycles per ns when it was idle and when it is at work, and how long it
# takes from one to the other.
SLOW, FAST, RAMP_NS = 0.345, 1.98, 100e6


class Player:
    """A host and a stream of a GPU, each with a time of its own, in ns."""

    def __init__(self) -> None:
        self.host = self.stream = self.worked = 0.0
        self.streams = 0  # how many were made
        self.drain = 0.0  # how long after a kernel an event comes
        self.drains = False

    def launch(self, took: float, launching: float) -> None:
        self.host += launching
        self.stream = max(self.stream, self.host) + took
        self.worked += took
        self.drains = True

    def sleep(self, cycles: int) -> None:
        self.launch(cycles / (SLOW if self.worked < RAMP_NS else FAST), 2_000)

    def synchronize(self, _: Any = None) -> None:
        self.host = max(self.host, self.stream)


@dataclass
class Event:
    player: Player
    at: float = 0.0

    def record(self) -> None:
        self.player.launch(500 + self.player.drain * self.player.drains, 1_000)
        self.player.drains = False
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
        "_sleep": mine.sleep,
        "synchronize": mine.synchronize,
        "device": lambda _: contextlib.nullcontext(),
        "get_device_properties": lambda _: SimpleNamespace(total_memory=2**30),
        "get_sync_debug_mode": lambda: 0,
        "set_sync_debug_mode": lambda _: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(timers, "CudaRecorder", Recorder)
    monkeypatch.setattr(timers, "capture_stream", stream)
    clock = SimpleNamespace(perf_counter_ns=lambda: int(mine.host))
    monkeypatch.setattr(timers, "time", clock)
    timers._captures.cache_clear()
    yield mine
    timers._captures.cache_clear()


def kernels(player: Player, took: float, launching: float) -> Callable[[int], Sequence[Any]]:
    return lambda n: [partial(player.launch, took, launching)] * n


@pytest.mark.parametrize("took", [2_000, 100_000, 3_000_000])
@pytest.mark.parametrize("launching", [3_000, 300_000])
def test_launching_is_in_no_reading(player: Player, took: float, launching: float) -> None:
    (reading,) = CudaTimer(DEVICE).time([kernels(player, took, launching)])
    assert reading.ns == pytest.approx(took, rel=0.01)
    assert reading.launch_ns == launching


@pytest.mark.parametrize("single", [True, False])
def test_what_lies_between_a_kernel_and_an_event_is_in_no_reading(
    player: Player, single: bool
) -> None:
    player.drain = 1_500
    preparations = [kernels(player, took, 3_000) for took in (4_000, 100_000)]
    readings = CudaTimer(DEVICE).time(preparations, single=single)
    assert [reading.ns for reading in readings] == pytest.approx([4_000, 100_000], rel=0.02)


def test_timers_of_a_device_capture_on_one_stream(player: Player) -> None:
    first, second = CudaTimer(DEVICE), CudaTimer(DEVICE)
    assert first._captures is second._captures
    assert player.streams == 1
