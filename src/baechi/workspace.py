"""The memory of one operator besides what it gives out: scratch, and what autograd keeps of it.

Scratch is what is live only inside a run. What autograd kept goes as the backward goes, so room
that it leaves is not counted as the backward's scratch again.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch
from torch.utils import _pytree as pytree

from baechi.isolation import Alone
from baechi.metering import Meter
from baechi.saving import saved_inside_bytes


@final
@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of one operator.

    Attributes:
        saved: What autograd keeps for the backward besides the graph's tensors.
        forward: Scratch of a forward with gradients.
        backward: Scratch of a backward.
        inference: Scratch of a forward without gradients.
    """

    saved: int
    forward: int
    backward: int
    inference: int


def sizes(alone: Alone, place: torch.device) -> Sizes:
    """What an operator takes; on CUDA from the allocator, libraries' scratch included.

    These first runs warm up, too.
    """
    gauge: _Gauge = _Allocator(place) if place.type == "cuda" else _Storages()
    saved = saved_inside_bytes(alone.forward, alone.known)
    with torch.no_grad():
        _, inference, _ = gauge.measure(alone.forward)
    if place.type == "cuda":
        # Autograd's thread has handles of its own, whose workspaces stay: no operator's scratch.
        alone.differentiated(*alone.seeded(alone.forward()))
    outputs, forward, _ = gauge.measure(alone.forward)
    seeded = alone.seeded(outputs)
    # The peak above what the forward left, less what the backward gives out.
    gradients, _, above = gauge.measure(lambda: alone.differentiated(*seeded))
    return Sizes(saved, forward, max(above - _storage_bytes(gradients), 0), inference)


class _Gauge(Protocol):
    """Counts bytes while something runs."""

    def measure(self, run: Callable[[], Any]) -> tuple[Any, int, int]:
        """The result; the peak above what is live at the end, and above what was at the start."""


@final
class _Storages:
    """Counts storages, because a CPU has no counter."""

    def __init__(self) -> None:
        self._meter = Meter([0])

    def measure(self, run: Callable[[], Any]) -> tuple[Any, int, int]:
        self._meter.forget_peaks()
        (before,) = self._meter.live_bytes
        with self._meter.counting(0):
            result = run()
        (peak,), (after,) = self._meter.peak_bytes, self._meter.live_bytes
        return result, max(peak - after, 0), peak - before


@final
class _Allocator:
    """Reads the statistics of CUDA's allocator."""

    def __init__(self, place: torch.device) -> None:
        self._place = place

    def measure(self, run: Callable[[], Any]) -> tuple[Any, int, int]:
        torch.cuda.synchronize(self._place)
        before = torch.cuda.memory_allocated(self._place)
        torch.cuda.reset_peak_memory_stats(self._place)
        result = run()
        torch.cuda.synchronize(self._place)
        peak = torch.cuda.max_memory_allocated(self._place)
        after = torch.cuda.memory_allocated(self._place)
        return result, max(peak - after, 0), peak - before


def _storage_bytes(values: Iterable[Any]) -> int:
    """The bytes of the tensors among the values, each storage once."""
    tensors = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
    return sum(storage.nbytes() for storage in storages.values())
