"""Scratch memory of one operator: what is live inside it and free again at its end."""

from collections.abc import Sequence

import torch

from baechi.isolation import Alone
from baechi.metering import Meter
from baechi.timing import Run


def workspace_bytes(alone: Alone, place: torch.device) -> tuple[int, int]:
    """The forward's and the backward's; on CUDA from the allocator, libraries' scratch included.

    These first runs warm up, too.
    """
    of_runs = _allocated if place.type == "cuda" else _metered
    return of_runs(alone.forward_runs(1), place), of_runs(alone.backward_runs(1), place)


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
