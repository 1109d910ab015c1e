"""NASNet-A (4 @ 1056), the mobile one: cells in which up to ten operators may run side by side.

Zoph, Vasudevan, Shlens, Le: "Learning Transferable Architectures for Scalable Image Recognition",
CVPR 2018, https://arxiv.org/abs/1707.07012. Figure 4 has the cells, appendix A.2 how they are
stacked: two reduction cells as a stem, then three times four normal cells with reduction cells
between them. Plain torch, without the auxiliary head and without drop-path; 5,289,978 parameters at
1,000 classes, as many as the authors' network.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=0.001)


def _adapt(in_channels: int, out_channels: int) -> nn.Sequential:
    """ReLU, a 1x1 convolution and batch normalization."""
    conv = nn.Conv2d(in_channels, out_channels, 1, bias=False)
    return nn.Sequential(nn.ReLU(), conv, _norm(out_channels))


def _separable(in_channels: int, out_channels: int, size: int, stride: int = 1) -> nn.Sequential:
    """Two depthwise separable convolutions (appendix A.4); the first has the stride."""
    layers: list[nn.Module] = []
    for n, step in ((in_channels, stride), (out_channels, 1)):
        layers += [
            nn.ReLU(),
            nn.Conv2d(n, n, size, step, size // 2, groups=n, bias=False),
            nn.Conv2d(n, out_channels, 1, bias=False),
            _norm(out_channels),
        ]
    return nn.Sequential(*layers)


class Halved(nn.Module):
    """The image at half its size, by two paths of which one sees every other pixel."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.even = nn.Conv2d(in_channels, out_channels // 2, 1, stride=2, bias=False)
        self.odd = nn.Conv2d(in_channels, out_channels // 2, 1, stride=2, bias=False)
        self.norm = _norm(out_channels)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(x)
        shifted = functional.pad(x, (0, 1, 0, 1))[:, :, 1:, 1:]
        return self.norm(torch.cat([self.even(x), self.odd(shifted)], 1))


def _average(x: Tensor, stride: int = 1) -> Tensor:
    return functional.avg_pool2d(x, 3, stride, padding=1, count_include_pad=False)


def _largest(x: Tensor) -> Tensor:
    return functional.max_pool2d(x, 3, stride=2, padding=1)


class NormalCell(nn.Module):
    """Keeps the image's size (figure 4, left); gives six times `width` channels."""

    def __init__(self, previous: nn.Module, in_channels: int, width: int) -> None:
        super().__init__()
        self.previous = previous
        self.current = _adapt(in_channels, width)
        self.five = nn.ModuleList([_separable(width, width, 5) for _ in range(2)])
        self.three = nn.ModuleList([_separable(width, width, 3) for _ in range(3)])

    def forward(self, before: Tensor, x: Tensor) -> Tensor:
        before, x = self.previous(before), self.current(x)
        branches = [
            before,
            self.five[0](x) + self.three[0](before),
            self.five[1](before) + self.three[1](before),
            _average(x) + before,
            _average(before) + _average(before),
            self.three[2](x) + x,
        ]
        return torch.cat(branches, 1)


class ReductionCell(nn.Module):
    """Halves the image (figure 4, right); gives four times `width` channels."""

    def __init__(self, previous: nn.Module, n_previous: int, in_channels: int, width: int) -> None:
        super().__init__()
        self.previous = previous
        self.current = _adapt(in_channels, width)
        self.five = _separable(width, width, 5, stride=2)
        self.seven = nn.ModuleList([_separable(n_previous, width, 7, stride=2) for _ in range(2)])
        self.five_before = _separable(n_previous, width, 5, stride=2)
        self.three = _separable(width, width, 3)

    def forward(self, before: Tensor, x: Tensor) -> Tensor:
        before, x = self.previous(before), self.current(x)
        first = self.five(x) + self.seven[0](before)
        second = _largest(x) + self.seven[1](before)
        third = _average(x, stride=2) + self.five_before(before)
        branches = [second, third, _average(first) + second, self.three(first) + _largest(x)]
        return torch.cat(branches, 1)


class NASNetA(nn.Module):
    """Logits of images."""

    def __init__(self, num_classes: int, width: int, repeats: int, stem: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, stem, 3, stride=2, bias=False), _norm(stem))
        cells: list[nn.Module] = [
            ReductionCell(nn.Identity(), stem, stem, width // 4),
            ReductionCell(Halved(stem, width // 2), width // 2, width, width // 2),
        ]
        before, channels = width, 2 * width
        for stage in range(3):
            own = width << stage
            if stage:
                cells.append(ReductionCell(_adapt(before, own), own, channels, own))
                before, channels = channels, 4 * own
            for index in range(repeats):
                previous = Halved(before, own) if index == 0 else _adapt(before, own)
                cells.append(NormalCell(previous, channels, own))
                before, channels = channels, 6 * own
        self.cells = nn.ModuleList(cells)
        self.head = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        before = x = self.stem(x)
        for cell in self.cells:
            before, x = x, cell(before, x)
        return self.head(functional.relu(x).mean((2, 3)))


def nasnet_a(num_classes: int = 1000, width: int = 44, repeats: int = 4) -> NASNetA:
    """A NASNet-A with random weights and no dropout, for images of 224 x 224.

    Args:
        num_classes: Of the head.
        width: Channels of the first cells; the last has 24 times as many, 1,056 by default.
        repeats: Normal cells between two reductions.
    """
    return NASNetA(num_classes, width, repeats, stem=32)


def example(batch: int = 2) -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Any]]:
    """The model with example arguments, as the command line takes it."""
    torch.manual_seed(0)
    return nasnet_a(), (torch.randn(batch, 3, 224, 224),), {}
