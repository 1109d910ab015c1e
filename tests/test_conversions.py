"""A forward that converts its own submodule to what it already is."""

import pytest
import torch
from torch import Tensor, nn

import baechi
from baechi.conversions import effectless_conversions_skipped
from placed import at_random, one_thread, step


class Converting(nn.Module):
    """Makes sure of its router's type in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.router = self.router.to(x.dtype)
        return self.last(self.router(x).tanh())


def test_a_conversion_that_changes_nothing_is_no_obstacle() -> None:
    model, args = Converting(), (torch.randn(4, 8),)
    assert baechi.trace(model, args).rung == "torch.export (non-strict)"
    with one_thread():
        expected = step(model, args, {})
        placed = at_random(model, args)
        assert step(placed, args, {}).differs_from(expected) == []


@pytest.mark.parametrize(
    "asked",
    [(torch.float32,), ("cpu",), ("cpu", torch.float32), (torch.float64,), ("meta",)],
    ids=str,
)
def test_all_others_convert(asked: tuple[object, ...]) -> None:
    norm = nn.BatchNorm1d(2)  # with a count that is no floating-point number
    with effectless_conversions_skipped():
        assert norm.to(*asked) is norm
    expected = nn.BatchNorm1d(2).to(*asked)
    for one, two in zip(norm.buffers(), expected.buffers(), strict=True):
        assert (one.dtype, one.device) == (two.dtype, two.device)


def test_another_memory_format_is_a_change() -> None:
    convolution = nn.Conv2d(2, 2, 2)
    with effectless_conversions_skipped():
        convolution.to(memory_format=torch.channels_last)
    assert convolution.weight.is_contiguous(memory_format=torch.channels_last)


def test_torch_still_cannot_convert() -> None:
    """If this fails, torch is mended: see whether `baechi.conversions` can go."""
    with pytest.raises(RuntimeError, match="Couldn't swap"):
        torch.export.export(Converting(), (torch.randn(4, 8),), strict=False)
