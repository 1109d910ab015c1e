"""The models of the benchmarks are those of the papers, as their shapes and sizes say."""

import pytest
import torch
from benchmarks.models.googlenet import googlenet
from benchmarks.models.nasnet_a import nasnet_a
from torch import nn


@pytest.mark.parametrize(("build", "parameters"), [(googlenet, 6_998_552), (nasnet_a, 5_289_978)])
def test_as_many_parameters_and_logits_as_in_the_paper(build: object, parameters: int) -> None:
    with torch.device("meta"):  # shapes alone: nothing is computed
        model: nn.Module = build()  # type: ignore[operator]
        logits = model.eval()(torch.empty(2, 3, 224, 224))
    assert logits.shape == (2, 1000)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
