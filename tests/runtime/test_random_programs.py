"""Random models in random loops: placed at random, each equals the unsplit one in every bit."""

import copy
import random
from collections.abc import Callable
from typing import Final

import placed
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import baechi

pytestmark = pytest.mark.usefixtures("one_thread")

D: Final = 8
Function = Callable[[nn.ParameterDict, Tensor, Tensor], Tensor]


def written(own: nn.ParameterDict, a: Tensor, b: Tensor) -> Tensor:
    """Writes through views of what others read, too."""
    t = a @ own["w"]
    u = t + 1
    t[..., :4] += b[..., 4:]
    t.view(-1, D).mul_(0.5)
    return t + u * own["v"]


def cast_twice(own: nn.ParameterDict, a: Tensor, b: Tensor) -> Tensor:
    """Reads a weight twice in one block under autocast."""
    with torch.autocast("cpu", torch.bfloat16):
        t = functional.linear(functional.linear(a, own["w"]).tanh(), own["w"])
    return t.float() + b


def branching(own: nn.ParameterDict, a: Tensor, b: Tensor) -> Tensor:
    """Asks for a size, and for the mode of gradients."""
    t = a @ own["w"] if a.shape[1] > 4 else a @ own["w"] * own["v"]
    return t if torch.is_grad_enabled() else t + b * 0


def without_gradients(own: nn.ParameterDict, a: Tensor, b: Tensor) -> Tensor:
    """Rounds with a gradient straight through, beside what has none."""
    with torch.no_grad():
        t = b @ own["w"]
    return a + (a.round() - a).detach() + t * own["v"]


def rotated(own: nn.ParameterDict, a: Tensor, b: Tensor) -> Tensor:
    """Complex numbers."""
    z = torch.complex(a[..., ::2], a[..., 1::2])
    return torch.view_as_real(z * z.abs()).flatten(-2) * own["v"] + b


def attending(own: nn.ParameterDict, a: Tensor, b: Tensor) -> Tensor:
    """A mask that forward makes."""
    mask = torch.triu(torch.ones(a.shape[1], a.shape[1], dtype=torch.bool), 1)
    scores = (a @ own["w"] @ b.mT).masked_fill(mask, float("-inf"))
    return scores.softmax(-1) @ b


def scattered(own: nn.ParameterDict, a: Tensor, b: Tensor) -> Tensor:
    """Indices that depend on values, of which one is read by nobody."""
    best = a.topk(3, -1).indices
    a.argsort(-1)
    return torch.zeros_like(a).scatter(-1, best, 1.0) * b + a.gather(-1, best)[..., :1] * own["v"]


def residual(own: nn.ParameterDict, a: Tensor, b: Tensor) -> Tensor:
    """Operators that read a value several times, as a later one does once."""
    t = a @ own["w"]
    t = t + functional.rms_norm(t, (D,), own["v"]) @ own["w"]
    return t + functional.scaled_dot_product_attention(t, t, t) + b


FUNCTIONS: Final[tuple[Function, ...]] = (
    *(written, cast_twice, branching, without_gradients, rotated, attending, scattered, residual),
    lambda own, a, b: functional.linear(a, own["w"]) + b.detach(),
    lambda own, a, b: torch.cat((a * own["v"], b), -1).chunk(2, -1)[1] + a.relu(),
)


class Layer(nn.Module):
    """A function with weights, behind a normalization that is read, or only moves."""

    def __init__(self, function: Function, weights: nn.ParameterDict, *, read: bool) -> None:
        super().__init__()
        self.function, self.own, self.read = function, weights, read
        self.norm = nn.BatchNorm1d(D)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        normed = self.norm(a.mT).mT
        return self.function(self.own, normed if self.read else a.tanh(), b)


class Program(nn.Module):
    """Layers that read two earlier values each, some of them with the weights of others."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        torch.manual_seed(seed)
        rows = [{"w": torch.randn(D, D) / 3, "v": torch.randn(D)} for _ in range(3)]
        weights = [nn.ParameterDict({k: nn.Parameter(v) for k, v in row.items()}) for row in rows]
        n = draw.randrange(3, 12)
        self.layers = nn.ModuleList(
            Layer(draw.choice(FUNCTIONS), draw.choice(weights), read=draw.random() < 0.5)
            for _ in range(n)
        )
        self.reads = [(k, draw.randrange(k + 1)) for k in range(n)]

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        values = [x]
        for layer, (a, b) in zip(self.layers, self.reads, strict=True):
            values.append(layer(values[a], values[b]))
        return values[-1], values[-1].argmax(-1)


def run(model: nn.Module, seed: int) -> list[placed.Left]:
    """What each step of a loop leaves behind."""
    draw, generator, left = random.Random(seed), torch.Generator().manual_seed(seed), []
    optimizer, held = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for _ in range(6):
        shape = draw.choice([(2, 3, D), (3, 5, D), (4, 6, D)])
        parameter = draw.choice([*model.parameters()])
        parameter.requires_grad_(draw.random() < 0.5)
        model.train(draw.random() < 0.8)
        x = torch.randn(shape, generator=generator)
        with torch.no_grad() if draw.random() < 0.3 else torch.enable_grad():
            held.append(model(x)[0])  # beside the graph of the step
        if any(p.requires_grad for p in model.parameters()):
            left.append(placed.step(model, (x,), {}))
        optimizer.step()
        held = held[-draw.randrange(1, 3) :]
    return left


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed == 10 else pytest.mark.slow) for seed in range(30)]
)
def test_a_random_program_equals_the_unsplit_one(seed: int) -> None:
    unsplit = Program(seed)
    module = baechi.place(
        copy.deepcopy(unsplit),
        placed.cpus(2 + seed % 3),
        placer=baechi.RandomPlacer(seed),
        costs="estimate",
        progress=False,
        threads_per_device=1,
        max_shapes=20,
    )
    rows = zip(run(unsplit, seed), run(module, seed), strict=True)
    assert not [row for one, two in rows if (row := one.differs_from(two))]
    module.unplace()
