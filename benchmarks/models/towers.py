"""Equal towers that meet only at their end: the model on which devices side by side pay in full.

The simplest of the two-tower models, such as Huang et al.: "Learning Deep Structured Semantic
Models for Web Search using Clickthrough Data", CIKM 2013,
https://doi.org/10.1145/2505515.2505665: each tower is a stack of dense layers, and one dense layer
reads all of them. With equal work in n towers and n devices the best step takes 1/n of the time of
one device, plus the join.
"""

from typing import Any

import torch
from torch import Tensor, nn


class Towers(nn.Module):
    """`n_towers` stacks of `depth` dense layers of `width` units, and one layer that joins them."""

    def __init__(self, n_towers: int, depth: int, width: int) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            nn.Sequential(
                *(layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.GELU()))
            )
            for _ in range(n_towers)
        )
        self.join = nn.Linear(n_towers * width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.join(torch.cat([tower(x) for tower in self.towers], -1))


def example(batch: int = 256) -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Any]]:
    """Two towers with example arguments, as the command line takes it."""
    torch.manual_seed(0)
    return Towers(n_towers=2, depth=8, width=512), (torch.randn(batch, 512),), {}
