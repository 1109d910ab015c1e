"""Outputs that share memory, as autograd has to know them.

    y, y[0]           a view of another output
    x.t(), w[:2]      a view of the caller's tensor, or of a parameter
    t[:3], t[1:]      of what stays inside: here autograd shall refuse writes
    t[:3], t[3:]      nothing in common

Each has a gradient of its own. But who writes into one of them changes the values of the others,
and how they came about: from then on they are views of what was written. Autograd sees to that if
it knows them as views; as a step makes them, they are strangers to each other.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import final

import torch
from torch import fx

from baechi.tracing.lowering import TracedModule
from baechi.tracing.partition import attribute


@final
@dataclass(frozen=True)
class Families:
    """Which outputs may share memory, as their trace has it.

    Attributes:
        of: For each node that the caller gets, the family of each of its tensors; -1 for one that
            is alone.
        inputs: The families that have the memory of one of the caller's tensors, and which.
        state: Those that have the memory of a parameter, and that.
    """

    of: Mapping[fx.Node, tuple[int, ...]]
    inputs: Mapping[int, int]
    state: Mapping[int, torch.Tensor]

    @classmethod
    def among(cls, module: TracedModule, results: Sequence[fx.Node]) -> "Families":
        """Of what the caller gets of a traced model."""
        facts, graph = module.facts.nodes, module.graph_module.graph
        storages = {node: tuple(v.storage for v in facts[node].values) for node in results}
        # What forward writes has another history since: it is no longer what these are views of.
        written = {storage for fact in facts.values() for storage in fact.writes}
        inputs = {
            value.storage: index
            for index, node in enumerate(graph.find_nodes(op="placeholder"))
            for value in facts[node].values
            if value.storage not in written
        }
        state = {
            value.storage: attribute(module.graph_module, str(node.target))
            for node in graph.find_nodes(op="get_attr")
            for value in facts[node].values
            if value.storage not in written
        }
        count = Counter(storage for row in storages.values() for storage in row)
        shared = {s for s, n in count.items() if n > 1 or s in inputs or s in state}
        of = {
            node: tuple(storage if storage in shared else -1 for storage in row)
            for node, row in storages.items()
        }
        return cls(of, inputs, state)

    def given(self, tensors: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """What the outputs of some families are views of, in a call with these tensors."""
        return {**{f: tensors[index] for f, index in self.inputs.items()}, **self.state}


def bases_of(
    values: Sequence[torch.Tensor], families: Sequence[int], given: Mapping[int, torch.Tensor]
) -> list[int | torch.Tensor | None]:
    """What each of a step's outputs is a view of.

    Args:
        values: The outputs.
        families: Of each; -1 for one that is alone.
        given: What the outputs of some families are views of.

    Returns:
        For each the number of another output, or a tensor, that it is a view of; None where it is
        of none; its own number where it must not be written.
    """
    rows: list[int | torch.Tensor | None] = [None] * len(values)
    members: dict[int, list[int]] = defaultdict(list)
    for number, family in enumerate(families):
        value = values[number]
        if family >= 0 and value.layout is torch.strided and value.numel():
            members[family].append(number)
    for family, numbers in members.items():
        base = given.get(family)
        if base is not None and base.requires_grad:
            there = [n for n in numbers if _share(base, values[n])]
            if all(_alike(base, values[n]) for n in there):
                rows = [base if n in there else row for n, row in enumerate(rows)]
                continue
        whole = next(
            (n for n in numbers if all(_covers(values[n], values[m]) for m in numbers)), -1
        )
        for n in numbers:
            if whole >= 0:
                rows[n] = None if n == whole else whole
            elif not all(_apart(values[n], values[m]) for m in numbers if m != n):
                rows[n] = n
    return rows


def _share(one: torch.Tensor, two: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == two.untyped_storage().data_ptr()


def _alike(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether what is stored is read in one way."""
    return (one.dtype, one.is_conj(), one.is_neg()) == (two.dtype, two.is_conj(), two.is_neg())


def _covers(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether all that the second has in memory can be seen as a view of the first."""
    if not (_share(one, two) and _alike(one, two) and _is_dense(one)):
        return False
    (first, end), (start, stop) = _span(one), _span(two)
    return first <= start and stop <= end


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """From its first element to behind its last."""
    first = int(tensor.storage_offset())
    return first, first + 1 + sum((n - 1) * step for n, step in _steps(tensor))


def _steps(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """(size, stride) of the dimensions along which memory changes."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return [(n, step) for n, step in pairs if n > 1 and step]


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether it has each element from its first to its last, and each once."""
    expected = 1
    for step, n in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if n > 1 and step != expected:
            return False
        expected *= n
    return True


def _apart(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether they surely have no element in common: as boxes of one grid, as slices are."""
    if not _share(one, two):
        return True
    sides = _steps(one), _steps(two)
    if one.dtype != two.dtype or any(
        len(dict(s[::-1] for s in side)) < len(side) for side in sides
    ):
        return False
    strides = sorted({1, *(step for side in sides for _, step in side)}, reverse=True)
    origin = min(one.storage_offset(), two.storage_offset())
    boxes = []
    for tensor, side in zip((one, two), sides, strict=True):
        sizes = {step: n for n, step in side}
        offset, box = int(tensor.storage_offset() - origin), []
        for stride in strides:
            at, offset = divmod(offset, stride)
            box.append((at, at + sizes.get(stride, 1)))
        if any(
            e * inner > outer
            for (outer, inner), (_, e) in zip(pairwise(strides), box[1:], strict=True)
        ):
            return False  # a row that goes on in the next
        boxes.append(box)
    return any(a[1] <= b[0] or b[1] <= a[0] for a, b in zip(*boxes, strict=True))
