"""The costs of one step of a traced model: times, persistent and scratch memory of its operators.

Source: Baechi (arXiv 2301.08695, section 4) simulates forward times only; here the backward and its
gradients have their own.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, reduce
from operator import and_, attrgetter
from typing import Any

from baechi.records.graph import Op, StepStructure, Tensor
from baechi.records.op_costs import OpCost, Profile
from baechi.records.optimizer_state import TrainedParameter, optimizer_state_bytes
from baechi.traced.checkpoint_units import workspace_bytes
from baechi.traced.operators import TracedOp, TracedOperators
from baechi.traced.step_structure import MOST_SCALAR_BYTES, viewed_whole


def merged_costs(profiles: Sequence[Profile]) -> list[OpCost]:
    """The first profile's costs, with the largest sizes of all: any device may be chosen."""
    return [
        replace(
            costs[0],
            workspace_bytes=max(cost.workspace_bytes for cost in costs),
            backward_workspace_bytes=max(cost.backward_workspace_bytes or 0 for cost in costs),
            backward_reused_bytes=min(cost.backward_reused_bytes for cost in costs),
            backward_beside=_least_beside(costs),
            inference_workspace_bytes=max(map(_inference_workspace, costs)),
            saved_bytes=max(cost.saved_bytes for cost in costs),
            forward_launch_ns=max(cost.forward_launch_ns for cost in costs),
            backward_launch_ns=max(cost.backward_launch_ns for cost in costs),
        )
        for costs in zip(*(profile.costs for profile in profiles), strict=True)
    ]


def _least_beside(costs: Sequence[OpCost]) -> tuple[tuple[int, ...], ...]:
    """What all profiles say is held beside others."""
    rows = (Counter({row[0]: row[1] for row in cost.backward_beside}) for cost in costs)
    return tuple(sorted(reduce(and_, rows).items()))


def _inference_workspace(cost: OpCost) -> int:
    """Scratch memory of a forward without gradients.

    Where unknown, tensors that autograd would save may still be made, and freed soon.
    """
    measured = cost.inference_workspace_bytes
    return cost.workspace_bytes + cost.saved_bytes if measured is None else measured


def op_times(
    structure: StepStructure, costs: Sequence[OpCost], what: str = "ns"
) -> tuple[int, ...]:
    """The time of every op of a structure, or of its launch, from the costs of the traced ones."""
    forward, backward = attrgetter(f"forward_{what}"), attrgetter(f"backward_{what}")
    without_gradients = what == "ns" and not structure.is_training

    def time_ns(index: int, op: Op) -> int:
        if op.phase == "backward":
            return int(backward(costs[op.forward[0]]))
        if without_gradients and (ns := costs[index].inference_ns) is not None:
            return ns
        again = (index,) if op.phase == "forward" else op.forward  # a loss takes none
        return sum(forward(costs[own]) for own in again)

    return tuple(time_ns(index, op) for index, op in enumerate(structure.ops))


def costed_ops(
    traced: TracedOperators,
    structure: StepStructure,
    tensors: Sequence[Tensor],
    costs: Sequence[OpCost],
    optimizer: str | None,
) -> Iterator[Op]:
    """The ops of a structure with their costs; `tensors` are the structure's, with bytes."""
    memory = _StepMemory(traced, structure, tensors, costs, optimizer)
    sizes = {
        "forward": memory.of_forward,
        "loss": memory.of_loss,
        "backward": memory.of_backward,
        "recompute": memory.of_recompute,
    }
    times = zip(op_times(structure, costs), op_times(structure, costs, "launch_ns"), strict=True)
    for index, (row, (time_ns, launch_ns)) in enumerate(zip(structure.ops, times, strict=True)):
        yield replace(row, time_ns=time_ns, launch_ns=launch_ns, **sizes[row.phase](index, row))


class _StepMemory:
    """The memory of the ops of a step beside their tensors, as fields of `Op`, in bytes."""

    def __init__(
        self,
        traced: TracedOperators,
        structure: StepStructure,
        tensors: Sequence[Tensor],
        costs: Sequence[OpCost],
        optimizer: str | None,
    ) -> None:
        self._traced, self._costs, self._optimizer = traced, costs, optimizer
        self._training = structure.is_training
        self._again = {op for unit in structure.units.values() for op in unit}
        self._graded = graded_owners(traced) if self._training else frozenset()
        self._late = _late_gradients(traced) if self._training else {}
        self._added = _added_gradients(traced) if self._training else {}
        self._largest_shared = _largest_shared(traced.ops)
        self._sent, self._came = Counter[int](), Counter[int]()
        for tensor in tensors:
            self._sent[tensor.producer] += tensor.nbytes
            if tensor.producer >= structure.n_forward:
                self._came.update(dict.fromkeys(tensor.consumers, tensor.nbytes))

    def of_forward(self, index: int, _: Op) -> dict[str, Any]:
        """Of an operator; in training with its gradients and the optimizer's state."""
        op, cost = self._traced.ops[index], self._costs[index]
        workspace = cost.workspace_bytes if self._training else _inference_workspace(cost)
        dead = op.differentiable and index not in self._traced.differentiated
        if self._training and (dead or index in self._again):
            workspace += cost.saved_bytes  # it frees now what autograd would save
        return {
            "persistent_bytes": persistent_bytes(
                op, training=index in self._graded, optimizer=self._optimizer
            ),
            "workspace_bytes": workspace,
            "late_bytes": op.cast_bytes,
        }

    def of_loss(self, *_: Any) -> dict[str, Any]:
        """Autograd holds the gradient of a model's own loss to the end."""
        rows = (t for t in self._traced.tensors if t.scalar and t.kept and t.differentiable)
        return {
            "persistent_bytes": max((min(t.nbytes, MOST_SCALAR_BYTES) for t in rows), default=0)
        }

    def of_backward(self, index: int, row: Op) -> dict[str, Any]:
        """Of an operator's backward, which makes the gradients of its inputs and parameters."""
        (own,) = row.forward
        cost, came = self._costs[own], self._came[index]
        # Shared parameters' gradients of this op, and the sum of one with that so far.
        shared = self._traced.ops[own].shared_bytes
        workspace = (cost.backward_workspace_bytes or 0) + shared
        workspace += min(shared, self._largest_shared.get(own, shared))
        beside = cost.backward_beside
        least = workspace - sum(nbytes for _, nbytes in beside)  # with all others elsewhere
        late_bytes = self._late.get(own, 0)
        made = self._sent[index] + late_bytes
        reused = min(cost.backward_reused_bytes, made, came + cost.saved_bytes)
        # At its end what came has gone, and a gradient of it is added to another reader's.
        least = max(least, self._added.get(own, 0) - came + max(reused - cost.saved_bytes, 0))
        if (gathered := self._traced.gathered_bytes.get(own)) is not None:
            # First what came is added up; with no kernel the sum is handed on.
            reused = max(reused, 0 if cost.backward_ns > 1 else made - gathered)
            least = max(least, gathered - made + reused)
        workspace = max(workspace, least)
        return {
            "workspace_bytes": workspace,
            "late_bytes": late_bytes,
            "reused_bytes": reused,
            "beside": tuple(_at_most(beside, workspace - least)),
        }

    def of_recompute(self, _: int, row: Op) -> dict[str, Any]:
        """Of a unit that runs forward again; copies of state, where no backward holds them."""
        apart = set(row.forward) - self._traced.differentiated
        copies = sum(self._traced.ops[op].rewritten_bytes for op in apart)
        return {"workspace_bytes": workspace_bytes(self._traced, row.forward, self._costs) + copies}


def _at_most(rows: Iterable[tuple[int, ...]], nbytes: int) -> Iterator[tuple[int, int]]:
    """Rows of ops and bytes, with so many bytes at most."""
    for op, size in rows:
        if taken := min(size, nbytes):
            nbytes -= taken
            yield op, taken


def graded_owners(traced: TracedOperators) -> frozenset[int]:
    """The ops owning a parameter that gets a gradient, from their own backward or a later op's.

    An optimizer skips other parameters, such as those used under `no_grad`: they have no state.
    """
    lent = {
        index
        for index, op in enumerate(traced.ops)
        if any(not traced.differentiated.isdisjoint(later) for _, *later in op.lent)
    }
    return traced.differentiated | lent


def persistent_bytes(op: TracedOp, *, training: bool, optimizer: str | None) -> int:
    """Bytes of parameters and buffers and, in training, of gradients and the optimizer's state."""
    if not training:
        return op.trained_bytes + op.frozen_bytes
    trained = op.trained
    if op.trained_bytes and not trained:
        # Files of older traces lack the shapes; a single vector is the worst case.
        trained = (TrainedParameter((-(-op.trained_bytes // 4),), 4),)
    state = sum(optimizer_state_bytes(optimizer, parameter) for parameter in trained)
    return 2 * op.trained_bytes + op.frozen_bytes + state


def _late_gradients(traced: TracedOperators) -> dict[int, int]:
    """Bytes of parameter gradients completed by the backward of each forward op.

    a parameter that one op reads        with that op's backward
    one that is only viewed for a reader with that reader's
    one that several ops read            with the last one's, if all others' can run only after
                                         it; else the order is unknown: not late at all
    """
    late = {op: traced.ops[op].own_bytes for op in traced.backward_ops}
    for op, reader in viewed_whole(traced).items():
        late[reader] += late.pop(op)
    before: dict[int, list[int]] = {op: [] for op in traced.backward_ops}  # what it reads
    for tensor in traced.tensors:
        if tensor.differentiable and tensor.producer in before:
            for consumer in traced.differentiated.intersection(tensor.consumers):
                before[consumer].append(tensor.producer)

    @cache
    def all_after(op: int) -> set[int]:
        """The op, and all ops whose backward comes after its own in every order."""
        found, left = {op}, [op]
        while left:
            new = set(before[left.pop()]) - found
            found |= new
            left += new
        return found

    for op in traced.backward_ops:
        for nbytes, *later in traced.ops[op].lent:
            readers = traced.differentiated.intersection((op, *later))
            last = max(readers)
            if readers <= all_after(last) and last in late:
                late[last] += nbytes
    return late


def _added_gradients(traced: TracedOperators) -> dict[int, int]:
    """The largest sum that each forward op's backward adds one of its gradients to.

    Not that of a part that it alone reads: the parts' own operator puts them together.
    """
    largest: dict[int, int] = {}
    for tensor in filter(traced.is_gathered, traced.tensors):
        sizes, readers = tensor.sent_back, traced.differentiated.intersection(tensor.consumers)
        for op in readers:
            beside = {other for row in tensor.parts if op in row[1:] for other in row[1:]}
            if not tensor.parts or tensor.kept or beside & readers > {op}:
                largest[op] = max(largest.get(op, 0), *sizes)
    return largest


def _largest_shared(ops: Sequence[TracedOp]) -> dict[int, int]:
    """The bytes of the largest parameter that each op shares with others."""
    found: dict[int, int] = {}
    for owner, op in enumerate(ops):
        for nbytes, *later in op.lent:
            found |= {reader: max(nbytes, found.get(reader, 0)) for reader in (owner, *later)}
    return found
