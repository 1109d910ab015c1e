"""Search for a placement whose busiest device or port has least to do per run of the graph.

    least  max over devices of  work and overheads, transfers out, transfers in

Threshold accepting (Dueck and Scheuer, 1990, J. Comput. Phys. 90): a random move is taken unless it
makes the loads worse by more than a part that shrinks to nothing. Their measure is the sum of their
eighth powers, so that moves count which relieve one of several busiest devices. A move takes a
group to the device of one with which it shares a tensor, or to any; or all groups of a tensor to
one device. Of the memory only persistent bytes are looked at, so callers check what is found.

Complexity: O(degree * devices) per step.
"""

import random
from collections.abc import Sequence
from typing import Final, final

import numpy as np

from baechi.problem.problem_arrays import LIMIT, Problem

# The parts at first, one after the other: few groups need the first, many the second.
_WORSE: Final = (3.0, 0.3)
_TENSORS: Final = 0.2  # of moves, the part that takes all groups of a tensor
_ANYWHERE: Final = 0.2  # the part that takes a group to any device


def balanced(problem: Problem, devices: Sequence[int], steps: int) -> tuple[int, ...]:
    """Devices of all ops with the least maximal load found in so many steps from these."""
    draw = random.Random(0)
    for worse in _WORSE:
        devices = _searched(problem, devices, steps // len(_WORSE), worse, draw)
    return tuple(devices)


def _searched(
    problem: Problem, devices: Sequence[int], steps: int, worse: float, draw: random.Random
) -> list[int]:
    state = _Loads(problem, devices)
    current, least, best = state.measure(), max(state.loads), list(state.home)
    for step in range(steps if state.shared else 0):
        members, device = state.drawn(draw)
        if not members or not state.may(members, device):
            continue
        were = [state.home[member] for member in members]
        state.move(members, [device] * len(members))
        found = state.measure()
        if found > current * (1 + worse * (1 - step / steps)):
            state.move(members, were)
            continue
        current = found
        if max(state.loads) < least:
            least, best = max(state.loads), list(state.home)
    return [best[member] for member in problem.arrays.op_group.tolist()]


@final
class _Loads:
    """Loads of devices, of ports out and of ports in, as groups move."""

    def __init__(self, problem: Problem, devices: Sequence[int]) -> None:
        arrays, cluster, n = problem.arrays, problem.cluster, len(problem.cluster.devices)
        group = arrays.op_group.tolist()
        self._problem, self._n = problem, n
        self.home = [0] * arrays.groups
        for op, device in enumerate(devices):
            self.home[group[op]] = device
        work = np.zeros((len(problem.durations), arrays.groups), np.int64)
        for row, times in zip(work, problem.durations, strict=True):
            np.add.at(row, arrays.op_group, times)
        self._work = [work[kind].tolist() for kind in problem.device_class]
        sizes = [0] * arrays.tensors if cluster.ports == "none" else arrays.nbytes.tolist()
        self._sent = {
            link: [LIMIT if link is None else link.transfer_ns(nbytes) for nbytes in sizes]
            for link in dict.fromkeys(link for row in cluster.links for link in row)
        }
        # Groups of every tensor, its producer's first; the tensors of every group that others have.
        self._ends = [[group[op]] for op in arrays.producer.tolist()]
        tensors = arrays.per_consumer(np.arange(arrays.tensors)).tolist()
        for tensor, op in zip(tensors, arrays.consumers.tolist(), strict=True):
            self._ends[tensor].append(group[op])
        self._ends = [list(dict.fromkeys(row)) for row in self._ends]
        self.shared = [tensor for tensor, row in enumerate(self._ends) if len(row) > 1]
        self._tensors: list[list[int]] = [[] for _ in self.home]
        for tensor in self.shared:
            for member in self._ends[tensor]:
                self._tensors[member].append(tensor)
        self._arriving = n if cluster.ports == "shared" else 2 * n
        self.loads = [0] * (3 * n)
        self._bytes, self._room = arrays.group_persistent.tolist(), list(problem.pool_memory)
        for member, device in enumerate(self.home):
            self.loads[device] += self._work[device][member]
            self._room[problem.device_pool[device]] -= self._bytes[member]
        self._transfer(self.shared, 1)
        self._scale = max(self.loads) or 1

    def drawn(self, draw: random.Random) -> tuple[list[int], int]:
        """Groups to move, and their device; it may be there already."""
        kind = draw.random()
        if kind < _TENSORS:
            members = self._ends[draw.choice(self.shared)]
            near = members if draw.random() < 0.5 else []
        else:
            members = [draw.randrange(len(self.home))]
            tensors = self._tensors[members[0]] if kind < 1 - _ANYWHERE else []
            near = self._ends[draw.choice(tensors)] if tensors else []
        device = self.home[draw.choice(near)] if near else draw.randrange(self._n)
        return [member for member in members if self.home[member] != device], device

    def may(self, members: Sequence[int], device: int) -> bool:
        """True if the device is allowed to these groups and has room for their state."""
        allowed, needed = self._problem.allowed[device], sum(self._bytes[m] for m in members)
        room = self._room[self._problem.device_pool[device]]
        return (not needed or needed <= room) and all(allowed[member] for member in members)

    def move(self, members: Sequence[int], devices: Sequence[int]) -> None:
        """Move groups."""
        pool = self._problem.device_pool
        touched = {tensor for member in members for tensor in self._tensors[member]}
        self._transfer(touched, -1)
        for member, device in zip(members, devices, strict=True):
            old = self.home[member]
            self.loads[old] -= self._work[old][member]
            self.loads[device] += self._work[device][member]
            self._room[pool[old]] += self._bytes[member]
            self._room[pool[device]] -= self._bytes[member]
            self.home[member] = device
        self._transfer(touched, 1)

    def _transfer(self, tensors: Sequence[int] | set[int], sign: int) -> None:
        """Add the transfers of tensors to the loads, or take them off."""
        home, loads, links = self.home, self.loads, self._problem.cluster.links
        pool = self._problem.device_pool
        for tensor in tensors:
            first, *others = (home[member] for member in self._ends[tensor])
            there = {pool[device]: device for device in reversed(others)}  # one copy for a pool
            there.pop(pool[first], None)
            for device in there.values():
                link = links[first][device]
                took = sign * self._sent[link][tensor]
                loads[device] += sign * (link.overhead_ns if link else 0)
                loads[self._n + first] += took
                loads[self._arriving + device] += took

    def measure(self) -> float:
        """The sum of the eighth powers, as parts of the highest load at first."""
        total = 0.0
        for load in self.loads:  # multiplied, since powers differ between machines
            part = load / self._scale
            part *= part
            part *= part
            total += part * part
        return total
