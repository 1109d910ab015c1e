"""Values that a trace knows, and those that it must not."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import baechi


class Branching(nn.Module):
    """Asks something of its input, in a submodule, which could stay whole."""

    def __init__(self, ask: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.ask = ask

    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if self.ask(x) else x + 2


def ordered(x: Tensor) -> bool:
    positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0).expand(2, -1)
    steps = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1)
    return bool(((steps != 1).cumsum(-1)[:, -1] == 0).all())


def counted(x: Tensor) -> bool:
    return torch.full((2,), x.shape[0]).sum().item() == 2 * x.shape[0]


def listed(_: Tensor) -> bool:
    return torch.tensor([3, 4]).flip(0).tolist() == [4, 3]


def compared(_: Tensor) -> bool:
    return torch.equal(torch.ones(3, dtype=torch.int64).cumsum(0), torch.arange(1, 4))


def written(_: Tensor) -> bool:
    """The values are those after what was written, if that is returned."""
    return int(torch.zeros(2, dtype=torch.int64).add_(3)[0]) == 3


@pytest.mark.parametrize("ask", [ordered, counted, listed, compared, written])
def test_what_depends_on_shapes_alone_is_known(ask: Callable[[Tensor], bool]) -> None:
    x = torch.randn(2, 5)
    assert ask(x)
    traced = baechi.trace(Branching(ask), (x,))
    assert traced.rung == "torch.export (non-strict)"
    assert torch.equal(traced.module.graph_module(x)[0], x + 1)


def of_the_input(x: Tensor) -> bool:
    return bool((torch.arange(x.shape[1]) + x.to(torch.int64) > 100).any())


def written_with_the_input(x: Tensor) -> bool:
    zeros = torch.zeros(5, dtype=torch.int64)
    zeros[2:] = x[0, 2:].to(torch.int64)
    return bool((zeros > 100).any())


def written_through_a_view(x: Tensor) -> bool:
    zeros = torch.zeros(5, dtype=torch.int64)
    part = zeros[2:]
    part.copy_(x[0, 2:])
    return bool((zeros > 100).any())


def written_as_data(x: Tensor) -> bool:
    zeros = torch.zeros(5, dtype=torch.int64)
    zeros.data.copy_(x[0])
    return bool((zeros > 100).any())


def written_out(x: Tensor) -> bool:
    zeros = torch.zeros(5, dtype=torch.int64)
    torch.add(x[0].to(torch.int64), 1, out=zeros)
    return bool((zeros > 100).any())


def drawn(x: Tensor) -> bool:
    return bool((torch.randint_like(torch.arange(x.shape[1]), 100) > 100).any())


def drawn_in_place(_: Tensor) -> bool:
    return bool((torch.zeros(5, dtype=torch.int64).random_(0, 100) > 100).any())


@pytest.mark.parametrize(
    "ask",
    [
        of_the_input,
        written_with_the_input,
        written_through_a_view,
        written_as_data,
        written_out,
        drawn,
    ],
)
def test_what_depends_on_more_is_told_and_checked(ask: Callable[[Tensor], bool]) -> None:
    x = torch.zeros(2, 5)
    traced = baechi.trace(Branching(ask), (x,))
    assert traced.rung == "torch.export (non-strict), truth values of the example"
    assert "data-dependent" in traced.attempts[0].reason
    assert torch.equal(traced.module.graph_module(x)[0], x + 2)
    if ask is not drawn:
        with pytest.raises(RuntimeError, match="would now read True"):
            traced.module.graph_module(x + 1000)


def test_what_no_tracer_can_write_down_is_refused() -> None:
    with pytest.raises(baechi.TraceError, match="data-dependent"):
        baechi.trace(Branching(drawn_in_place), (torch.zeros(2, 5),))


def test_memory_that_nobody_wrote_is_not_known() -> None:
    model = Branching(lambda _: bool((torch.empty_like(torch.arange(5)) > 100).any()))
    traced = baechi.trace(model, (torch.zeros(2, 5),))
    assert "data-dependent" in traced.attempts[0].reason
