"""Which operator failed on the way back."""

import warnings
from typing import Any

import pytest
import torch
from placed import place_on
from torch import nn

import baechi


class Roots(nn.Module):
    """Some of the first layer's results are negative, and have no root."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x).sqrt())


@pytest.mark.parametrize("devices", [1, 3])
def test_anomaly_detection_shows_the_generated_line_of_the_operator(devices: int) -> None:
    model, x = Roots(), -torch.ones(2, 4)
    placed = place_on(baechi.trace(model, (x,)), devices, "round-robin")
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        with (
            torch.autograd.set_detect_anomaly(True),
            pytest.raises(baechi.ExecutionError, match="returned nan"),
        ):
            torch.autograd.grad(placed(x).sum(), list(placed.parameters()))
    line = "linear_1 = torch.ops.aten.linear"  # of the generated code, named as the operator
    assert any(line in str(row.message) for row in shown)
    placed.unplace()


class Brittle(torch.autograd.Function):
    """Goes backward over small gradients only."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        if gradient.abs().max() > 100:
            raise OverflowError("too steep")
        return gradient * 2


@torch.library.custom_op("baechi_tests::brittle", mutates_args=())
def brittle(x: torch.Tensor) -> torch.Tensor:
    """As `Brittle`."""
    return x * 2


brittle.register_fake(torch.empty_like)
brittle.register_autograd(Brittle.backward)


class Many(nn.Module):
    """Operators of one kind, and in their middle one that may fail on the way back."""

    def __init__(self, middle: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))
        self.middle = middle

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:3]:
            x = layer(x).tanh()
        x = self.middle(x)
        for layer in self.layers[3:]:
            x = layer(x).tanh()
        return x


@pytest.mark.parametrize("middle", [Brittle.apply, brittle])
@pytest.mark.parametrize("checkpoint", [None, "layers.*"])
@pytest.mark.parametrize("devices", [1, 2])
def test_an_error_on_the_way_back_is_told_with_its_operator(
    devices: int, checkpoint: Any, middle: Any
) -> None:
    model, x = Many(middle), torch.ones(2, 4)
    traced = baechi.trace(model, (x,))
    placed = place_on(traced, devices, "contiguous", checkpoint=checkpoint)
    with pytest.raises(baechi.ExecutionError, match="too steep") as plain:
        (placed(x).sum() * 1e6).backward()
    assert isinstance(plain.value.__cause__, OverflowError)
    (op,) = (i for i, op in enumerate(traced.ops) if "brittle" in f"{op.name}{op.key}".lower())
    own = f"{traced.ops[op].name} (test_failures.py:"
    alone = next(tape.ops for tape in placed.program.tapes if op in tape.ops)
    told = str(plain.value)
    many = "(under torch.autograd.set_detect_anomaly(True) a warning shows its generated line)"
    assert told.startswith(own) if len(alone) == 1 else many in told
    placed(x).sum().backward()
    placed.unplace()
