"""An LSTM language model: one heavy opaque op per layer stack, and an embedding that may be tied.

Zaremba, Sutskever, Vinyals: "Recurrent Neural Network Regularization", 2014,
https://arxiv.org/abs/1409.2329; tied weights are from Press, Wolf: "Using the Output Embedding to
Improve Language Models", EACL 2017, https://arxiv.org/abs/1608.05859. Plain torch, no dropout.
"""

from typing import Any

import torch
from torch import Tensor, nn

State = tuple[Tensor, Tensor]


class LSTMLanguageModel(nn.Module):
    """`(logits, (hidden, cell))` of token ids of shape (batch, length)."""

    def __init__(
        self, vocabulary: int = 10_000, width: int = 650, layers: int = 2, *, tied: bool = False
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, vocabulary, bias=not tied)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        hidden, state = self.lstm(self.embedding(tokens), state)
        return self.head(hidden), state


def example(batch: int = 4) -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Any]]:
    """The medium model of the paper with example arguments, as the command line takes it."""
    torch.manual_seed(0)
    return LSTMLanguageModel(), (torch.randint(10_000, (batch, 35)),), {}
