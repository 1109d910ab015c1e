"""Links of this machine: copies and hand-overs, timed, with a check that bytes arrive unchanged.

Between torch devices copies of many sizes are timed, and the link has the smallest largest error:

    minimize over a >= 0, b >= 0:   max over i of |a + b * size_i - time_i| / time_i

It is a Chebyshev approximation by two functions, 1 and size, and so its solution errs equally, with
signs in turn, at three of the sizes; or at two where a or b is 0. The candidates are few: all
triples and pairs are tried (Cheney, Introduction to Approximation Theory, 1966, chapter 3).

Between two logical CPU devices a link is what one more cut adds to a step:

    few cuts    [o o o o o o]─►[o o o o o o]
    many cuts   [o]─►[o]─►[o]─►[o]─►[o]─►...       o: a small operator with a parameter

docs/prediction.md, "Links", has how that is measured. Between streams of one GPU a link is the wait
for a kernel of the other stream; and what a GPU receives takes the host as long as one more cut.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import combinations
from statistics import median, quantiles
from typing import Any, Final, final

import torch
from torch import fx, nn

from baechi.costs.timers import CudaTimer, rounds
from baechi.records.cluster import Cluster, Device, Link
from baechi.records.graph import OpGraph
from baechi.records.op_costs import OpCost, Profile
from baechi.records.placement import Placement
from baechi.runtime.executors.cuda_graphs import WARM_UP
from baechi.runtime.placed_module import PlacedModule, apply
from baechi.torch_support.graph_capture import CudaRecorder
from baechi.torch_support.torch_devices import torch_device
from baechi.torch_support.torch_internals import spin
from baechi.torch_support.tracer_internals import quiet
from baechi.traced.operators import Attempt
from baechi.traced.traced_model import Traced
from baechi.tracing.alias_analysis import propagate
from baechi.tracing.calling_convention import canonical_call, flat_model
from baechi.tracing.guards import Attributes
from baechi.tracing.lowering import lower

# A link whose bytes cost nothing has this rate: 1 ns for each petabyte per second.
FREE_BYTES_PER_S: Final = 10**15
GOOD_ERROR: Final = 0.2

# 1 KiB to 256 MiB, each four times the one before.
SIZES: Final = tuple(1 << power for power in range(10, 29, 2))
# Sizes whose contents are looked at: within one packet, odd, and across many pages.
_CHECKED: Final = (1 << 10, (1 << 16) + 3, 1 << 22)
_REPEATS: Final = 3
_ROUNDS: Final = (3, 30)
_BUDGET_NS: Final = 10_000_000  # of the rounds of one size, once there are enough
# On a GPU the latency of a hand-over between streams is that of a dependency among kernels. Of so
# many about three launches each are pending, of some 1,024 that can be.
_HOPS: Final = 200
_QUEUING_CYCLES: Final = 40_000_000  # 20 ms or so, in which the host queues them

_OPS: Final = 24
# A hand-over costs the more the longer operators take: a worker whose core has been idle goes on
# more slowly for a while. These take about a tenth of a millisecond, as real ones do on average.
_ROWS: Final = 32
_WIDTH: Final = 256
_WARM_UP_STEPS: Final = 3
_STEPS: Final = 16


@final
@dataclass(frozen=True, slots=True)
class LinkFit:
    """A link, and the largest |predicted - measured| / measured of the times it was fitted to."""

    link: Link
    sizes: tuple[int, ...]
    worst_error: float
    worst_bytes: int


def fit_link(sizes: Sequence[int], times_ns: Sequence[int]) -> LinkFit:
    """The link with the smallest largest relative error: at least two sizes, times above 0."""
    links = (_link(a, b) for a, b in _candidates(sizes, times_ns) if a >= 0 and b >= 0)
    best = min(links, key=lambda link: max(_errors(link, sizes, times_ns)))
    errors = _errors(best, sizes, times_ns)
    worst_error = max(errors)
    return LinkFit(best, tuple(sizes), worst_error, sizes[errors.index(worst_error)])


def _candidates(sizes: Sequence[int], times: Sequence[int]) -> Iterator[tuple[float, float]]:
    """(ns, ns per byte) of every line that may be the best."""
    rows = sorted(zip(sizes, times, strict=True))
    yield 2 / (1 / rows[0][1] + 1 / rows[-1][1]), 0.0
    for (_, s), (_, t) in combinations(rows, 2):
        yield 2 / (1 / s + 1 / t), 0.0  # no cost per byte
    rates = [size / time for size, time in rows]
    yield 0.0, 2 / (min(rates) + max(rates))  # no latency
    for (x, s), (y, t) in combinations(rows, 2):  # for two sizes alone: through both
        b = (t - s) / (y - x)
        yield s - b * x, b
    for (x, s), (y, t), (z, u) in combinations(rows, 3):
        # a + b x - s e = s,  a + b y + t e = t,  a + b z - u e = u: without a, then without e.
        left, right = (y - x, s + t, t - s), (z - y, -u - t, u - t)
        determinant = left[0] * right[1] - left[1] * right[0]
        if determinant:
            b = (left[2] * right[1] - left[1] * right[2]) / determinant
            e = (left[0] * right[2] - left[2] * right[0]) / determinant
            yield s + s * e - b * x, b


def _link(latency_ns: float, ns_per_byte: float) -> Link:
    rate = 10**9 / ns_per_byte if ns_per_byte * FREE_BYTES_PER_S > 10**9 else FREE_BYTES_PER_S
    return Link(round(latency_ns), max(int(rate), 1))


def _errors(link: Link, sizes: Sequence[int], times: Sequence[int]) -> list[float]:
    pairs = zip(sizes, times, strict=True)
    return [abs(link.transfer_ns(size) - time) / time for size, time in pairs]


def first_broken_size(
    copy: Callable[[torch.Tensor], torch.Tensor], src: torch.device
) -> int | None:
    """The first size whose bytes a copy from `src` does not leave as they were, if there is one.

    Each copy has bytes of its own, so that what an earlier one left behind is not taken for it.
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
    """The GPU's time for one wait for a kernel of another stream, whatever the host takes.

    Hops are queued behind a spin, and so are the events around them:

        own     spin  begin |kernel|      |kernel|      ... end
        other               |      |kernel|      |kernel| ...
    """
    own, other = (torch.cuda.Stream(gpu) for _ in range(2))  # type: ignore[no-untyped-call]

    def took_ns(lanes: Sequence[torch.cuda.Stream]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(gpu)
        for index in range(_HOPS + 1):
            lane, before = lanes[index % 2], lanes[(index + 1) % 2]
            with torch.cuda.stream(lane):
                if index == 0:
                    spin(_QUEUING_CYCLES)
                    begin.record(lane)
                elif lane != before:
                    lane.wait_stream(before)
                spin(1)
        end.record(lanes[_HOPS % 2])
        torch.cuda.synchronize(gpu)
        return float(begin.elapsed_time(end)) * 1e6

    one, two = (
        median(took_ns(lanes) for _ in range(_REPEATS)) for lanes in ((own, own), (own, other))
    )
    return max(round((two - one) / _HOPS), 0)


def _median_ns(run: Callable[[], object], *places: torch.device) -> int:
    """The median time from all idle to all idle again; the first run is not counted."""

    def synchronize() -> None:
        for place in places:
            if place.type == "cuda":
                torch.cuda.synchronize(place)

    readings: list[int] = []
    run()
    for _ in rounds(_ROUNDS, _BUDGET_NS):
        synchronize()
        start = time.perf_counter_ns()
        run()
        synchronize()
        readings.append(time.perf_counter_ns() - start)
    return int(median(readings))


class _Chain(nn.Module):
    """Small linear operators one after the other."""

    def __init__(self, width: int, n: int) -> None:
        super().__init__()
        eye = torch.eye(width)  # drawn weights would change the caller's random state
        self.weights = nn.ParameterList(nn.Parameter(eye.clone()) for _ in range(n))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = nn.functional.linear(x, weight)
        return x


@cache
def graph_launch_ns(gpu: torch.device) -> int:
    """The host's time for the launch of a CUDA graph of one kernel, measured once in a process."""
    x = torch.ones(16, device=gpu)
    replay = CudaRecorder(gpu).record(partial(x.add_, 1), 0)
    (reading,) = CudaTimer(gpu).time([lambda n: [replay] * n], single=True)
    return reading.launch_ns


def replay_ns(
    gpu: torch.device, parameters: int, rows: int, *, training: bool
) -> tuple[tuple[int, int], tuple[int, int]]:
    """The host's part in a chain's step of so many parameters, a CUDA graph each way.

    Returns:
        For a forward, and for a backward, which is 0 without training: for how long the GPU waits,
        and how long the call takes of the host. A GPU waits for as long as a call takes more,
        between events, on an idle GPU than behind a spin, in which the host has queued all. That
        is too long where kernels end before the call: more rows make them longer.
    """
    alone = Cluster((Device(f"{gpu}/a", 2**62),), ((None,),))
    with torch.inference_mode(False), torch.enable_grad():
        example = torch.zeros(rows, _WIDTH, requires_grad=True)
        traced = _traced_chain(example, parameters)
        graph, placement = _placement(traced, 1)
        module = apply(traced, placement, graph=graph, cluster=alone, cuda_graphs=True)
        x = example.detach().to(gpu).requires_grad_(training)
        seed = torch.zeros_like(x)

    def took_ns(run: Callable[[], Any], *, queued: bool) -> tuple[float, int, Any]:
        """A call's time between events, and of the host; and what it makes."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(gpu)
        if queued:
            spin(_QUEUING_CYCLES)
        begin.record(torch.cuda.current_stream(gpu))
        begun = time.perf_counter_ns()
        made = run()
        host_ns = time.perf_counter_ns() - begun
        end.record(torch.cuda.current_stream(gpu))
        end.synchronize()
        return begin.elapsed_time(end) * 1e6, host_ns, made

    def step_ns(*, queued: bool) -> tuple[float, int, float, int]:
        with torch.inference_mode(False), torch.set_grad_enabled(training):
            forward_ns, forward_host_ns, output = took_ns(lambda: module(x), queued=queued)
            if not training:
                return forward_ns, forward_host_ns, 0.0, 0
            for tensor in (x, *module.parameters()):
                tensor.grad = None
            backward = partial(torch.autograd.backward, output, seed)
            backward_ns, backward_host_ns, _ = took_ns(backward, queued=queued)
            return forward_ns, forward_host_ns, backward_ns, backward_host_ns

    try:
        for _ in range(WARM_UP + _WARM_UP_STEPS):
            step_ns(queued=False)
        idle = [step_ns(queued=False) for _ in range(_STEPS)]
        behind = [step_ns(queued=True) for _ in range(_STEPS // 2)]
    finally:
        module.unplace()
    whole = [median(column) for column in zip(*idle, strict=True)]
    own = [min(column) for column in zip(*behind, strict=True)]  # what is queued can only be longer
    forward, backward = (
        (max(round(whole[way] - own[way]), 0), round(whole[way + 1])) for way in (0, 2)
    )
    return forward, backward


def handover(names: Sequence[str] = ("cpu:0", "cpu:1")) -> Link:
    """The link between two logical devices: latency is the wait, overhead the work.

    On GPUs the overhead is the time of the thread that launches, and there is no latency in it.
    Takes about half a second, and leaves torch's threads and random state as they were.
    """
    pair = Cluster.connected([Device(name, 2**62) for name in names], Link(0, 1))
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.zeros(_ROWS, _WIDTH, requires_grad=True)
        chains = [_traced_chain(x) for _ in range(2)]  # of two models, since both run in turns
        few, many = map(_placement, chains, (2, len(chains[1].ops)))
        placed = [
            apply(traced, placement, graph=graph, cluster=pair, threads_per_device=1)
            for traced, (graph, placement) in zip(chains, (few, many), strict=True)
        ]
        try:
            place = torch_device(names[0])
            few_step, many_step = _steps(placed, x.detach().to(place).requires_grad_())
        finally:
            for module in placed:
                module.unplace()
    more = _crossings(*many) - _crossings(*few)
    whole_ns, busy_ns = (
        max((longer - shorter) // more, 0)
        for longer, shorter in zip(many_step, few_step, strict=True)
    )
    if place.type == "cuda":
        return Link(0, FREE_BYTES_PER_S, whole_ns)
    return Link(max(whole_ns - busy_ns, 0), FREE_BYTES_PER_S, busy_ns)


def _traced_chain(x: torch.Tensor, n: int = _OPS) -> Traced:
    """The chain, traced by fx: its graph is the same on every rung, and this one needs no time."""
    model = _Chain(x.shape[1], n)
    call = canonical_call(model, (x,), {})
    with quiet():
        flat, returned = flat_model(model, call)
        module = fx.GraphModule(flat, fx.Tracer().trace(flat))
        facts = propagate(module, call.tensors)
        ops, tensors, lowered = lower(model, module, facts, call, returned[-1], Attributes(model))
    attempts = (Attempt("torch.fx.symbolic_trace"),)
    return Traced("Chain", ops, tensors, attempts, model.training, lowered)


def _placement(traced: Traced, pieces: int) -> tuple[OpGraph, Placement]:
    """The chain without times, for training, in equal pieces; two devices take turns."""
    devices = [op * pieces // len(traced.ops) % 2 for op in range(len(traced.ops))]
    profile = Profile(traced.digest, "", tuple(OpCost(0, 0) for _ in traced.ops))
    graph = traced.graph(profile, training=True)
    everywhere = (*devices, devices[-1], *(devices[op] for op in traced.backward_ops))
    return graph, Placement(graph.digest, everywhere, tuple(range(len(graph.ops))))


def _crossings(graph: OpGraph, placement: Placement) -> int:
    """The number of values and gradients that are handed over."""
    device = placement.devices
    return sum(
        len({device[op] for op in tensor.consumers} - {device[tensor.producer]})
        for tensor in graph.tensors
    )


def _steps(modules: Sequence[PlacedModule], x: torch.Tensor) -> list[tuple[int, ...]]:
    """Of each one's steps the time, and that of processors: ns, the lower quartiles, in turns."""
    seed = torch.zeros_like(x)
    readings: list[list[tuple[int, int]]] = [[] for _ in modules]
    for _ in range(_WARM_UP_STEPS + _STEPS):
        for module, row in zip(modules, readings, strict=True):
            inputs = [x, *module.parameters()]
            for gpu in {tensor.device for tensor in inputs if tensor.is_cuda}:
                torch.cuda.synchronize(gpu)
            start, busy = time.perf_counter_ns(), time.process_time_ns()
            output = module(x)
            torch.autograd.grad(output, inputs, seed.to(output.device))
            row.append((time.perf_counter_ns() - start, time.process_time_ns() - busy))
    columns = (zip(*row[_WARM_UP_STEPS:], strict=True) for row in readings)
    return [tuple(int(quantiles(column, n=4)[0]) for column in pair) for pair in columns]
