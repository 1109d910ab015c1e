"""What autograd keeps of one operator that runs: by storage, through saved-tensor hooks.

The trace sees on fake tensors what is kept of the graph's tensors. What a kernel keeps besides,
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


def saved_inside_bytes(call: Callable[[], Any], known: Sequence[torch.Tensor]) -> int:
    """Bytes that autograd keeps after `call`, each storage once, that are nobody else's.

    Args:
        call: Runs the operator and returns what it gives out.
        known: Its inputs, parameters and buffers; their storages and those of what it gives out
            are tensors of the graph or state, and not counted.
    """
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.detach())
        return kept[-1]  # a result itself would hold its graph, and that its result, for ever

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        result = call()
    leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    own = {tensor.untyped_storage()._cdata for tensor in [*known, *leaves]}
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in kept}
    return sum(storage.nbytes() for key, storage in storages.items() if key not in own)


def is_hooked() -> bool:
    """Whether what autograd saves now goes through hooks."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def is_checkpointed() -> bool:
    """Whether what autograd saves now goes to `torch.utils.checkpoint(use_reentrant=False)`."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and hooks[0].__module__ == checkpoint.__name__


@contextmanager
def unhooked() -> Iterator[None]:
    """Run the block without the saved-tensor hooks that are on around it, such as checkpointing's.

    They are for what the caller computes: checkpointing would run the whole call again for a
    tensor of the block.
    """
    hooks = []
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


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
