"""Graphs of one micro-batch of a pipeline: rows of chunks with forward and backward."""

from baechi import Cluster, Device, Link, Op, OpGraph, Placement, Tensor

UNIT = 1000
FREE = Link(latency_ns=0, bytes_per_s=10**15)


def cluster_of(memory, link=FREE):
    """A device for each number of bytes."""
    return Cluster.connected([Device(f"d{i}", size) for i, size in enumerate(memory)], link)


def chunks(homes, forward, inputs, weights=()):
    """A row of chunks, each on its device, with a byte that it keeps for its backward.

    The times are of forward, of backward, and of the part of the backward that only makes gradients
    of parameters, if it is apart: then the byte is kept for that, too. The graph and its placement.
    """
    n = len(homes)
    devices = list(homes)
    ops = [Op(f"F{at}", forward[at], group=f"chunk{at}") for at in range(n)]
    back, late = {}, {}
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


def layers(n, *, kept=2**20, sent=2**16, held=2**20, forward=1_000_000):
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
