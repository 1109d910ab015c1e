"""ResNet: residual blocks with batch normalization, a chain whose skip edges cross every cut.

He, Zhang, Ren, Sun: "Deep Residual Learning for Image Recognition", CVPR 2016,
https://arxiv.org/abs/1512.03385, table 1. The stride of a bottleneck is on its 3x3 convolution, as
is now usual. Plain torch; ResNet-50 has 25,557,032 parameters at 1,000 classes.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


def _conv(in_channels: int, out_channels: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, size, stride, padding=size // 2, bias=False)


class Residual(nn.Module):
    """`relu(body(x) + shortcut(x))`, the addition and the ReLU in place."""

    def __init__(self, body: nn.Sequential, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.body = body
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != channels:
            projection = _conv(in_channels, channels, 1, stride)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(channels))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(x)
        out += self.shortcut(x)
        return self.relu(out)


def basic_block(in_channels: int, width: int, stride: int) -> Residual:
    """Two 3x3 convolutions (figure 5, left)."""
    body = nn.Sequential(
        _conv(in_channels, width, 3, stride),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        _conv(width, width, 3),
        nn.BatchNorm2d(width),
    )
    return Residual(body, in_channels, width, stride)


def bottleneck(in_channels: int, width: int, stride: int) -> Residual:
    """1x1, 3x3, 1x1 with four times the width at its end (figure 5, right)."""
    body = nn.Sequential(
        _conv(in_channels, width, 1),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        _conv(width, width, 3, stride),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        _conv(width, 4 * width, 1),
        nn.BatchNorm2d(4 * width),
    )
    return Residual(body, in_channels, 4 * width, stride)


class ResNet(nn.Module):
    """Logits of images.

    Args:
        bottlenecks: Whether blocks are bottlenecks; else basic blocks.
        depths: Blocks per stage.
        num_classes: Width of the last layer.
        width: Channels of the first stage; 64 in the paper.
    """

    def __init__(
        self, *, bottlenecks: bool, depths: Sequence[int], num_classes: int, width: int = 64
    ) -> None:
        super().__init__()
        block, expansion = (bottleneck, 4) if bottlenecks else (basic_block, 1)
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        stages = []
        channels = width
        for stage, depth in enumerate(depths):
            blocks = []
            for index in range(depth):
                stride = 2 if stage > 0 and index == 0 else 1
                blocks.append(block(channels, width * 2**stage, stride))
                channels = expansion * width * 2**stage
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.stages(self.stem(x)))
        return self.head(torch.flatten(x, 1))


def resnet18(num_classes: int = 1000, width: int = 64) -> ResNet:
    """ResNet-18 with random weights, for images of 224 x 224."""
    depths = (2, 2, 2, 2)
    return ResNet(bottlenecks=False, depths=depths, num_classes=num_classes, width=width)


def resnet50(num_classes: int = 1000, width: int = 64) -> ResNet:
    """ResNet-50 with random weights, for images of 224 x 224."""
    depths = (3, 4, 6, 3)
    return ResNet(bottlenecks=True, depths=depths, num_classes=num_classes, width=width)


def example(batch: int = 2) -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Any]]:
    """ResNet-50 with example arguments, as the command line takes it."""
    torch.manual_seed(0)
    return resnet50(), (torch.randn(batch, 3, 224, 224),), {}
