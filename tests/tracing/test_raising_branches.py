"""Checks in the model's code; those of this file are as they stand: PYTEST_DONT_REWRITE."""

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from placed import same
from torch import Tensor, nn
from torch.distributions import Categorical, Normal

import baechi
from baechi.errors import ExecutionError
from baechi.runtime.derived_class import placed_state
from baechi.tracing.truth_values import TruthValues

YES, NO = torch.tensor(True), torch.tensor(False)
X = torch.linspace(-1, 1, 64).view(8, 8)


def _not(a: Tensor, b: Tensor) -> None:
    if not a:
        message = str(b)
        raise ValueError(message)


def _either(a: Tensor, b: Tensor) -> None:
    if not a.all() or b.any():
        raise ValueError


def _any(a: Tensor, b: Tensor) -> None:
    if b or b.logical_and(a):
        raise ValueError


def _all(a: Tensor, b: Tensor) -> None:
    if a.logical_or(b) and b:
        raise ValueError


def _asserted(a: Tensor, b: Tensor) -> None:
    assert a
    assert not b, "b"


def _called(a: Tensor, b: Tensor) -> None:
    if torch.equal(a, b) or b.item():
        raise ValueError


def _branch(a: Tensor, b: Tensor) -> None:
    if not a:
        return
    if b:
        raise ValueError


def _caught(a: Tensor, b: Tensor) -> None:
    try:
        if not a:
            raise ValueError
    except ValueError:
        b.numpy()


def _warned(a: Tensor, b: Tensor) -> None:
    if b:
        a.numpy()
    elif not a:
        raise ValueError


def _within(a: Tensor, b: Tensor) -> None:
    if [a] if b else []:
        raise ValueError


@pytest.mark.parametrize(
    ("ask", "are_checks"),
    [
        (_not, [True]),
        (_any, [True, True]),
        (_all, [False, sys.version_info >= (3, 12)]),
        (_asserted, [True, True]),
        (_called, [True, True]),
        (_branch, [False, True]),
        (_caught, [False]),
        (_warned, [False, True]),
        (_within, [False]),
    ],
)
def test_a_check_is_what_decides_alone_that_an_error_is_raised(
    ask: Callable[[Tensor, Tensor], None], are_checks: list[bool]
) -> None:
    with TruthValues() as values:
        ask(YES, NO)
    assert [row.is_check for rows in values.recorded.values() for row in rows] == are_checks


@pytest.mark.skipif(sys.version_info < (3, 12), reason="instructions have the statement's place")
def test_parts_of_a_condition_are_told_apart() -> None:
    with TruthValues() as values:
        _either(YES, NO)
    assert [row.is_check for rows in values.recorded.values() for row in rows] == [True, True]


class Head(nn.Module):
    """Whose distributions check what they are given, also what is drawn.

    That is torch's default, until something is compiled in the same process.
    """

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.scale, self.logits = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        drawn = Normal(self.mean(x), self.scale(x).exp(), validate_args=True).rsample()
        return drawn, Categorical(logits=self.logits(drawn), validate_args=True).entropy()


class Policy(nn.Module):
    """A part of which asks for values."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), Head()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.head(self.body(x).tanh())


def on_two(model: nn.Module, **options: Any) -> Any:
    devices = {"cpu/0": "64MiB", "cpu/1": "64MiB"}
    placer, costs = baechi.RandomPlacer(1), "estimate"
    return baechi.place(model, devices, placer=placer, costs=costs, progress=False, **options)


def loss_of(result: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return (result[0] - target).square().mean() - result[1].mean()


@pytest.mark.usefixtures("one_thread")
def test_a_part_whose_distributions_check_their_arguments_is_split() -> None:
    plain = Policy()
    placed = on_two(copy.deepcopy(plain))
    for x in (X, X * 2):
        results = []
        for model in (plain, placed):
            torch.manual_seed(0)
            results.append(model(x))
            loss_of(results[-1], x).backward()
        assert all(map(same, *results))
    for own, other in zip(plain.parameters(), placed.parameters(), strict=True):
        assert same(own.grad, other.grad)
    assert {op.name.partition("/")[0] for op in placed.graph.ops} > {"head.mean", "head.scale"}
    assert not placed_state(placed).latest.unsplit_on


def test_a_call_that_fails_the_check_is_refused() -> None:
    placed = on_two(Policy(), training=False)
    with torch.no_grad():
        placed(X)
        for call in (placed, Policy()):
            with pytest.raises((ExecutionError, ValueError), match=r"error|parameter loc"):
                call(X * torch.nan)
        placed(X)


def test_checks_are_taken_to_pass_where_nothing_runs() -> None:
    with torch.device("meta"):
        model, x = Policy(), torch.empty(8, 8)
    ops = [op.name for op in baechi.trace(model, (x,)).ops]
    assert ops == [op.name for op in baechi.trace(Policy(), (X,)).ops]
