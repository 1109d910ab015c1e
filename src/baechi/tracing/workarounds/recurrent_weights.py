"""Weights of recurrent layers on a GPU, in one piece: else cuDNN copies them at every call.

`nn.Module.to` sees to that. A parameter that is moved by itself, or copied, leaves its piece: torch
then warns at each call, and each takes the weights' bytes once more.
Source: `torch/nn/modules/rnn.py`, `aten/src/ATen/native/cudnn/RNN.cpp`.
"""

import torch
from torch import nn


def compact(model: nn.Module) -> None:
    """Put the weights of every recurrent layer that is on one GPU into one piece again.

    Parameters stay the same objects.
    """
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            places = {parameter.device for parameter in module.parameters()}
            if len(places) == 1 and places.pop().type == "cuda":
                with torch.inference_mode(False):
                    module.flatten_parameters()
