"""How long a decision takes on what is left of 8 to 1,024 GPUs, and what it costs in step time.

A residual cluster is drawn anew for every decision: nodes of eight GPUs under switches of four
nodes, each GPU with a random part of its memory and compute left. `roomy` GPUs have up to 1.2 times
what the graph needs on one device, so that some hold all of it; `tight` ones at most 0.6 times, so
that it must be split.
"""

import random
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import baechi
from baechi import Constraints, InfeasibleError, Link, OpGraph, Topology
from baechi.adapters.scheduler_extender import GRAPH as GRAPH_OF_POD
from baechi.adapters.scheduler_extender import Extender
from baechi.scheduling.claims import Claim, Use, Wish
from baechi.scheduling.decision import explore
from baechi.scheduling.ledger import Ledger
from baechi.scheduling.snapshot import Site, Snapshot

GRAPHS = Path(__file__).parents[1] / "placement_quality" / "graphs"
GRAPH = "inception_v3-training"
SIZES = (8, 64, 256, 1024)
# What is promised, in ms, on an idle machine of the kind that the README names.
TARGETS = {64: 50, 1024: 200}
WISHES = {
    "anywhere": Wish(),
    "at most 4": Wish(constraints=Constraints(max_devices=4)),
    "same node": Wish(same="node"),
    "same switch": Wish(same="switch"),
    "fewest devices": Wish(slack_milli=None),
    "fewer within 10 %": Wish(slack_milli=100),
}
NODE, SWITCH, SITE = Link(5_000, 300 * 10**9), Link(10_000, 25 * 10**9), Link(20_000, 12 * 10**9)


class Row(NamedTuple):
    """Times of the decisions of one kind."""

    devices: int
    memory: str
    wish: str
    wall_ms: tuple[float, ...]
    cpu_ms: tuple[float, ...]
    placed: int


def graph_of(name: str = GRAPH) -> OpGraph:
    return baechi.load(GRAPHS / f"{name}.graph.json", OpGraph)


def need_of(graph: OpGraph) -> int:
    """What the graph needs on one device."""
    cluster = baechi.Cluster.uniform(1, 2**50, NODE)
    placement = baechi.solve(graph, cluster, "single")
    return baechi.simulate(graph, cluster, placement).peak_bytes[0]


def residual(devices: int, need: int, memory: str, seed: int) -> Snapshot:
    draw = random.Random(seed)
    size = int(need * (1.2 if memory == "roomy" else 0.6))
    base = Topology.grid(
        max(1, devices // 32), min(4, devices // 8), 8, size,
        node_link=NODE, switch_link=SWITCH, site_link=SITE,
    )  # fmt: skip
    uses = tuple(
        Use(draw.randrange(size), draw.choice((0, 0, 0, 250, 500, 1000))) for _ in base.devices
    )
    return Snapshot(Site.of(base), 1, uses)


def rows(rounds: int, sizes: tuple[int, ...] = SIZES) -> Iterator[Row]:
    """Wishes take turns, so that what else the machine does disturbs all of them."""
    graph = graph_of()
    need = need_of(graph)
    explore(graph, residual(8, need, "roomy", 0), Wish())
    for devices in sizes:
        for memory in ("roomy", "tight"):
            wall: dict[str, list[float]] = {name: [] for name in WISHES}
            cpu: dict[str, list[float]] = {name: [] for name in WISHES}
            placed = dict.fromkeys(WISHES, 0)
            for seed in range(rounds):
                snapshot = residual(devices, need, memory, seed)
                for name, wish in WISHES.items():
                    start, used = time.perf_counter(), time.process_time()
                    found = explore(graph, snapshot, wish)
                    cpu[name].append(1e3 * (time.process_time() - used))
                    wall[name].append(1e3 * (time.perf_counter() - start))
                    placed[name] += bool(found)
            for name in WISHES:
                yield Row(devices, memory, name, tuple(wall[name]), tuple(cpu[name]), placed[name])


def extended(rounds: int, devices: int = 64) -> dict[str, list[float]]:
    """The ms of an extender's answers about a pod, each on what is left of so many GPUs."""
    graph = graph_of()
    times: dict[str, list[float]] = {"filter": [], "prioritize": [], "bind": []}
    for seed in range(rounds):
        snapshot = residual(devices, need_of(graph), "roomy", seed)
        with closing(Ledger(snapshot.site.base)) as ledger:
            used = zip(snapshot.site.base.devices, snapshot.uses, strict=True)
            claims = [
                Claim(row.name, use.memory_bytes, max(use.share_milli, 1)) for row, use in used
            ]
            ledger.reserve("others", claims)
            extender = Extender(ledger, lambda _: graph, lambda *_: None)
            nodes = list(dict.fromkeys(snapshot.site.base.nodes))
            metadata = {"name": "pod", "uid": "1", "annotations": {GRAPH_OF_POD: graph.digest}}
            asked = {"Pod": {"metadata": metadata}, "NodeNames": nodes}
            binding = {"PodNamespace": "default", "PodName": "pod", "PodUID": "1"}
            for name, rows in times.items():
                start = time.perf_counter()
                said = getattr(extender, name)(asked)
                rows.append(1e3 * (time.perf_counter() - start))
                if name == "filter":
                    if not said["NodeNames"]:
                        break
                    binding["Node"] = said["NodeNames"][0]
                asked = binding if name == "prioritize" else asked
    return times


def step_ratios(rounds: int, devices: int) -> list[float]:
    """The step of a fast decision over that of `solve(effort="fast")` on all that is left.

    Of those alone that both find.
    """
    graph = graph_of()
    need = need_of(graph)
    ratios = []
    for seed in range(rounds):
        snapshot = residual(devices, need, "tight" if seed % 2 else "roomy", seed)
        try:
            solved = baechi.solve(graph, snapshot.residual(), effort="fast")
        except InfeasibleError:
            continue
        found = explore(graph, snapshot, Wish())
        if found:
            ratios.append(found[-1].step_ns / int(solved.stats["makespan_ns"]))
    return sorted(ratios)


def percentile(values: list[float] | tuple[float, ...], part: float) -> float:
    """The smallest value that so great a part of all does not exceed."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(part * len(ranked)))]
