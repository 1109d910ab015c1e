"""Models placed at random for tests, and what one training step of a model leaves behind."""

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import baechi
from baechi.calls import tensors_in
from baechi.torch_devices import torch_threads


def at_random(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    seed: int = 0,
    devices: int = 3,
    threads: int | None = 1,
) -> baechi.PlacedModule:
    """The model with every op (or group) on a random logical CPU device; nothing is measured."""
    traced = baechi.trace(model, *copy.deepcopy((args, kwargs)))
    return again_at_random(traced, seed=seed, devices=devices, threads=threads)


def again_at_random(
    traced: baechi.Traced, *, seed: int, devices: int, threads: int | None = 1
) -> baechi.PlacedModule:
    """Another placement of what is traced."""
    costs = tuple(baechi.OpCost(1000 + 7 * i, 2000 + 3 * i) for i in range(len(traced.ops)))
    graph = traced.graph(baechi.Profile(traced.digest, "cpu", costs))
    rows = [baechi.Device(f"cpu:{i}", "8GiB", kind="cpu") for i in range(devices)]
    cluster = baechi.Cluster.connected(rows, baechi.Link(1000, 10**9))
    placement = baechi.solve(graph, cluster, placer=baechi.RandomPlacer(seed))
    return baechi.apply(traced, placement, graph=graph, cluster=cluster, threads_per_device=threads)


def one_thread() -> AbstractContextManager[None]:
    """One torch thread here as in the workers: then equal means in every bit."""
    return torch_threads(1)


@dataclass(frozen=True)
class Left:
    """What a step leaves behind: outputs, gradients and buffers."""

    outputs: list[torch.Tensor]
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]

    def differs_from(self, other: "Left") -> list[str]:
        """What is not equal in every bit."""
        names = [f"output {i}" for i in range(len(self.outputs))]
        rows: list[Any] = list(zip(names, self.outputs, other.outputs, strict=True))
        rows += [(name, one, other.gradients[name]) for name, one in self.gradients.items()]
        rows += [(name, one, other.buffers[name]) for name, one in self.buffers.items()]
        return [name for name, one, two in rows if not same(one, two)]


def same(one: torch.Tensor | None, two: torch.Tensor | None) -> bool:
    """Equal in every bit, dtype and shape; not-a-number equals itself."""
    if one is None or two is None:
        return one is two
    return (
        one.dtype == two.dtype
        and one.shape == two.shape
        and torch.equal(torch.nan_to_num(one), torch.nan_to_num(two))
    )


def step(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Left:
    """Forward and backward, from the model's own loss or from all outputs that have a gradient."""
    args, kwargs = copy.deepcopy((tuple(args), dict(kwargs)))
    model.zero_grad()
    returned = model(*args, **kwargs)
    outputs = tensors_in(returned)
    own = getattr(returned, "loss", None)
    if own is None:
        roots = [t.float().square().mean() for t in outputs if t.requires_grad]
        own = torch.stack(roots).sum()
    own.backward()
    gradients = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return Left([t.detach() for t in outputs], gradients, buffers)
