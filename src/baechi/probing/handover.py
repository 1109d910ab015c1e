"""The cost that one more cut between two logical CPU devices adds to a step.

    few cuts    [o o o o o o]─►[o o o o o o]
    many cuts   [o]─►[o]─►[o]─►[o]─►[o]─►...       o: a small operator with a parameter

A chain of small operators runs on two workers of the runtime itself, forward and backward. The cost
of a hand-over is the extra time of the second placement per extra hand-over. Its processor time is
the work of handing over, which no other work hides: Python that leaves and enters a segment, and
autograd that begins and ends there. The rest is the wait for a thread to wake. No bytes are copied.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import quantiles
from typing import Final, final

import torch
from torch import fx, nn

from baechi.records.cluster import Cluster, Device, Link
from baechi.records.graph import OpGraph
from baechi.records.op_costs import OpCost, Profile
from baechi.records.placement import Placement
from baechi.runtime.placed_module import PlacedModule, apply
from baechi.traced.operators import Attempt
from baechi.traced.traced_model import Traced
from baechi.tracing.alias_analysis import propagate, quiet
from baechi.tracing.calling_convention import canonical_call, flat_model
from baechi.tracing.lowering import lower

_OPS: Final = 24
# A hand-over costs the more the longer operators take: a worker whose core has been idle goes on
# more slowly for a while. These take about a tenth of a millisecond, as real ones do on average,
# and have parameters, whose gradients each segment hands on. With longer ones their own unrest
# hides what is looked for.
_ROWS: Final = 32
_WIDTH: Final = 256
_WARM_UP: Final = 3
_ROUNDS: Final = 16


@final
@dataclass(frozen=True, slots=True)
class Handover:
    """The time that one hand-over adds to a step, forward and backward together.

    Attributes:
        wait_ns: Until the other worker begins.
        busy_ns: Time of a processor.
    """

    wait_ns: int
    busy_ns: int


class _Chain(nn.Module):
    """Small linear operators one after the other."""

    def __init__(self, width: int) -> None:
        super().__init__()
        eye = torch.eye(width)  # drawn weights would change the caller's random state
        self.weights = nn.ParameterList(nn.Parameter(eye.clone()) for _ in range(_OPS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = nn.functional.linear(x, weight)
        return x


def handover(rows: int = _ROWS, width: int = _WIDTH) -> Handover:
    """One hand-over between two logical CPU devices, measured.

    About half a second; leaves torch's threads and random state as they were.

    Args:
        rows: Of what the operators read.
        width: Of that, and of their square weights.
    """
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.zeros(rows, width, requires_grad=True)
        traced = _traced_chain(x)
        few, many = (_placement(traced, pieces) for pieces in (2, len(traced.ops)))
        placed = [_placed(traced, *row) for row in (few, many)]
        try:
            few_step, many_step = _steps(placed, x)
        finally:
            for module in placed:
                module.unplace()
    more = _crossings(*many) - _crossings(*few)
    whole_ns, busy_ns = (
        max((longer - shorter) // more, 0)
        for longer, shorter in zip(many_step, few_step, strict=True)
    )
    return Handover(max(whole_ns - busy_ns, 0), busy_ns)


def _traced_chain(x: torch.Tensor) -> Traced:
    """The chain, traced by fx: its graph is the same on every rung, and this one needs no time."""
    model = _Chain(x.shape[1])
    call = canonical_call(model, (x,), {})
    with quiet():
        flat, returned = flat_model(model, call)
        module = fx.GraphModule(flat, fx.Tracer().trace(flat))
        facts = propagate(module, call.tensors)
        ops, tensors, lowered = lower(model, module, facts, call, returned[-1])
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


def _placed(traced: Traced, graph: OpGraph, placement: Placement) -> PlacedModule:
    rows = [Device(f"cpu:{index}", 2**62) for index in range(2)]
    cluster = Cluster.connected(rows, Link(0, 1))
    return apply(traced, placement, graph=graph, cluster=cluster, threads_per_device=1)


def _steps(modules: Sequence[PlacedModule], x: torch.Tensor) -> list[tuple[int, int]]:
    """Of each one's steps the time, and the time of processors: ns, the lower quartiles.

    Other processes disturb these least. The modules take turns, so that what disturbs one disturbs
    all.
    """
    seed = torch.zeros_like(x)
    readings: list[list[tuple[int, int]]] = [[] for _ in modules]
    for _ in range(_WARM_UP + _ROUNDS):
        for module, row in zip(modules, readings, strict=True):
            inputs = [x, *module.parameters()]
            start, busy = time.perf_counter_ns(), time.process_time_ns()
            torch.autograd.grad(module(x), inputs, seed)
            row.append((time.perf_counter_ns() - start, time.process_time_ns() - busy))
    return [
        (_lower_quartile(step for step, _ in row), _lower_quartile(busy for _, busy in row))
        for row in (row[_WARM_UP:] for row in readings)
    ]


def _lower_quartile(values: Iterable[int]) -> int:
    return int(quantiles(values, n=4)[0])
