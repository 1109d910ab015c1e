"""Storages, and the part of a tensor that must cross between devices: each byte once.

    expand       a row that stands for many     the row crosses, and is expanded there
    as_strided   windows that overlap           the memory under them crosses, and is cut up there
    two views    of one tensor, side by side    the same

Copies of them one by one would be dense: larger than what they are views of, on the link and on the
device that gets them.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree


def once(tensor: torch.Tensor) -> torch.Tensor:
    """A view with each byte under a tensor once; itself if no elements share memory."""
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return tensor
    stride = tensor.stride()
    shape = [1 if step == 0 else n for n, step in zip(tensor.shape, stride, strict=True)]
    span = extent(tensor)
    count = torch.Size(shape).numel()
    if span < count:
        return tensor.as_strided((span,), (1,))
    return tensor if count == tensor.numel() else tensor.as_strided(shape, stride)


def laid_out(moved: torch.Tensor, part: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """A copy of `once(tensor)`, which is `part`, seen as the tensor is."""
    if part is tensor:
        return moved
    if part.dim() == tensor.dim():
        return moved.expand(tensor.shape)
    return moved.as_strided(tensor.shape, tensor.stride())


def crossings(tensors: Mapping[int, torch.Tensor]) -> list[tuple[int, ...]]:
    """Groups of numbered tensors that cross in one copy, since that is less memory; O(tensors)."""
    if len(tensors) == 1:
        return [tuple(tensors)]
    sharing: dict[Any, list[int]] = defaultdict(list)
    for number, tensor in tensors.items():
        key: Any = number
        if tensor.layout is torch.strided and tensor.numel():  # may be a view of a span with others
            memory = key_of(tensor.untyped_storage())
            key = memory, tensor.dtype, tensor.is_conj(), tensor.is_neg()
        sharing[key].append(number)
    rows: list[tuple[int, ...]] = []
    for members in sharing.values():
        views = [tensors[number] for number in members]
        apart = sum(once(view).numel() for view in views)
        if len(views) > 1 and spanned(views).numel() < apart:
            rows.append(tuple(members))
        else:
            rows += [(number,) for number in members]
    return rows


def spanned(views: Sequence[torch.Tensor]) -> torch.Tensor:
    """The memory from the first element of some views of one tensor to their last."""
    if len(views) == 1:
        return views[0]
    first = min(view.storage_offset() for view in views)
    end = max(view.storage_offset() + extent(view) for view in views)
    return views[0].as_strided((end - first,), (1,), first)


def cut_up(moved: torch.Tensor, views: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Views of a copy of `spanned(views)`, each laid out as its original, with graphs of their own.

    They share memory and count each other's writes, as the views themselves do.
    """
    if len(views) == 1:
        return (moved,)
    shift = moved.storage_offset() - min(view.storage_offset() for view in views)
    return tuple(
        moved.as_strided(view.shape, view.stride(), view.storage_offset() + shift).detach()
        for view in views
    )


def bytes_of(flat: torch.Tensor) -> memoryview:
    """The memory of a flat tensor on the CPU."""
    return flat.view(torch.uint8).numpy().data


def storages(tensor: torch.Tensor) -> tuple[torch.UntypedStorage, ...]:
    """The storages of a tensor: a sparse one's indices and values have one each."""
    parts: tuple[torch.Tensor, ...] = (tensor,)
    if tensor.layout is torch.sparse_coo:
        parts = (tensor._indices(), tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    return tuple(part.untyped_storage() for part in parts)


def key_of(storage: torch.UntypedStorage) -> int:
    """Equal for all Python objects that stand for one storage, while it lives.

    `_cdata` is torch's private name for the storage's address; seen with torch 2.11 and 2.13.
    """
    key: int = storage._cdata
    return key


def memory_of(tensor: torch.Tensor) -> int:
    """Equal for tensors that have the memory of the first part of one of them, while it lives."""
    return key_of(storages(tensor)[0])


def is_mine_alone(storage: torch.UntypedStorage) -> bool:
    """True if no tensor has the storage, nor autograd: this object is all that stands for it.

    `_storage_Use_Count` is a private name of torch; seen with torch 2.11, 2.13 and 2.14.
    """
    return torch._C._storage_Use_Count(key_of(storage)) == 1


def distinct_storages(values: Any) -> dict[int, torch.UntypedStorage]:
    """The storages of the tensors among nested values (no iterator), each once, by key."""
    tensors = (leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor))
    return {key_of(part): part for tensor in tensors for part in storages(tensor)}


def extent(tensor: torch.Tensor) -> int:
    """The number of elements of memory from a tensor's first to its last."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((n - 1) * step for n, step in pairs)
