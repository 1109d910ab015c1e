"""Inception-v3: the branchy image model, up to four parallel branches in every block.

Szegedy, Vanhoucke, Ioffe, Shlens, Wojna: "Rethinking the Inception Architecture for Computer
Vision", CVPR 2016, https://arxiv.org/abs/1512.00567. Table 1 has the blocks; their inner widths are
those of the authors' released network. Plain torch; 23,834,568 parameters without the auxiliary
head at 1,000 classes.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class BasicConv2d(nn.Module):
    """A convolution without bias, batch normalization, and ReLU in place."""

    def __init__(self, in_channels: int, out_channels: int, **geometry: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, bias=False, **geometry)
        self.norm = nn.BatchNorm2d(out_channels, eps=0.001)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.norm(self.conv(x)))


def _row(in_channels: int, out_channels: int, length: int) -> BasicConv2d:
    """A 1 x `length` convolution that keeps the image's size."""
    kernel_size, padding = (1, length), (0, length // 2)
    return BasicConv2d(in_channels, out_channels, kernel_size=kernel_size, padding=padding)


def _column(in_channels: int, out_channels: int, length: int) -> BasicConv2d:
    """A `length` x 1 convolution that keeps the image's size."""
    kernel_size, padding = (length, 1), (length // 2, 0)
    return BasicConv2d(in_channels, out_channels, kernel_size=kernel_size, padding=padding)


def _average(x: Tensor) -> Tensor:
    return functional.avg_pool2d(x, kernel_size=3, stride=1, padding=1)


class InceptionA(nn.Module):
    """Branches of 1x1, 5x5, twice 3x3 and a pool (figure 5), on 35x35 images."""

    def __init__(self, in_channels: int, pool_channels: int) -> None:
        super().__init__()
        self.one = BasicConv2d(in_channels, 64, kernel_size=1)
        self.five = nn.Sequential(
            BasicConv2d(in_channels, 48, kernel_size=1),
            BasicConv2d(48, 64, kernel_size=5, padding=2),
        )
        self.three = nn.Sequential(
            BasicConv2d(in_channels, 64, kernel_size=1),
            BasicConv2d(64, 96, kernel_size=3, padding=1),
            BasicConv2d(96, 96, kernel_size=3, padding=1),
        )
        self.pool = BasicConv2d(in_channels, pool_channels, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        branches = [self.one(x), self.five(x), self.three(x), self.pool(_average(x))]
        return torch.cat(branches, 1)


class InceptionB(nn.Module):
    """Halves the image, 35x35 to 17x17 (figure 10)."""

    def __init__(self, in_channels: int) -> None:
        super().__init__()
        self.three = BasicConv2d(in_channels, 384, kernel_size=3, stride=2)
        self.twice = nn.Sequential(
            BasicConv2d(in_channels, 64, kernel_size=1),
            BasicConv2d(64, 96, kernel_size=3, padding=1),
            BasicConv2d(96, 96, kernel_size=3, stride=2),
        )

    def forward(self, x: Tensor) -> Tensor:
        pool = functional.max_pool2d(x, kernel_size=3, stride=2)
        return torch.cat([self.three(x), self.twice(x), pool], 1)


class InceptionC(nn.Module):
    """7x7 convolutions as rows and columns (figure 6), on 17x17 images."""

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__()
        self.one = BasicConv2d(in_channels, 192, kernel_size=1)
        self.seven = nn.Sequential(
            BasicConv2d(in_channels, channels, kernel_size=1),
            _row(channels, channels, 7),
            _column(channels, 192, 7),
        )
        self.twice = nn.Sequential(
            BasicConv2d(in_channels, channels, kernel_size=1),
            _column(channels, channels, 7),
            _row(channels, channels, 7),
            _column(channels, channels, 7),
            _row(channels, 192, 7),
        )
        self.pool = BasicConv2d(in_channels, 192, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        branches = [self.one(x), self.seven(x), self.twice(x), self.pool(_average(x))]
        return torch.cat(branches, 1)


class InceptionD(nn.Module):
    """Halves the image, 17x17 to 8x8."""

    def __init__(self, in_channels: int) -> None:
        super().__init__()
        self.three = nn.Sequential(
            BasicConv2d(in_channels, 192, kernel_size=1),
            BasicConv2d(192, 320, kernel_size=3, stride=2),
        )
        self.seven = nn.Sequential(
            BasicConv2d(in_channels, 192, kernel_size=1),
            _row(192, 192, 7),
            _column(192, 192, 7),
            BasicConv2d(192, 192, kernel_size=3, stride=2),
        )

    def forward(self, x: Tensor) -> Tensor:
        pool = functional.max_pool2d(x, kernel_size=3, stride=2)
        return torch.cat([self.three(x), self.seven(x), pool], 1)


class InceptionE(nn.Module):
    """3x3 convolutions split into a row beside a column (figure 7), on 8x8 images."""

    def __init__(self, in_channels: int) -> None:
        super().__init__()
        self.one = BasicConv2d(in_channels, 320, kernel_size=1)
        self.three = BasicConv2d(in_channels, 384, kernel_size=1)
        self.three_row = _row(384, 384, 3)
        self.three_column = _column(384, 384, 3)
        self.twice = nn.Sequential(
            BasicConv2d(in_channels, 448, kernel_size=1),
            BasicConv2d(448, 384, kernel_size=3, padding=1),
        )
        self.twice_row = _row(384, 384, 3)
        self.twice_column = _column(384, 384, 3)
        self.pool = BasicConv2d(in_channels, 192, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        three, twice = self.three(x), self.twice(x)
        branches = [
            self.one(x),
            self.three_row(three),
            self.three_column(three),
            self.twice_row(twice),
            self.twice_column(twice),
            self.pool(_average(x)),
        ]
        return torch.cat(branches, 1)


class AuxiliaryHead(nn.Module):
    """A second classifier on the 17x17 images, for training only (section 4)."""

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__()
        self.reduce = BasicConv2d(in_channels, 128, kernel_size=1)
        self.conv = BasicConv2d(128, 768, kernel_size=5)
        self.head = nn.Linear(768, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.avg_pool2d(x, kernel_size=5, stride=3)
        x = self.conv(self.reduce(x))
        return self.head(torch.flatten(functional.adaptive_avg_pool2d(x, 1), 1))


class InceptionV3(nn.Module):
    """Logits of images; with the auxiliary head and in training mode `(logits, auxiliary)`."""

    def __init__(self, num_classes: int, *, aux: bool, dropout: float) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            BasicConv2d(3, 32, kernel_size=3, stride=2),
            BasicConv2d(32, 32, kernel_size=3),
            BasicConv2d(32, 64, kernel_size=3, padding=1),
            nn.MaxPool2d(kernel_size=3, stride=2),
            BasicConv2d(64, 80, kernel_size=1),
            BasicConv2d(80, 192, kernel_size=3),
            nn.MaxPool2d(kernel_size=3, stride=2),
        )
        self.blocks35 = nn.Sequential(InceptionA(192, 32), InceptionA(256, 64), InceptionA(288, 64))
        self.blocks17 = nn.Sequential(
            InceptionB(288),
            InceptionC(768, 128),
            InceptionC(768, 160),
            InceptionC(768, 160),
            InceptionC(768, 192),
        )
        self.auxiliary = AuxiliaryHead(768, num_classes) if aux else None
        self.blocks8 = nn.Sequential(InceptionD(768), InceptionE(1280), InceptionE(2048))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(2048, num_classes)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = self.blocks17(self.blocks35(self.stem(x)))
        auxiliary = None
        if self.auxiliary is not None and self.training:
            auxiliary = self.auxiliary(x)
        x = functional.adaptive_avg_pool2d(self.blocks8(x), 1)
        logits = self.head(torch.flatten(self.dropout(x), 1))
        return logits if auxiliary is None else (logits, auxiliary)


def inception_v3(
    num_classes: int = 1000, aux: bool = False, *, dropout: float = 0.0
) -> InceptionV3:
    """An Inception-v3 with random weights, for images of 299 x 299 (75 x 75 at least).

    Args:
        num_classes: Width of the last layer.
        aux: Whether it has the auxiliary head, which in training takes images of 299 x 299 alone.
        dropout: Rate before the last layer. 0 by default, so that two runs can be compared; a
            usual recipe for training is 0.5.
    """
    return InceptionV3(num_classes, aux=aux, dropout=dropout)


def example(batch: int = 2) -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Any]]:
    """The model with example arguments, as the command line takes it."""
    torch.manual_seed(0)
    return inception_v3(), (torch.randn(batch, 3, 299, 299),), {}
