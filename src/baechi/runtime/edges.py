"""Where the graph of a tape begins and ends: what enters and leaves is cut off there."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree


def cut_off(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The same tensors as the beginning of a graph of their own.

    Leaves would do, but a leaf stays alive as long as its graph, and cannot be written in place.
    The node is the one that torch puts behind a `once_differentiable` backward: it shares storage
    and keeps nothing. Backward stops at its edges and never runs it.
    """
    node = torch._C._functions.DelayedError("a tape's backward stops here", len(tensors) + 1)
    seed = torch.empty(0, requires_grad=True)  # one input must need a gradient for all to have one
    found: Sequence[torch.Tensor] = node(seed, *tensors)
    return found[1:]


def tensor_slots(leaves: Sequence[Any]) -> list[int]:
    """Where the tensors are."""
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


class Leave(torch.autograd.Function):
    """The end of a tape's graph: what leaves it, and where its backward begins.

    What the engine is given stays alive as long as it runs. So it is given nothing, and this takes
    the gradients out of a list: then each lives until it is used.
    """

    @staticmethod
    def forward(ctx: Any, seeds: list[torch.Tensor | None], *tensors: torch.Tensor) -> torch.Tensor:
        """A token for all that leaves."""
        ctx.seeds = seeds
        return tensors[0].new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: torch.Tensor) -> tuple[Any, ...]:
        """The gradients in the list."""
        seeds = tuple(ctx.seeds)
        ctx.seeds.clear()
        return (None, *seeds)
