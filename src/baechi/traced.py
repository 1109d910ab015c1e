"""A traced model as plain data: its operators, the tensors between them, and what autograd keeps.

`tracing.trace` makes one; `Traced.graph` turns it and a `Profile` into the `OpGraph` that `solve`
takes. Nothing here needs torch, so a trace is saved on one machine and planned with on another.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, field
from functools import cached_property
from typing import Any, final

from baechi.costs import Profile
from baechi.graph import OpGraph
from baechi.optimizers import TrainedParameter


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


@final
@dataclass(frozen=True)
class Traced:
    """A traced model.

    Attributes:
        name: The model's class.
        ops: The operators, in program order.
        tensors: The tensors between them.
        attempts: The rungs that were tried, in order; the last is the one taken.
        training: Whether the model was in training mode.
        module: What `profile` and `apply` need of torch; `None` after a load.
    """

    name: str
    ops: tuple[TracedOp, ...]
    tensors: tuple[TracedTensor, ...]
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
        rows = [self.name, self.training, [astuple(op) for op in self.ops]]
        rows.append([astuple(tensor) for tensor in self.tensors])
        text = json.dumps(rows, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    @cached_property
    def made_bytes(self) -> tuple[int, ...]:
        """Bytes of new storage that each op gives out to others or to the caller."""
        made = [0] * len(self.ops)
        for tensor in self.tensors:
            made[tensor.producer] += tensor.nbytes
        return tuple(made)

    def graph(
        self,
        profile: Profile | Sequence[Profile],
        *,
        training: bool = True,
        optimizer: str | None = None,
        checkpoint: str | Iterable[str] | None = None,
    ) -> OpGraph:
        """The operator graph of one step of this model.

        Args:
            profile: Costs of this traced model, or several of different kinds of device, such as a
                measured one and an estimated one; the first one's are the ops' own.
            training: The mirrored graph of forward, loss and backward; else the forward alone.
            optimizer: Whose state is persistent: a name of `optimizers.OPTIMIZERS`, with options.
            checkpoint: Paths of submodules, or patterns such as `"h.*"`: each of them keeps only
                its inputs for the backward and runs its forward again there. `place` and
                `choose_checkpoint` find them for a limit of memory.

        Raises:
            InputError: A profile is of another model, two are of one kind, the optimizer is
                unknown, or a name of `checkpoint` fits no submodule.
        """
        from baechi.training import operator_graph

        return operator_graph(
            self, profile, training=training, optimizer=optimizer, checkpoint=checkpoint
        )
