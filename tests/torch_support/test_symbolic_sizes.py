"""Terms of symbolic sizes: short enough for sympy, and right at all sizes."""

import copy

import pytest
import sympy
import torch
from placed import lazily, one_thread
from sympy.core.expr import Expr
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._sympy.functions import FloorDiv, Mod

from baechi.torch_support.symbolic_sizes import short_terms

SIZE = sympy.Symbol("size", integer=True, positive=True)


def padding(size: sympy.Expr, multiple: int) -> sympy.Expr:
    return Mod(multiple - Mod(size, multiple), multiple)


@pytest.mark.parametrize("multiple", [2, 7, 8])
@pytest.mark.parametrize("size", [SIZE, FloorDiv(SIZE + 1, 4)])
def test_a_padded_size_is_a_multiple_by_its_term(size: sympy.Expr, multiple: int) -> None:
    with short_terms():
        padded = size + padding(size, multiple)
        assert not padded.atoms(Mod)
        assert FloorDiv(padded, multiple) * multiple == padded
        # A rest alone, or of another number, is what torch makes of it.
        assert Mod(SIZE, 7).func is Mod(7 - Mod(SIZE, 5), 7).func is Mod
    for n in range(1, 70):
        known = int(size.subs(SIZE, n))
        assert padded.subs(SIZE, n) == -(-known // multiple) * multiple


def test_afterwards_sympy_is_as_before() -> None:
    before = Mod.__dict__["eval"], Expr.__dict__["is_number"]
    with short_terms():
        assert (SIZE + 1).is_number is False
        assert sympy.sqrt(sympy.Integer(2)).is_number is True
        assert Expr.__dict__["is_number"] is not before[1]
    assert before == (Mod.__dict__["eval"], Expr.__dict__["is_number"])


class Windows(nn.Module):
    """Pads rows to windows, as a Swin or a ViTDet does with images, and cuts the padding off."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        width = x.shape[1]
        x = functional.pad(x, (0, 0, 0, (7 - width % 7) % 7))
        batch, padded, channels = x.shape
        windows = self.inner(x.view(batch, padded // 7, 7, channels)).softmax(2)
        whole = windows.view(-1, padded // 7, 7, channels).view(batch, padded, -1)
        return self.outer(whole[:, :width].tanh())


def test_windows_of_padded_rows_have_one_plan_with_short_terms() -> None:
    model = Windows()
    placed = lazily(copy.deepcopy(model))
    with one_thread(), torch.no_grad():
        for width in (16, 30, 9, 21):
            x = torch.randn(2, width, 4)
            assert torch.equal(placed(x), model(x))
    assert len(placed._specializations) == 1
    assert max(len(str(term)) for term in placed.traced.module.family._terms) < 80
    placed.unplace()
