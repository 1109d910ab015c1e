"""A traced model as plain data, and the graph of one step of it.

`tracing.trace` makes a `Traced`; nothing here needs torch, so it can be saved on one machine and
placed on another. The graph of a training step is mirrored from the forward (docs/cost-model.md,
"Training"). The structure comes first, without costs; the graph is the structure with costs.

Source: Baechi (arXiv 2301.08695, section 4): the backward op is placed with its forward. There
only forward times were simulated; here the backward and its gradients have their own.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from functools import cache, cached_property, reduce
from operator import and_, attrgetter
from typing import Any, final

from baechi.errors import InputError
from baechi.records.graph import Op, OpGraph, StepStructure, Tensor
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
from baechi.traced.operators import Attempt, TracedOp, TracedOperators, TracedTensor
from baechi.validation import FrozenDict, check_row

# The most that the gradient of a scalar takes. The scalar's own memory may be larger, as a loss's.
_MOST_SCALAR_BYTES = 16

# Prefixes of names, for readers; code uses `Op.phase` and `Op.forward`.
BACKWARD = "backward:"
LOSS = "loss"
RECOMPUTE = "recompute:"

# A tensor of a step with its bytes; `~i` are the extra saved bytes of op i.
_Edge = tuple[Tensor, int]


@final
@dataclass(frozen=True)
class Traced(TracedOperators):
    """A traced model.

    Attributes:
        attempts: The rungs that were tried, in order; the last is the one taken.
        training: Whether the model was in training mode.
        module: The torch module for `profile` and `apply`; `None` after a load.
    """

    attempts: tuple[Attempt, ...]
    training: bool
    module: Any = field(default=None, compare=False, repr=False, metadata={"json": False})

    @property
    def rung(self) -> str:
        """The rung of the ladder that was taken."""
        return self.attempts[-1].rung

    @cached_property
    def digest(self) -> str:
        """The sha256, in hexadecimal, of everything but the module."""
        read_op, read_tensor = (
            attrgetter(*(field.name for field in fields(kind))) for kind in (TracedOp, TracedTensor)
        )
        rows = [self.name, self.training, [*map(read_op, self.ops)]]
        rows.append([*map(read_tensor, self.tensors)])
        text = json.dumps(rows, separators=(",", ":"), default=astuple)
        return hashlib.sha256(text.encode()).hexdigest()

    @cached_property
    def made_bytes(self) -> tuple[int, ...]:
        """Bytes of new storage that each op outputs to other ops or to the caller."""
        return tuple(sum(tensor.nbytes for tensor in tensors) for tensors in self.made)

    def structure(
        self,
        *,
        training: bool = True,
        checkpoint: str | Iterable[str] | None = None,
        draws_in_order: bool = False,
    ) -> StepStructure:
        """The structure of one step of this model, without costs; arguments as those of `graph`."""
        return _structure(self, training, checkpoint, draws_in_order)[0]

    def sized_tensors(
        self,
        *,
        training: bool = True,
        checkpoint: str | Iterable[str] | None = None,
        draws_in_order: bool = False,
    ) -> list[tuple[Tensor, int]]:
        """The tensors of `structure`, in order, with bytes; `~i` for what op i saves inside."""
        structure, sizes = _structure(self, training, checkpoint, draws_in_order)
        return list(zip(structure.tensors, sizes, strict=True))

    def graph(
        self,
        profile: Profile | Sequence[Profile],
        *,
        training: bool = True,
        optimizer: str | None = None,
        checkpoint: str | Iterable[str] | None = None,
        draws_in_order: bool = False,
    ) -> OpGraph:
        """The operator graph of one step of this model.

        Args:
            profile: Costs of this traced model, or several of different kinds of device, such as a
                measured one and an estimated one; the first gives the ops' default costs.
            training: The mirrored graph of forward, loss and backward; else the forward alone.
            optimizer: The optimizer whose state is persistent: a name of
                `optimizer_state.OPTIMIZERS`, with options.
            checkpoint: Paths of submodules, or patterns such as `"h.*"`: each of them keeps only
                its inputs for the backward and runs its forward again there. `place` and
                `choose_checkpoint` find them for a limit of memory.
            draws_in_order: Operators that draw random numbers run one after another in the model's
                order, whatever their devices. CPUs share one generator: so dropout masks are those
                of the unsplit model. Every GPU has a generator of its own.

        Raises:
            InputError: A profile is of another model, two are of one kind, the optimizer is
                unknown, or a name of `checkpoint` fits no submodule.

        Times are kept per named kind; the workspace and the launch of an op are the largest of all
        profiles.
        """
        rows = [profile] if isinstance(profile, Profile) else profile
        profiles = list(check_row(rows, "profiles", Profile))
        for row in profiles:
            if row.traced_digest != self.digest or len(row.costs) != len(self.ops):
                raise InputError(
                    f"the profile is of another model (digest {row.traced_digest[:12]}..., "
                    f"{len(row.costs)} ops) than this {self.name} (digest {self.digest[:12]}..., "
                    f"{len(self.ops)} ops). Profile this traced model."
                )
        _check_kinds(profiles)
        check_optimizer(optimizer)
        costs = _merged(profiles)
        structure, edges = _structure(self, training, checkpoint, draws_in_order)
        sizes = (size if size >= 0 else costs[~size].saved_bytes for size in edges)
        tensors = tuple(
            replace(row, nbytes=size) for row, size in zip(structure.tensors, sizes, strict=True)
        )
        ops = tuple(_ops(self, structure, tensors, costs, optimizer))
        times = {row.kind: op_times(structure, row.costs) for row in profiles if row.kind}
        return OpGraph(ops, tensors, FrozenDict(times))


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


def _inference_workspace(cost: OpCost) -> int:
    """Scratch memory of a forward without gradients.

    Where unknown, tensors that autograd would save may still be made, and freed soon.
    """
    measured = cost.inference_workspace_bytes
    return cost.workspace_bytes + cost.saved_bytes if measured is None else measured


def _check_kinds(profiles: Sequence[Profile]) -> None:
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
    late = _late_gradients(traced) if training else {}
    added = _added_gradients(traced) if training else {}
    gathered, largest = traced.gathered_bytes, _largest_shared(ops)
    sent, came = Counter[int](), Counter[int]()
    for tensor in tensors:
        sent[tensor.producer] += tensor.nbytes
        if tensor.producer >= structure.n_forward:
            came.update(dict.fromkeys(tensor.consumers, tensor.nbytes))
    again = {op for unit in structure.units.values() for op in unit}
    times = zip(op_times(structure, costs), op_times(structure, costs, "launch_ns"), strict=True)
    for index, (row, (time_ns, launch_ns)) in enumerate(zip(structure.ops, times, strict=True)):
        persistent = workspace = least = late_bytes = reused = 0
        beside: tuple[tuple[int, ...], ...] = ()
        if row.phase == "forward":
            persistent = persistent_bytes(ops[index], training=index in graded, optimizer=optimizer)
            late_bytes = ops[index].cast_bytes
            cost = costs[index]
            workspace = cost.workspace_bytes if training else _inference_workspace(cost)
            dead = training and ops[index].differentiable and index not in traced.differentiated
            if dead or index in again:  # it frees now what autograd would save
                workspace += cost.saved_bytes
        elif row.phase == "recompute":
            workspace = workspace_bytes(traced, row.forward, costs)
        elif row.phase == "backward":
            (own,) = row.forward
            # Shared parameters' gradients of this op, and the sum of one with that so far.
            shared = ops[own].shared_bytes
            workspace = (costs[own].backward_workspace_bytes or 0) + shared
            workspace += min(shared, largest.get(own, shared))
            beside = costs[own].backward_beside
            least = workspace - sum(nbytes for _, nbytes in beside)  # with all others elsewhere
            late_bytes = late.get(own, 0)
            made = sent[index] + late_bytes
            saved = costs[own].saved_bytes
            reused = min(costs[own].backward_reused_bytes, made, came[index] + saved)
            # At its end what came has gone, and a gradient of it is added to another reader's.
            least = max(least, added.get(own, 0) - came[index] + max(reused - saved, 0))
            if own in gathered:  # first what came is added up; with no kernel the sum is handed on
                reused = max(reused, 0 if time_ns > 1 else made - gathered[own])
                least = max(least, gathered[own] - made + reused)
            workspace = max(workspace, least)
        elif row.phase == "loss":  # autograd holds the gradient of a model's own to the end
            rows = (t for t in traced.tensors if t.scalar and t.kept and t.differentiable)
            persistent = max((min(t.nbytes, _MOST_SCALAR_BYTES) for t in rows), default=0)
        yield replace(
            row,
            time_ns=time_ns,
            persistent_bytes=persistent,
            workspace_bytes=workspace,
            late_bytes=late_bytes,
            reused_bytes=reused,
            launch_ns=launch_ns,
            beside=tuple(_at_most(beside, workspace - least)),
        )


def _at_most(rows: Iterable[tuple[int, ...]], nbytes: int) -> Iterator[tuple[int, int]]:
    """Rows of ops and bytes, with so many bytes at most."""
    for op, size in rows:
        if taken := min(size, nbytes):
            nbytes -= taken
            yield op, taken


def _structure(
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
    edges += [_edge(op, (at,), 0) for op, at in again.items()]
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
    viewed = _viewed_whole(traced)
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
            nbytes = min(tensor.nbytes, _MOST_SCALAR_BYTES) if tensor.scalar else tensor.nbytes
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


def _late_gradients(traced: TracedOperators) -> dict[int, int]:
    """Bytes of parameter gradients completed by the backward of each forward op.

    a parameter that one op reads        with that op's backward
    one that is only viewed for a reader with that reader's
    one that several ops read            with the last one's, if all others' can run only after
                                         it; else the order is unknown: not late at all
    """
    late = {op: _own_bytes(traced.ops[op]) for op in traced.backward_ops}
    for op, reader in _viewed_whole(traced).items():
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


def _own_bytes(op: TracedOp) -> int:
    """Bytes of the gradients of its parameters that no later op reads."""
    return op.trained_bytes - sum(nbytes for nbytes, *_ in op.lent)


def _viewed_whole(traced: TracedOperators) -> dict[int, int]:
    """Operators that only view a whole parameter for one reader, with that reader.

    The gradient from the reader is a view of the parameter's own gradient: it exists once, from the
    reader's backward on. A parameter that is read in parts gets a gradient assembled from theirs.
    """
    found = {}
    for op in reversed(traced.backward_ops):
        sent = [tensor for tensor in traced.made[op] if tensor.differentiable]
        own = traced.ops[op]
        if len(sent) != 1 or sent[0].nbytes or sent[0].gradient_bytes != (_own_bytes(own),):
            continue
        (reader,) = sent[0].consumers
        grouped = own.group is not None and own.group == traced.ops[reader].group
        if grouped and reader in traced.differentiated:
            found[op] = reader
    return found
