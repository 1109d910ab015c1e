"""Models that ask whether gradients are on hear the caller's mode, in each call."""

from typing import Any

import pytest
import torch
from placed import EXACT, assert_same_values, at_random, lazily
from torch import nn

import baechi
from baechi.torch_support.torch_devices import torch_threads


class Asks(nn.Module):
    """Takes another branch where no gradients are wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) if torch.is_grad_enabled() else self.b(x).detach()


def seen(model: nn.Module, modes: list[bool]) -> list[Any]:
    torch.manual_seed(1)
    rows: list[Any] = []
    for mode in modes:
        with torch.set_grad_enabled(mode):
            result = model(torch.randn(3, 4))
        if mode:
            result.sum().backward()
        rows.append(result.detach())
    return [*rows, [parameter.grad for parameter in model.parameters()]]


@pytest.mark.parametrize(
    ("modes", "verify"), [([True, False, True], False), ([False, True, False], True)], ids=str
)
def test_each_mode_has_its_branch(modes: list[bool], verify: bool) -> None:
    torch.manual_seed(0)
    model = Asks()
    with torch_threads(1):
        expected = seen(model, modes)
        model.zero_grad()
        placed = lazily(model, max_shapes=2, verify=verify)
        assert_same_values(seen(placed, modes), expected, **EXACT)
    placed.unplace()


def test_a_trace_of_one_mode_refuses_the_other() -> None:
    placed, x = at_random(Asks(), (torch.randn(3, 4),)), torch.randn(3, 4)
    placed(x)
    with torch.no_grad(), pytest.raises(baechi.InputError, match="whether gradients are on"):
        placed(x)
