"""How far below the best known schedule the lower bound is, and what it costs.

    python3 -m benchmarks.placement_quality.tightness [--exact SECONDS] [--largest OPS]

The first table has graphs whose optimum CP-SAT proves (`exact`), each in so many seconds at most;
the second larger ones, against the better of `auto` and m-ETF. A cell is the bound, or one of its
parts, over that makespan: 1 is tight. The third tells how its time grows, up to so many ops, beside
that of the arrays that a solver needs in any case. All graphs are random with fixed seeds.
"""

import argparse
import random
import time
from collections.abc import Iterable, Iterator

from benchmarks.placement_quality.exact import Exact, solve_all

import baechi
from baechi.problem.bounds import parts
from baechi.problem.problem_arrays import Problem

NAMES = ("path", "work", "guess")
# Transfer time over op time, on average.
RATIOS = (0.1, 1.0, 5.0)
LINK = baechi.Link(latency_ns=1, bytes_per_s=10**9)
Case = tuple[baechi.OpGraph, baechi.Cluster]


def random_graph(seed: int, n_ops: int, ratio: float, *, window: int = 6) -> baechi.OpGraph:
    """Each op reads one or two of the `window` ops before it; a byte takes 1 ns on `LINK`."""
    draw = random.Random(seed)
    ops = tuple(
        baechi.Op(f"op{i}", draw.randrange(20, 200), draw.randrange(50, 150)) for i in range(n_ops)
    )
    consumers: list[list[int]] = [[] for _ in ops]
    for op in range(1, n_ops):
        for producer in draw.sample(range(max(0, op - window), op), min(op, draw.randint(1, 2))):
            consumers[producer].append(op)
    tensors = (
        baechi.Tensor(producer, tuple(row), int(draw.randrange(20, 200) * ratio))
        for producer, row in enumerate(consumers)
        if row
    )
    return baechi.OpGraph(ops, tuple(tensors))


def towers(seed: int, n_towers: int, length: int, ratio: float) -> baechi.OpGraph:
    """Chains of equal length between a first and a last op."""
    draw = random.Random(seed)
    n = n_towers * length + 2
    ops = tuple(
        baechi.Op(f"op{i}", draw.randrange(20, 200), draw.randrange(50, 150)) for i in range(n)
    )
    size = int(110 * ratio)
    heads = tuple(1 + tower * length for tower in range(n_towers))
    tensors = [baechi.Tensor(0, heads, size)]
    for head in heads:
        inner = range(head, head + length - 1)
        tensors.extend(baechi.Tensor(op, (op + 1,), size) for op in inner)
        tensors.append(baechi.Tensor(head + length - 1, (n - 1,), size))
    return baechi.OpGraph(ops, tuple(tensors))


def cluster(graph: baechi.OpGraph, n: int, *, tight: bool = False) -> baechi.Cluster:
    """`n` equal devices, with ample memory or with little more than the parameters need."""
    held = sum(op.persistent_bytes for op in graph.ops)
    largest = max((tensor.nbytes for tensor in graph.tensors), default=0)
    memory = held * 8 // (7 * n) + 4 * largest if tight else 2**50
    return baechi.Cluster.uniform(n, memory, LINK)


def small_cases() -> Iterator[tuple[str, Case]]:
    """Named by what they are averaged over."""
    for n_ops in (12, 20):
        for ratio in RATIOS:
            for tight in (False, True):
                for seed in range(4):
                    graph = random_graph(seed, n_ops, ratio)
                    memory = "tight" if tight else "ample"
                    name = f"{n_ops} ops | {ratio} | {memory}"
                    yield name, (graph, cluster(graph, 2 + seed % 3, tight=tight))


def large_cases() -> Iterator[tuple[str, Case]]:
    """One graph each."""
    for ratio in RATIOS:
        for tight in (False, True):
            memory = "tight" if tight else "ample"
            for name, graph in (
                ("random, 500 ops", random_graph(1, 500, ratio, window=30)),
                ("towers, 8 x 60 ops", towers(1, 8, 60, ratio)),
            ):
                yield f"{name} | {ratio} | {memory}", (graph, cluster(graph, 4, tight=tight))


def known(graph: baechi.OpGraph, devices: baechi.Cluster) -> baechi.Placement | None:
    """The best that the placers find."""
    found = []
    for placer in ("auto", "m-etf"):
        try:
            found.append(baechi.solve(graph, devices, placer))
        except baechi.InfeasibleError:
            continue
    return min(found, key=lambda placement: placement.stats["makespan_ns"], default=None)


def mean(values: Iterable[float]) -> float:
    rows = list(values)
    return sum(rows) / len(rows)


def print_small(seconds: float) -> None:
    cases = list(small_cases())
    results = solve_all([(*case, known(*case)) for _, case in cases], seconds=seconds)
    rows: dict[str, list[tuple[Case, Exact]]] = {}
    for (name, case), result in zip(cases, results, strict=True):
        # Whether or not a schedule of the clock reaches it, CP-SAT's bound holds for all.
        rows.setdefault(name, []).append((case, result))
    print("| graphs | transfers to ops | memory | proven | bound / optimum, mean | least |")
    print("|---|---|---|---|---|---|")
    every = []
    for name, row in rows.items():
        ratios = [
            max(parts(Problem(*case)).values()) / result.optimum_ns
            for case, result in row
            if result.optimum_ns
        ]
        every += ratios
        figures = f"{mean(ratios):.3f} | {min(ratios):.3f}" if ratios else "- | -"
        print(f"| {name} | {len(ratios)} of {len(row)} | {figures} |")
    print(f"| all | | | {len(every)} of {len(cases)} | {mean(every):.3f} | {min(every):.3f} |")


def print_large() -> None:
    print("| graph | transfers to ops | memory | " + " | ".join(NAMES) + " | all, ms |")
    print("|---" * (len(NAMES) + 4) + "|")
    for name, case in large_cases():
        placement = known(*case)
        problem = Problem(*case)
        begin = time.perf_counter()
        bounds = parts(problem)
        milliseconds = (time.perf_counter() - begin) * 1e3
        if placement is None:
            print(f"| {name} |" + " - |" * len(NAMES) + f" {milliseconds:.0f} |")
            continue
        best = placement.stats["makespan_ns"]
        cells = " | ".join(f"{bounds[part] / best:.2f}" for part in NAMES)
        print(f"| {name} | {cells} | {milliseconds:.0f} |")


def print_times(largest: int) -> None:
    print("| ops | devices | links | arrays, ms | bound, ms |")
    print("|---|---|---|---|---|")
    slow = baechi.Link(LINK.latency_ns, LINK.bytes_per_s // 100)
    n_ops = 1_000
    while n_ops <= largest:
        graph = random_graph(1, n_ops, 1.0, window=30)
        speeds = [1.0 + i % 4 / 4 for i in range(8)]
        mixed = [baechi.Device(f"d{i}", 2**50, speed) for i, speed in enumerate(speeds)]
        for label, links, devices in (
            ("8 equal", "as fast as ops", baechi.Cluster.uniform(8, 2**50, LINK)),
            ("8 equal", "100 times slower", baechi.Cluster.uniform(8, 2**50, slow)),
            ("8 of 4 speeds", "as fast as ops", baechi.Cluster.connected(mixed, LINK)),
            ("1,024 equal", "as fast as ops", baechi.Cluster.uniform(1024, 2**50, LINK)),
        ):
            begin = time.perf_counter()
            problem = Problem(graph, devices)
            assert problem.core
            middle = time.perf_counter()
            parts(problem)
            end = time.perf_counter()
            figures = f"{(middle - begin) * 1e3:.0f} | {(end - middle) * 1e3:.0f}"
            print(f"| {n_ops:,} | {label} | {links} | {figures} |")
        n_ops *= 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--exact", type=float, default=20.0, help="seconds of CP-SAT per graph")
    parser.add_argument("--largest", type=int, default=100_000, help="ops of the largest graph")
    arguments = parser.parse_args()
    print_small(arguments.exact)
    print()
    print_large()
    print()
    print_times(arguments.largest)


if __name__ == "__main__":
    main()
