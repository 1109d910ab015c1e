"""What crosses between devices has each of its bytes once, and arrives as it was."""

import pytest
import torch
from torch import Tensor, nn

import baechi
from baechi.metering import Meter
from baechi.overlaps import laid_out, once

BASE = torch.arange(24.0)
LAYOUTS = {  # a view, and how many elements of memory it shows
    "whole": (BASE, 24),
    "turned": (BASE.view(4, 6).t(), 24),
    "every other": (BASE[::2], 12),
    "empty": (BASE[:0].expand(3, 0), 0),
    "number": (BASE[3], 1),
    "expanded number": (BASE[3].expand(5), 1),
    "expanded row": (BASE[4:10].view(1, 6).expand(8, 6), 6),
    "expanded column of a matrix": (BASE.view(4, 6)[:, 2:3].expand(4, 9), 4),
    "windows": (BASE[2:].as_strided((5, 8), (3, 1), 2), 20),
    "expanded windows": (BASE.unfold(0, 8, 4).unsqueeze(1).expand(5, 7, 8), 24),
    "windows with room between": (BASE.as_strided((2, 3), (1, 10)), 6),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_element_crosses_once(name: str) -> None:
    tensor, count = LAYOUTS[name]
    part = once(tensor)
    assert part.numel() == count
    there = laid_out(part.clone(), part, tensor)
    assert there.shape == tensor.shape
    assert torch.equal(there, tensor)
    repeated = [dim for dim, step in enumerate(tensor.stride()) if step == 0 and tensor.numel()]
    assert all(there.stride(dim) == 0 for dim in repeated)


def test_a_copy_takes_as_much_as_is_shown() -> None:
    meter = Meter([0])
    expanded = torch.zeros(16, 1).expand(16, 1000)
    there = meter.copy(0, expanded)
    assert there.shape == expanded.shape
    assert meter.live_bytes == (64,)
    assert meter.moved_bytes == 64


class Views(nn.Module):
    """Indices that are expanded, and windows that overlap, each before who reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, index: Tensor, wave: Tensor) -> Tensor:
        rows = (index + 1).unsqueeze(0).expand(64, -1)
        picked = torch.gather(x * self.scale, 1, rows)
        windows = (wave * self.scale).unfold(0, 256, 16)
        return picked.sum() + (windows * 2).sum()


@pytest.mark.parametrize("training", [False, True])
def test_a_device_holds_of_a_view_what_the_clock_sends(training: bool) -> None:
    args = (torch.randn(64, 32), torch.arange(16), torch.randn(2048))
    traced = baechi.trace(Views().train(training), args)
    profile = baechi.profile(traced, "cpu", threads=1, progress=False, cache=False)
    graph = traced.graph(profile, training=training)
    rows = [baechi.Device(f"cpu:{i}", "1GiB", kind="cpu") for i in range(2)]
    cluster = baechi.Cluster.connected(rows, baechi.Link(5_000, 10**12))
    for seed in range(4):
        placement = baechi.solve(graph, cluster, placer=baechi.RandomPlacer(seed))
        placed = baechi.apply(traced, placement, graph=graph, cluster=cluster, threads_per_device=1)
        seen, said = placed.measure(1), placed.schedule.peak_bytes
        placed.unplace()
        assert all(one >= 0.97 * two for one, two in zip(said, seen.peak_bytes, strict=True))
