"""What of a tensor must cross between devices: each of its bytes in memory once.

    expand       a row that stands for many     the row crosses, and is expanded there
    as_strided   windows that overlap           the memory under them crosses, and is cut up there

A copy of such a tensor as it is would be dense: larger than what it is a view of, on the link and
on the device that gets it.
"""

import torch


def once(tensor: torch.Tensor) -> torch.Tensor:
    """What has each byte under a tensor once; the tensor itself if no elements share memory."""
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return tensor
    stride = tensor.stride()
    shape = [1 if step == 0 else n for n, step in zip(tensor.shape, stride, strict=True)]
    extent = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    count = torch.Size(shape).numel()
    if extent < count:
        return tensor.as_strided((extent,), (1,))
    return tensor if count == tensor.numel() else tensor.as_strided(shape, stride)


def laid_out(moved: torch.Tensor, part: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """A copy of `once(tensor)`, which is `part`, seen as the tensor is."""
    if part is tensor:
        return moved
    if part.dim() == tensor.dim():
        return moved.expand(tensor.shape)
    return moved.as_strided(tensor.shape, tensor.stride())
