"""A step of micro-batches has what its loss reads in Python now, whatever way it reads it."""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from placed import lazily
from tied import Tied
from torch import Tensor, nn
from torch.nn import functional

import baechi
from baechi.runtime.loss_key import key_of_loss

X = torch.arange(16).remainder(11).view(8, 2)
T = torch.arange(16).remainder(7).view(8, 2)


def criterion(y: Tensor, t: Tensor) -> Tensor:
    return functional.cross_entropy(y, t.flatten())


FACTOR = 1.0


def scaled(y: Tensor, t: Tensor) -> Tensor:
    return FACTOR * criterion(y, t)


class Annealed:
    """A loss with a weight that its owner changes, and a count that it does not read."""

    def __init__(self) -> None:
        self.settings, self.steps_done = {"weight": 1.0}, 0

    @property
    def weight(self) -> float:
        return self.settings["weight"]

    def __call__(self, y: Tensor, t: Tensor) -> Tensor:
        return self.weight * criterion(y, t)

    @torch.enable_grad()
    def method(self, y: Tensor, t: Tensor) -> Tensor:
        return self(y, t)


class Weighing(nn.Module):
    """A loss that reads what no attribute of it is."""

    def forward(self, y: Tensor, t: Tensor) -> Tensor:
        return FACTOR * criterion(y, t)


class Slotted:
    """Has its weight in a slot, and gives it without a name."""

    __slots__ = ("weight",)

    def __init__(self) -> None:
        self.weight = 1.0

    def __getitem__(self, index: int) -> float:
        return self.weight


# A loss of each kind, and what sets its weight.
KINDS = ["variable", "global", "callee", "object", "method", "partial"]
KINDS += ["module", "array", "deque", "slot", "item", "getattr"]


def annealed(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> Callable[[float], Callable[[Tensor, Tensor], Tensor]]:
    """What gives a loss its weight, wherever it reads it from."""
    owner = Annealed()
    rows, array, few, slotted = [owner], numpy.ones(1), deque([1.0]), Slotted()
    losses: dict[str, Any] = {
        "module": Weighing(),
        "array": lambda y, t: float(array[0]) * criterion(y, t),
        "deque": lambda y, t: few[0] * criterion(y, t),
        "slot": lambda y, t: slotted.weight * criterion(y, t),
        "item": lambda y, t: slotted[0] * criterion(y, t),
        "getattr": lambda y, t: getattr(owner, "settings")["weight"] * criterion(y, t),  # noqa: B009
        "variable": lambda y, t: rows[0].settings["weight"] * criterion(y, t),
        "global": scaled,
        "callee": lambda y, t: 2 * scaled(y, t),
        "object": owner,
        "method": owner.method,
    }

    def weighted(value: float) -> Callable[[Tensor, Tensor], Tensor]:
        owner.settings["weight"] = array[0] = few[0] = slotted.weight = value
        owner.steps_done += 1
        monkeypatch.setitem(globals(), "FACTOR", value)
        loss: Any = losses.get(kind) or partial(Annealed.__call__, owner)
        return loss

    return weighted


@pytest.mark.parametrize("kind", KINDS)
def test_losses_have_one_key_where_they_read_the_same(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weighted = annealed(kind, monkeypatch)
    one, two, again = (key_of_loss(weighted(value)) for value in (1.0, 2.0, 1.0))
    assert one == again
    assert hash(one) == hash(again)
    assert one != two


@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=() if k in ("global", "method") else pytest.mark.slow) for k in KINDS],
)
def test_a_step_has_what_its_loss_reads_in_python_now(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weight that is annealed; the plan of an earlier value is found again."""
    placed, weighted = lazily(Tied(), microbatches=2), annealed(kind, monkeypatch)
    found = [placed.step(X, targets=T, loss=weighted(value)).item() for value in (1.0, 2.0, 1.0)]
    assert found == [found[0], 2 * found[0], found[0]]
    assert len(baechi.runtime.derived_class.placed_state(placed).steps) == 2
