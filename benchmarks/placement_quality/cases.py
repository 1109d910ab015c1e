"""What is measured: named problems, sorted into families.

Memory is free (no device is ever full), or capped. The need of a graph is its peak on one device.
Capped at k, a device has need / (0.9 k): k of them have need / 0.9 in all, so the graph fills 90 %
of k devices, and k - 1 devices have less than it needs. A device has at least what the largest
group needs alone; where that makes k - 1 devices enough, there is no such case. `"capped"` cases
have the instance's own number of devices, at least k; `"tight"` ones have k.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.placement_quality import generators
from benchmarks.placement_quality.instances import FOLDER, instances
from benchmarks.placement_quality.mirroring import mirrored

import baechi
from baechi import Cluster, Link, OpGraph
from baechi.bounds import running_bytes
from baechi.placers.baselines import SingleDevice
from baechi.problem import Problem

FILL = 0.9
FACTORS = (1.0, 0.1, 10.0)
# Fewest devices at which memory is capped.
FEWEST = (2, 3, 4)


@dataclass(frozen=True)
class Case:
    """A problem.

    Attributes:
        name: Unique among the cases.
        source: `"measured"`, `"random"`, `"planted"` or `"small"`.
        memory: `"free"`, `"capped"` or `"tight"`.
        factor: How long transfers are: the link factor, or communication to computation.
        training: Whether the graph is a training step.
        graph: The operator graph.
        cluster: The devices.
        expert: A human's device per op.
        optimum_ns: The best makespan, where the case was made from it.
    """

    name: str
    source: str
    memory: str
    factor: float
    training: bool
    graph: OpGraph
    cluster: Cluster
    expert: tuple[int, ...] | None = None
    optimum_ns: int | None = None


def cases(folder: Path = FOLDER, *, quick: bool = False) -> Iterator[Case]:
    """All cases; `quick` is a tenth of them, of every family."""
    yield from _measured(folder, quick)
    yield from _random(quick)
    yield from _planted(quick)
    yield from _small(quick)


def need_bytes(graph: OpGraph) -> int:
    """The peak of the graph on one device, in index order."""
    cluster = Cluster.uniform(1, generators.AMPLE, generators.LINK)
    placement = SingleDevice().place(Problem(graph, cluster))
    return max(baechi.simulate(graph, cluster, placement).peak_bytes)


def capped_bytes(graph: OpGraph, fewest: int) -> int | None:
    """Memory per device, as the module says; `None` where fewer devices would do."""
    need = need_bytes(graph)
    memory = max(int(need / (FILL * fewest)), _largest_group(graph))
    return memory if memory * (fewest - 1) < need else None


def _largest_group(graph: OpGraph) -> int:
    problem = Problem(graph, Cluster.uniform(1, generators.AMPLE, generators.LINK))
    return max(
        persistent + max(running_bytes(problem, op) for op in ops)
        for persistent, ops in zip(problem.group_persistent, problem.group_ops, strict=True)
    )


def _with_memory(case: Case, link: Link, fewest: tuple[int, ...], tight: bool) -> Iterator[Case]:
    """The case as it is, and with its memory capped."""
    devices = len(case.cluster.devices)
    yield case
    for k in fewest:
        memory = capped_bytes(case.graph, k)
        if memory is None:
            continue
        for kind, n in (("capped", max(k, devices)), *((("tight", k),) if tight else ())):
            cluster = Cluster.uniform(n, memory, link)
            expert = case.expert if case.expert and max(case.expert) < n else None
            yield Case(
                f"{case.name} {kind} {k}", case.source, kind, case.factor, case.training,
                case.graph, cluster, expert,
            )  # fmt: skip


def _measured(folder: Path, quick: bool) -> Iterator[Case]:
    for number, instance in enumerate(instances(folder)):
        if quick and len(instance.graph.ops) > 250:
            continue
        for place, factor in enumerate(FACTORS):
            if quick and place != number % 3:
                continue
            link = instance.link(factor)
            cluster = Cluster.uniform(instance.devices, generators.AMPLE, link)
            name = f"{instance.name} {factor:g}x"
            case = Case(
                name, "measured", "free", factor, instance.training, instance.graph, cluster,
                instance.expert,
            )  # fmt: skip
            fewest = (FEWEST[number % 3],) if quick else FEWEST
            yield from _with_memory(case, link, fewest, tight=factor == 1.0 or quick)


def _random(quick: bool) -> Iterator[Case]:
    families = (
        generators.layered,
        generators.series_parallel,
        generators.towers,
        generators.chain_with_skips,
    )
    for number, family in enumerate(families):
        for ops in (100,) if quick else (200, 1000):
            for place, ccr in enumerate((0.1, 1.0, 10.0)):
                if quick and place != number % 3:
                    continue
                forward = family(number, ops, ccr=ccr)
                for training in (False, True):
                    graph = forward
                    if training:
                        graph = mirrored(forward, [2 * op.time_ns for op in forward.ops])
                    name = (
                        f"{family.__name__} {ops} {ccr:g} {'training' if training else 'forward'}"
                    )
                    cluster = Cluster.uniform(6, generators.AMPLE, generators.LINK)
                    case = Case(name, "random", "free", ccr, training, graph, cluster)
                    fewest = (2 + number % 3,) if quick else (2, 4)
                    yield from _with_memory(case, generators.LINK, fewest, tight=ops <= 200)


def _planted(quick: bool) -> Iterator[Case]:
    sizes = ((100, 4),) if quick else ((100, 2), (100, 4), (500, 4), (500, 8), (2000, 8))
    for ops, devices in sizes:
        for ccr in (0.1, 1.0, 10.0):
            made = generators.planted(ops + devices, ops, devices, ccr=ccr)
            yield Case(
                f"planted {ops} ops {devices} devices {ccr:g}", "planted", "tight", ccr, False,
                made.graph, made.cluster, optimum_ns=made.optimum_ns,
            )  # fmt: skip


def _small(quick: bool) -> Iterator[Case]:
    for seed in range(4 if quick else 30):
        graph, cluster = generators.small(seed)
        yield Case(f"small {seed}", "small", "tight", 1.0, False, graph, cluster)
