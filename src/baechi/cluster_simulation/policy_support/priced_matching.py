"""Jobs matched to GPUs of several kinds by weights that have a price in them.

GPUs of kind k cost a job p_k for each and each tick. On n of them a job weighs

    weight_j(k, n) = time_j(k, n) (1 + p_k n)

of which the first part is small on many GPUs, and the second, its GPU-time, on few. Arrays have
jobs on the first axis, kinds on the second, and 1, 2, ... GPUs on the third. `heet.py` says whose
rule that is.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from baechi.placers.linear_programs import LinearProgram, solved

Floats = NDArray[np.float64]
Place = tuple[int, int]  # a kind, and how many GPUs of it

_STEPS: Final = 16  # by at most a factor of 2, 2^(1/2), 2^(1/3), ...: of ten in all


def prices(times: Floats, gpus: Sequence[int]) -> Floats:
    """A price per kind at which about as many GPUs are wanted as there are.

    Each job wants what weighs least. Prices go up and down by the part of the GPUs that is wanted,
    in ever smaller steps.

    Args:
        times: What each job takes; infinite where it has no room.
        gpus: How many there are of every kind.
    """
    jobs, kinds, sizes = times.shape
    price = np.full(kinds, jobs / sum(gpus))
    for step in range(1, _STEPS + 1):
        choice = weights(times, price).reshape(jobs, -1).argmin(axis=1)
        wanted = np.bincount(choice // sizes, choice % sizes + 1.0, kinds)
        price *= np.clip(wanted / gpus, 0.5, 2.0) ** (1 / step)
    return price


def weights(times: Floats, price: Floats) -> Floats:
    """What each job weighs."""
    return times * (1 + price[:, None] * np.arange(1, times.shape[2] + 1))


def matched(weight: Floats, gpus: Sequence[int]) -> list[Place | None]:
    """The place of each job in a matching that fills most GPUs, and of these weighs least.

    On every kind a job takes as many GPUs as weigh least; who is left out then takes what is left.
    A linear program, of whose vertex the largest parts count.
    """
    found: list[Place | None] = [None] * len(weight)
    best, sizes = weight.min(axis=2), weight.argmin(axis=2) + 1
    jobs, kinds = np.nonzero(np.isfinite(best) & (sizes <= gpus))
    cost, many = best[jobs, kinds], sizes[jobs, kinds]
    columns, ones = np.arange(len(jobs)), np.ones(len(jobs))
    program = LinearProgram(
        cost / cost.max() - 2.0 * many,  # a GPU that is filled gains more than any job weighs
        ones,
        np.concatenate([jobs, len(found) + kinds]),  # a job once; a kind as often as it has GPUs
        np.concatenate([columns, columns]),
        np.concatenate([ones, many]),
        np.array([*[1.0] * len(found), *map(float, gpus)]),
    )
    free = np.array(gpus)
    for column in np.lexsort((cost, -np.round(solved(program), 6))).tolist():
        job, kind = int(jobs[column]), int(kinds[column])
        if found[job] is None and many[column] <= free[kind]:
            found[job] = kind, int(many[column])
            free[kind] -= many[column]
    for job, place in enumerate(found):
        room = np.arange(1, weight.shape[2] + 1) <= free[:, None]
        left = np.where(room, weight[job], np.inf)
        if place is None and np.isfinite(left.min()):
            kind, size = divmod(int(left.argmin()), weight.shape[2])
            found[job] = kind, size + 1
            free[kind] -= size + 1
    return found


def traded(weight: Floats, places: Sequence[Place | None]) -> list[Place | None]:
    """The places after jobs of one size have exchanged their kinds, in pairs that both weigh less.

    Who gains most trades first, with whom it helps most.
    """
    after = list(places)
    wishes = [
        (weight[job, other, size - 1] - weight[job, kind, size - 1], job, kind, other, size)
        for job, (kind, size) in ((job, at) for job, at in enumerate(places) if at is not None)
        for other in range(weight.shape[1])
    ]
    waiting: defaultdict[tuple[int, int, int], list[int]] = defaultdict(list)
    for _, one, kind, other, size in sorted(wish for wish in wishes if wish[0] < 0):
        if after[one] == (kind, size):  # it has not traded
            partners = waiting[other, kind, size]
            partners = [two for two in partners if after[two] == (other, size)]
            if partners:
                after[one], after[partners[0]] = (other, size), (kind, size)
            else:
                waiting[kind, other, size].append(one)
    return after
