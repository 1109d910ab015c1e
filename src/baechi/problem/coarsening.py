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

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, repeat
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from baechi import _core
from baechi.errors import InputError
from baechi.problem.problem_arrays import LIMIT, ArrayGraph, Problem, places
from baechi.records.graph import Op, OpGraph, Tensor
from baechi.records.graph_arrays import GraphArrays
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
        return places(self.part_of)

    def _sums(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """The sum of each part over its ops."""
        # Only times of a kind that no device has, or on faster devices, can pass 64 bits.
        kind = np.int64 if values.sum(dtype=np.float64) < LIMIT else np.object_
        sums = np.zeros(len(self.group_of), kind)
        np.add.at(sums, self.part_of, values.astype(kind))
        return np.array(np.minimum(sums, INT64_MAX), np.int64)

    @cached_property
    def arrays(self) -> GraphArrays:
        """The coarse graph.

        A coarse op takes the sum of its members' times, launches and persistent bytes. Its
        workspace is the peak, while its members run in order, of their workspaces and of the
        tensors that never leave it; all other tensors are the coarse graph's.
        """
        fine, part_of = self.problem.arrays, self.part_of
        workspace, tensors, begin, consumers = self._contracted
        return GraphArrays(
            times=self._sums(fine.times),
            kind_times={kind: self._sums(row) for kind, row in fine.kind_times.items()},
            persistent=self._sums(fine.persistent),
            workspace=workspace,
            launch=self._sums(fine.launch),
            op_group=np.unique(self.group_of, return_inverse=True)[1].astype(np.int32),
            producer=part_of[fine.producer[tensors]],
            nbytes=fine.nbytes[tensors],
            kept=fine.kept[tensors],
            consumer_begin=begin,
            consumers=consumers,
        )

    @cached_property
    def _contracted(self) -> tuple[NDArray[Any], ...]:
        """Workspace of the parts; the fine tensors that leave theirs, and the parts that read."""
        return _core.coarse_arrays(self.problem.core, self.part_of, len(self.group_of))

    @property
    def tensors(self) -> NDArray[np.int32]:
        """The fine tensor of every coarse tensor."""
        return self._contracted[1]

    @cached_property
    def digest(self) -> str:
        """The sha256 of the fine graph's digest and of the parts."""
        parts = self.part_of.tobytes() + self.group_of.tobytes()
        return hashlib.sha256(self.problem.source.digest.encode() + parts).hexdigest()

    @cached_property
    def graph(self) -> OpGraph:
        """The coarse graph as values; a coarse op is named after its first member."""
        names = [self.problem.graph.ops[row[0]].name for row in self.members]
        return graph_of(self.arrays, names, self._group_names())

    def lumped(self) -> Problem:
        """The coarse graph on the same cluster; a group may go where those in it may."""
        fine = self.problem
        _, first = np.unique(self.group_of[self.part_of], return_index=True)
        allowed = fine.allowed[:, fine.arrays.op_group[first]]
        source = ArrayGraph(self.arrays, self.digest, lambda: self.graph)
        return Problem(source, fine.cluster, fine.constraints, allowed)

    def _group_names(self) -> list[str | None]:
        """The first fine group's name in every part's group; `None` where a part is alone."""
        groups, ops = self.group_of.tolist(), self.problem.graph.ops
        sizes = Counter(groups)
        names: dict[int, str | None] = {}
        for group, row in zip(groups, self.members, strict=True):
            if sizes[group] > 1 and names.get(group) is None:
                names[group] = next(filter(None, (ops[op].group for op in row)), None)
        return [names.get(group) for group in groups]

    def expand(self, placement: Placement) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Devices and order of the fine ops; members launch one after the other.

        Raises:
            InputError: The placement is for another graph.
        """
        known = placement.graph_digest
        # Placers that ask for `graph` give its digest.
        if known != self.digest and known != self.graph.digest:  # noqa: PLR1714 (the last is slow)
            raise InputError(
                f"the placement is for graph {known[:12]}..., not for this coarse "
                f"graph {self.graph.digest[:12]}...; expand it with what it was coarsened with."
            )
        turn = np.empty(len(self.group_of), np.int32)
        turn[list(placement.order)] = np.arange(len(turn))
        devices = np.array(placement.devices, np.int32)[self.part_of]
        return devices, np.argsort(turn[self.part_of], kind="stable").astype(np.int32)


def coarsen(problem: Problem) -> Coarse:
    """The graph with its chains, idle ops and cheap ops fused.

    The cluster's links decide what is cheap, and its memory limits the groups.
    """
    arrays = problem.arrays
    idle = (problem.durations.max(axis=0) == 0) & (arrays.persistent == 0)
    limit = int(problem.largest_memory.max(initial=0)) // _GROUPS_PER_DEVICE
    parts = _core.coarsen(problem.core, idle.astype(np.uint8), problem.group_colors, limit)
    return Coarse(problem, *parts)


def graph_of(arrays: GraphArrays, names: Sequence[str], groups: Sequence[str | None]) -> OpGraph:
    """The graph of these columns, with a name and a group for every op."""
    consumers, bounds = arrays.consumers.tolist(), arrays.consumer_begin.tolist()
    ops = map(
        Op,
        names,
        arrays.times.tolist(),
        arrays.persistent.tolist(),
        np.maximum(arrays.workspace, 0).tolist(),
        groups,
        repeat(0),
        np.maximum(-arrays.workspace, 0).tolist(),
        repeat("forward"),
        repeat(()),
        arrays.launch.tolist(),
    )
    tensors = map(
        Tensor,
        arrays.producer.tolist(),
        [tuple(consumers[i:j]) for i, j in pairwise(bounds)],
        arrays.nbytes.tolist(),
        arrays.kept.astype(np.bool_).tolist(),
    )
    times = {kind: tuple(row.tolist()) for kind, row in arrays.kind_times.items()}
    return OpGraph(tuple(ops), tuple(tensors), times)
