"""CUDA streams, taken up and left again in every step.

`torch.cuda.current_stream` and `torch.cuda.stream` take about ten calls of Python each, and a step
of small kernels is as long as the host's part in it.
"""

import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, Final, final

import torch

from baechi.torch_support.torch_internals import (
    current_stream_key,
    exchange_device,
    is_current_captured,
    restore_device,
    set_stream,
)

_known: Final[dict[Any, torch.cuda.Stream]] = {}


def current_stream(gpu: torch.device) -> torch.cuda.Stream:
    """`torch.cuda.current_stream` of a GPU that is in use; the same object for the same stream."""
    key = current_stream_key(gpu.index)
    stream = _known.get(key)
    if stream is None:
        stream = _known[key] = torch.cuda.current_stream(gpu)
    return stream


@final
class _On:
    """`torch.cuda.stream`, of a stream whose GPU is in use."""

    __slots__ = ("_before", "_device", "_stream")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        stream = self._stream
        index = stream.device_index
        self._device = exchange_device(index)
        self._before = current_stream_key(index)
        set_stream(stream.stream_id, index, stream.device_type)

    def __exit__(self, *error: object) -> None:
        set_stream(*self._before)
        restore_device(self._device)


def on_stream(stream: torch.cuda.Stream | None) -> AbstractContextManager[Any]:
    """A block in which a stream is its GPU's current one, and the GPU the current one, if any."""
    return nullcontext() if stream is None else _On(stream)


def is_captured(gpu: torch.device) -> bool:
    """True if what is launched on the current stream of a GPU in use becomes a CUDA graph."""
    before = exchange_device(gpu.index)
    try:
        return bool(is_current_captured())
    finally:
        restore_device(before)


@final
class _Events(threading.local):
    """An event of each GPU, which is recorded and waited for at once, for each thread."""

    def __init__(self) -> None:
        self.of: dict[int, torch.cuda.Event] = {}


_events: Final = _Events()


def wait_for(waiting: torch.cuda.Stream, done: torch.cuda.Stream) -> None:
    """`waiting.wait_stream(done)`, without a new event."""
    events, index = _events.of, done.device_index
    event = events.get(index)
    if event is None:
        event = events[index] = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(done)
    waiting.wait_event(event)


def join(done: Iterable[torch.cuda.Stream], waiting: Iterable[torch.cuda.Stream]) -> None:
    """Let every stream of `waiting` go on after all that is launched on those of `done`.

    One of them waits for all that are done, then all others for it: 2n waits and no n x n.
    """
    first: torch.cuda.Stream | None = None
    for stream in dict.fromkeys(done):
        if first is None:
            first = stream
        else:
            wait_for(first, stream)
    for stream in dict.fromkeys(waiting):
        if first is not None and stream is not first and stream != first:
            wait_for(stream, first)


@cache
def shared_stream(gpu: torch.device, number: int) -> torch.cuda.Stream:  # noqa: ARG001
    """One for all plans of a process: torch hands out 32 in turn, which a few plans would use up.

    What another plan does there comes before or after, as in any stream; no capture is on it.
    """
    stream: torch.cuda.Stream = torch.cuda.Stream(gpu)  # type: ignore[no-untyped-call]
    return stream
