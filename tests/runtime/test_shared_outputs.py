"""Outputs that share memory: gradients as unsplit, and a refusal of writes into them."""

import copy
from collections.abc import Callable
from typing import Any

import placed
import pytest
import torch
from seeds import covering
from torch import Tensor, nn

import baechi

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


def windows(model: Returns, x: Tensor) -> Any:
    y = model.a(x)
    return y[:3], y[1:], (y + model.c.bias).sum()


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


SHARED = [whole_and_row, row_and_whole, turned_twice, columns, windows]
WRITES = [scale_the_first, scale_the_second, scale_both]


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


@pytest.mark.parametrize(("function", "devices"), covering([*SHARED, written_before], [1, 3]))
def test_outputs_that_share_memory_have_the_unsplit_model_s_gradients(
    function: Callable[..., Any], devices: int
) -> None:
    unsplit, model = Returns(function), Returns(function)
    module = placed.at_random(model, (made(0),), seed=devices, devices=devices)
    torch.testing.assert_close(seen(module, nothing), seen(unsplit, nothing), **placed.EXACT)


@pytest.mark.parametrize("write", WRITES)
def test_one_tensor_twice_may_be_written(write: Callable[..., None]) -> None:
    unsplit, model = Returns(written_before), Returns(written_before)
    module = placed.at_random(model, (made(0),), devices=2)
    torch.testing.assert_close(seen(module, write), seen(unsplit, write))


def test_a_view_of_an_argument_is_refused_where_it_has_a_gradient() -> None:
    model = Returns(view_of_the_input)
    module = placed.at_random(model, (made(0),), devices=2)
    with pytest.raises(baechi.ExecutionError, match="returns a view of its argument 'x'"):
        module(made(0))
    x = made(0).detach()
    turned, row, _ = module(x)
    assert torch.equal(turned, x.t())
    assert torch.equal(row, x[1])


@pytest.mark.parametrize(("function", "write"), covering(SHARED, WRITES))
def test_a_write_into_an_output_that_shares_memory_is_refused(
    function: Callable[..., Any], write: Callable[..., None]
) -> None:
    module = placed.at_random(Returns(function), (made(0),), devices=2)
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
    unsplit = copy.deepcopy(model)
    for one in (unsplit, module):
        with pytest.raises(RuntimeError, match=r"a view .* in-?place"):
            one(x)[number].mul_(2)
    torch.testing.assert_close(seen(module, nothing), seen(unsplit, nothing), **placed.EXACT)
