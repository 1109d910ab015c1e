"""The shapes of CTC losses with tensors for lengths, which torch's fake tensors lack.

Seen with torch 2.13: https://github.com/pytorch/pytorch/issues/183396. To be removed when
`test_ctc_loss.py::test_torch_still_lacks_the_shapes` fails on the oldest torch that we take.

What such a loss keeps for its backward depends on the longest target. Here it is as long as all
targets together, or as a row of them, which is a bound; the loss itself has the right shape.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses import fake_impls


@contextmanager
def ctc_losses_known() -> Iterator[None]:
    """Let fake tensors run `torch.nn.functional.ctc_loss`."""
    kernels = {torch.ops.aten._ctc_loss.Tensor: _shapes}
    with patch.dict(fake_impls.op_implementations_dict, kernels):
        yield


def _shapes(
    _mode: Any, _func: Any, log_probs: torch.Tensor, targets: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    steps, batch = (1, *log_probs.shape[:-1])[-2:]
    longest = targets.shape[-1]
    return log_probs.new_empty(batch), log_probs.new_empty(batch, steps, 2 * longest + 1)
