"""A split is kept where it is faster than one device by measurement."""

import copy
import itertools
import threading
import time
from pathlib import Path
from typing import Any

import placed as placing
import pytest
import torch
from torch import nn

import baechi
from baechi.planning import placement_search
from baechi.runtime.step_measurement import Comparison, compared


@torch.library.custom_op("baechi_tests::pause", mutates_args=())
def pause(x: torch.Tensor, seconds: float) -> torch.Tensor:
    """As a kernel, it lets the other worker go on. Below 0: on workers alone."""
    if seconds > 0 or threading.current_thread() is not threading.main_thread():
        time.sleep(abs(seconds))
    return x.clone()


@pause.register_fake
def _(x: torch.Tensor, _: float) -> torch.Tensor:
    return torch.empty_like(x)


class Branches(nn.Module):
    """Two branches that take as long as they are told."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.inner = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = (pause(layer(x), self.seconds) for layer in self.inner)
        return left + right


def place(model: nn.Module, *, devices: Any = None, **options: Any) -> Any:
    """On two devices, with costs by which a split is faster."""
    x = torch.ones(2, 4)
    profile = placing.made_up_profile(baechi.trace(model, (x,)))
    placed = baechi.place(
        model,
        placing.cpus(2, "1GiB") if devices is None else devices,
        **{"costs": profile, "training": False, "progress": False} | options,
    )
    placed(x)
    return placed


@pytest.fixture(autouse=True)
def _own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_a_split_that_is_slower_goes() -> None:
    model = Branches(-0.01)
    assert len(set(place(copy.deepcopy(model), guard=False).placement.devices)) == 2
    placed = place(model)
    assert len(set(placed.placement.devices)) == 1
    assert "one device is kept" in placed.remarks[-1]
    assert "one device is kept" in placed.report()


def test_a_split_that_is_faster_stays_and_is_not_measured_again() -> None:
    model = Branches(0.01)
    placed = place(copy.deepcopy(model))
    assert len(set(placed.placement.devices)) == 2
    assert "the split is kept" in placed.remarks[-1]
    again = place(copy.deepcopy(model))
    assert again.remarks[-1] == placed.remarks[-1]  # to the digit: from the store


def test_a_split_that_was_slower_is_not_searched_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    placed, asked, solve = (
        place(Branches(-0.01)),
        [],
        baechi.planning.placement_search.solve_with_held,
    )

    def noted(graph: Any, cluster: Any, placer: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append(placer)
        return solve(graph, cluster, placer, *args, **kwargs)

    monkeypatch.setattr(placement_search, "solve_with_held", noted)
    again = place(Branches(-0.01))
    assert asked == ["single"]
    assert again.placement.devices == placed.placement.devices
    assert again.remarks[-1] == placed.remarks[-1]
    # Where one device no longer suffices, it is.
    asked.clear()
    smaller = place(Branches(-0.01), devices=placing.cpus(2, 200))
    assert asked == ["single", "auto", "single"]
    assert len(set(smaller.placement.devices)) == 2
    assert not smaller.remarks


class Forward(torch.autograd.Function):
    """As reversible layers in evaluation, whose backward refuses."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(_: Any, *__: Any) -> None:
        raise AssertionError("call model.train()")


def test_a_split_whose_step_fails_alone_is_not_compared() -> None:
    class Evaluated(Branches):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            left, right = (Forward.apply(pause(layer(x), 0.01)) for layer in self.inner)
            return left + right

    model, x = Evaluated(0.01).eval(), torch.ones(2, 4)
    expected = model(x)
    with torch.no_grad():
        placed = place(model, training=True)
        assert "a step fails: " in placed.remarks[-1]
        assert "call model.train()" in placed.remarks[-1]
        assert torch.equal(placed(x), expected)


def test_a_placer_by_name_is_the_user_s_own_wish() -> None:
    placed = place(Branches(-0.01), placer="round-robin")
    assert len(set(placed.placement.devices)) == 2
    assert not placed.remarks


def test_what_fits_no_single_device_is_not_compared() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    devices = {"cpu:0": "30KiB", "cpu:1": "30KiB"}
    placed = baechi.place(model, devices, training=False, progress=False, costs="estimate")
    placed(torch.ones(1, 64))
    assert len(set(placed.placement.devices)) == 2
    assert not placed.remarks


def test_a_split_must_win_by_more_than_noise() -> None:
    assert not Comparison(985, 1000).prefers_split
    assert Comparison(975, 1000).prefers_split
    assert not Comparison(900, 1000, spread_ns=110).prefers_split
    assert Comparison(880, 1000, spread_ns=110).prefers_split


def test_clear_times_take_three_rounds() -> None:
    rounds = iter([(900, 1000)] * 3)
    assert compared(lambda: next(rounds)) == Comparison(900, 1000)
    assert next(rounds, None) is None


def test_a_lucky_start_is_looked_at_again() -> None:
    """Three rounds in which the split has luck once, and nine in which it has none."""
    rounds = iter([(700, 1000), (700, 1000), (1400, 1000), *[(1400, 1000)] * 9])
    found = compared(lambda: next(rounds))
    assert found.split_ns == 1400
    assert not found.prefers_split
    assert len(list(rounds)) > 0  # it became clear on the way


def test_what_stays_unclear_takes_no_more_rounds_than_there_is_time_for() -> None:
    rounds = iter([(700, 1000), (1400, 1000)] * 6)
    found = compared(lambda: next(rounds), wall=itertools.count(0, 1_500_000_000).__next__)
    assert not found.prefers_split
    assert len(list(rounds)) == 12 - 5


def test_a_machine_that_slows_down_meanwhile_slows_both() -> None:
    rounds = iter([(800 * speed, 1000 * speed) for speed in (1, 2, 2)])
    found = compared(lambda: next(rounds))
    assert found.prefers_split
    assert found.spread_ns == 200
