"""The state of one call of a placed model: lists of its values, gradients and graphs.

A step belongs to one call; nothing in it is shared between calls. Lanes write into different places
of its lists, in the order that the program gives them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch.autograd.graph import GradientEdge

from baechi.runtime.autograd.graph_edges import CutTensor
from baechi.runtime.autograd.recompute import RecomputeInputs
from baechi.torch_support.memory_meter import Meter

Edges = list[GradientEdge | None]


@final
class Step:
    """One call of a placed model.

    Attributes:
        differentiate: Whether to record what backward needs.
        meter: Counts memory, where there is one.
        inputs: The caller's tensors.
        slots: Values between tapes, by slot; each place of the program has its own.
        flags: For every value whether it needs a gradient; a tuple if it has several tensors.
        results: The tensors for the caller, by result.
        grads: Gradients between tapes, by slot.
        records: For every tape what its backward needs; None if it has none.
        cut_tensors: For every tape where what entered it came from, if the caller may write there.
        kept: For every checkpointed tape its inputs to run again; None if it need not.
        crossing: Values between tapes that run again, by slot.
        keep: Whether the running backward leaves the graph for another.
        apart: Whether tapes cut parameters off as they do what enters, so that no gradient waits
            for the stream on which a parameter was first used, and no tape runs its hooks.
        graphed: The tapes whose forward was a replay; their backward must be one.
        moved: What is written of the caller's tensors on another device than theirs, by input.
        own: The executor's state between the phases of the step.
    """

    __slots__ = (
        *("differentiate", "meter", "inputs", "slots", "flags", "results", "grads"),
        *("records", "cut_tensors", "kept", "crossing", "keep", "apart", "graphed", "moved", "own"),
        *("__weakref__",),
    )

    def __init__(
        self,
        differentiate: bool,
        meter: Meter | None,
        inputs: Sequence[torch.Tensor],
        sizes: "Sizes",
    ) -> None:
        self.differentiate = differentiate
        self.meter = meter
        self.inputs = inputs
        self.slots: list[Any] = [None] * sizes.slots
        self.flags: list[bool | tuple[bool, ...]] = [False] * sizes.values
        self.results: list[Any] = [None] * sizes.results
        self.grads: list[torch.Tensor | None] = [None] * sizes.grads
        self.records: list[Record | None] = [None] * sizes.tapes
        self.cut_tensors: list[list[CutTensor]] = [[] for _ in range(sizes.tapes)]
        self.kept: list[RecomputeInputs | None] = [None] * sizes.tapes
        self.crossing: dict[int, Any] = {}
        self.keep = False
        self.apart = False
        self.graphed: set[int] = set()
        self.moved: dict[int, torch.Tensor] = {}
        self.own: Any = None

    def write_back(self) -> None:
        """Write into the caller's tensors what was written elsewhere, at the forward's end."""
        with torch.no_grad():
            for index, tensor in self.moved.items():
                self.inputs[index].copy_(tensor)
        self.moved.clear()


@final
@dataclass(slots=True)
class Record:
    """The state that a tape's backward needs.

    Attributes:
        entered: The edge of every entry that has a gradient, or None.
        published: The edge of every tensor that left with one, or None.
        parameters: The edges of the tape's parameters where they are cut off.
        end: The edge behind all of them, and an empty tensor to begin with, if `seeds` is used.
        seeds: Where the end takes their gradients from.
    """

    entered: Edges
    published: Edges
    parameters: "dict[torch.nn.Parameter, GradientEdge]" = field(default_factory=dict)
    end: tuple[GradientEdge, torch.Tensor] | None = None
    seeds: list[torch.Tensor | None] = field(default_factory=list)


@final
@dataclass(frozen=True)
class Sizes:
    """The lengths of a step's lists."""

    slots: int
    values: int
    results: int
    grads: int
    tapes: int
