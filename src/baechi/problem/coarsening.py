"""Coarsening: fusion of ops that no good placement separates, and expansion of placements.

A *part* is a set of ops that become one op of a coarse graph. Every op begins as its own part; a
round (`csrc/coarsening/coarsening.cc`) proposes sets of parts and splits those that form a cycle;
rounds end when nothing changes. With G(u) the group of part u, u and v are joined by these rules:

- chain: all successors of u outside G(u) are in G(v), all predecessors of v outside G(v) are in
  G(u), and u -> v is the first such edge. So a forward op and the next one are fused although both
  feed their own backward ops.
- mates: v is in G(u) and u's only successor. They share a device, and no other part waits for u.
- idle: u takes no time and has no persistent bytes; v is its only neighbor on one side, on the side
  where more bytes flow if both have only one.
- cheap: v is u's only neighbor on one side, and u takes no longer than the fastest link needs for
  the tensors between them. The total time of what v absorbs in this way is bounded likewise.

Joining parts joins their groups, so every part of the group with fewer parts must have a neighbor
in the other; no group becomes larger than a share of the largest memory; and groups with different
allowed devices (colors) are not joined.

Source: Baechi (SoCC 2020; arXiv 2301.08695), sections on co-placement and operator fusion.
Differences from the paper: fusion never makes a cycle, group size is limited, and branches survive.
Complexity: O((ops + tensors) log ops) per round, and a handful of rounds.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from baechi import _core
from baechi.errors import InputError
from baechi.problem.problem_arrays import Problem
from baechi.records.graph import Op, OpGraph, Tensor
from baechi.records.placement import Placement
from baechi.validation import INT64_MAX

# The largest memory holds this many of the largest fused groups: then first fit wastes at most
# about an eighth of a device, and a graph that fills the devices has several groups for each.
_GROUPS_PER_DEVICE: Final = 8


@final
@dataclass(frozen=True, eq=False)
class Coarse:
    """A coarse graph and the fine graph that it represents.

    Attributes:
        problem: The fine graph, on its cluster.
        part_of: The coarse op of every fine op.
        group_of: The first op of the group of every coarse op.
    """

    problem: Problem
    part_of: NDArray[np.int32]
    group_of: NDArray[np.int32]

    @cached_property
    def members(self) -> tuple[tuple[int, ...], ...]:
        """The fine ops of every coarse op, in topological order."""
        ops = self._sorted.tolist()
        bounds = [*self._begin.tolist(), len(ops)]
        return tuple(tuple(ops[i:j]) for i, j in pairwise(bounds))

    @cached_property
    def _sorted(self) -> NDArray[np.int64]:
        """The fine ops, by part and then by index."""
        return np.argsort(self.part_of, kind="stable")

    @cached_property
    def _begin(self) -> NDArray[np.int64]:
        """Begin of each part in `_sorted`."""
        return np.searchsorted(self.part_of[self._sorted], np.arange(len(self.group_of)))

    def _sums(self, values: NDArray[np.int64]) -> list[int]:
        """The sum of each part over its ops."""
        rows = values[self._sorted].astype(object)
        # Only times of a kind that no device has, or on faster devices, can pass 64 bits.
        return [min(total, INT64_MAX) for total in np.add.reduceat(rows, self._begin).tolist()]

    @cached_property
    def graph(self) -> OpGraph:
        """The coarse graph.

        A coarse op takes the sum of its members' times and persistent bytes. Its workspace is the
        peak, while its members run in order, of their workspaces and of the tensors that never
        leave it; all other tensors are the coarse graph's. It is named after its first member.
        """
        fine = self.problem.graph
        workspace, tensors, begin, consumers = _core.coarse_arrays(
            self.problem.core, self.part_of, len(self.group_of)
        )
        names = [fine.ops[op].name for op in self._sorted[self._begin].tolist()]
        ops = map(
            Op,
            names,
            self._sums(fine.arrays.times),
            self._sums(fine.arrays.persistent),
            workspace.tolist(),
            self._group_names(),
        )
        rows, bounds = consumers.tolist(), begin.tolist()
        part_of = self.part_of.tolist()
        coarse_tensors = []
        for place, index in enumerate(tensors.tolist()):
            tensor = fine.tensors[index]
            row = tuple(rows[bounds[place] : bounds[place + 1]])
            coarse_tensors.append(Tensor(part_of[tensor.producer], row, tensor.nbytes, tensor.kept))
        times = {kind: tuple(self._sums(row)) for kind, row in fine.arrays.kind_times.items()}
        return OpGraph(tuple(ops), tuple(coarse_tensors), times)

    @cached_property
    def lumped(self) -> Problem:
        """The coarse graph on the same cluster; a group may go where those in it may."""
        fine = self.problem
        first = self._sorted[self._begin[np.unique(self.group_of)]]
        allowed = fine.allowed[:, fine.graph.arrays.op_group[first]]
        return Problem(self.graph, fine.cluster, fine.constraints, allowed)

    def _group_names(self) -> list[str | None]:
        """The first fine group's name in every part's group; `None` where a part is alone."""
        groups, ops = self.group_of.tolist(), self.problem.graph.ops
        sizes = Counter(groups)
        names: dict[int, str | None] = {}
        for group, row in zip(groups, self.members, strict=True):
            if sizes[group] > 1 and names.get(group) is None:
                names[group] = next(filter(None, (ops[op].group for op in row)), None)
        return [names.get(group) for group in groups]

    def expand(self, placement: Placement) -> Placement:
        """The same placement of the fine graph; members launch one after the other.

        Raises:
            InputError: The placement is for another graph.
        """
        if placement.graph_digest != self.graph.digest:
            raise InputError(
                f"the placement is for graph {placement.graph_digest[:12]}..., not for this coarse "
                f"graph {self.graph.digest[:12]}...; expand it with what it was coarsened with."
            )
        devices = np.array(placement.devices, np.int32)[self.part_of].tolist()
        order = tuple(op for part in placement.order for op in self.members[part])
        digest = self.problem.graph.digest
        return Placement(digest, tuple(devices), order, placement.placer, placement.stats)


def coarsen(problem: Problem) -> Coarse:
    """The graph with its chains, idle ops and cheap ops fused.

    The cluster's links decide what is cheap, and its memory limits the groups.
    """
    arrays = problem.graph.arrays
    idle = (problem.durations.max(axis=0) == 0) & (arrays.persistent == 0)
    pools = np.array(problem.device_pool)[problem.allowed.any(axis=1)]
    largest = max((problem.pool_memory[pool] for pool in pools.tolist()), default=0)
    limit = largest // _GROUPS_PER_DEVICE
    parts = _core.coarsen(problem.core, idle.astype(np.uint8), problem.group_colors, limit)
    return Coarse(problem, *parts)
