"""The step `prediction`: what is predicted of a step, beside what it takes, in time and in memory.

Each model as users place it (`place`, costs measured): on one lane eagerly, on one lane as CUDA
graphs, and, where it has branches, on two as graphs. Times: predicted; measured by events, of steps
alone and of a row of them; of the host, without waiting. Memory of the model: predicted, the most
that the allocator gave out, the most that it held, and how often it had to give back what it held
to go on. What cuBLAS keeps is in no prediction, so both are compared with the prediction and what
`probe` leaves beside it, on a GPU where that is all there is: the model fits where neither is above
1.
"""

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from benchmarks.gpu_check.check import Check
from benchmarks.models.googlenet import googlenet
from benchmarks.models.resnet import resnet50
from benchmarks.models.towers import Towers
from torch import Tensor, nn

import baechi
from baechi.probing.cluster_probe import RESERVED_SHARE, lane_bytes
from baechi.runtime.executors.cuda_graphs import WARM_UP
from baechi.tracing.pytrees import tensors_in

_PLACE: Final = "cuda:0"
_SIDES: Final[Mapping[str, tuple[Sequence[str], Any]]] = {
    "1 lane": ([_PLACE], False),
    "1 lane, graphs": ([_PLACE], "auto"),
    "2 lanes, graphs": ([f"{_PLACE}/a", f"{_PLACE}/b"], "auto"),
}
_BRANCHES: Final = ("towers", "googlenet")

Example = tuple[nn.Module, Mapping[str, Any]]


def run(check: Check) -> None:
    """A row per model, batch, mode and side; models of images at one batch."""
    steps = 3 if check.quick else 20
    models = _models(check.quick)
    for name, (make, batches) in list(models.items())[1:2] if check.quick else models.items():
        for batch in batches[:1] if check.quick else batches:
            for training in (True,) if check.quick else (False, True):
                for side in list(_SIDES)[: 3 if name in _BRANCHES else 2]:
                    mode = "training" if training else "forward"
                    check.case(
                        f"{name} b{batch} {mode}, {side}",
                        partial(row, make, batch, training, side, steps),
                    )


def _models(quick: bool) -> Mapping[str, tuple[Callable[[int], Example], Sequence[int]]]:
    image = (3, 32, 32) if quick else (3, 224, 224)

    def gpt2(batch: int) -> Example:
        from benchmarks.models import hugging_face

        ids = torch.randint(0, 50_257, (batch, 512), device=_PLACE)
        return hugging_face.gpt2(dropout=False), {"input_ids": ids, "labels": ids}

    def images(make: Callable[[], nn.Module], batch: int) -> Example:
        return make(), {"x": torch.randn(batch, *image, device=_PLACE)}

    def towers(batch: int) -> Example:
        width = 64 if quick else 1024
        return Towers(2, 8, width), {"x": torch.randn(batch, width, device=_PLACE)}

    return {
        "gpt2": (gpt2, (1, 8)),
        "towers": (towers, (1, 8)),
        "resnet50": (partial(images, resnet50), (8,)),
        "googlenet": (partial(images, googlenet), (8,)),
    }


def row(
    make: Callable[[int], Example], batch: int, training: bool, side: str, steps: int
) -> Mapping[str, Any]:
    """Predicted and measured figures of one side."""
    devices, graphs = _SIDES[side]
    torch.manual_seed(0)
    model, kwargs = make(batch)
    model = model.to(_PLACE).train(training)
    gc.collect()
    torch.cuda.empty_cache()
    given = sum(tensor.nbytes for tensor in tensors_in(kwargs))
    state = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    before = torch.cuda.memory_allocated() - given - state
    unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    with torch.set_grad_enabled(training):
        placed = baechi.place(
            model,
            list(devices),
            example_args=(),
            example_kwargs=dict(kwargs),
            training=training,
            cuda_graphs=graphs,
            guard=False,
            progress=False,
        )
        torch.cuda.empty_cache()  # what the profile used
        torch.cuda.reset_peak_memory_stats()
        retries = torch.cuda.memory_stats()["num_alloc_retries"]
        one = partial(_step, placed, kwargs, training)
        prepare = placed.zero_grad if training else _nothing
        for _ in range(WARM_UP + 2):
            prepare()
            one()
        measured_ms, row_ms, host_ms = _measured(one, prepare, steps)
        allocated = torch.cuda.max_memory_allocated() - before
        reserved = torch.cuda.max_memory_reserved() - before - unused
        retries = torch.cuda.memory_stats()["num_alloc_retries"] - retries
    predicted_ms = placed.schedule.makespan_ns / 1e6
    peak = sum(placed.schedule.peak_bytes)
    lanes = len(set(placed.placement.devices))
    remarks = [remark for remark in placed.remarks if "CUDA graphs" in remark]
    placed.unplace()
    blas, segments = (len(devices) * kept for kept in lane_bytes(torch.device(_PLACE)))
    error = (predicted_ms - measured_ms) / measured_ms
    times = (
        {"graphs_error": error} if graphs else {"eager_measured_over_predicted": 1 / (1 + error)}
    )
    return {
        "predicted_ms": predicted_ms,
        "measured_ms": measured_ms,
        "in_a_row_ms": row_ms,
        "host_ms": host_ms,
        **times,
        "lanes": lanes,
        "predicted_mb": peak / 1e6,
        "allocated_mb": allocated / 1e6,
        "allocated_over_room": allocated / (peak + blas),
        "reserved_mb": reserved / 1e6,
        "reserved_over_room": reserved * (1 - RESERVED_SHARE) / (peak + blas + segments),
        "unused_before_mb": unused / 1e6,
        "retries": retries,
        **({"remarks": remarks} if remarks else {}),
    }


def _nothing() -> None:
    """An inference needs nothing prepared."""


def _step(model: nn.Module, kwargs: Mapping[str, Any], training: bool) -> None:
    outputs = tensors_in(model(**kwargs))
    if training:
        graded = [t for t in outputs if t.requires_grad]
        loss_of(graded).backward()


def loss_of(outputs: Sequence[Tensor]) -> Tensor:
    """The loss that the model has, or one of its first output."""
    scalars = [t for t in outputs if t.dim() == 0]
    return scalars[0] if scalars else outputs[0].float().square().mean()


def _measured(
    step: Callable[[], object], prepare: Callable[[], object], steps: int
) -> tuple[float, float, float]:
    """Milliseconds of a step: the median of steps alone, in a row of them, and the host's part.

    Only the row has what prepares each step in it.
    """
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(steps):
        prepare()
        step()
    end.record()
    end.synchronize()
    row_ms = begin.elapsed_time(end) / steps
    host, alone = [], []
    for _ in range(steps):
        prepare()
        torch.cuda.synchronize()
        begin.record()
        begun = time.perf_counter_ns()
        step()
        host.append(time.perf_counter_ns() - begun)
        end.record()
        end.synchronize()
        alone.append(begin.elapsed_time(end))
    return statistics.median(alone), row_ms, statistics.median(host) / 1e6
