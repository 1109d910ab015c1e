"""Whoever sets a plain attribute of a module after a model was placed means another program."""

from collections.abc import Callable
from functools import partial
from typing import Any

import placed
import pytest
import torch
from torch import nn

import baechi
from baechi.tracing.guards import Attributes

pytestmark = pytest.mark.usefixtures("one_thread")

X = torch.linspace(-1, 1, 24).reshape(4, 6)


class Adapter(nn.Module):
    """A frozen layer with a low-rank one beside it that may be switched off, as PEFT's are."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 6).requires_grad_(False)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)
        self.scales = {"default": 0.5, "other": 2.0}
        self.active = ["default"]
        self.disabled = False
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = self.base(x)
        if self.disabled:
            return y
        return y + sum(self.scales[name] for name in self.active) * self.up(self.down(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.adapters = nn.Sequential(Adapter(), nn.BatchNorm1d(6), Adapter())
        self.drop = nn.Dropout(1.0)
        self.temperature = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.adapters(x) * self.temperature + self.drop(x)


def disable(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, Adapter):
            module.disabled = True


def switch(model: nn.Module) -> None:
    next(m for m in model.modules() if isinstance(m, Adapter)).active.append("other")


def rescale(model: nn.Module) -> None:
    next(m for m in model.modules() if isinstance(m, Adapter)).scales["default"] = 3.0


def drop_less(model: nn.Module) -> None:
    next(m for m in model.modules() if isinstance(m, nn.Dropout)).p = 0.0


def forget_faster(model: nn.Module) -> None:
    next(m for m in model.modules() if isinstance(m, nn.BatchNorm1d)).momentum = 0.9


def heat(model: nn.Module) -> None:
    model.temperature = 7.0


CHANGES = [switch, rescale, drop_less, forget_faster, heat, disable]  # the last hides the first


def two() -> list[nn.Module]:
    """The same model unsplit, and placed without a look at it."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Model())
    return [models[0], placed.lazily(models[1])]


def test_what_is_set_later_is_what_runs() -> None:
    models = two()
    before = [placed.step(model, (X,), {}) for model in models]
    for n, change in enumerate(CHANGES, start=2):
        for model in models:
            change(model)
        after = [placed.step(model, (X,), {}) for model in models]
        assert not after[0].differs_from(after[1]), change
        assert after[0].differs_from(before[0]), change
        assert len(models[1]._specializations) == n
        before = after


def test_what_is_set_back_runs_what_was_placed_first() -> None:
    _, module = two()
    expected = module(X)
    assert module.temperature == 1.0
    for value in (2.0, 1.0, 2.0, 1.0):
        module.temperature = value
        torch.testing.assert_close(module(X), expected * value)
    assert len(module._specializations) == 2
    assert module.unplace().temperature == 1.0


def test_what_forward_counts_itself_is_no_change() -> None:
    unsplit, module = two()
    module(X)
    module(X[:2])
    unsplit(X)
    module(X)
    assert len(module._specializations) == 2


def test_what_is_new_stays_on_the_placed_module_and_changes_nothing() -> None:
    _, module = two()
    module(X)
    module.note = "mine"
    module(X)
    assert len(module._specializations) == 1
    assert not hasattr(module.unplace(), "note")


def test_apply_refuses_with_what_was_changed() -> None:
    model = Model()
    module = placed.at_random(model, (X,), devices=2)
    module(X)
    switch(model)
    with pytest.raises(baechi.InputError, match=r"attributes of its modules: .* was .* and is "):
        module(X)


@pytest.mark.parametrize("change", CHANGES)
def test_each_change_is_seen(change: Callable[[nn.Module], None]) -> None:
    model = Model()
    attributes = Attributes(model)
    assert attributes.hold()
    change(model)
    assert not attributes.hold()
    assert " was " in attributes.changed()


def test_the_limit_says_which_attribute_keeps_changing() -> None:
    module = placed.lazily(Model(), placer="single", max_shapes=2)
    for value in (1.0, 2.0):
        module.temperature = value
        module(X)
    module.temperature = 3.0
    with pytest.raises(baechi.InputError, match=r"temperature was 1\.0 and is 3\.0"):
        module(X)


class Whole(nn.Module):
    """Looks at values, so that it stays whole, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.scale = 1.0
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.linear(x) * self.scale if x.sum() > -9 else x


def test_submodules_that_stay_whole_read_and_set_theirs_at_every_call() -> None:
    model = nn.Sequential(Whole(), nn.Linear(6, 6))
    module = placed.at_random(model, (X,), devices=2)
    for scale in (1.0, 2.0):
        model[0].scale = scale
        before = model[0].calls
        module(X)
        assert model[0].calls == before + 1
        torch.testing.assert_close(module(X), model(X))


@pytest.mark.parametrize("value", [torch.ones(2), float("nan"), None, "two", [1.0]])
def test_a_value_of_any_kind_is_a_change_or_none(value: object) -> None:
    model = Model()
    attributes = Attributes(model)
    assert attributes.hold()
    assert not attributes.changed()
    model.temperature = value  # type: ignore[assignment]
    assert not attributes.hold()
    assert attributes.changed().startswith("temperature was 1.0 and is ")
    assert attributes.settled().hold()
    assert Attributes(model).hold()
    del model.temperature
    assert "is 'gone'" in attributes.changed()


class Classy(nn.Module):
    """Reads what its class says, and tensors that it keeps beside its state."""

    scale = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.act: Callable[[torch.Tensor], torch.Tensor] = partial(nn.functional.elu, alpha=0.5)
        self.tables = {"low": [torch.ones(1)], "high": [torch.ones(6)]}
        self.count = torch.ones(())

    def change(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        y = self.change(self.act(self.linear(x))) * self.count
        return y * self.tables["low"][0] + self.tables["high"][0]


def hide_a_value(model: Any) -> None:
    model.scale = 5.0


def hide_a_method(model: Any) -> None:
    model.change = lambda x: x * 7.0


def hide_forward(model: Any) -> None:
    model.linear.forward = lambda x: x @ model.linear.weight


def exchange_a_partial(model: Any) -> None:
    model.act = partial(nn.functional.elu, alpha=0.25)


def exchange_a_tensor_in_a_list(model: Any) -> None:
    model.tables["high"][0] = torch.zeros(6)


def exchange_a_tensor_for_an_equal_one(model: Any) -> None:
    model.count = model.count.clone()


HIDING = [hide_a_value, hide_a_method, hide_forward]
EXCHANGES = [
    exchange_a_partial,
    exchange_a_tensor_in_a_list,
    exchange_a_tensor_for_an_equal_one,
]


@pytest.mark.parametrize("change", [*HIDING, *EXCHANGES])
def test_what_hides_or_replaces_what_was_there_is_what_runs(
    change: Callable[[Any], None],
) -> None:
    unsplit, model = Classy(), Classy()
    model.load_state_dict(unsplit.state_dict())
    module = placed.lazily(model, placer="single")
    assert not placed.step(unsplit, (X,), {}).differs_from(placed.step(module, (X,), {}))
    for one in (unsplit, model):
        change(one)
        one.note = "hides nothing"
    for _ in range(2):
        assert not placed.step(unsplit, (X,), {}).differs_from(placed.step(module, (X,), {}))
        assert torch.equal(unsplit.count, model.count)
        for one in (unsplit, model):  # the new tensors are read, too
            one.tables["high"][0].add_(1)
    assert len(module._specializations) == 2


def test_apply_refuses_what_hides_an_attribute_of_the_class() -> None:
    model = Classy()
    module = placed.at_random(model, (X,), devices=2)
    hide_forward(model)
    with pytest.raises(baechi.InputError, match=r"attributes of its modules: .* and is "):
        module(X)


@pytest.mark.parametrize("change", HIDING)
def test_what_hides_an_attribute_of_the_class_is_named(change: Callable[[Any], None]) -> None:
    model = Classy()
    attributes = Attributes(model)
    change(model)
    assert not attributes.hold()
    assert " and is " in attributes.changed()
