"""Measured costs: once per distinct operator, honest about time and about what is not there."""

import pytest
import torch
from torch import nn

import baechi
import zoo
from baechi.metering import Meter


def test_a_deep_model_is_measured_as_its_distinct_layers() -> None:
    deep = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(12)])
    traced = baechi.trace(deep, (torch.randn(4, 32, requires_grad=True),))
    profile = baechi.profile(traced, threads=1, progress=False)
    linear = [c for op, c in zip(traced.ops, profile.costs, strict=True) if "linear" in op.name]
    assert len(linear) == 12
    assert len(set(linear)) == 1


def test_heavier_operators_cost_more() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2048), nn.Linear(2048, 2048))
    traced = baechi.trace(model, (torch.randn(256, 64),))
    costs = baechi.profile(traced, threads=1, progress=False).costs
    small, _, large = [c for c in costs if c.parameter_bytes]
    assert large.forward_ns > 10 * small.forward_ns
    assert large.backward_ns > large.forward_ns


def test_a_profile_of_a_branchy_model_covers_every_op() -> None:
    model, args, kwargs = zoo.MODELS["awkward"]()
    traced = baechi.trace(model, args, kwargs)
    profile = baechi.profile(traced, threads=1, progress=False)
    assert len(profile.costs) == len(traced.ops)
    assert profile.traced_digest == traced.digest
    assert profile.kind == "cpu"
    for op, cost in zip(traced.ops, profile.costs, strict=True):
        assert op.differentiable or cost.backward_ns == 0
        assert cost.parameter_bytes == op.trained_bytes + op.frozen_bytes


def test_a_model_without_weights_is_measured_too() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(100, 16), nn.Linear(16, 16))
        x = torch.zeros(2, 5, dtype=torch.long)
    profile = baechi.profile(baechi.trace(model, (x,)), threads=1, progress=False)
    assert sum(cost.forward_ns for cost in profile.costs) > 0


def test_profiling_leaves_the_model_and_the_thread_count_alone() -> None:
    model, args, kwargs = zoo.MODELS["resnet_train"]()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    threads = torch.get_num_threads()
    baechi.profile(baechi.trace(model, args, kwargs), threads=1, progress=False)
    assert torch.get_num_threads() == threads
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("threads", [0, -1, 1.5])
def test_a_silly_thread_count_is_refused(threads: float) -> None:
    traced = baechi.trace(nn.Linear(2, 2), (torch.randn(1, 2),))
    with pytest.raises(baechi.InputError, match="threads"):
        baechi.profile(traced, threads=threads, progress=False)


def test_a_meter_counts_what_is_made_until_it_is_freed() -> None:
    meter = Meter([100, 0])
    with meter.counting(1):
        one = torch.ones(256)
        view = one.view(16, 16)
        two = one * 2
        assert meter.live_bytes == (100, 2048)
        del one, view
        assert meter.live_bytes == (100, 1024)
        del two
    assert meter.live_bytes == (100, 0)
    assert meter.peak_bytes == (100, 2048)


def test_a_meter_counts_a_copy_for_who_gets_it_as_long_as_a_view_of_it_lives() -> None:
    meter = Meter([0, 0])
    tensor = torch.ones(256)
    with meter.counting(0):
        copy = meter.copy(1, tensor)
        view = copy[:3]
        del copy
    assert (meter.live_bytes, meter.moved_bytes) == ((0, 1024), 1024)
    del view
    assert meter.live_bytes == (0, 0)
    mine = meter.copy(1, tensor[:4], moved=False)  # without the base of the view
    assert (meter.live_bytes, meter.moved_bytes) == ((0, 16), 1024)
    del mine
    assert meter.live_bytes == (0, 0)


def test_a_meter_follows_a_storage_that_grows_and_counts_no_stranger() -> None:
    meter = Meter([0])
    stranger = torch.ones(4096)
    with meter.counting(0):
        grown = torch.ones(16)
        grown.resize_(64)
        assert meter.live_bytes == (256,)
        stranger.add_(1)
        view = stranger[2:]
        assert meter.live_bytes == (256,)
    del grown, view
    assert meter.live_bytes == (0,)
