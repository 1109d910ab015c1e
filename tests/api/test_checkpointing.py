"""What runs again is chosen for a limit of memory; and the peak that was predicted is measured."""

import re
from functools import cache, partial
from pathlib import Path
from typing import Any

import metered
import pytest
import torch
from placed import cpus
from torch import nn
from typer.testing import CliRunner

import baechi
from baechi.checkpointing import memory_target
from baechi.cli.commands import app

cluster_of = partial(cpus, link=baechi.Link(5_000, 10**11))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Blocks whose activations are most of what a step holds."""

    def __init__(self, n: int = 6, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(n))
        self.last = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Angles(nn.Module):
    """A submodule that no gradient reaches, whose result is kept for another's backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.arange(x.numel(), dtype=x.dtype).view_as(x).cos()


class Rotated(Stack):
    """The same behind a product with angles, as of rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        self.angles = Angles()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.first(x) * self.angles(x))


def batch() -> torch.Tensor:
    return torch.randn(256, 16)


@cache
def traced() -> tuple[baechi.Traced, baechi.Profile]:
    model = Stack()
    found = baechi.trace(model, (batch(),))
    return found, baechi.profile(found, "cpu", threads=1, progress=False)


def peak_bytes(checkpoint: Any, placer: Any = "single") -> int:
    model, profile = traced()
    graph = model.graph(profile, optimizer="adamw", checkpoint=checkpoint)
    placement = baechi.solve(graph, cluster_of(1), placer=placer)
    return baechi.simulate(graph, cluster_of(1), placement).peak_bytes[0]


def measured_peaks(placed: baechi.PlacedModule) -> tuple[int, ...]:
    x = batch()
    with placed.metered() as meter:
        placed(x).square().sum().backward()
    placed.zero_grad()
    return meter.peak_bytes


@pytest.mark.parametrize("n", [1, 2])
def test_the_peak_goes_down_as_predicted(n: int) -> None:
    model, profile = traced()
    seen: dict[Any, int] = {}
    for checkpoint in (None, "blocks.*"):
        graph = model.graph(profile, checkpoint=checkpoint)
        cluster = cluster_of(n)
        placement = baechi.solve(graph, cluster, placer="single" if n == 1 else "contiguous")
        placed = baechi.apply(model, placement, graph=graph, cluster=cluster, threads_per_device=1)
        peaks = measured_peaks(placed)
        for said, got in zip(placed.schedule.peak_bytes, peaks, strict=True):
            assert 0.97 * got <= said <= 1.07 * got
        seen[checkpoint] = max(peaks)
        placed._current.close()
    assert seen["blocks.*"] < (0.5 if n == 1 else 0.8) * seen[None]


@pytest.mark.parametrize("percent", [pytest.param(85, marks=pytest.mark.slow), 50])
def test_as_few_submodules_as_are_needed_are_chosen(percent: int) -> None:
    model, profile = traced()
    limit = peak_bytes(None) * percent // 100
    cluster = baechi.within_memory(cluster_of(1), limit)
    names = baechi.choose_checkpoint(model, profile, cluster, optimizer="adamw")
    assert names == baechi.choose_checkpoint(model, profile, cluster, optimizer="adamw")
    assert set(names) <= {f"blocks.{i}" for i in range(6)}
    assert peak_bytes(names, "auto") <= limit < peak_bytes(names[:-1] or None)


def test_what_fits_runs_nothing_again() -> None:
    model, profile = traced()
    cluster = cluster_of(1, peak_bytes(None))
    assert baechi.choose_checkpoint(model, profile, cluster, optimizer="adamw") == ()


@pytest.mark.parametrize(
    ("model", "percent", "pattern"),
    [
        (Stack(2), 90, r"blocks\.\d"),  # what the parts of a block keep, others need
        (
            nn.Sequential(*(nn.Sequential(*(Block(16) for _ in range(4))) for _ in "ab")),
            50,
            r"\d\.\d",
        ),
    ],
)
def test_units_are_as_large_as_it_needs(model: nn.Module, percent: int, pattern: str) -> None:
    traced = baechi.trace(model, (batch(),))
    profile = baechi.estimate(traced, "H100-SXM-80GB")

    def peak(checkpoint: Any) -> int:
        graph = traced.graph(profile, checkpoint=checkpoint)
        placement = baechi.solve(graph, cluster_of(1), placer="single")
        return baechi.simulate(graph, cluster_of(1), placement).peak_bytes[0]

    limit = peak(None) * percent // 100
    names = baechi.choose_checkpoint(traced, profile, baechi.within_memory(cluster_of(1), limit))
    assert names
    assert all(re.fullmatch(pattern, name) for name in names)
    assert peak(names) <= limit


def test_what_the_constraints_tear_apart_is_not_chosen() -> None:
    model, profile = traced()
    cluster = baechi.within_memory(cluster_of(2), peak_bytes(None) * 4 // 10)
    freely = baechi.choose_checkpoint(model, profile, cluster, optimizer="adamw")
    torn = freely[0]
    (up,) = (op.name for op in model.ops if op.name.startswith(f"{torn}.up/"))
    (down,) = (op.name for op in model.ops if op.name.startswith(f"{torn}.down/"))
    apart = baechi.Constraints(pins={up: "cpu:0", down: "cpu:1"})
    options: Any = {"optimizer": "adamw", "constraints": apart}
    names = baechi.choose_checkpoint(model, profile, cluster, **options)
    assert names
    assert torn not in names


def test_what_cannot_fit_says_what_is_missing() -> None:
    model, profile = traced()
    cluster = cluster_of(1, 10_000)
    with pytest.raises(baechi.InfeasibleError, match=r"with 6 submodules.*cpu:0") as caught:
        baechi.choose_checkpoint(model, profile, cluster, optimizer="adamw")
    assert caught.value.extra_bytes > 0
    assert caught.value.extra_device == "cpu:0"


def test_a_limit_is_told_from_a_name() -> None:
    assert memory_target("4GiB") == 4 << 30
    assert memory_target(1000) == 1000
    assert memory_target(True) == 2**63 - 1
    for names in (None, False, "0", "h.*", "layer2", "0.linear", ["4GiB"]):
        assert memory_target(names) is None
    with pytest.raises(baechi.InputError, match=r"checkpoint '4XiB' cannot be read"):
        memory_target("4XiB")


def test_a_submodule_that_no_gradient_reaches_is_no_candidate() -> None:
    found = baechi.trace(Rotated(), (batch(),))
    profile = baechi.estimate(found, "T4")
    graph = found.graph(profile)
    placement = baechi.solve(graph, cluster_of(1), placer="single")
    peak = baechi.simulate(graph, cluster_of(1), placement).peak_bytes[0]
    names = baechi.choose_checkpoint(
        found, profile, baechi.within_memory(cluster_of(1), peak * 3 // 4), placer="single"
    )
    assert names
    assert "angles" not in names


def placed_with(checkpoint: Any, devices: Any) -> baechi.PlacedModule:
    return baechi.place(
        Stack(),
        devices,
        example_args=(batch(),),
        costs="estimate",
        progress=False,
        checkpoint=checkpoint,
        effort="fast",
    )


@pytest.mark.costly("six plans of one model")
def test_place_takes_names_and_limits() -> None:
    given = iter(["blocks.1"])
    graph = placed_with(given, {"cpu:0": "1GiB"}).graph
    assert [graph.ops[at].name for at in graph.units] == ["recompute:blocks.1"]
    assert not placed_with(True, {"cpu:0": "1GiB"}).graph.units
    limit = max(placed_with(None, {"cpu:0": "1GiB"}).schedule.peak_bytes) * 7 // 10
    for checkpoint, devices in (
        (f"{limit}B", {"cpu:0": "1GiB"}),
        (True, {"cpu:0": limit}),
    ):
        placed = placed_with(checkpoint, devices)
        assert placed.graph.units
        assert max(placed.schedule.peak_bytes) <= limit
        assert placed.cluster.devices[0].memory_bytes == limit


def test_place_refuses_a_limit_that_nothing_keeps_and_inference() -> None:
    with pytest.raises(baechi.InfeasibleError, match="run forward again"):
        placed_with("8KiB", {"cpu:0": "1GiB"})
    with pytest.raises(baechi.InputError, match=r"checkpoint is 4\.5, a float"):
        placed_with(4.5, {"cpu:0": "1GiB"})
    with pytest.raises(baechi.InputError, match="training=True"):
        baechi.place(Stack(), {"cpu:0": "1GiB"}, training=False, checkpoint="blocks.*")


def test_a_placed_model_is_measured_and_reported_with_what_runs_again(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    placed = placed_with("blocks.*", {"cpu:0": "1GiB", "cpu:1": "1GiB"})
    assert placed.measure(2).step_ns
    assert "device" in placed.report(tmp_path / "plan.html")
    assert "recompute:blocks.1" in (tmp_path / "plan.html").read_text(encoding="utf-8")


def test_apply_says_that_the_graph_tells_what_runs_again() -> None:
    placed = placed_with("blocks.*", {"cpu:0": "1GiB"})
    with pytest.raises(baechi.InputError, match=r"graph=.*checkpoint="):
        baechi.apply(placed.traced, placed.placement, ["cpu:0"])


def test_the_command_line_takes_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(
        "import torch\n"
        "def net():\n"
        "    block = lambda: torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())\n"
        "    return torch.nn.Sequential(block(), block()), (torch.ones(4, 8),)\n"
    )
    words = ["estimate", "model.py:net", "--kind", "H100-SXM-80GB", "--graph", "net.graph.json"]
    result = CliRunner().invoke(app, [*words, "--checkpoint", "0", "--checkpoint", "1"])
    assert result.exit_code == 0, result.output
    assert "2 parts run forward again: 0, 1" in result.output
    graph = baechi.load("net.graph.json", baechi.OpGraph)
    assert [graph.ops[at].name for at in graph.units] == ["recompute:1", "recompute:0"]
    for more, text in (
        (["--checkpoint", "7"], "names no submodule"),
        (["--checkpoint", "0", "--inference"], "--inference or --checkpoint"),
    ):
        refused = CliRunner().invoke(app, [*words, *more])
        assert refused.exit_code == 2
        assert text in refused.output


@pytest.mark.parametrize(
    ("name", "checkpoint"),
    [
        ("gpt2", "transformer.h.*"),
        pytest.param("vit", "vit.layers.*", marks=pytest.mark.slow),
        pytest.param("resnet_train", "stages.*", marks=pytest.mark.slow),
        pytest.param("t5", "*coder.block.*", marks=pytest.mark.slow),
    ],
)
def test_the_peak_of_a_real_model_with_units_is_predicted(name: str, checkpoint: str) -> None:
    call, model, profile = metered.example(name)
    graph = model.graph(profile, optimizer="adamw", checkpoint=checkpoint)
    cluster = cluster_of(1)
    placement = baechi.solve(graph, cluster, placer="single")
    placed = baechi.apply(model, placement, graph=graph, cluster=cluster, threads_per_device=1)
    (seen,) = metered.measured(placed, call, "adamw")
    placed._current.close()
    assert 0.97 * seen <= placed.schedule.peak_bytes[0] <= 1.07 * seen
