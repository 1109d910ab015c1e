"""What torch's tracers would lose without a word: a placed model does it, or tracing refuses."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import baechi


class WrongSquare(torch.autograd.Function):
    """A square whose gradient is made up, so that nobody can derive it from the forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, power: int) -> Tensor:
        ctx.save_for_backward(x)
        return x**power

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 3 * grad * x, None


wrong_square = WrongSquare.apply  # as people do


class Model(nn.Module):
    """Two linear layers with a function of the model and of the value between them."""

    def __init__(self, between: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.side = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.seen: Tensor | None = None
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self, self.first(x)))


def custom(_: Model, x: Tensor) -> Tensor:
    return wrong_square(x, 2)


def reentrant(model: Model, x: Tensor) -> Tensor:
    return checkpoint(model.side, x, use_reentrant=True)


def inference(model: Model, x: Tensor) -> Tensor:
    with torch.inference_mode():
        side = model.side(x)
    return x + side.clone()


def replaced_buffer(model: Model, x: Tensor) -> Tensor:
    model.mean = model.mean * 0.9 + x.detach().mean(0) * 0.1
    return x - model.mean


def remembered(model: Model, x: Tensor) -> Tensor:
    model.seen = x.detach() * 2
    return x + model.seen


def hooked(_: Model, x: Tensor) -> Tensor:
    x.register_hook(lambda grad: grad * 2)
    return x


def own_gradient(model: Model, x: Tensor) -> Tensor:
    return torch.autograd.grad(model.side(x).sum(), x, create_graph=True)[0]


def vectorized(model: Model, x: Tensor) -> Tensor:
    return torch.func.vmap(torch.func.grad(lambda row: model.side(row).sum()))(x)


def steps(model: nn.Module) -> list[Tensor]:
    """Outputs, gradients and state of two steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    values: list[Tensor] = []
    for _ in range(2):
        y = model(torch.ones(3, 6))
        optimizer.zero_grad()
        y.square().mean().backward()
        values += [y.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
    return values + [value.clone() for value in model.state_dict().values()]


def place(model: nn.Module) -> baechi.PlacedModule:
    return baechi.place(
        model,
        {"cpu:0": "1GiB", "cpu:1": "1GiB"},
        example_args=(torch.ones(3, 6),),
        placer=baechi.RandomPlacer(0),
        costs="estimate",
        progress=False,
    )


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(
    "between", [custom, reentrant, inference, replaced_buffer, remembered], ids=lambda f: f.__name__
)
def test_the_placed_model_does_it_too(between: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), Model(between))
    expected = steps(copy.deepcopy(model))
    placed = place(model)
    actual = steps(placed)
    assert placed.traced.rung == "torch.export (non-strict)"
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("between", [hooked, own_gradient, vectorized], ids=lambda f: f.__name__)
def test_what_no_tracer_can_keep_is_refused(between: Callable[..., Tensor]) -> None:
    with pytest.raises(baechi.TraceError, match="cannot be traced"):
        baechi.trace(Model(between), (torch.ones(3, 6),))
    # And nothing of the attempts is left behind.
    assert torch.randn(2, requires_grad=True).sum().requires_grad
    baechi.trace(Model(custom), (torch.ones(3, 6),))


def test_the_model_holds_no_fake_tensor_after_a_trace() -> None:
    model = Model(remembered)
    baechi.trace(model, (torch.ones(3, 6),))
    assert model.seen is None
    model(torch.ones(3, 6))


class Untraceable(nn.Module):
    """Export fails at its packed sequence; its siblings are then traced by fx."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x[None], torch.tensor([3]), batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0][0]


def no_grad_inside(model: Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        side = model.side(x)
    return x + side


@pytest.mark.parametrize("between", [custom, no_grad_inside, hooked, own_gradient])
def test_fx_loses_nothing_either(between: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 8), Untraceable(), nn.Tanh(), nn.Linear(8, 6), Model(between)
    )
    expected = steps(copy.deepcopy(model))
    placed = place(model)
    assert placed.traced.rung == "module granularity, opaque leaves"
    for one, other in zip(steps(placed), expected, strict=True):
        torch.testing.assert_close(one, other)
    assert not any(" at 0x" in op.key for op in placed.traced.ops)


class Cache:
    """A class that neither torch nor Baechi knows."""

    def __init__(self, key: Tensor, layer: "Cache | None" = None) -> None:
        self.key, self.layer, self.length = key, layer, len(key)


class Caching(nn.Module):
    """Returns tensors inside of objects."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = self.first(x)
        return {"y": self.last(hidden), "cache": Cache(hidden, Cache(hidden * 2))}


def test_objects_are_returned_with_their_tensors() -> None:
    model = Caching()
    x = torch.ones(3, 6)
    expected = model(x)
    placed = place(model)
    actual = placed(x)
    assert placed.traced.rung == "torch.export (non-strict)"
    assert type(actual["cache"]) is Cache
    assert actual["cache"].length == 3
    torch.testing.assert_close(actual["cache"].layer.key, expected["cache"].layer.key)
    torch.testing.assert_close(actual["y"], expected["y"])
