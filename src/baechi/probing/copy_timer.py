"""Times of copies between torch devices, with a check that they arrive unchanged."""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Final

import torch

# 1 KiB to 256 MiB, each four times the one before.
SIZES: Final = tuple(1 << power for power in range(10, 29, 2))
# Sizes whose contents are looked at: within one packet, odd, and across many pages.
_CHECKED: Final = (1 << 10, (1 << 16) + 3, 1 << 22)
_REPEATS: Final = 3
_ROUNDS: Final = (3, 30)
_BUDGET_NS: Final = 10_000_000  # of the rounds of one size, once there are enough
# On a GPU the latency of a hand-over between streams is that of a dependency among kernels.
_HOPS: Final = 200

Copy = Callable[[torch.Tensor], torch.Tensor]


def first_broken_size(copy: Copy, src: torch.device) -> int | None:
    """The first size whose bytes do not arrive as they were sent; `None` if all do.

    Each copy has bytes of its own, drawn at random from a fixed seed, so that what an earlier copy
    left behind is not taken for it. They are made and compared on the CPU.

    Args:
        copy: Takes a tensor on `src` and returns it on another device.
        src: Where it comes from.
    """
    draw = torch.Generator().manual_seed(0)
    for nbytes in _CHECKED:
        for _ in range(_REPEATS):
            sent = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=draw)
            if not torch.equal(copy(sent.to(src)).cpu(), sent):
                return nbytes
    return None


def copy_times_ns(
    src: torch.device, dst: torch.device, sizes: Sequence[int] = SIZES
) -> tuple[int, ...]:
    """The median time of a copy of each size, without what it costs to wait for a device.

    Sizes that do not fit what is free are left out, so there may be fewer times than sizes.
    """
    waiting = _median_ns(lambda: None, src, dst)
    times = []
    for nbytes in sizes:
        try:
            times.append(max(_copy_ns(src, dst, nbytes) - waiting, 1))
        except torch.OutOfMemoryError:
            break
    return tuple(times)


def _copy_ns(src: torch.device, dst: torch.device, nbytes: int) -> int:
    source = torch.ones(nbytes, dtype=torch.uint8, device=src)
    target = torch.empty(nbytes, dtype=torch.uint8, device=dst)
    return _median_ns(lambda: target.copy_(source, non_blocking=True), src, dst)


def lane_ns(gpu: torch.device) -> int:
    """The time that one wait for a kernel of another stream adds."""
    own, other = (_stream(gpu) for _ in range(2))
    tensor = torch.zeros(1, device=gpu)

    def hop(lanes: Sequence[torch.cuda.Stream]) -> None:
        for index in range(_HOPS):
            lane, before = lanes[index % 2], lanes[(index + 1) % 2]
            if lane != before:
                lane.wait_stream(before)
            with torch.cuda.stream(lane):
                tensor.add_(1)

    torch.cuda.synchronize(gpu)
    one = _median_ns(lambda: hop((own, own)), gpu)
    two = _median_ns(lambda: hop((own, other)), gpu)
    return max((two - one) // _HOPS, 0)


def _stream(gpu: torch.device) -> torch.cuda.Stream:
    stream: torch.cuda.Stream = torch.cuda.Stream(gpu)  # type: ignore[no-untyped-call]
    return stream


def _median_ns(run: Callable[[], object], *places: torch.device) -> int:
    """The median time from all idle to all idle again; the first run is not counted."""
    fewest, most = _ROUNDS
    readings: list[int] = []
    run()
    while len(readings) < fewest or (len(readings) < most and sum(readings) < _BUDGET_NS):
        _synchronize(places)
        start = time.perf_counter_ns()
        run()
        _synchronize(places)
        readings.append(time.perf_counter_ns() - start)
    return int(median(readings))


def _synchronize(places: Sequence[torch.device]) -> None:
    for place in places:
        if place.type == "cuda":
            torch.cuda.synchronize(place)
