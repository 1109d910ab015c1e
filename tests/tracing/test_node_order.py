"""Nodes run when the clock runs their operators, and sum up as in the unsplit model."""

import copy
from collections.abc import Callable
from functools import cache
from itertools import product

import placed
import pytest
import torch
from torch import Tensor, nn

import baechi
from baechi.tracing.partition import Partition

Forward = Callable[["Late", Tensor], Tensor]


class Late(nn.Module):
    """Something that is made before, and written after, what it does not depend on."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(16, 16), nn.Linear(16, 16)
        self.register_buffer("seen", torch.zeros(4, 16))
        self._forward = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, x)


def apart(model: Late, x: Tensor) -> Tensor:
    y = model.one(x)
    other = model.two(x.sin()).exp()
    return y.add_(other)


def in_steps(model: Late, x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[:2] = model.one(x.sin())[:2]
    y[2:] = model.two(x.cos())[2:]
    return y


def of_one(model: Late, x: Tensor) -> Tensor:
    x = model.one(x)
    y = x * 3.1
    other = (x * 0.7).exp() + model.two(x)
    return y.add_(other) * x


def of_one_weight(model: Late, x: Tensor) -> Tensor:
    y = model.one(x)
    other = model.one(x.sin()) + model.one(x.cos())
    return y.add_(other)


def drawn(model: Late, x: Tensor) -> Tensor:
    y = nn.functional.dropout(model.one(x), 0.5)
    other = nn.functional.dropout(model.two(x.sin()), 0.5)
    return y.add_(other)


def written_and_read(model: Late, x: Tensor) -> Tensor:
    y = model.one(x).detach()
    model.seen[0].add_(y[0])
    read = x * model.seen
    other = model.two(x.sin())
    return y.add_(other) * read


def crossed(model: Late, x: Tensor) -> Tensor:
    z = model.one(x)
    made = z + 1.0
    y = model.two(x)
    between = z.sin()
    made += made + z
    return y.add_(made) * between


def drawn_across(model: Late, x: Tensor) -> Tensor:
    made = x + 1.0
    y = model.one(x)
    between = nn.functional.dropout(x.sin(), 0.5)
    made += nn.functional.dropout(made, 0.5)
    return y.add_(made) * between


KINDS = (
    *(apart, in_steps, of_one, of_one_weight, written_and_read),
    *(crossed, drawn, drawn_across),
)


@cache
def traced(forward: Forward) -> baechi.Traced:
    return baechi.trace(Late(forward), (torch.randn(4, 16),))


@pytest.mark.parametrize("forward", KINDS)
def test_operators_are_those_of_the_order_that_nodes_have(forward: Forward) -> None:
    module = traced(forward).module
    again = Partition(module.graph_module, module.facts)
    assert tuple(map(tuple, again.nodes_of_op)) == module.nodes


@pytest.mark.parametrize("forward", [crossed, drawn_across])
def test_other_sizes_have_the_same_operators(forward: Forward) -> None:
    model = Late(forward)
    module = placed.lazily(copy.deepcopy(model), placer=baechi.RandomPlacer(1))
    for rows in (4, 6, 8):
        x, left = torch.randn(rows, 16), []
        for each in (model, module):
            torch.manual_seed(rows)
            left.append(placed.step(each, (x,), {}))
        assert not left[0].differs_from(left[1])
    assert len(module._specializations) == 1


@pytest.mark.parametrize(
    ("forward", "before", "after"),
    [
        (crossed, "add_1", "linear_1"),
        (apart, "exp", "linear"),
        (in_steps, "linear_1", "zeros_like"),
        (of_one, "mul", "exp"),
        (of_one_weight, "linear", "linear_1"),
        (drawn, "dropout", "dropout_1"),
        (written_and_read, "add_", "mul"),
    ],
)
def test_nodes_move_behind_what_runs_first_unless_that_changes_results(
    forward: Forward, before: str, after: str
) -> None:
    names = [node.name for node in traced(forward).module.graph_module.graph.nodes]
    assert names.index(before) < names.index(after)


@pytest.mark.parametrize(
    ("forward", "devices"),
    [*product(KINDS, [1]), *product((k for k in KINDS if k not in (drawn, drawn_across)), [3])],
)
def test_steps_are_the_unsplit_models(forward: Forward, devices: int) -> None:
    model, x = Late(forward), torch.randn(4, 16)
    given = x.clone().requires_grad_()
    module = placed.at_random(copy.deepcopy(model), (given,), devices=devices)
    for _ in range(2):
        rows = []
        for each in (model, module):
            torch.manual_seed(1)
            given = x.clone().requires_grad_()
            result = each(given)
            result.square().sum().backward()
            rows.append([result, given.grad, *(p.grad for p in each.parameters()), model.seen])
        for one, two in zip(*rows, strict=True):
            torch.testing.assert_close(one, two, **placed.EXACT)
