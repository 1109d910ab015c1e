"""A model in micro-batches: tied weights, a batch norm with statistics, a skip over all layers."""

import torch
from torch import Tensor, nn
from torch.nn import functional


class Tied(nn.Module):
    """An embedding that is the head, too; a batch norm; dropout; a skip over all layers."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.BatchNorm1d(8)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        first = h = self.tokens(x).flatten(0, 1)
        for layer in self.layers:
            h = functional.dropout(torch.tanh(layer(h)), self.dropout, self.training) + h
        return (self.norm(h) + first) @ self.tokens.weight.t()
