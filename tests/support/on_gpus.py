"""Models placed at random on GPUs for tests, and what a step of one leaves behind."""

import functools
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import baechi

# Kernels on a GPU may pick other algorithms for other shapes of parallel work.
TOLERANCES = {"rtol": 1e-4, "atol": 1e-4}
# By which cuBLAS gives the same on every stream; it looks when it is first used.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
LANES = ["cuda:0/a", "cuda:0/b", "cuda:0/c"]
GPUS = ["cuda:0", "cuda:1"]
TWO_GPUS = pytest.param(GPUS, marks=pytest.mark.multigpu)


def to_gpu(value: Any) -> Any:
    """The same on the first GPU; what is one tensor remains one."""
    return pytree.tree_map_only(torch.Tensor, functools.cache(lambda t: t.to("cuda:0")), value)


def tensors_of(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def assert_as_right(
    found: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    again: Sequence[torch.Tensor],
    exact: Callable[[], Sequence[torch.Tensor]] | None = None,
) -> None:
    """Fails where tensors are further off than those of the unsplit model are themselves.

    Three times what its two runs, `expected` and `again`, differ by, or what it is off `exact`,
    the same in float64, passes beyond `TOLERANCES`: atomic sums, and sums split otherwise.
    """
    for index, (one, twin, other) in enumerate(zip(expected, again, found, strict=True)):
        try:
            torch.testing.assert_close(other, one, check_device=False, **TOLERANCES)
        except AssertionError:
            assert (one.shape, one.dtype) == (other.shape, other.dtype)
            true = twin if exact is None else exact()[index]
            noise = max(_distance(one, twin), _distance(one, true))
            if not _distance(one, other) <= 3 * noise:
                raise


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.double().cpu() - other.double().cpu()).abs().max())


def step(module: nn.Module, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Outputs and gradients of one step."""
    module.zero_grad(set_to_none=True)
    outputs = tensors_of(module(*args, **kwargs))
    losses = [t.double().square().mean() for t in outputs if t.requires_grad]
    torch.stack([loss.to("cuda:0") for loss in losses]).sum().backward()
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    return [t.detach().cpu() for t in [*outputs, *gradients]]


def placed_randomly(
    model: nn.Module,
    args: Any,
    kwargs: Any,
    devices: list[str],
    seed: int,
    *,
    training: bool = True,
    memory: str = "4GiB",
    **options: Any,
) -> baechi.PlacedModule:
    traced = baechi.trace(model, args, kwargs)
    costs = tuple(baechi.OpCost(10_000, 20_000) for _ in traced.ops)
    graph = traced.graph(baechi.Profile(traced.digest, "", costs), training=training)
    rows = [baechi.Device(name, memory) for name in devices]
    cluster = baechi.Cluster.connected(rows, baechi.Link(10_000, 10**10))
    placement = baechi.solve(graph, cluster, placer=baechi.RandomPlacer(seed))
    return baechi.apply(traced, placement, graph=graph, cluster=cluster, **options)


def placed_as(
    model: nn.Module, args: Any, devices: list[str], device_of: Callable[[int], int], **options: Any
) -> baechi.PlacedModule:
    """Every operator, by its number, on a device; its backward is there, too."""
    traced = baechi.trace(model, args)
    costs = tuple(baechi.OpCost(10_000, 20_000) for _ in traced.ops)
    graph = traced.graph(baechi.Profile(traced.digest, "", costs), training=True)
    rows = [baechi.Device(name, "4GiB") for name in devices]
    cluster = baechi.Cluster.connected(rows, baechi.Link(10_000, 10**10))
    own = [device_of(op) for op in range(len(traced.ops))]
    groups = {op.group: own[i] for i, op in enumerate(traced.ops) if op.group}
    own = [groups.get(op.group, own[i]) for i, op in enumerate(traced.ops)]
    every = (*own, own[-1], *(own[op] for op in traced.backward_ops))
    placement = baechi.Placement(graph.digest, every, tuple(range(len(graph.ops))))
    return baechi.apply(traced, placement, graph=graph, cluster=cluster, **options)


class Branches(nn.Module):
    """Branches that meet again and again, so that lanes wait for each other all the time."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ModuleList(
            nn.ModuleList([nn.Linear(256, 256) for _ in range(3)]) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for row in self.rows:
            x = torch.stack([torch.tanh(layer(x)) for layer in row]).sum(0)
        return x


# Threads of autograd that let go of Python's objects while the interpreter ends abort before
# Python 3.14 (https://github.com/python/cpython/issues/87135).
_END = "\nimport os, sys\nsys.stdout.flush()\nsys.stderr.flush()\nos._exit(0)\n"


def script(text: str, timeout_s: int = 300, **environment: str) -> tuple[str, str]:
    """What a script prints and warns of in a process of its own, which must end in time."""
    root = Path(__file__).resolve().parents[2]
    path = [*map(str, (root / "tests" / "support", root)), os.environ.get("PYTHONPATH", "")]
    found = subprocess.run(
        [sys.executable, "-c", text + _END],
        cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path)), **environment},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout.strip(), found.stderr
