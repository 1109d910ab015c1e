"""The memory of one operator besides its outputs: scratch, and what autograd keeps.

Scratch is what is live only inside a run. What autograd kept goes as the backward goes, and
gradients take its room: that much less is live at the backward's fullest than what was kept and the
gradients together. So do the gradients that arrive: an operator of several kernels, such as a
normalization with its ReLU, lets go of them after the first.
"""

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch

from baechi.costs.single_op import Alone
from baechi.torch_support.memory_meter import Meter, saved_inside_bytes
from baechi.torch_support.storages import distinct_storages, key_of
from baechi.torch_support.torch_internals import TapeEnd


@final
@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of one operator.

    Attributes:
        saved: Bytes that autograd keeps for the backward besides the graph's tensors.
        forward: Scratch of a forward with gradients.
        backward: Scratch of a backward.
        reused: Of the gradients, what takes the room of what was kept.
        inference: Scratch of a forward without gradients.
    """

    saved: int
    forward: int
    backward: int
    reused: int
    inference: int


def sizes(alone: Alone, place: torch.device) -> Sizes:
    """The memory of an operator; on CUDA from the allocator, with libraries' scratch.

    These first runs warm up, too.
    """
    gauge: _Gauge = _Allocator(place) if place.type == "cuda" else _Storages()
    saved = saved_inside_bytes(alone.forward, alone.known)
    with torch.no_grad():
        _, inference, _ = gauge.measure(alone.inference)
    if place.type == "cuda":
        # Autograd's thread has handles of its own, whose workspaces stay: no operator's scratch.
        alone.differentiated(*alone.seeded(alone.forward()))
    outputs, forward, _ = gauge.measure(alone.forward)
    (graded, seeds), *_ = gauge.measure(lambda: alone.seeded(outputs))
    arrived = [weakref.ref(seed.untyped_storage()) for seed in seeds]
    # The peak above what was there before; the gradients that are new count by themselves.
    gradients, _, above = gauge.measure(lambda: _handed_over(alone, graded, seeds))
    passed_on = {key_of(storage) for ref in arrived if (storage := ref()) is not None}
    backward = max(above - _storage_bytes(gradients), 0)
    reused = max(_storage_bytes(gradients, but=passed_on) - above, 0)
    return Sizes(saved, forward, backward, min(reused, saved), inference)


def _handed_over(
    alone: Alone, graded: list[torch.Tensor], seeds: list[torch.Tensor]
) -> Sequence[torch.Tensor | None]:
    """A backward that gradients are handed over to, as in a step: each lives until it is used."""
    if not graded:
        return ()
    end = TapeEnd.apply(seeds, *graded)  # type: ignore[no-untyped-call]
    return alone.differentiated([end], [end.detach()])


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


def _storage_bytes(values: Iterable[Any], but: Collection[int] = ()) -> int:
    """The bytes of the tensors among the values, each storage once, but for some by their keys."""
    rows = distinct_storages(values)
    return sum(storage.nbytes() for key, storage in rows.items() if key not in but)
