"""Models on logical CPU devices for tests, and what a training step of one leaves behind."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import zoo
from torch import nn
from torch.utils import _pytree as pytree

import baechi
from baechi.torch_support.torch_devices import torch_threads
from baechi.tracing.pytrees import tensors_in

EXACT = {"rtol": 0.0, "atol": 0.0}
LINK = baechi.Link(1_000, 10**10)


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
    return place_on(traced, devices, baechi.RandomPlacer(seed), threads_per_device=threads)


def made_up_profile(traced: baechi.Traced) -> baechi.Profile:
    """Costs from nothing but the op's index, so that nothing is measured."""
    made = [0] * len(traced.ops)
    for tensor in traced.tensors:
        made[tensor.producer] += tensor.nbytes
    costs = []
    for index, op in enumerate(traced.ops):
        forward_ns = 20_000 + index * 7_919 % 50_000
        costs.append(
            baechi.OpCost(
                forward_ns=forward_ns,
                backward_ns=2 * forward_ns if op.differentiable else 0,
                parameter_bytes=op.trained_bytes + op.frozen_bytes,
                output_bytes=made[index],
                saved_bytes=op.saved_bytes,
            )
        )
    return baechi.Profile(traced_digest=traced.digest, kind="cpu", costs=tuple(costs))


def cpus(n: int, memory: int | str = "8GiB", link: baechi.Link = LINK) -> baechi.Cluster:
    """Logical CPU devices with a link that nobody has measured."""
    rows = [baechi.Device(f"cpu:{i}", memory, kind="cpu") for i in range(n)]
    return baechi.Cluster.connected(rows, link)


def place_on(
    traced: baechi.Traced,
    devices: int,
    /,
    placer: Any,
    *,
    training: bool = True,
    checkpoint: Any = None,
    **options: Any,
) -> baechi.PlacedModule:
    """What is traced, on so many logical CPU devices; nothing is measured.

    Args:
        traced: The model.
        devices: Their number.
        placer: As in `baechi.solve`.
        training: As in `Traced.graph`.
        checkpoint: As in `Traced.graph`.
        options: As in `baechi.apply`, whose `devices` may be other torch devices.
    """
    graph = traced.graph(made_up_profile(traced), training=training, checkpoint=checkpoint)
    cluster = cpus(devices)
    placement = baechi.solve(graph, cluster, placer=placer)
    return baechi.apply(traced, placement, graph=graph, cluster=cluster, **options)


def lazily(model: nn.Module, **options: Any) -> baechi.PlacedModule:
    """`baechi.place` on two logical CPU devices with a link that nobody measures."""
    cheap = {"costs": "estimate", "placer": "round-robin", "threads_per_device": 1}
    with patch("baechi.placing.probe", lambda _: cpus(2, "1GiB")):
        return baechi.place(model, progress=False, **cheap | options)


def assert_as_unsplit(
    model: nn.Module, args: Sequence[Any], *, seeds: int = 3, devices: int = 2
) -> baechi.Traced:
    """Some placements at random take a step as the unsplit model, to the last bit."""
    with one_thread():
        traced = baechi.trace(model, args)
        expected = step(copy.deepcopy(model), args, {})
        for seed in range(seeds):
            module = again_at_random(traced, seed=seed, devices=devices)
            assert not expected.differs_from(step(module, args, {})), seed
            module.unplace()
    return traced


def one_thread() -> AbstractContextManager[None]:
    """One torch thread here as in the workers: then equal means in every bit."""
    return torch_threads(1)


@contextmanager
def rounded_to(kind: str, *owners: Any) -> Iterator[None]:
    """Inside the block these parts of `torch.backends` round fp32 so."""
    before = [owner.fp32_precision for owner in owners]
    for owner in owners:
        owner.fp32_precision = kind
    try:
        yield
    finally:
        for owner, value in zip(owners, before, strict=True):
            owner.fp32_precision = value


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


def leaves_of(value: Any) -> list[Any]:
    """The leaves of nested arguments or outputs, those of a class unknown to torch, too."""
    leaves = []
    for leaf in pytree.tree_leaves(value):
        leaves += [leaf.hidden, *leaf.others] if isinstance(leaf, zoo.Plain) else [leaf]
    return leaves


def assert_same_values(actual: Any, expected: Any, **tolerances: float) -> None:
    """Fails unless both are of one type, with equal leaves that want gradients or not alike."""
    assert type(actual) is type(expected)
    actual_leaves, expected_leaves = leaves_of(actual), leaves_of(expected)
    assert len(actual_leaves) == len(expected_leaves)
    for one, other in zip(actual_leaves, expected_leaves, strict=True):
        if isinstance(other, torch.Tensor):
            assert one.requires_grad == other.requires_grad
            torch.testing.assert_close(one, other, **tolerances)
        else:
            assert one == other
