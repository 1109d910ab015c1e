"""The training step of a forward graph whose ops are known by times and sizes alone.

As `baechi.traced.step_structure` mirrors a traced model: every op has a backward op in its group, a
gradient of the same size runs against every edge, and one op of no time, the loss, stands between
the outputs and their gradients. What autograd saves is not known here, so every op saves all its
inputs: its backward op consumes them, too. An op that has no inputs, no parameters and no backward
time (the data) has no backward op.
"""

from collections.abc import Sequence

from baechi import Op, OpGraph, Tensor

# Weights, gradients, and the two moments of Adam.
STATE_FACTOR = 4


def mirrored(
    forward: OpGraph, backward_ns: Sequence[int], persistent_bytes: Sequence[int] | None = None
) -> OpGraph:
    """Forward, loss and backward of a graph.

    Args:
        forward: Times, sizes and groups; tensors that nobody consumes are what the model returns.
        backward_ns: The time of every op's backward.
        persistent_bytes: What every op holds when training; `None` where its persistent bytes are
            parameters, which come `STATE_FACTOR` times.
    """
    held = persistent_bytes or [op.persistent_bytes * STATE_FACTOR for op in forward.ops]
    n = len(forward.ops)
    twin: dict[int, int] = {}
    for op in range(n - 1, -1, -1):
        row = forward.ops[op]
        if forward.op_inputs[op] or row.persistent_bytes or backward_ns[op]:
            twin[op] = n + 1 + len(twin)
    ops = [
        Op(
            row.name,
            row.time_ns,
            held[op],
            row.workspace_bytes,
            row.group or (f"with {row.name}" if op in twin else None),
        )
        for op, row in enumerate(forward.ops)
    ]
    # The loss is computed where the last output is.
    ops.append(Op("loss", 0, group=ops[n - 1].group if n else None, phase="loss"))
    ops += [
        Op(
            f"backward of {ops[op].name}",
            backward_ns[op],
            0,
            ops[op].workspace_bytes,
            ops[op].group,
            phase="backward",
            forward=(op,),
        )
        for op in twin
    ]
    tensors, gradients = [], []
    for tensor in forward.tensors:
        savers = [twin[consumer] for consumer in tensor.consumers if consumer in twin]
        ends = () if tensor.consumers else (n,)
        row = (*tensor.consumers, *savers, *ends)
        tensors.append(Tensor(tensor.producer, row, tensor.nbytes, tensor.kept))
        if tensor.producer in twin:
            gradients += [
                Tensor(source, (twin[tensor.producer],), tensor.nbytes)
                for source in (*savers, *ends)
            ]
    return OpGraph(tuple(ops), (*tensors, *gradients))
