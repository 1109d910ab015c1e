"""Balanced minimum cuts by METIS, followed by list scheduling.

The vertices are groups, weighted by the bytes that they hold (`live_loads`) and by their time; an
edge joins the producer of a tensor with each reader, weighted by the mean transfer time over the
number of readers (`_Net`). The graph is cut into k parts, from the fewest devices that hold it up
to all of them, balanced by bytes, by time, or by both, within several tolerances (`_partitions`).
If a device cannot hold its part, groups move away (`_Repair`). The exact clock evaluates all of
them (`shortest_assignment`).

Source: Karypis and Kumar, "Multilevel k-way partitioning scheme for irregular graphs" (JPDC 48(1),
1998), by its authors' library. Complexity: some tens of partitions, each O(tensors), and as many
simulations.
"""

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Final, final

import numpy as np
from numpy.typing import NDArray

from baechi import _core
from baechi.errors import InputError
from baechi.placers.placer import Placer, device_range, live_loads, shortest_assignment
from baechi.problem.problem_arrays import Problem
from baechi.records.placement import Placement

# Tolerances: the excess of a part over its share, in thousandths.
_TOLERANCES: Final = (30, 150, 500)
# With fewer groups per part than this METIS leaves parts empty, so it is not used.
_GROUPS_PER_PART: Final = 4
# Total of all weights of one kind: METIS adds them up in 32 bits.
_TOTAL: Final = 2**29
# Rounds in which heavy vertices are made lighter: each makes the total less, too.
_CAPS: Final = 32
# Maximum number of part counts to try.
_COUNTS: Final = 4
# Maximum number of moves to repair a partition: each scans all groups.
_MOVES: Final = 256


@final
@dataclass(frozen=True, slots=True)
class Metis(Placer):
    """The shortest step of several balanced minimum cuts.

    Attributes:
        seed: Of METIS's random choices; equal seeds give equal placements.
    """

    name: ClassVar[str] = "metis"
    seed: int = 0

    @staticmethod
    def available() -> bool:
        """True if pymetis is installed."""
        return importlib.util.find_spec("pymetis") is not None

    def place(self, problem: Problem) -> Placement | None:
        """A placement by the rule of the module.

        Raises:
            InputError: pymetis is not installed.
        """
        if not self.available():
            raise InputError(
                "placer 'metis' needs pymetis, which is not installed here: "
                "pip install 'baechi[metis]'. Placer 'contiguous' looks for small cuts without it."
            )
        net = _Net(problem)
        candidates: list[tuple[int, ...]] = []
        for parts, devices in _partitions(problem, net, self.seed):
            assignment = np.array(devices, np.int64)[parts]
            repaired = _Repair(problem, net, assignment, devices).repaired()
            candidates += [] if repaired is None else [repaired]
            candidates.append(tuple(assignment.tolist()))
        order = range(problem.arrays.ops)
        return shortest_assignment(problem, dict.fromkeys(candidates, order), self.name)


@final
class _Net:
    """The groups as a weighted graph; every edge is there in both directions, by source.

    `loads` has a row per moment; `times` are those on the fastest device.
    """

    def __init__(self, problem: Problem) -> None:
        arrays, costs = problem.arrays, np.array(_core.mean_transfers(problem.core), np.int64)
        groups = max(1, arrays.groups)
        homes = arrays.op_group[arrays.producer].astype(np.int64)
        tensors = arrays.per_consumer(np.arange(arrays.tensors))
        readers = arrays.op_group[arrays.consumers]
        away = readers != homes[tensors]
        # Each pair of a tensor and another group that reads it, once.
        tensors, readers = divmod(np.unique(tensors[away] * groups + readers[away]), groups)
        homes, shares = homes[tensors], costs[tensors] // np.bincount(tensors)[tensors]
        both = np.concatenate([homes * groups + readers, readers * groups + homes])
        edges, edge_of = np.unique(both, return_inverse=True)
        self.src, self.dst = divmod(edges, groups)
        self.weight = np.zeros(len(edges), np.int64)
        np.add.at(self.weight, edge_of, np.tile(shares, 2))
        self.loads = live_loads(problem, range(arrays.ops))
        self.times = np.zeros(arrays.groups, np.int64)
        np.add.at(self.times, arrays.op_group, problem.durations.min(axis=0))


def _partitions(
    problem: Problem, net: _Net, seed: int
) -> Iterator[tuple[NDArray[np.int64], tuple[int, ...]]]:
    """The part of every group, and the device of every part."""
    import pymetis

    groups = len(problem.group_ops)
    adjacency = pymetis.CSRAdjacency(
        np.searchsorted(net.src, np.arange(groups + 1)).tolist(), net.dst.tolist()
    )
    eweights = _scaled([net.weight], 1.0).tolist()
    for devices, shares, weights in _tasks(problem, net):
        if len(devices) == 1:
            yield np.zeros(groups, np.int64), devices
            continue
        if min(shares or [1.0]) * groups < 1:
            continue  # a part of less than one group: METIS leaves it empty, and says so on stdout
        for tolerance in _TOLERANCES:
            partition = pymetis.part_graph(
                len(devices),
                adjacency,
                vweights=_scaled(weights, min(shares or [1 / len(devices)])).tolist(),
                eweights=eweights,
                tpwgts=shares,
                options=pymetis.Options(seed=seed, ufactor=tolerance),
            )
            yield np.array(partition.vertex_part, np.int64), devices


def _tasks(
    problem: Problem, net: _Net
) -> Iterator[tuple[tuple[int, ...], list[float] | None, list[NDArray[np.int64]]]]:
    """The devices to use, their shares, `None` if equal, and the weights to balance over them."""
    held = net.loads.sum(axis=0)
    memory, times = problem.device_share, [max(1, work) for work in problem.device_work]
    ample = not held.any()
    ranked = sorted(
        range(len(memory)),
        key=lambda d: (times[d], -memory[d], d) if ample else (-memory[d], times[d], d),
    )
    need = int(net.loads.sum(axis=1).max(initial=0))
    fewest, most = device_range(problem, [memory[device] for device in ranked], need)
    most = min(most, max(1, len(held) // _GROUPS_PER_PART))
    fewest = min(fewest, most)
    for count in sorted({round(k) for k in np.linspace(fewest, most, _COUNTS)} | {fewest}):
        devices = tuple(ranked[:count])
        sizes, speeds = [max(1, memory[d]) for d in devices], [1 / times[d] for d in devices]
        equal = len(set(sizes)) == len(set(speeds)) == 1
        by_bytes = None if equal else [size / sum(sizes) for size in sizes]
        by_time = None if equal else [speed / sum(speeds) for speed in speeds]
        yield devices, by_time, [net.times]
        if not ample:
            yield devices, by_bytes, [held]
            # pymetis takes one share per part, so two weights only where shares are equal.
            if equal:
                yield devices, None, [held, net.times]


def _scaled(weights: list[NDArray[np.int64]], most: float) -> NDArray[np.int64]:
    """The weights in proportion, at least 1 and at most about `_TOTAL` together, vertex by vertex.

    None is more than `most` of all, the smallest part: METIS leaves others empty to balance it.
    """
    rows = []
    for row in weights:
        shares = row / max(1, sum(row.tolist()))
        for _ in range(_CAPS):
            shares = np.minimum(shares, most * shares.sum())
        rows.append(1 + (shares * _TOTAL).astype(np.int64))
    return np.array(rows, np.int64).T.reshape(-1)


@final
class _Repair:
    """An assignment whose groups move until every pool holds its loads."""

    def __init__(
        self, problem: Problem, net: _Net, assignment: NDArray[np.int64], devices: tuple[int, ...]
    ) -> None:
        self._net = net
        self._device = assignment.copy()
        self._pool = np.array(problem.device_pool, np.int64)
        self._memory = np.array(problem.pool_memory, np.int64)
        used = np.isin(np.arange(len(self._pool)), devices)
        self._allowed = problem.allowed & used[:, None]
        # Per device and group the weight of the edges between them, and per pool its loads.
        self._ties = np.zeros(self._allowed.shape, np.int64)
        np.add.at(self._ties, (assignment[net.src], net.dst), net.weight)
        self._held = np.zeros((len(self._memory), len(net.loads)), np.int64)
        np.add.at(self._held, self._pool[assignment], net.loads.T)

    def repaired(self) -> tuple[int, ...] | None:
        """The devices of the groups after all moves; `None` if they do not suffice."""
        groups = np.arange(len(self._device))
        for group in np.flatnonzero(~self._allowed[self._device, groups]).tolist():
            options = np.flatnonzero(self._allowed[:, group])
            if not len(options):
                return None
            self._move(group, int(options[self._ties[options, group].argmax()]))
        for _ in range(_MOVES):
            over = self._held - self._memory[:, None]
            if (over <= 0).all():
                return tuple(self._device.tolist())
            pool, moment = divmod(int(over.argmax()), over.shape[1])
            move = self._cheapest(pool, moment)
            if move is None:
                return None
            self._move(*move)
        return None

    def _cheapest(self, pool: int, moment: int) -> tuple[int, int] | None:
        """The group of the pool and its new device that add the least cut weight per byte."""
        loads = self._net.loads
        held = (self._pool[self._device] == pool) & (loads[moment] > 0)
        groups = np.flatnonzero(held)
        lost = self._ties[self._device[groups], groups] - self._ties[:, groups]
        open_ = self._allowed[:, groups] & (self._pool != pool)[:, None]
        price = np.where(open_, lost / loads[moment][groups], np.inf)
        for at in np.argsort(price, axis=None, kind="stable").tolist():
            device, column = divmod(at, len(groups))
            if price[device, column] == np.inf:
                break
            there = self._pool[device]
            if (self._held[there] + loads[:, groups[column]] <= self._memory[there]).all():
                return int(groups[column]), device
        return None

    def _move(self, group: int, to: int) -> None:
        net, home = self._net, self._device[group]
        self._held[self._pool[home]] -= net.loads[:, group]
        self._held[self._pool[to]] += net.loads[:, group]
        row = slice(*np.searchsorted(net.src, (group, group + 1)).tolist())
        self._ties[home, net.dst[row]] -= net.weight[row]
        self._ties[to, net.dst[row]] += net.weight[row]
        self._device[group] = to
