"""A gradient that is added up in memory order keeps its order between devices."""

import copy

import pytest
import torch
from torch import Tensor, nn

import baechi
from baechi.runtime.reductions import added_up
from placed import at_random, one_thread, step


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


@pytest.mark.parametrize("kind", [Sinks, Marked])
def test_what_is_repeated_gets_the_unsplit_model_s_gradient(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, args = kind(), (torch.randn(2, 4, 16, 16),)
    with one_thread():
        expected = step(copy.deepcopy(model), args, {})
        for seed in range(4):
            placed = at_random(model, args, seed=seed)
            assert step(placed, args, {}).differs_from(expected) == []
            placed.unplace()


class Kinds(nn.Module):
    """One operator of each kind."""

    def forward(self, x: Tensor, row: Tensor) -> tuple[Tensor, ...]:
        shifted = x + row
        return (
            row.expand(3, 4),
            shifted,
            shifted.view(2, 6) + 1.0,
            torch.cat([shifted, x]),
            x * row,
            shifted.exp(),
            shifted[:1],
            x + x.exp(),
        )


def test_sums_views_and_joins_hand_a_gradient_on_and_others_make_a_new_one() -> None:
    x, row = torch.randn(3, 4, requires_grad=True), torch.randn(4, requires_grad=True)
    traced = baechi.trace(Kinds(), (x, row))
    module = traced.module
    found = added_up(module.facts.nodes)
    (output,) = module.graph_module.graph.find_nodes(op="output")
    assert [node in found for node in output.all_input_nodes] == [
        *(True, True, True, True),
        *(False, False, False, False),
    ]
