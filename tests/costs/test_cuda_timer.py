"""Timing on CUDA; run with `python3 -m pytest -m gpu` where there is a GPU."""

from functools import partial

import emulated
import pytest
import torch
from fake_cuda import shared_with
from torch import nn

import baechi
from baechi.costs import timers
from baechi.costs.timers import CudaTimer, Reading

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)


def timed(run) -> Reading:
    (reading,) = CudaTimer(DEVICE).time([lambda n: [run] * n])
    return reading


def test_a_launch_is_in_no_reading() -> None:
    """A short kernel takes some microseconds; launching it from Python takes more."""
    x = torch.ones(16, device=DEVICE)
    assert 0 < timed(lambda: x + 1).ns < 6_000


def test_more_work_takes_longer() -> None:
    small, large = (torch.randn(n, n, device=DEVICE) for n in (1024, 8192))
    assert (
        timed(partial(torch.mm, large, large)).ns > 20 * timed(partial(torch.mm, small, small)).ns
    )


def test_an_op_that_makes_the_host_wait_is_clocked() -> None:
    x = torch.ones(1000, device=DEVICE)
    assert timed(x.nonzero).ns > 0
    assert torch.cuda.get_sync_debug_mode() == 0


def test_a_run_that_cannot_be_captured_is_repeated() -> None:
    events = torch.cuda.Event(enable_timing=True)
    x = torch.ones(16, device=DEVICE)

    def run() -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("not in a graph")
        events.record()
        return x + 1

    assert timed(run).ns > 0
    assert float((x + 1).sum()) == 32


def test_graphs_of_earlier_readings_give_their_memory_back(monkeypatch) -> None:
    """The pool of a graph that is gone is free only when the cache is emptied."""
    monkeypatch.setattr(timers, "_UNUSED_SHARE", 0.0)
    x = torch.ones(2**19, device=DEVICE)
    timer = CudaTimer(DEVICE)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for _ in range(4):
        timer.time([lambda n: [partial(torch.add, x, 1)] * n])
    assert torch.cuda.memory_reserved() - before < 2 * 20 * x.nbytes  # of one graph, not of four


def test_no_graph_holds_more_results_than_need_be(monkeypatch) -> None:
    monkeypatch.setattr(timers, "_HELD_BYTES", 2**23)
    x = torch.ones(2**19, device=DEVICE)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with emulated.on_the_clock():  # on the host's it is long enough to be read without a graph
        CudaTimer(DEVICE).time([lambda n: [partial(torch.add, x, 1)] * n])
    assert torch.cuda.max_memory_allocated() - before <= 2**23 + 4 * x.nbytes


def test_what_no_graph_repeats_says_so_in_a_profile(monkeypatch, capsys) -> None:
    def refused(*_: object) -> None:
        raise RuntimeError("operation not permitted\nwhen stream is capturing")

    monkeypatch.setattr(timers.CudaRecorder, "record", refused)
    traced = baechi.trace(nn.Tanh().to(DEVICE), (torch.ones(8, device=DEVICE),))
    profile = baechi.profile(traced, DEVICE, cache=False)
    assert "no CUDA graph repeats it (operation not permitted)" in profile.costs[-1].remark
    assert "1 of 1 distinct operators could not be repeated" in capsys.readouterr().err


def test_nothing_is_measured_where_every_launch_is_waited_for(monkeypatch) -> None:
    traced = baechi.trace(nn.Tanh().to(DEVICE), (torch.ones(8, device=DEVICE),))
    with (
        torch.profiler.profile(acc_events=True),
        pytest.raises(baechi.InputError, match="profiler of torch"),
    ):
        baechi.profile(traced, DEVICE, cache=False, progress=False)
    for name in ("CUDA_LAUNCH_BLOCKING", "CUDA_INJECTION64_PATH"):
        monkeypatch.setenv(name, "1")
        with pytest.raises(baechi.InputError, match=f"{name} is set"):
            baechi.profile(traced, DEVICE, cache=False, progress=False)
        monkeypatch.setenv(name, "0")
    assert baechi.profile(traced, DEVICE, cache=False, progress=False).costs[-1].forward_ns >= 0


def test_another_process_on_the_gpu_is_noted_and_its_share_not_kept(monkeypatch, tmp_path) -> None:
    traced = baechi.trace(nn.Tanh().to(DEVICE), (torch.ones(8, device=DEVICE),))
    for processes, noted in ((2, True), (1, False)):
        shared_with(monkeypatch, processes)
        profile = baechi.profile(traced, DEVICE, cache=tmp_path / "costs", progress=False)
        assert ("another process used the GPU" in profile.costs[-1].remark) == noted


def test_a_profile_has_times_and_the_allocators_workspace() -> None:
    model = nn.Sequential(nn.Conv2d(3, 64, 7), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10))
    model(torch.randn(2, 3, 64, 64))
    x = torch.randn(2, 3, 64, 64, device=DEVICE)
    traced = baechi.trace(model.to(DEVICE), (x,))
    profile = baechi.profile(traced, DEVICE, cache=False, progress=False)
    assert profile.kind == torch.cuda.get_device_name(DEVICE)
    for op, cost in zip(traced.ops, profile.costs, strict=True):
        assert op.name.startswith("input:") or "flatten" in op.name or cost.forward_ns > 0
        assert not op.differentiable or cost.backward_workspace_bytes >= 0


@emulated.alone
def test_lanes_that_share_what_they_need_take_each_other_s_time() -> None:
    """Kernels of 50 us: side by side on free lanes; one after the other where one queue has all."""
    x, queue = torch.ones(16, device=DEVICE), torch.cuda.Stream(DEVICE)

    def free() -> torch.Tensor:
        return x + 1

    def queued() -> torch.Tensor:
        here = torch.cuda.current_stream(DEVICE)
        queue.wait_stream(here)
        with torch.cuda.stream(queue):
            y = x + 1
        here.wait_stream(queue)
        return y

    for kernel_ns in (50_000, 5_000):  # measured one by one, and as graphs of many
        with emulated.settings(CLOCK=1, aten__add=kernel_ns):
            for run, takes in ((free, 1), (queued, 3)):
                (one,) = CudaTimer(DEVICE).time([lambda n, run=run: [run] * n])
                (three,) = CudaTimer(DEVICE, 3).time([lambda n, run=run: [run] * n])
                assert one.ns == pytest.approx(kernel_ns, rel=0.05)
                assert three.ns == pytest.approx(takes * kernel_ns, rel=0.05)


@emulated.alone
def test_operators_on_lanes_wait_for_no_other_lane() -> None:
    """Nothing is shared on the virtual clock, so each takes on three lanes what it takes on one."""
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).to(DEVICE), torch.ones(2, 8, device=DEVICE)
    traced = baechi.trace(model, (x,))
    with emulated.settings(CLOCK=1, KERNEL_NS=20_000):
        one, three = (
            baechi.profile(traced, DEVICE, cache=False, progress=False, lanes=lanes)
            for lanes in (1, 3)
        )
    assert three.kind == f"{one.kind}, 3 lanes"
    for alone, beside in zip(one.costs, three.costs, strict=True):
        assert beside.forward_ns == pytest.approx(alone.forward_ns, rel=0.01)
        assert beside.backward_ns == pytest.approx(alone.backward_ns, rel=0.01)
    assert max(cost.backward_ns for cost in one.costs) >= 40_000  # gradients of input and weight
