"""The step `host`: what the launching thread pays, in us.

Nothing is waited for while the clock runs, so the GPU's own time is in no figure.

    segment    a chain of linear operators, cut everywhere between two lanes of one GPU, less the
               same chain in two segments, for each further segment; forward and backward apart
    hand-over  the mean of both: each segment of the chain begins with one; beside it what `probe`
               found, which the clock takes. What crosses to another GPU takes more (`several.py`)
    graph      the launch of a CUDA graph of one kernel, as `place` measures it; and what a further
               segment adds to a step whose lanes are one graph: to the host, and on the GPU
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from benchmarks.gpu_check.check import Check
from torch import Tensor, nn

import baechi
from baechi.probing.link_probe import graph_launch_ns
from baechi.runtime.executors.cuda_graphs import WARM_UP

_PLACE = "cuda:0"
_LANES = ("cuda:0/a", "cuda:0/b")


def run(check: Check) -> None:
    """A row per figure."""
    n = 500 if check.quick else 5_000
    layers, steps = (8, 6) if check.quick else (32, 30)
    check.case("operator", lambda: operator(n))
    check.case("operator of a model", lambda: model_operator(steps))
    check.case("segment", lambda: segments(layers, steps))
    check.case("graph", lambda: graphs(layers, steps))
    check.case("call", lambda: call(steps))


def operator(n: int) -> dict[str, Any]:
    """An operator without a graph of autograd."""
    x = torch.ones(16, device=_PLACE)
    x.add_(1)
    torch.cuda.synchronize()
    host_us = _host_us(lambda: [x.add_(1) for _ in range(n)]) / n
    torch.cuda.synchronize()
    return {"operator_us": host_us}


def model_operator(steps: int) -> dict[str, Any]:
    """Operators of a decoder's layers, forward with a graph of autograd, and backward."""
    model = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True).to(_PLACE)
    x = torch.randn(1, 8, 64, device=_PLACE)
    traced = baechi.trace(model, (x,))
    count = sum(len(nodes) for nodes in traced.module.nodes)
    both = _forward_backward(model, x, steps)
    return {"forward_us": both[0] / count, "backward_us": both[1] / count, "operators": count}


def segments(layers: int, steps: int, devices: Sequence[str] = _LANES) -> dict[str, Any]:
    """What a further segment adds, on two lanes or on two GPUs."""
    x = torch.randn(4, 64, device=_PLACE)
    few, many = (_chain(layers, cut) for cut in (layers // 2, 1))
    placed = [_placed(x, layers, lanes, devices=devices) for lanes in (few, many)]
    counts = [sum(len(phase.segments) for phase in each.program.phases) / 2 for each in placed]
    (few_f, few_b), (many_f, many_b) = (_forward_backward(each, x, steps) for each in placed)
    more = counts[1] - counts[0]
    link = baechi.probe(list(devices)).links[0][1]
    found = {
        "segment_forward_us": (many_f - few_f) / more,
        "segment_backward_us": (many_b - few_b) / more,
        "handover_us": (many_f - few_f + many_b - few_b) / more / 2,
        "probed_us": link.overhead_ns / 1e3 if link else None,
        "segments": int(counts[1]),
    }
    for each in placed:
        each.unplace()
    return found


def graphs(layers: int, steps: int) -> dict[str, Any]:
    """The launch of a graph, and what a further segment adds inside of one."""
    x = torch.randn(4, 64, device=_PLACE)
    found = []
    for cut in (layers, 1):
        placed = _placed(x, layers, _chain(layers, cut), cuda_graphs=True, training=False)
        with torch.no_grad():
            for _ in range(WARM_UP + 2):
                placed(x)
            host_us = _median_us(lambda each=placed: each(x), steps)
            device_us = _device_us(lambda each=placed: each(x), steps)
        count = sum(len(segment.tapes) for segment in placed.program.phases[0].segments)
        found.append((count, host_us, device_us))
        placed.unplace()
    (few, few_host, few_device), (many, many_host, many_device) = found
    return {
        "graph_launch_us": graph_launch_ns(torch.device(_PLACE)) / 1e3,
        "segment_inside_us": (many_host - few_host) / (many - few),
        "segment_inside_device_us": (many_device - few_device) / (many - few),
        "segments": many,
    }


def call(steps: int) -> dict[str, Any]:
    """What a call through the runtime has more than the model's own, on one lane."""
    x = torch.randn(4, 64, device=_PLACE)
    model = _Chain(2).to(_PLACE)
    placed = _placed(x, 2, [0, 0])
    own, ours = (_forward_backward(each, x, 3 * steps) for each in (model, placed))
    with torch.no_grad():
        alone, through = (_median_us(lambda each=each: each(x), steps) for each in (model, placed))
    placed.unplace()
    return {
        "inference_us": through - alone,
        "training_us": sum(ours) - sum(own),
        "model_us": sum(own),
    }


class _Chain(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(n))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _chain(layers: int, cut: int) -> list[int]:
    """The lane of every layer, another one after so many."""
    return [index // cut % 2 for index in range(layers)]


def _placed(
    x: Tensor,
    layers: int,
    lanes: list[int],
    *,
    devices: Sequence[str] = _LANES,
    cuda_graphs: Any = False,
    training: bool = True,
) -> baechi.PlacedModule:
    torch.manual_seed(0)
    traced = baechi.trace(_Chain(layers).to(_PLACE), (x,))
    costs = tuple(baechi.OpCost(10_000, 20_000) for _ in traced.ops)
    graph = traced.graph(baechi.Profile(traced.digest, "", costs), training=training)
    cluster = baechi.Cluster.connected(
        [baechi.Device(name, "1GiB") for name in devices], baechi.Link(0, 10**12)
    )
    own = [lanes[min(op * layers // len(traced.ops), layers - 1)] for op in range(len(traced.ops))]
    every = (*own, own[-1], *(own[op] for op in traced.backward_ops)) if training else (*own,)
    placement = baechi.Placement(graph.digest, every, tuple(range(len(graph.ops))))
    return baechi.apply(traced, placement, graph=graph, cluster=cluster, cuda_graphs=cuda_graphs)


def _forward_backward(model: nn.Module, x: Tensor, steps: int) -> tuple[float, float]:
    """The median us of the host in a forward and in its backward."""
    rows = []
    for _ in range(WARM_UP + steps):
        model.zero_grad()
        torch.cuda.synchronize()
        begun = time.perf_counter_ns()
        loss = model(x).sum()
        middle = time.perf_counter_ns()
        loss.backward()
        rows.append((middle - begun, time.perf_counter_ns() - middle))
    torch.cuda.synchronize()
    forward, backward = zip(*rows[WARM_UP:], strict=True)
    return statistics.median(forward) / 1e3, statistics.median(backward) / 1e3


def _host_us(run: Callable[[], object]) -> float:
    begun = time.perf_counter_ns()
    run()
    return (time.perf_counter_ns() - begun) / 1e3


def _median_us(run: Callable[[], object], steps: int) -> float:
    rows = []
    for _ in range(steps):
        torch.cuda.synchronize()
        rows.append(_host_us(run))
    torch.cuda.synchronize()
    return statistics.median(rows)


def _device_us(run: Callable[[], object], steps: int) -> float:
    """The time between events around a run, behind a spin in which all is queued."""
    rows = []
    for _ in range(steps):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(10_000_000)
        begin.record()
        run()
        end.record()
        end.synchronize()
        rows.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(rows)
