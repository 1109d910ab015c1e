"""Random models, placed at random, live as the unsplit ones do, in every bit.

They train, with updates and gradients that add up, and answer without gradients; in several shapes,
with checkpoints, under autocast, in micro-batches. What `docs/runtime.md` (Bit for bit) lists as
differing in the last bits is left out.
"""

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from placed import lazily, one_thread, same
from random_models import LENGTH, WIDTH, RandomModel, random_model
from seeds import some
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import baechi
from baechi.tracing.pytrees import tensors_in

BATCH = 4
ACTS = ("train", "train", "train", "train in evaluation mode", "answer", "answer")
MODES = ("plain", "shapes", "checkpoint", "autocast", "batches in a call", "batches in a step")


def loss_of(outputs: Any) -> Tensor:
    rows = [tensor.float().square().mean() for tensor in tensors_in(outputs)]
    return torch.stack(rows).sum()


def criterion(outputs: Any, _: Tensor) -> Tensor:
    return loss_of(outputs)


def left_by(model: nn.Module, outputs: Any = ()) -> dict[str, Tensor | None]:
    """Outputs, gradients and state, as they are now."""
    found: dict[str, Tensor | None] = {
        f"output {i}": t.detach().clone() for i, t in enumerate(tensors_in(outputs))
    }
    found |= {f"gradient of {name}": p.grad for name, p in model.named_parameters()}
    found |= model.state_dict()
    return {name: None if value is None else value.clone() for name, value in found.items()}


def answer(model: Callable[[Tensor], Any], x: Tensor, act: str) -> Any:
    """What a call gives, after a backward where it is one of training."""
    with torch.set_grad_enabled(act != "answer"):
        outputs = model(x)
    if act != "answer":
        loss_of(outputs).backward()
    return outputs


def life(mode: str, seed: int) -> bool:
    """Compare the model of a seed; False if it does not run unsplit, as some do."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    batches = draw.choice([2, 4]) if "batches" in mode else None
    unsplit = random_model(draw, mixing=batches is None)
    differing: dict[str, tuple[type, ...]] = {  # in the last bits: `docs/runtime.md`
        "autocast": (nn.RNNCellBase,),
        "batches in a call": (nn.RNNBase, nn.RNNCellBase),
    }
    if _has(unsplit, *differing.get(mode, ())):
        return False
    options: dict[str, Any] = {"placer": baechi.RandomPlacer(seed), "guard": False}
    if mode == "checkpoint":
        options["checkpoint"] = True
    if batches:
        options["microbatches"] = batches
    model = copy.deepcopy(unsplit)
    placed = lazily(model, max_shapes=4, **options)

    def in_batches(x: Tensor) -> Any:
        rows = [unsplit(part) for part in x.chunk(batches or 1)]
        return pytree.tree_map(lambda *parts: torch.cat(parts), *rows)

    optimizers = [torch.optim.SGD(one.parameters(), lr=0.01) for one in (unsplit, placed)]
    for turn in range(draw.randint(3, 5)):
        x = torch.randn(draw.choice([4, 4, 2, 6, 1]) if mode == "shapes" else BATCH, LENGTH, WIDTH)
        act = draw.choice(ACTS)
        for one in (unsplit, placed):
            one.train(act == "train")
        found = []
        for one in (unsplit, placed):
            torch.manual_seed(turn)
            with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
                try:
                    if mode == "batches in a step":
                        for part in x.chunk(batches or 1) if one is unsplit else ():
                            (loss_of(unsplit(part)) * (1 / (batches or 1))).backward()
                        if one is placed:
                            placed.step(x, targets=x, loss=criterion, weights="mean")
                        found.append(left_by(one))
                    else:
                        plain = one is unsplit and batches
                        found.append(left_by(one, answer(in_batches if plain else one, x, act)))
                except RuntimeError:
                    if one is unsplit:
                        return False
                    raise
        wrong = [name for name, value in found[0].items() if not same(value, found[1][name])]
        assert not wrong, (mode, seed, turn, act, wrong)
        if draw.random() < 0.6:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    placed.unplace()
    return True


def _has(model: RandomModel, *kinds: type[nn.Module]) -> bool:
    return any(isinstance(part, kinds) for part in model.modules())


@pytest.mark.parametrize("mode", some(MODES, 2))
def test_a_random_model_lives_as_the_unsplit_one(mode: str) -> None:
    with one_thread():
        assert any(life(mode, seed) for seed in range(5))  # the first that runs unsplit


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("first", range(0, 60, 10))
def test_sixty_random_models_live_as_the_unsplit_ones(mode: str, first: int) -> None:
    with one_thread():
        lived = [life(mode, seed) for seed in range(first, first + 10)]
    assert any(lived)
