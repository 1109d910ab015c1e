"""Graphs of one micro-batch: rows of chunks and layers, towers, and a model of many ops.

The tests use them, too.
"""

import random
from collections.abc import Sequence

from baechi import Cluster, Device, Link, Op, OpGraph, Placement, Tensor

UNIT = 1000
FREE = Link(latency_ns=0, bytes_per_s=10**15)


def cluster_of(memory: Sequence[int], link: Link = FREE) -> Cluster:
    """A device for each number of bytes."""
    return Cluster.connected([Device(f"d{i}", size) for i, size in enumerate(memory)], link)


def chunks(
    homes: Sequence[int],
    forward: Sequence[int],
    inputs: Sequence[int],
    weights: Sequence[int] = (),
) -> tuple[OpGraph, Placement]:
    """A row of chunks, each on its device, with a byte that it keeps for its backward.

    The times are of forward, of backward, and of the part of the backward that only makes gradients
    of parameters, if it is apart: then the byte is kept for that, too. The graph and its placement.
    """
    n = len(homes)
    devices = list(homes)
    ops = [Op(f"F{at}", forward[at], group=f"chunk{at}") for at in range(n)]
    back: dict[int, int] = {}
    late: dict[int, int] = {}
    for name, times, where in (("B", inputs, back), ("W", weights, late)):
        for at in reversed(range(n)) if times else ():
            where[at] = len(ops)
            ops.append(Op(f"{name}{at}", times[at], group=f"chunk{at}"))
            devices.append(homes[at])
    tensors = []
    for at in range(n):
        tensors.append(Tensor(at, (back[at], *([late[at]] if weights else [])), 1))
        tensors.append(Tensor(at, (at + 1 if at + 1 < n else back[at],), 0))
        readers = [*([back[at - 1]] if at else []), *([late[at]] if weights else [])]
        tensors.append(Tensor(back[at], tuple(readers), 0))
    graph = OpGraph(tuple(ops), tuple(tensors))
    return graph, Placement(graph.digest, tuple(devices), tuple(range(len(ops))))


def layers(
    n: int, *, kept: int = 2**20, sent: int = 2**16, held: int = 2**20, forward: int = 1_000_000
) -> OpGraph:
    """A training graph of equal layers in a row: bytes kept for the backward, sent on, and held."""
    ops = [Op(f"layer{at}", forward, held, group=f"g{at}") for at in range(n)]
    ops.append(Op("loss", 0, phase="loss"))
    ops += [
        Op(f"layer{at}'", 2 * forward, group=f"g{at}", phase="backward", forward=(at,))
        for at in reversed(range(n))
    ]
    back = [2 * n - at for at in range(n)]
    tensors = []
    for at in range(n):
        tensors += [Tensor(at, (back[at],), kept), Tensor(at, (at + 1,), sent)]
        tensors += [Tensor(back[at], (back[at - 1],), sent)] if at else []
    return OpGraph(tuple(ops), (*tensors, Tensor(n, (n + 1,), sent)))


def towers(count: int, depth: int, trunk: int) -> OpGraph:
    """Towers of equal ops side by side and a trunk that reads all of them, with a backward."""
    ops = [
        Op(f"tower{i}.{at}", UNIT, group=f"g{i}.{at}") for i in range(count) for at in range(depth)
    ]
    ops += [Op(f"trunk{at}", UNIT, group=f"t{at}") for at in range(trunk)]
    n = len(ops)
    after = {at: at + 1 for at in range(n - 1)}
    after.update({(i + 1) * depth - 1: count * depth for i in range(count)})
    back = [Op(f"{op.name}'", 2 * UNIT, group=op.group) for op in reversed(ops)]
    tensors = [Tensor(at, (to, 2 * n - 1 - at), 1) for at, to in after.items()]
    tensors += [Tensor(2 * n - 1 - to, (2 * n - 1 - at,), 1) for at, to in after.items()]
    return OpGraph((*ops, *back), (*tensors, Tensor(n - 1, (n,), 1)))


def model(blocks: int, per_block: int, seed: int = 1) -> OpGraph:
    """A training step of equal blocks of unequal ops, with a skip connection around each block.

    Two ops in five have parameters, their gradients, and the state of an optimizer.
    """
    draw = random.Random(seed)
    n, mib = blocks * per_block, 2**20
    times = [draw.randint(20_000, 200_000) for _ in range(per_block)]
    held = [mib * (draw.random() < 0.4) for _ in range(n)]
    ops = [Op(f"f{at}", times[at % per_block], 3 * held[at], group=f"g{at}") for at in range(n)]
    ops.append(Op("loss", 0, phase="loss"))
    for at in reversed(range(n)):
        gradient = {"persistent_bytes": held[at], "late_bytes": held[at]}
        twin = {"phase": "backward", "forward": (at,)}
        ops.append(Op(f"b{at}", 2 * times[at % per_block], group=f"g{at}", **gradient, **twin))
    tensors = []
    for at in range(n):
        skip = [at + per_block] if at % per_block == 0 and at + per_block < n else []
        readers = [min(at + 1, n), *skip]
        tensors.append(Tensor(at, (*readers, 2 * n - at), mib // 4))
        tensors += [
            Tensor(2 * n - reader, (2 * n - at,), mib // 4) for reader in readers if reader < n
        ]
    return OpGraph(tuple(ops), (*tensors, Tensor(n, (n + 1,), mib // 4)))
