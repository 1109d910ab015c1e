"""GoogLeNet: nine blocks of four branches each, the classic of multi-stream inference.

Szegedy, Liu, Jia, Sermanet, Reed, Anguelov, Erhan, Vanhoucke, Rabinovich: "Going Deeper with
Convolutions", CVPR 2015, https://arxiv.org/abs/1409.4842. Table 1 has the widths. Plain torch,
without the auxiliary heads, which serve in training alone; 6,998,552 parameters at 1,000 classes.
"""

from typing import Any, Final

import torch
from torch import Tensor, nn

# Of each block (table 1): input, 1x1, 3x3 reduced and 3x3, 5x5 reduced and 5x5, pool projection.
_BLOCKS: Final = (
    ((192, 64, 96, 128, 16, 32, 32), (256, 128, 128, 192, 32, 96, 64)),
    (
        (480, 192, 96, 208, 16, 48, 64),
        (512, 160, 112, 224, 24, 64, 64),
        (512, 128, 128, 256, 24, 64, 64),
        (512, 112, 144, 288, 32, 64, 64),
        (528, 256, 160, 320, 32, 128, 128),
    ),
    ((832, 256, 160, 320, 32, 128, 128), (832, 384, 192, 384, 48, 128, 128)),
)


def _conv(in_channels: int, out_channels: int, size: int, stride: int = 1) -> nn.Sequential:
    """A convolution that keeps the image's size but for its stride, and ReLU in place."""
    conv = nn.Conv2d(in_channels, out_channels, size, stride, padding=size // 2)
    return nn.Sequential(conv, nn.ReLU(inplace=True))


class Inception(nn.Module):
    """Branches of 1x1, 3x3, 5x5 and a pool, side by side (figure 2b)."""

    def __init__(
        self, n: int, one: int, narrow3: int, three: int, narrow5: int, five: int, pool: int
    ) -> None:
        super().__init__()
        self.one = _conv(n, one, 1)
        self.three = nn.Sequential(_conv(n, narrow3, 1), _conv(narrow3, three, 3))
        self.five = nn.Sequential(_conv(n, narrow5, 1), _conv(narrow5, five, 5))
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, padding=1), _conv(n, pool, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pool(x)], 1)


class GoogLeNet(nn.Module):
    """Logits of images."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [
            _conv(3, 64, 7, stride=2),
            nn.MaxPool2d(3, 2, ceil_mode=True),
            nn.LocalResponseNorm(5),
            _conv(64, 64, 1),
            _conv(64, 192, 3),
            nn.LocalResponseNorm(5),
        ]
        for rows in _BLOCKS:
            layers += [nn.MaxPool2d(3, 2, ceil_mode=True), *(Inception(*row) for row in rows)]
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(1024, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.flatten(self.pool(self.features(x)), 1))


def googlenet(num_classes: int = 1000) -> GoogLeNet:
    """A GoogLeNet with random weights and no dropout, for images of 224 x 224."""
    return GoogLeNet(num_classes)


def example(batch: int = 2) -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Any]]:
    """The model with example arguments, as the command line takes it."""
    torch.manual_seed(0)
    return googlenet(), (torch.randn(batch, 3, 224, 224),), {}
