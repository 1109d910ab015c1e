"""A traced model as plain data, and the graph of one step of it.

`tracing.trace` makes a `Traced`; nothing here needs torch, so it can be saved on one machine and
placed on another. The structure of a step comes first, without costs; the graph is the structure
with costs.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from functools import cached_property
from operator import attrgetter
from typing import Any, final

from baechi.errors import InputError
from baechi.records.graph import OpGraph, StepStructure, Tensor
from baechi.records.op_costs import Profile
from baechi.records.optimizer_state import check_optimizer
from baechi.traced.operators import Attempt, TracedOp, TracedOperators, TracedTensor
from baechi.traced.step_costs import costed_ops, merged_costs, op_times
from baechi.traced.step_structure import step_structure
from baechi.validation import FrozenDict, check_row


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
        return step_structure(self, training, checkpoint, draws_in_order)[0]

    def sized_tensors(
        self,
        *,
        training: bool = True,
        checkpoint: str | Iterable[str] | None = None,
        draws_in_order: bool = False,
    ) -> list[tuple[Tensor, int]]:
        """The tensors of `structure`, in order, with bytes; `~i` for what op i saves inside."""
        structure, sizes = step_structure(self, training, checkpoint, draws_in_order)
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
        costs = merged_costs(profiles)
        structure, edges = step_structure(self, training, checkpoint, draws_in_order)
        sizes = (size if size >= 0 else costs[~size].saved_bytes for size in edges)
        tensors = tuple(
            replace(row, nbytes=size) for row, size in zip(structure.tensors, sizes, strict=True)
        )
        ops = tuple(costed_ops(self, structure, tensors, costs, optimizer))
        times = {row.kind: op_times(structure, row.costs) for row in profiles if row.kind}
        return OpGraph(ops, tensors, FrozenDict(times))


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
