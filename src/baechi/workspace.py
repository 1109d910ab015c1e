"""The memory of one operator besides what it gives out: scratch, and what autograd keeps of it.

Scratch is what is live inside a run and free again at its end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch

from baechi.isolation import Alone
from baechi.metering import Meter
from baechi.saving import saved_inside_bytes
from baechi.timing import Run


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
    of_runs = _allocated if place.type == "cuda" else _metered
    with torch.no_grad():
        inference = of_runs([alone.forward], place)
    return Sizes(
        saved=saved_inside_bytes(alone.forward, alone.known),
        forward=of_runs(alone.forward_runs(1), place),
        backward=of_runs(alone.backward_runs(1), place),
        inference=inference,
    )


def _metered(runs: Sequence[Run], place: torch.device) -> int:  # noqa: ARG001
    """By counting storages, because a CPU has no counter."""
    meter = Meter([0])
    with meter.counting(0):
        results = [run() for run in runs]
    scratch = meter.peak_bytes[0] - meter.live_bytes[0]
    del results
    return max(scratch, 0)


def _allocated(runs: Sequence[Run], place: torch.device) -> int:
    """By the allocator's statistics."""
    torch.cuda.synchronize(place)
    before = torch.cuda.memory_allocated(place)
    torch.cuda.reset_peak_memory_stats(place)
    results = [run() for run in runs]
    torch.cuda.synchronize(place)
    peak = torch.cuda.max_memory_allocated(place)
    made = torch.cuda.memory_allocated(place) - before
    del results
    return max(peak - before - made, 0)
