"""A placed module inside of the caller's `torch.utils.checkpoint`, and of other such hooks."""

import copy
import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import zoo
from placed import again_at_random, same
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import baechi
from baechi.runtime.step_function import Plan

pytestmark = pytest.mark.usefixtures("one_thread")

X = torch.linspace(-1, 1, 24).reshape(3, 8)


class Block(nn.Module):
    """Two branches, a batch norm and a dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(8, 16)
        self.norm, self.drop = nn.BatchNorm1d(16), nn.Dropout(dropout)
        self.last = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norm(self.first(x).tanh()) * self.second(x).exp()
        return x + self.last(self.drop(y)), y


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


def both(run: Callable[..., Any], devices: int, *, dropout: float = 0.0) -> tuple[Around, Around]:
    """The unsplit model without checkpoints, and the placed one with them."""
    torch.manual_seed(0)
    unsplit = Around([Block(dropout), Block(dropout)], lambda block, x: block(x))
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


def gradients(model: nn.Module, x: Tensor, **options: Any) -> list[Tensor]:
    torch.manual_seed(1)
    model(x).backward(**options)
    return [x.grad, *(parameter.grad for parameter in model.parameters())]


RUNS = {
    "not reentrant": partial(checkpoint, use_reentrant=False),
    "reentrant": partial(checkpoint, use_reentrant=True),
    "in each other": lambda block, x: checkpoint(
        lambda x: checkpoint(block, x, use_reentrant=False), x, use_reentrant=False
    ),
}


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("name", RUNS)
def test_checkpoints_around_placed_blocks_change_no_gradient(name: str, devices: int) -> None:
    unsplit, placed = both(RUNS[name], devices)
    rows = [gradients(model, X.clone().requires_grad_()) for model in (unsplit, placed)]
    assert all(map(same, *rows))


@pytest.mark.parametrize("devices", [1, 3])
def test_a_step_in_a_checkpoint_is_let_go_of(devices: int) -> None:
    """What its tapes have saved goes after the forward, and again after the backward."""

    def alive() -> int:
        gc.collect()
        return sum(type(row) is Plan for row in gc.get_objects())

    before = alive()
    _, placed = both(RUNS["not reentrant"], devices)
    loss = placed(X.clone().requires_grad_())
    assert alive() == before
    loss.backward(retain_graph=True)
    assert alive() == before
    loss.backward()
    assert alive() == before


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("early", [True, False])
def test_each_backward_runs_again_and_buffers_move_as_in_torch(devices: int, early: bool) -> None:
    """A batch norm counts each run, as it does on the unsplit model in a checkpoint."""
    run = RUNS["not reentrant"]
    unsplit, placed = both(run, devices)
    unsplit.run = run
    rows = []
    for model in (unsplit, placed):
        x = X.clone().requires_grad_()
        with set_checkpoint_early_stop(early):
            loss = model(x)
            loss.backward(retain_graph=True)
            loss.backward()
            with pytest.raises(RuntimeError, match="second time"):
                loss.backward()
        rows.append([x.grad, *(p.grad for p in model.parameters()), *model.buffers()])
    assert all(map(same, *rows))


def test_dropout_draws_the_same_masks_again() -> None:
    unsplit, placed = both(RUNS["not reentrant"], 1, dropout=0.5)
    rows = [gradients(model, X.clone().requires_grad_()) for model in (unsplit, placed)]
    assert all(map(same, *rows))


def test_a_checkpoint_around_a_whole_model_that_is_placed_on_its_first_call() -> None:
    model, args, kwargs = zoo.MODELS["gpt2"]()
    unsplit = copy.deepcopy(model)
    names = {"cpu:0": "1GiB", "cpu:1": "1GiB"}
    placer = baechi.RandomPlacer(1)
    placed = baechi.place(model, names, placer=placer, costs="estimate", progress=False)
    rows = []
    for each in (unsplit, placed):
        out = checkpoint(each, *args, use_reentrant=False, **kwargs)
        leaves = torch.utils._pytree.tree_leaves(out)
        torch.stack(
            [t.sum() for t in leaves if isinstance(t, Tensor) and t.requires_grad]
        ).sum().backward()
        rows.append([parameter.grad for parameter in each.parameters()])
    assert all(map(same, *rows))


@pytest.mark.parametrize("change", ["frozen", "mode"])
def test_another_call_in_its_place_is_refused(change: str) -> None:
    block = Block()
    x = X.clone().requires_grad_()
    placed = baechi.place(
        block, ["cpu:0"], example_args=(x,), costs="estimate", progress=False, placer="single"
    )
    y, _ = checkpoint(placed, x, use_reentrant=False)
    if change == "frozen":
        block.last.bias.requires_grad_(False)
    else:
        placed.eval()
    with pytest.raises(baechi.ExecutionError, match=r"ran this call .* again"):
        y.sum().backward()


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
