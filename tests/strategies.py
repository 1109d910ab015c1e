"""One family of graphs, clusters and placements that all property tests draw from.

Small, and full of corners: no time, no bytes, no memory, missing links, pools, unequal devices.
"""

from hypothesis import strategies as st

from baechi import Cluster, Device, Link, Op, OpGraph, Placement, Tensor

times = st.integers(0, 30)
sizes = st.integers(0, 40)
speeds = st.sampled_from([1.0, 1.0, 0.5, 0.3, 2.0, 1.7])


@st.composite
def graphs(draw, max_ops=9, *, grouped=True, kinds=True, min_ops=0):
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
    rows = {}
    if kinds and draw(st.booleans()):
        rows["fast"] = tuple(draw(times) for _ in range(n))
    return OpGraph(ops, tensors, rows)


@st.composite
def clusters(draw, max_devices=4, *, whole=False, memory=None, uniform=False):
    """Clusters; `whole` has every link, `uniform` equal devices, and links, too."""
    n = draw(st.integers(1, max_devices))
    rates = st.sampled_from([10**9, 3 * 10**8, 10**10])
    link = st.builds(Link, st.integers(0, 9), rates)
    one = draw(link)
    sizes = st.integers(0, 300) if memory is None else memory
    size = draw(sizes)
    pools: dict[str, int] = {}
    devices = []
    for i in range(n):
        pool = "" if uniform else draw(st.sampled_from(["", "", "p"]))
        bytes_ = pools.setdefault(pool, draw(sizes)) if pool else draw(sizes)
        kind = draw(st.sampled_from(["", "fast", "slow"]))
        devices.append(
            Device(f"d{i}", size) if uniform else Device(f"d{i}", bytes_, draw(speeds), kind, pool)
        )
    present = link if whole else st.one_of(link, link, link, st.none())
    links = tuple(
        tuple(None if i == j else one if uniform else draw(present) for j in range(n))
        for i in range(n)
    )
    return Cluster(tuple(devices), links, draw(st.sampled_from(["duplex", "shared", "none"])))


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
