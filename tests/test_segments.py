"""A placement is cut where a remote input arrives or an output must leave early, nowhere else."""

from collections.abc import Sequence
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import baechi
import zoo
from baechi.runtime.segments import Segment, backward_order, cut


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.right = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.left(x) + self.right(y)


@cache
def traced_of(name: str) -> baechi.Traced:
    if name == "two towers":
        return baechi.trace(TwoTowers(), (torch.randn(2, 4), torch.randn(2, 4)))
    model, args, kwargs = zoo.MODELS[name]()
    return baechi.trace(model, args, kwargs)


def names(segment: Segment) -> list[str]:
    return [node.name for node in segment.nodes]


def test_one_device_is_one_segment() -> None:
    traced = traced_of("gpt2")
    n = len(traced.ops)
    (segment,) = cut(traced, [0] * n, range(n))
    assert segment.ops == tuple(range(n))
    assert segment.waits == ()


def test_towers_are_one_segment_each_and_the_join_is_another() -> None:
    traced = traced_of("two towers")
    right = [i for i, op in enumerate(traced.ops) if "right" in op.name or "x1" in op.name]
    devices = [1 if i in right else 0 for i in range(len(traced.ops))]
    segments = cut(traced, devices, range(len(traced.ops)))
    assert [segment.device for segment in segments] == [1, 0, 0]
    assert names(segments[2]) == ["add"]
    assert segments[2].waits == (0,)
    assert segments[0].waits == segments[1].waits == ()


def check(traced: baechi.Traced, devices: Sequence[int], order: Sequence[int]) -> None:
    """Every op once, on its device, after what it reads; every wait is for an earlier segment."""
    segments = cut(traced, devices, order)
    assert sorted(op for segment in segments for op in segment.ops) == list(range(len(traced.ops)))
    home = {op: segment.index for segment in segments for op in segment.ops}
    for segment in segments:
        assert {devices[op] for op in segment.ops} == {segment.device}
        assert all(wait < segment.index for wait in segment.waits)
        assert all(source < segment.index for _, source in segment.sources)
    for tensor in traced.tensors:
        for consumer in tensor.consumers:
            source, reader = home[tensor.producer], home[consumer]
            assert source <= reader
            if devices[tensor.producer] != devices[consumer]:
                # Its own wait, or one of an earlier segment on its device, covers the source.
                waited = {
                    wait
                    for segment in segments[: reader + 1]
                    if segment.device == devices[consumer]
                    for wait in segment.waits
                }
                assert source in waited
    order_back = backward_order(segments, [-segment.index for segment in segments])
    place = {segment: i for i, segment in enumerate(order_back)}
    assert sorted(order_back) == list(range(len(segments)))
    for segment in segments:
        for _, source in segment.sources:
            assert source == segment.index or place[source] > place[segment.index]


@pytest.mark.parametrize("name", ["gpt2", "t5", "awkward", "inception"])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_random_placements_are_cut_soundly(name: str, data: st.DataObject) -> None:
    traced = traced_of(name)
    n = data.draw(st.integers(1, 4))
    seed = data.draw(st.randoms(use_true_random=False))
    of_group: dict[str, int] = {}
    devices = [
        of_group.setdefault(op.group, seed.randrange(n)) if op.group else seed.randrange(n)
        for op in traced.ops
    ]
    check(traced, devices, range(len(traced.ops)))


def test_random_segments_wait_for_each_other_in_launch_order() -> None:
    model = nn.ModuleDict({"a": nn.Dropout(0.5), "b": nn.Dropout(0.5)})

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drops = model

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.drops["a"](x), self.drops["b"](y)

    traced = baechi.trace(Model(), (torch.randn(2), torch.randn(2)))
    devices = [0 if "x0" in op.name or op.nodes[0] == "dropout" else 1 for op in traced.ops]
    segments = cut(traced, devices, range(len(traced.ops)))
    drawing = [segment for segment in segments if segment.random]
    assert len(drawing) == 2
    assert drawing[0].index in drawing[1].waits
