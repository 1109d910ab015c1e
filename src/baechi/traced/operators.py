"""The operators of a traced model, and the tensors between them."""

from dataclasses import dataclass
from functools import cached_property
from typing import final

from baechi.records.optimizer_state import TrainedParameter


@final
@dataclass(frozen=True, slots=True)
class TracedOp:
    """One operator of a traced model: a computing node with its views and in-place nodes.

    Attributes:
        name: Unique: the owning submodule's path and the anchor node's name.
        nodes: Names of its fx nodes, in program order.
        key: Equal keys cost the same: operators, shapes, dtypes, strides and constants.
        parameters: Qualified names of the parameters and buffers that it owns.
        trained_bytes: Bytes of those with gradients.
        frozen_bytes: Bytes of the others, and of casts of parameters that autocast keeps.
        shared_bytes: Bytes of the parameters with gradients that a later op also reads: each
            reader has its own gradient until they are added up.
        saves: Tensors (indices) that autograd saves for its backward.
        saved_bytes: Bytes of internal storage that autograd saves besides those.
        differentiable: Whether it has a backward.
        group: Equal for ops that must share a device.
        source: The line of the model's source.
        trained: Shape and element size of its parameters with gradients.
        lent: One row per trained parameter that later ops also read: (bytes, reader, reader, ...).
        cast_bytes: The part of `frozen_bytes` that comes when it begins: casts of parameters that
            no other op casts.
        rewritten_bytes: Bytes of the state that it reads and that forward writes, of which copies
            are kept where it runs forward again.
    """

    name: str
    nodes: tuple[str, ...]
    key: str
    parameters: tuple[str, ...] = ()
    trained_bytes: int = 0
    frozen_bytes: int = 0
    shared_bytes: int = 0
    saves: tuple[int, ...] = ()
    saved_bytes: int = 0
    differentiable: bool = False
    random: bool = False
    group: str | None = None
    source: str = ""
    trained: tuple[TrainedParameter, ...] = ()
    lent: tuple[tuple[int, ...], ...] = ()
    cast_bytes: int = 0
    rewritten_bytes: int = 0

    @property
    def own_bytes(self) -> int:
        """Bytes of the gradients of its parameters that no later op reads."""
        return self.trained_bytes - sum(nbytes for nbytes, *_ in self.lent)

    @property
    def modules(self) -> list[str]:
        """The submodules that it belongs to, the outermost first."""
        parts = self.name.partition("/")[0].split(".") if "/" in self.name else []
        return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


@final
@dataclass(frozen=True, slots=True)
class TracedTensor:
    """One storage that an op makes and others read, directly or through views.

    Attributes:
        producer: Index of the op that makes it.
        consumers: Indices of the ops that read it.
        nbytes: Bytes of the storage.
        kept: Whether it is returned to the caller.
        differentiable: Whether a gradient flows back.
        gradient_bytes: For each consumer the bytes of the gradient that it sends back, which may be
            for a part of the storage. Where absent, the bytes of the storage.
        scalar: Whether it is returned as a scalar, such as a model's own loss.
        gradient_to: For each consumer, and last for the caller, the op whose backward gets the
            gradient from there: the producer, or another consumer that adds its own. Where absent,
            the producer.
        parts: Rows (bytes, consumer, consumer, ...) of views that are all that these read of it.
    """

    producer: int
    consumers: tuple[int, ...]
    nbytes: int
    kept: bool = False
    differentiable: bool = False
    gradient_bytes: tuple[int, ...] = ()
    scalar: bool = False
    gradient_to: tuple[int, ...] = ()
    parts: tuple[tuple[int, ...], ...] = ()

    @property
    def sent_back(self) -> tuple[int, ...]:
        """For each consumer the bytes of the gradient that it sends back."""
        return self.gradient_bytes or (self.nbytes,) * len(self.consumers)


@final
@dataclass(frozen=True, slots=True)
class Attempt:
    """One rung of the ladder that was tried: `reason` is empty for the rung that was taken."""

    rung: str
    reason: str = ""


@dataclass(frozen=True)
class TracedOperators:
    """The operators of a traced model, in program order, and the tensors between them."""

    name: str
    ops: tuple[TracedOp, ...]
    tensors: tuple[TracedTensor, ...]

    @cached_property
    def made(self) -> tuple[tuple[TracedTensor, ...], ...]:
        """The tensors of every op."""
        made: list[list[TracedTensor]] = [[] for _ in self.ops]
        for tensor in self.tensors:
            made[tensor.producer].append(tensor)
        return tuple(map(tuple, made))

    @cached_property
    def returns_loss(self) -> bool:
        """Whether an output is a scalar with a gradient."""
        return any(row.scalar and row.kept and row.differentiable for row in self.tensors)

    @cached_property
    def backward_ops(self) -> tuple[int, ...]:
        """The ops that have a backward: a gradient reaches them from an output.

        In the order in which their backwards run, the last forward op first.
        """
        reached: set[int] = set()
        for op in reversed(range(len(self.ops))):
            if self.ops[op].differentiable and any(
                tensor.differentiable and (tensor.kept or not reached.isdisjoint(tensor.consumers))
                for tensor in self.made[op]
            ):
                reached.add(op)
        return tuple(sorted(reached, reverse=True))

    @cached_property
    def differentiated(self) -> frozenset[int]:
        """The same as a set."""
        return frozenset(self.backward_ops)

    def is_gathered(self, tensor: TracedTensor) -> bool:
        """True if the gradient of a tensor is the sum of several."""
        readers = self.differentiated.intersection(tensor.consumers)
        return tensor.differentiable and len(readers) + tensor.kept > 1

    @cached_property
    def gathered_bytes(self) -> dict[int, int]:
        """The largest gradient that is a sum of several, of each op with any.

        They come from several readers, or from one that reads several views of the whole.
        """
        found: dict[int, int] = {}
        for tensor in self.tensors:
            views = tensor.differentiable and max(tensor.gradient_bytes, default=0) > tensor.nbytes
            if views or self.is_gathered(tensor):
                found[tensor.producer] = max(found.get(tensor.producer, 0), tensor.nbytes)
        return found
