"""An operator that reads a value twice gives back two gradients, wherever it is."""

import copy

import pytest
import torch
from placed import again_at_random, one_thread, step
from torch import Tensor, nn

import baechi


class Scaled(nn.Module):
    """Divides rows by their length: the product with itself is one reader of two."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.first(x)
        return self.last(rows * torch.rsqrt((rows * rows).sum(-1, keepdim=True) + 1e-6)).tanh()


class Stacked(nn.Module):
    """Joins a value three times with itself, and has another reader of it before."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.first(x)
        other = rows.tanh()
        return self.last(torch.stack([rows, rows, rows])).tanh() * other


class Written(nn.Module):
    """A value that was written is read by views of its own operator, and by others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        rows = self.first(x)
        rows[1].add_(rows[0])
        rows.mul_(self.last(x))
        return rows.sum(0) + rows.tanh(), rows.t().sin(), rows[:, 3] * 2, self.last(rows)


@pytest.mark.parametrize("kind", [Scaled, Stacked, Written])
def test_a_value_that_is_read_twice_beside_another_reader(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, args = kind(), (torch.randn(64, 16),)
    with one_thread():
        expected = step(copy.deepcopy(model), args, {})
        traced = baechi.trace(model, args)
        for seed in range(4):
            placed = again_at_random(traced, seed=seed, devices=3)
            assert step(placed, args, {}).differs_from(expected) == []
            placed.unplace()


class Other(nn.Module):
    """Nothing to do: the only reader, one that writes, and a product, which is many nodes."""

    def forward(self, x: Tensor) -> Tensor:
        alone = x.exp()
        square = x.sin()
        written = (alone * alone).clone()
        written.mul_(written)
        return written + square @ square + square


@pytest.mark.parametrize(("model", "count"), [(Scaled(), 1), (Stacked(), 2), (Other(), 0)])
def test_only_where_the_order_of_adding_up_is_told_by_it(model: nn.Module, count: int) -> None:
    traced = baechi.trace(model, (torch.randn(16, 16, requires_grad=True),))
    names = [str(node.target) for node in traced.module.graph_module.graph.nodes]
    assert names.count("aten.alias.default") == count
