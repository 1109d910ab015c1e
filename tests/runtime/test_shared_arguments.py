"""Arguments that are one tensor, that share memory, or that lie in memory in another way."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from placed import at_random
from torch import nn

import baechi

Arguments = Callable[[], tuple[torch.Tensor, torch.Tensor]]
DEVICES = {"cpu:0": "1GiB", "cpu:1": "1GiB"}


class Both(nn.Module):
    """Reads two arguments, and writes into the first if it is told to."""

    def __init__(self, *, write: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.write = write

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        last = self.b(y)
        if self.write:
            x.add_(1)
        return self.a(x) - y * 2, last


class Doubles(nn.Module):
    """Writes into what may be its argument or a copy of it."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x.contiguous().mul_(2)) + x


def apart() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(3, 4), torch.randn(3, 4)


def one() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(3, 4)
    return x, x


def overlapping() -> tuple[torch.Tensor, torch.Tensor]:
    base = torch.randn(5, 4)
    return base[:3], base[2:]


def seen(model: nn.Module, calls: list[Callable[[], Any]]) -> list[Any]:
    """Results of calls without gradients, and their arguments after each."""
    torch.manual_seed(1)
    rows: list[Any] = []
    with torch.no_grad():
        for make in calls:
            arguments = make()
            rows += [model(*arguments), [argument.clone() for argument in arguments]]
    return rows


@pytest.mark.parametrize("write", [False, True], ids=["read", "written"])
@pytest.mark.parametrize("first", [apart, one, overlapping], ids=lambda f: f.__name__)
def test_what_is_shared_in_one_call_may_be_apart_in_the_next(first: Arguments, write: bool) -> None:
    torch.manual_seed(0)
    model = Both(write=write)
    calls = [first, one, apart, overlapping]
    expected = seen(model, calls)
    placed = baechi.place(
        model, DEVICES, costs="estimate", placer=baechi.RandomPlacer(0), progress=False
    )
    torch.testing.assert_close(seen(placed, calls), expected)
    placed.unplace()


def test_a_trace_of_one_tensor_given_twice_refuses_two() -> None:
    placed = at_random(Both(write=False), one())
    placed(*one())
    with pytest.raises(baechi.InputError, match="which arguments are one tensor"):
        placed(*apart())


def test_a_trace_that_writes_refuses_memory_that_it_took_to_be_apart() -> None:
    placed = at_random(Both(write=True), apart())
    with torch.no_grad():
        placed(*apart())
        with pytest.raises(baechi.InputError, match="share memory that is written"):
            placed(*overlapping())


def test_other_strides_are_another_call() -> None:
    torch.manual_seed(0)
    model = Doubles()
    calls: list[Callable[[], Any]] = [
        lambda: (torch.randn(4, 4),),
        lambda: (torch.randn(4, 4).t(),),
        lambda: (torch.randn(4, 8)[:, :4],),
        lambda: (torch.randn(4, 4),),
    ]
    expected = seen(model, calls)
    placed = baechi.place(model, DEVICES, costs="estimate", progress=False)
    torch.testing.assert_close(seen(placed, calls), expected)
    placed.unplace()
    placed = at_random(model, (torch.randn(4, 4),))
    with pytest.raises(baechi.InputError, match="strides"):
        placed(torch.randn(4, 4).t())


def test_strides_of_a_single_row_do_not_matter() -> None:
    placed = at_random(Doubles(), (torch.randn(1, 4),))
    with torch.no_grad():
        placed(torch.randn(4, 8)[1:2, :4])
