"""One GPU played on the CPU: streams and events that note who has waited for whom.

Kernels run at once, in the order in which the host launches them. Each is put down to the stream
that is the current one then, and streams have vector clocks. So two things show that would go wrong
on a GPU only now and then:

- a kernel that reads or writes what another stream writes, or writes what another reads, and has
  not waited for it;
- memory that is taken again while another stream may still use it: the caching allocator keeps what
  the host lets go of for the next who asks on the stream where it was made.
"""

import contextlib
import ctypes
import itertools
import re
import weakref
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from baechi.torch_support import graph_capture, streams

_CPU = torch.device("cpu")
# What they are given tells a shape alone.
_FACTORY = re.compile(r"aten::(new_.*|.*_like)$")


class Gpu:
    """A place of type `cuda`; tensors on the CPU are there."""

    type = "cuda"
    index = 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Gpu) or other == _CPU

    def __hash__(self) -> int:
        return hash(_CPU)


class Stream:
    """How many kernels of every stream are known to have ended when its next one begins."""

    _numbers = itertools.count()

    def __init__(self, device: Any = None) -> None:
        self.device = device
        self.device_index, self.device_type = 0, 1
        self.stream_id = self.number = next(self._numbers)
        self.clock: dict[int, int] = {}
        self.free: list[tuple[int, int]] = []  # the last uses of memory that may be taken again

    def wait_event(self, event: "Event") -> None:
        self.learn(event.clock)

    def wait_stream(self, stream: "Stream") -> None:
        self.learn(stream.clock)

    def learn(self, clock: dict[int, int]) -> None:
        for number, count in clock.items():
            self.clock[number] = max(self.clock.get(number, 0), count)

    def knows(self, number: int, count: int) -> bool:
        return self.clock.get(number, 0) >= count

    def launched(self) -> int:
        self.clock[self.number] = self.clock.get(self.number, 0) + 1
        return self.clock[self.number]


class Event:
    """What its stream knew when it was recorded."""

    def __init__(self) -> None:
        self.clock: dict[int, int] = {}

    def record(self, stream: Stream) -> None:
        self.clock = dict(stream.clock)


@dataclass
class _Storage:
    """Who used a storage.

    Attributes:
        maker: On whose stream it was taken; None if before this began.
        written: The last kernel that wrote: its stream and number there.
        read: The last kernel of every stream that read since.
    """

    maker: Stream | None
    written: tuple[int, int] | None = None
    read: dict[int, int] = field(default_factory=dict)


class Sanitizer(TorchDispatchMode):
    """Sees every kernel, and notes what is wrong in `found`."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._known: dict[int, _Storage] = {}
        self.current = Stream(Gpu())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        reads, writes = self._used(func._schema, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in _storages((args, kwargs))}
        made = [s for s in _storages(result) if s._cdata not in given]
        number, count = self.current.number, self.current.launched()
        if made:
            self.found += [
                f"{func} takes memory that stream {other} may be using"
                for other, last in self.current.free
                if not self.current.knows(other, last)
            ]
            self.current.free = []
        for storage in (*reads, *writes, *made):
            known = self._known.get(storage._cdata)
            if known is None:
                maker = self.current if storage._cdata not in given else None
                known = self._known[storage._cdata] = _Storage(maker)
                weakref.finalize(storage, self._freed, storage._cdata)
            if known.written is not None and not self.current.knows(*known.written):
                self.found.append(f"{func} uses what stream {known.written[0]} may be writing")
        for storage in reads:
            self._known[storage._cdata].read[number] = count
        for storage in (*writes, *made):
            known = self._known[storage._cdata]
            self.found += [
                f"{func} writes what stream {other} may be reading"
                for other, last in known.read.items()
                if not self.current.knows(other, last)
            ]
            known.written, known.read = (number, count), {}
        return result

    def _used(
        self, schema: Any, args: Any, kwargs: Any
    ) -> tuple[list[torch.UntypedStorage], list[torch.UntypedStorage]]:
        """The storages that a kernel reads, and those that it writes; a view does neither."""
        reads: list[torch.UntypedStorage] = []
        writes: list[torch.UntypedStorage] = []
        values = [*args, *(kwargs.get(a.name) for a in schema.arguments[len(args) :])]
        for argument, value in zip(schema.arguments, values, strict=True):
            if argument.alias_info is not None and argument.alias_info.is_write:
                writes += _storages(value)
            elif argument.alias_info is None and not _FACTORY.match(schema.name):
                reads += _storages(value)
        return reads, writes

    def _freed(self, key: int) -> None:
        known = self._known.pop(key)
        if known.maker is not None:
            written = [] if known.written is None else [known.written]
            known.maker.free += [*known.read.items(), *written]


def _storages(value: Any) -> list[torch.UntypedStorage]:
    leaves = pytree.tree_leaves(value)
    return [leaf.untyped_storage() for leaf in leaves if isinstance(leaf, torch.Tensor)]


@contextlib.contextmanager
def sanitized(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sanitizer]:
    """Inside the block `torch.cuda` has these streams and events."""
    sanitizer = Sanitizer()
    known = weakref.WeakValueDictionary({sanitizer.current.stream_id: sanitizer.current})

    def made(device: Any = None, priority: int = 0) -> Stream:  # noqa: ARG001
        stream = Stream(device)
        known[stream.stream_id] = stream
        return stream

    def make_current(stream_id: int, _: int, __: int) -> None:
        sanitizer.current = known[stream_id]

    streams.shared_stream.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "Stream", made)
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "current_stream", lambda _=None: sanitizer.current)
        none: Any = partial(deque, maxlen=0)  # nothing is kept: every stream is a new one
        patch.setattr(graph_capture, "_SPARE", defaultdict(none))
        patch.setattr(streams, "_known", {})
        patch.setattr(streams, "_events", streams._Events())
        patch.setattr(streams, "current_stream_key", lambda _: (sanitizer.current.stream_id, 0, 1))
        patch.setattr(streams, "set_stream", make_current)
        patch.setattr(streams, "exchange_device", lambda _: 0)
        patch.setattr(streams, "restore_device", lambda _: 0)
        patch.setattr(streams, "is_current_captured", lambda: False)
        with sanitizer:
            yield sanitizer
    streams.shared_stream.cache_clear()


def driver_too_old(monkeypatch: pytest.MonkeyPatch, gpus: int = 1) -> None:
    """NVML counts GPUs, and torch, built for a newer CUDA, starts none of them."""

    def init() -> None:
        raise RuntimeError(
            "The NVIDIA driver on your system is too old (found version 12020). Please update "
            "your GPU driver by downloading and installing a new version"
        )

    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.version, "cuda", "13.0")


def shared_with(monkeypatch: pytest.MonkeyPatch, processes: int) -> None:
    """The driver's management library tells of so many processes, this one included."""

    def find(name: bytes, handle: Any) -> int:
        handle._obj.value = 1
        return 0 if re.fullmatch(rb"GPU-[0-9a-f-]{36}", name) else 6  # NVML_ERROR_NOT_FOUND

    def count(handle: Any, number: Any, rows: None) -> int:
        assert handle.value == 1
        assert rows is None
        number._obj.value = processes
        return 7  # NVML_ERROR_INSUFFICIENT_SIZE

    library = SimpleNamespace(
        nvmlInit_v2=lambda: 0,
        nvmlShutdown=lambda: 0,
        nvmlDeviceGetHandleByUUID=find,
        nvmlDeviceGetComputeRunningProcesses_v3=count,
    )
    usual = ctypes.CDLL

    def load(name: Any, *args: Any, **options: Any) -> Any:
        return library if name == "libnvidia-ml.so.1" else usual(name, *args, **options)

    monkeypatch.setattr(ctypes, "CDLL", load)
