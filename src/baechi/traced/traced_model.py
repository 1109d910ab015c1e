"""A traced model as plain data: its operators, the tensors between them, and saved tensors.

`tracing.trace` makes one; `Traced.graph` turns it and a `Profile` into the `OpGraph` that `solve`
takes. Nothing here needs torch, so a trace can be saved on one machine and placed on another.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, field
from functools import cached_property
from typing import Any, final

from baechi.errors import InputError
from baechi.records.graph import OpGraph, StepStructure
from baechi.records.op_costs import Profile
from baechi.traced.operators import Attempt, TracedOperators
from baechi.traced.step_graph import operator_graph, step_structure
from baechi.validation import check_row


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
        rows = [self.name, self.training, [astuple(op) for op in self.ops]]
        rows.append([astuple(tensor) for tensor in self.tensors])
        text = json.dumps(rows, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    @cached_property
    def made_bytes(self) -> tuple[int, ...]:
        """Bytes of new storage that each op outputs to other ops or to the caller."""
        return tuple(sum(tensor.nbytes for tensor in tensors) for tensors in self.made)

    def structure(
        self, *, training: bool = True, checkpoint: str | Iterable[str] | None = None
    ) -> StepStructure:
        """The structure of one step of this model, without costs; arguments as those of `graph`."""
        return step_structure(self, training=training, checkpoint=checkpoint)[0]

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
                measured one and an estimated one; the first gives the ops' default costs.
            training: The mirrored graph of forward, loss and backward; else the forward alone.
            optimizer: The optimizer whose state is persistent: a name of
                `optimizer_state.OPTIMIZERS`, with options.
            checkpoint: Paths of submodules, or patterns such as `"h.*"`: each of them keeps only
                its inputs for the backward and runs its forward again there. `place` and
                `choose_checkpoint` find them for a limit of memory.

        Raises:
            InputError: A profile is of another model, two are of one kind, the optimizer is
                unknown, or a name of `checkpoint` fits no submodule.
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
        return operator_graph(
            self, profiles, training=training, optimizer=optimizer, checkpoint=checkpoint
        )
