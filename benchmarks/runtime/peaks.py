"""The peak memory of a step: of the model placed on one logical device, and of the unsplit one."""

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import baechi
from baechi.torch_support.memory_meter import Meter


def step_peaks(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, training: bool
) -> tuple[int, int]:
    """The unsplit model's peak and the placed one's, in bytes; CPUs only.

    Inputs and parameters count, and so do the gradients that come back from a loss; what a caller
    computes outside the model does not.
    """

    def unsplit(meter: Meter) -> list[torch.Tensor]:
        with meter.counting(0):
            given = pytree.tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
            return _results(model(*given[0], **given[1]))

    def unsplit_backward(meter: Meter, loss: torch.Tensor) -> None:
        with meter.counting(0):
            loss.backward()

    eager = Meter([0])
    for tensor in [*model.parameters(), *model.buffers()]:
        eager.hold(0, tensor)
    first = _peak(model, eager, unsplit, unsplit_backward if training else None)

    placed = placed_alone(baechi.trace(model, args, kwargs), training)
    with placed.metered() as meter:
        second = _peak(
            model,
            meter,
            lambda _: _results(placed(*args, **kwargs)),
            (lambda _, loss: loss.backward()) if training else None,
        )
    placed.unplace()
    return first, second


def placed_alone(traced: baechi.Traced, training: bool) -> baechi.PlacedModule:
    """A traced model on one logical CPU device, whatever its operators cost."""
    costs = tuple(baechi.OpCost(1000, 2000) for _ in traced.ops)
    graph = traced.graph(baechi.Profile(traced.digest, "", costs), training=training)
    cluster = baechi.Cluster.uniform(1, 2**50, baechi.Link(0, 10**9))
    placement = baechi.solve(graph, cluster, placer="single")
    return baechi.apply(traced, placement, ["cpu:0"])


def _peak(
    model: nn.Module,
    meter: Meter,
    forward: Callable[[Meter], list[torch.Tensor]],
    backward: Callable[[Meter, torch.Tensor], None] | None,
) -> int:
    """The peak of the second step: the first may leave something behind in the model."""
    for _ in range(2):
        model.zero_grad()
        gc.collect()
        meter.forget_peaks()
        with torch.set_grad_enabled(backward is not None):
            outputs = forward(meter)
        if backward is not None:
            graded = [tensor for tensor in outputs if tensor.requires_grad]
            loss = _Loss.apply(*graded)  # type: ignore[no-untyped-call]
            del outputs, graded
            backward(meter, loss)
            del loss
    model.zero_grad()
    return meter.peak_bytes[0]


def _results(value: Any) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves(value.to_tuple() if hasattr(value, "to_tuple") else value)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


class _Loss(torch.autograd.Function):
    """The sum of all outputs, as a loss that makes dense gradients and holds on to no output."""

    @staticmethod
    def forward(ctx: Any, *outputs: torch.Tensor) -> torch.Tensor:
        ctx.outputs = [(t.shape, t.dtype) for t in outputs]
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[Any, ...]:
        return tuple(torch.ones(shape, dtype=dtype) for shape, dtype in ctx.outputs)
