"""Random numbers of a model on several CPU devices are those of the unsplit model under a seed."""

import copy
from typing import Any

import placed
import pytest
import torch
from torch import nn

import baechi


class Branches(nn.Module):
    """Two towers with dropout, whose second is short, and a trunk: any of them may be ahead."""

    def __init__(self) -> None:
        super().__init__()

        def tower(n: int) -> nn.Sequential:
            layers = [(nn.Linear(16, 16), nn.Dropout(0.5), nn.Tanh()) for _ in range(n)]
            return nn.Sequential(*(layer for row in layers for layer in row))

        self.one, self.two, self.trunk = tower(4), tower(1), tower(2)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        both = self.one(x) + self.two(y)
        return self.trunk(both) * torch.rand_like(x)


def example() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(6, 16), torch.randn(6, 16)


def step(model: nn.Module, args: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """What a training step under a seed leaves, and what would be drawn next."""
    model.zero_grad()
    torch.manual_seed(3)
    out = model(*args)
    out.square().sum().backward()
    return [out.detach(), *(p.grad for p in model.parameters()), torch.rand(2)]


def place(model: nn.Module, **options: Any) -> Any:
    cluster, fixed = placed.cpus(3), {"costs": "estimate", "guard": False, "progress": False}
    return baechi.place(model, cluster, threads_per_device=1, **fixed, **options)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "options",
    [
        *({"placer": name} for name in ("m-etf", "m-sct", "heft", baechi.RandomPlacer(0))),
        {"placer": "m-etf", "checkpoint": "one.*"},
        {"placer": "m-etf", "compile": {"backend": "aot_eager"}},
    ],
    ids=repr,
)
def test_a_training_step_draws_what_the_unsplit_model_draws(options: dict[str, Any]) -> None:
    plain, args = Branches(), example()
    model = place(copy.deepcopy(plain), **options)
    for _ in range(2):
        assert all(map(torch.equal, step(model, args), step(plain, args)))
    assert len(set(model.placement.devices)) > 1
    model.unplace()


@pytest.mark.usefixtures("one_thread")
def test_an_inference_draws_what_the_unsplit_model_draws() -> None:
    plain, args = Branches(), example()
    model = place(copy.deepcopy(plain), placer="m-etf", training=False)
    with torch.no_grad():
        torch.manual_seed(1)
        expected = plain(*args)
        torch.manual_seed(1)
        assert torch.equal(model(*args), expected)
    model.unplace()


@pytest.mark.usefixtures("one_thread")
def test_micro_batches_draw_what_the_loop_over_them_draws() -> None:
    plain, (x, y) = Branches(), example()
    model = place(copy.deepcopy(plain), placer="m-etf", microbatches=3, example_args=(x, y))
    torch.manual_seed(3)
    for pair in zip(x.chunk(3), y.chunk(3), strict=True):
        (plain(*pair).square().mean() / 3).backward()
    torch.manual_seed(3)
    model.step(x, y, targets=torch.zeros(6, 16), loss=nn.functional.mse_loss, weights="mean")
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(one.grad, two.grad) for one, two in pairs)
    model.unplace()


def test_no_device_holds_more_than_predicted_where_draws_wait() -> None:
    model, args = Branches(), tuple(torch.randn(512, 16) for _ in range(2))
    module = place(model, placer="m-etf", example_args=args)
    with module.metered() as meter:
        module(*args).sum().backward()
    peaks = zip(meter.peak_bytes, module.schedule.peak_bytes, strict=True)
    assert all(found <= predicted for found, predicted in peaks)
    module.unplace()


def test_only_draws_that_do_not_depend_on_each_other_are_put_in_order() -> None:
    traced = baechi.trace(Branches(), example())
    draws = [i for i, op in enumerate(traced.ops) if op.random]
    assert len(draws) == 8
    graph = traced.graph(placed.made_up_profile(traced), draws_in_order=True)
    orders = [row for row in graph.tensors if row.order]
    # After the last of one tower the other's; after that the trunk's depend on both.
    ends = [(row.producer, *row.consumers, row.nbytes) for row in orders]
    assert ends == [(draws[3], draws[4], 0), (draws[6], draws[7], 0)]
    plain = traced.graph(placed.made_up_profile(traced))
    assert graph.tensors[: len(plain.tensors)] == plain.tensors
    assert graph.ops == plain.ops


def test_a_report_tells_what_keeps_an_order_from_what_moves_bytes() -> None:
    module = place(Branches(), placer="round-robin", example_args=example())
    kept = [t for t in module.schedule.transfers if module.graph.tensors[t.tensor].order]
    text = " ".join(str(module.report()).split())
    moved = len(module.schedule.transfers) - len(kept)
    assert kept
    assert f"in {moved} transfers; {len(kept)} without bytes keep random numbers in" in text
    module.unplace()
