"""What is dropped from an exported graph has no effect; what has one stays."""

import pytest
import torch
from torch import Tensor, nn

import baechi


def targets(traced: baechi.Traced) -> list[str]:
    modules = traced.module.graph_module.modules()
    parts = [part for part in modules if isinstance(part, torch.fx.GraphModule)]
    return [str(node.target) for part in parts for node in part.graph.nodes]


class Casts(nn.Module):
    """The embedding is read twice, once through a cast to its own type."""

    def __init__(self, **how: object) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.how = how

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        with torch.autocast("cpu", enabled=False):
            other = self.first(hidden.to(**self.how))
        return self.last(other).to(hidden.dtype) + hidden


@pytest.mark.parametrize("how", [{"dtype": torch.float32}, {"device": "cpu"}])
def test_casts_to_what_is_there_and_checks_are_dropped(how: dict[str, object]) -> None:
    model, tokens = Casts(**how), torch.tensor([[1, 2, 3]])
    traced = baechi.trace(model, (tokens,))
    assert traced.rung == "torch.export (non-strict)"
    assert not [name for name in targets(traced) if ".to." in name or "assert" in name]
    torch.testing.assert_close(traced.module.graph_module(tokens)[0], model(tokens), rtol=0, atol=0)


class Kept(nn.Module):
    """Casts with an effect: to another type, to new storage, to other strides."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        copy = x.to(torch.float32, copy=True)
        turned = x.to(x.dtype, memory_format=torch.channels_last)
        return x.to(torch.float64), copy.add_(1), turned


def test_casts_with_an_effect_stay() -> None:
    model, x = Kept(), torch.randn(2, 3, 4, 5)
    traced = baechi.trace(model, (x,))
    before = x.clone()
    wide, copy, turned = traced.module.graph_module(x)
    assert torch.equal(x, before)
    assert wide.dtype == torch.float64
    assert torch.equal(copy, x + 1)
    assert turned.is_contiguous(memory_format=torch.channels_last)
