"""Baseline placers, which ignore times: single, round-robin, random, pinned, and m-TOPO.

All but m-TOPO are fixed: if the placement does not fit, `solve` raises an error.
"""

import random
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from baechi import _core
from baechi.placers.device_choice import device_choices
from baechi.placers.placer import HEADROOMS, Placer, in_index_order, placement_of, shortest
from baechi.problem.problem_arrays import Problem
from baechi.records.placement import Placement
from baechi.validation import check_count, check_counts, check_is


@final
@dataclass(frozen=True, slots=True)
class SingleDevice(Placer):
    """All ops on one device, in index order.

    Attributes:
        device: Its index; `None` is the fitting device with the shortest step.
    """

    name: ClassVar[str] = "single"
    fixed: ClassVar[bool] = True
    device: int | None = None

    def __post_init__(self) -> None:
        if self.device is not None:
            check_count(self.device, "device of SingleDevice")

    def place(self, problem: Problem) -> Placement | None:
        """A placement by the rule of the class."""
        devices = problem.free_devices if self.device is None else (self.device,)
        found = [
            in_index_order(problem, [device] * problem.arrays.ops, self.name) for device in devices
        ]
        return shortest(placement for placement in found if placement is not None)


def _choices(problem: Problem) -> list[list[int]]:
    """The allowed devices of every group, within the first device choice if there is a limit."""
    if problem.max_devices is not None:
        devices = next(device_choices(problem), None)
        problem = problem if devices is None else problem.within(devices)
    if problem.constraints is None:
        return [list(range(len(problem.cluster.devices)))] * len(problem.group_ops)
    return [np.flatnonzero(column).tolist() for column in problem.allowed.T]


@final
@dataclass(frozen=True, slots=True)
class RoundRobin(Placer):
    """Group by group, in the order of their first op, to the next device; index order.

    A group that may not use every device takes turns among its own.
    """

    name: ClassVar[str] = "round-robin"
    fixed: ClassVar[bool] = True

    def place(self, problem: Problem) -> Placement | None:
        """A placement by the rule of the class."""
        choices = _choices(problem)
        devices = [choices[group][group % len(choices[group])] for group in problem.op_group]
        return in_index_order(problem, devices, self.name)


@final
@dataclass(frozen=True, slots=True)
class RandomPlacer(Placer):
    """Every group on a device drawn uniformly from those that it may use; index order.

    Attributes:
        seed: Equal seeds give equal placements.
    """

    name: ClassVar[str] = "random"
    fixed: ClassVar[bool] = True
    seed: int = 0

    def __post_init__(self) -> None:
        check_count(self.seed, "seed")

    def place(self, problem: Problem) -> Placement | None:
        """A placement by the rule of the class."""
        draw = random.Random(self.seed)
        of_group = [row[draw.randrange(len(row))] for row in _choices(problem)]
        devices = [of_group[group] for group in problem.op_group]
        return in_index_order(problem, devices, self.name)


@final
@dataclass(frozen=True, slots=True)
class Pinned(Placer):
    """Every op on a given device: an expert's placement; index order.

    Attributes:
        devices: Device index of every op.
    """

    name: ClassVar[str] = "pinned"
    fixed: ClassVar[bool] = True
    devices: tuple[int, ...]

    def __post_init__(self) -> None:
        devices = check_counts(self.devices, "device of a pinned op")
        object.__setattr__(self, "devices", devices)

    def place(self, problem: Problem) -> Placement | None:
        """A placement by the rule of the class.

        Raises:
            InputError: The pins are for another graph or cluster, or part a group.
        """
        return in_index_order(problem, self.devices, self.name)


@final
@dataclass(frozen=True, slots=True)
class MTopo(Placer):
    """Fills devices in index order, with ops in index order, up to a balanced cap.

    Source: Baechi (SoCC 2020; arXiv 2301.08695), section "m-TOPO": Cap = sum(d) / n + max(d), where
    d is the memory of an op and n the number of devices. O(ops * log ops + tensors).

    Differences from the paper: d is that of a whole group, since its ops share a device; a device
    also closes when an op does not fit there by the exact clock, so that the cap never exceeds the
    real limit; on unequal devices the mean is divided in proportion to their memory; and after a
    dead end (a backward op that no longer fits beside its forward op) the schedule is retried with
    lower caps and increasing shares of every memory held back (`HEADROOMS`).

    Attributes:
        capped: Whether a device closes at the balanced cap; else only when it is full.
    """

    name: ClassVar[str] = "m-topo"
    capped: bool = True

    def __post_init__(self) -> None:
        check_is(self.capped, bool, "capped")

    def place(self, problem: Problem) -> Placement | None:
        """Fill the devices; a closed device stays closed."""
        for headroom in HEADROOMS:
            timeline = problem.timeline(headroom)
            if self._fill(problem, timeline, headroom):
                return placement_of(problem, timeline, self.name)
        return None

    def _fill(self, problem: Problem, timeline: _core.Timeline, headroom: float) -> bool:
        """Commit every op; false at a dead end."""
        loads = problem.group_bytes
        caps = [int(cap * (1 - headroom)) for cap in self._caps(problem, loads)]
        filled = [0] * len(caps)
        device = 0

        def closed(op: int, load: int, device: int) -> bool:
            over = self.capped and filled[device] > 0 and filled[device] + load > caps[device]
            return over or not timeline.fits(op, device)

        for op, group in enumerate(problem.op_group):
            target = timeline.group_device(op)
            if target < 0:
                may = problem.allowed[:, group]
                while device < len(caps) and may[device] and closed(op, loads[group], device):
                    device += 1
                # A device that is not allowed for the group stays open for others.
                target = device
                while target < len(caps) and (
                    not may[target] or (target > device and closed(op, loads[group], target))
                ):
                    target += 1
                if target == len(caps):
                    return False
                filled[target] += loads[group]
            elif not timeline.fits(op, target):
                return False
            timeline.commit(op, target)
        return True

    def _caps(self, problem: Problem, loads: tuple[int, ...]) -> list[int]:
        rows = zip(problem.device_memory, problem.allowed, strict=True)
        memory = [nbytes * bool(allowed.any()) for nbytes, allowed in rows]
        total = max(1, sum(sorted(memory)[-problem.most_devices :]))
        return [-(-sum(loads) * m // total) + max(loads, default=0) for m in memory]
