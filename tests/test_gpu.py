"""The same promises on CUDA; run with `python3 -m pytest -m gpu` where there is a GPU."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import baechi
import zoo
from baechi.runtime.verifying import Unsplit, verify

pytestmark = pytest.mark.gpu

# Kernels on a GPU may pick other algorithms for other shapes of parallel work.
TOLERANCES = {"rtol": 1e-4, "atol": 1e-4}
LANES = ["cuda:0/a", "cuda:0/b", "cuda:0/c"]


def to_gpu(value: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to("cuda:0"), value)


def tensors_of(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def step(module: nn.Module, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Outputs and gradients of one step."""
    module.zero_grad(set_to_none=True)
    outputs = tensors_of(module(*args, **kwargs))
    losses = [t.float().square().mean() for t in outputs if t.requires_grad]
    torch.stack([loss.to("cuda:0") for loss in losses]).sum().backward()
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    return [t.detach().cpu() for t in [*outputs, *gradients]]


def placed_randomly(
    model: nn.Module, args: Any, kwargs: Any, devices: list[str], seed: int
) -> baechi.PlacedModule:
    traced = baechi.trace(model, args, kwargs)
    costs = tuple(baechi.OpCost(10_000, 20_000) for _ in traced.ops)
    graph = traced.graph(baechi.Profile(traced.digest, "", costs), training=True)
    rows = [baechi.Device(name, "4GiB") for name in devices]
    cluster = baechi.Cluster.connected(rows, baechi.Link(10_000, 10**10))
    placement = baechi.solve(graph, cluster, placer=baechi.RandomPlacer(seed))
    return baechi.apply(traced, placement, graph=graph, cluster=cluster)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", list(zoo.MODELS))
@pytest.mark.parametrize("devices", [LANES[:1], LANES, ["cuda:0", "cpu:0"]])
def test_one_step_equals_the_unsplit_model(name: str, devices: list[str], seed: int) -> None:
    model, args, kwargs = zoo.MODELS[name]()
    args, kwargs = to_gpu((args, kwargs))
    model = model.to("cuda:0")
    reference = copy.deepcopy(model)
    placed = placed_randomly(model, args, kwargs, devices, seed)
    for _ in range(2):
        expected, actual = step(reference, args, kwargs), step(placed, args, kwargs)
        for one, other in zip(expected, actual, strict=True):
            torch.testing.assert_close(other, one, **TOLERANCES)


def test_lanes_stay_right_when_kernels_are_slow_and_uneven() -> None:
    """A spin of random length before each step's kernels shakes out a missing wait."""
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)]).to("cuda:0")
    x = torch.randn(64, 256, device="cuda:0")
    reference = copy.deepcopy(model)
    placed = placed_randomly(model, (x,), {}, LANES, 0)
    expected = step(reference, (x,), {})
    for round_ in range(50):
        torch.cuda._sleep(1000 * (round_ % 7))
        for one, other in zip(expected, step(placed, (x,), {}), strict=True):
            torch.testing.assert_close(other, one, **TOLERANCES)


def test_place_probes_profiles_and_runs_on_the_gpu() -> None:
    model, args, kwargs = zoo.MODELS["gpt2"]()
    args, kwargs = to_gpu((args, kwargs))
    model = model.to("cuda:0").eval()
    with torch.no_grad():
        expected = tensors_of(model(*args, **kwargs))
        placed = baechi.place(
            model, LANES[:2], example_args=args, example_kwargs=kwargs, progress=False
        )
        for one, other in zip(expected, tensors_of(placed(*args, **kwargs)), strict=True):
            torch.testing.assert_close(other, one, **TOLERANCES)
    assert placed.cluster.devices[0].kind == torch.cuda.get_device_name(0)
    assert placed.schedule.makespan_ns > 0


def test_a_model_on_the_cpu_moves_to_the_gpu_and_back() -> None:
    model, args, kwargs = zoo.MODELS["resnet_train"]()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    placed = placed_randomly(model, args, kwargs, LANES[:2], 0)
    assert {tensor.device.type for tensor in placed.parameters()} == {"cuda"}
    back = placed.unplace()
    assert {tensor.device.type for tensor in back.parameters()} == {"cpu"}
    for name, tensor in back.state_dict().items():
        torch.testing.assert_close(tensor, before[name])


def test_training_with_adamw_follows_the_unsplit_model() -> None:
    model, args, kwargs = zoo.MODELS["vit"]()
    args, kwargs = to_gpu((args, kwargs))
    model = model.to("cuda:0")
    reference = copy.deepcopy(model)
    placed = placed_randomly(model, args, kwargs, LANES[:2], 1)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (reference, placed)]
    for _ in range(5):
        for module, optimizer in zip((reference, placed), optimizers, strict=True):
            step(module, args, kwargs)
            optimizer.step()
    for one, other in zip(reference.parameters(), placed.parameters(), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-3)


def test_a_model_is_verified_on_lanes_of_a_gpu_and_a_wrong_weight_is_named() -> None:
    model, args, kwargs = zoo.MODELS["towers"]()
    args, model = to_gpu(args), model.to("cuda:0")
    unsplit = Unsplit(model)
    placed = placed_randomly(model, args, kwargs, LANES, 0)
    special = placed._current
    call = special.traced.module.call
    verify(unsplit, special.executable, special.traced.module, call, every=True)
    with torch.no_grad():
        next(model.parameters())[0, 0] += 1
    with pytest.raises(baechi.ExecutionError, match=r"first at .*linear.* on logical device"):
        verify(unsplit, special.executable, special.traced.module, call)
