"""How placing and simulating grow: with ops from 10^3 to 10^6, and with 2 to 1,024 devices.

Claims, on layered random graphs of 100 ops per layer (`placement_quality/generators.py`):

- m-ETF on 8 devices: 5,000 ops in under 30 ms; 20,000 ops in under 150 ms; 10^6 in under 10 s and
  2 GB. Beside it plain Python with the same placement: `plain_etf.py`, which keeps the clock up to
  date, at 5,000 ops, and `tests/support/oracle.py`, which keeps nothing, at the few ops that it
  can do.
- `simulate`'s core folds at least 5 million ops per second on big graphs, with the peaks of memory.
- m-SCT with its linear program: 700 ops in under 0.1 s, 5,000 under 2 s, 20,000 under 5 s, 100,000
  under 60 s.
- a coarse graph of 77,000 parts stays arrays: it becomes a problem in under 0.1 s.
- auto on graphs of 500 to 2,000 ops that others measured: fast in under 0.1 s, balanced under 2 s,
  thorough under 60 s.

Times are told, not asserted: they are this machine's. "CPU" is the time that the process itself
had, which a busy machine changes less. Run with `-s` for the tables, and with `-m "slow or not
slow"` for the sizes that take minutes. Placers are measured as such, from a graph
in Python to a placement in Python; the core alone, and `solve` around it, stand beside it.
"""

import statistics
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from benchmarks import plain_etf
from benchmarks.children import figures_of
from benchmarks.placement_quality.generators import AMPLE, LINK, layered
from benchmarks.placement_quality.instances import instances
from oracle import Oracle, list_schedule

import baechi
from baechi import _core
from baechi.placers.list_schedulers import METF
from baechi.placers.sct import MSCT
from baechi.problem.coarsening import coarsen
from baechi.problem.problem_arrays import Problem
from baechi.problem.simulation import memory_profile

WIDTH = 100  # ops per layer
NO_FAVORITES = np.empty(0, np.int32)
SLOW = pytest.mark.slow
DEVICES = 8
GROWTH_OPS = (1_000, 10_000, 100_000)
GROWTH_DEVICES = (2, 8, 64, 256, 1_024)


@cache
def graph_of(n_ops: int) -> baechi.OpGraph:
    return layered(n_ops, n_ops, width=WIDTH)


def cluster_of(n: int = DEVICES) -> baechi.Cluster:
    return baechi.Cluster.uniform(n, AMPLE, LINK)


def cpu_seconds_of(function: Callable[[], Any], rounds: int = 5) -> float:
    """The median of this process' own time."""
    times = []
    for _ in range(rounds):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
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
    place_s = benchmark.stats.stats.median
    problem = Problem(graph, cluster)
    place_cpu_s = cpu_seconds_of(lambda: METF().place(Problem(graph, cluster)), rounds)
    core_s = cpu_seconds_of(lambda: problem.timeline().list_schedule(NO_FAVORITES), rounds)
    figures = {"n_ops": n_ops, "place_s": place_s, "place_cpu_s": place_cpu_s, "core_s": core_s}
    line = (
        f"m-ETF {n_ops:,} ops: place {place_s * 1e3:.1f} ms (CPU {place_cpu_s * 1e3:.1f} ms), core "
        f"alone CPU {core_s * 1e3:.1f} ms, {core_s / n_ops * 1e6:.2f} us/op"
    )
    if n_ops == 5_000:
        start = time.process_time()
        devices, order = plain_etf.place(graph, cluster)
        plain_s = time.process_time() - start
        assert (tuple(devices), tuple(order)) == (placement.devices, placement.order)
        figures["plain_s"] = plain_s
        line += f"; plain Python CPU {plain_s:.1f} s: {plain_s / place_cpu_s:,.0f} times place"
        line += f", {plain_s / core_s:,.0f} times core"
    benchmark.extra_info.update(figures)
    print(line)


@pytest.mark.parametrize("n_ops", [25, 50, pytest.param(100, marks=SLOW)])
def test_the_oracle_beside(benchmark: Any, n_ops: int) -> None:
    graph, cluster = layered(n_ops, n_ops), cluster_of()
    problem, oracle = Problem(graph, cluster), Oracle(graph, cluster)
    timeline = problem.timeline()
    start = time.process_time()
    list_schedule(oracle)
    oracle_s = time.process_time() - start
    timeline.list_schedule(NO_FAVORITES)
    assert timeline.spans() == [(op, *span) for op, span in oracle.spans.items()]
    benchmark.group = "m-ETF beside the oracle of the tests, 8 devices"
    benchmark(lambda: problem.timeline().list_schedule(NO_FAVORITES))
    core_s = cpu_seconds_of(lambda: problem.timeline().list_schedule(NO_FAVORITES), 21)
    benchmark.extra_info.update(n_ops=n_ops, oracle_s=oracle_s, core_s=core_s)
    print(
        f"m-ETF {n_ops:,} ops, the oracle of the tests: CPU {oracle_s:.2f} s, "
        f"{oracle_s / core_s:,.0f} times core ({core_s * 1e6:.0f} us)"
    )


@pytest.mark.parametrize("n_ops", [20_000, 100_000, pytest.param(1_000_000, marks=SLOW)])
def test_simulate(benchmark: Any, n_ops: int) -> None:
    graph, cluster = graph_of(n_ops), cluster_of()
    problem = Problem(graph, cluster)
    placement = METF().place(problem)
    devices = np.array(placement.devices, np.int32)
    order = np.array(placement.order, np.int32)
    benchmark.group = "simulate, 8 devices"
    benchmark.pedantic(baechi.simulate, (graph, cluster, placement), rounds=3)

    def fold() -> None:
        timeline = problem.timeline()
        timeline.fold(devices, order)
        timeline.peaks()

    fold_s = cpu_seconds_of(fold)
    simulate_s = cpu_seconds_of(lambda: baechi.simulate(graph, cluster, placement))
    schedule = baechi.simulate(graph, cluster, placement)
    bound_s = cpu_seconds_of(lambda: schedule.lower_bound_ns, 1)
    benchmark.extra_info.update(
        n_ops=n_ops, simulate_cpu_s=simulate_s, fold_s=fold_s, bound_s=bound_s
    )
    print(
        f"simulate {n_ops:,} ops: {n_ops / simulate_s / 1e6:.2f} million ops/s from a placement in "
        f"Python to a schedule, {n_ops / fold_s / 1e6:.2f} million ops/s in the core (CPU); its "
        f"lower bound, once asked for, {bound_s:.3f} s"
    )


@pytest.mark.parametrize("n_ops", [20_000, pytest.param(100_000, marks=SLOW)])
def test_coarse_graphs(benchmark: Any, n_ops: int) -> None:
    graph, cluster = graph_of(n_ops), cluster_of()
    problem = Problem(graph, cluster)
    problem.core, graph.digest  # noqa: B018 (made once per graph)
    coarsen_s = cpu_seconds_of(lambda: coarsen(problem))

    lumped_s = cpu_seconds_of(lambda: coarsen(problem).lumped().core) - coarsen_s
    small = coarsen(problem).lumped()
    place_s = cpu_seconds_of(lambda: METF().place(small))
    benchmark.group = "m-ETF by way of the coarse graph, 8 devices"
    benchmark.pedantic(lambda: baechi.solve(graph, cluster, "m-etf", effort="fast"), rounds=3)
    solve_s = cpu_seconds_of(lambda: baechi.solve(graph, cluster, "m-etf", effort="fast"), 3)
    values_s = cpu_seconds_of(lambda: coarsen(problem).graph, 1) - coarsen_s
    benchmark.extra_info.update(n_ops=n_ops, lumped_s=lumped_s, place_s=place_s, solve_s=solve_s)
    print(
        f"{n_ops:,} ops in {small.arrays.ops:,} parts: coarsening CPU {coarsen_s:.3f} s, its "
        f"arrays to a problem {lumped_s:.3f} s (as an OpGraph {values_s:.2f} s), m-ETF on it "
        f"{place_s:.3f} s, solve {solve_s:.2f} s"
    )


@pytest.mark.parametrize("n_ops", [200, 2_000, 20_000])
def test_accounts_of_memory(benchmark: Any, n_ops: int) -> None:
    """What the clock's two others cost: the search's, which undoes, and the reports', by reason."""
    graph, cluster = layered(n_ops, n_ops, width=20), cluster_of()
    load = sum(op.persistent_bytes for op in graph.ops) + sum(t.nbytes for t in graph.tensors)
    tight = Problem(graph, baechi.Cluster.uniform(DEVICES, load * 9 // (10 * DEVICES), LINK))
    placement = METF().place(Problem(graph, cluster))
    assert placement is not None
    devices = np.array(placement.devices, np.int32)
    order = np.array(placement.order, np.int32)
    clusters = _core.group_clusters(tight.core, tight.group_colors)
    start = time.process_time()
    *_, evaluated = _core.local_search(tight.core, devices, order, clusters, 10**7, 0, 1)
    search_s = time.process_time() - start

    def clock() -> list[int]:
        timeline = tight.timeline()
        timeline.fold(devices, order)
        return timeline.peaks()

    clock_s = cpu_seconds_of(clock)
    schedule = baechi.simulate(graph, cluster, placement)
    benchmark.pedantic(memory_profile, (graph, cluster, schedule), rounds=1)
    profile_s = cpu_seconds_of(lambda: memory_profile(graph, cluster, schedule), 3)
    profiles = memory_profile(graph, cluster, schedule)
    assert [max(nbytes for _, nbytes in steps) for steps in profiles] == clock()
    benchmark.extra_info.update(n_ops=n_ops, clock_s=clock_s, profile_s=profile_s)
    print(
        f"memory of {n_ops:,} ops: the clock takes in {n_ops / clock_s / 1e6:.1f} million ops/s, "
        f"a search in tight memory {evaluated / search_s / 1e6:.1f} million; by reason, in Python, "
        f"{profile_s:.3f} s beside the clock's {clock_s:.4f} s, with its peaks"
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


# A fresh process per size: see `children`.
_CHILD = """
import json, sys, time
from benchmarks.children import peak_bytes
from benchmarks.test_scaling import METF, Problem, cluster_of, graph_of

graph, cluster = graph_of(int(sys.argv[1])), cluster_of(int(sys.argv[2]))
before = peak_bytes()
start, start_cpu = time.perf_counter(), time.process_time()
METF().place(Problem(graph, cluster))
seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - start_cpu
row = {"seconds": seconds, "cpu_seconds": cpu_seconds}
print(json.dumps({**row, "graph_bytes": before, "peak_bytes": peak_bytes()}))
"""


def grown(n_ops: int, devices: int) -> dict[str, float]:
    """Seconds and peak memory of m-ETF in a process of its own."""
    return figures_of(_CHILD, n_ops, devices)


def tell(n_ops: int, devices: int, figures: dict[str, float]) -> None:
    cpu_s = figures["cpu_seconds"]
    print(
        f"{n_ops:>9,} ops {devices:>5,} devices: {figures['seconds']:8.3f} s, CPU "
        f"{cpu_s:8.3f} s ({cpu_s / n_ops * 1e6:6.2f} us/op), peak "
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
