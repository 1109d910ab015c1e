"""Lanes of a GPU, on the CPU: no kernel and no allocator comes before a wait that it needs."""

import copy
import gc
import itertools
import threading
import weakref
from typing import Any

import pytest
import torch
import zoo
from fake_cuda import Gpu, Stream, sanitized
from placed import again_at_random, at_random
from recording import CpuRecorder
from torch import nn

import baechi
from baechi.runtime.autograd.binding import bind
from baechi.runtime.autograd.tape import TapeCode
from baechi.runtime.executors import cuda_streams
from baechi.runtime.executors.cuda_graphs import WARM_UP, Graphs
from baechi.runtime.executors.cuda_streams import CudaExecutor
from baechi.runtime.executors.held_storages import HeldStorages
from baechi.torch_support import streams

CASES = [
    *(
        (name, seed, name == "slice_assigned")
        for name, seed in (("towers", 0), ("slice_assigned", 1))
    ),
    *(
        pytest.param(name, seed, graphs, marks=pytest.mark.slow)
        for name in ("towers", "tied", "buffers", "in_place", "nested_outputs", "gpt2")
        for seed in (1, 2)
        for graphs in (False, True)
    ),
]


class Chains(nn.Module):
    """Chains side by side of operators of which autograd saves nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        ends = []
        for number in range(3):
            y = x + number
            for _ in range(5):
                y = y.neg()
            ends.append(y)
        return torch.stack(ends).sum(0)


def on_streams(placed: baechi.PlacedModule, graphs: bool) -> None:
    """Let a placed module run as on lanes of one GPU."""
    executable = placed._current
    program = executable._compiled(copy_lanes=True)
    bound = bind(executable.module, executable._structure, program, executable.places)
    recorded = None
    if graphs:
        recorded = Graphs(
            executable.module,
            program,
            bound,
            executable.places,
            recorder=lambda _: CpuRecorder(lambda: False, []),
        )
    executable.close()
    gpus: Any = [Gpu() for _ in executable.places]
    executable.program = program
    executable._executor = CudaExecutor(program, bound, gpus, recorded)


def train(module: Any, args: Any, kwargs: Any, steps: int) -> list[torch.Tensor]:
    """Parameters after some steps."""
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        given, named = copy.deepcopy((args, kwargs))
        leaves = torch.utils._pytree.tree_leaves(module(*given, **named))
        roots = [t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad]
        torch.stack([t.float().square().mean() for t in roots]).sum().backward()
        optimizer.step()
    gc.collect()
    return [parameter.detach().clone() for parameter in module.parameters()]


@pytest.mark.parametrize(("name", "seed", "graphs"), CASES)
def test_lanes_wait_for_what_they_use(
    name: str, seed: int, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, args, kwargs = {**zoo.MODELS, **zoo.AWKWARD}[name]()
    reference = copy.deepcopy(model)
    placed = at_random(model, args, kwargs, seed=seed)
    with sanitized(monkeypatch) as sanitizer:
        on_streams(placed, graphs)
        actual = train(placed, args, kwargs, WARM_UP + 3 if graphs else 2)
    assert not sanitizer.found
    expected = train(reference, args, kwargs, WARM_UP + 3 if graphs else 2)
    for one, other in zip(expected, actual, strict=True):
        torch.testing.assert_close(other, one)


@pytest.mark.parametrize(("devices", "graphs"), [(3, False), (1, True), (3, True)])
@pytest.mark.parametrize("training", [False, True])
def test_calls_on_streams_that_know_nothing_of_each_other(
    devices: int, graphs: bool, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They share lanes, and what CUDA graphs leave in place."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    x = torch.ones(2, 8)
    placed = again_at_random(baechi.trace(model, (x,)), seed=0, devices=devices)
    kept = []
    with sanitized(monkeypatch) as sanitizer:
        on_streams(placed, graphs)
        streams = [Stream(Gpu()), Stream(Gpu())]
        for number in range(WARM_UP + 4):
            with torch.cuda.stream(streams[number % 2]), torch.set_grad_enabled(training):
                kept.append(placed(x))
                if training:
                    kept += torch.autograd.grad(kept[-1].sum(), list(placed.parameters()))
    assert not sanitizer.found


def found_in_two_steps(traced: baechi.Traced, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    placed = again_at_random(traced, seed=6, devices=3)
    with sanitized(monkeypatch) as sanitizer:
        on_streams(placed, graphs=False)
        train(placed, (torch.ones(2, 16),), {}, 2)
    return sanitizer.found


@pytest.mark.parametrize(
    ("owner", "name", "complaint"),
    [
        (Stream, "wait_event", "may be writing"),  # no lane waits for another
        (cuda_streams, "join", "may be writing"),  # nobody waits at the ends of a phase
        (HeldStorages, "add", "takes memory"),  # what crosses lanes is let go of with its last use
    ],
)
def test_what_is_left_out_is_found(
    owner: Any, name: str, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    traced = baechi.trace(Chains(), (torch.ones(2, 16),))
    assert not found_in_two_steps(traced, monkeypatch)
    monkeypatch.setattr(owner, name, lambda *_: None)
    assert any(complaint in text for text in found_in_two_steps(traced, monkeypatch))


@pytest.mark.parametrize("graphs", [False, True])
def test_calls_from_one_stream_after_another_wait_for_what_is_still_read(
    graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results of the last call may still be copied on its stream, from memory of the lanes."""
    torch.manual_seed(0)
    model, x = Chains(), torch.randn(2, 16)
    with torch.no_grad():
        expected = model(x)
    placed = at_random(model, (x,), seed=6)
    with sanitized(monkeypatch) as sanitizer, torch.no_grad():
        on_streams(placed, graphs)
        results = []
        for _ in range(WARM_UP + 3):
            stream = Stream()
            stream.wait_stream(sanitizer.current)
            with torch.cuda.stream(stream):
                results.append(placed(x))
    assert not sanitizer.found
    for result in results:
        torch.testing.assert_close(result, expected)


class Apart(nn.Module):
    """Chains side by side that do not meet again."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        x = self.first(x)
        return [(x + number).neg().exp().neg().exp() for number in range(3)]


@pytest.mark.parametrize("threads", [False, True])
def test_a_step_goes_backward_inside_of_another(
    threads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a GPU's thread of autograd waits for another GPU's, and that takes what comes first.

    The first may be the same thread, or it waits for the other; the steps are of two streams.
    """
    torch.manual_seed(0)
    model, x = Apart(), torch.randn(2, 16, requires_grad=True)
    leaves = [*model.parameters(), x]
    expected = torch.autograd.grad(2 * torch.stack(model(x)).sum(), leaves)
    traced = baechi.trace(model, (x,))
    found: list[str] = []

    def both(seed: int, tape: int) -> None:
        for leaf in leaves:
            leaf.grad = None
        placed = again_at_random(traced, seed=seed, devices=4)
        with sanitized(monkeypatch) as sanitizer:
            on_streams(placed, graphs=False)
            streams = [Stream(Gpu()), Stream(Gpu())]
            losses = []
            for stream in streams:
                stream.wait_stream(sanitizer.current)
                with torch.cuda.stream(stream):
                    losses.append(torch.stack(placed(x)).sum())
            usual, count = TapeCode.backward, itertools.count()

            def other() -> None:
                with sanitizer, torch.cuda.stream(streams[1]):
                    losses[1].backward()

            def interrupted(code: TapeCode, step: Any) -> None:
                usual(code, step)
                if next(count) != tape:
                    return
                if not threads:
                    losses[1].backward()
                    return
                thread = threading.Thread(target=other, daemon=True)
                thread.start()
                thread.join(10)
                found.extend(["blocked"] * thread.is_alive())

            with monkeypatch.context() as patch:
                patch.setattr(TapeCode, "backward", interrupted)
                with torch.cuda.stream(streams[0]):
                    losses[0].backward()
            for stream in streams:
                sanitizer.current.wait_stream(stream)
        found.extend(sanitizer.found)
        for leaf, gradient in zip(leaves, expected, strict=True):
            torch.testing.assert_close(leaf.grad, gradient)
        found.append("done")

    for seed, tape in ((8, 1), (8, 4), (6, 5), (10, 3)):
        thread = threading.Thread(target=both, args=(seed, tape), daemon=True)
        thread.start()
        thread.join(60)
        assert found == ["done"]
        found.clear()


def test_what_failed_first_is_raised_and_holds_no_memory_that_crossed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After some errors CUDA refuses everything, also the waits at the end of a phase."""
    model, x = Chains(), torch.randn(2, 16)
    placed = at_random(model, (x,), seed=6)
    usual, count = TapeCode.forward, itertools.count()
    held: list[HeldStorages] = []

    def refused(*_: Any) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    def failing(code: TapeCode, step: Any) -> None:
        if next(count) < 3:
            usual(code, step)
            return
        held.append(step.own.held)
        assert len(held[0])
        monkeypatch.setattr(cuda_streams, "join", refused)
        raise ValueError("index out of range")

    with sanitized(monkeypatch):
        on_streams(placed, graphs=False)
        monkeypatch.setattr(TapeCode, "forward", failing)
        with pytest.raises(ValueError, match="index out of range") as caught:
            placed(x)
    assert caught.value.__context__ is None
    assert not len(held[0])


def test_only_gpus_in_use_are_asked_whether_the_caller_captures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever asks of another begins to use that; and the capture may be on any of them."""
    model, x = Chains(), torch.randn(2, 16)
    placed = at_random(model, (x,), seed=6)
    asked: list[int] = []
    seen: list[bool] = []
    ended = CudaExecutor._ended

    def exchange(gpu: int) -> int:
        asked.append(gpu)
        return 0

    def noted(executor: CudaExecutor, run: Any) -> None:
        seen.append(run.captured)
        ended(executor, run)

    with sanitized(monkeypatch) as sanitizer:
        on_streams(placed, graphs=False)
        monkeypatch.setattr(CudaExecutor, "_ended", noted)
        monkeypatch.setattr(streams, "exchange_device", exchange)
        placed(x)
        monkeypatch.setattr(streams, "is_current_captured", lambda: True)
        placed(x)
    assert set(asked) == {Gpu.index}
    assert seen == [False, True]
    assert not sanitizer.found


class Twice(nn.Module):
    """Reads its input on two lanes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.neg().exp() + x.sin().cos()


def test_gradients_that_are_added_up_last_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd's thread adds up on streams of its own on all GPUs but one."""
    x = torch.randn(2, 16, requires_grad=True)
    (expected,) = torch.autograd.grad(Twice()(x).sum(), x)
    for seed in range(3):
        placed = at_random(Twice(), (x,), seed=seed)
        with sanitized(monkeypatch) as sanitizer:
            on_streams(placed, graphs=False)
            loss = placed(x).sum()
            other = Stream()
            other.wait_stream(sanitizer.current)
            with torch.cuda.stream(other):
                (gradient,) = torch.autograd.grad(loss, x)
            gradient = gradient.clone()
        assert not sanitizer.found
        torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("dropped", [False, True])
def test_torch_does_not_warn_of_streams_while_a_step_runs_on_several_lanes(
    dropped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A submodule that stays whole gives gradients on its lane, and they go to the caller's."""
    gc.collect()  # executors of earlier tests
    said: list[bool] = []
    graph = torch.autograd.graph
    monkeypatch.setattr(graph, "set_warn_on_accumulate_grad_stream_mismatch", said.append)
    monkeypatch.setattr(CudaExecutor, "_unwarned", weakref.WeakSet())
    x = torch.ones(2, 16)
    with sanitized(monkeypatch):
        placed = [at_random(Chains(), (x,), seed=6, devices=devices) for devices in (1, 2, 2)]
        for each in placed:
            on_streams(each, graphs=False)
        assert said == [False, False]  # on one lane nothing is switched
        for number, more in ((2, []), (1, [True]), (0, [True])):
            executable = placed[number]._current
            if dropped:
                executable._executor = None
                gc.collect()
            else:
                executable.close()
            assert said == [False, False, *more]
