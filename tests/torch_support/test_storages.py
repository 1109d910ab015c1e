"""What crosses between devices has each of its bytes once, and arrives as it was."""

import copy
from collections.abc import Callable

import pytest
import torch
from placed import cpus, one_thread, step
from torch import Tensor, nn

import baechi
from baechi.runtime.executors.cuda_streams import room_of
from baechi.runtime.executors.graphed_tape import Statics
from baechi.torch_support.memory_meter import Meter
from baechi.torch_support.storages import crossings, cut_up, laid_out, once, spanned

BASE = torch.arange(24.0)
COMPLEX = torch.complex(BASE, BASE + 1)
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


class SideBySide(nn.Module):
    """Views of one tensor, each read by another operator that keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        made = self.first(x)
        views = made.t(), made.view(8, 4, 96), made.view(-1), made[:30], made
        return torch.stack([view.sin().sum() for view in views])


def _views() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Views(), (torch.randn(64, 32), torch.arange(16), torch.randn(2048))


def _side_by_side() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return SideBySide(), (torch.randn(32, 32),)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("make", [_views, _side_by_side])
def test_a_device_holds_of_a_view_what_the_clock_sends(
    make: Callable[[], tuple[nn.Module, tuple[Tensor, ...]]], training: bool
) -> None:
    model, args = make()
    traced = baechi.trace(model.train(training), args)
    graph = traced.graph(baechi.estimate(traced, "cpu"), training=training)
    cluster = cpus(2, "1GiB", baechi.Link(5_000, 10**12))
    for seed in range(2):
        placement = baechi.solve(graph, cluster, placer=baechi.RandomPlacer(seed))
        placed = baechi.apply(traced, placement, graph=graph, cluster=cluster, threads_per_device=1)
        seen, said = placed.measure(1), placed.schedule.peak_bytes
        placed.unplace()
        assert all(one >= two for one, two in zip(said, seen.peak_bytes, strict=True))


@pytest.mark.parametrize("make", [_views, _side_by_side])
def test_values_and_gradients_of_views_that_cross_together(
    make: Callable[[], tuple[nn.Module, tuple[Tensor, ...]]],
) -> None:
    model, args = make()
    with one_thread():
        wanted = step(copy.deepcopy(model), args, {})
        for seed in range(2):
            placed = baechi.place(
                copy.deepcopy(model),
                cpus(2, "1GiB"),
                example_args=args,
                placer=baechi.RandomPlacer(seed),
                costs="estimate",
                progress=False,
                threads_per_device=1,
            )
            with placed.metered():
                left = step(placed, args, {})
            placed.unplace()
            assert left.differs_from(wanted) == []


GROUPS = {  # tensors, and which of them cross together
    "one": ([BASE], [(0,)]),
    "a view and its transpose": ([BASE.view(4, 6), BASE.view(4, 6).t()], [(0, 1)]),
    "parts": ([BASE[:8], BASE[8:16], BASE[16:]], [(0,), (1,), (2,)]),
    "parts far apart": ([BASE[:3], BASE[1:4], BASE[20:]], [(0,), (1,), (2,)]),
    "parts that overlap": ([BASE[4:12], BASE[6:20]], [(0, 1)]),
    "others between": ([BASE[:8], torch.ones(3), BASE[2:]], [(0, 2), (1,)]),
    "other types": ([BASE, BASE.view(torch.int32)], [(0,), (1,)]),
    "conjugates": ([COMPLEX, COMPLEX.conj(), COMPLEX.flip(0)], [(0,), (1,), (2,)]),
    "conjugates together": ([COMPLEX.conj(), COMPLEX.conj()[2:]], [(0, 1)]),
    "nothing": ([BASE[:0], BASE[:0]], [(0,), (1,)]),
    "expanded": ([BASE[:1].expand(5), BASE[:1].expand(3, 7)], [(0, 1)]),
    "sparse": ([BASE.to_sparse(), BASE.to_sparse()], [(0,), (1,)]),
}


@pytest.mark.parametrize("name", GROUPS)
def test_views_cross_together_where_that_is_less(name: str) -> None:
    tensors, groups = GROUPS[name]
    found = crossings(dict(enumerate(tensors)))
    assert found == groups
    for members in found:
        views = [tensors[i] for i in members]
        span = spanned(views)
        there = cut_up(span.clone(), views) if len(views) > 1 else views
        for one, two in zip(there, views, strict=True):
            assert (one.shape, one.stride(), one.dtype) == (two.shape, two.stride(), two.dtype)
            assert torch.equal(one.to_dense(), two.to_dense())


def test_views_that_arrive_count_each_others_writes() -> None:
    one, two = cut_up(BASE.clone(), [BASE.view(4, 6), BASE.view(4, 6).t()])
    saved = (two * torch.ones((), requires_grad=True)).sum()
    one += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.backward()


def test_a_step_that_is_replayed_finds_room_and_views_where_they_were() -> None:
    statics, place = Statics(), torch.device("cpu")
    views = [BASE.view(4, 6), BASE.view(4, 6).t()]
    span = spanned(views)

    def land(statics: Statics | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        return room_of(span, views, place, "key", statics)

    first, again, eager = land(statics), land(statics), land(None)
    assert first[0] is again[0]
    assert all(one is two for one, two in zip(first[1], again[1], strict=True))
    assert all(statics.of(view) is view for view in first[1])
    assert eager[0] is not first[0]
    assert all(one is not two for one, two in zip(first[1], eager[1], strict=True))


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_arrives_from_another_gpu_lies_as_what_was_sent(name: str) -> None:
    tensor, _ = LAYOUTS[name]
    part = once(tensor)
    room, (there,) = room_of(part, [tensor], torch.device("cpu"), "key", None)
    room.copy_(part)
    assert torch.equal(there, tensor)
    assert room.stride() == part.clone().stride()
    for shape in ((24,), (4, 6)) if name == "turned" else ():
        assert torch.equal(there.t().view(shape), tensor.t().view(shape))
