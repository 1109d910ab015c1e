"""Models that were traced on the CPU run on a GPU, whose kernels lay out their results otherwise.

`tests/tracing/test_layouts.py` has the same rule on CPUs, under other kernels and strides.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import baechi

pytestmark = pytest.mark.gpu


class Attention(nn.Module):
    """As in nanoGPT: after the CPU's fused attention `contiguous` does nothing, before a `view`."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.heads = heads
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        parts = self.project(x).split(c, 2)
        q, k, v = (z.view(b, t, self.heads, c // self.heads).transpose(1, 2) for z in parts)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).contiguous().view(b, t, c))


class Itself(nn.Module):
    """Attention of torch, of a value to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Head(nn.Module):
    """A convolution in channels_last, whose `contiguous` does nothing before a `view`."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Conv2d(4, 6, 3, padding=1).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        y = self.head(x.to(memory_format=torch.channels_last)).relu_()
        return y.permute(0, 2, 3, 1).contiguous().view(x.shape[0], -1, 3)


class Recurrent(nn.Module):
    """The last output of an LSTM, by a view of all."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 16, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0].contiguous().view(x.shape[0], -1)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "attention": (lambda: Attention(4, 256), (2, 16, 256)),
    "attention in fp64": (lambda: Attention(4, 256).double(), (2, 16, 256)),
    "attention, heads of 6": (lambda: Attention(4, 24), (2, 16, 24)),
    "attention, batch 1": (lambda: Attention(4, 256), (1, 16, 256)),
    "multihead attention": (Itself, (1, 8, 32)),
    "encoder layer": (
        lambda: nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True),
        (1, 8, 32),
    ),
    "channels_last": (Head, (2, 4, 9, 9)),
    "lstm": (Recurrent, (2, 5, 8)),
}


@pytest.mark.parametrize("devices", [["cuda:0"], ["cuda:0/a", "cuda:0/b"]])
@pytest.mark.parametrize("name", MODELS)
def test_a_step_of_what_was_traced_on_the_cpu(
    name: str, devices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model = make()
    x = torch.randn(shape, dtype=next(model.parameters()).dtype)
    reference = copy.deepcopy(model).to("cuda:0")
    traced = baechi.trace(model, (x,))
    costs = tuple(baechi.OpCost(10_000, 20_000) for _ in traced.ops)
    graph = traced.graph(baechi.Profile(traced.digest, "", costs), training=True)
    rows = [baechi.Device(device, "1GiB") for device in devices]
    cluster = baechi.Cluster.connected(rows, baechi.Link(10_000, 10**10))
    placement = baechi.solve(graph, cluster, placer=baechi.RandomPlacer(0))
    placed: Any = baechi.apply(traced, placement, graph=graph, cluster=cluster)
    found = []
    for module in (reference, placed):
        output = module(x.to("cuda:0"))
        output.square().mean().backward()
        found.append([output, *(p.grad for p in module.parameters())])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)
