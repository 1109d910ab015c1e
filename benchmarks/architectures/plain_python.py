"""Models in plain torch with plain Python: arguments of every kind, branches on values."""

from typing import Any

import torch
from benchmarks.architectures.small import Example
from torch import Tensor, nn


class Options(nn.Module):
    """Dicts, lists, None, bools, ints and strings as arguments, with control flow on them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})

    def forward(
        self,
        batch: dict[str, Any],
        which: str,
        n: int = 2,
        mask: Tensor | None = None,
        deep: bool = False,
        sizes: list[int] | None = None,
    ) -> dict[str, Any]:
        x = batch["x"]
        for _ in range(n):
            x = self.layers[which](x)
            if deep:
                x = torch.relu(x)
        if mask is not None:
            x = x.masked_fill(mask, 0.0)
        parts = x.split(sizes or [8], -1)
        return {
            "parts": list(parts),
            "n": n,
            "which": which,
            "nested": {"y": (batch["more"][0] + x, None)},
        }


class Pointers(nn.Module):
    """Boolean masks as indices: shapes that depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        h = self.first(x)
        picked = self.last(h[mask])
        out = h.new_zeros(*mask.shape, 4)
        out[mask] = picked
        return out, picked.mean()


class EarlyExit(nn.Module):
    """Leaves a loop when the values say so: control flow on values in the outermost forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.exit = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
            if self.exit(x).mean().item() > 0.5:
                break
        return x


class Anomalies(nn.Module):
    """Asserts on values and prints, as research code has them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        assert not torch.isnan(x).any(), "not a number"
        h = self.first(x)
        if torch.isinf(h).any():
            h = h.clamp(-1e4, 1e4)
        return self.last(h)


class Lists(nn.Module):
    """Non-module lists of parameters, a lambda, a partial, kwargs passed through."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(8, 8) / 3 for _ in range(3)])
        self.scales = nn.ParameterDict({"a": torch.ones(8), "b": torch.zeros(())})
        self.activation = lambda v: v * torch.sigmoid(1.702 * v)

    def forward(self, *xs: Tensor, **more: Tensor) -> list[Tensor]:
        total = sum(xs) + sum(more.values())
        for weight in self.weights:
            total = self.activation(total @ weight) * self.scales["a"] + self.scales["b"]
        return [total, *xs]


class ReturnsInput(nn.Module):
    """Writes into its argument's dict and returns it, as pipelines of modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        batch["hidden"] = self.linear(batch["x"])
        batch["x"] = batch["x"] + batch["hidden"]
        return batch


class Nothing(nn.Module):
    """No parameters at all, and a scalar argument."""

    def forward(self, x: Tensor, scale: Tensor) -> tuple[Tensor, float]:
        return (x * scale).softmax(-1), 1.5


def options() -> Example:
    batch = {"x": torch.randn(3, 8), "more": [torch.randn(3, 8)]}
    kwargs = {"which": "b", "n": 3, "mask": torch.rand(3, 8) > 0.5, "deep": True, "sizes": [3, 5]}
    return Options(), (batch,), kwargs


def pointers() -> Example:
    model, x, mask = Pointers(), torch.randn(3, 5, 8), torch.rand(3, 5) > 0.4
    mask[0, 0] = True
    return model, (x, mask), {}
