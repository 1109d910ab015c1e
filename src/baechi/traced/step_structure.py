"""The structure of one step of a traced model, without costs.

A training step has the operators of the forward, the loss, and a backward for each operator that
has one; with checkpointing also what runs a unit forward again (docs/cost-model.md, "Training").

Source: Baechi (arXiv 2301.08695, section 4): the backward op is placed with its forward.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter

from baechi.errors import InputError
from baechi.records.graph import Op, StepStructure, Tensor
from baechi.traced.checkpoint_units import (
    Unit,
    backward_sequence,
    groups_of,
    named_units,
    unit_of_ops,
)
from baechi.traced.operators import TracedOperators, TracedTensor

# The most that the gradient of a scalar takes. The scalar's own memory may be larger, as a loss's.
MOST_SCALAR_BYTES = 16

# Prefixes of names, for readers; code uses `Op.phase` and `Op.forward`.
BACKWARD = "backward:"
LOSS = "loss"
RECOMPUTE = "recompute:"

# A tensor of a step with its bytes; `~i` are the extra saved bytes of op i.
_Edge = tuple[Tensor, int]


def step_structure(
    traced: TracedOperators,
    training: bool,
    checkpoint: str | Iterable[str] | None,
    draws_in_order: bool,
) -> tuple[StepStructure, list[int]]:
    """As `Traced.structure`, whose arguments it takes, and the bytes of tensors as in `_Edge`."""
    if checkpoint is not None and not training:
        raise InputError("checkpoint is for training=True: an inference keeps nothing anyway.")
    units = () if checkpoint is None else named_units(traced, checkpoint)
    groups = groups_of(traced, units)
    ops = [Op(op.name, 0, group=groups.get(i, op.group)) for i, op in enumerate(traced.ops)]
    if training:
        ops, edges = _mirror(traced, ops, units)
    else:
        edges = [_value_edge(t, t.consumers, {}) for t in traced.tensors]
    if draws_in_order:
        edges += [(Tensor(*ends, 0, order=True), 0) for ends in _unordered_draws(traced)]
    structure = StepStructure(tuple(ops), tuple(tensor for tensor, _ in edges))
    return structure, [size for _, size in edges]


def _unordered_draws(traced: TracedOperators) -> Iterator[tuple[int, tuple[int]]]:
    """Each op that draws random numbers, and the next one, where that does not depend on it."""
    drawn = [-1] * len(traced.ops)  # the last op before each that draws, and on which it depends
    last = -1
    for index, op in enumerate(traced.ops):
        if op.random:
            if drawn[index] < last:
                yield last, (index,)
            drawn[index] = last = index
        for consumer in (c for tensor in traced.made[index] for c in tensor.consumers):
            drawn[consumer] = max(drawn[consumer], drawn[index])


def _edge(producer: int, consumers: Iterable[int], size: int, kept: bool = False) -> _Edge:
    return Tensor(producer, tuple(sorted(set(consumers))), 0, kept), size


def _mirror(
    traced: TracedOperators, forward: list[Op], units: Sequence[Unit]
) -> tuple[list[Op], list[_Edge]]:
    """Forward, loss, backward and recompute ops, and the tensors between them."""
    sequence = backward_sequence(traced, units)
    loss = len(forward)
    place = {row: loss + 1 + i for i, row in enumerate(sequence)}
    twin = {row: at for row, at in place.items() if row >= 0}
    again = {op: place[~k] for op, k in unit_of_ops(units).items()}
    # The caller computes the loss on the device of the model's last output.
    graded = [tensor.producer for tensor in traced.tensors if tensor.kept and tensor.differentiable]
    home = max(graded, default=-1)
    # A backward joins its forward's group, so that an op without one gets one of its own name.
    grouped = [
        replace(op, group=op.name) if op.group is None and (i in twin or i == home) else op
        for i, op in enumerate(forward)
    ]

    def later(row: int) -> Op:
        if row >= 0:
            return replace(
                grouped[row], name=BACKWARD + forward[row].name, phase="backward", forward=(row,)
            )
        unit = units[~row]
        group = forward[unit.ops[0]].group
        return Op(RECOMPUTE + unit.name, 0, group=group, phase="recompute", forward=unit.ops)

    edges = _values(traced, twin, again, loss)
    # Even where nothing is saved: saved bytes depend on the device's kernels, edges do not.
    edges += [_edge(again.get(op, op), (twin[op],), ~op) for op in traced.backward_ops]
    for op, at in again.items():
        copied = traced.ops[op].rewritten_bytes  # when it first runs, and once more when again
        edges.append(_edge(op, (at,), copied))
        edges += [_edge(at, (twin[op],), copied)] if copied and op in twin else []
    edges += _gradients(traced, twin, again, loss, home)
    # Other outputs stay where they are; the loss comes after them.
    edges += [
        _edge(tensor.producer, (loss,), 0)
        for tensor in traced.tensors
        if tensor.kept and tensor.differentiable and not _enters_loss(traced, tensor)
    ]
    loss_op = Op(LOSS, 0, group=grouped[home].group if graded else None, phase="loss")
    return [*grouped, loss_op, *map(later, sequence)], edges


def _enters_loss(traced: TracedOperators, tensor: TracedTensor) -> bool:
    """True if the loss reads an output: the model's own if it returns one, else every output."""
    own = tensor.scalar or not traced.returns_loss
    return tensor.kept and tensor.differentiable and own


def _values(
    traced: TracedOperators, twin: Mapping[int, int], again: Mapping[int, int], loss: int
) -> list[_Edge]:
    """The tensors of the forward with all their readers, and those that a unit recomputes.

    `twin` has the backward op of every forward op with one; `again` the op that runs an op of a
    unit again.
    """
    savers: list[list[int]] = [[] for _ in traced.tensors]
    for op in twin:
        for saved in traced.ops[op].saves:
            savers[saved].append(op)
    edges, made_again = [], []
    for index, tensor in enumerate(traced.tensors):
        to_loss = (loss,) if _enters_loss(traced, tensor) else ()
        mine = again.get(tensor.producer)
        own = [twin[op] for op in savers[index] if mine is not None and again.get(op) == mine]
        others = [twin[op] for op in savers[index] if mine is None or again.get(op) != mine]
        readers = [again[op] for op in tensor.consumers if again.get(op, mine) != mine]
        consumers = {*tensor.consumers, *to_loss, *others, *readers}
        edges.append(_value_edge(tensor, consumers, twin))
        if own and mine is not None:
            made_again.append(_edge(mine, own, tensor.nbytes))
    return edges + made_again


def _value_edge(tensor: TracedTensor, consumers: Iterable[int], twin: Mapping[int, int]) -> _Edge:
    """A tensor of the forward; the backwards of those that read a part of it keep the same part."""
    parts = tuple(
        (nbytes, *readers, *(twin[op] for op in readers if op in twin and twin[op] in consumers))
        for nbytes, *readers in tensor.parts
    )
    edge, size = _edge(tensor.producer, consumers, tensor.nbytes, tensor.kept)
    return replace(edge, parts=parts), size


def _gradients(
    traced: TracedOperators,
    twin: Mapping[int, int],
    again: Mapping[int, int],
    loss: int,
    home: int,
) -> Iterator[_Edge]:
    """The gradients of tensors, from their readers' backwards or the loss to their producers'.

    Or to those of readers before, which add their own and send the sum on. The loss is where the
    output of `home` is; gradients of other outputs have room where these are. Those of arguments
    are the caller's.
    """
    viewed = viewed_whole(traced)
    for tensor in filter(attrgetter("differentiable"), traced.tensors):
        sizes = tensor.sent_back
        if tensor.producer not in twin:  # an argument: the caller gets its gradients at the end
            rows = zip(tensor.consumers, sizes, strict=True)
            yield from (_edge(twin[c], (), nbytes, kept=True) for c, nbytes in rows if c in twin)
            continue
        if tensor.producer in viewed:
            sizes = (0,)
        targets = tensor.gradient_to or (tensor.producer,) * (len(tensor.consumers) + 1)
        ends = [op if op in twin else tensor.producer for op in targets]
        sources: list[tuple[int, int | None, int, int]] = []
        if tensor.kept:
            nbytes = min(tensor.nbytes, MOST_SCALAR_BYTES) if tensor.scalar else tensor.nbytes
            nbytes = nbytes if _enters_loss(traced, tensor) else 0
            apart = tensor.producer != home and nbytes > 0
            sources.append((loss, None, 0 if apart else nbytes, ends[-1]))
            if apart:  # where the output is: room for it from then on
                yield _edge(tensor.producer, (twin[ends[-1]],), nbytes)
        sources += [
            (twin[c], again.get(c), nbytes, end)
            for c, nbytes, end in zip(tensor.consumers, sizes, ends[:-1], strict=True)
            if c in twin
        ]
        for source, theirs, nbytes, end in sources:
            mine = again.get(end)
            # A unit starts to run again when all gradients that enter it have arrived.
            first = () if mine is None or theirs == mine else (mine,)
            yield _edge(source, (*first, twin[end]), nbytes)


def viewed_whole(traced: TracedOperators) -> dict[int, int]:
    """Operators that only view a whole parameter for one reader, with that reader.

    The gradient from the reader is a view of the parameter's own gradient: it exists once, from the
    reader's backward on. A parameter that is read in parts gets a gradient assembled from theirs.
    """
    found = {}
    for op in reversed(traced.backward_ops):
        sent = [tensor for tensor in traced.made[op] if tensor.differentiable]
        own = traced.ops[op]
        if len(sent) != 1 or sent[0].nbytes or sent[0].gradient_bytes != (own.own_bytes,):
            continue
        (reader,) = sent[0].consumers
        grouped = own.group is not None and own.group == traced.ops[reader].group
        if grouped and reader in traced.differentiated:
            found[op] = reader
    return found
