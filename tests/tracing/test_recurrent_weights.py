"""Which recurrent layers are made compact; what that does is torch's own, on a GPU."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zoo
from torch import nn

from baechi.tracing.workarounds import compact


class Layer(nn.LSTM):
    """Says where its weights are, and counts how often it is made compact."""

    places: tuple[str, ...] = ()
    count = 0

    def parameters(self, recurse: bool = True) -> Iterator[Any]:  # noqa: ARG002
        return iter([SimpleNamespace(device=torch.device(place)) for place in self.places])

    def reset_parameters(self) -> None:
        """They are never read."""

    def flatten_parameters(self) -> None:
        self.count += 1


@pytest.mark.parametrize(
    ("places", "count"),
    [(("cuda:0", "cuda:0"), 1), (("cuda:0", "cuda:1"), 0), (("cpu",), 0), (("meta",), 0)],
)
def test_layers_on_one_gpu_are_made_compact(places: tuple[str, ...], count: int) -> None:
    layer = Layer(2, 2)
    layer.places, layer.count = places, 0
    compact(nn.Sequential(nn.Linear(2, 2), layer))
    assert layer.count == count


@pytest.mark.gpu
@pytest.mark.skipif(not torch.backends.cudnn.enabled, reason="cuDNN is off")
def test_a_layer_whose_weights_were_moved_one_by_one_is_compact_again() -> None:
    model, args, _ = zoo.MODELS["lstm_lm"]()
    for parameter in model.parameters():
        parameter.data = parameter.data.to("cuda:0")
    compact(model)
    (layer,) = (module for module in model.modules() if isinstance(module, nn.LSTM))
    assert len({parameter.untyped_storage()._cdata for parameter in layer.parameters()}) == 1
    model(*(tensor.to("cuda:0") for tensor in args))  # a warning would be an error
