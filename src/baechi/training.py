"""The graph of one training step, mirrored from the forward graph (DESIGN: one clock).

    forward op i  ->  backward op i', in the same group
    tensor i -> j  ->  gradient of the same size j' -> i'
    what autograd keeps for i'  ->  the tensor lives until i' has run
    the caller's loss  ->  one op of no time between the outputs and their gradients

Source: Baechi (arXiv 2301.08695, section 4): the backward op is placed with its forward. There
only forward times were simulated; here the backward and its gradients have their own.

Complexity: O(ops + tensors).
"""

from collections.abc import Sequence

from baechi.costs import Profile, optimizer_state_factor
from baechi.errors import InputError
from baechi.graph import Op, OpGraph, Tensor
from baechi.traced import Traced, TracedOp, TracedTensor
from baechi.values import FrozenDict

BACKWARD = "backward:"
LOSS = "loss"


def operator_graph(
    traced: Traced, profile: Profile, *, training: bool, optimizer: str | None
) -> OpGraph:
    """The operator graph of one step of a traced model.

    Args:
        traced: The model.
        profile: Its costs; the times are kept per kind too, where the profile names one.
        training: Forward, loss and backward; else the forward alone.
        optimizer: Whose state is persistent when training.

    Raises:
        InputError: The profile is of another model, or the optimizer is unknown.
    """
    if profile.traced_digest != traced.digest or len(profile.costs) != len(traced.ops):
        raise InputError(
            f"the profile is of another model (digest {profile.traced_digest[:12]}..., "
            f"{len(profile.costs)} ops) than this {traced.name} (digest {traced.digest[:12]}..., "
            f"{len(traced.ops)} ops). Profile this traced model."
        )
    factor = optimizer_state_factor(optimizer) if training else 0
    forward = [
        Op(
            name=op.name,
            time_ns=cost.forward_ns,
            persistent_bytes=op.trained_bytes * (2 + factor if training else 1) + op.frozen_bytes,
            workspace_bytes=cost.workspace_bytes,
            group=op.group,
        )
        for op, cost in zip(traced.ops, profile.costs, strict=True)
    ]
    if training:
        backward_ns = [cost.backward_ns for cost in profile.costs]
        ops, tensors = _mirror(traced.ops, traced.tensors, forward, backward_ns)
    else:
        ops = forward
        tensors = [Tensor(t.producer, t.consumers, t.nbytes, t.kept) for t in traced.tensors]
    times = {profile.kind: tuple(op.time_ns for op in ops)} if profile.kind else {}
    return OpGraph(tuple(ops), tuple(tensors), FrozenDict(times))


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
    backward_ns: Sequence[int],
) -> tuple[list[Op], list[Tensor]]:
    """Forward ops, the loss and backward ops; and the tensors between them all."""
    order = backward_ops(ops, tensors)
    loss = len(ops)
    twin = {op: loss + 1 + i for i, op in enumerate(order)}
    # The caller computes the loss where the model's last output is.
    graded = [tensor.producer for tensor in tensors if tensor.kept and tensor.differentiable]
    home = max(graded, default=-1)
    grouped = [_with_group(op) if i in twin or i == home else op for i, op in enumerate(forward)]
    mirrored = [
        Op(
            BACKWARD + forward[op].name,
            backward_ns[op],
            # A shared parameter's gradient so far, this op's, and their sum.
            workspace_bytes=forward[op].workspace_bytes + 2 * ops[op].shared_bytes,
            group=grouped[op].group,
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
    edges += [Tensor(op, (twin[op],), ops[op].saved_bytes) for op in order if ops[op].saved_bytes]
    for tensor in tensors:
        if not tensor.differentiable or tensor.producer not in twin:
            continue
        sources = [loss] if tensor.kept else []
        sources += [twin[consumer] for consumer in tensor.consumers if consumer in twin]
        edges += [Tensor(source, (twin[tensor.producer],), tensor.nbytes) for source in sources]
    loss_op = Op(LOSS, 0, group=grouped[home].group if graded else None)
    return [*grouped, loss_op, *mirrored], edges


def _with_group(op: Op) -> Op:
    """The op in a group of its own name, for its backward to join, if it is in none."""
    if op.group is not None:
        return op
    fields = (op.time_ns, op.persistent_bytes, op.workspace_bytes)
    return Op(op.name, *fields, group=op.name)
