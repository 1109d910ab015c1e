"""Choices of devices under a limit on their number.

With at most k devices, a placer runs once per choice of k devices with all others excluded, so no
placer needs to handle the limit. A choice must have a device for every group. Equal devices are
interchangeable, and of choices that differ only in them the first is used.

Choices in order: greedy ones, by memory, by speed, by both, and around every kind of device in turn
by the rate of its links; then all others, if they are few.
Complexity: O(choices * (devices * groups + devices**2)).
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from baechi.problem.allowed_devices import needed
from baechi.problem.problem_arrays import Problem

# All choices are listed up to this number of them.
_CHOICES: Final = 256
# Maximum number of kinds of devices around which a choice is made.
_SEEDS: Final = 16


def device_choices(problem: Problem) -> Iterator[tuple[int, ...]]:
    """Sets of `max_devices` devices, ascending; all devices where their number has no limit."""
    n = len(problem.cluster.devices)
    if problem.max_devices is None:
        yield tuple(range(n))
        return
    kinds = device_kinds(problem)
    seen = set()
    for choice in itertools.chain(_greedy(problem, kinds), _all(problem)):
        key = tuple(sorted(kinds[device] for device in choice))
        if key not in seen:
            seen.add(key)
            yield choice


def device_kinds(problem: Problem) -> list[int]:
    """The first device equal to each device in everything but its name."""
    n = len(problem.cluster.devices)
    if problem.cluster.uniform_link is None or len(problem.pool_memory) < n:
        return list(range(n))
    first: dict[tuple[object, ...], int] = {}
    return [
        first.setdefault(
            (
                device.kind,
                device.speed,
                problem.pool_memory[problem.device_pool[index]],
                problem.allowed[index].tobytes(),
            ),
            index,
        )
        for index, device in enumerate(problem.cluster.devices)
    ]


def _greedy(problem: Problem, kinds: Sequence[int]) -> Iterator[tuple[int, ...]]:
    memory = np.array([problem.pool_memory[pool] for pool in problem.device_pool], np.float64)
    total = problem.durations.sum(axis=1, dtype=np.float64)[problem.device_class]
    speed = 1 / np.maximum(total, 1)
    for score in (memory, speed, memory * speed):
        yield from _grown(problem, (), score)
    for seed in sorted(set(kinds))[:_SEEDS]:
        yield from _grown(problem, (seed,), _nearness(problem, seed), memory)


def _nearness(problem: Problem, device: int) -> NDArray[np.float64]:
    """The lower rate of the two links between a device and every other."""
    _, rate = problem.links
    n = len(problem.cluster.devices)
    table = np.broadcast_to(rate, n * n).reshape(n, n)
    return np.asarray(np.minimum(table[device], table[:, device]), np.float64)


def _grown(
    problem: Problem, chosen: tuple[int, ...], *scores: NDArray[np.float64]
) -> Iterator[tuple[int, ...]]:
    """A choice that starts with the devices that groups require and adds the best of the others."""
    limit = problem.max_devices or len(problem.cluster.devices)
    allowed = problem.allowed
    only = np.flatnonzero(needed(allowed)).tolist()
    devices = list(dict.fromkeys((*only, *chosen)))
    keys = (-np.arange(len(allowed)), *reversed(scores))
    ranked = np.lexsort(keys)[::-1].tolist()
    while len(devices) < limit:
        homeless = ~allowed[devices].any(axis=0)
        # Prefer the device that serves the most groups without one, then the rank.
        served = allowed[:, homeless].sum(axis=1)
        left = [device for device in ranked if device not in devices]
        devices.append(max(left, key=lambda device: served[device]))
    if len(devices) == limit and allowed[devices].any(axis=0).all():
        yield tuple(sorted(devices))


def _all(problem: Problem) -> Iterator[tuple[int, ...]]:
    n, limit = len(problem.cluster.devices), problem.max_devices or 0
    if math.comb(n, limit) > _CHOICES:
        return
    for choice in itertools.combinations(range(n), limit):
        if problem.allowed[list(choice)].any(axis=0).all():
            yield choice
