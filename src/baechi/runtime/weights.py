"""Weights of a model on meta: read from files after it is placed, each tensor once to its device.

    check    names, shapes and dtypes against the headers, all in one error
    load     in the order of the files, through two buffers; the model changes at the end
    save     the same way back

A parameter stays the same Python object, so ties between modules and an optimizer's list hold.

An optimizer keeps its state beside a parameter, and nothing moves that along. So the first plan
decides where a parameter lives, and later plans, of other shapes of call, place operators around it
(`pinned`).
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from operator import itemgetter
from os import PathLike
from typing import Any, Final, final
from unittest.mock import patch

import torch
from torch import fx, nn

from baechi.errors import ExecutionError, FormatError, InputError
from baechi.records.cluster import Cluster, Constraints
from baechi.storage.weight_files import DTYPES, StoredTensor, stored_weights, write_weights
from baechi.torch_support.storages import bytes_of, key_of
from baechi.torch_support.torch_internals import become, buffers_of
from baechi.traced.traced_model import Traced
from baechi.tracing.lowering import TracedModule
from baechi.tracing.partition import attribute
from baechi.tracing.subgraph import opaque_leaves
from baechi.units import parse_bytes
from baechi.validation import check_is

_BUFFER_BYTES: Final = 16 << 20  # a multiple of every element; larger ones are no faster
_SHOWN: Final = 5  # names of each kind in an error

# A tensor, the place of one in a file, or a function that makes one.
Source = StoredTensor | torch.Tensor | Callable[[], torch.Tensor]
ParameterDevices = Mapping[torch.Tensor, int]


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
        return check_is(build(), nn.Module, "what build returns")


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
        check_is(source, Mapping, "weights")  # type: ignore[type-abstract]
        self._rows: Mapping[str, Source] = source
        self._convert = convert
        self.pending = True

    def check(self, model: nn.Module) -> None:
        """Check names, shapes and dtypes against the model; reads no weights.

        Raises:
            InputError: They differ, or a tensor on meta is in no file; with all there is.
        """
        problems: dict[str, list[str]] = defaultdict(list)
        tensors = _by_tensor(model)
        memory: dict[int, str] = {}
        for tensor, names in tensors:
            found = [name for name in names if name in self._rows]
            problems["missing"] += [] if found else names[:1]
            for name in found:
                self._compare(self._rows[name], tensor, name, problems)
            first = memory.setdefault(key_of(tensor.untyped_storage()), names[0])
            if tensor.is_meta and first != names[0]:
                problems["another object in the memory of"] += [f"{names[0]} and {first}"]
        known = {name for _, names in tensors for name in names}
        problems["unexpected"] = [name for name in self._rows if name not in known]
        saved = {id(tensor) for tensor, _ in tensors}
        problems["on meta and never in a file"] = [
            f"{path}.{name}".lstrip(".")
            for path, module in model.named_modules()
            for name, value in [*buffers_of(module).items(), *vars(module).items()]
            if isinstance(value, torch.Tensor) and value.is_meta and id(value) not in saved
        ]
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
                "convert_weights=True; to have buffers that are in no file, build the model with "
                "baechi.skeleton(...); to tie parameters, assign the very same object."
            )

    def _compare(
        self, row: Source, tensor: torch.Tensor, name: str, problems: dict[str, list[str]]
    ) -> None:
        if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            problems["of a class of its own"] += [f"{name} ({type(tensor).__name__})"]
        if isinstance(row, StoredTensor | torch.Tensor):
            if tuple(row.shape) != tuple(tensor.shape):
                rows = f"{name} is {list(row.shape)} and in the model {list(tensor.shape)}"
                problems["of another shape"] += [rows]
            elif not self._convert and _dtype_of(row) != tensor.dtype:
                rows = f"{name} is {_dtype_of(row)} and in the model {tensor.dtype}"
                problems["of another dtype"] += [rows]

    def load(self, model: nn.Module, place_of: Callable[[torch.Tensor], torch.device]) -> None:
        """Read every tensor to its device; the model changes when all are there.

        Host memory: two buffers; and one tensor, where it is not stored as it is laid out.

        Raises:
            InputError: Names, shapes or dtypes differ.
            FormatError: A file ends too early, or has two values for tied parameters.
        """
        self.check(model)
        targets = [
            (_order(self._rows[name]), name, tensor)
            for tensor, names in _by_tensor(model)
            for name in names
            if name in self._rows
        ]
        made: dict[int, tuple[torch.Tensor, torch.Tensor, str]] = {}
        buffers = _Buffers()
        with torch.no_grad():
            for _, name, tensor in sorted(targets, key=itemgetter(0, 1)):
                place = place_of(tensor) if tensor.is_meta else tensor.device
                if place.type == "meta":  # another rank's
                    continue
                new = torch.empty_like(tensor, device=place, requires_grad=False)
                self._fill(new, name, buffers)
                _, known, first = made.setdefault(id(tensor), (tensor, new, name))
                if known is not new and not torch.equal(_raw(known), _raw(new)):
                    raise FormatError(
                        f"{first!r} and {name!r} are one parameter of this {type(model).__name__}, "
                        "and the weights have two values for it: untie them, or leave one out."
                    )
            buffers.synchronize()
            for tensor, new, _ in made.values():
                if tensor.is_meta:
                    become(tensor, new.requires_grad_(tensor.requires_grad))
                else:
                    tensor.copy_(new)
        self.pending = False

    def _fill(self, target: torch.Tensor, name: str, buffers: "_Buffers") -> None:
        """Give a tensor the values of this name."""
        row = self._rows[name]
        if isinstance(row, StoredTensor):
            flat = torch.empty_like(target, memory_format=torch.contiguous_format)
            flat = target if target.is_contiguous() else flat
            buffers.read(row, flat.view(-1))
            if flat is not target:
                target.copy_(flat)
            return
        value = row if isinstance(row, torch.Tensor) else row()
        other = value.dtype != target.dtype and not self._convert
        if value.shape != target.shape or other or value.is_meta:
            raise InputError(
                f"the weights of {name!r} are {list(value.shape)} of {value.dtype} on "
                f"{value.device}, and the model has {list(target.shape)} of {target.dtype}."
            )
        target.copy_(value)


def _by_tensor(model: nn.Module) -> list[tuple[torch.Tensor, list[str]]]:
    """Every tensor of a model's `state_dict`, with all of its names."""
    found: dict[int, tuple[torch.Tensor, list[str]]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        check_is(tensor, torch.Tensor, f"{name!r} in the model's state_dict")
        found.setdefault(id(tensor), (tensor, []))[1].append(name)
    return list(found.values())


def _order(row: Source) -> tuple[str, int]:
    """Files one after the other, each from its beginning to its end."""
    return (str(row.path), row.offset) if isinstance(row, StoredTensor) else ("", 0)


def _dtype_of(row: StoredTensor | torch.Tensor) -> torch.dtype:
    found: torch.dtype = getattr(torch, row.dtype) if isinstance(row.dtype, str) else row.dtype
    return found


@final
class _Buffers:
    """Buffers between files and devices, pinned where there are GPUs."""

    def __init__(self) -> None:
        pinned = torch.cuda.is_available()
        rows = [torch.empty(_BUFFER_BYTES, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        self._turns = cycle(enumerate(rows))  # one is read into while the other is copied
        self._copied: dict[int, torch.cuda.Event] = {}  # of each its latest copy to a GPU
        self._gpus: set[torch.device] = set()

    def synchronize(self) -> None:
        """Wait for all copies, since other streams read what they bring."""
        for device in self._gpus:
            torch.cuda.synchronize(device)

    def read(self, row: StoredTensor, flat: torch.Tensor) -> None:
        """Fill a flat tensor with a row's values, in its own dtype and on its device."""
        dtype = _dtype_of(row)
        with row.path.open("rb", buffering=0) as file:
            file.seek(row.offset)
            if flat.device.type == "cpu" and dtype == flat.dtype:
                _read(file, flat)
                return
            for part in torch.split(flat, _BUFFER_BYTES // dtype.itemsize):
                number, buffer = next(self._turns)
                if number in self._copied:
                    self._copied[number].synchronize()
                values = buffer[: len(part) * dtype.itemsize].view(dtype)
                _read(file, values)
                if part.device.type == "cuda":
                    self._gpus.add(part.device)
                    with torch.cuda.device(part.device):  # on which a conversion runs
                        part.copy_(values.to(part.device, non_blocking=True))
                        self._copied[number] = torch.cuda.Event()  # type: ignore[no-untyped-call]
                        self._copied[number].record()
                else:
                    part.copy_(values)


def _read(file: Any, values: torch.Tensor) -> None:
    """Fill a flat tensor on the CPU with the next bytes of a file."""
    left = bytes_of(values)
    while left:
        n = file.readinto(left)
        if not n:
            raise FormatError(f"{file.name} ended while it was read; the model is unchanged.")
        left = left[n:]


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def save_weights(model: nn.Module, folder: str | PathLike[str], max_shard: int | str) -> None:
    """As `PlacedModule.save`, for a model whose tensors are anywhere."""
    limit = parse_bytes(max_shard, what="max_shard")
    tensors, rows = [], []
    codes = {name for name, _ in DTYPES.values()}
    for tensor, (name, *_) in _by_tensor(model):
        dtype = str(tensor.dtype).removeprefix("torch.")
        if tensor.is_meta:
            raise ExecutionError(f"{name!r} is on meta: call the placed model first.")
        if dtype not in codes or tensor.layout is not torch.strided:
            raise InputError(f"{name!r} is of {tensor.dtype}, which safetensors do not have.")
        tensors.append(tensor.detach())
        rows.append((name, dtype, tuple(tensor.shape), tensor.numel() * tensor.itemsize))
    write_weights(folder, rows, lambda number: _pieces(tensors[number]), limit)


def _pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    flat = _raw(tensor.resolve_conj().resolve_neg())
    if flat.device.type == "cpu":
        yield bytes_of(flat)
        return
    buffer = torch.empty(min(_BUFFER_BYTES, len(flat)), dtype=torch.uint8, pin_memory=True)
    for part in torch.split(flat, _BUFFER_BYTES):
        yield bytes_of(buffer[: len(part)].copy_(part))


def devices_of_state(
    module: TracedModule, devices: Sequence[int], *, named: bool = False
) -> dict[torch.Tensor, int]:
    """Every parameter, buffer and constant with the logical device of the operators that own it.

    `devices` are those of every operator, or of more; constants are left out where all are `named`.
    """
    homes: dict[torch.Tensor, int] = {}
    for nodes, device in zip(module.nodes, devices, strict=False):
        for tensor in _state_of(module, nodes):
            homes.setdefault(tensor, device)
    if named:
        own = {*module.model.parameters(), *module.model.buffers()}
        return {tensor: home for tensor, home in homes.items() if tensor in own}
    return homes


def places_of(
    homes: ParameterDevices, room: Sequence[tuple[int, torch.device]]
) -> Callable[[torch.Tensor], torch.device]:
    """The torch device of each tensor; of one without a home where most memory is left.

    `room` has the bytes that are left on every logical device, and its torch device.
    """
    rows = list(room)

    def place_of(tensor: torch.Tensor) -> torch.device:
        if tensor in homes:
            return rows[homes[tensor]][1]
        most = max(range(len(rows)), key=lambda device: rows[device][0])
        left, place = rows[most]
        if left < tensor.nbytes:
            return torch.device("cpu")
        rows[most] = left - tensor.nbytes, place
        return place

    return place_of


def _state_of(module: TracedModule, nodes: Sequence[fx.Node]) -> list[torch.Tensor]:
    inside = set(nodes)
    tensors = []
    for node in nodes:
        for argument in [node, *node.all_input_nodes]:
            # A buffer that travels lives where its own operator is.
            if argument.op == "get_attr" and (
                argument in inside or argument not in module.travelling
            ):
                value: Any = attribute(module.graph_module, str(argument.target))
                tensors += [value] if isinstance(value, torch.Tensor) else []
    for leaf in opaque_leaves(module.graph_module, nodes).values():
        tensors += [*leaf.parameters(), *leaf.buffers()]
    return tensors


def pinned(
    traced: Traced, cluster: Cluster, homes: ParameterDevices, constraints: Constraints | None
) -> Constraints | None:
    """The constraints, and that every reader of a pinned tensor runs in the memory that has it.

    `homes` are the tensors that must stay, with their devices.

    Raises:
        InputError: An operator reads several that are apart.
    """
    forbidden: dict[str, set[str]] = defaultdict(set)
    for op, nodes in zip(traced.ops, traced.module.nodes, strict=True):
        for tensor in _state_of(traced.module, nodes):
            if tensor in homes:
                home = cluster.devices[homes[tensor]]
                forbidden[op.name].update(
                    device.name
                    for device in cluster.devices
                    if device is not home and not (home.pool and device.pool == home.pool)
                )
        if len(forbidden.get(op.name, ())) == len(cluster.devices):
            why = next((f": {row.reason}" for row in traced.attempts if row.reason), "")
            raise InputError(
                f"op {op.name!r} runs on one device, and reads parameters that earlier calls put "
                f"on several{why}."
            )
    if not forbidden:
        return constraints
    rest = constraints or Constraints()
    for name, devices in rest.forbidden.items():
        forbidden[name].update(devices)
    return replace(rest, forbidden={name: tuple(rows) for name, rows in forbidden.items()})


def move(tensor: torch.Tensor, place: torch.device) -> None:
    """Move a parameter or buffer and its gradient; it stays the same object for optimizers.

    One on meta stays there: it has nothing to move. One that is another rank's goes there.
    """
    if place.type == "meta" and not tensor.is_meta:
        become(tensor, torch.empty_like(tensor, device=place, requires_grad=tensor.requires_grad))
        tensor.grad = None
    elif tensor.device != place and not tensor.is_meta:
        tensor.data = tensor.data.to(place)
        if tensor.grad is not None:
            tensor.grad.data = tensor.grad.data.to(place)
