"""What comes back from a placed model beside plain activations: state, and views of it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from placed import again_at_random, assert_same_values
from torch import nn

import baechi


class Returns(nn.Module):
    """Two linear layers, and whatever a function of the model and its input returns."""

    def __init__(self, function: Callable[["Returns", torch.Tensor], Any]) -> None:
        super().__init__()
        self.a, self.c = nn.Linear(4, 4), nn.Linear(4, 4)
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def weight_and_views(model: Returns, x: torch.Tensor) -> Any:
    weight = model.a.weight
    return weight, weight.t(), weight[0], model.c(model.a(x))


def weight_beside_its_view(model: Returns, x: torch.Tensor) -> Any:
    return model.a.weight[0], model.a.weight, model.c(x)


def seen(model: nn.Module, x: torch.Tensor) -> list[Any]:
    """Outputs and gradients of two steps; every output has a gradient of its own."""
    rows: list[Any] = []
    for _ in range(2):
        outputs = model(x)
        parts = [(i + 1) * output.square().sum() for i, output in enumerate(outputs)]
        torch.stack(parts).sum().backward()
        rows.append([output.detach() for output in outputs])
    return [*rows, [parameter.grad for parameter in model.parameters()]]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "function", [weight_and_views, weight_beside_its_view], ids=lambda f: f.__name__
)
def test_a_returned_weight_gets_the_gradients_of_its_views(
    function: Callable[..., Any], seed: int
) -> None:
    torch.manual_seed(0)
    model, x = Returns(function), torch.randn(3, 4)
    expected = seen(model, x)
    model.zero_grad()
    placed = again_at_random(baechi.trace(model, (x,)), seed=seed, devices=2)
    assert_same_values(seen(placed, x), expected)
