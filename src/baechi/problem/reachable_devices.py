"""Devices that each group can reach, where some links are missing.

With constraints, a greedy placer may put an op where its consumers, which must be elsewhere, cannot
get its output. Such devices are ruled out beforehand: a device stays allowed for a group only if
for every group that it shares a tensor with some allowed device is linked to it (arc consistency:
Mackworth, Consistency in Networks of Relations, 1977). If the ops form a tree, no dead end remains;
otherwise fewer do.

A consumer gets a tensor from its producer's device, or from a device of its own pool that did.
Complexity: O(edges * sweeps), and O(devices**2) per set of devices encountered.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from baechi.problem.allowed_devices import of_groups
from baechi.problem.problem_arrays import Problem


def linked(problem: Problem) -> Problem | None:
    """The problem without devices ruled out by missing links; `None` if a group has none left.

    Unchanged where there are no constraints (all ops can be on one device) or no missing links.
    """
    if problem.constraints is None or problem.cluster.uniform_link is not None:
        return problem
    reach = _reach(problem)
    if reach.all():
        return problem
    allowed = _consistent(problem, reach)
    if allowed is None or (allowed == problem.allowed).all():
        return None if allowed is None else problem
    names = [problem.graph.ops[ops[0]].name for ops in problem.group_ops]
    constraints = of_groups(problem.constraints, problem.cluster, names, allowed)
    return replace(problem, constraints=constraints)


def _reach(problem: Problem) -> NDArray[np.bool_]:
    """True where the outputs of a device (row) can get to another (column)."""
    n = len(problem.cluster.devices)
    _, rate = problem.links
    direct = np.broadcast_to(rate, n * n).reshape(n, n) > 0
    direct |= np.eye(n, dtype=np.bool_)
    pool = np.array(problem.device_pool)
    handed = direct & (pool[:, None] == pool)
    return np.asarray((direct.astype(np.float32) @ handed.astype(np.float32)) > 0)


def _consistent(problem: Problem, reach: NDArray[np.bool_]) -> NDArray[np.bool_] | None:
    """The allowed devices that remain when no more can be ruled out."""
    op_group = problem.graph.arrays.op_group
    producers, consumers = problem.graph.arrays.edges()
    pairs = np.unique(np.stack([op_group[producers], op_group[consumers]]), axis=1)
    edges = [(src, dst) for src, dst in pairs.T.tolist() if src != dst]
    # Sets of devices as the bits of an int.
    left = [_bits(column) for column in problem.allowed.T]
    forth, back = _images(reach), _images(reach.T)
    before: list[int] = []
    while before != left:
        before = list(left)
        for src, dst in edges:
            left[dst] &= forth(left[src])
        for src, dst in reversed(edges):
            left[src] &= back(left[dst])
    if 0 in left:
        return None
    n = len(reach)
    return np.array([[bool(bits >> device & 1) for bits in left] for device in range(n)], np.bool_)


def _bits(flags: NDArray[np.bool_]) -> int:
    return sum(1 << device for device in np.flatnonzero(flags).tolist())


def _images(reach: NDArray[np.bool_]) -> Callable[[int], int]:
    """A function from a set of devices to all devices that they reach."""
    rows = [_bits(row) for row in reach]

    @cache
    def image(devices: int) -> int:
        union = 0
        for device, row in enumerate(rows):
            if devices >> device & 1:
                union |= row
        return union

    return image
