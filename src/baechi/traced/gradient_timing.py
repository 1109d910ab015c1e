"""The backward step in which each parameter's gradient becomes complete.

    a parameter that one op reads        with that op's backward
    one that is only viewed for a reader with that reader's
    one that several ops read            with the last one's, if all others' can run only after it;
                                         else the order is unknown: not late at all

Complexity: O(ops + tensors), once more for each set of ops that share parameters.
"""

from collections.abc import Mapping, Sequence

from baechi.traced.operators import TracedOp, TracedTensor


def late_gradients(
    ops: Sequence[TracedOp],
    tensors: Sequence[TracedTensor],
    order: Sequence[int],
    viewed: Mapping[int, int],
) -> dict[int, int]:
    """Bytes of parameter gradients completed by the backward of each forward op.

    Args:
        ops: Forward operators.
        tensors: Between them.
        order: The ops with a backward.
        viewed: `viewed_whole` of the same.
    """
    late = {op: _own_bytes(ops[op]) for op in order}
    for op, reader in viewed.items():
        late[reader] += late.pop(op)
    before: dict[int, list[int]] = {op: [] for op in order}  # the ops it reads, with gradients
    for tensor in tensors:
        if tensor.differentiable and tensor.producer in before:
            for consumer in tensor.consumers:
                if consumer in before:
                    before[consumer].append(tensor.producer)
    reached: dict[tuple[int, ...], bool] = {}
    for op in order:
        for nbytes, *later in ops[op].lent:
            readers = tuple(sorted(reader for reader in (op, *later) if reader in before))
            if readers not in reached:
                reached[readers] = set(readers) <= _all_before(readers[-1], before)
            if reached[readers] and readers[-1] in late:
                late[readers[-1]] += nbytes
    return late


def _all_before(op: int, before: Mapping[int, Sequence[int]]) -> set[int]:
    """The op, and all ops whose backward comes after its own in every order."""
    found, left = {op}, [op]
    while left:
        new = set(before[left.pop()]) - found
        found |= new
        left += new
    return found


def _own_bytes(op: TracedOp) -> int:
    """Bytes of the gradients of its parameters that no later op reads."""
    return op.trained_bytes - sum(nbytes for nbytes, *_ in op.lent)


def viewed_whole(
    ops: Sequence[TracedOp], tensors: Sequence[TracedTensor], order: Sequence[int]
) -> dict[int, int]:
    """Operators that only view a whole parameter for one reader, with that reader.

    The gradient from the reader is a view of the parameter's own gradient: it exists once, from the
    reader's backward on. A parameter that is read in parts gets a gradient assembled from theirs.
    """
    backward = set(order)
    sent: dict[int, list[TracedTensor]] = {}
    for tensor in tensors:
        if tensor.differentiable:
            sent.setdefault(tensor.producer, []).append(tensor)
    return {
        op: rows[0].consumers[0]
        for op, rows in sent.items()
        if len(rows) == 1
        and rows[0].nbytes == 0
        and rows[0].gradient_bytes == (_own_bytes(ops[op]),)
        and {op, rows[0].consumers[0]} <= backward
        and ops[op].group is not None
        and ops[op].group == ops[rows[0].consumers[0]].group
    }
