"""Hooks on gradients of parameters run once per backward, on the sum, as on the unsplit model."""

import copy
from collections.abc import Callable
from typing import Any

import placed
import pytest
import torch
from seeds import covering
from torch import nn

import baechi

pytestmark = pytest.mark.usefixtures("one_thread")


class Tied(nn.Module):
    """A table that is read by a lookup, by a product and again by a layer; and two plain layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(6, 4)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.table.weight

    def forward(self, i: torch.Tensor) -> torch.Tensor:
        x = self.a(self.table(i)).tanh()
        x = x @ self.table.weight.T @ self.table.weight
        return self.head(self.b(x) + self.a(x))


I = torch.tensor([[0, 3, 5], [1, 1, 2]])  # noqa: E741 (indices)


def hooked(model: nn.Module) -> list[Any]:
    """Hooks that see, change and see again the gradients; what they have seen."""
    seen: list[Any] = []
    names = ("table.weight", "a.weight", "b.bias")
    for name in names:
        parameter = model.get_parameter(name)
        parameter.register_hook(lambda g, n=name: seen.append((n, g.clone())))
        parameter.register_hook(lambda g: g.clamp(-0.1, 0.1) * 3)
        parameter.register_hook(lambda g, n=name: seen.append((n, g.clone())))
    return seen


def once(model: nn.Module) -> list[Any]:
    model(I).square().sum().backward()
    return [p.grad for p in model.parameters()]


def kept(model: nn.Module) -> list[Any]:
    loss = model(I).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return [p.grad for p in model.parameters()]


def accumulated(model: nn.Module) -> list[Any]:
    return [*once(model), *once(model)]


def asked(model: nn.Module) -> list[Any]:
    return list(torch.autograd.grad(model(I).square().sum(), list(model.parameters())))


def same(one: list[Any], other: list[Any]) -> bool:
    pairs = list(zip(one, other, strict=True))
    return all(placed.same(x, y) for x, y in pairs)


@pytest.mark.parametrize(
    ("steps", "seed", "before"),
    covering([once, kept, accumulated, asked], range(3), [True, False]),
)
def test_hooks_see_and_change_what_they_do_on_the_unsplit_model(
    steps: Callable[[nn.Module], list[Any]], seed: int, before: bool
) -> None:
    model, reference = Tied(), Tied()
    expected_seen = hooked(reference)
    seen = hooked(model) if before else []
    module = placed.at_random(model, (I,), seed=seed, devices=1 + seed)
    if not before:
        once(module)
        module.zero_grad()
        seen = hooked(module)
    actual, expected = steps(module), steps(reference)
    assert same(actual, expected)
    by_name = [sorted(rows, key=lambda row: row[0]) for rows in (seen, expected_seen)]
    assert [name for name, _ in by_name[0]] == [name for name, _ in by_name[1]]
    assert same([g for _, g in by_name[0]], [g for _, g in by_name[1]])
    assert len(seen) % 6 == 0
    module.unplace()


@pytest.mark.parametrize("options", [{"checkpoint": "*"}, {"compile": {"backend": "aot_eager"}}])
def test_hooks_run_once_where_tapes_run_again_or_compiled(options: Any) -> None:
    model, reference = Tied(), Tied()
    module = baechi.place(
        model,
        {"cpu:0": "1GiB", "cpu:1": "1GiB"},
        placer=baechi.RandomPlacer(1),
        costs="estimate",
        progress=False,
        threads_per_device=1,
        **options,
    )
    assert same(once(module), once(reference))
    seen, expected = hooked(model), hooked(reference)
    assert same(once(module), once(reference))
    assert len(seen) == len(expected) == 6
    model.a.weight._backward_hooks.clear()
    reference.a.weight._backward_hooks.clear()
    assert same(once(module), once(reference))
    module.unplace()


def test_verification_neither_runs_nor_minds_hooks() -> None:
    model = Tied()
    seen = hooked(model)
    module = baechi.place(
        model,
        {"cpu:0": "1GiB"},
        example_args=(I,),
        costs="estimate",
        progress=False,
        verify=True,
        threads_per_device=1,
    )
    assert not seen
    once(module)
    assert len(seen) == 6


def test_a_removed_hook_is_gone() -> None:
    model, reference = Tied(), Tied()
    handle = model.b.weight.register_hook(lambda g: g * 0)
    module = placed.at_random(model, (I,))
    handle.remove()
    assert same(once(module), once(reference))
    module.unplace()


def test_a_hook_between_forward_and_backward_is_refused() -> None:
    module = placed.at_random(Tied(), (I,))
    loss = module(I).sum()
    handle = module.a.weight.register_hook(lambda g: g)
    with pytest.raises(baechi.ExecutionError, match=r"\[4, 4\]\) between forward and backward"):
        loss.backward()
    handle.remove()
    loss.backward()
    module.unplace()


def test_a_hook_without_a_gradient_is_told() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.a(x), self.b(x)

    model, x = Two(), torch.randn(2, 4)
    module = placed.at_random(copy.deepcopy(model), (x,))
    module.b.weight.register_hook(lambda g: g * 2)
    with pytest.raises(baechi.ExecutionError, match="does not depend on it"):
        module(x)[0].sum().backward()
    sum(row.sum() for row in module(x)).backward()
    module.unplace()


class Whole(nn.Module):
    """Decides by values, so it stays whole."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight if bool(x.sum() > 0) else x


class HasWhole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.whole = Whole()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.whole(x * self.scale) * self.scale


def test_a_hook_on_a_parameter_of_what_stays_whole_is_refused() -> None:
    model, x = HasWhole(), torch.ones(2, 4)
    module = placed.at_random(model, (x,))
    handle = model.whole.weight.register_hook(lambda g: g)
    with pytest.raises(baechi.ExecutionError, match=r"'whole\.weight' has a hook.*leaves whole"):
        module(x)
    handle.remove()
    model.scale.register_hook(lambda g: g * 3)
    module(x).sum().backward()
    assert torch.equal(model.scale.grad, torch.full((4,), 12.0))
    module.unplace()
