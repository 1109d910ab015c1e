"""Hooks on outputs, and gradients that they retain: of all their readers, as unsplit."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

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


def retained(outputs: list[Tensor], seen: list[Any]) -> None:
    del seen
    for output in outputs:
        output.retain_grad()


def hooked(outputs: list[Tensor], seen: list[Any]) -> None:
    for output in outputs:
        output.register_hook(lambda gradient: seen.append(gradient.clone()))
        output.register_hook(lambda gradient: gradient * 3)


def both(outputs: list[Tensor], seen: list[Any]) -> None:
    hooked(outputs, seen)
    retained(outputs, seen)


def removed(outputs: list[Tensor], seen: list[Any]) -> None:
    handles = [output.register_hook(lambda gradient: gradient * 3) for output in outputs]
    handles[0].remove()
    retained(outputs, seen)


def of_the_written(outputs: list[Tensor], seen: list[Any]) -> None:
    hooked(outputs, seen)
    outputs[-1].mul_(2)
    both(outputs, seen)


ASKED = [retained, hooked, both, removed, of_the_written]


def left(model: nn.Module, ask: Callable[..., None], direct: bool) -> list[Any]:
    """What hooks and outputs saw in two steps, the second of which goes backward twice."""
    rows: list[Any] = []
    for n in range(2):
        model.zero_grad()
        seen: list[Any] = []
        outputs = list(model(torch.linspace(-1, 1, 12).reshape(3, 4) + n))
        ask(outputs, seen)
        used = outputs if direct else outputs[-1:]
        loss = torch.stack([(i + 1) * output.sin().sum() for i, output in enumerate(used)]).sum()
        for again in range(n + 1):
            loss.backward(retain_graph=again < n)
        order = sorted(seen, key=lambda gradient: gradient.flatten().tolist())
        asked = [output.grad for output in outputs if output.retains_grad]
        rows += [order, asked, [parameter.grad.clone() for parameter in model.parameters()]]
    return rows


@pytest.mark.parametrize("checkpoint", [None, "inner"])
@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("ask", ASKED)
def test_an_output_has_the_gradient_of_all_its_readers(
    ask: Callable[..., None], direct: bool, devices: int, checkpoint: str | None
) -> None:
    traced = baechi.trace(Hidden(), (torch.ones(3, 4),))
    placer = baechi.RandomPlacer(devices)
    module = placed.place_on(traced, devices, placer, checkpoint=checkpoint, threads_per_device=1)
    expected = left(Hidden(), ask, direct)
    torch.testing.assert_close(left(module, ask, direct), expected, **placed.EXACT)


def test_compiled_tapes_say_that_they_see_no_gradient() -> None:
    traced = baechi.trace(Hidden(), (torch.ones(3, 4),))
    module = placed.place_on(
        traced, 1, "single", threads_per_device=1, compile={"backend": "aot_eager"}
    )
    for _ in range(2):
        hidden, _, last = module(torch.ones(3, 4))
        last.sum().backward()
    hidden, _, last = module(torch.ones(3, 4))
    hidden.retain_grad()
    with pytest.raises(baechi.ExecutionError, match="is compiled or replayed"):
        last.sum().backward()


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
