"""Captures that fail, on allocators that play torch's: what was captured before and after is right.

The rules are those of `create_or_incref_pool` (c10/cuda/CUDACachingAllocator.cpp) and
`begin_allocate_to_pool` (ATen/core/CachingHostAllocator.h).
"""

import contextlib
import itertools
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from baechi.runtime.executors import cuda_graphs
from baechi.torch_support import graph_capture
from baechi.torch_support.graph_capture import CudaRecorder, capture_stream


class Stream:
    """One of torch's pool, or another object of that one."""

    count = itertools.count(1)

    def __init__(self, _: Any = None, **options: int) -> None:
        self.stream_id = options.get("stream_id") or next(self.count)
        self.device_index = self.device_type = 0


class Allocators:
    """Pools of memory by their handles, and whether each is used."""

    def __init__(self) -> None:
        self.handles = itertools.count(1)
        self.uses: Counter[Any] = Counter()
        self.underway: list[Any] = []  # on the GPU
        self.pinned: list[Any] = []
        self.cached = True  # as eager steps leave it
        self.invalid = False  # whether a kernel asked the host in the capture that is underway

    def begin(self, pool: Any) -> None:
        if pool in self.uses and not self.uses[pool]:
            raise RuntimeError("INTERNAL ASSERT FAILED: use_count > 0")
        self.uses[pool] += 1
        self.underway.append(pool)
        if pool in self.pinned:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        self.pinned.append(pool)

    def end(self, _: int, pool: Any) -> None:
        if pool not in self.underway:
            raise RuntimeError("not currently recording to mempool_id")
        self.underway.remove(pool)

    def release(self, _: int, pool: Any) -> None:
        self.uses[pool] -= 1

    def empty(self) -> None:
        self.cached = False


@pytest.fixture
def allocators(monkeypatch: pytest.MonkeyPatch) -> Allocators:
    """Inside a test `torch.cuda` captures graphs of nothing."""
    mine = Allocators()

    class Graph:
        pool: Any = None
        ended = False

        def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
            assert capture_error_mode == "thread_local"
            self.pool = next(mine.handles) if pool is None else pool
            mine.begin(self.pool)

        def capture_end(self) -> None:
            if mine.invalid:
                mine.invalid = False
                raise RuntimeError("operation failed due to a previous error during capture")
            mine.end(0, self.pool)
            mine.pinned.remove(self.pool)
            self.ended = True

        def replay(self) -> None:
            assert self.ended

        def __del__(self) -> None:
            if self.ended:
                mine.release(0, self.pool)

    patches: dict[str, Any] = {
        "CUDAGraph": Graph,
        "graph_pool_handle": lambda: next(mine.handles),
        "synchronize": lambda _: None,
        "empty_cache": mine.empty,
        "stream": lambda _: contextlib.nullcontext(),
        "Stream": Stream,
    }
    for name, value in patches.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(graph_capture, "_SPARE", defaultdict(list))
    monkeypatch.setattr(graph_capture, "is_captured", lambda _: False)
    monkeypatch.setattr(graph_capture, "_take_workspaces", lambda *_: None)  # which are a GPU's
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", mine.end, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", mine.release, raising=False)
    monkeypatch.setattr(CudaRecorder, "_failed", [])
    return mine


def test_lanes_capture_with_nothing_in_the_cache(allocators: Allocators) -> None:
    assert allocators.cached
    cuda_graphs._recorders({0: torch.device("cuda", 0)})(0).record(lambda: None, 0)()
    assert not allocators.cached


@pytest.mark.usefixtures("allocators")
def test_a_graph_is_made_where_its_stream_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """What asks for the current stream of another GPU begins to use that GPU, and takes memory."""
    current: list[Any] = ["the caller's"]

    @contextlib.contextmanager
    def on(stream: Any) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    class Graph(torch.cuda.CUDAGraph):  # that of the fixture
        def __init__(self) -> None:
            made.append(current[-1])

    made: list[Any] = []
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    recorder = CudaRecorder(torch.device("cuda", 1))
    recorder.record(lambda: None, 0)()
    assert made == [recorder._stream]


@pytest.mark.usefixtures("allocators")
def test_what_a_lane_captures_is_on_one_stream_and_never_in_one_memory() -> None:
    """For training, for inference and anew: each stream would cost two workspaces of cuBLAS."""
    recorders = cuda_graphs._recorders(dict.fromkeys(range(2), torch.device("cuda", 0)))
    first, again, other = recorders(0), recorders(0), recorders(1)
    assert first._stream is again._stream
    assert first._stream is not other._stream
    assert len({first._pool, again._pool, other._pool}) == 3


@pytest.mark.usefixtures("allocators")
def test_a_stream_of_captures_is_its_own_and_then_the_next_ones() -> None:
    """torch has 32, and cuBLAS keeps workspaces for each that was ever used."""
    gpu, other = torch.device("cuda", 0), torch.device("cuda", 1)
    first, second = capture_stream(gpu), capture_stream(gpu)
    known = {first.stream_id, second.stream_id}
    assert len(known) == 2
    assert not weakref.getweakrefcount(first)  # torch 2.11 crashes on them
    del first, second
    assert capture_stream(other).stream_id not in known
    for _ in range(3):
        again = [capture_stream(gpu) for _ in range(2)]
        assert {stream.stream_id for stream in again} == known
        del again


def fails(allocators: Allocators, *, invalid: bool) -> Callable[[], None]:
    def run() -> None:
        allocators.invalid = invalid
        raise RuntimeError("not permitted when stream is capturing")

    return run


@pytest.mark.parametrize("invalid", [True, False])
@pytest.mark.parametrize("first", [0, 1])
def test_what_fails_to_be_captured_leaves_the_next_captures_right(
    invalid: bool, first: int, allocators: Allocators
) -> None:
    recorder = CudaRecorder(torch.device("cuda", 0))
    kept = [recorder.record(lambda: None, rank) for rank in range(first)]
    with pytest.raises(RuntimeError, match="not permitted"):
        recorder.record(fails(allocators, invalid=invalid), first)
    assert not allocators.underway
    kept += [recorder.record(lambda: None, rank) for rank in range(first + 1, first + 4)]
    for replay in kept:
        replay()
    assert not allocators.underway
    assert all(count >= 0 for count in allocators.uses.values())


def test_a_capture_that_does_not_even_begin_leaves_no_memory_to_it(allocators: Allocators) -> None:
    recorder = CudaRecorder(torch.device("cuda", 0))
    recorder.record(lambda: None, 0)
    allocators.pinned.append(recorder._pool)  # as if another captured into it
    with pytest.raises(RuntimeError):
        recorder.record(lambda: None, 1)
    assert not allocators.underway
    recorder.record(lambda: None, 2)()
