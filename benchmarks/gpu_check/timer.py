"""The step `timer`: what `CudaTimer` reads, against the durations that CUPTI gives to kernels.

CUPTI's are what the GPU was busy with the operator's kernels, so a reading is right where it is the
same for one kernel, and no more than a few microseconds above it for several. Cold readings follow
a flush of the last cache, as those of operators with large weights do; their kernels are told from
those of the flush by their names. The last case profiles a model, and counts what it leaves behind.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from benchmarks.gpu_check.check import Check, Skipped
from torch import Tensor, nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

import baechi
from baechi.costs.operator_alone import evictor
from baechi.costs.timers import CudaTimer, Run
from baechi.torch_support.torch_devices import cache_bytes

_PLACE = torch.device("cuda", 0)
_RUNS = 20


def run(check: Check) -> None:
    """A row per operator; `off_by` is the reading's error as a share of CUPTI's."""
    timer: list[CudaTimer] = []

    def made() -> Mapping[str, Any]:
        timer.append(CudaTimer(_PLACE))
        return {"pair_ns": timer[0]._pair_ns, "cycles_per_ns": timer[0]._cycles_per_ns}

    check.case("the timer itself", made)
    for name, make in _cases(check.quick).items() if timer else ():
        check.case(name, partial(_warm, timer[0], make))
    for rows in (1, 8, 64) if timer else ():
        check.case(f"linear {rows} x 768 -> 3072, cold", partial(_cold, timer[0], rows))
    check.case("a profile", partial(_profile, check.quick))


def _cases(quick: bool) -> Mapping[str, Callable[[], Run]]:
    """Operators by name; each makes its inputs when its turn comes."""

    def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, device=_PLACE, dtype=dtype)

    def matrices(n: int, dtype: torch.dtype) -> Run:
        return partial(torch.mm, randn(n, n, dtype=dtype), randn(n, n, dtype=dtype))

    def attention() -> Run:
        q = randn(8, 12, 512, 64, dtype=torch.bfloat16)
        return partial(functional.scaled_dot_product_attention, q, q, q, is_causal=True)

    def embedding() -> Run:
        weight = randn(50_257, 768).requires_grad_()
        found = functional.embedding(torch.randint(0, 50_257, (8, 512), device=_PLACE), weight)
        seed = torch.ones_like(found)
        return partial(torch.autograd.grad, [found], [weight], [seed], retain_graph=True)

    def adding(n: int) -> Run:
        return partial(torch.add, randn(n), 1.0)

    cases: dict[str, Callable[[], Run]] = {
        "mm 64 fp32": partial(matrices, 64, torch.float32),
        "add 1 KB": partial(adding, 256),
        "layer norm": lambda: partial(functional.layer_norm, randn(4096, 768), (768,)),
    }
    if quick:
        return cases
    return cases | {
        "mm 1024 fp32": partial(matrices, 1024, torch.float32),
        "mm 1024 bf16": partial(matrices, 1024, torch.bfloat16),
        "mm 8192 bf16": partial(matrices, 8192, torch.bfloat16),
        "addmm": lambda: partial(torch.addmm, randn(3072), randn(4096, 768), randn(768, 3072)),
        "softmax": lambda: partial(torch.softmax, randn(4096, 4096), -1),
        "conv2d": lambda: partial(
            functional.conv2d, randn(8, 64, 56, 56), randn(64, 64, 3, 3), padding=1
        ),
        "attention bf16": attention,
        "embedding backward": embedding,
        "add 100 MB": partial(adding, 25_000_000),
    }


def _warm(timer: CudaTimer, make: Callable[[], Run]) -> Mapping[str, Any]:
    one = make()
    (reading,) = timer.time([lambda n: [one] * n])
    kernels = _kernels([one] * _RUNS)
    return _compared(reading.ns, reading.launch_ns, sum(map(sum, kernels.values())) / _RUNS)


def _cold(timer: CudaTimer, rows: int) -> Mapping[str, Any]:
    x = torch.randn(rows, 768, device=_PLACE)
    layer = nn.Linear(768, 3072).to(_PLACE)
    one, evict = partial(layer, x), evictor(_PLACE, cache_bytes(_PLACE))

    def prepare(n: int) -> Sequence[Run]:
        evict([x])
        return [one] * n

    (reading,) = timer.time([prepare], single=True)
    alone = _kernels([one]).keys()
    mixed = _kernels([partial(evict, [x]), one] * _RUNS)
    took = sum(sum(durations) for name, durations in mixed.items() if name in alone)
    return _compared(reading.ns, reading.launch_ns, took / _RUNS)


def _compared(ns: int, launch_ns: int, cupti_ns: float) -> Mapping[str, Any]:
    return {
        "timer_us": ns / 1e3,
        "cupti_us": cupti_ns / 1e3,
        "launch_us": launch_ns / 1e3,
        # Below 10 us a fraction of a microsecond is most of the error, and the row shows both.
        "off_by": abs(ns - cupti_ns) / cupti_ns if cupti_ns >= 10_000 else None,
    }


def _kernels(runs: Sequence[Run]) -> Mapping[str, list[float]]:
    """The durations of every kernel in ns, by its name; copies and fills are kernels, too."""
    runs[0]()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as found:
        for one in runs:
            one()
        torch.cuda.synchronize()
    kernels: dict[str, list[float]] = {}
    for event in found.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kernels.setdefault(event.name, []).append(event.device_time_total * 1e3)
    if not kernels:
        raise Skipped("CUPTI gives no kernels here")
    return kernels


def _profile(quick: bool) -> Mapping[str, Any]:
    """What a profile reads, and what it leaves in the allocator."""
    n = 64 if quick else 1024
    layers = [layer for _ in range(4) for layer in (nn.Linear(n, n), nn.GELU(), nn.LayerNorm(n))]
    traced = baechi.trace(nn.Sequential(*layers).to(_PLACE), (torch.randn(n, n, device=_PLACE),))
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    found = baechi.profile(traced, _PLACE, cache=False, progress=False)
    left = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    assert left < 2 * 2**30, f"the profile left {left} bytes reserved that nobody uses"
    return {
        "operators": len(found.costs),
        "grown_bytes": torch.cuda.memory_reserved() - before,
        "unused_bytes": left,
        "remarks": sorted({cost.remark for cost in found.costs if cost.remark}),
    }
