"""Readers for operator graphs that others measured, in the two formats that they are published in.

- PipeDream's text: a line per layer with forward and backward milliseconds, activation and
  parameter bytes; then a line per edge. Each layer has one tensor (several outputs are added up).
  Links at 1x: 12 GB/s and 10 us.
- The JSON of "Efficient Algorithms for Device Placement of DNN Graph Operators" (NeurIPS 2020): a
  node has milliseconds, bytes (all persistent) and a color class (a group); an edge has the
  milliseconds of its transfer. Edges of one node with equal cost are one tensor. Bytes per second
  are not told, so a tensor has as many bytes as its transfer takes nanoseconds, and links at 1x
  carry 1 GB/s without latency. Files of training steps have the backward nodes in them.

A third kind are graphs that `baechi profile` wrote, of the models in `benchmarks/models` on one
core of a CPU (`baechi profile benchmarks/models/resnet.py:example --threads 1 --graph FILE`,
without and with `--inference`). Their links at 1x are a network's: 1 GB/s and 10 us.

A forward graph of others gives two instances: itself, and its mirrored training step
(`mirroring.py`). In the JSON, parameters are nodes of no time without inputs; a backward takes
twice its forward there. A link factor f makes every transfer f times as long.
"""

import heapq
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.placement_quality.mirroring import STATE_FACTOR, mirrored

import baechi
from baechi import Link, Op, OpGraph, Tensor

FOLDER = Path(__file__).parents[3] / "shared" / "instances"
TRACED = Path(__file__).parent / "graphs"
_NS_PER_MS = 10**6
_FIELD = re.compile(r"(\w+)=(\[[^\]]*\]|[\d.]+)")


@dataclass(frozen=True)
class Instance:
    """A graph of others.

    Attributes:
        name: The file, and whether it is the forward pass or the training step.
        graph: The operator graph.
        latency_ns: Of a link at 1x.
        bytes_per_s: Of a link at 1x.
        devices: How many, for a cluster like the one that its authors had: 4 to 8.
        training: Whether it is a training step.
        expert: A human's device per op.
    """

    name: str
    graph: OpGraph
    latency_ns: int
    bytes_per_s: int
    devices: int
    training: bool
    expert: tuple[int, ...] | None = None

    def link(self, factor: float) -> Link:
        """A link on which every transfer takes `factor` times as long as at 1x."""
        return Link(round(self.latency_ns * factor), round(self.bytes_per_s / factor))


def instances(folder: Path = FOLDER) -> Iterator[Instance]:
    """All graphs in the folder, forward before training; none where there is no such folder."""
    for path in sorted((folder / "pipedream").glob("*.txt")):
        if "forward_compute_time" in path.read_text():
            yield from _pipedream(path)
    for path in sorted((folder / "dnn-partitioning").glob("*.json")):
        if not path.stem.endswith("_expert"):
            yield from _partitioning(path)


def traced(folder: Path = TRACED) -> Iterator[Instance]:
    """The graphs of our own models."""
    for path in sorted(folder.glob("*.graph.json")):
        name, _, step = path.name.removesuffix(".graph.json").partition("-")
        graph = baechi.load(path)
        yield Instance(f"traced {name} {step}", graph, 10_000, 10**9, 4, step == "training")


def read_pipedream(path: Path) -> tuple[OpGraph, list[int]]:
    """The forward graph of a text file, and every op's backward time."""
    layers: dict[str, dict[str, Any]] = {}
    edges: list[tuple[str, str]] = []
    for line in path.read_text().splitlines():
        parts = line.split(" -- ")
        if line.startswith("\t"):
            edges.append((parts[0].strip(), parts[1].strip()))
        elif len(parts) >= 3:
            fields = {key: _total(value) for key, value in _FIELD.findall(parts[-1])}
            layers[parts[0]] = {"name": f"{parts[0]} {parts[1]}", **fields}
    children: dict[str, list[str]] = {name: [] for name in layers}
    for src, dst in edges:
        children[src].append(dst)
    order = sorted_topologically(children)
    rank = {name: index for index, name in enumerate(order)}
    rows = [layers[name] for name in order]
    ops = [
        Op(row["name"], _ns(row["forward_compute_time"]), round(row["parameter_size"]))
        for row in rows
    ]
    tensors = [
        Tensor(index, tuple(rank[child] for child in children[name]), round(row["activation_size"]))
        for index, (name, row) in enumerate(zip(order, rows, strict=True))
    ]
    backward_ns = [_ns(row["backward_compute_time"]) for row in rows]
    return OpGraph(tuple(ops), tuple(tensors)), backward_ns


def read_partitioning(path: Path) -> tuple[OpGraph, list[int]]:
    """The graph of a JSON file, and every op's node id."""
    data = json.loads(path.read_text())
    nodes = {node["id"]: node for node in data["nodes"]}
    children: dict[int, list[int]] = {node: [] for node in nodes}
    sent: dict[int, dict[float, list[int]]] = {node: {} for node in nodes}
    for edge in data["edges"]:
        children[edge["sourceId"]].append(edge["destId"])
        sent[edge["sourceId"]].setdefault(edge["cost"], []).append(edge["destId"])
    order = sorted_topologically(children)
    rank = {node: index for index, node in enumerate(order)}
    ops = []
    for node in order:
        row = nodes[node]
        color = row.get("colorClass")
        ops.append(
            Op(
                f"{node} {row['name']}",
                _ns(row["fpgaLatency"]),
                round(row["size"]),
                group=None if color is None else f"color {color}",
            )
        )
    tensors = [
        Tensor(rank[node], tuple(rank[child] for child in row), _ns(cost))
        for node in order
        for cost, row in sorted(sent[node].items())
    ]
    return OpGraph(tuple(ops), tuple(tensors)), order


def sorted_topologically(children: dict[Any, list[Any]]) -> list[Any]:
    """The keys so that each comes before its children; the first in the file that can, first."""
    keys = list(children)
    place = {key: index for index, key in enumerate(keys)}
    waiting = dict.fromkeys(keys, 0)
    for row in children.values():
        for child in row:
            waiting[child] += 1
    ready = [place[key] for key in keys if not waiting[key]]
    heapq.heapify(ready)
    order = []
    while ready:
        key = keys[heapq.heappop(ready)]
        order.append(key)
        for child in children[key]:
            waiting[child] -= 1
            if not waiting[child]:
                heapq.heappush(ready, place[child])
    if len(order) < len(keys):
        raise ValueError(f"{len(keys) - len(order)} of {len(keys)} nodes are on a cycle.")
    return order


def _pipedream(path: Path) -> Iterator[Instance]:
    forward, backward_ns = read_pipedream(path)
    for training in (False, True):
        graph = mirrored(forward, backward_ns) if training else forward
        name = f"{path.stem} {'training' if training else 'forward'}"
        yield Instance(name, graph, 10_000, 12 * 10**9, 4, training)


def _partitioning(path: Path) -> Iterator[Instance]:
    graph, ids = read_partitioning(path)
    data = json.loads(path.read_text())
    devices = min(8, max(4, data["maxFPGAs"]))
    expert = _expert(path.with_name(f"{path.stem}_expert.json"), ids)
    if any(node["isBackwardNode"] for node in data["nodes"]):
        yield Instance(path.stem, graph, 0, 10**9, devices, True, expert)
        return
    yield Instance(path.stem, graph, 0, 10**9, devices, False, expert)
    held = [
        row.persistent_bytes * (STATE_FACTOR if not row.time_ns and not graph.op_inputs[op] else 1)
        for op, row in enumerate(graph.ops)
    ]
    training = mirrored(graph, [2 * row.time_ns for row in graph.ops], held)
    yield Instance(f"{path.stem} mirrored", training, 0, 10**9, devices, True)


def _expert(path: Path, ids: list[int]) -> tuple[int, ...] | None:
    if not path.exists():
        return None
    split = json.loads(path.read_text())["fpgas"]
    device = {node: index for index, row in enumerate(split) for node in row["nodes"]}
    return tuple(device[node] for node in ids)


def _ns(milliseconds: float) -> int:
    return round(milliseconds * _NS_PER_MS)


def _total(text: str) -> float:
    """A number, or the sum of a list such as `[1.0; 2.0]`."""
    return sum(float(number) for number in text.strip("[]").split(";"))
