"""For which modes, attributes and truth values a trace is valid; another one is another program."""

import copy
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, ClassVar

import placed
import pytest
import torch
from placed import EXACT, assert_same_values, at_random, lazily, one_thread, step
from torch import Tensor, nn

import baechi
from baechi.runtime.specialization import held_by
from baechi.torch_support.torch_devices import torch_threads
from baechi.tracing.guards import Attributes
from baechi.tracing.subgraph import extract
from baechi.tracing.truth_values import CHECK

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:forward of this Model changes adapters.0.calls"),
]

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
        self.adapters = nn.Sequential(Adapter(), nn.BatchNorm1d(6))
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


CHANGES = [disable, switch, rescale, drop_less, forget_faster, heat]


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
    for n, change in enumerate((switch, rescale, heat, disable), start=2):
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


RATE, SETTINGS, TABLE = 1.0, SimpleNamespace(scale=1.0), {"shift": [0.0]}


class ReadsGlobals(nn.Module):
    """Reads them in forward, in a method, in a property and in a function."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)

    @property
    def shift(self) -> float:
        return TABLE["shift"][0]

    @staticmethod
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * SETTINGS.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rated(self.two(self.scaled(self.one(x)))) + self.shift


def rated(x: torch.Tensor) -> torch.Tensor:
    return x * RATE


def test_a_global_variable_that_is_another_is_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = ReadsGlobals()
    module = placed.lazily(copy.deepcopy(model))
    here = sys.modules[__name__]
    for change in (
        lambda: None,
        lambda: monkeypatch.setattr(here, "RATE", 0.5),
        lambda: monkeypatch.setattr(SETTINGS, "scale", 2.0),
        lambda: monkeypatch.setattr(here, "SETTINGS", SimpleNamespace(scale=3.0)),
        lambda: monkeypatch.setitem(TABLE, "shift", [1.0]),
        lambda: monkeypatch.setattr(here, "X", X + 1),  # of which forward reads nothing
    ):
        change()
        torch.testing.assert_close(module(X), model(X), rtol=0, atol=0)
    assert len(module._specializations) == 5
    fixed = placed.at_random(copy.deepcopy(model), (X,))
    monkeypatch.setattr(here, "RATE", 0.25)
    with pytest.raises(baechi.InputError, match=r"test_guards\.RATE was 0\.5 and is 0\.25"):
        fixed(X)


def test_a_variable_of_an_enclosing_function_is_seen_to_change() -> None:
    rate, state = 1.0, SimpleNamespace(shift=torch.zeros(6))

    class Local(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * rate + state.shift

    torch.manual_seed(0)
    model = Local(nn.Linear(6, 6), nn.Linear(6, 6))
    module = placed.lazily(copy.deepcopy(model))
    torch.testing.assert_close(module(X), model(X), rtol=0, atol=0)
    rate = 0.5
    torch.testing.assert_close(module(X), model(X), rtol=0, atol=0)
    state.shift = torch.ones(6)
    torch.testing.assert_close(module(X), model(X), rtol=0, atol=0)
    assert len(module._specializations) == 3


def test_what_forward_counts_itself_is_no_change() -> None:
    unsplit, module = two()
    module(X)
    module(X[:2])
    unsplit(X)
    module(X)
    assert len(module._specializations) == 1


def test_what_is_new_changes_nothing() -> None:
    _, module = two()
    module(X)
    module.note = "mine"
    module(X)
    assert len(module._specializations) == 1
    assert module.unplace().note == "mine"


def test_apply_refuses_with_what_was_changed() -> None:
    model = Model()
    module = placed.at_random(model, (X,), devices=2)
    module(X)
    switch(model)
    with pytest.raises(baechi.InputError, match=r"attributes of its modules: .* was .* and is "):
        module(X)


@dataclass
class Extra:
    bias: float = 1.0


class Config:
    layers = 1  # of the class

    def __init__(self) -> None:
        self.scale, self.extra = 2.0, Extra()
        self.flags = SimpleNamespace(negate=False)


class Configured(nn.Module):
    """Two modules that read one configuration."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.config = Config() if config is None else config
        self.configs = [self.config.extra]
        self.inner = nn.Module() if config is not None else Configured(self.config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        config = self.config
        x = x * config.scale * config.layers + config.extra.bias
        if hasattr(config, "late"):
            x = x * 5
        x = -x if config.flags.negate else x
        return self.inner(x) if isinstance(self.inner, Configured) else x


def replace_config(model: Any) -> None:
    model.config.extra = Extra()  # equal, and another one
    model.config.extra.bias = 4.0


RECONFIGURED: dict[str, Callable[[Any], Any]] = {
    "scale": lambda model: setattr(model.config, "scale", 3.0),
    "layers": lambda model: setattr(model.config, "layers", 2),
    "extra.bias": lambda model: setattr(model.inner.config.extra, "bias", 3.0),
    "flags.negate": lambda model: setattr(model.config.flags, "negate", True),
    "late": lambda model: setattr(model.config, "late", 1),
    "extra was another Extra": replace_config,
}


@pytest.mark.parametrize("name", RECONFIGURED)
def test_a_change_of_a_configuration_is_seen(name: str) -> None:
    model = Configured()
    attributes = Attributes(model)
    held = held_by(model, attributes)
    assert attributes.hold()
    assert held.are_same()
    RECONFIGURED[name](model)
    assert not attributes.hold()
    assert not held.are_same()
    assert f"config.{name}" in attributes.changed()


def test_after_each_change_of_a_configuration_that_is_what_runs() -> None:
    model = Configured()
    module = placed.lazily(model, placer="single", training=False)
    changes = ("flags.negate", "extra was another Extra")
    for change in (lambda _: None, *map(RECONFIGURED.__getitem__, changes)):
        change(model)
        for _ in range(2):
            assert torch.equal(module(X), model(X))
    assert len(module._specializations) == 3


def test_what_a_record_is() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.steps, self.lock = 0, threading.Lock()

    model = nn.Module()
    model.trainer, model.generator = Trainer(), torch.Generator()
    model.rows = [[Trainer(), Extra()]]
    attributes = Attributes(model)
    model.trainer.steps += 1
    assert attributes.hold()
    model.rows[0][1].bias = 2.0
    assert not attributes.hold()


@pytest.mark.parametrize("change", CHANGES)
def test_each_change_is_seen(change: Callable[[nn.Module], None]) -> None:
    model = Model()
    attributes = Attributes(model)
    held = held_by(model, attributes)
    assert attributes.hold()
    assert held.are_same()
    change(model)
    assert not attributes.hold()
    assert not held.are_same()
    assert " was " in attributes.changed()


class Kept(nn.Module):
    """Holds what may change in place."""

    names: ClassVar[set[str]] = {"scale"}
    order: ClassVar[list[str]] = ["scale"]

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.steps = ("scale", [1, {"rate": 2.0}])


IN_PLACE: dict[str, Callable[[Any], Any]] = {
    "a mode": lambda model: model.layers[1].eval(),
    "a hook": lambda model: model.layers[0].register_forward_hook(lambda *_: None),
    "a hook on all modules": lambda _: nn.modules.module.register_module_forward_hook(print),
    "a submodule": lambda model: model.layers.__setitem__(1, nn.Tanh()),
    "the order of submodules": lambda model: model.layers.append(model.layers.pop(0)),
    "a list of the class": lambda model: model.order.append("rate"),
    "a set of the class": lambda model: model.names.add("rate"),
    "a dict in a list in a tuple": lambda model: model.steps[1][1].update(rate=3.0),
    "an element": lambda model: model.steps[1].__setitem__(0, 2),
    "an attribute of the class": lambda model: setattr(type(model), "order", ["scale"]),
    "a new attribute": lambda model: setattr(model.layers, "order", 1),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_what_a_model_holds_is_seen_to_change(name: str) -> None:
    kind: Any = type("Own", (Kept,), {"order": ["scale"], "names": {"scale"}})
    model = kind()
    held = held_by(model, Attributes(model))
    assert held.are_same()
    assert held_by(copy.deepcopy(model), Attributes(model)).are_same()
    change = IN_PLACE[name](model)
    same = held.are_same()
    if "hook" in name:
        change.remove()
    assert not same


class Hiding(nn.Module):
    """Its teacher is in a list, so that it is no submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.teacher = nn.Linear(6, 6), [nn.Linear(6, 6).requires_grad_(False)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) - self.teacher[0](x)


def test_a_module_in_a_list_is_seen_to_be_exchanged() -> None:
    model, x = Hiding(), torch.arange(12.0).view(2, 6)
    plain = copy.deepcopy(model)
    module = placed.lazily(model)
    for _ in range(2):
        assert torch.equal(module(x), plain(x))
        model.teacher[0] = plain.teacher[0] = copy.deepcopy(plain.linear).requires_grad_(False)
    module.unplace()


def test_a_model_that_is_as_it_was_is_known_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a look at each of its attributes, until it is changed, and then again."""
    model = Model().eval()
    module = placed.lazily(model, placer="single", training=False)
    looks: list[Attributes] = []
    hold = Attributes.hold
    monkeypatch.setattr(Attributes, "hold", lambda self: looks.append(self) or hold(self))
    model.adapters[0].calls = 0
    for n in range(70):
        looks.clear()
        module(X)
        if n == 40:
            model.temperature = 2.0
    assert not looks
    assert len(module._specializations) == 2


def test_the_limit_says_which_attribute_keeps_changing() -> None:
    module = placed.lazily(Model(), placer="single", max_shapes=2)
    for value in (1.0, 2.0):
        module.temperature = value
        module(X)
    module.temperature = 3.0
    with pytest.warns(UserWarning, match=r"temperature was 1\.0 and is 3\.0"):
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
        torch.testing.assert_close(module(X), copy.deepcopy(model)(X))


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
NIGHTLY = [hide_a_value, exchange_a_partial, exchange_a_tensor_for_an_equal_one]


@pytest.mark.parametrize(
    "change",
    [
        *(hide_a_method, hide_forward, exchange_a_tensor_in_a_list),
        *(pytest.param(change, marks=pytest.mark.slow) for change in NIGHTLY),
    ],
)
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


class Doubled(nn.Linear):
    """Twice a linear layer."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Last(nn.Linear):
    """A layer whose class has no forward of its own."""


class Replaced(nn.Module):
    """The code of which is replaced, as when a notebook loads a changed file again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), Last(6, 6)

    def between(self, x: Tensor) -> Tensor:
        return x.tanh()

    def negative(self, x: Tensor) -> Tensor:
        return -x

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.first(x)))


CODE: list[tuple[Any, str, Any]] = [
    (None, "__class__", Doubled),  # of the last layer
    (Last, "forward", lambda self, x: nn.functional.linear(x, self.weight) * 3),
    (Replaced, "between", Replaced.negative),
    (Replaced.between, "__code__", Replaced.negative.__code__),
]


@pytest.mark.parametrize(("owner", "name", "code"), CODE)
def test_code_that_is_replaced_is_what_runs(
    owner: Any, name: str, code: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    unsplit, model = Replaced(), Replaced()
    model.load_state_dict(unsplit.state_dict())
    module = placed.lazily(model, placer="single")
    assert not placed.step(unsplit, (X,), {}).differs_from(placed.step(module, (X,), {}))
    with monkeypatch.context() as patch:
        for holder in [owner] if owner else [unsplit.last, model.last]:
            patch.setattr(holder, name, code, raising=False)
        for _ in range(2):
            assert not placed.step(unsplit, (X,), {}).differs_from(placed.step(module, (X,), {}))
        assert len(module._specializations) == 2
    assert not placed.step(unsplit, (X,), {}).differs_from(placed.step(module, (X,), {}))
    assert len(module._specializations) == 2  # that of before runs again


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


class Asks(nn.Module):
    """Takes another branch where no gradients are wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) if self.gradients(self.a(x)) else self.b(x).detach()

    def gradients(self, _: torch.Tensor) -> bool:
        return torch.is_grad_enabled()


class AsksByFlag(Asks):
    def gradients(self, hidden: torch.Tensor) -> bool:
        return hidden.requires_grad


class AsksByNode(Asks):
    def gradients(self, hidden: torch.Tensor) -> bool:
        return hidden.grad_fn is not None


class AsksByLeaf(Asks):
    def gradients(self, hidden: torch.Tensor) -> bool:
        return not hidden.is_leaf


def seen(model: nn.Module, modes: list[bool]) -> list[Any]:
    torch.manual_seed(1)
    rows: list[Any] = []
    for mode in modes:
        with torch.set_grad_enabled(mode):
            result = model(torch.randn(3, 4))
        if mode:
            result.sum().backward()
        rows.append(result.detach())
    return [*rows, [parameter.grad for parameter in model.parameters()]]


@pytest.mark.parametrize("asks", [Asks, AsksByFlag, AsksByNode, AsksByLeaf])
@pytest.mark.parametrize(
    ("modes", "verify"), [([True, False, True], False), ([False, True, False], True)], ids=str
)
def test_each_mode_has_its_branch(modes: list[bool], verify: bool, asks: type[Asks]) -> None:
    torch.manual_seed(0)
    model = asks()
    with torch_threads(1):
        expected = seen(model, modes)
        model.zero_grad()
        placed = lazily(model, max_shapes=2, verify=verify)
        assert_same_values(seen(placed, modes), expected, **EXACT)
    placed.unplace()


def test_a_trace_of_one_mode_refuses_the_other() -> None:
    placed, x = at_random(Asks(), (torch.randn(3, 4),)), torch.randn(3, 4)
    placed(x)
    with torch.no_grad(), pytest.raises(baechi.InputError, match="whether gradients are on"):
        placed(x)


RUNG = "torch.export (non-strict), truth values of the example"


class Careful(nn.Module):
    """Checks its input and an activation, and clamps what has grown out of bounds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        assert not torch.isnan(x).any()
        hidden = self.first(x)
        if torch.isinf(hidden).any():
            hidden = hidden.clamp(-1e4, 1e4)
        if not mask.all().item():
            hidden = hidden * mask
        return self.last(hidden)


class Redrawing(nn.Module):
    """Gets another projection in each third call, by a method that counts, as Performers do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("projection", torch.randn(4, 4))

    def redraw(self) -> None:
        if self.calls >= 2:
            self.projection.mul_(-2.0)
            self.calls.zero_()
            return
        self.calls += 1

    def forward(self, *args: Tensor) -> Tensor:
        self.redraw()
        return self.last(self.first(args[0] @ self.projection).relu())


class Redrawn(nn.Module):
    """A part that counts, called as fx cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.part, self.head = nn.Linear(4, 4), Redrawing(), nn.Linear(4, 64)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        hidden[:, 1:] = hidden[:, :-1].clone()
        return self.head(self.part(*hidden.unbind(0)[:0], hidden))


class Sampler(nn.Module):
    """A distribution, whose parameters torch validates; by default not after a `torch.compile`."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.scale = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale(x).exp()
        normal = torch.distributions.Normal(self.body(x), scale, validate_args=True)
        return normal.rsample() + normal.entropy()


class Writing(Careful):
    """Counts its calls, and asks about a weight that it moves."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.moved = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        self.calls += 1
        self.moved.mul_(0.5)
        if self.calls > 0 and self.moved.sum() > 0:
            x = x * self.moved
        return super().forward(x, mask)


class Signs(nn.Module):
    """Compares a number from a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum().item() > 0.5 else -x


def seeded(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


@pytest.mark.parametrize("kind", [Careful, Writing])
def test_a_step_is_the_unsplit_models(kind: type[nn.Module]) -> None:
    args = (torch.randn(3, 4), torch.tensor([True, False, True, True]))
    with one_thread():
        placed = at_random(seeded(kind), args)
        assert placed.traced.rung == RUNG
        for _ in range(2):
            unsplit = seeded(kind)
            assert not step(unsplit, args, {}).differs_from(step(placed, args, {}))
            placed.load_state_dict(seeded(kind).state_dict())


def test_a_part_that_branches_on_its_own_counter_stays_whole() -> None:
    """Split, all calls would take the branch of the first one, and the third one failed."""
    unsplit, x = seeded(Redrawn), torch.randn(3, 4)
    with one_thread():
        placed = at_random(copy.deepcopy(unsplit), (x,))
        assert placed.traced.rung == "torch.export (non-strict), opaque submodules"
        for _ in range(7):
            assert not step(unsplit, (x,), {}).differs_from(step(placed, (x,), {}))


def test_validated_distributions_draw_as_the_unsplit_model() -> None:
    model, x = seeded(Sampler), torch.randn(3, 4)
    placed = at_random(model, (x,), devices=1)
    asserts = torch.__version__ >= "2.15"  # when exported, where it asked for a truth value
    assert placed.traced.rung == ("torch.export (non-strict)" if asserts else RUNG)
    torch.manual_seed(5)
    wanted = copy.deepcopy(model)(x)
    torch.manual_seed(5)
    assert torch.equal(placed(x), wanted)
    with pytest.raises(baechi.ExecutionError, match=r"test_guards\.py"):
        placed(x * float("nan"))


def test_who_takes_another_branch_is_told_which() -> None:
    x, mask = torch.randn(3, 4), torch.ones(4, dtype=torch.bool)
    placed = at_random(seeded(Careful), (x, mask))
    wanted = placed(x, mask)
    assert [row.split()[2] for row in placed.remarks] == ["False", "False"]
    corner = torch.zeros(3, 4)
    corner[0, 0] = float("inf")  # and so is a row of activations
    with pytest.raises(baechi.InputError, match=r"asks about values of arguments"):
        placed(x, ~mask)  # which would be another plan
    for other in ((x * float("nan"), mask), (x + corner, mask)):
        with pytest.raises(baechi.ExecutionError, match=r"would now read .*submodule") as caught:
            placed(*other)
        assert "test_guards.py" in str(caught.value)
    assert torch.equal(placed(x, mask), wanted)


class Checked(nn.Module):
    """Clamps what overflows, as layers of detectors do, and reads what comes twice."""

    def __init__(self, odd: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.odd = nn.Linear(4, 4), nn.Linear(4, 4), odd

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).sigmoid() * self.second(x) + x.exp()
        asked = (hidden > -1e9).all() if self.odd else torch.isfinite(hidden).all()
        return hidden if asked else hidden.clamp(-1e4, 1e4)


class Detector(nn.Module):
    """A part that asks, of what others read, too, and that has less than half of the parameters."""

    def __init__(self, odd: bool = False) -> None:
        super().__init__()
        self.body, self.part, self.head = nn.Linear(4, 4), Checked(odd), nn.Linear(4, 12)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.body(x).tanh()
        if not (self.part.odd or mask.all()):
            x = x * mask
        return self.head(self.part(x) + x.cos() * x)


def test_a_part_that_checks_for_finite_numbers_is_split() -> None:
    """Whole, its gradients of what others read would be added up inside, in another order."""
    mask = torch.tensor([True, False, True, True])
    x, unsplit = torch.randn(3, 4), seeded(Detector)
    placed = baechi.place(
        seeded(Detector), {"cpu:0": "1GiB", "cpu:1": "1GiB"}, placer="round-robin", costs="estimate"
    )
    with one_thread():
        for each in (mask, ~mask, torch.ones_like(mask)):
            assert not step(unsplit, (x, each), {}).differs_from(step(placed, (x, each), {}))
            assert placed.traced.rung == RUNG
    odd = baechi.trace(seeded(partial(Detector, odd=True)), (x, mask))
    assert odd.rung == "module granularity, opaque leaves"  # which takes every value


@pytest.mark.parametrize("build", [Detector, Careful])
def test_on_meta_numbers_are_taken_to_be_finite(build: Callable[[], nn.Module]) -> None:
    x, mask = torch.randn(3, 4), torch.tensor([True, False, True, True])
    real, bare = (baechi.trace(seeded(build).to(kind), (x, mask)) for kind in ("cpu", "meta"))
    assert real.rung == bare.rung == RUNG
    graphs = [traced.module.graph_module.graph for traced in (real, bare)]
    assert str(graphs[0]) == str(graphs[1])
    assert any(str(node.target).startswith(CHECK) for node in graphs[1].nodes)


class Wordy(nn.Module):
    """Asks in a line that is too long to be quoted."""

    def forward(self, x: Tensor) -> Tensor:
        unfit_for_the_rest = torch.isnan(x).any() or torch.isinf(x).any() or x.min() < -1
        return x if unfit_for_the_rest else x.relu()


def test_on_meta_no_other_truth_value_is_known() -> None:
    with pytest.raises(baechi.TraceError, match="on meta nothing shows whether it runs"):
        baechi.trace(Wordy().to("meta"), (torch.ones(3, device="meta"),))


def test_on_a_gpu_the_host_checks() -> None:
    """A check that fails on a GPU would end all of the process's CUDA."""
    module = baechi.trace(Wordy(), (torch.ones(3),)).module
    rows = [node for nodes in module.nodes for node in nodes]
    checks = [node for node in rows if str(node.target).startswith(CHECK)]
    assert len(checks) == 3
    for node in checks:
        assert 240 < len(node.args[1].encode()) < 255  # torch takes no longer message there
        assert "test_guards.py" in node.args[1]
    part = extract(module.graph_module, rows, [], device=torch.device("cuda"))
    assert "torch.ops.aten._assert_async" not in part.function.__self__.code
    assert part.function(torch.zeros(3)) == ()
    with pytest.raises(RuntimeError, match=r"read False .* would now read True.*submodule"):
        part.function(torch.tensor([float("nan"), 0.0, 0.0]))


def test_numbers_are_not_told() -> None:
    with pytest.raises(baechi.TraceError, match="forward asks no tensor for a truth value"):
        baechi.trace(Signs(), (torch.randn(3, 4),))


class Wrapped(nn.Module):
    """Scales what a layer gives that another module has, too."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.factor = layer, 2.0

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh() * self.factor


class Twice(nn.Module):
    """A layer under two names, and a branch on a truth value that keeps it from being whole."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale, self.limit = nn.Linear(4, 4), 1.5, 1e9
        self.wrapped = Wrapped(self.layer)

    def forward(self, x: Tensor) -> Tensor:
        x = self.wrapped(x).clone()
        x[:, 1:] = x[:, :-1].clone()  # what torch.fx cannot trace
        return self.layer(x) * self.scale if self.limit is None or x.sum() < self.limit else x


@pytest.mark.parametrize("changed", ["scale", "wrapped.factor"])
def test_attributes_of_a_model_with_a_shared_module_are_seen_to_change(changed: str) -> None:
    model, x = seeded(Twice), torch.randn(3, 4)
    model.limit = None
    with one_thread():
        placed = at_random(copy.deepcopy(model), (x,))
        assert not step(model, (x,), {}).differs_from(step(placed, (x,), {}))
        path, _, name = changed.rpartition(".")
        setattr(placed.get_submodule(path), name, 5.0)
        with pytest.raises(baechi.InputError, match=f"{changed} was .* and is 5.0"):
            placed(x)


def test_a_model_with_a_shared_module_may_ask_for_truth_values() -> None:
    model, x = seeded(Twice), torch.randn(3, 4)
    with one_thread():
        placed = at_random(copy.deepcopy(model), (x,))
        assert placed.traced.rung == RUNG
        assert not step(model, (x,), {}).differs_from(step(placed, (x,), {}))


class LayerDrop(nn.Module):
    """Leaves out layers at random, as the encoders of transformers do."""

    def __init__(self, probability: float, *, checks: bool = True) -> None:
        super().__init__()
        self.probability, self.checks = probability, checks
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        x[:, 1:] = x[:, :-1].clone()  # what torch.fx cannot trace
        for layer in self.layers:
            if self.training and torch.rand([]) < self.probability:
                continue
            x = layer(x)
        return x + 1 if self.checks and torch.lt(input=x.sum(), other=1e9) else x


def test_a_branch_that_no_draw_changes_is_in_the_trace() -> None:
    model, x = seeded(partial(LayerDrop, 0.0)), torch.randn(3, 4)
    with one_thread():
        placed = at_random(copy.deepcopy(model), (x,))
        assert placed.traced.rung == RUNG
        assert not step(model, (x,), {}).differs_from(step(placed, (x,), {}))
    assert baechi.trace(LayerDrop(1.0), (x,)).rung == RUNG  # all are left out


@pytest.mark.parametrize("probability", [0, 0.0])
def test_a_branch_that_no_draw_changes_needs_no_check(probability: float) -> None:
    model, x = seeded(partial(LayerDrop, probability, checks=False)), torch.randn(3, 4)
    with one_thread():
        placed = at_random(copy.deepcopy(model), (x,))
        assert placed.traced.rung == "torch.export (non-strict)"
        assert not step(model, (x,), {}).differs_from(step(placed, (x,), {}))
        wanted, found = (after_a_call(each, x) for each in (model, placed))
    assert torch.equal(wanted, found)


def after_a_call(model: nn.Module, x: Tensor) -> Tensor:
    """What is drawn next."""
    torch.manual_seed(3)
    model(x)
    return torch.rand(4)


class LayerDropAtOnce(LayerDrop):
    """Draws for all layers at once, as g-mlp-pytorch and vit-pytorch do."""

    def forward(self, x: Tensor) -> Tensor:
        to_drop = torch.zeros(len(self.layers)).uniform_(0.0, 1.0) < self.probability
        x = x.clone()
        x[:, 1:] = x[:, :-1].clone()
        for layer, drop in zip(self.layers, to_drop, strict=True):
            if not drop:
                x = layer(x)
        return x


def test_a_branch_taken_at_random_is_refused_by_name() -> None:
    for kind, probability in ((LayerDropAtOnce, 1e-6), (LayerDrop, 0.5)):
        with pytest.raises(baechi.TraceError, match=r"LayerDrop does.*\(at test_guards.py:"):
            baechi.trace(kind(probability), (torch.randn(3, 4),))
    baechi.trace(LayerDrop(0.5).eval(), (torch.randn(3, 4),))


def test_the_real_run_leaves_nothing_behind() -> None:
    model = seeded(Writing)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    args = (torch.randn(3, 4), torch.ones(4, dtype=torch.bool))
    state = torch.get_rng_state()
    baechi.trace(model, args)
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


class Logged(nn.Module):
    """Notes in its own loop what forward does not read, and may read its scale in several ways."""

    def __init__(self, read: Callable[[nn.Module], float] | None = None) -> None:
        super().__init__()
        self.first, self.last, self.read = nn.Linear(6, 6), nn.Linear(6, 2), read
        self.steps, self.losses, self.logs, self.latest = 0, [], {}, None
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        return self.last(h if self.read is None else h * self.read(self))

    def training_step(self, x: Tensor) -> Tensor:
        loss = self(x).square().mean()
        self.steps += 1
        self.losses.append(loss.item())
        self.logs["loss"] = self.latest = loss.detach()
        return loss


def test_what_forward_does_not_read_may_change() -> None:
    module = at_random(Logged(), (X,))
    unsplit = copy.deepcopy(module)
    for _ in range(3):
        assert torch.equal(module.training_step(X), unsplit.training_step(X))
        module.scale = unsplit.scale = unsplit.scale + 1
    assert module.losses == unsplit.losses
    assert len(module._specializations) == 1


@pytest.mark.parametrize(
    "read",
    [
        lambda module: module.scale,
        lambda module: vars(module)["scale"],
        lambda module: copy.copy(module).scale,
        attrgetter("scale"),
    ],
)
def test_what_forward_reads_in_any_way_is_seen_to_change(read: Callable[..., float]) -> None:
    module = lazily(nn.Sequential(Logged(read)), placer="round-robin")
    module(X)
    module[0].scale = 2.0
    assert torch.equal(module(X), copy.deepcopy(module)(X))
