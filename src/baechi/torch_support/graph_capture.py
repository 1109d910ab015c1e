"""Capture of a lane's launches as CUDA graphs, which share one pool of memory.

All graphs of a lane are captured in the order in which they are replayed, on a stream of their own
(the caller's may be the default one, which cannot be captured), so they may share a pool; lanes run
side by side, so they must not share one.
"""

import contextlib
import gc
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Final, final

import torch

from baechi.torch_support.streams import is_captured
from baechi.torch_support.torch_internals import abandon_pool

# Streams for captures that nobody has any more, by GPU, of those that compute and of others.
_SPARE: Final[dict[tuple[torch.device, bool], list[dict[str, int]]]] = defaultdict(list)


def capture_stream(gpu: torch.device, *, computes: bool = True) -> torch.cuda.Stream:
    """A stream that nobody else has for captures as long as it is alive, and then the next.

    torch hands out 32 of each priority in turn, and no lane has this one. cuBLAS keeps a workspace
    for each stream and thread, which torch never gives back, nor the block of memory of which it is
    a part: so streams are used again, and have their workspaces before a graph's memory is taken.
    """
    spare = _SPARE[gpu, computes]
    try:
        stream: torch.cuda.Stream = torch.cuda.Stream(**spare.pop())  # type: ignore[no-untyped-call]
    except IndexError:
        stream = torch.cuda.Stream(gpu, priority=-1)  # type: ignore[no-untyped-call]
        if computes and not is_captured(gpu):
            _take_workspaces(gpu, stream)
    names = ("stream_id", "device_index", "device_type")
    identity = {name: getattr(stream, name) for name in names}
    stream.lease = lease = _Lease()  # type: ignore[attr-defined]
    weakref.finalize(lease, spare.append, identity).atexit = False
    return stream


class _Lease:
    """Lives as long as a stream, to which nobody may refer weakly.

    torch 2.11 frees streams and events without a look at weak references, at which the next
    garbage collection crashes (https://github.com/pytorch/pytorch/pull/183403).
    """


def _take_workspaces(gpu: torch.device, stream: torch.cuda.Stream) -> None:
    """Multiply on a stream, in this thread and in that of autograd."""
    with torch.cuda.stream(stream), torch.inference_mode(False), torch.enable_grad():
        x = torch.ones(16, 16, device=gpu, requires_grad=True)
        torch.autograd.grad((x @ x).sum(), x)


@final
class CudaRecorder:
    """Captures CUDA graphs for one lane, by default on a stream of its own.

    Each stream on which matrices are multiplied costs a workspace of cuBLAS, which stays (32 MiB on
    an H100).
    """

    _failed: ClassVar[list[torch.cuda.CUDAGraph]] = []

    def __init__(self, place: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        self._place = place
        self._stream = capture_stream(place) if stream is None else stream
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._latest = -1

    def record(self, function: Callable[[], object], rank: int) -> Callable[[], None]:
        """Capture what the function launches; it takes place when it is replayed first.

        Its rank is its place in the order of a step. What one capture has let go of, the next may
        take; one that comes late gets a pool of its own.

        Raises:
            RuntimeError: It cannot be captured; nothing of it has taken place.
        """
        torch.cuda.synchronize(self._place)
        pool = self._pool if rank >= self._latest else torch.cuda.graph_pool_handle()
        self._latest = max(rank, self._latest)
        # Garbage may hold graphs, and must not be collected in a capture.
        with no_collections(), warnings.catch_warnings(), torch.cuda.stream(self._stream):
            graph = torch.cuda.CUDAGraph()  # which would begin to use the GPU that is current
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")  # one of views
            try:
                # Autograd's and other people's threads may take memory meanwhile.
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                function()
            except BaseException:
                self._abandon(graph, pool)
                raise
            try:
                self._end(graph)
            except BaseException:
                self._clear(graph, pool)
                raise
        return graph.replay

    def run(self, function: Callable[[], None]) -> None:
        """Run it now on the stream of the captures, between what is before and after it."""
        here = torch.cuda.current_stream(self._place)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            function()
        here.wait_stream(self._stream)

    def _abandon(self, graph: torch.cuda.CUDAGraph, pool: Any) -> None:
        """End a capture in which something failed.

        Its pool may be left without graphs, and torch refuses to begin with one that was used and
        is used no more (`create_or_incref_pool`); or the allocator of pinned memory goes on with it
        (`_clear`), and refuses to begin twice (`begin_allocate_to_pool`). So the next gets another.
        """
        self._pool = torch.cuda.graph_pool_handle()
        try:
            self._end(graph)
        except RuntimeError:
            self._clear(graph, pool)

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture on its stream.

        A thread of autograd comes back from a backward inside a backward with its own GPU as the
        current one (torch, torch/csrc/autograd/engine.cpp, thread_main), which may be another.
        """
        with torch.cuda.stream(self._stream):
            graph.capture_end()

    def _clear(self, graph: torch.cuda.CUDAGraph, pool: Any) -> None:
        """Undo what a capture leaves behind whose end fails.

        `CUDAGraph::capture_end` throws before it tells the allocator and the random generator that
        the capture is over (aten/src/ATen/cuda/CUDAGraph.cpp). Here the allocator is told; the
        generator is reset by the end of another capture. The allocator of pinned memory, which has
        no such entry in Python, keeps querying the graph: so the graph is kept for good.
        """
        self._failed.append(graph)
        self._pool = torch.cuda.graph_pool_handle()  # as in `_abandon`
        with contextlib.suppress(RuntimeError):  # it was not begun
            abandon_pool(self._place.index, pool)
        with contextlib.suppress(RuntimeError), torch.cuda.stream(self._stream):
            another = torch.cuda.CUDAGraph()
            another.capture_begin(capture_error_mode="thread_local")
            another.capture_end()


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Keep Python's garbage collector out of a block."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
