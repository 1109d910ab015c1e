"""The operator graph, the input of a placement, and its structure without costs.

An `OpGraph` is a directed acyclic hypergraph. A vertex is an operator with its time and memory. A
hyperedge is a tensor: one producer, any number of consumers, sent at most once to each device.
Nothing here needs torch, so a scheduler can build, save and load graphs by itself.

    forward ops   0 ... n-1
    loss          n                  where the step trains; the caller computes it
    backward ops  n+1 ...            each of one forward op
    recompute ops among these        each runs the forward ops of a checkpointed unit again

A traced model has such a `StepStructure` without costs (`Traced.structure`). Programs are made of
the structure alone, so that they do not depend on costs.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, final

from baechi.errors import InputError
from baechi.units import check_bytes
from baechi.validation import (
    INT64_MAX,
    FrozenDict,
    check_count,
    check_counts,
    check_is,
    check_name,
    check_pairs,
    check_row,
    settle,
)

if TYPE_CHECKING:
    import networkx

    from baechi.records.graph_arrays import GraphArrays

Phase: TypeAlias = Literal["forward", "loss", "backward", "recompute"]
_NONE: tuple[int, ...] = ()


@final
@dataclass(frozen=True, slots=True)
class Op:
    """An operator; its sizes may be given as strings, such as `"10GiB"`.

    Attributes:
        name: Unique in its graph.
        time_ns: Its time alone on a device of speed 1.
        persistent_bytes: Held for the whole step, but for `late_bytes`: parameters, gradients,
            optimizer state.
        workspace_bytes: Held while it runs.
        group: Ops of one group share a device; `None` is alone.
        late_bytes: The part of its group's persistent bytes that is allocated only when this op
            starts: gradients of parameters, which the backward produces, and casts of theirs, which
            autocast keeps.
        reused_bytes: The part of its outputs and late bytes that reuses the memory of inputs which
            it frees while it runs.
        launch_ns: Time that the launching host is busy with it, where its device has a host.
        beside: Rows `(op, bytes)`, ascending: so much of its workspace is there only beside that
            op, such as a gradient that autograd holds where the op goes backward later. It is not
            held where the op was launched before, into another memory.
        phase: Its part of a training step: `"forward"`, `"loss"`, `"backward"`, or
            `"recompute"` for an op of the backward that runs forward ops again.
        forward: The forward op (index) that a backward op belongs to; those that a recompute op
            runs again, ascending.
    """

    name: str
    time_ns: int
    persistent_bytes: int = 0
    workspace_bytes: int = 0
    group: str | None = None
    late_bytes: int = 0
    reused_bytes: int = 0
    phase: Phase = "forward"
    forward: tuple[int, ...] = _NONE
    launch_ns: int = 0
    beside: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        # Checked one by one only if something is unusual: a graph may have a million ops.
        held, used = self.persistent_bytes, self.workspace_bytes
        amounts = (self.time_ns, held, used, self.late_bytes, self.reused_bytes, self.launch_ns)
        if (
            type(self.name) is str
            and self.name
            and type(self.time_ns) is type(held) is type(used) is int
            and type(self.late_bytes) is type(self.reused_bytes) is type(self.launch_ns) is int
            and min(amounts) >= 0
            and max(amounts) <= INT64_MAX
            and (self.group is None or (type(self.group) is str and self.group))
            and ((self.phase == "forward" and self.forward is _NONE) or self._has_phase())
            and self.beside == ()
        ):
            return
        check_name(self.name, "op name")
        sizes = [name for name in self.__slots__ if name.endswith("_bytes")]
        settle(self, check_count, ("time_ns", "launch_ns"), f"of op {self.name!r}")
        settle(self, check_bytes, sizes, f"of op {self.name!r}")
        if self.group is not None:
            check_name(self.group, f"group of op {self.name!r}")
        object.__setattr__(self, "beside", self._checked_beside())
        what = f"forward of op {self.name!r}"
        object.__setattr__(self, "forward", tuple(sorted(check_counts(self.forward, what))))
        if not self._has_phase():
            raise InputError(
                f"op {self.name!r} is of phase {self.phase!r} with forward={self.forward}; "
                "a forward op or a loss has none there, a backward op has the one op that it "
                "belongs to, and a recompute op has those that it runs again."
            )

    def _checked_beside(self) -> tuple[tuple[int, ...], ...]:
        """The rows, if they are a part of the workspace."""
        what = f"beside of op {self.name!r}"
        rows = check_pairs(self.beside, what)
        nbytes = sum(nbytes for _, nbytes in rows)
        if nbytes > self.workspace_bytes:
            raise InputError(
                f"{what} has {nbytes} bytes, and its workspace_bytes are {self.workspace_bytes}; "
                "they are a part of them."
            )
        return rows

    def _has_phase(self) -> bool:
        """True if `phase` is valid, and `forward` agrees with it."""
        if type(self.phase) is not str or type(self.forward) is not tuple:
            return False
        n = len(self.forward)
        fits = {"forward": n == 0, "loss": n == 0, "backward": n == 1, "recompute": n > 0}
        return fits.get(self.phase, False) and _ascends(self.forward)

    @property
    def in_backward(self) -> bool:
        """True if it runs after the loss."""
        return self.phase in ("backward", "recompute")

    @property
    def net_workspace_bytes(self) -> int:
        """Bytes held while it runs besides inputs and outputs; negative where it reuses more."""
        return self.workspace_bytes - self.reused_bytes


@final
@dataclass(frozen=True, slots=True)
class Tensor:
    """A value that one op produces and others consume; a hyperedge.

    Attributes:
        producer: Op index.
        consumers: Op indices, ascending, without repetition (the constructor sorts them).
        nbytes: Its size, in memory and on a link; may be given as a string.
        kept: Returned to the caller, so it stays until the end of the step.
        order: Only an order: the consumers run after the producer, and nothing is handed over.
        parts: Rows `(bytes, consumer, consumer, ...)`: so much of it is all that these read. A copy
            holds what its readers there read, each part once; other consumers read the whole.
    """

    producer: int
    consumers: tuple[int, ...]
    nbytes: int
    kept: bool = False
    order: bool = False
    parts: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if (
            type(self.producer) is type(self.nbytes) is int
            and 0 <= self.producer <= INT64_MAX
            and 0 <= self.nbytes <= INT64_MAX
            and type(self.kept) is type(self.order) is bool
            and self.parts == ()
            and type(self.consumers) is tuple
            and _ascends(self.consumers)
        ):
            return
        object.__setattr__(self, "producer", check_count(self.producer, "producer of a tensor"))
        what = f"of a tensor of op {self.producer}"
        row = check_row(self.consumers, f"consumers {what}")
        consumers = tuple(sorted({check_count(c, f"consumer {what}") for c in row}))
        object.__setattr__(self, "consumers", consumers)
        object.__setattr__(self, "nbytes", check_bytes(self.nbytes, f"nbytes {what}"))
        check_is(self.kept, bool, f"kept {what}")
        check_is(self.order, bool, f"order {what}")
        rows = tuple(check_counts(row, f"a part {what}") for row in check_row(self.parts, "parts"))
        object.__setattr__(self, "parts", rows)
        if not {op for row in rows for op in row[1:]} <= {*consumers} or not all(rows):
            raise InputError(
                f"the parts {what} are {rows}, and its consumers are {consumers}; a part is its "
                "bytes, and then those of the consumers that read it."
            )

    def copy_bytes(self, readers: Set[int]) -> int:
        """The bytes of a copy that these of its consumers read."""
        found = [row for row in self.parts if not readers.isdisjoint(row[1:])]
        if not readers <= {op for row in found for op in row[1:]}:
            return self.nbytes
        return min(self.nbytes, sum(row[0] for row in found))


def _ascends(values: tuple[Any, ...]) -> bool:
    """True if the values are strictly ascending ints that fit in 64 bits."""
    last = -1
    for value in values:
        if type(value) is not int or value <= last:
            return False
        last = value
    return last <= INT64_MAX


@dataclass(frozen=True)
class StepStructure:
    """The ops of a step and the tensors between them; index order is a topological order.

    Attributes:
        ops: The ops. `op` means an index into them everywhere. Without costs, their times and bytes
            are 0.
        tensors: The tensors. `tensor` means an index into them everywhere. Without costs, their
            bytes are 0, but not those of their parts.
    """

    ops: tuple[Op, ...]
    tensors: tuple[Tensor, ...]

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
        later = enumerate(self.ops)
        twin = {op.forward[0]: index for index, op in later if op.phase == "backward"}
        return tuple(twin.get(op, -1) for op in range(self.n_forward))

    @cached_property
    def units(self) -> Mapping[int, tuple[int, ...]]:
        """The recompute ops, and the forward ops that each of them runs again."""
        rows = enumerate(self.ops)
        return FrozenDict({index: op.forward for index, op in rows if op.phase == "recompute"})

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

    def check_placement(self, devices: Sequence[int], order: Sequence[int]) -> None:
        """Nothing, if the device of every op keeps groups together, and the order is topological.

        Raises:
            InputError: They do not, or are of another graph.
        """
        if len(devices) != len(self.ops):
            raise InputError(
                f"the placement is of another graph: it has {len(devices)} ops, and this step has "
                f"{len(self.ops)}. Solve the graph of this step; and give graph=..., if it was "
                "made with checkpoint=..."
            )
        rank = {op: i for i, op in enumerate(order)}
        for tensor in self.tensors:
            first = min(tensor.consumers, key=rank.__getitem__, default=tensor.producer)
            if rank[first] < rank[tensor.producer]:
                names = self.ops[first].name, self.ops[tensor.producer].name
                raise InputError(
                    f"the order launches op {names[0]!r} before op {names[1]!r}, whose tensor it "
                    "consumes; an order must be topological."
                )
        for group, members in self.groups.items():
            apart = [op for op in members if devices[op] != devices[members[0]]]
            if apart:
                one, two = members[0], apart[0]
                raise InputError(
                    f"group {group!r} is parted: op {self.ops[one].name!r} is on device "
                    f"{devices[one]} and op {self.ops[two].name!r} on device {devices[two]}."
                )


@final
@dataclass(frozen=True)
class OpGraph(StepStructure):
    """The structure of a step with its costs.

    Attributes:
        times: Device kind to the time of every op on it, where known per kind.

    Raises:
        InputError: Two ops of one name, an unknown op index, a tensor that is consumed before it
            is produced (a cycle, or no topological order), a group of which more bytes are late
            than persistent, an op that reuses more than it makes, phases that are no training
            step, or a `times` row of another length.
    """

    ops: tuple[Op, ...]
    tensors: tuple[Tensor, ...] = ()
    times: Mapping[str, tuple[int, ...]] = field(default_factory=FrozenDict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ops", check_row(self.ops, "ops", Op))
        object.__setattr__(self, "tensors", check_row(self.tensors, "tensors", Tensor))
        if len({op.name for op in self.ops}) < len(self.ops):
            ((twice, _),) = Counter(op.name for op in self.ops).most_common(1)
            raise InputError(f"two ops are named {twice!r}; names must be unique.")
        self._check_tensors()
        self._check_parts()
        self._check_phases()
        times = {}
        check_is(self.times, Mapping, "times")  # type: ignore[type-abstract]
        for kind in sorted(self.times):
            what = f"time of an op on device kind {kind!r}"
            row = check_counts(self.times[kind], what)
            if len(row) != len(self.ops):
                raise InputError(
                    f"times[{kind!r}] has {len(row)} entries for {len(self.ops)} ops; "
                    "give one time per op."
                )
            times[check_name(kind, "device kind")] = row
        object.__setattr__(self, "times", FrozenDict(times))

    def _check_tensors(self) -> None:
        n = len(self.ops)
        for index, tensor in enumerate(self.tensors):
            first, last = (tensor.consumers or (n,))[0], (tensor.consumers or (-1,))[-1]
            if max(tensor.producer, last) >= n:
                worst = max(tensor.producer, last)
                raise InputError(f"tensor {index} names op {worst}, but there are {n} ops.")
            if first <= tensor.producer:
                producer, consumer = self.ops[tensor.producer].name, self.ops[first].name
                raise InputError(
                    f"tensor {index} goes from op {producer!r} (index {tensor.producer}) to op "
                    f"{consumer!r} (index {first}): the graph has a cycle, or its "
                    "index order is not topological. Sort the ops so that producers come first."
                )

    def _check_parts(self) -> None:
        """Late bytes are a part of their group's persistent ones, reused bytes of what is made.

        What is held beside an op is held beside one of the graph.
        """
        for op in self.ops:
            if op.beside and op.beside[-1][0] >= len(self.ops):
                raise InputError(
                    f"beside of op {op.name!r} names op {op.beside[-1][0]}, but there are "
                    f"{len(self.ops)} ops."
                )
        if not any(op.late_bytes or op.reused_bytes for op in self.ops):
            return
        owners = self._owners()
        left: Counter[str | int] = Counter()
        for op, owner in zip(self.ops, owners, strict=True):
            left[owner] += op.persistent_bytes - op.late_bytes
        made = [op.late_bytes for op in self.ops]
        for tensor in self.tensors:
            made[tensor.producer] += tensor.nbytes
        for op, owner, nbytes in zip(self.ops, owners, made, strict=True):
            if op.late_bytes and left[owner] < 0:
                whose = "its" if op.group is None else f"group {op.group!r}'s"
                raise InputError(
                    f"late_bytes of op {op.name!r} is {op.late_bytes}, but {whose} persistent "
                    f"bytes are {-left[owner]} too few for all that comes late; late bytes are a "
                    "part of them."
                )
            if op.reused_bytes > nbytes:
                raise InputError(
                    f"reused_bytes of op {op.name!r} is {op.reused_bytes}, but it makes {nbytes} "
                    "bytes of tensors and late bytes; reused bytes are a part of them."
                )

    def _owners(self) -> list[str | int]:
        """The group of every op, or the index of an op that is alone."""
        return [index if op.group is None else op.group for index, op in enumerate(self.ops)]

    def _check_phases(self) -> None:
        n, twins = self.n_forward, set[int]()
        for op in self.ops[n:]:
            later = op is not self.ops[n]
            if op.phase == "forward" or (op.phase != "loss") != later:
                raise InputError(
                    f"op {op.name!r} of phase {op.phase!r} is out of place; a training step is all "
                    "forward ops, one loss, then backward and recompute ops."
                )
            if any(own >= n for own in op.forward):
                raise InputError(f"forward of op {op.name!r} is {op.forward}; {n} ops are forward.")
            if op.phase == "backward" and op.forward[0] in twins:
                whose = self.ops[op.forward[0]].name
                raise InputError(f"op {op.name!r} is a second backward of {whose!r}; give one.")
            twins.update(op.forward if op.phase == "backward" else ())

    @cached_property
    def explicit(self) -> "OpGraph":
        """The same graph, with the same digest, in which late bytes are kept tensors of their op.

        They are taken from the persistent bytes of their group's first ops, and the tensors come
        after all others, so that every index stays what it is; the graph itself if none are late.
        """
        if not any(op.late_bytes for op in self.ops):
            return self
        owners = self._owners()
        late: Counter[str | int] = Counter()
        for op, owner in zip(self.ops, owners, strict=True):
            late[owner] += op.late_bytes
        ops = []
        for op, owner in zip(self.ops, owners, strict=True):
            taken = min(late[owner], op.persistent_bytes)
            late[owner] -= taken
            left = op.persistent_bytes - taken
            rest = replace(op, persistent_bytes=left, late_bytes=0)
            ops.append(rest if taken or op.late_bytes else op)
        rows = ((index, op.late_bytes) for index, op in enumerate(self.ops))
        tensors = [Tensor(index, (), nbytes, kept=True) for index, nbytes in rows if nbytes]
        graph = OpGraph(tuple(ops), (*self.tensors, *tensors), self.times)
        graph.__dict__["digest"] = self.digest
        return graph

    @cached_property
    def digest(self) -> str:
        """The sha256, in hexadecimal, of the graph's canonical JSON; O(ops + tensors).

        Phases are left out: they do not matter for placement, and graphs saved before ops had them
        keep their digests, and so their placements.
        """
        # The text of json.dumps with sorted keys and no blanks, in half its time.
        quote, compact = json.encoder.encode_basestring_ascii, (",", ":")
        ops = ",".join(
            f"[{quote(o.name)},{o.time_ns},{o.persistent_bytes},{o.workspace_bytes},"
            f"{'null' if o.group is None else quote(o.group)}"
            f"{f',{o.late_bytes}' if o.late_bytes or o.reused_bytes or o.launch_ns else ''}"
            f"{f',{o.reused_bytes}' if o.reused_bytes or o.launch_ns else ''}"
            f"{f',{o.launch_ns}' if o.launch_ns else ''}"
            f"{f',{json.dumps(o.beside, separators=compact)}' if o.beside else ''}]"
            for o in self.ops
        )
        tensors = ",".join(
            f"[{t.producer},[{','.join(map(str, t.consumers))}],{t.nbytes},"
            f"{'true' if t.kept else 'false'}{',true' if t.order else ''}"
            f"{f',{json.dumps(t.parts, separators=compact)}' if t.parts else ''}]"
            for t in self.tensors
        )
        times = json.dumps(dict(self.times), sort_keys=True, separators=compact)
        text = f'{{"ops":[{ops}],"tensors":[{tensors}],"times":{times}}}'
        return hashlib.sha256(text.encode()).hexdigest()

    @cached_property
    def arrays(self) -> "GraphArrays":
        """The graph as NumPy arrays, computed once."""
        from baechi.records.graph_arrays import arrays_of

        return arrays_of(self.ops, self.tensors, self.times)

    @cached_property
    def op_index(self) -> Mapping[str, int]:
        """The index of every op by its name."""
        return FrozenDict({op.name: index for index, op in enumerate(self.ops)})

    @cached_property
    def standing(self) -> frozenset[int]:
        """The ops whose tensors are there before the step, such as buffers that are sent about.

        They consume nothing, take no time, and all that they produce is kept.
        """
        rows = [[op.time_ns for op in self.ops], *self.times.values()]
        return frozenset(
            op
            for op in self.inputs
            if self.op_outputs[op]
            and not any(row[op] for row in rows)
            and all(self.tensors[tensor].kept for tensor in self.op_outputs[op])
        )

    @cached_property
    def inputs(self) -> tuple[int, ...]:
        """The ops that consume nothing."""
        return tuple(op for op, tensors in enumerate(self.op_inputs) if not tensors)

    @cached_property
    def outputs(self) -> tuple[int, ...]:
        """The tensors that are kept."""
        return tuple(index for index, tensor in enumerate(self.tensors) if tensor.kept)

    def to_networkx(self) -> "networkx.DiGraph[int]":
        """The graph as a `networkx.DiGraph`: ops are nodes, and an edge carries `nbytes`.

        An edge's `nbytes` is the sum over the tensors between its two ops.
        """
        import networkx

        digraph: networkx.DiGraph[int] = networkx.DiGraph()
        digraph.add_nodes_from((index, asdict(op)) for index, op in enumerate(self.ops))
        nbytes: Counter[tuple[int, int]] = Counter()
        for tensor in self.tensors:
            for consumer in tensor.consumers:
                nbytes[tensor.producer, consumer] += tensor.nbytes
        digraph.add_edges_from((*ends, {"nbytes": size}) for ends, size in nbytes.items())
        return digraph
