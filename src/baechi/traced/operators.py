"""The operators of a traced model, and the tensors between them."""

from dataclasses import dataclass
from typing import final

from baechi.records.optimizer_state import TrainedParameter


@final
@dataclass(frozen=True, slots=True)
class TracedOp:
    """One operator of a traced model: a node that computes, with its views and in-place nodes.

    Attributes:
        name: Unique: the owning submodule's path and the anchor node's name.
        nodes: Names of its fx nodes, in program order.
        key: Equal keys cost the same: operators, shapes, dtypes, strides and constants.
        parameters: Qualified names of the parameters and buffers that it owns.
        trained_bytes: Bytes of those that have gradients.
        frozen_bytes: Bytes of the others.
        shared_bytes: Bytes of the parameters with gradients that a later op reads, too: their
            gradients exist once for each until they are added up.
        saves: Tensors (indices) that autograd keeps for its backward.
        saved_bytes: Bytes that autograd keeps besides those: storage made inside.
        differentiable: Whether it has a backward.
        random: Whether it draws random numbers.
        group: Ops that cannot be apart carry the same one.
        source: The model's own line.
        trained: Shape and type of those of its parameters that have gradients.
        lent: For each of these that later ops read, too: its bytes, then those ops, ascending.
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


@final
@dataclass(frozen=True, slots=True)
class TracedTensor:
    """One storage that an op makes and others read, whichever views of it they read.

    Attributes:
        producer: Index of the op that makes it.
        consumers: Indices of the ops that read it.
        nbytes: Bytes of the storage.
        kept: Whether the caller gets it.
        differentiable: Whether a gradient flows back.
        gradient_bytes: For each consumer the bytes of the gradient that it sends back: of what it
            reads, which may be a part of the storage. Where it says nothing, those of the storage.
        scalar: Whether the caller gets it without dimensions, as a model's own loss.
    """

    producer: int
    consumers: tuple[int, ...]
    nbytes: int
    kept: bool = False
    differentiable: bool = False
    gradient_bytes: tuple[int, ...] = ()
    scalar: bool = False


@final
@dataclass(frozen=True, slots=True)
class Attempt:
    """One rung of the ladder that was tried: `reason` is empty for the rung that was taken."""

    rung: str
    reason: str = ""


@dataclass(frozen=True)
class TracedOperators:
    """What the graph of a step is made of.

    Attributes:
        name: The model's class.
        ops: The operators, in program order.
        tensors: The tensors between them.
    """

    name: str
    ops: tuple[TracedOp, ...]
    tensors: tuple[TracedTensor, ...]
