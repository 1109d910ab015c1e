"""A placement cut into segments: what a device runs in one go.

    device 0   [a b c]────┐          [f g]      a segment ends where an output must leave early,
    device 1              └─►[d e]──►           and begins where a remote input arrives

Segments are in launch order, which is a topological order of the operators; so every segment
depends on earlier ones only, and devices that run theirs in this order cannot wait in a circle.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from torch import fx

from baechi.lowering import TracedModule
from baechi.traced import Traced


@final
@dataclass(frozen=True)
class Segment:
    """Operators that one device runs in one go.

    Attributes:
        index: Its place in launch order.
        device: Logical device.
        ops: Indices of its operators.
        nodes: Their nodes in program order.
        outputs: Nodes whose values others, or the caller, read.
        sources: For each node that it reads from another segment, that segment.
        waits: Segments on other devices that must have run.
        random: Whether it draws random numbers.
    """

    index: int
    device: int
    ops: tuple[int, ...]
    nodes: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    sources: tuple[tuple[fx.Node, int], ...]
    waits: tuple[int, ...]
    random: bool


def cut(traced: Traced, devices: Sequence[int], order: Sequence[int]) -> tuple[Segment, ...]:
    """The segments of a placement's forward, in launch order.

    Args:
        traced: The model.
        devices: Logical device of every operator.
        order: Its operators in launch order.
    """
    module: TracedModule = traced.module
    runs = _runs(traced, devices, order)
    owner = {op: index for index, ops in enumerate(runs) for op in ops}
    op_of = {node: op for op, nodes in enumerate(module.nodes) for node in nodes}
    position = {node: i for i, node in enumerate(module.graph_module.graph.nodes)}
    returned = set(_output_node(module).all_input_nodes)
    after = _order_edges(traced)
    segments = []
    last_random: int | None = None
    for index, ops in enumerate(runs):
        nodes = sorted((n for op in ops for n in module.nodes[op]), key=position.__getitem__)
        inside = set(nodes)
        outputs = tuple(
            node
            for node in nodes
            if node in returned or any(u not in inside for u in node.users if u in op_of)
        )
        reads = dict.fromkeys(a for node in nodes for a in node.all_input_nodes if a not in inside)
        sources = tuple((node, owner[op_of[node]]) for node in reads if node in op_of)
        waits = {source for _, source in sources}
        waits |= {owner[before] for op in ops for before in after[op]} - {index}
        device = devices[ops[0]]
        random = any(traced.ops[op].random for op in ops)
        if random:
            # CPU workers share one generator: drawing in launch order makes a seed mean something.
            waits |= {last_random} if last_random is not None else set()
            last_random = index
        remote = tuple(sorted(w for w in waits if devices[runs[w][0]] != device))
        segments.append(
            Segment(index, device, tuple(ops), tuple(nodes), outputs, sources, remote, random)
        )
    return tuple(segments)


def _output_node(module: TracedModule) -> fx.Node:
    node: fx.Node = next(n for n in module.graph_module.graph.nodes if n.op == "output")
    return node


def _order_edges(traced: Traced) -> list[list[int]]:
    """For every operator those that must come before it."""
    before: list[list[int]] = [[] for _ in traced.ops]
    for tensor in traced.tensors:
        for consumer in tensor.consumers:
            before[consumer].append(tensor.producer)
    return before


def _runs(traced: Traced, devices: Sequence[int], order: Sequence[int]) -> list[list[int]]:
    """The operators of every segment, in launch order of the segments' last operators."""
    before = _order_edges(traced)
    leaves_early = [False] * len(traced.ops)
    for tensor in traced.tensors:
        if any(devices[c] != devices[tensor.producer] for c in tensor.consumers):
            leaves_early[tensor.producer] = True
    open_run: dict[int, list[int]] = {}
    arrived: dict[int, set[int]] = {}
    runs: list[list[int]] = []
    for op in order:
        device = devices[op]
        here = arrived.setdefault(device, set())
        remote = {b for b in before[op] if devices[b] != device}
        if remote - here:
            _close(open_run, device, runs)
            here |= remote
        open_run.setdefault(device, []).append(op)
        if leaves_early[op]:
            _close(open_run, device, runs)
    for device in sorted(open_run):
        _close(open_run, device, runs)
    return runs


def _close(open_run: dict[int, list[int]], device: int, runs: list[list[int]]) -> None:
    run = open_run.pop(device, [])
    if run:
        runs.append(run)


def backward_order(segments: Sequence[Segment], launch: Sequence[int]) -> tuple[int, ...]:
    """The segments in the order in which their backwards are launched.

    Topological (a segment after all that read its outputs); among those that may run, the one
    whose backward the placement launches first.

    Args:
        segments: In launch order of the forward.
        launch: For every segment the place of its backward in the placement's order.
    """
    readers: list[set[int]] = [set() for _ in segments]
    for segment in segments:
        for _, source in segment.sources:
            if source != segment.index:
                readers[source].add(segment.index)
    feeds: list[list[int]] = [[] for _ in segments]
    for source, consumers in enumerate(readers):
        for consumer in consumers:
            feeds[consumer].append(source)
    waiting = [len(consumers) for consumers in readers]
    ready = [(launch[s], -s) for s, n in enumerate(waiting) if n == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        index = -heapq.heappop(ready)[1]
        order.append(index)
        for source in feeds[index]:
            waiting[source] -= 1
            if waiting[source] == 0:
                heapq.heappush(ready, (launch[source], -source))
    return tuple(order)
