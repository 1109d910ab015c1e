"""The step `overlap`: what a second stream gains, and how many streams run side by side.

Two matrix products on two streams, against the same two on one, by size: 2 is a full gain. Where a
product fills the GPU nothing is gained, and lanes of one GPU cannot pay. Then spins of one block
each on ever more streams: above the number of hardware queues (`CUDA_DEVICE_MAX_CONNECTIONS`, 8 by
default) they wait for each other.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from benchmarks.gpu_check.check import Check

_PLACE = "cuda:0"
_ROUNDS = 7
_CYCLES = 2_000_000
# Enough launches of the host are hidden behind it: 20 ms or so.
_QUEUEING = 40_000_000


def run(check: Check) -> None:
    """A row per size, and per number of streams."""
    for size in (64, 256) if check.quick else (64, 128, 256, 512, 1024, 2048, 4096):
        check.case(f"two products of {size}", partial(_products, size))
    if not check.quick:
        check.case("two sums over 100 MB", partial(_sums, 25_000_000))
    for count in (2, 4) if check.quick else (2, 4, 8, 12, 16, 32):
        check.case(f"{count} spins", partial(_spins, count))


def _products(size: int) -> Mapping[str, Any]:
    pairs = [
        [torch.randn(size, size, device=_PLACE) for _ in range(2)]
        + [torch.empty(size, size, device=_PLACE)]
        for _ in range(2)
    ]
    repeats = max(min(200, 10**10 // size**3), 2)
    works = [lambda p=p: torch.mm(p[0], p[1], out=p[2]) for p in pairs]
    return _gain([partial(_repeated, work, repeats) for work in works], repeats)


def _sums(count: int) -> Mapping[str, Any]:
    rows = [torch.randn(count, device=_PLACE) for _ in range(2)]
    outs = [torch.empty_like(row) for row in rows]
    works = [lambda a=a, b=b: torch.add(a, 1.0, out=b) for a, b in zip(rows, outs, strict=True)]
    return _gain([partial(_repeated, work, 10) for work in works], 10)


def _spins(count: int) -> Mapping[str, Any]:
    one = _took_ms([partial(torch.cuda._sleep, _CYCLES)], 1)
    many = _took_ms([partial(torch.cuda._sleep, _CYCLES)] * count, count)
    return {"side_by_side": count * one / max(many, 1e-9), "one_ms": one}


def _gain(works: Sequence[Callable[[], object]], repeats: int) -> Mapping[str, Any]:
    one, two = _took_ms(works, 1), _took_ms(works, 2)
    return {"gain": one / max(two, 1e-9), "one_stream_us": one * 1e3 / repeats / 2}


def _repeated(work: Callable[[], object], repeats: int) -> None:
    for _ in range(repeats):
        work()


def _took_ms(works: Sequence[Callable[[], object]], count: int) -> float:
    """The median time of all works, dealt out to so many streams, all queued before they begin."""
    streams = [torch.cuda.Stream() for _ in range(count)]
    rows = []
    for _ in range(_ROUNDS):
        torch.cuda.synchronize()
        here = torch.cuda.current_stream()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_QUEUEING)
        begin.record()
        for stream in streams:
            stream.wait_event(begin)
        for index, work in enumerate(works):
            with torch.cuda.stream(streams[index % count]):
                work()
        for stream in streams:
            here.wait_stream(stream)
        end.record()
        end.synchronize()
        rows.append(begin.elapsed_time(end))
    return statistics.median(rows[2:])
