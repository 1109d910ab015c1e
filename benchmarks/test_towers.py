"""Claim: two equal towers on two logical devices take at most 0.55 of the time of one.

Both have one thread per device, so that the second core comes from the split alone. The rounds are
interleaved: before each step on two devices a step on one is run and timed, and the figure is the
ratio of the medians of one run. A training step begins without gradients, as the prediction's does:
adding to old ones is autograd's work, on the caller's thread. Each round waits until the machine is
quiet, a minute in all. The ratio that the simulator predicted stands beside it. Needs two cores
that nothing else uses.
"""

import copy
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from benchmarks.models.towers import Towers
from benchmarks.quiet import Quiet

import baechi

ROUNDS = 25
PATIENCE_S = 60.0
BOUND = 0.55
BATCH, DEPTH, WIDTH = 256, 8, 1024


@dataclass
class Side:
    """The model on some devices: one step, and how long the simulator said that it takes."""

    module: torch.nn.Module
    step: Callable[[], object]
    predicted_ns: int


@pytest.fixture
def sides(training: bool) -> Iterator[list[Side]]:
    """The same model on one logical device, and on two."""
    torch.manual_seed(0)
    model = Towers(n_towers=2, depth=DEPTH, width=WIDTH)
    x = torch.randn(BATCH, WIDTH)
    found = []
    for names in (["cpu:0"], ["cpu:0", "cpu:1"]):
        traced = baechi.trace(copy.deepcopy(model), (x,))
        profile = baechi.profile(traced, device="cpu", threads=1, progress=False)
        graph = traced.graph(profile, training=training)
        cluster = baechi.probe(dict.fromkeys(names, "8GiB"))
        placement = baechi.solve(graph, cluster, placer="auto")
        placed = baechi.apply(traced, placement, devices=names, threads_per_device=1)
        predicted_ns = baechi.simulate(graph, cluster, placement).makespan_ns
        found.append(Side(placed, step_of(placed, x, training), predicted_ns))
    yield found
    for side in found:
        side.module.unplace()


def step_of(module: torch.nn.Module, x: torch.Tensor, training: bool) -> Callable[[], object]:
    def train() -> None:
        module(x).square().mean().backward()

    def infer() -> Any:
        with torch.no_grad():
            return module(x)

    return train if training else infer


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two devices side by side need two cores")
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_two_devices_take_at_most_055_of_the_time_of_one(benchmark: Any, sides: list[Side]) -> None:
    one, two = sides
    quiet = Quiet(PATIENCE_S)
    seconds_of_one = []

    def run_one() -> None:
        for side in sides:
            side.module.zero_grad()
        quiet.wait()
        start = time.perf_counter()
        one.step()
        seconds_of_one.append(time.perf_counter() - start)

    benchmark.pedantic(two.step, setup=run_one, rounds=ROUNDS, warmup_rounds=3)
    seconds = statistics.median(seconds_of_one[-ROUNDS:])
    ratio = benchmark.stats.stats.median / seconds
    predicted = two.predicted_ns / one.predicted_ns
    benchmark.extra_info.update(
        one_device_s=seconds, ratio=ratio, predicted_ratio=predicted, bound=BOUND
    )
    print(f"two devices / one device: {ratio:.3f} measured, {predicted:.3f} predicted")
    assert ratio <= BOUND
