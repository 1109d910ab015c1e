"""The graph of one training step, mirrored from the forward graph.

    forward op i  ->  backward op i', in the same group
    tensor i -> j  ->  gradient of the same size j' -> i'
    what autograd keeps for i'  ->  the tensor lives until i' has run
    gradients of parameters  ->  persistent bytes of i that are allocated late, with i'
    the caller's loss  ->  one op of no time between the outputs and their gradients; where the
                           model returns a loss of its own, that alone has a gradient
    a checkpointed unit  ->  one op more, its forward again, before its backwards
    (`checkpoint_units`)

The structure comes first, without costs; the graph is the structure with costs.

Source: Baechi (arXiv 2301.08695, section 4): the backward op is placed with its forward. There
only forward times were simulated; here the backward and its gradients have their own.

Complexity: O(ops + tensors).
"""

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from baechi.errors import InputError
from baechi.records.graph import Op, OpGraph, PlainOp, PlainTensor, StepStructure, Tensor
from baechi.records.op_costs import OpCost, Profile
from baechi.records.optimizer_state import TrainedParameter, check_optimizer, optimizer_state_bytes
from baechi.traced.checkpoint_units import (
    Unit,
    backward_sequence,
    groups_of,
    named_units,
    unit_of_ops,
    workspace_bytes,
)
from baechi.traced.gradient_timing import late_gradients, viewed_whole
from baechi.traced.operators import TracedOp, TracedOperators, TracedTensor
from baechi.validation import FrozenDict

# Prefixes of names, for readers; code uses `Op.phase` and `Op.forward`.
BACKWARD = "backward:"
LOSS = "loss"
RECOMPUTE = "recompute:"


def step_structure(
    traced: TracedOperators, *, training: bool, checkpoint: str | Iterable[str] | None = None
) -> StepStructure:
    """The structure of one step of a traced model.

    Args:
        traced: The model.
        training: Forward, loss and backward; else the forward alone.
        checkpoint: Submodules whose forward runs again in a training step's backward, as in
            `checkpoint_units.named_units`.

    Raises:
        InputError: A name of `checkpoint` matches nothing, or the step does not train.
    """
    return _step(traced, training, checkpoint)[0]


def operator_graph(
    traced: TracedOperators,
    profiles: Sequence[Profile],
    *,
    training: bool,
    optimizer: str | None,
    checkpoint: str | Iterable[str] | None = None,
) -> OpGraph:
    """The operator graph of one step of a traced model: its structure with costs.

    Args:
        traced: The model.
        profiles: Its costs on one or more kinds of device. The first profile gives the ops' default
            costs; times are kept per named kind, and the workspace of an op is the largest of
            all profiles.
        training: As in `step_structure`.
        optimizer: The optimizer whose state is persistent when training.
        checkpoint: As in `step_structure`.

    Raises:
        InputError: Two profiles are of one kind, there is none, the
            optimizer is unknown, or a name of `checkpoint` matches nothing.
    """
    _check(profiles)
    costs = _merged(profiles)
    check_optimizer(optimizer)
    structure, sizes = _step(traced, training, checkpoint)
    tensors = tuple(
        Tensor(row.producer, row.consumers, _nbytes(size, costs), row.kept)
        for row, size in zip(structure.tensors, sizes, strict=True)
    )
    ops = _ops(traced, structure, tensors, costs, optimizer)
    times = {p.kind: tuple(_times(structure, p.costs)) for p in profiles if p.kind}
    return OpGraph(tuple(ops), tensors, FrozenDict(times))


def units_of(traced: TracedOperators, checkpoint: str | Iterable[str]) -> tuple[Unit, ...]:
    """The units that `checkpoint` names.

    Raises:
        InputError: A name matches nothing, or nothing with a backward.
    """
    return named_units(traced, checkpoint, backward_ops(traced.ops, traced.tensors))


def graded_owners(traced: TracedOperators) -> frozenset[int]:
    """The ops owning a parameter that gets a gradient, from their own backward or a later op's.

    An optimizer skips other parameters, such as those used under `no_grad`: they have no state.
    """
    reached = set(backward_ops(traced.ops, traced.tensors))
    return frozenset(
        index
        for index, op in enumerate(traced.ops)
        if index in reached or any(reader in reached for _, *later in op.lent for reader in later)
    )


def persistent_bytes(op: TracedOp, *, training: bool, optimizer: str | None) -> int:
    """Persistent bytes of an operator: parameters, gradients and optimizer state.

    Args:
        op: The operator.
        training: Whether its parameters get gradients.
        optimizer: The optimizer whose state those parameters have.
    """
    if not training:
        return op.trained_bytes + op.frozen_bytes
    trained = op.trained
    if op.trained_bytes and not trained:
        # Files of older traces lack the shapes; a single vector is the worst case.
        trained = (TrainedParameter((-(-op.trained_bytes // 4),), 4),)
    state = sum(optimizer_state_bytes(optimizer, parameter) for parameter in trained)
    return 2 * op.trained_bytes + op.frozen_bytes + state


def _forward_workspace(cost: OpCost, training: bool, again: bool) -> int:
    """Scratch memory of a forward; one that runs again later also frees saved tensors early."""
    if not training:
        return _inference_workspace(cost)
    return cost.workspace_bytes + cost.saved_bytes if again else cost.workspace_bytes


def _inference_workspace(cost: OpCost) -> int:
    """Scratch memory of a forward without gradients.

    Where unknown, tensors that autograd would save may still be made, and freed soon.
    """
    measured = cost.inference_workspace_bytes
    return cost.workspace_bytes + cost.saved_bytes if measured is None else measured


def _check(profiles: Sequence[Profile]) -> None:
    """Refuse two profiles of the same kind."""
    if not profiles:
        raise InputError("there is no profile; give one, or one for each kind of device.")
    for kind, count in Counter(profile.kind for profile in profiles).items():
        if count > 1:
            raise InputError(
                f"two profiles are of kind {kind!r}; give one for each kind of device."
            )
        if not kind and len(profiles) > 1:
            raise InputError("one of several profiles names no kind; each needs its own.")


def _merged(profiles: Sequence[Profile]) -> list[OpCost]:
    """The first profile's costs, with the largest sizes of all: any device may be chosen."""
    return [
        replace(
            costs[0],
            workspace_bytes=max(cost.workspace_bytes for cost in costs),
            backward_workspace_bytes=max(cost.backward_workspace_bytes or 0 for cost in costs),
            backward_reused_bytes=min(cost.backward_reused_bytes for cost in costs),
            inference_workspace_bytes=max(map(_inference_workspace, costs)),
            saved_bytes=max(cost.saved_bytes for cost in costs),
        )
        for costs in zip(*(profile.costs for profile in profiles), strict=True)
    ]


def _times(structure: StepStructure, costs: Sequence[OpCost]) -> Iterator[int]:
    """The time of every op."""
    for index, op in enumerate(structure.ops):
        if op.phase == "backward":
            yield costs[op.forward[0]].backward_ns
        else:  # a loss takes none
            again = (index,) if op.phase == "forward" else op.forward
            yield sum(costs[own].forward_ns for own in again)


def _ops(
    traced: TracedOperators,
    structure: StepStructure,
    tensors: Sequence[Tensor],
    costs: Sequence[OpCost],
    optimizer: str | None,
) -> Iterator[Op]:
    """The ops of a structure with their costs."""
    ops, training = traced.ops, structure.is_training
    graded = graded_owners(traced) if training else frozenset()
    order = [op for op in range(len(ops))[::-1] if structure.twins[op] >= 0]
    viewed = viewed_whole(ops, traced.tensors, order)
    late = late_gradients(ops, traced.tensors, order, viewed)
    sent = Counter[int]()
    for tensor in tensors:
        sent[tensor.producer] += tensor.nbytes
    again = {op for unit in structure.units.values() for op in unit}
    times = _times(structure, costs)
    for index, (row, time_ns) in enumerate(zip(structure.ops, times, strict=True)):
        persistent = workspace = late_bytes = reused = 0
        if row.phase == "forward":
            persistent = persistent_bytes(ops[index], training=index in graded, optimizer=optimizer)
            workspace = _forward_workspace(costs[index], training, index in again)
        elif row.phase == "recompute":
            workspace = workspace_bytes(row.forward, ops, traced.tensors, costs, set(order))
        elif row.phase == "backward":
            (own,) = row.forward
            # A shared parameter's gradient of this op, and its sum with that so far.
            workspace = (costs[own].backward_workspace_bytes or 0) + 2 * ops[own].shared_bytes
            late_bytes = late.get(own, 0)
            reused = min(costs[own].backward_reused_bytes, sent[index] + late_bytes)
        yield Op(
            row.name,
            time_ns,
            persistent_bytes=persistent,
            workspace_bytes=workspace,
            group=row.group,
            late_bytes=late_bytes,
            reused_bytes=reused,
            phase=row.phase,
            forward=row.forward,
        )


def backward_ops(ops: Sequence[TracedOp], tensors: Sequence[TracedTensor]) -> list[int]:
    """The forward ops that have a backward: a gradient reaches them from an output.

    In the order in which their backwards run, the last forward op first.
    """
    reached = [False] * len(ops)
    made: list[list[TracedTensor]] = [[] for _ in ops]
    for tensor in tensors:
        made[tensor.producer].append(tensor)
    order = []
    for op in range(len(ops) - 1, -1, -1):
        reached[op] = ops[op].differentiable and any(
            tensor.differentiable and (tensor.kept or any(reached[c] for c in tensor.consumers))
            for tensor in made[op]
        )
        if reached[op]:
            order.append(op)
    return order


class _Edge(NamedTuple):
    """A tensor of a step."""

    tensor: PlainTensor
    size: int


def _step(
    traced: TracedOperators, training: bool, checkpoint: str | Iterable[str] | None
) -> tuple[StepStructure, list[int]]:
    """The structure of a step, and the bytes of its tensors; `~i` is the extra saved bytes of i."""
    if checkpoint is not None and not training:
        raise InputError("checkpoint is for training=True: an inference keeps nothing anyway.")
    units = () if checkpoint is None else units_of(traced, checkpoint)
    groups = groups_of(traced.ops, units)
    ops = [PlainOp(op.name, groups.get(i, op.group)) for i, op in enumerate(traced.ops)]
    if training:
        ops, edges = _mirror(traced.ops, traced.tensors, ops, units)
    else:
        edges = [_edge(t.producer, t.consumers, t.nbytes, t.kept) for t in traced.tensors]
    return StepStructure(tuple(ops), tuple(e.tensor for e in edges)), [e.size for e in edges]


def _edge(producer: int, consumers: Iterable[int], size: int, kept: bool = False) -> _Edge:
    return _Edge(PlainTensor(producer, tuple(sorted(set(consumers))), kept), size)


def _nbytes(size: int, costs: Sequence[OpCost]) -> int:
    return size if size >= 0 else costs[~size].saved_bytes


def _mirror(
    ops: Sequence[TracedOp],
    tensors: Sequence[TracedTensor],
    forward: list[PlainOp],
    units: Sequence[Unit],
) -> tuple[list[PlainOp], list[_Edge]]:
    """Forward, loss, backward and recompute ops, and the tensors between them."""
    order = backward_ops(ops, tensors)
    sequence = backward_sequence(tensors, order, units)
    loss = len(ops)
    place = {row: loss + 1 + i for i, row in enumerate(sequence)}
    twin = {row: at for row, at in place.items() if row >= 0}
    again = {op: place[~k] for op, k in unit_of_ops(units).items()}
    # The caller computes the loss on the device of the model's last output.
    graded = [tensor.producer for tensor in tensors if tensor.kept and tensor.differentiable]
    home = max(graded, default=-1)
    grouped = [_with_group(op) if i in twin or i == home else op for i, op in enumerate(forward)]

    def later(row: int) -> PlainOp:
        if row >= 0:
            return PlainOp(BACKWARD + forward[row].name, grouped[row].group, "backward", (row,))
        unit = units[~row]
        return PlainOp(RECOMPUTE + unit.name, forward[unit.ops[0]].group, "recompute", unit.ops)

    edges = _values(ops, tensors, twin, again, loss)
    # Even where nothing is saved: saved bytes depend on the device's kernels, edges do not.
    edges += [_edge(again.get(op, op), (twin[op],), ~op) for op in order]
    edges += [_edge(op, (at,), 0) for op, at in again.items()]
    edges += _gradients(tensors, twin, again, loss, viewed_whole(ops, tensors, order))
    loss_op = PlainOp(LOSS, grouped[home].group if graded else None, "loss")
    return [*grouped, loss_op, *map(later, sequence)], edges


def _values(
    ops: Sequence[TracedOp],
    tensors: Sequence[TracedTensor],
    twin: Mapping[int, int],
    again: Mapping[int, int],
    loss: int,
) -> list[_Edge]:
    """The tensors of the forward with all their readers, and those that a unit recomputes.

    Args:
        ops: Forward operators.
        tensors: Between them.
        twin: The backward op of every forward op that has one.
        again: The op that runs a forward op again, for those in a unit.
        loss: The loss.
    """
    savers: list[list[int]] = [[] for _ in tensors]
    for op in twin:
        for saved in ops[op].saves:
            savers[saved].append(op)
    edges, made_again = [], []
    for index, tensor in enumerate(tensors):
        to_loss = (loss,) if tensor.kept and tensor.differentiable else ()
        mine = again.get(tensor.producer)
        own = [twin[op] for op in savers[index] if mine is not None and again.get(op) == mine]
        others = [twin[op] for op in savers[index] if mine is None or again.get(op) != mine]
        readers = [again[op] for op in tensor.consumers if again.get(op, mine) != mine]
        consumers = (*tensor.consumers, *to_loss, *others, *readers)
        edges.append(_edge(tensor.producer, consumers, tensor.nbytes, tensor.kept))
        if own and mine is not None:
            made_again.append(_edge(mine, own, tensor.nbytes))
    return edges + made_again


def _gradients(
    tensors: Sequence[TracedTensor],
    twin: Mapping[int, int],
    again: Mapping[int, int],
    loss: int,
    viewed: Container[int],
) -> Iterator[_Edge]:
    """The gradients of tensors, from their readers' backwards or the loss to their producers'.

    Args:
        tensors: Of the forward.
        twin: As in `_values`.
        again: As in `_values`.
        loss: The loss.
        viewed: The ops whose gradient is a view of their reader's (`viewed_whole`).
    """
    has_loss = any(t.scalar for t in tensors if t.kept and t.differentiable)
    for tensor in tensors:
        if not tensor.differentiable or tensor.producer not in twin:
            continue
        mine = again.get(tensor.producer)
        sizes = tensor.gradient_bytes or (tensor.nbytes,) * len(tensor.consumers)
        if tensor.producer in viewed:
            sizes = (0,)
        sources: list[tuple[int, int | None, int]] = []
        if tensor.kept:
            sources.append((loss, None, 0 if has_loss and not tensor.scalar else tensor.nbytes))
        sources += [
            (twin[c], again.get(c), nbytes)
            for c, nbytes in zip(tensor.consumers, sizes, strict=True)
            if c in twin
        ]
        for source, theirs, nbytes in sources:
            # A unit starts to run again when all gradients that enter it have arrived.
            first = () if mine is None or theirs == mine else (mine,)
            yield _edge(source, (*first, twin[tensor.producer]), nbytes)


def _with_group(op: PlainOp) -> PlainOp:
    """The op, in a new group of its own name if it has none, so that its backward can join."""
    if op.group is not None:
        return op
    return replace(op, group=op.name)
