"""Micro-batches: steps, proofs and times of `solve(..., microbatches=M)` and of orders of turns.

    python3 -m benchmarks.pipelines            # a minute
    python3 -m benchmarks.pipelines --quick    # a tenth of the random cases

Claims: schedules that are known for pipelines are found, and proved to be the shortest where they
are: 1F1B, ZB-H1, interleaved chunks, a V of chunks in the memory of 1F1B. Random rows of chunks are
within 1 % of the lower bound in the mean, chunks anywhere within 4 %, towers within 0.5 %. Where
memory is ample, 24 layers on 4 devices take at most 0.78 of 1F1B's time with 8 micro-batches and
0.88 with 16. A training graph of 2,001 ops on 8 devices with 8 micro-batches is solved in 0.3 s,
effort fast, and in 5 s, balanced; these are of processor time. The run ends with what is missed.
"""

import argparse
import random
import statistics
import time
from collections.abc import Iterator, Sequence

from benchmarks.environment import environment
from benchmarks.pipelines.graphs import UNIT, chunks, cluster_of, layers, model, towers

from baechi import Link, Placement, simulate, solve
from baechi.placers.turn_orders import Rhythm, ordered_turns

LINK = Link(latency_ns=10_000, bytes_per_s=10**11)
MIB = 2**20
MISSED: list[str] = []


def main() -> None:
    """Print the tables, and what is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the random cases")
    quick = parser.parse_args().quick
    print(*(f"{name}: {value}" for name, value in environment().items()), sep="\n")
    known()
    near_the_bound(30 if quick else 300)
    placed()
    large()
    print("\nmissed:", *(MISSED or ["nothing"]), sep="\n  ")


def check(what: str, value: float, most: float) -> str:
    """The value beside what it may be at most; it is noted where it is more."""
    if value > most:
        MISSED.append(f"{what}: {value:.4g}, and not at most {most:.4g}")
    return f"{value:.4g} (at most {most:.4g})"


def row(*cells: object) -> None:
    print("| " + " | ".join(map(str, cells)) + " |")


def head(title: str, *columns: str) -> None:
    print(f"\n{title}\n")
    row(*columns)
    row(*("---" for _ in columns))


def ordered(
    homes: Sequence[int],
    times: Sequence[Sequence[int]],
    memory: Sequence[int],
    microbatches: int,
    *,
    apart: bool = False,
) -> tuple[Rhythm, float]:
    """The best order found, and its processor time; `apart` makes every op a segment."""
    graph, placement = chunks(homes, *times)
    rows = [(op,) for op in range(len(graph.ops))] if apart else None
    start = time.process_time()
    found = ordered_turns(graph, cluster_of(memory), placement, microbatches, segments=rows)
    return found, time.process_time() - start


def known() -> None:
    """Schedules of the literature; a unit is the forward of a stage, as long as both halves of its
    backward."""
    head("Known schedules", "devices", "M", "schedule", "step", "bound", "peaks", "time")
    cases: list[tuple[str, list[int], list[list[int]], list[int], int, float, bool]] = []
    for p in (2, 4, 8):
        stages = [UNIT] * p
        for m in dict.fromkeys((p, 8, 32)):
            memory = [p - at for at in range(p)]
            stage = [stages, [2 * UNIT] * p]
            cases.append(("1F1B", [*range(p)], stage, memory, m, 3 * (m + p - 1), False))
    for p, m, units in ((2, 8, 25), (4, 8, 27), (4, 16, 51)):
        cases.append(("ZB-H1", [*range(p)], [[UNIT] * p] * 3, [p] * p, m, units, False))
    for p, units in ((2, 13.0), (4, 25.5), (8, 53.5)):
        homes = [*range(p), *reversed(range(p))]
        half = [[UNIT // 2] * 2 * p] * 3
        cases.append(("V, backward split", homes, half, [2 * p] * p, 2 * p, units, True))
    interleaved = [[UNIT // 2] * 8, [UNIT] * 8]
    cases.append(("interleaved", [*range(4)] * 2, interleaved, [100] * 4, 8, 28.5, False))
    for name, homes, times, memory, m, units, apart in cases:
        rhythm, took_s = ordered(homes, times, memory, m, apart=apart)
        p = len(memory)
        step = check(f"{name}, {p} devices, M={m}", rhythm.step_ns / UNIT, units)
        bound = f"{rhythm.lower_bound_ns / UNIT:.4g}"
        check(f"{name}, {p} devices, M={m}, over bound", rhythm.step_ns / rhythm.lower_bound_ns, 1)
        if any(peak > limit for peak, limit in zip(rhythm.peak_bytes, memory, strict=True)):
            MISSED.append(f"{name}, {p} devices, M={m} does not fit")
        row(p, m, name, step, bound, f"<= {max(memory)}", f"{took_s * 1e3:.0f} ms")


def near_the_bound(cases: int) -> None:
    """The gap to the lower bound of unequal chunks, with ample memory."""
    head("Gap to the lower bound, M = 8", "what", "cases", "mean", "worst", "time for each")
    kinds = (("rows of chunks", 0.01), ("chunks anywhere", 0.04), ("towers and a trunk", 0.005))
    for name, most in kinds:
        gaps, took_s = [], 0.0
        for seed in range(cases):
            rhythm, seconds = _random(name, random.Random(seed))
            gaps.append(rhythm.step_ns / rhythm.lower_bound_ns - 1)
            took_s += seconds
        mean = check(f"gap of {name}", statistics.mean(gaps), most)
        row(name, cases, mean, f"{max(gaps):.4f}", f"{took_s / cases * 1e3:.0f} ms")


def _random(name: str, draw: random.Random) -> tuple[Rhythm, float]:
    p = draw.randint(2, 8)
    if name == "towers and a trunk":
        p, depth, trunk = draw.randint(2, 4), draw.randint(1, 6), draw.randint(1, 6)
        graph = towers(p, depth, trunk)
        homes = [*(at // depth for at in range(p * depth)), *[p] * trunk]
        placement = Placement(
            graph.digest, (*homes, *reversed(homes)), tuple(range(len(graph.ops)))
        )
        start = time.process_time()
        found = ordered_turns(graph, cluster_of([10**6] * (p + 1)), placement, 8)
        return found, time.process_time() - start
    rows = name == "rows of chunks"
    n = p if rows else draw.randint(p, 3 * p)
    homes = [*range(p)] if rows else [draw.randrange(p) for _ in range(n)]
    forward = [draw.randint(UNIT // 2, 2 * UNIT) for _ in range(n)]
    return ordered(homes, [forward, [2 * ns for ns in forward]], [100 * n] * p, 8)


def placed() -> None:
    """24 equal layers on 4 devices, over the time of 1F1B with free transfers."""
    head("24 layers on 4 devices", "M", "memory", "effort", "of 1F1B", "gap", "chosen", "time")
    graph = layers(24)
    for m, memory, effort in _layer_cases():
        cluster = cluster_of([memory] * 4, LINK)
        start = time.process_time()
        placement = solve(graph, cluster, effort=effort, microbatches=m)
        took_s = time.process_time() - start
        schedule = simulate(graph, cluster, placement)
        ideal_ns = 3 * 1_000_000 * 6 * (m + 3)
        ample = memory > 10**10
        most = (0.78 if m == 8 else 0.88) if ample else 1.0 if effort == "balanced" else 1.001
        what = "ample" if ample else "of 1F1B, and 8 layers"
        part = check(
            f"layers, M={m}, memory {what}, {effort}", schedule.makespan_ns / ideal_ns, most
        )
        chosen = placement.stats["chosen"]
        row(m, what, effort, part, f"{schedule.gap:.3f}", chosen, f"{took_s:.2f} s")


def _layer_cases() -> Iterator[tuple[int, int, str]]:
    for m in (8, 16):
        for memory in (10**12, (6 + 4 * 6 + 8 + 1) * MIB):
            for effort in ("fast", "balanced"):
                yield m, memory, effort


def large() -> None:
    """2,001 ops, 8 devices with half as much memory again as a device needs for its share."""
    head("2,001 ops on 8 devices, M = 8", "effort", "over work / 8", "gap", "turns", "time")
    graph = model(40, 25)
    cluster = cluster_of([600 * MIB] * 8, LINK)
    work_ns = sum(op.time_ns for op in graph.ops)
    for effort, most_s in (("fast", 0.3), ("balanced", 5.0)):
        solve(graph, cluster, effort="fast", microbatches=8)  # what is computed once per graph
        start = time.process_time()
        placement = solve(graph, cluster, effort=effort, microbatches=8)
        took = check(f"2,001 ops, {effort}, seconds", time.process_time() - start, most_s)
        if solve(graph, cluster, effort=effort, microbatches=8) != placement:
            MISSED.append(f"2,001 ops, {effort}: another answer the second time")
        schedule = simulate(graph, cluster, placement)
        part = f"{schedule.makespan_ns / work_ns:.3f}"
        row(effort, part, f"{schedule.gap:.3f}", len(placement.turns), f"{took} s")


if __name__ == "__main__":
    main()
