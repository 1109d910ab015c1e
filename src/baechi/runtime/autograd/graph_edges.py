"""Entry and exit points of a tape's graph: what enters or leaves is cut off there."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch.autograd.graph import GradientEdge
from torch.utils import _pytree as pytree

from baechi.torch_support.torch_internals import delayed_error, set_version, version_of


def cut_off(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The same tensors as the beginning of a graph of their own.

    Leaves would do, but a leaf stays alive as long as its graph, and cannot be written in place.
    This node shares storage and keeps nothing; backward stops at its edges and never runs it.
    """
    return delayed_error("a tape's backward stops here", tensors)


@final
@dataclass(frozen=True, slots=True)
class CutTensor:
    """A cut-off tensor and its source: memory that the caller may write before the backward.

    A cut-off tensor counts writes for itself, so autograd would not see that what it has saved was
    written since, and gradients would be silently wrong.

    Attributes:
        source: The caller's tensor or a parameter, or an alias of it.
        cut: An alias of the cut-off one, without its graph.
        version: The version counter of the source.
    """

    source: torch.Tensor
    cut: torch.Tensor
    version: int

    @classmethod
    def of(cls, source: torch.Tensor, cut: torch.Tensor) -> "CutTensor":
        """Of a tensor that is cut off now."""
        return cls(source, cut.detach(), version_of(source))

    def sync_version(self) -> None:
        """Count writes to the source for the cut-off tensor, too, where autograd looks."""
        written = version_of(self.source) - self.version
        if written:
            set_version(self.cut, version_of(self.cut) + written)


def part(
    wanted: Sequence[torch.nn.Parameter], arguments: list[Any]
) -> tuple[dict[torch.nn.Parameter, GradientEdge], list[CutTensor]]:
    """Cut parameters off from the caller's graph; the edges of their gradients.

    A parameter's own node belongs to the stream on which it was first used, and a gradient that
    comes to it makes that stream wait; that node has the caller's hooks, too. A graph that is kept
    must not keep it either.

    Args:
        wanted: Those that need a gradient.
        arguments: Of a tape; they are replaced there.
    """
    places: dict[int, list[int]] = {id(parameter): [] for parameter in wanted}
    for place, argument in enumerate(arguments):
        if id(argument) in places:
            places[id(argument)].append(place)
    found = [parameter for parameter in wanted if places[id(parameter)]]
    bare = cut_off([parameter.detach() for parameter in found]) if found else ()
    edges: dict[torch.nn.Parameter, GradientEdge] = {}
    cut_tensors: list[CutTensor] = []
    for parameter, tensor in zip(found, bare, strict=True):
        assert tensor.grad_fn is not None  # the node that cuts off
        edges[parameter] = GradientEdge(tensor.grad_fn, tensor.output_nr)
        cut_tensors.append(CutTensor.of(parameter, tensor))
        for place in places[id(parameter)]:
            arguments[place] = tensor
    return edges, cut_tensors


def tensor_slots(leaves: Sequence[Any]) -> list[int]:
    """The indices of the tensors."""
    return [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]


def detached(value: Any) -> tuple[Any, list[torch.Tensor]]:
    """A structure without its graph, and its tensors with theirs."""
    leaves, spec = pytree.tree_flatten(value)
    tensors = []
    for slot in tensor_slots(leaves):
        tensors.append(leaves[slot])
        leaves[slot] = leaves[slot].detach()
    return pytree.tree_unflatten(leaves, spec), tensors


def compact(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """The gradient in room of its own, if it is a part of a larger storage.

    A concatenation gives back parts of the one gradient that it got. On one tape they share it
    until the last is used; between tapes, which may be far apart, each would keep all of it.
    """
    if (
        gradient is None
        or gradient.layout is not torch.strided
        or gradient.untyped_storage().nbytes() <= gradient.nbytes
    ):
        return gradient
    return gradient.clone()


@final
@dataclass(frozen=True)
class Entry:
    """A tensor that may enter with a gradient.

    Attributes:
        argument: The index of the argument of the function that holds it.
        leaf: Its index among the argument's tensors.
        value: The value whose flag says whether it needs a gradient; -1 for a parameter.
        grad: The slot that gets its gradient.
        given: Whether it is the caller's tensor.
        keeps_strides: Whether its gradient is handed on without a dense copy (`gradient_strides`).
    """

    argument: int
    leaf: int
    value: int
    grad: int
    given: bool = False
    keeps_strides: bool = False


@final
@dataclass(frozen=True)
class Output:
    """A value that leaves the tape.

    Attributes:
        result: Its index among the function's results; -1 if the caller or the model gives it.
        given: That value: the index of the caller's tensor, or the model's own tensor.
        value: Its number.
        bare: Whether it is a tensor and not a structure of several.
        slots: Where it goes.
        results: Where else, for the caller.
    """

    result: int
    given: Any
    value: int
    bare: bool
    slots: tuple[int, ...]
    results: tuple[int, ...]
