"""The interface of executors, and the choice of one: workers on CPUs, streams on CUDA.

An executor decides nothing: it does each lane's instructions in their order.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from baechi.errors import ExecutionError
from baechi.records.instructions import Program
from baechi.runtime.autograd.binding import Bound
from baechi.runtime.autograd.step import Step
from baechi.runtime.executors.cpu_workers import CpuExecutor
from baechi.runtime.executors.cuda_graphs import Graphs
from baechi.runtime.executors.cuda_streams import CudaExecutor


class Executor(Protocol):
    """Runs the phases of a program on their devices."""

    def run(self, step: Step, phase: int) -> None:
        """Do every lane's instructions; returns when all are done, or launched on a stream.

        Results and gradients are then the caller's, to use and to let go of.
        """

    def meet(self, step: Step) -> None:
        """Let what the caller does next come after what was done for a step since it went backward.

        Autograd waits for the one stream that a node is of (torch, "Stream sync contract" in
        torch/csrc/autograd/input_buffer.cpp); gradients may be added up on several GPUs.
        """

    def close(self) -> None:
        """Stop what the executor started."""


def make_executor(
    program: Program,
    bound: Bound,
    places: Sequence[torch.device],
    threads: int | None,
    graphs: Graphs | None = None,
) -> Executor:
    """The executor for these torch devices, one per logical device.

    Args:
        program: The program to run.
        bound: To what.
        places: The torch devices.
        threads: torch threads per CPU worker; `None` gives each an equal share.
        graphs: The tapes as CUDA graphs, where they are wanted.

    Raises:
        ExecutionError: The devices are neither CPUs nor CUDA.
    """
    kinds = {place.type for place in places}
    if kinds == {"cpu"}:
        return CpuExecutor(program, bound, len(places), threads)
    if kinds <= {"cpu", "cuda"}:
        return CudaExecutor(program, bound, places, graphs)
    raise ExecutionError(f"no executor runs devices of kinds {', '.join(sorted(kinds))}.")
