"""Baseline placers, which ignore costs.

None of them searches: if its placement does not fit, `solve` raises an error.
"""

import random
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from baechi.errors import InputError
from baechi.placers.device_choice import device_choices
from baechi.placers.placer import Placer, in_index_order
from baechi.problem.problem_arrays import Problem
from baechi.records.placement import Placement
from baechi.validation import check_count, check_counts


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
        n = len(problem.cluster.devices)
        if self.device is not None and not 0 <= self.device < n:
            raise InputError(f"device {self.device} does not exist; the cluster has {n} devices.")
        devices = problem.free_devices if self.device is None else (self.device,)
        found = [
            in_index_order(problem, [device] * len(problem.graph.ops), self.name)
            for device in devices
        ]
        fitting = [placement for placement in found if placement is not None]
        return min(fitting, key=lambda placement: placement.stats["makespan_ns"], default=None)


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
