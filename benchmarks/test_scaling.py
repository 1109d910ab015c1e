"""How placing and simulating grow: with ops from 10^3 to 10^6, and with 2 to 1,024 devices.

Claims, on layered random graphs of 100 ops per layer (`placement_quality/generators.py`):

- m-ETF on 8 devices: 5,000 ops in under 30 ms and at least 1,000 times as fast as plain Python
  (`plain_etf.py`, which gives the same placement); 20,000 ops in under 150 ms; 10^6 in under 10 s
  and 2 GB.
- `simulate`'s core folds at least 5 million ops per second on big graphs.
- m-SCT with its linear program: 700 ops in under 0.1 s, 5,000 under 2 s, 20,000 under 5 s, 100,000
  under 60 s.
- auto on graphs of 500 to 2,000 ops that others measured: fast in under 0.1 s, balanced under 2 s,
  thorough under 60 s.

Times are told, not asserted: they are this machine's. Run with `-s` for the tables, and with
`-m "slow or not slow"` for the sizes that take minutes. Placers are measured as such, from a graph
in Python to a placement in Python; the core alone, and `solve` around it, stand beside it.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from benchmarks import plain_etf
from benchmarks.placement_quality.generators import AMPLE, LINK, layered
from benchmarks.placement_quality.instances import instances

import baechi
from baechi.placers.etf import METF
from baechi.placers.sct import MSCT
from baechi.problem import Problem

WIDTH = 100  # ops per layer
SLOW = pytest.mark.slow
DEVICES = 8
GROWTH_OPS = (1_000, 10_000, 100_000)
GROWTH_DEVICES = (2, 8, 64, 256, 1_024)


@cache
def graph_of(n_ops: int) -> baechi.OpGraph:
    return layered(n_ops, n_ops, width=WIDTH)


def cluster_of(n: int = DEVICES) -> baechi.Cluster:
    return baechi.Cluster.uniform(n, AMPLE, LINK)


def seconds_of(function: Callable[..., Any], *args: Any, rounds: int = 1) -> float:
    """The median."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        function(*args)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


@pytest.mark.parametrize(
    "n_ops", [1_000, 5_000, 20_000, 100_000, pytest.param(1_000_000, marks=SLOW)]
)
def test_etf(benchmark: Any, n_ops: int) -> None:
    graph, cluster = graph_of(n_ops), cluster_of()
    benchmark.group = "m-ETF, 8 devices"
    rounds = 5 if n_ops <= 20_000 else 1
    placement = benchmark.pedantic(
        lambda: METF().place(Problem(graph, cluster)), rounds=rounds, warmup_rounds=1
    )
    problem = Problem(graph, cluster)
    timeline = problem.timeline()
    core_s = seconds_of(timeline.list_schedule, np.empty(0, np.int32))
    place_s = benchmark.stats.stats.median
    figures = {"n_ops": n_ops, "place_s": place_s, "core_s": core_s}
    line = f"m-ETF {n_ops:,} ops: place {place_s * 1e3:.1f} ms, core alone {core_s * 1e3:.1f} ms"
    if n_ops == 5_000:
        start = time.perf_counter()
        devices, order = plain_etf.place(graph, cluster)
        plain_s = time.perf_counter() - start
        assert (tuple(devices), tuple(order)) == (placement.devices, placement.order)
        figures["plain_s"] = plain_s
        line += f", plain Python {plain_s:.1f} s: {plain_s / place_s:,.0f} times place"
        line += f", {plain_s / core_s:,.0f} times core"
    benchmark.extra_info.update(figures)
    print(line)


@pytest.mark.parametrize("n_ops", [20_000, 100_000, pytest.param(1_000_000, marks=SLOW)])
def test_simulate(benchmark: Any, n_ops: int) -> None:
    graph, cluster = graph_of(n_ops), cluster_of()
    problem = Problem(graph, cluster)
    placement = METF().place(problem)
    devices = np.array(placement.devices, np.int32)
    order = np.array(placement.order, np.int32)
    benchmark.group = "simulate, 8 devices"
    benchmark.pedantic(baechi.simulate, (graph, cluster, placement), rounds=3)
    fold_s = statistics.median(
        [seconds_of(problem.timeline().fold, devices, order) for _ in range(5)]
    )
    simulate_s = benchmark.stats.stats.median
    benchmark.extra_info.update(n_ops=n_ops, fold_s=fold_s, fold_ops_per_s=n_ops / fold_s)
    print(
        f"simulate {n_ops:,} ops: {n_ops / simulate_s / 1e6:.2f} million ops/s with the schedule "
        f"as Python values, {n_ops / fold_s / 1e6:.2f} million ops/s in the core"
    )


@pytest.mark.parametrize(
    "n_ops",
    [500, 700, 5_000, pytest.param(20_000, marks=SLOW), pytest.param(100_000, marks=SLOW)],
)
def test_sct(benchmark: Any, n_ops: int) -> None:
    graph, cluster = graph_of(n_ops), cluster_of()
    benchmark.group = "m-SCT, 8 devices"
    placement = benchmark.pedantic(
        lambda: MSCT().place(Problem(graph, cluster)), rounds=3 if n_ops < 1_000 else 1
    )
    favorites = placement.stats["favorites"]
    benchmark.extra_info.update(n_ops=n_ops, favorites=favorites)
    print(f"m-SCT {n_ops:,} ops: {benchmark.stats.stats.median:.3f} s, favorites: {favorites}")


@pytest.mark.parametrize("effort", ["fast", "balanced", pytest.param("thorough", marks=SLOW)])
def test_auto_on_measured_graphs(benchmark: Any, effort: str) -> None:
    chosen = [
        (instance.name, instance.graph, cluster)
        for instance in instances()
        if 500 <= len(instance.graph.ops) <= 2_000
        for cluster in [baechi.Cluster.uniform(instance.devices, AMPLE, instance.link(1.0))]
    ]
    if not chosen:
        pytest.skip("the graphs of others are not here")
    seconds: dict[str, float] = {}

    def place_all() -> None:
        for name, graph, cluster in chosen:
            start = time.perf_counter()
            baechi.solve(graph, cluster, effort=effort)
            seconds[name] = time.perf_counter() - start

    benchmark.group = "auto, 4 to 8 devices"
    benchmark.pedantic(place_all, rounds=1)
    benchmark.extra_info.update(seconds=seconds)
    for name, graph, cluster in chosen:
        size = f"{len(graph.ops)} ops, {len(cluster.devices)} devices"
        print(f"auto/{effort} {name} ({size}): {seconds[name]:.3f} s")


# A fresh process per size: the peak of one's memory is what the others' left. Linux keeps the peak
# of `getrusage` across exec, so that a child starts with its parent's; /proc tells its own.
_CHILD = """
import json, pathlib, resource, sys, time
from benchmarks.test_scaling import METF, Problem, cluster_of, graph_of

def peak_bytes():
    status = pathlib.Path("/proc/self/status")
    if status.exists():
        rows = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(rows["VmHWM"].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

graph, cluster = graph_of(int(sys.argv[1])), cluster_of(int(sys.argv[2]))
before = peak_bytes()
start = time.perf_counter()
METF().place(Problem(graph, cluster))
seconds = time.perf_counter() - start
print(json.dumps({"seconds": seconds, "graph_bytes": before, "peak_bytes": peak_bytes()}))
"""


def grown(n_ops: int, devices: int) -> dict[str, float]:
    """Seconds and peak memory of m-ETF in a process of its own."""
    command = [sys.executable, "-c", _CHILD, str(n_ops), str(devices)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout))


def tell(n_ops: int, devices: int, figures: dict[str, float]) -> None:
    print(
        f"{n_ops:>9,} ops {devices:>5,} devices: {figures['seconds']:8.3f} s "
        f"({figures['seconds'] / n_ops * 1e6:6.2f} us/op), peak "
        f"{figures['peak_bytes'] / 2**20:,.0f} MiB, with the graph alone "
        f"{figures['graph_bytes'] / 2**20:,.0f} MiB"
    )


@pytest.mark.parametrize("n_ops", [*GROWTH_OPS, pytest.param(1_000_000, marks=SLOW)])
def test_growth_with_ops(benchmark: Any, n_ops: int) -> None:
    benchmark.group = "growth with ops, 8 devices (with the start of Python)"
    figures = benchmark.pedantic(grown, (n_ops, DEVICES), rounds=1)
    benchmark.extra_info.update(n_ops=n_ops, **figures)
    tell(n_ops, DEVICES, figures)


@pytest.mark.parametrize("devices", GROWTH_DEVICES)
def test_growth_with_devices(benchmark: Any, devices: int) -> None:
    benchmark.group = "growth with devices, 10,000 ops (with the start of Python)"
    figures = benchmark.pedantic(grown, (10_000, devices), rounds=1)
    benchmark.extra_info.update(devices=devices, **figures)
    tell(10_000, devices, figures)
