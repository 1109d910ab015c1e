"""The interface of executors, and the choice of one: workers on CPUs, streams on CUDA.

An executor decides nothing: it does each lane's instructions in their order.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from baechi.errors import ExecutionError
from baechi.records.instructions import Program
from baechi.runtime.autograd.binding import Bound
from baechi.runtime.autograd.step_state import Step
from baechi.runtime.cuda_graphs.capture_rules import obstacle
from baechi.runtime.cuda_graphs.recorded_tape import Recorder
from baechi.runtime.cuda_graphs.replay import Graphs
from baechi.runtime.executors.cpu_workers import CpuExecutor
from baechi.runtime.executors.cuda_streams import CudaExecutor
from baechi.torch_support.graph_capture import CudaRecorder
from baechi.tracing.lowering import TracedModule


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


def graphs_of(
    module: TracedModule,
    program: Program,
    bound: Bound,
    places: Sequence[torch.device],
    *,
    recorder: Callable[[int], Recorder] | None = None,
) -> Graphs:
    """The tapes as graphs, as far as they can be captured.

    Args:
        module: The traced model.
        program: The program to run.
        bound: To what.
        places: The torch device of every logical device.
        recorder: Records for a logical device of any kind; by default CUDA devices alone are
            recorded for.
    """
    lanes = Counter(places[device] for device in {tape.device for tape in program.tapes})
    obstacles = [
        obstacle(
            module,
            code,
            alone=lanes[code.place] == 1,
            on_cuda=recorder is not None or code.place.type == "cuda",
            several=len(lanes) > 1 and len(program.phases) > 1,
        )
        for code in bound.tapes
    ]
    if recorder is None:
        pairs = zip(bound.tapes, obstacles, strict=True)
        devices = sorted({code.device for code, why in pairs if not why})
        recorder = _recorders({device: places[device] for device in devices})
    return Graphs(program, bound.tapes, bound.sizes, obstacles, recorder)


def _recorders(gpus: Mapping[int, torch.device]) -> Callable[[int], CudaRecorder]:
    """Makes recorders of logical devices, each with as much free memory as there is.

    While something is captured the allocator gives nothing back, and the eager steps before have
    left as much in its cache as the graphs will take. Those of one logical device, for training and
    for inference and whenever all is captured anew, capture on one stream: cuBLAS keeps a workspace
    for each, and a lane replays one graph at a time. They are drawn now, beside the lanes' own:
    torch hands out its 32 in turn, and what was captured on the stream of another lane would share
    a workspace with what runs there.
    """
    streams = {device: torch.cuda.Stream(gpu) for device, gpu in gpus.items()}  # type: ignore[no-untyped-call]

    def recorder(device: int) -> CudaRecorder:
        torch.cuda.empty_cache()
        return CudaRecorder(gpus[device], streams[device])

    return recorder
