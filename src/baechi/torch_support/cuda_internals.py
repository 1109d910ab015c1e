"""Private names of torch's CUDA allocator and of its kernels over lists of tensors.

Seen to work with torch 2.11 and 2.13; `tests/torch_support/test_internals.py` names the one that a
new version breaks.
"""

from collections.abc import Sequence
from typing import Any

import torch


def abandon_pool(device: int, pool: Any) -> None:
    """Tell the allocator that a capture into a pool is over, though its end failed.

    Raises:
        RuntimeError: No capture into this pool was begun.
    """
    torch._C._cuda_endAllocateToPool(device, pool)
    torch._C._cuda_releasePool(device, pool)


def copy_each(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy every source into its target, with few launches."""
    torch._foreach_copy_(list(targets), list(sources))
