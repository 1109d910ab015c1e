"""Parameters and buffers stay where the first plan put them, whatever shape or mode comes later."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from seeds import some
from torch import nn

import baechi
from baechi.runtime.weights import pinned

LINK = baechi.Link(1000, 10**9)


def normed(layers: int) -> nn.Module:
    """A dropout before each layer: operators that are there in one mode only."""
    torch.manual_seed(0)
    rows = [
        nn.Sequential(nn.Dropout(0.1), nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(layers)
    ]
    return nn.Sequential(*rows)


def placed(model: nn.Module, memory: Sequence[Any], **options: Any) -> baechi.PlacedModule:
    options = {"costs": "estimate", "progress": False, "placer": "round-robin"} | options
    rows = [baechi.Device(f"cpu:{i}", size, kind="cpu") for i, size in enumerate(memory)]
    return baechi.place(model, baechi.Cluster.connected(rows, LINK), **options)


def homes(module: baechi.PlacedModule, placement: baechi.Placement) -> dict[str, int]:
    """The device of every parameter and buffer, by name."""
    rows = zip(module.traced.ops, placement.devices, strict=False)
    return {name: device for op, device in rows for name in op.parameters}


@pytest.mark.parametrize("placer", some(["round-robin", *map(baechi.RandomPlacer, (3, 4))], 3, 1))
def test_another_mode_moves_no_parameter_and_no_buffer(placer: Any) -> None:
    model, x = normed(6), torch.randn(4, 8)
    module = placed(model, ["1GiB"] * 3, placer=placer)
    optimizer = torch.optim.AdamW(module.parameters())
    module(x).sum().backward()
    optimizer.step()
    first = homes(module, module.placement)
    assert set(first) == set(model.state_dict())
    assert len(set(first.values())) > 1
    module.eval()
    module(x)
    assert len(module.traced.ops) < 4 * 6  # no dropout is left
    freely = baechi.solve(module.graph, module.cluster, placer=placer)
    assert not homes(module, freely).items() <= first.items()
    now = homes(module, module.placement)
    assert now.items() <= first.items()
    assert set(now) == {name for name in first if "num_batches" not in name}
    torch.testing.assert_close(module(x), model(x))
    module.unplace()


class Leaf(nn.Module):
    """Stays whole, as it looks at its values."""

    def __init__(self, like: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(like.detach())  # its memory

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight if x.sum().item() > 0 else x - self.weight[0]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("whole", [False, True])
def test_parameters_of_one_memory_stay_together(whole: bool, seed: int) -> None:
    first: nn.Module = Leaf(torch.eye(8)) if whole else nn.Linear(8, 8)
    model = nn.Sequential(first, nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), Leaf(first.weight))
    module = placed(model, ["1GiB"] * 4, placer=baechi.RandomPlacer(seed), guard=False)
    module(torch.ones(2, 8)).sum().backward()
    rows = zip(module.traced.ops, module.placement.devices, strict=False)
    on = {device for op, device in rows if {"0.weight", "4.weight"} & {*op.parameters}}
    assert len(on) == 1
    readers = [op for op in module.traced.ops if op.name.split("/")[0] in ("0", "4")]
    assert len({op.group for op in readers}) == 1


def test_what_the_user_forbids_is_forbidden_beside() -> None:
    model, x = normed(2), torch.randn(4, 8)
    traced = baechi.trace(model, (x,))
    cluster = baechi.Cluster.uniform(3, memory="1GiB", link=LINK)
    names = [device.name for device in cluster.devices]
    linear = next(op.name for op in traced.ops if "0.1.weight" in op.parameters)
    own = baechi.Constraints(forbidden={linear: (names[2],)}, max_devices=2)
    weight, bias = model[0][1].weight, model[0][1].bias
    assert pinned(traced, cluster, {}, own) is own
    got = pinned(traced, cluster, {weight: 1, bias: 1}, own)
    assert got == baechi.Constraints(forbidden={linear: (names[0], names[2])}, max_devices=2)


def test_streams_of_one_gpu_are_one_home() -> None:
    model = nn.Linear(8, 8)
    traced = baechi.trace(model, (torch.randn(4, 8),))
    pools = ["gpu", "gpu", "other"]
    rows = [baechi.Device(f"d{i}", "1GiB", pool=pool) for i, pool in enumerate(pools)]
    cluster = baechi.Cluster.connected(rows, LINK)
    got = pinned(traced, cluster, {model.weight: 0, model.bias: 0}, None)
    (linear,) = (op.name for op in traced.ops if op.parameters)
    assert got == baechi.Constraints(forbidden={linear: ("d2",)})


def wide() -> nn.Module:
    """Few weights: where the activations of a large batch go is what matters."""
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))


def test_a_shape_that_fits_only_elsewhere_says_why_it_may_not_go_there() -> None:
    module = placed(wide(), ["64KiB", "8MiB"], placer=baechi.SingleDevice())
    first = torch.randn(2, 16)
    module(first)
    (home,) = set(module.placement.devices)
    assert home == 0
    with pytest.raises(baechi.InfeasibleError, match=r"does not fit.*have to stay.*example_args"):
        module(torch.randn(4096, 16))
    assert module(first).shape == (2, 16)


@pytest.mark.parametrize("training", [True, False])
def test_what_no_optimizer_has_state_for_may_move(training: bool) -> None:
    model = wide()
    if training:
        model.requires_grad_(False)
    module = placed(model, ["64KiB", "8MiB"], placer=baechi.SingleDevice(), training=training)
    module(torch.randn(2, 16))
    assert set(module.placement.devices) == {0}
    x = torch.randn(4096, 16)
    torch.testing.assert_close(module(x), model(x))
    assert set(module.placement.devices) == {1}
