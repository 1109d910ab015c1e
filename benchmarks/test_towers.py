"""Claim: two equal towers on two logical devices take at most 0.65 of the time of one.

Both have one thread per device, so that the second core comes from the split alone. The rounds are
interleaved: before each step on two devices a step on one is run and timed, and the figure is the
ratio of the medians of one run. Needs two free cores.
"""

import copy
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from benchmarks.models.towers import Towers

import baechi

ROUNDS = 15
BOUND = 0.65
BATCH, DEPTH, WIDTH = 256, 8, 1024


@pytest.fixture
def steps(training: bool) -> Iterator[list[Callable[[], object]]]:
    """A step on one logical device, and on two."""
    torch.manual_seed(0)
    model = Towers(n_towers=2, depth=DEPTH, width=WIDTH)
    x = torch.randn(BATCH, WIDTH)
    found, placed = [], []
    for names in (["cpu:0"], ["cpu:0", "cpu:1"]):
        traced = baechi.trace(copy.deepcopy(model), (x,))
        profile = baechi.profile(traced, device="cpu", threads=1, progress=False)
        graph = traced.graph(profile, training=training)
        cluster = baechi.probe(dict.fromkeys(names, "8GiB"))
        placement = baechi.solve(graph, cluster, placer="auto")
        placed.append(baechi.apply(traced, placement, devices=names, threads_per_device=1))
        found.append(step_of(placed[-1], x, training))
    yield found
    for module in placed:
        module.unplace()


def step_of(module: torch.nn.Module, x: torch.Tensor, training: bool) -> Callable[[], object]:
    def train() -> None:
        module(x).square().mean().backward()

    def infer() -> Any:
        with torch.no_grad():
            return module(x)

    return train if training else infer


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two devices side by side need two cores")
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_two_devices_take_at_most_065_of_the_time_of_one(
    benchmark: Any, steps: list[Callable[[], object]]
) -> None:
    one, two = steps
    seconds_of_one = []

    def run_one() -> None:
        start = time.perf_counter()
        one()
        seconds_of_one.append(time.perf_counter() - start)

    benchmark.pedantic(two, setup=run_one, rounds=ROUNDS, warmup_rounds=3)
    seconds = statistics.median(seconds_of_one[-ROUNDS:])
    ratio = benchmark.stats.stats.median / seconds
    benchmark.extra_info.update(one_device_s=seconds, ratio=ratio, bound=BOUND)
    print(f"two devices / one device = {ratio:.3f}")
    assert ratio <= BOUND
