"""The graph of one training step, mirrored from the forward graph (DESIGN: one clock).

    forward op i  ->  backward op i', in the same group
    tensor i -> j  ->  gradient of the same size j' -> i'
    what autograd keeps for i'  ->  the tensor lives until i' has run
    gradients of parameters  ->  persistent bytes of i that come late, with i'
    the caller's loss  ->  one op of no time between the outputs and their gradients

Source: Baechi (arXiv 2301.08695, section 4): the backward op is placed with its forward. There
only forward times were simulated; here the backward and its gradients have their own.

Complexity: O(ops + tensors).
"""

from collections.abc import Sequence
from dataclasses import replace

from baechi.costs import OpCost, Profile
from baechi.errors import InputError
from baechi.graph import Op, OpGraph, Tensor
from baechi.optimizers import TrainedParameter, check_optimizer, optimizer_state_bytes
from baechi.traced import Traced, TracedOp, TracedTensor
from baechi.values import FrozenDict, check_row

BACKWARD = "backward:"
LOSS = "loss"


def operator_graph(
    traced: Traced,
    profile: Profile | Sequence[Profile],
    *,
    training: bool,
    optimizer: str | None,
) -> OpGraph:
    """The operator graph of one step of a traced model.

    Args:
        traced: The model.
        profile: Its costs, or those on several kinds of device. The first one's are the ops' own;
            every one's times are kept per kind, where it names one, and the workspace of an op is
            the largest of all.
        training: Forward, loss and backward; else the forward alone.
        optimizer: Whose state is persistent when training.

    Raises:
        InputError: A profile is of another model, two are of one kind, there is none, or the
            optimizer is unknown.
    """
    rows = [profile] if isinstance(profile, Profile) else profile
    profiles = _checked(traced, list(check_row(rows, "profiles", Profile)))
    costs = _merged(profiles)
    check_optimizer(optimizer)
    forward = [
        Op(
            name=op.name,
            time_ns=cost.forward_ns,
            persistent_bytes=persistent_bytes(op, training=training, optimizer=optimizer),
            workspace_bytes=cost.workspace_bytes if training else _inference_workspace(cost),
            group=op.group,
        )
        for op, cost in zip(traced.ops, costs, strict=True)
    ]
    if training:
        ops, tensors = _mirror(traced.ops, traced.tensors, forward, costs)
    else:
        ops = forward
        tensors = [Tensor(t.producer, t.consumers, t.nbytes, t.kept) for t in traced.tensors]
    times = {p.kind: _times(traced, p, training) for p in profiles if p.kind}
    return OpGraph(tuple(ops), tuple(tensors), FrozenDict(times))


def persistent_bytes(op: TracedOp, *, training: bool, optimizer: str | None) -> int:
    """Bytes that an operator's device holds for it: parameters, gradients and optimizer state."""
    if not training:
        return op.trained_bytes + op.frozen_bytes
    trained = op.trained
    if op.trained_bytes and not trained:
        # The file of an older trace does not tell the shapes: then one vector, which has most.
        trained = (TrainedParameter((-(-op.trained_bytes // 4),), 4),)
    state = sum(optimizer_state_bytes(optimizer, parameter) for parameter in trained)
    return 2 * op.trained_bytes + op.frozen_bytes + state


def _inference_workspace(cost: OpCost) -> int:
    """Scratch of a forward without gradients.

    Where it is not known: what autograd would keep may be made all the same, and soon freed.
    """
    measured = cost.inference_workspace_bytes
    return cost.workspace_bytes + cost.saved_bytes if measured is None else measured


def _late_gradient_bytes(op: TracedOp) -> int:
    """Bytes of gradients that come with the operator's own backward.

    The gradient of a parameter that later operators read, too, comes with theirs, of which the
    first may be the first backward of all: it is not late.
    """
    return op.trained_bytes - min(op.trained_bytes, op.shared_bytes)


def _checked(traced: Traced, profiles: list[Profile]) -> list[Profile]:
    """The profiles, if all are of this model and each of a kind of its own."""
    if not profiles:
        raise InputError("there is no profile; give one, or one for each kind of device.")
    for profile in profiles:
        if profile.traced_digest != traced.digest or len(profile.costs) != len(traced.ops):
            raise InputError(
                f"the profile is of another model (digest {profile.traced_digest[:12]}..., "
                f"{len(profile.costs)} ops) than this {traced.name} "
                f"(digest {traced.digest[:12]}..., {len(traced.ops)} ops). "
                "Profile this traced model."
            )
    kinds = [profile.kind for profile in profiles]
    for kind in kinds:
        if kinds.count(kind) > 1:
            raise InputError(
                f"two profiles are of kind {kind!r}; give one for each kind of device."
            )
        if not kind and len(kinds) > 1:
            raise InputError("one of several profiles names no kind; each needs its own.")
    return profiles


def _merged(profiles: Sequence[Profile]) -> list[OpCost]:
    """The first profile's costs, with the largest sizes of all: any device may be chosen."""
    return [
        replace(
            costs[0],
            workspace_bytes=max(cost.workspace_bytes for cost in costs),
            backward_workspace_bytes=max(cost.backward_workspace_bytes or 0 for cost in costs),
            inference_workspace_bytes=max(map(_inference_workspace, costs)),
            saved_bytes=max(cost.saved_bytes for cost in costs),
        )
        for costs in zip(*(profile.costs for profile in profiles), strict=True)
    ]


def _times(traced: Traced, profile: Profile, training: bool) -> tuple[int, ...]:
    """The time of every op of the graph by one profile."""
    forward = [cost.forward_ns for cost in profile.costs]
    if not training:
        return tuple(forward)
    order = backward_ops(traced.ops, traced.tensors)
    return (*forward, 0, *(profile.costs[op].backward_ns for op in order))


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
        twins[graph.op_index[graph.ops[twin].name.removeprefix(BACKWARD)]] = twin
    return n, tuple(twins)


def _mirror(
    ops: Sequence[TracedOp],
    tensors: Sequence[TracedTensor],
    forward: list[Op],
    costs: Sequence[OpCost],
) -> tuple[list[Op], list[Tensor]]:
    """Forward ops, the loss and backward ops; and the tensors between them all."""
    order = backward_ops(ops, tensors)
    loss = len(ops)
    twin = {op: loss + 1 + i for i, op in enumerate(order)}
    # The caller computes the loss where the model's last output is.
    graded = [tensor.producer for tensor in tensors if tensor.kept and tensor.differentiable]
    home = max(graded, default=-1)
    grouped = [_with_group(op) if i in twin or i == home else op for i, op in enumerate(forward)]
    viewed = _viewed_whole(ops, tensors)
    late = {op: _late_gradient_bytes(ops[op]) for op in order}
    for op, reader in viewed.items():
        late[reader] += late.pop(op)
    mirrored = [
        Op(
            BACKWARD + forward[op].name,
            costs[op].backward_ns,
            # A shared parameter's gradient of this op, and its sum with that so far.
            workspace_bytes=(costs[op].backward_workspace_bytes or 0) + 2 * ops[op].shared_bytes,
            group=grouped[op].group,
            late_bytes=late.get(op, 0),
        )
        for op in order
    ]
    savers: list[list[int]] = [[] for _ in tensors]
    for op in order:
        for saved in ops[op].saves:
            savers[saved].append(twin[op])
    edges = []
    for index, tensor in enumerate(tensors):
        to_loss = (loss,) if tensor.kept and tensor.differentiable else ()
        consumers = (*tensor.consumers, *to_loss, *savers[index])
        edges.append(Tensor(tensor.producer, consumers, tensor.nbytes, tensor.kept))
    # Of no bytes where nothing is kept: what a kernel keeps depends on the device, edges do not.
    edges += [Tensor(op, (twin[op],), costs[op].saved_bytes) for op in order]
    for tensor in tensors:
        if not tensor.differentiable or tensor.producer not in twin:
            continue
        reader = (twin[tensor.producer],)
        if tensor.kept:
            edges.append(Tensor(loss, reader, tensor.nbytes))
        sizes = tensor.gradient_bytes or (tensor.nbytes,) * len(tensor.consumers)
        if tensor.producer in viewed:
            sizes = (0,)
        edges += [
            Tensor(twin[consumer], reader, nbytes)
            for consumer, nbytes in zip(tensor.consumers, sizes, strict=True)
            if consumer in twin
        ]
    loss_op = Op(LOSS, 0, group=grouped[home].group if graded else None)
    return [*grouped, loss_op, *mirrored], edges


def _viewed_whole(ops: Sequence[TracedOp], tensors: Sequence[TracedTensor]) -> dict[int, int]:
    """Operators that only turn a whole parameter for one reader, and that reader.

    The gradient that the reader sends back is the parameter's own, seen in another way: it is there
    from the reader's backward on, once. A parameter that is read in parts gets a gradient put
    together from theirs.
    """
    backward = set(backward_ops(ops, tensors))
    sent: dict[int, list[TracedTensor]] = {}
    for tensor in tensors:
        if tensor.differentiable:
            sent.setdefault(tensor.producer, []).append(tensor)
    return {
        op: rows[0].consumers[0]
        for op, rows in sent.items()
        if len(rows) == 1
        and rows[0].nbytes == 0
        and rows[0].gradient_bytes == (_late_gradient_bytes(ops[op]),)
        and {op, rows[0].consumers[0]} <= backward
        and ops[op].group is not None
        and ops[op].group == ops[rows[0].consumers[0]].group
    }


def _with_group(op: Op) -> Op:
    """The op in a group of its own name, for its backward to join, if it is in none."""
    if op.group is not None:
        return op
    fields = (op.time_ns, op.persistent_bytes, op.workspace_bytes)
    return Op(op.name, *fields, group=op.name)
