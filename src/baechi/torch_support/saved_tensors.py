"""The tensors that autograd saves, seen through saved-tensor hooks.

The trace sees on fake tensors what is saved of the graph's tensors. What a kernel saves besides,
such as a recurrent kernel's workspace or the statistics of a normalization, depends on the kernel
that the device has; so it is measured where the operator is.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree
from torch.utils import checkpoint

from baechi.torch_support.autograd_internals import (
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    saved_tensor_hooks,
)
from baechi.torch_support.storages import distinct_storages


def saved_inside_bytes(call: Callable[[], Any], known: Sequence[torch.Tensor]) -> int:
    """Bytes autograd saves during `call`, counting each storage once and ignoring known ones.

    Args:
        call: Runs the operator and returns its results.
        known: Its inputs, parameters and buffers; their storages and those of its results are
            tensors of the graph or state, and not counted.
    """
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.detach())
        return kept[-1]  # a result itself would hold its graph, and that its result, for ever

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        result = call()
    leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    own = distinct_storages([*known, *leaves])
    return sum(row.nbytes() for key, row in distinct_storages(kept).items() if key not in own)


def is_hooked() -> bool:
    """True if saved-tensor hooks are active now."""
    return saved_tensor_hooks() is not None


def is_checkpointed() -> bool:
    """True if `torch.utils.checkpoint(use_reentrant=False)` receives what autograd saves now."""
    hooks = saved_tensor_hooks()
    return hooks is not None and hooks[0].__module__ == checkpoint.__name__


@contextmanager
def unhooked() -> Iterator[None]:
    """Run the block without the saved-tensor hooks that are on around it, such as checkpointing's.

    The hooks belong to the caller's code; checkpointing would rerun all of that for a tensor that
    the block saved.
    """
    hooks = []
    while (top := saved_tensor_hooks()) is not None:
        hooks.append(top)
        pop_saved_tensor_hooks()
    try:
        yield
    finally:
        for pair in reversed(hooks):
            push_saved_tensor_hooks(pair)


class TapeEnd(torch.autograd.Function):
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
