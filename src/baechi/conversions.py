"""Conversions of modules that change nothing, which a forward may ask for in each call.

`module.to(dtype)` puts every parameter anew into its module. A tracer's stand-ins for parameters
cannot be put there (`_apply(): Couldn't swap`), even where type and device stay.

Seen with torch 2.13: https://github.com/pytorch/pytorch/issues/153056. To be removed when
`test_conversions.py::test_torch_still_cannot_convert` fails on the oldest torch that we take.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn


@contextmanager
def effectless_conversions_skipped() -> Iterator[None]:
    """Trace inside: `module.to` does nothing where type and device are those asked for."""
    own = nn.Module.to

    def to(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        device, dtype, _, layout = torch._C._nn._parse_to(*args, **kwargs)
        tensors = [*self.parameters(), *self.buffers()]
        if layout is None and all(_is_so(tensor, device, dtype) for tensor in tensors):
            return self
        return own(self, *args, **kwargs)

    with patch.object(nn.Module, "to", to):
        yield


def _is_so(tensor: torch.Tensor, device: torch.device | None, dtype: torch.dtype | None) -> bool:
    numbers = tensor.is_floating_point() or tensor.is_complex()
    if dtype is not None and numbers and tensor.dtype != dtype:
        return False
    return device is None or device == (
        tensor.device if device.index is not None else torch.device(tensor.device.type)
    )
