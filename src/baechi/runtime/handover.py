"""What one more cut between two logical CPU devices really adds to a step.

    few cuts    [o o o o o o]─►[o o o o o o]
    many cuts   [o]─►[o]─►[o]─►[o]─►[o]─►...       o: an operator of next to no time

A chain of tiny operators runs on two workers of the runtime itself, forward and backward. What the
second placement takes longer, per hand-over that it has more, is the price of one: the gate that
opens, the thread that wakes, and the Python that enters and leaves a segment. No bytes are copied.
"""

import time
from collections.abc import Sequence
from itertools import pairwise
from statistics import quantiles
from typing import Final

import torch
from torch import fx, nn

from baechi.calls import canonical_call, flat_model
from baechi.costs import OpCost, Profile
from baechi.devices import Cluster, Device, Link
from baechi.lowering import lower
from baechi.placement import Placement
from baechi.propagation import propagate, quiet
from baechi.runtime.module import PlacedModule, apply
from baechi.traced import Attempt, Traced
from baechi.training import backward_ops

_OPS: Final = 24
_WARM_UP: Final = 3
_ROUNDS: Final = 16


class _Chain(nn.Module):
    """Operators one after the other, each of next to no time."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(_OPS):
            x = x.neg()
        return x


def handover_ns() -> int:
    """The time that one hand-over adds to a step, forward and backward taken together.

    A few tenths of a second; leaves torch's threads and random state as they were.
    """
    traced = _traced_chain()
    few, many = (_pieces(len(traced.ops), pieces) for pieces in (2, len(traced.ops)))
    placed = [_placed(traced, devices) for devices in (few, many)]
    try:
        few_ns, many_ns = _steps_ns(placed)
    finally:
        for module in placed:
            module.unplace()
    # A cut is crossed twice: by a value in the forward, and by its gradient in the backward.
    return max((many_ns - few_ns) // (2 * (_cuts(many) - _cuts(few))), 0)


def _traced_chain() -> Traced:
    """The chain, traced by fx: its graph is the same on every rung, and this one needs no time."""
    model = _Chain()
    call = canonical_call(model, (torch.zeros(1, requires_grad=True),), {})
    with quiet():
        flat, returned = flat_model(model, call)
        module = fx.GraphModule(flat, fx.Tracer().trace(flat))
        facts = propagate(module, call.tensors)
        ops, tensors, lowered = lower(model, module, facts, call, returned[-1])
    attempts = (Attempt("torch.fx.symbolic_trace"),)
    return Traced("Chain", ops, tensors, attempts, model.training, lowered)


def _pieces(ops: int, pieces: int) -> list[int]:
    """The device of every op of a chain in so many pieces of equal size; the devices take turns."""
    return [op * pieces // ops % 2 for op in range(ops)]


def _cuts(devices: Sequence[int]) -> int:
    return sum(one != other for one, other in pairwise(devices))


def _placed(traced: Traced, devices: Sequence[int]) -> PlacedModule:
    profile = Profile(traced.digest, "", tuple(OpCost(0, 0) for _ in traced.ops))
    graph = traced.graph(profile, training=True)
    reached = backward_ops(traced.ops, traced.tensors)
    everywhere = (*devices, devices[-1], *(devices[op] for op in reached))
    placement = Placement(graph.digest, everywhere, tuple(range(len(graph.ops))))
    rows = [Device(f"cpu:{index}", 2**62) for index in range(2)]
    cluster = Cluster.connected(rows, Link(0, 1))
    return apply(traced, placement, graph=graph, cluster=cluster, threads_per_device=1)


def _steps_ns(modules: Sequence[PlacedModule]) -> list[int]:
    """The lower quartile of each one's step times, which other processes disturb least.

    They take turns, so that what disturbs one disturbs all.
    """
    x = torch.zeros(1, requires_grad=True)
    readings: list[list[int]] = [[] for _ in modules]
    for _ in range(_WARM_UP + _ROUNDS):
        for module, row in zip(modules, readings, strict=True):
            start = time.perf_counter_ns()
            with torch.enable_grad():
                torch.autograd.grad(module(x), x)
            row.append(time.perf_counter_ns() - start)
    return [int(quantiles(row[_WARM_UP:], n=4)[0]) for row in readings]
