"""Hooks on outputs and retained gradients: as unsplit, or refused where they see a part."""

import gc
import weakref
from collections.abc import Callable

import placed
import pytest
import torch
from torch import Tensor, nn

import baechi

pytestmark = pytest.mark.usefixtures("one_thread")


class Hidden(nn.Module):
    """Returns what it computes with, too: once as it is, once as a view, once in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        hidden = self.inner(x)
        left, right = (hidden * 2).chunk(2, 1)
        return hidden, left, self.last(hidden) * hidden + torch.cat([right, left], 1)


def retain(output: Tensor) -> None:
    output.retain_grad()


def hook(output: Tensor) -> None:
    output.register_hook(lambda gradient: gradient * 3)


@pytest.mark.parametrize("checkpoint", [None, "inner"])
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("ask", [retain, hook])
def test_an_output_that_the_model_reads_too_has_a_part_of_its_gradient_and_is_refused(
    ask: Callable[[Tensor], None], number: int, checkpoint: str | None
) -> None:
    traced = baechi.trace(Hidden(), (torch.ones(3, 4),))
    module = placed.place_on(traced, 2, "round-robin", checkpoint=checkpoint)
    outputs = module(torch.ones(3, 4))
    ask(outputs[number])
    with pytest.raises(baechi.ExecutionError, match="the model reads it itself, too"):
        outputs[2].sum().backward()
    outputs = module(torch.ones(3, 4))
    outputs[2].sum().backward()


def test_a_hook_on_an_output_that_was_dropped_is_refused_too() -> None:
    module = placed.at_random(Hidden(), (torch.ones(3, 4),), devices=2)
    hidden, _, last = module(torch.ones(3, 4))
    loss = hidden.sum() + last.sum()
    hidden.register_hook(lambda gradient: gradient * 3)
    del hidden
    with pytest.raises(baechi.ExecutionError, match="the model reads it itself, too"):
        loss.backward()


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("ask", [retain, hook])
def test_hooks_on_the_last_outputs_are_as_on_the_unsplit_model(
    ask: Callable[[Tensor], None], devices: int
) -> None:
    found = []
    x = torch.linspace(-1, 1, 12).reshape(3, 4)
    for module in (Hidden(), placed.at_random(Hidden(), (x,), devices=devices)):
        *_, last = module(x)
        ask(last)
        last.sin().sum().backward()
        asked = [last.grad] if last.retains_grad else []
        found.append([*asked, *(parameter.grad for parameter in module.parameters())])
    assert all(map(placed.same, *found))


def test_a_step_that_is_dropped_is_freed_at_once() -> None:
    module = placed.at_random(Hidden(), (torch.ones(3, 4),), devices=2)
    outputs = module(torch.ones(3, 4))
    node = weakref.ref(outputs[0].grad_fn)
    gc.disable()
    try:
        del outputs
        assert node() is None
    finally:
        gc.enable()
