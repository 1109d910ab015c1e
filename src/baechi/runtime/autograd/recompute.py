"""Recomputation of a checkpointed tape, bit for bit, from the inputs that it keeps.

    forward     arguments ──► generated code, whose graph ends with it ──► slots
                    └── kept, with the state of the world then ──┐
    again       the same arguments, in the same world ──► generated code ──► the tape's graph

The world is what the code reads besides its arguments: the generator, autocast, buffers.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn

from baechi.errors import ExecutionError
from baechi.torch_support.torch_internals import buffers_of, version_of
from baechi.tracing.guards import Autocast


@final
@dataclass(frozen=True)
class Recomputation:
    """The recomputation of a tape."""

    copied: tuple[int, ...]  # arguments that are buffers which the model writes
    leaves: tuple[nn.Module, ...]  # opaque submodules with buffers that they may write
    random: bool  # whether it draws random numbers
    # Of what another tape of the unit makes again: (argument, slot, whether it is the slot's last
    # reader); and the slots of what it makes for those.
    crossing: tuple[tuple[int, int, bool], ...]
    leaving: frozenset[int]

    def keep(self, arguments: Sequence[Any], place: torch.device) -> "RecomputeInputs":
        """The inputs that the tape keeps to run again, before it runs."""
        rows = list(arguments)
        for argument in self.copied:
            rows[argument] = rows[argument].detach().clone()
        for argument, *_ in self.crossing:
            rows[argument] = None
        versions = [_version(value) for value in rows]
        buffers = [
            (owner, name, buffer.detach().clone())
            for leaf in self.leaves
            for owner in leaf.modules()
            for name, buffer in buffers_of(owner).items()
            if buffer is not None
        ]
        random = _random_state(place) if self.random else None
        return RecomputeInputs(rows, versions, tuple(buffers), random, Autocast.current())


def _version(value: Any) -> int:
    """The count of writes to a tensor; -1 where it is not counted."""
    known = isinstance(value, torch.Tensor) and not value.is_inference()
    return version_of(value) if known else -1


@final
@dataclass
class RecomputeInputs:
    """The inputs with which a tape runs again."""

    arguments: list[Any]  # of its function
    versions: list[int]  # the version counter of each; -1 where there is none
    buffers: tuple[tuple[nn.Module, str, torch.Tensor], ...]  # of opaque submodules, by name
    random: torch.Tensor | None  # the generator's state before it ran, if it draws from it
    autocast: Autocast

    def taken(self, again: Recomputation, crossing: dict[int, Any]) -> list[Any]:
        """The arguments, for the function to empty; what it may write is copied once more.

        Raises:
            ExecutionError: One was written since.
        """
        for value, version in zip(self.arguments, self.versions, strict=True):
            if _version(value) != version:
                raise ExecutionError(
                    f"a tensor of shape {list(value.shape)} that a checkpointed submodule read was "
                    "written in place between forward and backward, so its forward cannot run "
                    "again with it. Write into a copy, or leave the submodule out of checkpoint."
                )
        rows = list(self.arguments)
        for argument in again.copied:
            rows[argument] = rows[argument].clone()
        for argument, slot, last in again.crossing:
            rows[argument] = crossing.pop(slot) if last else crossing[slot]
        return rows

    @contextmanager
    def world(self, place: torch.device) -> Iterator[None]:
        """The block runs as the forward did, with a graph; afterwards all is as before."""
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            stack.enter_context(self.autocast.applied())
            if self.random is not None:
                stack.callback(_set_random_state, place, _random_state(place))
                _set_random_state(place, self.random)
            for owner, name, value in self.buffers:
                buffers = buffers_of(owner)
                stack.callback(buffers.__setitem__, name, buffers[name])
                buffers[name] = value.clone()
            yield


def _random_state(place: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(place) if place.type == "cuda" else torch.get_rng_state()


def _set_random_state(place: torch.device, state: torch.Tensor) -> None:
    if place.type == "cuda":
        torch.cuda.set_rng_state(state, place)
    else:
        torch.set_rng_state(state)
