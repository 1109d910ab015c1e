"""What may be a CUDA graph, and the reasons that are given for what may not."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from placed import cpus, made_up_profile, place_on
from torch import nn
from torch.nn import functional

import baechi
from baechi.runtime.executable import Executable
from baechi.runtime.executors.capture_rules import check_wish, obstacle
from baechi.runtime.executors.cuda_graphs import Graphs


class Says(nn.Module):
    """A layer, and then whatever a function does."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.layer(x))


@torch.library.custom_op("baechi_tests::silent", mutates_args=())
def silent(x: torch.Tensor) -> torch.Tensor:
    """A custom operator."""
    return x.clone()


@silent.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def reasons(
    function: Any, *, alone: bool = True, devices: int = 1, training: bool = False
) -> set[str]:
    """Of all tapes, as if they were on a GPU."""
    with torch.no_grad():
        traced = baechi.trace(Says(function), (torch.ones(3, 4),))
    graph = traced.graph(made_up_profile(traced), training=training)
    placement = baechi.solve(graph, cpus(devices), placer=baechi.RandomPlacer(1))
    places = [torch.device("cpu")] * devices
    executable = Executable(traced, graph, placement, places)
    return {obstacle(traced.module, code, alone=alone) for code in executable._executor.bound.tapes}


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.relu(),
        lambda x: x[torch.tensor([0, 2])],
        lambda x: functional.embedding(x.argmax(1), torch.ones(4, 2)),
        lambda x: functional.dropout(x.tanh_(), 0.5),
        lambda x: torch.where(x > 0, x, -x).sort().values,
        lambda x: x / torch.linalg.matrix_norm(x) + torch.linspace(0, 1, 4),
    ],
)
def test_most_operators_may_be_captured(function: Any) -> None:
    assert reasons(function) == {""}


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: torch.linalg.inv(x[:, :3]), "reads values on the host"),
        (lambda x: torch.linalg.lu_factor(x[:, :3])[0], "reads values on the host"),
        (torch.linalg.svdvals, "reads values on the host"),
        (lambda x: torch.linalg.matrix_norm(x, "nuc"), "reads values on the host"),
        (lambda x: torch.linspace(x.sum(), 1, 4), "takes its ends from values"),
        (lambda x: torch.multinomial(x.exp(), 2), "reads values on the host"),
        (lambda x: x if x.isnan().any() else x.relu(), "reads values on the host"),
        (lambda x: x.masked_fill(x > 0, 0)[torch.ones(3, dtype=torch.bool)], "mask"),
        (lambda x: x.as_strided((2, 2), (4, 1)), "reads memory as it lies"),
        (silent, "baechi_tests's own; nobody knows"),
        (
            lambda x: functional.embedding(x.argmax(1), torch.ones(4, 2), sparse=True),
            "sparse gradient",
        ),
    ],
)
def test_what_asks_the_host_may_not(function: Any, reason: str) -> None:
    (found,) = reasons(function)
    assert reason in found


def test_lanes_of_one_gpu_draw_eagerly() -> None:
    def draws(x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(x, 0.5)

    assert reasons(draws) == {""}
    (found,) = reasons(draws, alone=False)
    assert "dropout" in found
    assert "share where its generator is" in found


def test_compiled_tapes_of_several_gpus_run_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: None)
    x = torch.ones(2, 4)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    places = [torch.device("cuda", 0), torch.device("cuda", 1)]
    for compiled in (False, True):
        options = {"compile": {"backend": "aot_eager"}} if compiled else {}
        placed = place_on(baechi.trace(model, (x,)), 2, baechi.RandomPlacer(0), **options)
        executable = placed._current
        tapes = [replace(t, place=places[t.device]) for t in executable._executor.bound.tapes]
        bound = replace(executable._executor.bound, tapes=tuple(tapes))
        graphs = Graphs(placed.traced.module, executable.program, bound, places)
        threads = "torch.compile keeps no graph for the threads of several devices"
        assert set(graphs.reasons) - {"it launches nothing"} == {threads if compiled else ""}
        placed.unplace()


def test_a_wish_that_no_device_fulfils_is_refused() -> None:
    cpus = [torch.device("cpu")] * 2
    for wish in (False, "auto"):
        check_wish(wish, cpus)  # type: ignore[arg-type]
    check_wish(True, [*cpus, torch.device("cuda:0")])
    with pytest.raises(baechi.InputError, match="the devices are cpu; only CUDA devices"):
        check_wish(True, cpus)
    with pytest.raises(baechi.InputError, match="cuda_graphs is 'yes'"):
        check_wish("yes", cpus)  # type: ignore[arg-type]


def test_a_placed_module_says_what_runs_without_graphs() -> None:
    model, x = nn.Linear(4, 4), torch.ones(3, 4)
    options: dict[str, Any] = {"example_args": (x,), "progress": False, "costs": "estimate"}
    plain = baechi.place(model, ["cpu:0"], **options)
    assert plain.remarks == ()
    plain.unplace()
    placed = baechi.place(model, ["cpu:0"], cuda_graphs="auto", **options)
    reason = "1 of 1 tapes run without CUDA graphs: a cpu device has no CUDA graphs"
    assert placed.remarks == (reason,)
    assert "a cpu device has no CUDA graphs" in placed.report()
    torch.testing.assert_close(placed(x), copy.deepcopy(model)(x))
    placed.unplace()
    with pytest.raises(baechi.InputError, match="cuda_graphs=True, but the devices are cpu"):
        baechi.place(model, ["cpu:0"], cuda_graphs=True, **options)


def test_lanes_of_a_gpu_need_torchs_own_allocator(monkeypatch) -> None:
    """Another may give what one lane lets go of to any, while a second still reads it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    lanes = [torch.device("cuda", 0), torch.device("cuda", 1), torch.device("cuda", 0)]
    with pytest.raises(baechi.InputError, match=r"cuda:0 has several .* PYTORCH_ALLOC_CONF"):
        check_wish(False, lanes)
    check_wish(False, lanes[:2])
