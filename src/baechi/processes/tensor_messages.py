"""Tensors as messages: a head of integers, then each byte that a tensor needs, once.

    head       key, flags, of every tensor its dtype, sizes and strides
    payload    memory as it lies, or dense where the tensor leaves gaps in it

A receiver gives a tensor the very strides that it had, since kernels choose by them. Nothing is
unpickled; what arrives is compared with the key, and with the dtypes and sizes of the plan.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Final, TypeAlias, final

import torch

from baechi.errors import ExecutionError
from baechi.processes.edges import Receiver, Sender
from baechi.torch_support.storages import bytes_of, extent, once

_DTYPES: Final = tuple(
    value for _, value in sorted(vars(torch).items()) if isinstance(value, torch.dtype)
)
_CODES: Final = {dtype: _DTYPES.index(dtype) for dtype in _DTYPES}
_ABSENT: Final = -1
_MOST_INTS: Final = 1 << 20

Flag: TypeAlias = (
    bool | tuple[bool, ...]
)  # whether a value, or each tensor of one, needs a gradient
# What a tensor must have; a size that depends on values is None.
Shape: TypeAlias = tuple[torch.dtype, tuple[int | None, ...]]


@final
@dataclass(frozen=True)
class Message:
    """Tensors, or None where there is none, and flags; `key` says what they are."""

    key: tuple[int, ...]
    tensors: Sequence[torch.Tensor | None]
    flags: Sequence[Flag] = ()


def send(edge: Sender, message: Message) -> None:
    """Send a message."""
    edge.send(_parts(message))


def try_send(edge: Sender, message: Message) -> bool:
    """Send a message if that needs no waiting."""
    parts = _parts(message)
    fits = sum(map(len, parts)) <= edge.room()
    if fits:
        edge.send(parts)
    return fits


def _parts(message: Message) -> list[memoryview]:
    head = array("q", [0, len(message.key), *message.key, len(message.flags)])
    for flag in message.flags:
        row = (flag,) if isinstance(flag, bool) else flag
        head.extend((len(row) if isinstance(flag, tuple) else -1, *row))
    head.append(len(message.tensors))
    parts = []
    for given in message.tensors:
        if given is None:
            head.append(_ABSENT)
            continue
        if given.layout is not torch.strided:
            raise ExecutionError(
                f"a {given.layout} tensor would have to go from rank to rank, and only dense ones "
                "do. Keep its readers beside its producer (constraints=), or make it dense."
            )
        tensor = given.detach().resolve_conj().resolve_neg()
        head.extend((_CODES[tensor.dtype], tensor.dim(), *tensor.shape, *tensor.stride()))
        if tensor.numel():
            parts.append(bytes_of(_flat(tensor)))
    head[0] = len(head)
    return [memoryview(head).cast("B"), *parts]


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's memory on the CPU, flat; dense if there are gaps in it. A GPU's is pinned."""
    part = once(tensor)
    span = extent(part)
    flat = part.as_strided((span,), (1,)) if span <= part.numel() else part.contiguous().view(-1)
    if not flat.is_cuda:
        return flat.cpu()
    return torch.empty_like(flat, device="cpu", pin_memory=True).copy_(flat)


def receive(
    edge: Receiver,
    key: tuple[int, ...],
    device: torch.device,
    shapes: Sequence[Shape | None] | None = None,
) -> tuple[list[torch.Tensor | None], list[Flag]]:
    """The tensors and flags of the next message, on a device.

    Args:
        edge: Where it comes.
        key: What it must be.
        device: Where its tensors are to be.
        shapes: Those that they must have; None for what is not known.

    Raises:
        ExecutionError: It is another message, or has other shapes.
    """
    count = array("q", [0])
    edge.receive(memoryview(count).cast("B"))
    if not 0 < count[0] <= _MOST_INTS:
        raise ExecutionError("what came from another rank is no message of Baechi's.")
    head = array("q", bytes(8 * (count[0] - 1)))
    edge.receive(memoryview(head).cast("B"))
    ints = iter(head)
    found = tuple(next(ints) for _ in range(next(ints)))
    if found != key:
        raise ExecutionError(
            f"this rank waits for message {key} and gets {found}: the ranks run different calls. "
            "Every rank has to make the same calls of the placed model, with arguments of the same "
            "shapes, in the same order."
        )
    flags: list[Flag] = []
    for _ in range(next(ints)):
        n = next(ints)
        row = tuple(bool(next(ints)) for _ in range(abs(n)))
        flags.append(row[0] if n < 0 else row)
    tensors: list[torch.Tensor | None] = []
    number = next(ints)
    for index in range(number):
        code = next(ints)
        if code == _ABSENT:
            tensors.append(None)
            continue
        n = next(ints)
        sizes, strides = (tuple(next(ints) for _ in range(n)) for _ in range(2))
        wanted = None if shapes is None else shapes[index]
        if wanted is not None and not _fits(wanted, _DTYPES[code], sizes):
            raise ExecutionError(
                f"another rank sends {_DTYPES[code]} of {list(sizes)} where this rank's plan has "
                f"{wanted[0]} of {list(wanted[1])}."
            )
        tensors.append(_received(edge, _DTYPES[code], sizes, strides, device))
    edge.end()
    return tensors, flags


def _fits(wanted: Shape, dtype: torch.dtype, sizes: tuple[int, ...]) -> bool:
    """True if a tensor of this dtype and these sizes is what is wanted."""
    if (wanted[0], len(wanted[1])) != (dtype, len(sizes)):
        return False
    return all(n is None or n == size for n, size in zip(wanted[1], sizes, strict=True))


def _received(
    edge: Receiver,
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    device: torch.device,
) -> torch.Tensor:
    if 0 in sizes:
        return torch.empty_strided(sizes, strides, dtype=dtype, device=device)
    shape = tuple(1 if step == 0 else n for n, step in zip(sizes, strides, strict=True))
    span = 1 + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
    count = min(prod(shape), span)
    flat = torch.empty(count, dtype=dtype, pin_memory=device.type == "cuda")
    edge.receive(bytes_of(flat))
    flat = flat.to(device, non_blocking=True)
    if count == span:
        return flat.as_strided(sizes, strides)
    room = torch.empty(span, dtype=dtype, device=device)
    room.as_strided(shape, strides).copy_(flat.view(shape))
    return room.as_strided(sizes, strides)
