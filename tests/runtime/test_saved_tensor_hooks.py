"""A placed module in the caller's `torch.utils.checkpoint` and other saved-tensor hooks."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from placed import again_at_random, same
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import baechi

pytestmark = pytest.mark.usefixtures("one_thread")

X = torch.linspace(-1, 1, 24).reshape(3, 8)


class Block(nn.Module):
    """Two branches and a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.last = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norm(self.first(x).tanh()) * self.second(x).exp()
        return x + self.last(y), y


class Around(nn.Module):
    """Blocks, each in a checkpoint of its own with an operator before and after it."""

    def __init__(self, blocks: list[nn.Module], run: Callable[..., Any]) -> None:
        super().__init__()
        self.blocks, self.run = nn.ModuleList(blocks), run
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.run(lambda x, block=block: block(x.sin())[0], x).cos()
        return self.head(x).sum()


def both(run: Callable[..., Any], devices: int) -> tuple[Around, Around]:
    """The unsplit model without checkpoints, and the placed one with them."""
    torch.manual_seed(0)
    unsplit = Around([Block(), Block()], lambda block, x: block(x))
    blocks = copy.deepcopy(unsplit.blocks)
    x = X.clone().requires_grad_()
    threads = None if devices == 1 else 1  # in the caller's thread, and in workers
    rows = [
        again_at_random(baechi.trace(block, (x,)), seed=4, devices=devices, threads=threads)
        for block in blocks
    ]
    placed = Around(rows, run)
    placed.head.load_state_dict(unsplit.head.state_dict())
    return unsplit, placed


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    torch.manual_seed(1)
    model(x).backward()
    return [x.grad, *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_a_reentrant_checkpoint_around_placed_blocks_changes_no_gradient(devices: int) -> None:
    unsplit, placed = both(partial(checkpoint, use_reentrant=True), devices)
    rows = [gradients(model, X.clone().requires_grad_()) for model in (unsplit, placed)]
    assert all(map(same, *rows))


def test_another_checkpoint_around_placed_blocks_is_refused() -> None:
    _, placed = both(partial(checkpoint, use_reentrant=False), 2)
    with pytest.raises(baechi.ExecutionError, match=r"baechi\.place\(model, devices, checkpoint="):
        placed(X.clone().requires_grad_())
    with torch.no_grad():
        placed(X)


@pytest.mark.parametrize("devices", [1, 3])
def test_other_hooks_see_what_tapes_save(devices: int) -> None:
    unsplit, placed = both(lambda block, x: block(x), devices)
    rows, counts = [], []
    for model in (unsplit, placed):
        seen: list[torch.Size] = []

        def pack(tensor: Tensor, seen: list[torch.Size] = seen) -> Tensor:
            seen.append(tensor.shape)
            return tensor.clone()

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            found = gradients(model, X.clone().requires_grad_())
        counts.append(len(seen))
        with save_on_cpu():
            found += gradients(model, X.clone().requires_grad_())
        rows.append(found)
    assert counts[0] == counts[1]
    assert all(map(same, *rows))
