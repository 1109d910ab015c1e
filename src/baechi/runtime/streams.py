"""The CUDA executor: one thread launches everything, and events between streams order it.

    compute lane of 0   [a b c]──(1)──────────────[f g]
    copy lane of 0               └─►copy─(2)
    compute lane of 1   [x y]               └─(3)─►[d e]

(1) the copy lane waits for the producer; (2) the copy runs beside both compute lanes; (3) the
reader's lane waits for the copy. Memory that crosses lanes is told to torch's allocator
(`record_stream`).
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import final

import torch

from baechi.metering import Meter
from baechi.runtime.segments import Segment
from baechi.runtime.steps import CALLER, Step


@final
class CudaExecutor:
    """Streams and events; the caller's thread launches every segment in launch order.

    The first logical device of a GPU computes on the caller's current stream, the others on lanes
    of their own. Copies run on copy lanes of both sides, so they block no compute. What crosses
    lanes is told to torch's allocator (`record_stream`).

    Args:
        segments: In launch order.
        backward: Segment indices in the launch order of the backward.
        places: The torch device of every logical device; CPUs may be among them.
    """

    def __init__(
        self, segments: Sequence[Segment], backward: Sequence[int], places: Sequence[torch.device]
    ) -> None:
        self._segments = segments
        self._backward = tuple(backward)
        self._places = tuple(places)
        seen: set[torch.device] = set()
        self._own: list[torch.cuda.Stream | None] = []
        for place in places:
            own = place.type == "cuda" and place in seen
            self._own.append(_stream(place) if own else None)
            seen.add(place)
        self._gpus = sorted({p for p in places if p.type == "cuda"}, key=lambda p: p.index)
        self._copies = {gpu: _stream(gpu) for gpu in self._gpus}

    def close(self) -> None:
        """Nothing runs between calls."""

    def _lane(self, device: int) -> torch.cuda.Stream | None:
        place = self._places[device]
        if place.type != "cuda":
            return None
        return self._own[device] or torch.cuda.current_stream(place)

    def bring(self, tensor: torch.Tensor, src: int, dst: int) -> torch.Tensor:
        """The tensor on `dst`'s device; `dst`'s lane waits for it."""
        place, lane = self._places[dst], self._lane(dst)
        made = self._made_by(tensor, src)
        if tensor.device == place:
            if lane is not None and made is not None and made != lane:
                lane.wait_stream(made)
                tensor.record_stream(lane)
            return tensor
        if lane is None or made is None:  # to or from a CPU
            if made is not None:
                made.synchronize()
            moved = tensor.to(place, non_blocking=lane is not None and tensor.is_pinned())
            if lane is not None:
                lane.wait_stream(torch.cuda.current_stream(place))
                moved.record_stream(lane)
            return moved
        # Dense on the source's lane first: a strided copy across devices is a slow kernel.
        with torch.cuda.stream(made):
            dense = tensor.contiguous()
        out, into = self._copies[tensor.device], self._copies[place]
        out.wait_stream(made)
        with torch.cuda.stream(into), torch.cuda.stream(out):
            moved = dense.to(place, non_blocking=True)
        dense.record_stream(out)
        moved.record_stream(lane)
        lane.wait_stream(into)
        return moved

    def _made_by(self, tensor: torch.Tensor, src: int) -> torch.cuda.Stream | None:
        if tensor.device.type != "cuda":
            return None
        if src != CALLER and self._places[src] == tensor.device:
            return self._lane(src)
        return torch.cuda.current_stream(tensor.device)

    def forward(self, step: Step, meter: Meter | None) -> None:
        """Launch every segment's forward."""
        with self._fenced():
            for segment in self._segments:
                with self._on(segment.device), _counting(meter, segment.device):
                    step.forward(segment.index)

    def backward(self, step: Step, keep: bool, meter: Meter | None) -> None:
        """Launch every segment's backward."""
        with self._fenced():
            for index in self._backward:
                device = self._segments[index].device
                with self._on(device), _counting(meter, device):
                    step.backward(index, keep)

    def give(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, told to the allocator as used by the caller's stream."""
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return tensor

    @contextlib.contextmanager
    def _fenced(self) -> Iterator[None]:
        """Every lane begins after the caller's streams, and they go on after every lane."""
        lanes = [*(s for s in self._own if s is not None), *self._copies.values()]
        for lane in lanes:
            lane.wait_stream(torch.cuda.current_stream(lane.device))
        try:
            yield
        finally:
            for lane in lanes:
                torch.cuda.current_stream(lane.device).wait_stream(lane)

    @contextlib.contextmanager
    def _on(self, device: int) -> Iterator[None]:
        lane = self._lane(device)
        if lane is None:
            yield
        else:
            with torch.cuda.stream(lane):
                yield


def _counting(meter: Meter | None, device: int) -> contextlib.AbstractContextManager[None]:
    """Count what is made inside; autograd takes the mode along to the thread of the GPU."""
    return contextlib.nullcontext() if meter is None else meter.counting(device)


def _stream(place: torch.device) -> torch.cuda.Stream:
    stream: torch.cuda.Stream = torch.cuda.Stream(place)  # type: ignore[no-untyped-call]
    return stream
