"""Whether a placement that exists is found where memory is nearly full.

    python3 -m benchmarks.placement_quality.feasibility [--seeds N] [--first SEED] [--efforts ...]

A problem has a placement hidden in it: every device has 5 % more than its own peak there, labels
are a random topological order, and in-flight tensors take as much as weights do. Two ways to plant:

- a schedule without a gap is cut into ops (`generators.planted`), which read what was made shortly
  before (`close`), a while before (`near`) or long before (`far`), or each tensor `once`;
- a drawn graph (`layered`, `skips`, `nested`, `tree`) is listed on drawn devices, in a random
  order, depth first, by critical path, or as few bytes are added.

A row has, per effort, the step over the planted one (`-` where nothing was found) and CPU seconds.
"""

import argparse
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from benchmarks.placement_quality import generators
from benchmarks.placement_quality.generators import LINK

from baechi import Cluster, Device, OpGraph, Placement, Tensor, _core, simulate
from baechi.placers.placer import depth_first, shuffled
from baechi.placers.searching import find
from baechi.problem.problem_arrays import Problem

SLACK = 0.05
SIZES = (100, 200, 400, 700, 1000)
DEVICES = (2, 3, 4, 6, 8)
RATIOS = (0.2, 1.0, 5.0)
SHAPES = ("near", "layered", "far", "skips", "once", "nested", "close", "tree")
# Of the perfect ones: from how many ops back inputs come, and whether a tensor is read only once.
PERFECT = {"near": (4, False), "far": (20, False), "once": (6, True), "close": (1, False)}
ORDERS = ("thrifty", "thrifty", "depth first", "critical path", "random")
# Chance that a planted op stays on the device of one of its producers.
STAYS = (0.7, 0.9, 0.97)


@dataclass(frozen=True)
class Hidden:
    """A problem, and a placement that fits into it."""

    name: str
    graph: OpGraph
    cluster: Cluster
    planted: Placement
    step_ns: int


def hidden(
    seed: int, shape: str, ops: int, devices: int, ccr: float, order: str = "random"
) -> Hidden:
    """The planted problem; equal arguments give equal problems."""
    name = f"{seed} {shape}, {ops} ops, {devices} devices, {ccr:g}, {order}"
    if shape in PERFECT:
        reach, once = PERFECT[shape]
        made = generators.planted(seed, ops, devices, ccr=ccr, reach=reach, once=once)
        return _sized(name.removesuffix(f", {order}"), made.graph, made.placement, devices)
    draw = random.Random(seed)
    drawn = {
        "layered": lambda: generators.layered(seed, ops, width=4 * devices, ccr=ccr),
        "skips": lambda: generators.chain_with_skips(seed, ops, ccr=ccr),
        "nested": lambda: generators.series_parallel(seed, ops, ccr=ccr),
        "tree": lambda: generators.reductions(seed, ops, ccr=ccr),
    }[shape]()
    graph = _relabelled(drawn, draw.randrange(2**31))
    problem = _ample(graph, devices)
    where = _drawn_devices(draw, problem, devices)
    rows = {
        "critical path": lambda: _core.list_order(problem.core, where).tolist(),
        "random": lambda: shuffled(problem, seed),
        "depth first": lambda: depth_first(problem),
        "thrifty": lambda: _thrifty(graph),
    }[order]()
    planted = Placement(graph.digest, tuple(where.tolist()), tuple(rows), "planted")
    return _sized(name, graph, planted, devices)


def problems(seeds: int, first: int = 0) -> Iterator[Hidden]:
    """So many problems, which go through shapes, sizes, devices and ratios at different paces."""
    for seed in range(first, first + seeds):
        draw = random.Random(f"feasibility {seed}")
        size, devices = draw.choice(SIZES), draw.choice(DEVICES)
        yield hidden(
            seed, SHAPES[seed % len(SHAPES)], size, devices, draw.choice(RATIOS),
            draw.choice(ORDERS),
        )  # fmt: skip


def _relabelled(graph: OpGraph, seed: int) -> OpGraph:
    """The graph with its ops in a random topological order."""
    order = shuffled(Problem(graph, Cluster.uniform(1, generators.AMPLE, LINK)), seed)
    index = [0] * len(order)
    for new, old in enumerate(order):
        index[old] = new
    ops = tuple(replace(graph.ops[old], name=f"op{new}") for new, old in enumerate(order))
    tensors = sorted(
        (
            Tensor(index[t.producer], tuple(sorted(index[c] for c in t.consumers)), t.nbytes)
            for t in graph.tensors
        ),
        key=lambda tensor: tensor.producer,
    )
    return OpGraph(ops, tuple(tensors))


def _thrifty(graph: OpGraph) -> list[int]:
    """A topological order: of the ready ops the one that adds the fewest bytes is next."""
    reads: list[list[int]] = [[] for _ in graph.ops]
    made = [0] * len(graph.ops)
    left = [len(tensor.consumers) for tensor in graph.tensors]
    for index, tensor in enumerate(graph.tensors):
        made[tensor.producer] += tensor.nbytes
        for consumer in tensor.consumers:
            reads[consumer].append(index)
    outputs: list[list[int]] = [[] for _ in graph.ops]
    for index, tensor in enumerate(graph.tensors):
        outputs[tensor.producer].append(index)
    waiting = [len(row) for row in reads]
    ready = [op for op, count in enumerate(waiting) if not count]
    order = []

    def adds(op: int) -> int:
        return made[op] - sum(graph.tensors[t].nbytes for t in reads[op] if left[t] == 1)

    while ready:
        op = min(ready, key=lambda op: (adds(op), op))
        ready.remove(op)
        order.append(op)
        for tensor in reads[op]:
            left[tensor] -= 1
        for tensor in outputs[op]:
            for consumer in graph.tensors[tensor].consumers:
                waiting[consumer] -= 1
                if not waiting[consumer]:
                    ready.append(consumer)
    return order


def _ample(graph: OpGraph, devices: int) -> Problem:
    return Problem(graph, Cluster.uniform(devices, generators.AMPLE, LINK))


def _drawn_devices(draw: random.Random, problem: Problem, devices: int) -> np.ndarray:
    """Mostly where a producer is, else where the least work is."""
    producers: list[list[int]] = [[] for _ in problem.graph.ops]
    for tensor in problem.graph.tensors:
        for consumer in tensor.consumers:
            producers[consumer].append(tensor.producer)
    work = [0] * devices
    where = np.zeros(len(producers), np.int32)
    stays = draw.choice(STAYS)
    mean = sum(op.time_ns for op in problem.graph.ops) / devices
    for op, row in enumerate(producers):
        device = min(range(devices), key=lambda d: (work[d] + draw.random() * mean / 20, d))
        if row and draw.random() < stays:
            near = int(where[draw.choice(row)])
            if work[near] - min(work) < mean / 5:
                device = near
        where[op] = device
        work[device] += problem.graph.ops[op].time_ns
    return where


def _sized(name: str, graph: OpGraph, planted: Placement, devices: int) -> Hidden:
    """With weights as large as the tensors in flight at a peak, and memory little above a peak."""
    bare = replace(graph, ops=tuple(replace(op, persistent_bytes=0) for op in graph.ops))
    ample = _ample(graph, devices).cluster
    flying = sum(simulate(bare, ample, _of(bare, planted)).peak_bytes)
    held = sum(op.persistent_bytes for op in graph.ops)
    scaled = [
        replace(op, persistent_bytes=op.persistent_bytes * flying // held) for op in graph.ops
    ]
    graph = replace(graph, ops=tuple(scaled))
    planted = _of(graph, planted)
    schedule = simulate(graph, ample, planted)
    rows = [
        Device(f"device{d}", int(peak * (1 + SLACK))) for d, peak in enumerate(schedule.peak_bytes)
    ]
    return Hidden(name, graph, Cluster.connected(rows, LINK), planted, schedule.makespan_ns)


def _of(graph: OpGraph, placement: Placement) -> Placement:
    return replace(placement, graph_digest=graph.digest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=18)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--efforts", default="fast,balanced,thorough")
    arguments = parser.parse_args()
    efforts = arguments.efforts.split(",")
    ratios: dict[str, list[float]] = {effort: [] for effort in efforts}
    missed: dict[str, list[int]] = {effort: [] for effort in efforts}
    print("| problem | " + " | ".join(f"{effort} | s" for effort in efforts) + " |")
    print("|---" * (1 + 2 * len(efforts)) + "|")
    for number, made in enumerate(problems(arguments.seeds, arguments.first), arguments.first):
        problem = Problem(made.graph, made.cluster)
        cells = []
        for effort in efforts:
            begin = time.process_time()
            placement = find(problem, effort)
            seconds = time.process_time() - begin
            if placement is None:
                missed[effort].append(number)
                cells.append(f"- | {seconds:.2f}")
            else:
                step = simulate(made.graph, made.cluster, placement).makespan_ns
                ratios[effort].append(step / made.step_ns)
                cells.append(f"{ratios[effort][-1]:.3f} | {seconds:.2f}")
        print(f"| {made.name} | " + " | ".join(cells) + " |", flush=True)
    for effort in efforts:
        found = ratios[effort]
        mean = f"{statistics.geometric_mean(found):.3f}" if found else "-"
        print(
            f"{effort}: {len(found)} of {arguments.seeds} found, step / planted {mean}, "
            f"missed {missed[effort]}"
        )


if __name__ == "__main__":
    main()
