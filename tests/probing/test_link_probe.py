"""Fitting a latency and a rate: known links are found again, and what no link can tell is said."""

import contextlib
import random
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baechi import Link
from baechi.probing import link_probe
from baechi.probing.link_probe import FREE_BYTES_PER_S, GOOD_ERROR, fit_link

SIZES = tuple(1 << power for power in range(10, 29, 2))


def times(link, noise=0.0, seed=0):
    draw = random.Random(seed)
    return [round(link.transfer_ns(size) * (1 + draw.uniform(-noise, noise))) for size in SIZES]


@pytest.mark.parametrize(
    ("latency_ns", "bytes_per_s"),
    [(10_000, 25 * 10**9), (40_000, 10**9), (2_000, 400 * 10**9), (0, 10**10), (1_000_000, 10**8)],
)
def test_a_known_link_is_found_again(latency_ns, bytes_per_s):
    fit = fit_link(SIZES, times(Link(latency_ns, bytes_per_s)))
    assert fit.worst_error < 0.001
    assert fit.worst_error <= GOOD_ERROR
    assert fit.link.bytes_per_s == pytest.approx(bytes_per_s, rel=0.01)
    assert fit.link.latency_ns == pytest.approx(latency_ns, rel=0.01, abs=30)


@given(
    latency_ns=st.integers(1_000, 10**6),
    bytes_per_s=st.integers(10**8, 10**12),
    seed=st.integers(0, 10**6),
)
def test_noise_is_not_made_larger(latency_ns, bytes_per_s, seed):
    """The true link errs by the noise at most, so the best link does not err by more."""
    noise = 0.15
    fit = fit_link(SIZES, times(Link(latency_ns, bytes_per_s), noise, seed))
    assert fit.worst_error <= noise / (1 - noise) + 0.001
    assert fit.worst_error <= GOOD_ERROR


def test_no_other_link_errs_less():
    measured = times(Link(8_000, 12 * 10**9), 0.3, seed=3)
    fit = fit_link(SIZES, measured)
    for latency, rate in product((0.7, 0.9, 0.99, 1.01, 1.1, 1.5), (0.7, 0.9, 0.99, 1.01, 1.1)):
        link = Link(int(fit.link.latency_ns * latency), int(fit.link.bytes_per_s * rate))
        pairs = zip(SIZES, measured, strict=True)
        worst = max(abs(link.transfer_ns(size) - time) / time for size, time in pairs)
        assert worst >= fit.worst_error - 0.001


def test_what_two_numbers_cannot_tell_is_said():
    """A path that is four times as fast above 1 MiB, as with another protocol there."""
    slow, fast = Link(5_000, 10**9), Link(900_000, 40 * 10**9)
    measured = [(slow if size < 1 << 20 else fast).transfer_ns(size) for size in SIZES]
    fit = fit_link(SIZES, measured)
    assert fit.worst_error > GOOD_ERROR
    told = fit.link.transfer_ns(fit.worst_bytes)
    real = measured[SIZES.index(fit.worst_bytes)]
    assert abs(told - real) / real == fit.worst_error > 0.2


def test_equal_times_are_all_latency_and_proportional_ones_all_rate():
    flat = fit_link(SIZES, [7_000] * len(SIZES))
    assert flat.link == Link(7_000, FREE_BYTES_PER_S)
    steep = fit_link((1_000, 2_000, 4_000), (1_000, 2_000, 4_000))
    assert steep.link.latency_ns == 0
    assert steep.link.bytes_per_s == pytest.approx(10**9, rel=1e-6)


def test_times_that_fall_still_give_a_link():
    fit = fit_link((1, 2, 3), (30_000, 20_000, 10_000))
    assert fit.link.latency_ns > 0
    assert fit.worst_error == pytest.approx(0.5, abs=0.01)  # 15 us for all: between 10 and 30


def test_two_sizes_are_told_exactly():
    fit = fit_link((1_000, 3_000), (5_000, 9_000))
    assert fit.link == Link(3_000, 500_000_000)
    assert fit.worst_error == 0


class PlayedStream:
    """A stream whose kernels take 2 us each, and 1 us more after one of another stream."""

    host_ns = 0.0  # each call takes 10 us of the thread that launches

    def __init__(self, *_: Any, **__: Any) -> None:
        self.at_ns = 0.0

    def launched(self, took_ns: float = 0.0) -> None:
        PlayedStream.host_ns += 10_000
        self.at_ns = max(self.at_ns, PlayedStream.host_ns) + took_ns

    def wait_stream(self, other: "PlayedStream") -> None:
        self.launched()
        self.at_ns = max(self.at_ns, other.at_ns + 1_000)


class PlayedEvent:
    def __init__(self, **_: Any) -> None:
        self.at_ns = 0.0

    def record(self, stream: PlayedStream) -> None:
        stream.launched()
        self.at_ns = stream.at_ns

    def elapsed_time(self, end: "PlayedEvent") -> float:
        return (end.at_ns - self.at_ns) / 1e6


def test_a_hop_between_streams_has_nothing_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[PlayedStream] = []

    @contextlib.contextmanager
    def on(stream: PlayedStream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    for name, value in {
        "Stream": PlayedStream,
        "Event": PlayedEvent,
        "stream": on,
        "synchronize": lambda _: None,
        "_sleep": lambda cycles: current[-1].launched(max(cycles, 2_000)),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    assert link_probe.lane_ns(torch.device("cpu")) == 1_000
