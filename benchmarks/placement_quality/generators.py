"""Random graphs: layered, series-parallel, towers, chains with skips, small ones; and planted ones.

All are pure functions of their arguments; `seed` goes to `random.Random`. Times are up to a
millisecond. `ccr` is communication to computation: the mean transfer over the mean op, on `LINK`,
where a byte takes a nanosecond. An op's persistent bytes are up to `_HELD` times the mean tensor.

A planted instance is made backwards from its answer: the time of `m` devices is cut into `n` ops
without a gap, and a tensor is added only where the clock, with its ports, delivers it in time. So
the makespan of that placement is total work / m, which no schedule beats.
"""

import bisect
import heapq
import itertools
import random
from dataclasses import dataclass, replace

import baechi
from baechi import Cluster, Link, Op, OpGraph, Placement, Tensor

MEAN_NS = 300_000
LINK = Link(latency_ns=1_000, bytes_per_s=10**9)
_HELD = 8
# Memory that no generated graph fills.
AMPLE = 2**50
# Inputs of a planted op at most, and how many producers are tried for one.
_INPUTS = 3
_TRIES = 24


@dataclass(frozen=True)
class Planted:
    """A graph, a cluster whose memory it nearly fills, and a perfect placement."""

    graph: OpGraph
    cluster: Cluster
    placement: Placement
    optimum_ns: int


def layered(seed: int, ops: int, *, width: int = 10, ccr: float = 1.0) -> OpGraph:
    """Layers of `width` ops, each of which reads one to three ops of the two layers before."""
    draw = random.Random(seed)
    edges = []
    for op in range(ops):
        layer = op - op % width
        before = range(max(0, layer - 2 * width), layer)
        edges += [(p, op) for p in draw.sample(before, min(len(before), draw.randint(1, 3)))]
    return _graph(draw, ops, edges, ccr)


def series_parallel(seed: int, ops: int, *, ccr: float = 1.0) -> OpGraph:
    """A random nest of series and of parallel branches between a fork and a join."""
    draw = random.Random(seed)
    edges: list[tuple[int, int]] = []
    count = 0

    def block(size: int) -> tuple[int, int]:
        """First and last op of a new block of about `size` ops."""
        nonlocal count
        if size < 4:
            first = count
            count += max(1, size)
            edges.extend((op, op + 1) for op in range(first, count - 1))
            return first, count - 1
        if draw.random() < 0.5:
            part = draw.randint(1, size - 1)
            head, tail = block(part), block(size - part)
            edges.append((head[1], tail[0]))
            return head[0], tail[1]
        fork = count
        count += 1
        branches = draw.randint(2, min(4, size - 2))
        ends = [block((size - 2) // branches) for _ in range(branches)]
        join = count
        count += 1
        for first, last in ends:
            edges.extend([(fork, first), (last, join)])
        return fork, join

    block(ops)
    return _graph(draw, count, edges, ccr)


def towers(seed: int, ops: int, *, count: int = 4, ccr: float = 1.0) -> OpGraph:
    """`count` equal chains side by side between one input and one output: a wide graph."""
    draw = random.Random(seed)
    depth = max(1, (ops - 2) // count)
    last = count * depth + 1
    edges = []
    for tower in range(count):
        chain = [0, *range(1 + tower, last, count), last]
        edges += list(itertools.pairwise(chain))
    return _graph(draw, last + 1, edges, ccr)


def chain_with_skips(seed: int, ops: int, *, ccr: float = 1.0) -> OpGraph:
    """A chain where every third op or so is also read some ops later."""
    draw = random.Random(seed)
    edges = [(op, op + 1) for op in range(ops - 1)]
    edges += [
        (op, min(ops - 1, op + draw.randint(2, 8))) for op in range(ops - 2) if draw.random() < 0.3
    ]
    return _graph(draw, ops, edges, ccr)


def reductions(seed: int, ops: int, *, ccr: float = 1.0) -> OpGraph:
    """A tree: every op but the leaves reads two to four others, and is read once."""
    draw = random.Random(seed)
    edges, unread = [], [0]
    count = 1
    while count < ops:
        reader = unread.pop(draw.randrange(len(unread)))
        for _ in range(min(draw.randint(2, 4), ops - count)):
            edges.append((ops - 1 - count, ops - 1 - reader))
            unread.append(count)
            count += 1
    return _graph(draw, ops, edges, ccr)


def small(seed: int, *, ccr: float = 1.0, free: bool = False) -> tuple[OpGraph, Cluster]:
    """At most 30 ops on 2 to 4 devices, for comparison with a proven optimum.

    Unless it is free, a device's memory is 1.2 to 3 times the mean load, so that not every one has
    a valid placement.
    """
    draw = random.Random(seed)
    n, devices = draw.randint(8, 30), draw.randint(2, 4)
    chance = draw.uniform(1.0, 2.5) / n
    edges = [(i, j) for j in range(n) for i in range(j) if draw.random() < chance]
    graph = _graph(draw, n, edges, ccr)
    if draw.random() < 0.5:
        pairs = {op: f"group {draw.randrange(n)}" for op in range(n) if draw.random() < 0.3}
        rows = (replace(row, group=pairs.get(op)) for op, row in enumerate(graph.ops))
        graph = replace(graph, ops=tuple(rows))
    load = sum(op.persistent_bytes for op in graph.ops) + sum(t.nbytes for t in graph.tensors)
    memory = AMPLE if free else int(load / devices * draw.uniform(1.2, 3.0))
    return graph, Cluster.uniform(devices, memory, LINK)


def planted(
    seed: int,
    ops: int,
    devices: int,
    *,
    ccr: float = 1.0,
    slack: float = 0.05,
    reach: int = 4,
    once: bool = False,
) -> Planted:
    """A perfect schedule cut into pieces, as the module says.

    Args:
        seed: Of the generator.
        ops: How many, at least one per device.
        devices: How many; all equal, with the planted placement's largest peak, plus slack.
        ccr: Mean transfer over mean op.
        slack: Share of the memory above that peak.
        reach: From how many ops back on a device inputs come, on average.
        once: Whether a tensor has one reader at most.
    """
    draw = random.Random(seed)
    horizon = MEAN_NS * ops // devices
    # No two cuts are at the same time, so no two transfers tie.
    cuts = draw.sample(range(1, horizon), ops - devices)
    rows = []
    for device in range(devices):
        ends = [*sorted(cuts[device::devices]), horizon]
        rows += [(begin, device, end) for begin, end in zip([0, *ends[:-1]], ends, strict=True)]
    rows.sort()
    sizes = [_size(draw, ccr) for _ in rows]
    consumers = _deliverable(draw, rows, sizes, devices, reach, once)
    rank = _shuffled(draw, consumers)
    built: list[Op] = [Op("unset", 0)] * ops
    for place, (begin, _, end) in enumerate(rows):
        built[rank[place]] = Op(f"op{rank[place]}", end - begin, _held(draw, ccr))
    tensors = sorted(
        (
            Tensor(rank[place], tuple(rank[c] for c in row), sizes[place])
            for place, row in enumerate(consumers)
            if row
        ),
        key=lambda tensor: tensor.producer,
    )
    where = {rank[place]: device for place, (_, device, _) in enumerate(rows)}
    answer = [where[op] for op in range(ops)]
    graph = _levelled(OpGraph(tuple(built), tuple(tensors)), answer, rank, devices)
    placement = Placement(graph.digest, tuple(answer), tuple(rank), "planted")
    peak = max(baechi.simulate(graph, _ample(devices), placement).peak_bytes)
    cluster = Cluster.uniform(devices, int(peak * (1 + slack)), LINK)
    return Planted(graph, cluster, placement, horizon)


def _deliverable(
    draw: random.Random,
    rows: list[tuple[int, int, int]],
    sizes: list[int],
    devices: int,
    reach: int,
    once: bool,
) -> list[list[int]]:
    """Consumers per op such that every input is there when its consumer starts.

    The ops are committed in the order of `rows`, (begin, device, end), so the transfers of the ops
    before are known, and are not changed by what later ops receive.
    """
    consumers: list[list[int]] = [[] for _ in rows]
    arrived: dict[tuple[int, int], int] = {}
    sends, receives = [0] * devices, [0] * devices
    by_end = sorted(range(len(rows)), key=lambda place: rows[place][2])
    ends = [rows[place][2] for place in by_end]

    def plan(missing: list[int], device: int) -> list[tuple[int, int]]:
        """Producer and arrival of each transfer, by the clock's rules."""
        sent, received = list(sends), receives[device]
        arrivals = []
        for place in sorted(missing, key=lambda place: rows[place][2]):
            src = rows[place][1]
            start = max(rows[place][2], sent[src], received)
            sent[src] = received = start + LINK.transfer_ns(sizes[place])
            arrivals.append((place, received))
        return arrivals

    for place, (begin, device, _) in enumerate(rows):
        done = bisect.bisect_right(ends, begin)
        wanted = draw.randint(1, _INPUTS)
        chosen: set[int] = set()
        missing: list[int] = []
        for _ in range(_TRIES):
            if len(chosen) == wanted or not done:
                break
            # Mostly recent producers, whose transfer is just in time.
            back = min(done, 1 + int(draw.expovariate(1 / (reach * devices))))
            source = by_end[done - back]
            here = rows[source][1] == device
            if source in chosen or (once and consumers[source]) or (here and draw.random() < 0.5):
                continue
            if here or arrived.get((source, device), begin + 1) <= begin:
                chosen.add(source)
            elif (source, device) not in arrived:
                arrivals = plan([*missing, source], device)
                if arrivals[-1][1] <= begin:
                    chosen.add(source)
                    missing.append(source)
        for source, arrival in plan(missing, device):
            arrived[source, device] = arrival
            sends[rows[source][1]] = receives[device] = arrival
        for source in sorted(chosen):
            consumers[source].append(place)
    return consumers


def _shuffled(draw: random.Random, consumers: list[list[int]]) -> list[int]:
    """A random topological order: the new index of every op."""
    waiting = [0] * len(consumers)
    for row in consumers:
        for consumer in row:
            waiting[consumer] += 1
    ready = [(draw.random(), place) for place, count in enumerate(waiting) if not count]
    heapq.heapify(ready)
    rank = [0] * len(consumers)
    for index in range(len(consumers)):
        _, place = heapq.heappop(ready)
        rank[place] = index
        for consumer in consumers[place]:
            waiting[consumer] -= 1
            if not waiting[consumer]:
                heapq.heappush(ready, (draw.random(), consumer))
    return rank


def _levelled(graph: OpGraph, devices: list[int], order: list[int], n: int) -> OpGraph:
    """The graph with more persistent bytes, so that the peaks of all devices are equal."""
    placement = Placement(graph.digest, tuple(devices), tuple(order), "planted")
    peaks = baechi.simulate(graph, _ample(n), placement).peak_bytes
    ops = list(graph.ops)
    for device, peak in enumerate(peaks):
        there = [op for op in range(len(ops)) if devices[op] == device]
        share, rest = divmod(max(peaks) - peak, len(there))
        for number, op in enumerate(there):
            more = share + (number < rest)
            ops[op] = replace(ops[op], persistent_bytes=ops[op].persistent_bytes + more)
    return replace(graph, ops=tuple(ops))


def _ample(devices: int) -> Cluster:
    return Cluster.uniform(devices, AMPLE, LINK)


def _size(draw: random.Random, ccr: float) -> int:
    """The bytes of a tensor."""
    return int(MEAN_NS * ccr * draw.uniform(0.5, 1.5))


def _held(draw: random.Random, ccr: float) -> int:
    """The persistent bytes of an op."""
    return int(MEAN_NS * ccr * draw.uniform(0, _HELD))


def _graph(draw: random.Random, n: int, edges: list[tuple[int, int]], ccr: float) -> OpGraph:
    """One tensor per op that is read, with times and bytes drawn."""
    readers: list[list[int]] = [[] for _ in range(n)]
    for producer, consumer in edges:
        readers[producer].append(consumer)
    ops = [
        Op(f"op{op}", draw.randint(MEAN_NS // 10, 2 * MEAN_NS), _held(draw, ccr)) for op in range(n)
    ]
    tensors = [
        Tensor(producer, tuple(row), _size(draw, ccr)) for producer, row in enumerate(readers)
    ]
    return OpGraph(tuple(ops), tuple(tensors))
