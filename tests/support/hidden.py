"""Problems made around a placement that is known, so that nobody can call them infeasible."""

import random

from baechi import (
    Cluster,
    Constraints,
    Device,
    InputError,
    Link,
    Op,
    OpGraph,
    Tensor,
)
from baechi.problem.problem_arrays import Problem
from baechi.problem.simulation import replay

SPEEDS = (1.0, 1.0, 0.5, 1000.0, 0.001)


def hidden_among_constraints(seed, most_ops=24):
    """A graph, a cluster, constraints, and the devices of a placement in index order that fits.

    It fills 80 to 95 % of every memory that it uses; a device that it does not use may have none.
    There are large groups, fan-outs, giant tensors, missing and one-way links, pools, ports of all
    kinds, speeds of 1 to a million, times by kind, pins, forbidden devices and a limit of devices.
    """
    draw = random.Random(seed)
    graph = _graph(draw, draw.randrange(3, most_ops))
    devices = _devices(draw, draw.randrange(2, 6))
    ports = draw.choice(["duplex", "shared", "none"])
    n = len(devices)
    links = [[None if a == b else _link(draw) for b in range(n)] for a in range(n)]
    ample = Cluster(devices, tuple(map(tuple, links)), ports)
    problem = Problem(graph, ample)
    homes = draw.sample(range(n), draw.randint(1, n))
    where = [draw.choice(homes) for _ in range(graph.arrays.groups)]
    row = tuple(where[group] for group in problem.op_group)
    for a in range(n):
        for b in range(n):
            if draw.random() < 0.3:
                kept, links[a][b] = links[a][b], None
                if not _reaches(graph, Cluster(devices, tuple(map(tuple, links)), ports), row):
                    links[a][b] = kept
    peaks = replay(problem, row, range(len(row))).peaks()
    used = draw.uniform(0.8, 0.95)
    memory = [int(peak / used) for peak in peaks]
    sized = tuple(
        Device(d.name, memory[problem.device_pool[at]], d.speed, d.kind, d.pool)
        for at, d in enumerate(devices)
    )
    cluster = Cluster(sized, tuple(map(tuple, links)), ports)
    return graph, cluster, _constraints(draw, graph, cluster, row), row


def _graph(draw, n):
    names = draw.choice([[None], [None] * 5 + ["g", "h"], ["g", "h", None], ["g"], list("abcdef")])
    giant = draw.random() < 0.2
    ops = tuple(
        Op(
            f"op{i}",
            draw.choice([0, draw.randrange(1, 30), draw.randrange(10**6)]),
            draw.choice([0, draw.randrange(60)]),
            draw.choice([0, draw.randrange(20)]),
            draw.choice(names),
        )
        for i in range(n)
    )
    tensors = []
    for _ in range(draw.randrange(2 * n)):
        producer = draw.randrange(n - 1)
        later = range(producer + 1, n)
        consumers = draw.sample(later, draw.choice([1, 1, min(2, len(later)), len(later)]))
        nbytes = draw.choice([0, draw.randrange(30), 10**9 if giant else 1])
        tensors.append(Tensor(producer, tuple(consumers), nbytes, draw.random() < 0.1))
    kinds = {}
    if draw.random() < 0.3:
        kinds["fast"] = tuple(op.time_ns // 3 for op in ops)
    return OpGraph(ops, tuple(tensors), kinds)


def _devices(draw, n):
    pool = "p" if draw.random() < 0.2 else ""
    return tuple(
        Device(
            f"d{i}",
            2**40,
            draw.choice(SPEEDS),
            draw.choice(["", "fast", "other"]),
            pool if i < 2 else "",
        )
        for i in range(n)
    )


def _link(draw):
    return Link(
        draw.choice([0, draw.randrange(10), 10**6]),
        draw.choice([10**9, 10**6, 10**11]),
        draw.choice([0, 0, draw.randrange(10), 10**5]),
    )


def _reaches(graph, cluster, row):
    try:
        replay(Problem(graph, cluster), row, range(len(row)))
    except InputError:
        return False
    return True


def _constraints(draw, graph, cluster, row):
    if draw.random() < 0.3:
        return None
    pins, forbidden = {}, {}
    names = [device.name for device in cluster.devices]
    for op, device in zip(graph.ops, row, strict=True):
        what = draw.random()
        if what < 0.15:
            pins[op.group or op.name] = names[device]
        elif what < 0.3:
            others = [name for at, name in enumerate(names) if at != device]
            chosen = tuple(name for name in others if draw.random() < 0.5)
            forbidden[op.group or op.name] = chosen
    limit = len(set(row)) if draw.random() < 0.5 else None
    return Constraints(pins, forbidden, max_devices=limit)
