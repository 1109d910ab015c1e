"""A gradient that is a part of a larger one stays so where a kernel would round otherwise."""

import copy

import pytest
import torch
from placed import at_random, one_thread, step
from torch import Tensor, nn

import baechi
from baechi.runtime.autograd.gradient_plan import keeps_strides


class Sinks(nn.Module):
    """A number for each head is repeated, and joined as the last column of the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.randn(4))
        self.scores, self.values = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        sinks = self.sinks.reshape(1, -1, 1, 1).expand(x.shape[0], -1, x.shape[2], -1)
        joined = torch.cat([self.scores(x), sinks], dim=-1)
        return self.values(joined.softmax(-1)[..., :-1])


class Marked(nn.Module):
    """What is joined had a number added to all of it, and then something else."""

    def __init__(self) -> None:
        super().__init__()
        self.mark = nn.Parameter(torch.randn(1))
        self.first, self.join = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        return self.join(torch.cat([(first + self.mark) + x, first.tanh()], dim=2)).tanh()


class Normed(nn.Module):
    """What is joined has its channels last: dense, it would be for another kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(4, 8, 1), nn.Linear(8, 8)
        self.norm, self.mark = nn.BatchNorm2d(8), nn.Parameter(torch.randn(1, 1, 8))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(self.first(x)).flatten(2).transpose(1, 2)
        return self.last(torch.cat([self.mark.expand(x.shape[0], -1, -1), rows], dim=1)).tanh()


class Pooled(nn.Module):
    """A sum with one reader whose gradient has channels last, and before it one without.

    Which of the two is first says how the gradient of `scale` is summed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(4, 16, 1), nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.rand(16))

    def forward(self, x: Tensor) -> Tensor:
        maps = self.first(x)
        rows = self.last(maps.permute(0, 2, 3, 1)) * self.scale
        maps = maps + rows.permute(0, 3, 1, 2)
        pooled = nn.functional.adaptive_avg_pool2d(maps, 1).flatten(1)
        return torch.cat([pooled[:, None], maps.flatten(2).transpose(1, 2)], dim=1).tanh()


@pytest.mark.parametrize("kind", [Sinks, Marked, Normed, Pooled])
def test_a_part_of_a_gradient_gives_the_unsplit_model_s_bits(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, args = kind(), (torch.randn(2, 4, 16, 16),)
    with one_thread():
        expected = step(copy.deepcopy(model), args, {})
        for seed in range(4):
            placed = at_random(copy.deepcopy(model), args, seed=seed)
            assert step(placed, args, {}).differs_from(expected) == []
            placed.unplace()


class Kinds(nn.Module):
    """One operator of each kind, which one other reads."""

    def forward(self, x: Tensor, row: Tensor) -> tuple[Tensor, ...]:
        shifted = x + row
        normed = nn.functional.layer_norm(x, [4])
        return (
            row.expand(3, 4),
            shifted.view(2, 6),
            nn.functional.layer_norm(x, [4]),
            torch.cat([nn.functional.layer_norm(x, [4]).relu(), normed]),
            nn.functional.layer_norm(x, [4])[:1],
            x.exp() + x.sin(),
            x.exp().relu_(),
            x.sin() * row,
            x.exp(),
        )


def test_views_sums_and_joins_hand_a_gradient_on_and_others_make_a_new_one() -> None:
    x, row = torch.randn(3, 4, requires_grad=True), torch.randn(4, requires_grad=True)
    module = baechi.trace(Kinds(), (x, row)).module
    (output,) = module.graph_module.graph.find_nodes(op="output")
    found = [keeps_strides(node, module.facts.nodes) for node in output.all_input_nodes]
    assert found == [True] * 7 + [False] * 2
