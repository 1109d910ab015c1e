"""The structure of one step: its ops with their phases and the tensors between them; no costs.

    forward ops   0 ... n-1
    loss          n                  where the step trains; the caller computes it
    backward ops  n+1 ...            each of one forward op
    recompute ops among these        each runs the forward ops of a checkpointed unit again

A traced model has one (`Traced.structure`), and an `OpGraph` is one with costs. Programs are made
of the structure alone, so that they do not depend on costs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol, TypeAlias, final

from baechi.validation import FrozenDict

Phase: TypeAlias = Literal["forward", "loss", "backward", "recompute"]


class StepOp(Protocol):
    """An op of a step, with or without costs."""

    @property
    def name(self) -> str:
        """Unique in its step."""

    @property
    def group(self) -> str | None:
        """Ops of one group share a device; `None` is alone."""

    @property
    def phase(self) -> Phase:
        """Its part of the step."""

    @property
    def forward(self) -> tuple[int, ...]:
        """The forward op that a backward op belongs to; those that a recompute op runs again."""


class StepTensor(Protocol):
    """A tensor of a step, with or without a known size."""

    @property
    def producer(self) -> int:
        """Op index."""

    @property
    def consumers(self) -> tuple[int, ...]:
        """Op indices, ascending."""

    @property
    def kept(self) -> bool:
        """True if it is returned to the caller."""


@final
@dataclass(frozen=True, slots=True)
class PlainOp:
    """An op without costs; see `StepOp`."""

    name: str
    group: str | None = None
    phase: Phase = "forward"
    forward: tuple[int, ...] = ()


@final
@dataclass(frozen=True, slots=True)
class PlainTensor:
    """A tensor without a size; see `StepTensor`."""

    producer: int
    consumers: tuple[int, ...]
    kept: bool = False


@dataclass(frozen=True)
class StepStructure:
    """The ops of a step and the tensors between them; index order is a topological order.

    Attributes:
        ops: The ops. `op` means an index into them everywhere.
        tensors: The tensors. `tensor` means an index into them everywhere.
    """

    ops: Sequence[StepOp]
    tensors: Sequence[StepTensor]

    @cached_property
    def n_forward(self) -> int:
        """Number of forward ops; in a training step also the index of the loss."""
        return next((i for i, op in enumerate(self.ops) if op.phase != "forward"), len(self.ops))

    @property
    def is_training(self) -> bool:
        """True if it has a loss and a backward."""
        return self.n_forward < len(self.ops)

    @cached_property
    def twins(self) -> tuple[int, ...]:
        """The backward op of every forward op, or -1."""
        twins = [-1] * self.n_forward
        for index in range(self.n_forward, len(self.ops)):
            if self.ops[index].phase == "backward":
                twins[self.ops[index].forward[0]] = index
        return tuple(twins)

    @cached_property
    def units(self) -> Mapping[int, tuple[int, ...]]:
        """The recompute ops, and the forward ops that each of them runs again."""
        later = range(self.n_forward, len(self.ops))
        rows = {op: self.ops[op].forward for op in later if self.ops[op].phase == "recompute"}
        return FrozenDict(rows)

    @cached_property
    def op_inputs(self) -> tuple[tuple[int, ...], ...]:
        """The tensors that each op consumes, ascending."""
        rows: list[list[int]] = [[] for _ in self.ops]
        for index, tensor in enumerate(self.tensors):
            for consumer in tensor.consumers:
                rows[consumer].append(index)
        return tuple(map(tuple, rows))

    @cached_property
    def op_outputs(self) -> tuple[tuple[int, ...], ...]:
        """The tensors that each op produces, ascending."""
        rows: list[list[int]] = [[] for _ in self.ops]
        for index, tensor in enumerate(self.tensors):
            rows[tensor.producer].append(index)
        return tuple(map(tuple, rows))

    @cached_property
    def groups(self) -> Mapping[str, tuple[int, ...]]:
        """Each group's ops, in the order of their first op."""
        rows: dict[str, list[int]] = {}
        for index, op in enumerate(self.ops):
            if op.group is not None:
                rows.setdefault(op.group, []).append(index)
        return FrozenDict({group: tuple(members) for group, members in rows.items()})
