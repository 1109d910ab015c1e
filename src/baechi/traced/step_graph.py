"""The graph of one training step, mirrored from the forward graph (DESIGN: one clock).

    forward op i  ->  backward op i', in the same group
    tensor i -> j  ->  gradient of the same size j' -> i'
    what autograd keeps for i'  ->  the tensor lives until i' has run
    gradients of parameters  ->  persistent bytes of i that come late, with i'
    the caller's loss  ->  one op of no time between the outputs and their gradients; where the
                           model returns a loss of its own, that alone has a gradient
    a checkpointed unit  ->  one op more, its forward again, before its backwards
    (`checkpoint_units`)

Source: Baechi (arXiv 2301.08695, section 4): the backward op is placed with its forward. There
only forward times were simulated; here the backward and its gradients have their own.

Complexity: O(ops + tensors).
"""

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from baechi.errors import InputError
from baechi.records.graph import Op, OpGraph, Tensor
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

BACKWARD = "backward:"
LOSS = "loss"
RECOMPUTE = "recompute:"


def operator_graph(
    traced: TracedOperators,
    profiles: Sequence[Profile],
    *,
    training: bool,
    optimizer: str | None,
    checkpoint: str | Iterable[str] | None = None,
    units: Sequence[Unit] | None = None,
) -> OpGraph:
    """The operator graph of one step of a traced model.

    Args:
        traced: The model.
        profiles: Its costs on one kind of device or more. The first one's are the ops' own; each
            one's times are kept per kind, where it names one, and the workspace of an op is the
            largest of all.
        training: Forward, loss and backward; else the forward alone.
        optimizer: Whose state is persistent when training.
        checkpoint: Submodules whose forward runs again in a training step's backward, as in
            `recomputation.named_units`.
        units: Those units themselves, instead of names.

    Raises:
        InputError: Two profiles are of one kind, there is none, the
            optimizer is unknown, or a name of `checkpoint` fits nothing.
    """
    _check(profiles)
    costs = _merged(profiles)
    check_optimizer(optimizer)
    if checkpoint is not None and not training:
        raise InputError("checkpoint is for training=True: an inference keeps nothing anyway.")
    if units is None:
        units = () if checkpoint is None else units_of(traced, checkpoint)
    groups, unit_of = groups_of(traced.ops, units), unit_of_ops(units)
    graded = _graded_owners(traced) if training else frozenset()
    forward = [
        Op(
            name=op.name,
            time_ns=cost.forward_ns,
            persistent_bytes=persistent_bytes(op, training=index in graded, optimizer=optimizer),
            workspace_bytes=_forward_workspace(cost, training, index in unit_of),
            group=groups.get(index, op.group),
        )
        for index, (op, cost) in enumerate(zip(traced.ops, costs, strict=True))
    ]
    if training:
        ops, tensors = _mirror(traced.ops, traced.tensors, forward, costs, units)
    else:
        ops = forward
        tensors = [Tensor(t.producer, t.consumers, t.nbytes, t.kept) for t in traced.tensors]
    times = {p.kind: _times(traced, p, training, units) for p in profiles if p.kind}
    return OpGraph(tuple(ops), tuple(tensors), FrozenDict(times))


def units_of(traced: TracedOperators, checkpoint: str | Iterable[str]) -> tuple[Unit, ...]:
    """The units that `checkpoint` names.

    Raises:
        InputError: A name fits nothing, or nothing that has a backward.
    """
    return named_units(traced, checkpoint, backward_ops(traced.ops, traced.tensors))


def _graded_owners(traced: TracedOperators) -> frozenset[int]:
    """The ops that own a parameter which gets a gradient, by their own backward or a later op's.

    An optimizer passes over the others, such as what runs under `no_grad`, and has no state.
    """
    reached = set(backward_ops(traced.ops, traced.tensors))
    return frozenset(
        index
        for index, op in enumerate(traced.ops)
        if index in reached or any(reader in reached for _, *later in op.lent for reader in later)
    )


def persistent_bytes(op: TracedOp, *, training: bool, optimizer: str | None) -> int:
    """Bytes that an operator's device holds for it: parameters, gradients and optimizer state.

    Args:
        op: The operator.
        training: Whether its parameters get gradients.
        optimizer: Whose state there is of those that do.
    """
    if not training:
        return op.trained_bytes + op.frozen_bytes
    trained = op.trained
    if op.trained_bytes and not trained:
        # The file of an older trace does not tell the shapes: then one vector, which has most.
        trained = (TrainedParameter((-(-op.trained_bytes // 4),), 4),)
    state = sum(optimizer_state_bytes(optimizer, parameter) for parameter in trained)
    return 2 * op.trained_bytes + op.frozen_bytes + state


def _forward_workspace(cost: OpCost, training: bool, again: bool) -> int:
    """Scratch of a forward; what runs again makes what autograd would keep, and frees it soon."""
    if not training:
        return _inference_workspace(cost)
    return cost.workspace_bytes + cost.saved_bytes if again else cost.workspace_bytes


def _inference_workspace(cost: OpCost) -> int:
    """Scratch of a forward without gradients.

    Where it is not known: what autograd would keep may be made all the same, and soon freed.
    """
    measured = cost.inference_workspace_bytes
    return cost.workspace_bytes + cost.saved_bytes if measured is None else measured


def _check(profiles: Sequence[Profile]) -> None:
    """Refuse profiles of which two are of one kind."""
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


def _times(
    traced: TracedOperators, profile: Profile, training: bool, units: Sequence[Unit]
) -> tuple[int, ...]:
    """The time of every op of the graph by one profile."""
    if not training:
        return tuple(cost.forward_ns for cost in profile.costs)
    forward = [cost.forward_ns for cost in profile.costs]
    order = backward_sequence(traced.tensors, backward_ops(traced.ops, traced.tensors), units)
    rows = (
        profile.costs[row].backward_ns if row >= 0 else sum(forward[op] for op in units[~row].ops)
        for row in order
    )
    return (*forward, 0, *rows)


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


def mirrored(graph: OpGraph) -> tuple[int, tuple[int, ...]]:
    """How many ops of a graph are forward, and the backward op of each of them, or -1.

    An inference graph, which has no loss, is all forward.
    """
    n = graph.op_index.get(LOSS, len(graph.ops))
    twins = [-1] * n
    for twin in range(n + 1, len(graph.ops)):
        name = graph.ops[twin].name
        if not name.startswith(RECOMPUTE):
            twins[graph.op_index[name.removeprefix(BACKWARD)]] = twin
    return n, tuple(twins)


def recomputed(graph: OpGraph) -> dict[int, Unit]:
    """The ops of a graph that run a unit again, and which unit.

    Whose forward runs again leaves a tensor that nobody else reads.
    """
    return {
        op: Unit(
            row.name.removeprefix(RECOMPUTE),
            tuple(
                sorted(
                    graph.tensors[tensor].producer
                    for tensor in graph.op_inputs[op]
                    if graph.tensors[tensor].consumers == (op,)
                )
            ),
        )
        for op, row in enumerate(graph.ops)
        if row.name.startswith(RECOMPUTE)
    }


def _mirror(
    ops: Sequence[TracedOp],
    tensors: Sequence[TracedTensor],
    forward: list[Op],
    costs: Sequence[OpCost],
    units: Sequence[Unit],
) -> tuple[list[Op], list[Tensor]]:
    """Forward ops, the loss, backward ops and what runs again; and the tensors between them."""
    order = backward_ops(ops, tensors)
    sequence = backward_sequence(tensors, order, units)
    loss = len(ops)
    place = {row: loss + 1 + i for i, row in enumerate(sequence)}
    twin = {row: at for row, at in place.items() if row >= 0}
    again = {op: place[~k] for op, k in unit_of_ops(units).items()}
    # The caller computes the loss where the model's last output is.
    graded = [tensor.producer for tensor in tensors if tensor.kept and tensor.differentiable]
    home = max(graded, default=-1)
    grouped = [_with_group(op) if i in twin or i == home else op for i, op in enumerate(forward)]
    viewed = viewed_whole(ops, tensors, order)
    late = late_gradients(ops, tensors, order, viewed)

    def backward(op: int) -> Op:
        return Op(
            BACKWARD + forward[op].name,
            costs[op].backward_ns,
            # A shared parameter's gradient of this op, and its sum with that so far.
            workspace_bytes=(costs[op].backward_workspace_bytes or 0) + 2 * ops[op].shared_bytes,
            group=grouped[op].group,
            late_bytes=late.get(op, 0),
            reused_bytes=min(costs[op].backward_reused_bytes, sent[twin[op]] + late.get(op, 0)),
        )

    def forward_again(unit: Unit) -> Op:
        return Op(
            RECOMPUTE + unit.name,
            sum(forward[op].time_ns for op in unit.ops),
            workspace_bytes=workspace_bytes(unit, ops, tensors, costs, twin.keys()),
            group=forward[unit.ops[0]].group,
        )

    edges = _values(ops, tensors, twin, again, loss)
    # Of no bytes where nothing is kept: what a kernel keeps depends on the device, edges do not.
    edges += [Tensor(again.get(op, op), (twin[op],), costs[op].saved_bytes) for op in order]
    edges += [Tensor(op, (at,), 0) for op, at in again.items()]
    edges += _gradients(tensors, twin, again, loss, viewed)
    sent = Counter[int]()
    for edge in edges:
        sent[edge.producer] += edge.nbytes
    later = [backward(row) if row >= 0 else forward_again(units[~row]) for row in sequence]
    loss_op = Op(LOSS, 0, group=grouped[home].group if graded else None)
    return [*grouped, loss_op, *later], edges


def _values(
    ops: Sequence[TracedOp],
    tensors: Sequence[TracedTensor],
    twin: Mapping[int, int],
    again: Mapping[int, int],
    loss: int,
) -> list[Tensor]:
    """The tensors of the forward, with all who read them, and those that a unit makes again.

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
        edges.append(Tensor(tensor.producer, consumers, tensor.nbytes, tensor.kept))
        if own and mine is not None:
            made_again.append(Tensor(mine, tuple(own), tensor.nbytes))
    return edges + made_again


def _gradients(
    tensors: Sequence[TracedTensor],
    twin: Mapping[int, int],
    again: Mapping[int, int],
    loss: int,
    viewed: Container[int],
) -> Iterator[Tensor]:
    """The gradients of tensors, from their readers' backwards or the loss to their producers'.

    Args:
        tensors: Of the forward.
        twin: As in `_values`.
        again: As in `_values`.
        loss: The loss.
        viewed: The ops whose gradient is their reader's own, seen in another way (`viewed_whole`).
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
            # A unit begins to run again when all gradients that enter it are there.
            first = () if mine is None or theirs == mine else (mine,)
            yield Tensor(source, (*first, twin[tensor.producer]), nbytes)


def _with_group(op: Op) -> Op:
    """The op in a group of its own name, for its backward to join, if it is in none."""
    if op.group is not None:
        return op
    return replace(op, group=op.name)
