"""How far off a placed model may be on GPUs: no further than the unsplit one is itself."""

import pytest
import torch
from on_gpus import assert_as_right

EXACT = torch.tensor([1000.0, 1.0])
ONE, TWIN, ROUNDED = (EXACT + torch.tensor([shift, 0.0]) for shift in (0.0, 0.3, -0.4))


@pytest.mark.parametrize(("off", "passes"), [(0.09, True), (0.89, True), (0.91, False)])
def test_three_times_what_two_runs_of_the_unsplit_model_differ_by(off: float, passes: bool) -> None:
    found = EXACT + torch.tensor([0.0, off])
    assert_as_right([ONE], [ONE], [ONE])
    if passes:
        assert_as_right([found], [ONE], [TWIN])
    else:
        with pytest.raises(AssertionError, match="not close"):
            assert_as_right([found], [ONE], [TWIN])


@pytest.mark.parametrize(("off", "passes"), [(1.19, True), (1.21, False)])
def test_or_what_it_is_off_in_float64(off: float, passes: bool) -> None:
    found = ROUNDED + torch.tensor([0.0, off])
    with pytest.raises(AssertionError, match="not close"):
        assert_as_right([found], [ROUNDED], [ROUNDED])
    if passes:
        assert_as_right([found], [ROUNDED], [ROUNDED], lambda: [EXACT.double()])
    else:
        with pytest.raises(AssertionError, match="not close"):
            assert_as_right([found], [ROUNDED], [ROUNDED], lambda: [EXACT.double()])


def test_what_is_no_number_or_of_another_shape_never_passes() -> None:
    for wrong in (ONE * float("nan"), ONE[:1], ONE.double()):
        with pytest.raises(AssertionError):
            assert_as_right([wrong], [ONE], [TWIN], lambda: [EXACT.double()])
