"""How little memory per device is enough, with a placement that shows it.

The groups of a graph, in the order of their first op, are cut into one stretch per device, and the
ops run in index order. The cuts start where every device has its share of all bytes, and go up or
down by ever smaller steps while the largest peak gets smaller (coordinate descent). So the memory
found is enough, and it is near the least that a contiguous split needs.
"""

from collections.abc import Sequence

import numpy as np

from baechi.problem.problem_arrays import Problem

# Passes over all cuts, at most.
_PASSES = 8


def contiguous_split(problem: Problem) -> tuple[int, ...]:
    """The device of every op, such that the largest peak is small; memory is not looked at."""
    groups, devices = len(problem.group_ops), len(problem.cluster.devices)
    cuts = _balanced(problem.group_bytes, devices)
    least = largest_peak(problem, _devices(problem, cuts))
    for _ in range(_PASSES):
        before = least
        for index in range(len(cuts)):
            step = max(1, groups // 4)
            while step:
                for move in (step, -step):
                    tried = list(cuts)
                    tried[index] = min(groups, max(0, cuts[index] + move))
                    tried.sort()
                    peak = largest_peak(problem, _devices(problem, tried))
                    if peak < least:
                        least, cuts = peak, tried
                step //= 2
        if least == before:
            break
    return tuple(_devices(problem, cuts).tolist())


def largest_peak(problem: Problem, devices: Sequence[int]) -> int:
    """The largest peak of a device, with the ops in index order."""
    timeline = problem.timeline()
    timeline.fold(np.asarray(devices, np.int32), np.arange(len(problem.op_group), dtype=np.int32))
    return max(timeline.peaks())


def _balanced(loads: Sequence[int], devices: int) -> list[int]:
    """Cuts between the devices' equal shares."""
    total = np.cumsum(np.array(loads, np.float64))
    shares = total[-1] * np.arange(1, devices) / devices
    return [int(cut) for cut in np.searchsorted(total, shares)]


def _devices(problem: Problem, cuts: Sequence[int]) -> np.ndarray:
    device_of_group = np.searchsorted(np.array(cuts), np.arange(len(problem.group_ops)), "right")
    return device_of_group[np.array(problem.op_group, np.int64)].astype(np.int32)
