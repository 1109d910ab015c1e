"""Weights of a model on meta: read from files after it is placed, each tensor once to its device.

    check    names, shapes and dtypes against the headers, all in one error
    load     in the order of the files, through two buffers; the model changes at the end
    save     the same way back

A parameter stays the same Python object, so ties between modules and an optimizer's list hold.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from os import PathLike
from pathlib import Path
from typing import IO, Any, Final, final
from unittest.mock import patch

import torch
from torch import nn

from baechi.errors import ExecutionError, FormatError, InputError
from baechi.storage.weight_files import DTYPES, StoredTensor, stored_weights, write_weights
from baechi.torch_support.storages import key_of
from baechi.torch_support.torch_internals import become, non_persistent
from baechi.units import parse_bytes

_BUFFER_BYTES: Final = 16 << 20  # a multiple of every element; larger ones are no faster
_BUFFERS: Final = 2  # one is read into while the other is copied to its device
_SHOWN: Final = 5  # names of each kind in an error

# A tensor, the place of one in a file, or a function that makes one.
Source = StoredTensor | torch.Tensor | Callable[[], torch.Tensor]


def skeleton(build: Callable[[], nn.Module]) -> nn.Module:
    """The module that `build` makes, with its parameters on meta and everything else real.

    Parameters take no memory and are not initialized; buffers have the values that `__init__`
    computes, also those that no file has. For `place(model, devices, weights=...)`.

    Args:
        build: Makes the model, such as `lambda: Model(config)`.
    """
    register, builder = nn.Module.register_parameter, threading.get_ident()

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if param is not None and not param.is_meta and threading.get_ident() == builder:
            # The object itself: the next module that gets it is tied to this one.
            become(param, nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad))

    with patch.object(nn.Module, "register_parameter", register_on_meta):
        model = build()
    if not isinstance(model, nn.Module):
        raise InputError(f"build returned a {type(model).__name__}; return a torch.nn.Module.")
    return model


@final
class Weights:
    """What the tensors of a model are to become.

    Args:
        source: A file, an index or a folder, as for `stored_weights`; or a mapping from names.
        convert: Whether weights of other dtypes are converted to the model's.

    Attributes:
        pending: Whether they are still to be loaded.
    """

    def __init__(self, source: Any, convert: bool) -> None:
        if isinstance(source, str | PathLike):
            source = stored_weights(source)
        if not isinstance(source, Mapping):
            raise InputError(
                f"weights is a {type(source).__name__}; give a folder, a safetensors file, its "
                "index, or a mapping from names to tensors."
            )
        self._rows: Mapping[str, Source] = source
        self._convert = convert
        self.pending = True

    def check(self, model: nn.Module) -> None:
        """Check names, shapes and dtypes against the model; reads no weights.

        Raises:
            InputError: They differ, or a tensor on meta is in no file; with all there is.
        """
        problems: dict[str, list[str]] = defaultdict(list)
        state = model.state_dict(keep_vars=True)
        for tensor, names in _by_tensor(state):
            found = [name for name in names if name in self._rows]
            if not found:
                problems["missing"].append(names[0])
            for name in found:
                self._compare(name, tensor, problems)
        problems["unexpected"] = [name for name in self._rows if name not in state]
        named = {**dict(model.named_buffers(remove_duplicate=False)), **state}
        problems["on meta and in no file, being buffers that are not persistent"] = [
            f"{path}.{name}".lstrip(".")
            for path, module in model.named_modules()
            for name in non_persistent(module)
            if module.get_buffer(name).is_meta
        ]
        memory: dict[int, str] = {}
        for tensor, names in _by_tensor({k: t for k, t in named.items() if t.is_meta}):
            first = memory.setdefault(key_of(tensor.untyped_storage()), names[0])
            if first != names[0]:
                problems["on meta and sharing memory, though other objects"].append(
                    f"{names[0]} with {first}"
                )
        lines = [
            f"\n  {len(rows)} {kind}: {', '.join(rows[:_SHOWN])}{', ...' * (len(rows) > _SHOWN)}"
            for kind, rows in problems.items()
            if rows
        ]
        if lines:
            raise InputError(
                f"the weights do not fit this {type(model).__name__}:{''.join(lines)}\n"
                "Nothing was read. To rename or leave out, give a mapping made from "
                "baechi.stored_weights(...); to convert dtypes, cast the model or give "
                "convert_weights=True; to have buffers that no file has, build the model with "
                "baechi.skeleton(...); to tie parameters, assign the very same object."
            )

    def _compare(self, name: str, tensor: torch.Tensor, problems: dict[str, list[str]]) -> None:
        row = self._rows[name]
        if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            problems["of a class of their own"].append(f"{name} ({type(tensor).__name__})")
        if not isinstance(row, StoredTensor | torch.Tensor):
            return
        if tuple(row.shape) != tuple(tensor.shape):
            problems["of another shape"].append(
                f"{name} is {list(row.shape)} and in the model {list(tensor.shape)}"
            )
        elif not self._convert and _dtype_of(row) != tensor.dtype:
            problems["of another dtype"].append(
                f"{name} is {_dtype_of(row)} and in the model {tensor.dtype}"
            )

    def load(self, model: nn.Module, place_of: Callable[[torch.Tensor], torch.device]) -> None:
        """Read every tensor to its device; the model changes when all are there.

        Host memory: the buffers, and a tensor that lies on its device in another order than C.

        Raises:
            InputError: Names, shapes or dtypes differ.
            FormatError: A file ends too early, or has two values for tied parameters.
        """
        self.check(model)
        targets = [
            (name, tensor)
            for tensor, names in _by_tensor(model.state_dict(keep_vars=True))
            for name in names
            if name in self._rows
        ]
        made: dict[int, tuple[torch.Tensor, torch.Tensor, str]] = {}
        with torch.no_grad(), _Reader(self._convert) as reader:
            for name, tensor in sorted(targets, key=lambda target: _order(self._rows[target[0]])):
                _, known, first = made.get(id(tensor), (None, None, ""))
                if known is None:
                    place = place_of(tensor) if tensor.is_meta else tensor.device
                    new = torch.empty_like(tensor, device=place, requires_grad=False)
                    reader.fill(new, self._rows[name], name)
                    made[id(tensor)] = tensor, new, name
                elif not reader.equals(known, self._rows[name], name):
                    raise FormatError(
                        f"{first!r} and {name!r} are one parameter of this {type(model).__name__}, "
                        "and the weights have two values for it. Untie them in the model, or "
                        "leave one out."
                    )
            for tensor, new, _ in made.values():
                if tensor.is_meta:
                    become(tensor, new.requires_grad_(tensor.requires_grad))
                else:
                    tensor.copy_(new)
        self.pending = False


def _by_tensor(state: Mapping[str, Any]) -> list[tuple[torch.Tensor, list[str]]]:
    """Every tensor of a `state_dict(keep_vars=True)` with all of its names."""
    found: dict[int, tuple[torch.Tensor, list[str]]] = {}
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor):
            raise InputError(
                f"the model's state has {name!r}, a {type(tensor).__name__}, which a file of "
                "tensors cannot hold."
            )
        found.setdefault(id(tensor), (tensor, []))[1].append(name)
    return list(found.values())


def _order(row: Source) -> tuple[str, int]:
    """Files one after the other, each from its beginning to its end."""
    return (str(row.path), row.offset) if isinstance(row, StoredTensor) else ("", 0)


def _dtype_of(row: StoredTensor | torch.Tensor) -> torch.dtype:
    found: torch.dtype = getattr(torch, row.dtype) if isinstance(row.dtype, str) else row.dtype
    return found


@final
class _Reader(ExitStack):
    """Reads tensors through a ring of buffers, pinned where there are GPUs."""

    def __init__(self, convert: bool) -> None:
        super().__init__()
        self._convert = convert
        self._ring: list[tuple[torch.Tensor, torch.cuda.Event | None]] = []
        self._file: tuple[Path, IO[bytes]] | None = None
        self._gpus: set[torch.device] = set()
        self.callback(self._finish)

    def _finish(self) -> None:
        for device in self._gpus:  # other streams read what this one's copies
            torch.cuda.synchronize(device)
        if self._file is not None:
            self._file[1].close()

    def fill(self, target: torch.Tensor, row: Source, name: str) -> None:
        """Write a row's values into a tensor of its shape."""
        if not isinstance(row, StoredTensor):
            target.copy_(self._made(target, row, name))
            return
        flat = (
            target
            if target.is_contiguous()
            else torch.empty_like(target, memory_format=torch.contiguous_format)
        )
        if flat.device.type == "cpu" and _dtype_of(row) == flat.dtype:
            self._read(row, 0, _bytes_of(flat.view(-1)))
        else:
            for part, values in self._parts(row, flat):
                part.copy_(values, non_blocking=True)
        if flat is not target:
            target.copy_(flat)

    def equals(self, tensor: torch.Tensor, row: Source, name: str) -> bool:
        """True if a tensor has a row's values in every bit, once they are of its dtype."""
        if not isinstance(row, StoredTensor):
            made = self._made(tensor, row, name).to(tensor)
            return torch.equal(_raw(made), _raw(tensor))
        parts = self._parts(row, tensor.contiguous())
        return all(torch.equal(_raw(values.to(part.dtype)), _raw(part)) for part, values in parts)

    def _made(
        self, target: torch.Tensor, row: torch.Tensor | Callable[[], torch.Tensor], name: str
    ) -> torch.Tensor:
        value = row if isinstance(row, torch.Tensor) else row()
        other_dtype = not self._convert and value.dtype != target.dtype
        if value.shape != target.shape or other_dtype or value.is_meta:
            raise InputError(
                f"the weights of {name!r} are {list(value.shape)} of {value.dtype} on "
                f"{value.device}, and the model has {list(target.shape)} of {target.dtype}."
            )
        return value

    def _parts(
        self, row: StoredTensor, flat: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """A contiguous tensor piece by piece, each with a row's values on the same device."""
        dtype, flat = _dtype_of(row), flat.view(-1)
        for start in range(0, row.nbytes, _BUFFER_BYTES):
            buffer, copied = self._buffer(), None
            raw = buffer[: row.nbytes - start]
            self._read(row, start, _bytes_of(raw))
            values, first = raw.view(dtype), start // dtype.itemsize
            part = flat[first : first + len(values)]
            if part.device.type == "cuda":
                with torch.cuda.device(part.device):  # on which a conversion runs
                    yield part, values.to(part.device, non_blocking=True)
                    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
                    copied.record()
                self._gpus.add(part.device)
            else:
                yield part, values
            self._ring.append((buffer, copied))

    def _buffer(self) -> torch.Tensor:
        """The buffer that was used longest ago, when its copy has ended."""
        if len(self._ring) < _BUFFERS:
            pinned = torch.cuda.is_available()
            return torch.empty(_BUFFER_BYTES, dtype=torch.uint8, pin_memory=pinned)
        buffer, copied = self._ring.pop(0)
        if copied is not None:
            copied.synchronize()
        return buffer

    def _read(self, row: StoredTensor, start: int, target: memoryview) -> None:
        """Fill a buffer with a row's bytes from its byte `start` on."""
        if self._file is None or self._file[0] != row.path:
            if self._file is not None:
                self._file[1].close()
            self._file = row.path, row.path.open("rb", buffering=0)
        file = self._file[1]
        file.seek(row.offset + start)
        while target:
            n = file.readinto(target)  # type: ignore[attr-defined]
            if not n:
                raise FormatError(f"{row.path} ended while it was read; the model is unchanged.")
            target = target[n:]


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _bytes_of(flat: torch.Tensor) -> memoryview:
    """The memory of a flat tensor on the CPU."""
    return flat.view(torch.uint8).numpy().data


def save_weights(model: nn.Module, folder: str | PathLike[str], max_shard: int | str) -> None:
    """Write a model's state as `model.safetensors`, or as shards with an index; tied ones once.

    Host memory: one buffer.

    Args:
        model: Its tensors may be on several devices.
        folder: Is made where it is not there; weights that were there go.
        max_shard: In bytes, or such as `"5GB"`.

    Raises:
        InputError: A dtype or a value has no form in the format.
        ExecutionError: A tensor is on meta.
    """
    limit = parse_bytes(max_shard, what="max_shard")
    tensors, rows = [], []
    codes = {name for name, _ in DTYPES.values()}
    for tensor, names in _by_tensor(model.state_dict(keep_vars=True)):
        dtype = str(tensor.dtype).removeprefix("torch.")
        if tensor.is_meta:
            raise ExecutionError(f"{names[0]!r} is on meta: call the placed model first.")
        if dtype not in codes or tensor.layout is not torch.strided:
            raise InputError(f"{names[0]!r} is of {tensor.dtype}, which safetensors do not have.")
        tensors.append(tensor.detach())
        rows.append((names[0], dtype, tuple(tensor.shape), tensor.numel() * tensor.itemsize))
    write_weights(folder, rows, lambda number: _pieces(tensors[number]), limit)


def _pieces(tensor: torch.Tensor) -> Iterable[memoryview]:
    flat = _raw(tensor.resolve_conj().resolve_neg())
    if flat.device.type == "cpu":
        yield _bytes_of(flat)
        return
    buffer = torch.empty(min(_BUFFER_BYTES, len(flat)), dtype=torch.uint8, pin_memory=True)
    for start in range(0, len(flat), _BUFFER_BYTES):
        part = flat[start : start + _BUFFER_BYTES]
        yield _bytes_of(buffer[: len(part)].copy_(part))
