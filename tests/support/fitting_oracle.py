"""Whether anything fits, by trying every assignment of devices; and clusters with more memory."""

import itertools
from dataclasses import replace

from baechi import InputError, Placement, simulate
from baechi.problem.problem_arrays import Problem
from baechi.problem.simulation import overflows


def fits_in_index_order(graph, cluster, *, rules=None, violates=lambda _: False):
    """Whether some assignment that violates nothing fits, with the margins of `rules`."""
    problem = Problem(graph, cluster)
    order = range(len(graph.ops))
    n = len(problem.group_ops)
    for of_group in itertools.product(range(len(cluster.devices)), repeat=n):
        devices = tuple(of_group[group] for group in problem.op_group)
        if violates(devices):
            continue
        try:
            schedule = simulate(graph, cluster, Placement(graph.digest, devices, order))
        except InputError:
            continue
        if not overflows(schedule, cluster, rules):
            return True
    return False


def grown(cluster, names, extra):
    """The cluster with so much more memory on these devices, and on those that share theirs."""
    pools = {device.pool for device in cluster.devices if device.name in names} - {""}
    devices = tuple(
        replace(d, memory_bytes=d.memory_bytes + extra * (d.name in names or d.pool in pools))
        for d in cluster.devices
    )
    return replace(cluster, devices=devices)
