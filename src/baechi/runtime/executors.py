"""Who runs a program: workers on CPUs (`workers`), streams on CUDA (`streams`).

An executor decides nothing: it does each lane's instructions in their order.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from baechi.errors import ExecutionError
from baechi.runtime.binding import Bound
from baechi.runtime.program import Program
from baechi.runtime.steps import Step
from baechi.runtime.streams import CudaExecutor
from baechi.runtime.workers import CpuExecutor


class Executor(Protocol):
    """Runs the phases of a program on their devices."""

    def run(self, step: Step, phase: int) -> None:
        """Do every lane's instructions; returns when all are done, or launched on a stream."""

    def give(self, value: Any) -> Any:
        """A result, safe for the caller to use and to free."""

    def close(self) -> None:
        """Stop what the executor started."""


def make_executor(
    program: Program, bound: Bound, places: Sequence[torch.device], threads: int | None
) -> Executor:
    """The executor for these torch devices, one per logical device.

    Raises:
        ExecutionError: The devices are neither CPUs nor CUDA.
    """
    kinds = {place.type for place in places}
    if kinds == {"cpu"}:
        return CpuExecutor(program, bound, len(places), threads)
    if kinds <= {"cpu", "cuda"}:
        return CudaExecutor(program, bound, places)
    raise ExecutionError(f"no executor runs devices of kinds {', '.join(sorted(kinds))}.")
