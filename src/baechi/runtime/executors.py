"""Who runs the segments of a step: workers on CPUs (`workers`), streams on CUDA (`streams`).

An executor adds no decision of its own. It runs each logical device's segments in launch order and
makes every segment wait for those that it reads from. Launch order is topological, so no two
devices wait for each other.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from baechi.errors import ExecutionError
from baechi.metering import Meter
from baechi.runtime.segments import Segment
from baechi.runtime.steps import Step
from baechi.runtime.streams import CudaExecutor
from baechi.runtime.workers import CpuExecutor


class Executor(Protocol):
    """Runs the segments of a step on their devices."""

    def bring(self, tensor: torch.Tensor, src: int, dst: int) -> torch.Tensor:
        """The tensor on logical device `dst`, ready before what runs there next."""

    def forward(self, step: Step, meter: Meter | None) -> None:
        """Run every segment's forward."""

    def backward(self, step: Step, keep: bool, meter: Meter | None) -> None:
        """Run every segment's backward."""

    def give(self, tensor: torch.Tensor) -> torch.Tensor:
        """A result, safe for the caller to use and to free."""

    def close(self) -> None:
        """Stop what the executor started."""


def make_executor(
    segments: Sequence[Segment],
    backward: Sequence[int],
    places: Sequence[torch.device],
    threads: int | None,
) -> Executor:
    """The executor for these torch devices, one per logical device.

    Raises:
        ExecutionError: The devices are neither CPUs nor CUDA.
    """
    kinds = {place.type for place in places}
    if kinds == {"cpu"}:
        return CpuExecutor(segments, backward, len(places), threads)
    if kinds <= {"cpu", "cuda"}:
        return CudaExecutor(segments, backward, places)
    raise ExecutionError(f"no executor runs devices of kinds {', '.join(sorted(kinds))}.")
