"""torchao's int8 weights in a placed model."""

from typing import Any

import pytest
import torch
from scripts import Place, equal_in_every_bit, tiny_llama
from torch import nn

pytestmark = pytest.mark.slow


def quantized(model: nn.Module) -> nn.Module:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig())
    return model.eval()


def test_layers() -> None:
    def script(place: Place) -> Any:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
        model = place(quantized(layers), training=False)
        with torch.no_grad():
            return model(torch.ones(2, 16)), model(torch.ones(5, 16))

    equal_in_every_bit(script)


def test_a_decoder() -> None:
    def script(place: Place) -> Any:
        model = place(quantized(tiny_llama()), training=False)
        with torch.no_grad():
            return model(torch.arange(3, 19).reshape(2, 8)).logits

    equal_in_every_bit(script)
