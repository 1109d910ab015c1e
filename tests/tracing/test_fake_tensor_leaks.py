"""What a model remembers from run to run holds no tensor of a tracer."""

import functools
from collections.abc import Callable

import pytest
import torch
from placed import again_at_random
from torch import Tensor, nn

import baechi

X = torch.arange(12.0).reshape(3, 4)
TABLES: dict[int, Tensor] = {}


def cosines(n: int) -> Tensor:
    return torch.arange(n, dtype=torch.float32)[:, None].cos()


def hidden(function: Callable[[int], Tensor]) -> Callable[[int], Tensor]:
    """A decorator of somebody else's, as transformers has one."""
    cached = functools.lru_cache(maxsize=4)(function)

    @functools.wraps(function)
    def wrapper(n: int) -> Tensor:
        return cached(n)

    return wrapper


class Remembers(nn.Module):
    """Asks for a table of its input's length, which it remembers in one of several ways."""

    of_all: dict[int, Tensor]

    def __init__(self, way: str, *, whole: bool) -> None:
        super().__init__()
        self.way, self.whole = way, whole
        self.own: dict[int, Tensor] = {}
        self.cached = functools.cache(cosines)

    @staticmethod
    @hidden
    def static(n: int) -> Tensor:
        return cosines(n)

    def table(self, n: int) -> Tensor:
        if self.way == "static":
            return self.static(n)
        if self.way == "attribute":
            return self.cached(n)
        rows = {"dict": self.own, "class": type(self).of_all, "module": TABLES}[self.way]
        if n not in rows:
            rows[n] = cosines(n)
        return rows[n]

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.table(len(x))
        if self.whole and int(x.argmax()) > 99:  # no tracer can tell
            y = y + 1
        return y + self.table(len(x))


WAYS = ["static", "attribute", "dict", "class", "module"]


@pytest.fixture(autouse=True)
def _forgotten() -> None:
    Remembers.of_all = {}
    TABLES.clear()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("whole", [False, True])
def test_no_tensor_of_a_tracer_is_remembered(way: str, whole: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Remembers(way, whole=whole))
    traced = baechi.trace(model, (X,))
    assert traced.rung.startswith("module granularity" if whole else "torch.export (non-strict)")
    assert len(traced.attempts) == (2 if whole else 1)
    baechi.estimate(traced, "cpu")
    placed = again_at_random(traced, seed=0, devices=2)
    y = placed(X)
    Remembers.of_all = {}
    TABLES.clear()
    fresh = nn.Sequential(model[0], Remembers(way, whole=whole))
    assert torch.equal(y, fresh(X))
    assert torch.equal(model(X), y)
    assert type(model[1].table(len(X))) is Tensor
