"""Inputs that are not on the GPU that reads them; run with `-m gpu` where there is one."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import baechi
from baechi.runtime.executors.cuda_graphs import WARM_UP

pytestmark = pytest.mark.gpu
LANES = ["cuda:0/a", "cuda:0/b"]
TWO_GPUS = pytest.param(["cuda:0", "cuda:1"], marks=pytest.mark.multigpu)


class Late(nn.Module):
    """Reads its second argument at the end, as a loss reads labels."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        return (self.layers(x) - wanted).square().sum()


def placed_late(devices: list[str], cuda_graphs: Any = False) -> tuple[nn.Module, Any]:
    """The model on the first GPU, and placed with the second argument on the last device."""
    torch.manual_seed(0)
    model, x = Late().to("cuda:0"), torch.ones(8, 64, device="cuda:0")
    reference = copy.deepcopy(model)
    traced = baechi.trace(model, (x, x.clone()))
    costs = tuple(baechi.OpCost(10_000, 20_000) for _ in traced.ops)
    graph = traced.graph(baechi.Profile(traced.digest, "", costs), training=True)
    rows = [baechi.Device(device, "1GiB") for device in devices]
    cluster = baechi.Cluster.connected(rows, baechi.Link(10_000, 10**10))
    last = len(devices) - 1
    half = [0 if op < 3 else last for op in range(len(traced.ops))]
    inputs = [op for op, row in enumerate(traced.ops) if row.name.startswith("input:")]
    half[inputs[0]], half[inputs[1]] = 0, last
    every = (*half, last, *(half[op] for op in traced.backward_ops))
    placement = baechi.Placement(graph.digest, every, tuple(range(len(graph.ops))))
    options: Any = {"graph": graph, "cluster": cluster, "cuda_graphs": cuda_graphs}
    return reference, baechi.apply(traced, placement, **options)


def step(module: nn.Module, x: Tensor, wanted: Tensor) -> list[Tensor]:
    module.zero_grad()
    loss = module(x, wanted)
    loss.backward()
    return [loss.detach().cpu(), *(p.grad.cpu() for p in module.parameters())]


@pytest.mark.parametrize("cuda_graphs", [False, "auto"])
@pytest.mark.parametrize("devices", [LANES[:1], LANES, TWO_GPUS])
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_an_input_of_the_host_stops_no_launching(devices: list[str], cuda_graphs: Any) -> None:
    reference, placed = placed_late(devices, cuda_graphs)
    x = torch.randn(8, 64, device="cuda:0")
    for number in range(WARM_UP + 3):
        wanted = torch.full((8, 64), float(number)).pin_memory()
        expected = step(reference, x, wanted.to("cuda:0"))
        capturing = cuda_graphs and number == WARM_UP
        torch.cuda.set_sync_debug_mode("default" if capturing else "error")
        try:
            placed.zero_grad()
            loss = placed(x, wanted)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        loss.backward()
        found = [loss.detach().cpu(), *(p.grad.cpu() for p in placed.parameters())]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("devices", [LANES[:1], LANES, TWO_GPUS])
def test_the_caller_may_write_an_input_after_the_call(devices: list[str], pinned: bool) -> None:
    reference, placed = placed_late(devices)
    x = torch.randn(8, 64, device="cuda:0")
    buffer = torch.zeros(8, 64)
    buffer = buffer.pin_memory() if pinned else buffer
    for number in range(4):
        buffer.fill_(number)
        expected = step(reference, x, buffer.to("cuda:0"))
        torch.cuda._sleep(20_000_000)
        loss = placed(x, buffer)
        buffer.fill_(-1e6)  # the next batch, ahead of what the GPU has still to do
        torch.testing.assert_close(loss.detach().cpu(), expected[0], rtol=1e-4, atol=1e-4)


@pytest.mark.multigpu
@pytest.mark.parametrize("cuda_graphs", [False, "auto"])
def test_an_input_comes_from_another_gpu(cuda_graphs: Any) -> None:
    reference, placed = placed_late(["cuda:0", "cuda:1"], cuda_graphs)
    for number in range(WARM_UP + 3):
        x, wanted = (torch.randn(8, 64, device="cuda:0") for _ in range(2))
        expected = step(reference, x, wanted)
        torch.cuda._sleep(20_000_000)
        made = wanted * 1  # what is still to be made when it is called
        places = (x.to("cuda:1"), made) if number % 2 else (x, made)
        torch.testing.assert_close(step(placed, *places), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("devices", [["cuda:0", "cpu:0"], ["cpu:0", "cuda:0"]])
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_what_crosses_to_or_from_a_cpu_does_not_wait_for_streams(devices: list[str]) -> None:
    """Only a CPU's own turn waits, for the event of what it reads."""
    reference, placed = placed_late(devices)
    for number in range(3):
        x = torch.randn(8, 64, device=devices[0])
        wanted = torch.full((8, 64), float(number), device=devices[1])
        expected = step(reference, x.to("cuda:0"), wanted.to("cuda:0"))
        torch.cuda.set_sync_debug_mode("error")
        try:
            placed.zero_grad()
            loss = placed(x, wanted)
            loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        found = [loss.detach().cpu(), *(p.grad.cpu() for p in placed.parameters())]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("devices", [LANES, TWO_GPUS])
def test_an_input_of_the_host_gets_its_gradient(devices: list[str]) -> None:
    traced = baechi.trace(nn.Linear(8, 8), (torch.ones(4, 8, requires_grad=True),))
    costs = tuple(baechi.OpCost(10_000, 20_000) for _ in traced.ops)
    graph = traced.graph(baechi.Profile(traced.digest, "", costs), training=True)
    rows = [baechi.Device(device, "1GiB") for device in devices]
    cluster = baechi.Cluster.connected(rows, baechi.Link(10_000, 10**10))
    placement = baechi.solve(graph, cluster, placer=baechi.RandomPlacer(0))
    placed: Any = baechi.apply(traced, placement, graph=graph, cluster=cluster)
    x = torch.randn(4, 8, requires_grad=True)
    placed(x).sum().backward()
    expected = torch.ones(4, 8) @ placed.weight.detach().cpu()
    torch.testing.assert_close(x.grad, expected, rtol=1e-4, atol=1e-4)


class Weighted(nn.Module):
    """Takes a float beside its tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))

    def forward(self, x: Tensor, weight: float) -> Tensor:
        return self.layers(x * weight).square().sum() * weight


@pytest.mark.parametrize(("cuda_graphs", "plans"), [("auto", 1), (True, 3)])
@pytest.mark.parametrize("devices", [LANES, TWO_GPUS])
def test_a_float_that_changes_is_read_unless_all_is_captured(
    devices: list[str], cuda_graphs: Any, plans: int
) -> None:
    torch.manual_seed(0)
    model, x = Weighted().to("cuda:0"), torch.ones(8, 64, device="cuda:0")
    reference = copy.deepcopy(model)
    placed: Any = baechi.place(
        model,
        dict.fromkeys(devices, "1GiB"),
        placer=baechi.RandomPlacer(1),
        cuda_graphs=cuda_graphs,
        guard=False,
        progress=False,
    )
    for weight in (0.5, 0.25, 0.75):
        for module in (reference, placed):
            module.zero_grad()
        losses = [module(x, weight) for module in (reference, placed)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(losses[1].cpu(), losses[0].cpu())
        for mine, theirs in zip(placed.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.cpu(), theirs.grad.cpu())
    assert len(placed._specializations) == plans
