"""One family of graphs, clusters and placements that all property tests draw from.

Small, and full of corners: no time, no bytes, no memory, missing links, pools, unequal devices.
"""

import random
from contextlib import suppress
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from baechi import (
    Cluster,
    Constraints,
    Device,
    InputError,
    Link,
    Op,
    OpCost,
    OpGraph,
    Placement,
    Profile,
    Tensor,
    Topology,
    Traced,
)
from baechi.placers.linear_programs import FavoriteProgram
from baechi.problem.problem_arrays import Problem
from baechi.scheduling.claims import Use
from baechi.scheduling.snapshot import Site, Snapshot
from baechi.traced.operators import Attempt, TracedOp, TracedTensor

times = st.integers(0, 30)
sizes = st.integers(0, 40)
speeds = st.sampled_from([1.0, 1.0, 0.5, 0.3, 2.0, 1.7])


@st.composite
def graphs(
    draw,
    max_ops=9,
    *,
    grouped=True,
    kinds=True,
    min_ops=0,
    launched=True,
    besides=True,
    parted=False,
):
    """Operator graphs; where `parted`, a copy of a tensor may hold a part of it alone."""

    n = draw(st.integers(min_ops, max_ops))
    names = st.sampled_from([None, None, None, "g", "h"]) if grouped else st.none()
    ops = tuple(Op(f"op{i}", draw(times), draw(sizes), draw(sizes), draw(names)) for i in range(n))
    tensors = tuple(
        Tensor(
            producer,
            tuple(draw(st.sets(st.integers(producer + 1, n - 1), max_size=4)))
            if producer + 1 < n
            else (),
            draw(sizes),
            draw(st.booleans()),
        )
        for producer in draw(st.lists(st.integers(0, n - 1), max_size=2 * n) if n else st.just([]))
    )
    if parted:
        tensors = tuple(replace(tensor, parts=_parts(draw, tensor)) for tensor in tensors)
    made = [sum(tensor.nbytes for tensor in tensors if tensor.producer == op) for op in range(n)]
    reused = [draw(st.integers(0, nbytes) | st.just(0)) for nbytes in made]
    ops = tuple(replace(op, reused_bytes=r) for op, r in zip(ops, reused, strict=True))
    if launched and draw(st.booleans()):
        ops = tuple(replace(op, launch_ns=draw(times | st.just(0))) for op in ops)
    if besides and draw(st.booleans()):
        ops = tuple(replace(op, beside=_beside(draw, op, n)) for op in ops)
    rows = {}
    if kinds and draw(st.booleans()):
        rows["fast"] = tuple(draw(times) for _ in range(n))
    return OpGraph(ops, tensors, rows)


def _parts(draw, tensor):
    if not tensor.consumers:
        return ()
    readers = st.sets(st.sampled_from(tensor.consumers), min_size=1)
    rows = draw(st.lists(st.tuples(sizes, readers), max_size=3))
    return tuple((min(nbytes, tensor.nbytes), *sorted(row)) for nbytes, row in rows)


def _beside(draw, op, n):
    others = sorted(draw(st.sets(st.integers(0, n - 1), max_size=2)))
    return tuple((other, draw(st.integers(0, op.workspace_bytes // 2))) for other in others)


@st.composite
def steps(draw, max_ops=6, *, again=False):
    """Graphs of a training step, or of an inference, of a model that was never there.

    With `again` its operators are in submodules, some of which run forward again.
    """
    n = draw(st.integers(1, max_ops))
    drawn = [
        (
            draw(st.integers(0, n - 1)),
            draw(st.sets(st.integers(1, n - 1), max_size=3)) if n > 1 else set(),
            draw(sizes),
            draw(st.integers(0, 1 if again else 3)) == 0,
            draw(st.integers(0, 3)) > 0,
        )
        for _ in range(draw(st.integers(n if again else 0, 2 * n)))
    ]
    tensors = tuple(
        TracedTensor(p, tuple(sorted(c for c in consumers if c > p)), nbytes, kept, smooth)
        for p, consumers, nbytes, kept, smooth in drawn
    )
    ops = []
    for op in range(n):
        touched = [i for i, t in enumerate(tensors) if op in (t.producer, *t.consumers)]
        saves = draw(st.sets(st.sampled_from(touched), max_size=2)) if touched else ()
        ops.append(
            TracedOp(
                f"{draw(st.sampled_from(['a/', 'b/', 'c/', '']))}op{op}" if again else f"op{op}",
                (f"op{op}",),
                "",
                saves=tuple(sorted(saves)),
                saved_bytes=draw(st.sampled_from([0, 0, 5])),
                differentiable=draw(st.integers(0, 4)) > 0,
                group=draw(st.sampled_from([None, None, None, "g", "h"])),
            )
        )
    traced = Traced("Nothing", tuple(ops), tensors, (Attempt("none"),), True)
    costs = tuple(OpCost(draw(times), draw(times)) for _ in ops)
    profile = Profile(traced.digest, "", costs)
    if again:
        with suppress(InputError):  # none has a backward, or they wait for each other
            return traced.graph(profile, checkpoint=draw(st.sampled_from(["a", "[ab]", "[abc]"])))
    return traced.graph(profile, training=draw(st.booleans()))


@st.composite
def clusters(draw, max_devices=4, *, whole=False, memory=None, uniform=False):
    """Clusters, some with overheads and hosts.

    `whole` has every link, `uniform` equal devices and links.
    """
    n = draw(st.integers(1, max_devices))
    rates = st.sampled_from([10**9, 3 * 10**8, 10**10])
    overheads = st.integers(0, 9) if draw(st.booleans()) else st.just(0)
    link = st.builds(Link, st.integers(0, 9), rates, overheads)
    one = draw(link)
    sizes = st.integers(0, 300) if memory is None else memory
    size = draw(sizes)
    pools: dict[str, int] = {}
    hosts = st.sampled_from(draw(st.sampled_from([("",), ("h",), ("h", "i", "")])))
    ahead = st.sampled_from(draw(st.sampled_from([(True,), (False,), (True, False)])))
    host, one_ahead = draw(hosts), draw(ahead)
    devices = []
    for i in range(n):
        pool = "" if uniform else draw(st.sampled_from(["", "", "p"]))
        bytes_ = pools.setdefault(pool, draw(sizes)) if pool else draw(sizes)
        kind = draw(st.sampled_from(["", "fast", "slow"]))
        devices.append(
            Device(f"d{i}", size, host=host, launches_ahead=one_ahead)
            if uniform
            else Device(f"d{i}", bytes_, draw(speeds), kind, pool, draw(hosts), draw(ahead))
        )
    present = link if whole else st.one_of(link, link, link, st.none())
    links = tuple(
        tuple(None if i == j else one if uniform else draw(present) for j in range(n))
        for i in range(n)
    )
    return Cluster(tuple(devices), links, draw(st.sampled_from(["duplex", "shared", "none"])))


@st.composite
def constraints_for(draw, graph, cluster):
    """Constraints without a contradiction: every group keeps a device, pins are few enough."""
    names = [device.name for device in cluster.devices]
    keys = list(dict.fromkeys(op.group or op.name for op in graph.ops))
    some = st.lists(st.sampled_from(keys), max_size=2, unique=True) if keys else st.just([])
    limit = draw(st.none() | st.integers(1, len(names)))
    home = draw(st.sampled_from(names))
    homes = [home] if limit == 1 else [home, draw(st.sampled_from(names))]
    excluded = tuple(name for name in names if name not in homes and draw(st.booleans()))
    pins = {key: draw(st.sampled_from(homes)) for key in draw(some)}
    forbidden = {
        key: tuple(name for name in names if name != pins.get(key, home) and draw(st.booleans()))
        for key in draw(some)
    }
    margins = {name: draw(sizes) for name in names if draw(st.integers(0, 3)) == 0}
    return Constraints(pins, forbidden, excluded, limit, margins)


@st.composite
def placements(draw, graph, cluster):
    """Any devices that respect groups, and any topological order."""
    of_group = {}
    devices = tuple(
        of_group.setdefault(op if row.group is None else row.group,
                            draw(st.integers(0, len(cluster.devices) - 1)))
        for op, row in enumerate(graph.ops)
    )  # fmt: skip
    order: list[int] = []
    left = set(range(len(graph.ops)))
    while left:
        ready = sorted(
            op
            for op in left
            if not any(graph.tensors[t].producer in left for t in graph.op_inputs[op])
        )
        order.append(draw(st.sampled_from(ready)))
        left.remove(order[-1])
    return Placement(graph.digest, devices, tuple(order))


def tight(seed):
    """A graph and a cluster whose memory is about what the graph needs: rules meet dead ends."""
    draw = random.Random(seed)
    n, devices = draw.randrange(3, 22), draw.randrange(1, 6)
    longest, largest = draw.choice([5, 30]), draw.choice([3, 40])
    ops = tuple(
        Op(
            f"op{i}",
            draw.randrange(longest),
            draw.choice([0, draw.randrange(largest)]),
            draw.choice([0, draw.randrange(largest)]),
            draw.choice([None] * 6 + ["g", "h"]),
        )
        for i in range(n)
    )
    tensors = []
    for _ in range(draw.randrange(2 * n)):
        producer = draw.randrange(n - 1)
        consumers = tuple(draw.randrange(producer + 1, n) for _ in range(draw.randrange(4)))
        tensors.append(Tensor(producer, consumers, draw.randrange(largest), draw.random() < 0.1))
    graph = OpGraph(ops, tuple(tensors))
    total = sum(op.persistent_bytes for op in ops) + sum(t.nbytes for t in tensors)
    memory = [int(total / devices * draw.uniform(0.3, 1.3)) + largest for _ in range(devices)]
    if draw.random() < 0.5:
        memory = [memory[0]] * devices
    overhead = draw.choice([0, 0, draw.randrange(10)])
    links = [Link(draw.randrange(10), 10**9, overhead)] * 8 + [None, Link(3, 10**10)]
    return graph, _cluster(draw, memory, [1.0, 1.0, 0.5, 1.3], links)


def dense(seed):
    """A graph whose ops have many inputs, on a cluster of unequal links and ample memory."""
    draw = random.Random(seed)
    n = draw.randrange(6, 14)
    tensors = []
    for _ in range(draw.randrange(6, 20)):
        producer = draw.randrange(min(5, n - 1))
        consumers = tuple(draw.randrange(producer + 1, n) for _ in range(draw.randrange(1, 4)))
        tensors.append(Tensor(producer, consumers, draw.randrange(30)))
    graph = OpGraph(tuple(Op(f"op{i}", draw.randrange(20)) for i in range(n)), tuple(tensors))
    overhead = draw.choice([0, 0, draw.randrange(10)])
    links = [Link(draw.randrange(3), 10**9, overhead)] * 2 + [Link(3, 10**10), Link(1, 10**8)]
    return graph, _cluster(draw, [10**6] * draw.randrange(2, 4), [1.0], links)


def launched(seed):
    """A tight or a dense case with launches and hosts."""
    return hosted(*(dense if seed % 2 else tight)(seed), seed)


def hosted(graph, cluster, seed, longest=(4, 30)):
    """The graph with launches, and the cluster with hosts; of every sixth only links take time."""
    draw = random.Random(seed)
    longest, names = draw.choice(longest), draw.choice([["h"], ["h", "i"], ["h", "i", ""]])
    ahead = draw.choice([[True], [False], [True, False]])
    ops = [replace(op, launch_ns=draw.choice([0, draw.randrange(longest)])) for op in graph.ops]
    if seed % 6 == 5:
        ops = graph.ops
    devices = [
        replace(device, host=draw.choice(names), launches_ahead=draw.choice(ahead))
        for device in cluster.devices
    ]
    return replace(graph, ops=tuple(ops)), replace(cluster, devices=tuple(devices))


def _cluster(draw, memory, speeds, links):
    """A cluster, sometimes with a pool, whose links are drawn from `links`."""
    pools = [draw.choice(["", "", "", "", "p"]) for _ in memory]
    devices = tuple(
        Device(
            f"d{i}", memory[pools.index(pool)] if pool else memory[i], draw.choice(speeds), "", pool
        )
        for i, pool in enumerate(pools)
    )
    rows = tuple(tuple(draw.choice(links) for _ in memory) for _ in memory)
    return Cluster(devices, rows, draw.choice(["duplex", "duplex", "shared", "none"]))


def colored(graph, cluster, color):
    """A problem whose groups have these colors, as if they might go to different devices."""
    problem = Problem(graph, cluster)
    if color is not None:
        problem.__dict__["group_colors"] = color
    return problem


def random_favorites(graph, seed):
    """Some matching of parents and children, -1 where there is none."""
    draw = random.Random(seed)
    children, parented = [-1] * len(graph.ops), set()
    for tensor in graph.tensors:
        for child in tensor.consumers:
            free = children[tensor.producer] < 0 and child not in parented
            if free and draw.random() < 0.6:
                children[tensor.producer] = child
                parented.add(child)
    return children


def layered(n, width, seed, cost=100.0):
    """A program of favorite children; every op reads one to three ops of the layer before."""
    draw = np.random.default_rng(seed)
    child = np.repeat(np.arange(width, n), draw.integers(1, 4, n - width))
    parent = child - child % width - 1 - draw.integers(0, width, len(child))
    pairs = np.unique(parent * n + child)
    costs = draw.uniform(0.1, cost, len(pairs))
    return FavoriteProgram(draw.uniform(1.0, 100.0, n), pairs // n, pairs % n, costs)


@st.composite
def snapshots(draw, graph):
    """What is left of a few nodes, with about the memory that the graph needs, or less."""
    total = sum(op.persistent_bytes for op in graph.ops) + sum(t.nbytes for t in graph.tensors)
    count = draw(st.integers(1, 5))
    nodes = draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
    devices = tuple(
        Device(f"d{at}", draw(st.integers(0, total + 60)), draw(st.sampled_from([1.0, 0.5, 2.0])))
        for at in range(count)
    )
    link = st.builds(Link, st.integers(0, 9), st.sampled_from([10**9, 10**10]))
    topology = Topology(
        devices,
        tuple(f"n{node}" for node in nodes),
        tuple(f"s{node // 2}" for node in nodes),
        draw(link),
        draw(link | st.none()),
        draw(link | st.none()),
    )
    site = Site.of(topology, draw(st.sampled_from(["fractional", "whole"])))
    uses = tuple(
        Use(
            draw(st.integers(0, device.memory_bytes // 2)), draw(st.sampled_from([0, 0, 500, 1000]))
        )
        for device in devices
    )
    return Snapshot(site, 7, uses)
