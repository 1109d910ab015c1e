"""Outputs that share memory: who writes into one changes the others, and autograd knows how."""

from collections.abc import Callable
from typing import Any

import placed
import pytest
import torch
from torch import Tensor, nn

from baechi.runtime.autograd.shared_outputs import bases_of

pytestmark = pytest.mark.usefixtures("one_thread")


class Returns(nn.Module):
    """Two linear layers, and whatever a function of the model and its input returns."""

    def __init__(self, function: Callable[["Returns", Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.c = nn.Linear(4, 4), nn.Linear(4, 4)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def whole_and_row(model: Returns, x: Tensor) -> Any:
    y = model.a(x)
    return y, y[0], (y + model.c.bias).sum()


def row_and_whole(model: Returns, x: Tensor) -> Any:
    y = model.a(x)
    return y[1:], y.t(), (y + model.c.bias).sum()


def turned_twice(model: Returns, x: Tensor) -> Any:
    y = model.a(x).view(2, 2, 4)
    return y.transpose(0, 1), y.view(-1), (y + model.c.bias).sum()


def columns(model: Returns, x: Tensor) -> Any:
    y = model.a(x)
    return y[:, :3], y[:, 3:], (y + model.c.bias).sum()


def written_before(model: Returns, x: Tensor) -> Any:
    y = model.a(x)
    return y, y.add_(1), (y + model.c.bias).sum()


def view_of_the_input(model: Returns, x: Tensor) -> Any:
    return x.t(), x[1], (x + model.c.bias).sum()


def scale_the_first(first: Tensor, _: Tensor, third: Tensor) -> None:
    first.mul_(third)


def scale_the_second(_: Tensor, second: Tensor, third: Tensor) -> None:
    second.mul_(third)


def scale_both(first: Tensor, second: Tensor, third: Tensor) -> None:
    first.mul_(third)
    second.add_(1).mul_(third)


def nothing(*_: Tensor) -> None:
    pass


def made(seed: int) -> Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(seed)).requires_grad_()


SHARED = [whole_and_row, row_and_whole, turned_twice, columns, written_before, view_of_the_input]
WRITES = [nothing, scale_the_first, scale_the_second, scale_both]


def seen(model: nn.Module, write: Callable[..., None]) -> list[list[Tensor]]:
    """Two steps: outputs, gradients of the argument and of parameters, what the argument became."""
    rows = []
    for seed in range(2):
        x = made(seed)
        model.zero_grad()
        given = x * 1
        outputs = model(given)
        write(*outputs)
        losses = [(i + 2) * output.sin().sum() for i, output in enumerate((*outputs, given))]
        torch.stack(losses).sum().backward()
        gradients = [x.grad, *(parameter.grad for parameter in model.parameters())]
        rows.append([*(output.detach() for output in (*outputs, given)), *gradients])
    return rows


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("function", SHARED)
def test_who_writes_into_an_output_changes_the_others(
    function: Callable[..., Any], write: Callable[..., None], devices: int
) -> None:
    unsplit, model = Returns(function), Returns(function)
    module = placed.at_random(model, (made(0),), seed=devices, devices=devices)
    alone = write is nothing and function is not view_of_the_input  # which the loss reads, too
    exact = placed.EXACT if alone else {}
    torch.testing.assert_close(seen(module, write), seen(unsplit, write), **exact)


def windows(model: Returns, x: Tensor) -> Any:
    y = model.a(x)
    return y[:3], y[1:], (y + model.c.bias).sum()


@pytest.mark.parametrize("write", WRITES[1:])
def test_a_write_that_autograd_could_not_follow_is_refused(write: Callable[..., None]) -> None:
    module = placed.at_random(Returns(windows), (made(0),), devices=2)
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        write(*module(made(0)))
    seen(module, nothing)


def view_of_a_weight(model: Returns, x: Tensor) -> Any:
    return model.a.weight.t(), model.a.weight[0], model.c(x).sum()


@pytest.mark.parametrize("number", [0, 1])
def test_a_view_of_a_weight_is_as_on_the_unsplit_model(number: int) -> None:
    model = Returns(view_of_a_weight)
    x = made(0)
    module = placed.at_random(model, (x,), devices=2)
    for one in (model, module):
        with pytest.raises(RuntimeError, match="a view of a leaf Variable that requires grad"):
            one(x)[number].mul_(2)
    torch.testing.assert_close(seen(module, nothing), seen(model, nothing), **placed.EXACT)


BASE = torch.arange(24.0)
BASES = {
    "alone": ([BASE, BASE[1:]], [-1, -1], [None, None]),
    "rows of the first": ([BASE.view(4, 6), BASE[3:7]], [0, 0], [None, 0]),
    "the second is whole": ([BASE[3:7], BASE.view(6, 4).t()], [0, 0], [1, None]),
    "two families": ([BASE[3:7], BASE, BASE[:0], BASE + 1, BASE[1:]], [0, 0, 0, 1, -1],
                     [1, None, None, None, None]),
    "columns": ([BASE.view(4, 6)[:, :3], BASE.view(4, 6)[:, 3:]], [0, 0], [None, None]),
    "columns of rows": ([BASE.view(4, 6)[1:, :2], BASE.view(4, 6)[:2, 4:]], [0, 0], [None, None]),
    "column and row": ([BASE.view(4, 6)[:, 2], BASE.view(4, 6)[2]], [0, 0], [0, 1]),
    "every other": ([BASE[::2], BASE[1::2]], [0, 0], [None, None]),
    "every other and third": ([BASE[::2], BASE[::3]], [0, 0], [0, 1]),
    "windows": ([BASE[:9], BASE[8:], BASE[:0]], [0, 0, 0], [0, 1, None]),
    "expanded": ([BASE[:2], BASE[:2, None].expand(2, 9)], [0, 0], [None, 0]),
    "other type": ([BASE, BASE.view(torch.int32)], [0, 0], [0, 1]),
    "copies": ([BASE, BASE.clone()[2:]], [0, 0], [None, None]),
}  # fmt: skip


@pytest.mark.parametrize("name", BASES)
def test_which_output_others_are_views_of(name: str) -> None:
    values, families, expected = BASES[name]
    assert bases_of(values, families, {}) == expected
    given = BASE.view(2, 12)
    assert bases_of(values, families, {0: given}) == expected  # which needs no gradient


@pytest.mark.parametrize("seed", range(40))
def test_what_is_taken_for_apart_is_apart(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)

    def slices(rows: int, columns: int) -> tuple[Tensor, Tensor]:
        a, b = torch.randint(0, rows, (2,), generator=draw).sort()[0].tolist()
        c, d = torch.randint(0, columns, (2,), generator=draw).sort()[0].tolist()
        base = torch.arange(rows * columns).view(rows, columns)
        view = base[a : b + 1, c : d + 1]
        return view, view.t() if seed % 2 else view

    (_, one), (_, two) = slices(5, 4), slices(5, 4)
    base = torch.zeros(20)
    views = [base.as_strided(v.shape, v.stride(), v.storage_offset()) for v in (one, two)]
    common = set(one.flatten().tolist()) & set(two.flatten().tolist())
    found = bases_of(views, [0, 0], {})
    assert found != [None, None] or not common
