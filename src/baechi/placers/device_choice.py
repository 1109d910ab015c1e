"""The devices to look at: those that missing links leave, choices of some, and those in use.

`linked`: a device stays allowed for a group only if for every group that it shares a tensor with
some allowed device is linked to it (arc consistency: Mackworth, Consistency in Networks of
Relations, 1977), so that greedy placers meet fewer dead ends. O(edges * sweeps), and O(devices**2)
per set of devices met.

`device_choices`: with at most k devices, a placer runs once per choice of k devices with all others
excluded. A choice must have a device for every group; of choices that differ only in equal devices
the first is used. Greedy choices come first, by memory, by speed, by both, and around every kind of
device in turn by the rate of its links; then all others, if they are few.
O(choices * (devices * groups + devices**2)).
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, reduce
from operator import or_
from typing import Final

import numpy as np
from numpy.typing import NDArray

from baechi.problem.problem_arrays import Problem, needed
from baechi.records.placement import Placement

# All choices are listed up to this number of them.
_CHOICES: Final = 256
# Maximum number of kinds of devices around which a choice is made.
_SEEDS: Final = 16
# Most devices of the placements whose devices `used_devices` returns.
MOST_USED: Final = 16


def device_choices(problem: Problem) -> Iterator[tuple[int, ...]]:
    """Sets of `max_devices` devices, ascending; all devices where their number has no limit."""
    n, limit = len(problem.cluster.devices), problem.max_devices
    if limit is None:
        yield tuple(range(n))
        return
    kinds = device_kinds(problem)
    few = math.comb(n, limit) <= _CHOICES
    others = itertools.combinations(range(n), limit) if few else ()
    seen = set()
    for choice in itertools.chain(_greedy(problem, kinds, limit), others):
        key = tuple(sorted(kinds[device] for device in choice))
        everywhere = problem.allowed[list(choice)].any(axis=0).all()
        if key not in seen and len(choice) == limit and everywhere:
            seen.add(key)
            yield choice


def device_kinds(problem: Problem) -> list[int]:
    """The first device equal to each device in everything but its name."""
    n = len(problem.cluster.devices)
    if problem.cluster.uniform_link is None or len(problem.pool_memory) < n:
        return list(range(n))
    first: dict[tuple[object, ...], int] = {}
    rows = zip(problem.cluster.devices, problem.device_memory, problem.allowed, strict=True)
    keys = [
        (device.kind, device.speed, memory, allowed.tobytes(), lanes > 1 and device.lane_of)
        for (device, memory, allowed), lanes in zip(rows, problem.lanes, strict=True)
    ]
    return [first.setdefault(key, index) for index, key in enumerate(keys)]


def _greedy(problem: Problem, kinds: Sequence[int], limit: int) -> Iterator[tuple[int, ...]]:
    n = len(kinds)
    memory = np.array(problem.device_memory, np.float64)
    total = problem.durations.sum(axis=1, dtype=np.float64)[problem.device_class]
    speed = 1 / np.maximum(total, 1)
    for score in (memory, speed, memory * speed):
        yield _grown(problem, limit, (), score)
    rate = np.broadcast_to(problem.links[1], n * n).reshape(n, n)
    for seed in sorted(set(kinds))[:_SEEDS]:
        yield _grown(problem, limit, (seed,), np.minimum(rate[seed], rate[:, seed]), memory)


def _grown(
    problem: Problem, limit: int, chosen: tuple[int, ...], *scores: NDArray[np.generic]
) -> tuple[int, ...]:
    """The devices that groups require, those chosen, and the best of the others."""
    allowed = problem.allowed
    devices = list(dict.fromkeys((*np.flatnonzero(needed(allowed)).tolist(), *chosen)))
    ranked = np.lexsort((-np.arange(len(allowed)), *reversed(scores)))[::-1].tolist()
    while len(devices) < limit:
        homeless = ~allowed[devices].any(axis=0)
        # Prefer the device that serves the most groups without one, then the rank.
        served = allowed[:, homeless].sum(axis=1)
        left = [device for device in ranked if device not in devices]
        devices.append(max(left, key=lambda device: served[device]))
    return tuple(sorted(devices))


def used_devices(problem: Problem, placements: Iterable[Placement]) -> list[int]:
    """The devices of the best placements and those that some group requires, ascending."""
    used: set[int] = set()
    for placement in sorted(placements, key=lambda p: p.stats["makespan_ns"]):
        more = used | set(placement.devices)
        if used and len(more) > MOST_USED:
            break
        used = more
    return sorted(used | set(np.flatnonzero(needed(problem.allowed)).tolist())) if used else []


def linked(problem: Problem) -> Problem | None:
    """The problem without devices ruled out by missing links; `None` if a group has none left."""
    if problem.constraints is None or problem.cluster.uniform_link is not None:
        return problem
    reach = _reach(problem)
    if reach.all():
        return problem
    allowed = _consistent(problem, reach)
    if allowed is None or (allowed == problem.allowed).all():
        return None if allowed is None else problem
    return Problem(problem.source, problem.cluster, problem.constraints, allowed)


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
    op_group = problem.arrays.op_group
    producers, consumers = problem.arrays.edges()
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
        return reduce(or_, (row for at, row in enumerate(rows) if devices >> at & 1), 0)

    return image
