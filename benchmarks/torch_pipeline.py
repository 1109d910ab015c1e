"""The reference for micro-batches: torch.distributed.pipelining's Schedule1F1B in two processes.

A process for each stage, one torch thread and gloo, as `torchrun --nproc-per-node 2` would start
them. The processes wait in between, so that other ways to run the same model can take turns.
"""

import multiprocessing
import tempfile
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn


class Pipeline:
    """Two processes with a stage each; `run` makes a step of both and waits for its end.

    Args:
        stages: A module for each process, copied to it.
        batch, targets: Arguments of a step.
        criterion: The loss, by a name that a new process can import.
        n: The number of micro-batches.
    """

    def __init__(
        self, stages: list[nn.Module], batch: Tensor, targets: Tensor, criterion: Any, n: int
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        self._ends: list[Connection] = []
        self._processes = []
        for rank, stage in enumerate(stages):
            here, there = context.Pipe()
            what = (stage, batch, targets, criterion, n)
            place = (rank, len(stages), f"file://{self._folder.name}/store")
            process = context.Process(target=_stage, args=(there, place, what), daemon=True)
            process.start()
            there.close()
            self._ends.append(here)
            self._processes.append(process)
        self.run()

    def run(self) -> None:
        """A step; the gradients of all stages are zero before it."""
        for end in self._ends:
            end.send("step")
        for end in self._ends:
            end.recv()

    def gradients(self) -> list[Tensor]:
        """Those of the last step, stage after stage."""
        found = []
        for end in self._ends:
            end.send("gradients")
            found += end.recv()
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        for end in self._ends:
            end.send("end")
        for process in self._processes:
            process.join()
        self._folder.cleanup()


def _stage(end: Connection, place: tuple[int, int, str], what: tuple[Any, ...]) -> None:
    from torch import distributed
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, n_stages, store = place
    module, batch, targets, criterion, n = what
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=n_stages)
    stage = PipelineStage(module, rank, n_stages, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n, loss_fn=criterion)
    while (order := end.recv()) != "end":
        if order == "gradients":
            end.send([row.grad for row in module.parameters()])
            continue
        for parameter in module.parameters():
            parameter.grad = None
        if rank == 0:
            schedule.step(batch)
        else:
            schedule.step(target=targets)
        end.send("done")
    distributed.destroy_process_group()
