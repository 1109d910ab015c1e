"""What is measured: named problems, sorted into families.

Memory is free (no device is ever full), or capped. Capped at k, a device has 5 % more than the
largest peak of a contiguous split over k devices (`witnesses.py`), so k devices are enough, and the
case is left out where the split over k - 1 devices fits into that, too. `"capped"` cases have the
instance's own number of devices, at least k; `"tight"` ones have k.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.placement_quality import generators
from benchmarks.placement_quality.instances import FOLDER, Instance, instances, traced
from benchmarks.placement_quality.mirroring import mirrored
from benchmarks.placement_quality.witnesses import contiguous_split, largest_peak

from baechi import Cluster, Link, OpGraph
from baechi.problem.problem_arrays import Problem

SLACK = 0.05
FACTORS = (1.0, 0.1, 10.0)
# Fewest devices at which memory is capped.
FEWEST = (2, 3, 4)


@dataclass(frozen=True)
class Case:
    """A problem.

    Attributes:
        name: Unique among the cases.
        source: `"measured"` by others, `"traced"`, `"random"`, `"planted"` or `"small"`.
        memory: `"free"`, `"capped"` or `"tight"`.
        factor: How long transfers are: the link factor, or communication to computation.
        training: Whether the graph is a training step.
        graph: The operator graph.
        cluster: The devices.
        expert: A human's device per op.
        split: The device per op of a contiguous split that fits, where memory is capped.
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
    split: tuple[int, ...] | None = None
    optimum_ns: int | None = None


def cases(folder: Path = FOLDER, *, quick: bool = False) -> Iterator[Case]:
    """All cases; `quick` is a tenth of them, of every family."""
    yield from _measured("measured", instances(folder), quick)
    yield from _measured("traced", traced(), quick)
    yield from _random(quick)
    yield from _planted(quick)
    yield from _small(quick)


def capped(
    graph: OpGraph, link: Link, fewest: Sequence[int]
) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """For numbers of devices: memory per device, as the module says, and the split that fits.

    Numbers are left out where fewer devices would do.
    """
    splits, peaks = {}, {}
    for devices in sorted({number for k in fewest for number in (k - 1, k)}):
        problem = Problem(graph, Cluster.uniform(devices, generators.AMPLE, link))
        splits[devices] = contiguous_split(problem)
        peaks[devices] = largest_peak(problem, splits[devices])
    for k in fewest:
        memory = int(peaks[k] * (1 + SLACK))
        if memory < peaks[k - 1]:
            yield k, memory, splits[k]


def _with_memory(case: Case, link: Link, fewest: Sequence[int], tight: bool) -> Iterator[Case]:
    """The case as it is, and with its memory capped."""
    yield case
    for k, memory, split in capped(case.graph, link, fewest):
        for kind, n in (
            ("capped", max(k, len(case.cluster.devices))),
            *((("tight", k),) if tight else ()),
        ):
            yield replace(
                case,
                name=f"{case.name} {kind} {k}",
                memory=kind,
                cluster=Cluster.uniform(n, memory, link),
                expert=case.expert if case.expert and max(case.expert) < n else None,
                split=split,
            )


def _measured(source: str, graphs: Iterable[Instance], quick: bool) -> Iterator[Case]:
    for number, instance in enumerate(graphs):
        if quick and len(instance.graph.ops) > 250:
            continue
        for place, factor in enumerate(FACTORS):
            if quick and place != number % 3:
                continue
            link = instance.link(factor)
            cluster = Cluster.uniform(instance.devices, generators.AMPLE, link)
            name = f"{instance.name} {factor:g}x"
            case = Case(
                name, source, "free", factor, instance.training, instance.graph, cluster,
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
    for seed in range(6 if quick else 48):
        ccr, free = (0.1, 1.0, 10.0)[seed % 3], seed % 2 == 0
        graph, cluster = generators.small(seed, ccr=ccr, free=free)
        memory = "free" if free else "tight"
        yield Case(f"small {seed} {ccr:g} {memory}", "small", memory, ccr, False, graph, cluster)
