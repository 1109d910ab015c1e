"""How solve and simulate grow with the number of ops, on layered random graphs over 8 devices.

No claim yet; the table is what later work is measured against.
"""

import random
from functools import cache
from typing import Any

import pytest

import baechi

SIZES = (100, 1_000, 5_000, 20_000)
PLACERS = ("m-topo", "m-etf", "m-sct")
WIDTH = 10  # ops per layer
N_DEVICES = 8


@cache
def layered_graph(n_ops: int) -> baechi.OpGraph:
    """Layers of `WIDTH` ops, each of which reads one to three ops of the layer before."""
    draw = random.Random(n_ops)
    ops, consumers = [], [[] for _ in range(n_ops)]
    for op in range(n_ops):
        time_ns = draw.randint(10_000, 1_000_000)
        persistent_bytes = draw.randint(0, 4 * 2**20)
        ops.append(baechi.Op(f"op{op}", time_ns, persistent_bytes))
        layer = op - op % WIDTH
        before = range(max(0, layer - WIDTH), layer)
        for producer in draw.sample(before, min(len(before), draw.randint(1, 3))):
            consumers[producer].append(op)
    tensors = [
        baechi.Tensor(producer, tuple(row), draw.randint(2**10, 2**21))
        for producer, row in enumerate(consumers)
        if row
    ]
    return baechi.OpGraph(tuple(ops), tuple(tensors))


@cache
def cluster() -> baechi.Cluster:
    link = baechi.Link(latency_ns=10_000, bytes_per_s=12_000_000_000)
    return baechi.Cluster.uniform(N_DEVICES, memory="64GiB", link=link)


@pytest.mark.parametrize("n_ops", SIZES)
@pytest.mark.parametrize("placer", PLACERS)
def test_solve(benchmark: Any, placer: str, n_ops: int) -> None:
    graph = layered_graph(n_ops)
    benchmark.group = f"solve, {n_ops:,} ops"
    placement = benchmark.pedantic(
        baechi.solve, (graph, cluster()), {"placer": placer}, rounds=1 if n_ops > 1_000 else 3
    )
    schedule = baechi.simulate(graph, cluster(), placement)
    benchmark.extra_info.update(
        n_ops=n_ops, makespan_ns=schedule.makespan_ns, lower_bound_ns=schedule.lower_bound_ns
    )


@pytest.mark.parametrize("n_ops", SIZES)
def test_simulate(benchmark: Any, n_ops: int) -> None:
    graph = layered_graph(n_ops)
    benchmark.group = f"simulate, {n_ops:,} ops"
    placement = baechi.solve(graph, cluster(), placer="m-etf")
    benchmark.pedantic(baechi.simulate, (graph, cluster(), placement), rounds=5)
    benchmark.extra_info.update(n_ops=n_ops, n_tensors=len(graph.tensors))
