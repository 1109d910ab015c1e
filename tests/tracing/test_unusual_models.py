"""What few models do, and some: as the unsplit model, or refused by name; never something else."""

import copy
import functools
import sys
import sysconfig
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from placed import EXACT, again_at_random, assert_same_values, at_random, lazily, place_on, step
from torch import Tensor, nn

import baechi

pytestmark = pytest.mark.usefixtures("one_thread")

X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Middle(nn.Module):
    """Two linear layers, and a function of the model and of what is between them."""

    def __init__(self, middle: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.middle = middle
        self.drop = nn.Dropout(0.5)
        self.table = torch.arange(4.0)
        self.rows: dict[int, Tensor] = {}
        self.state = SimpleNamespace(seen=None, count=torch.zeros(4))

    def forward(self, x: Tensor) -> Any:
        return self.last(self.middle(self, self.first(x)))


class Inside(nn.Module):
    """The same function in a submodule, which may stay whole."""

    def __init__(self, middle: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.middle = middle

    def forward(self, x: Tensor) -> Any:
        return self.middle(self, x)


def within(function: Callable[[Any, Tensor], Any]) -> Middle:
    model = Middle(lambda model, x: model.inside(x))
    model.inside = Inside(function)
    return model


def assert_equal_steps(one: nn.Module, two: nn.Module, calls: Sequence[Any]) -> None:
    for seed, args in enumerate(calls):
        left = []
        for model in (one, two):
            torch.manual_seed(seed)
            left.append(step(model, args, {}))
        assert not left[0].differs_from(left[1])


# Arguments.


class Named(nn.Module):
    def forward(self, **rows: Tensor) -> Tensor:
        return torch.cat([row * i for i, row in enumerate(rows.values())])


def test_keyword_arguments_come_in_the_callers_order() -> None:
    placed = lazily(Named())
    for rows in ({"b": X, "a": X + 1}, {"a": X, "b": X + 1}):
        assert torch.equal(placed(**rows), Named()(**rows))


def test_hooks_of_the_model_see_how_it_is_called() -> None:
    models = [Middle(lambda _, x: x) for _ in range(2)]
    for model in models:
        model.register_forward_pre_hook(lambda _, args: tuple(2 * x for x in args))
        model.register_forward_hook(lambda _, args, y: y + sum(args))
    placed = lazily(models[1])
    assert_equal_steps(models[0], placed, [(X,), (X + 1,)])
    assert torch.equal(placed(x=X), models[0](x=X))


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4, 4), 2.0))

    def forward(self, x: Tensor, other: Any) -> Tensor:
        if x.is_sparse:
            return torch.sparse.mm(x, self.weight)
        return x @ self.weight + (other(x) if callable(other) else 3 * x @ other)


def test_an_argument_that_is_a_parameter_is_still_an_argument() -> None:
    model, unsplit = Sums(), Sums()
    placed = again_at_random(baechi.trace(model, (X, model.weight)), seed=0, devices=2)
    other = torch.ones(4, 4)
    assert torch.equal(placed(X, other), unsplit(X, other))
    for one, two in ((placed, model), (unsplit, unsplit)):
        one(X, two.weight).square().sum().backward()
    assert torch.equal(model.weight.grad, unsplit.weight.grad)


def test_a_sparse_buffer_that_forward_does_not_read_is_in_no_way() -> None:
    """As openai-whisper has one for the heads that align; the model stayed whole for it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model.register_buffer("heads", torch.eye(3).to_sparse(), persistent=False)
    traced = baechi.trace(model, (X,))
    assert traced.rung == "torch.export (non-strict)"
    placed = again_at_random(traced, seed=1, devices=2)
    assert torch.equal(placed(X), model(X))


def test_sparse_is_another_layout_and_each_module_another_argument() -> None:
    placed, unsplit = lazily(Sums()), Sums()
    heads = [nn.Linear(4, 4).requires_grad_(False) for _ in range(2)]
    for other in (torch.ones(4, 4), *heads):
        assert torch.equal(placed(X, other), unsplit(X, other))
    with pytest.raises(baechi.TraceError):
        placed(X.to_sparse(), torch.ones(4, 4))


class Labelled(Tensor):
    """Keeps to its class, as torch lets it."""


class Doubled(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        value = super().__torch_function__(func, types, args, kwargs or {})
        return super().__torch_function__(torch.add, types, (value, value), {})


def test_a_tensor_that_computes_otherwise_is_refused() -> None:
    model = Middle(lambda _, x: x)
    placed = lazily(model)
    assert torch.equal(placed(X.as_subclass(Labelled)), copy.deepcopy(model)(X))
    with pytest.raises(baechi.InputError, match="is a Doubled, whose own __torch_function__"):
        placed(X.as_subclass(Doubled))


# What is read besides arguments and state.


def test_a_parameter_that_is_not_registered_is_refused() -> None:
    heads = [nn.Linear(4, 4)]
    with pytest.raises(baechi.TraceError, match=r"no parameter of the model, at test_unus.*heads"):
        baechi.trace(Middle(lambda _, x: heads[0](x)), (X,))


def test_a_parameter_hidden_in_a_submodule_that_stays_whole_is_refused() -> None:
    model = within(lambda model, x: x * model.rows[0] if x.sum().item() < 1e9 else x)
    model.inside.rows = [nn.Parameter(torch.ones(4))]
    with pytest.raises(baechi.TraceError, match=r"a Inside holds a parameter of shape \[4\]"):
        baechi.trace(model, (X,))


def test_a_teacher_that_is_not_registered_has_no_gradient() -> None:
    teacher = nn.Linear(4, 4)

    def middle(_: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            goal = teacher(x)
        return x * goal

    placed = again_at_random(baechi.trace(Middle(middle), (X,)), seed=0, devices=2)
    assert_equal_steps(Middle(middle), placed, [(X,), (X + 1,)])


@pytest.mark.parametrize("make", [Middle, within])
def test_a_tensor_from_outside_is_written_once_in_each_call(make: Callable[..., Any]) -> None:
    counts = torch.zeros(4), torch.zeros(4)

    def counting(count: Tensor) -> nn.Module:
        def middle(_: Any, x: Tensor) -> Tensor:
            count.add_(1)
            return x + count

        return make(middle)

    unsplit, model = map(counting, counts)
    placed = again_at_random(baechi.trace(model, (X,)), seed=0, devices=2)
    assert counts[1].sum() == 0
    assert_equal_steps(unsplit, placed, [(X,), (X,)])
    assert torch.equal(*counts)


def test_who_asks_for_the_value_of_what_it_counts_hears_when_it_changes() -> None:
    def asking(model: Any, x: Tensor) -> Tensor:
        model.state.count += 1
        return x * 2 if model.state.count[0] > 1 else x

    placed = again_at_random(baechi.trace(Middle(asking), (X,)), seed=0, devices=2)
    assert torch.equal(placed(X), Middle(asking)(X))
    with pytest.raises(baechi.ExecutionError, match="would now read True"):
        placed(X)


# What forward leaves in the model.


def remember(model: Any, x: Tensor) -> Tensor:
    if len(x) not in model.rows:
        model.rows[len(x)] = torch.arange(len(x), dtype=x.dtype)[:, None].cos()
    model.state.seen = x.detach()
    return x * model.rows[len(x)] + model.state.seen


def test_lists_dicts_and_objects_of_the_model_hold_no_tensor_of_a_tracer() -> None:
    model = Middle(remember)
    placed = lazily(model)
    with pytest.warns(UserWarning, match="of this Middle changes rows, state.seen in Python"):
        assert_equal_steps(Middle(remember), placed, [(X,), (X[:2],)])
    assert not model.rows
    assert model.state.seen is None


@functools.lru_cache
def cosines(n: int) -> Tensor:
    return torch.arange(n, dtype=torch.float32)[:, None].cos()


class Tables:
    @staticmethod
    @functools.lru_cache
    def cosines(n: int) -> Tensor:
        return cosines.__wrapped__(n)


@pytest.mark.parametrize(
    "where", ["file", *(pytest.param(way, marks=pytest.mark.slow) for way in ("class", "model"))]
)
def test_cached_functions_keep_no_tensor_of_a_tracer(where: str) -> None:
    table = {
        "file": cosines,
        "class": Tables.cosines,
        "model": functools.lru_cache(cosines.__wrapped__),
    }[where]
    model = Middle(lambda _, x: x * table(len(x)))
    placed = again_at_random(baechi.trace(model, (X,)), seed=0, devices=2)
    assert type(table(len(X))) is Tensor
    assert torch.equal(placed(X), copy.deepcopy(model)(X))
    table.cache_clear()


def test_a_function_with_a_cache_may_come_into_an_installed_package_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    package = ModuleType("installed")
    package.__file__ = f"{sysconfig.get_path('purelib')}/installed/__init__.py"
    monkeypatch.setitem(sys.modules, "installed", package)
    model = Middle(lambda _, x: x * package.table(len(x)))
    package.table = cosines.__wrapped__
    baechi.trace(model, (X,))
    package.last = package.table = functools.lru_cache(cosines.__wrapped__)
    baechi.trace(model, (X,))
    assert type(package.table(len(X))) is Tensor


def test_what_layers_of_einops_note_is_no_matter_of_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    package = ModuleType("einops")
    monkeypatch.setitem(sys.modules, "einops", package)
    layer = """
from torch import nn
kinds = {}
def backend(x):
    if type(x) not in kinds:
        kinds[type(x)] = nn
    return kinds[type(x)]
class Turned(nn.Module):
    def forward(self, x):
        backend(x)
        return x.mT
"""
    exec(layer, vars(package))
    model = nn.Sequential(nn.Linear(4, 4), package.Turned(), nn.Linear(3, 4))
    placed = lazily(copy.deepcopy(model))
    placed(X)  # a warning would be an error
    assert not placed.remarks
    assert_equal_steps(model, placed, [(X,)])
    placed.unplace()


def make_buffer(model: Any, x: Tensor) -> Tensor:
    if not hasattr(model, "shift"):
        model.register_buffer("shift", x.detach().mean(0), persistent=False)
    return x + model.shift


def make_module(model: Any, x: Tensor) -> Tensor:
    if not hasattr(model, "head"):
        model.head = nn.Linear(x.shape[-1], 4)
    return model.head(x)


@pytest.mark.parametrize(("make", "name"), [(make_buffer, "shift"), (make_module, "head")])
def test_what_forward_registers_is_refused_until_it_has_run(
    make: Callable[..., Any], name: str
) -> None:
    model = Middle(make)
    with pytest.raises(baechi.TraceError, match=f"makes '{name}'.* Run the model once"):
        baechi.trace(model, (X,))
    assert not hasattr(model, name)
    unsplit = Middle(make)
    for each in (model, unsplit):
        torch.manual_seed(1)
        each(X)
    placed = again_at_random(baechi.trace(model, (X,)), seed=0, devices=2)
    assert_equal_steps(unsplit, placed, [(X,), (X + 1,)])


class Way(nn.Module):
    """A layer, and a factor for what it gives."""

    def __init__(self, layer: nn.Module, factor: float) -> None:
        super().__init__()
        self.layer, self.factor = layer, factor

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.factor


def choose_another_way(model: Any, x: Tensor) -> Tensor:
    if model.extra.factor > 0:
        model.extra = Way(model.extra.layer, -1.0)
    return model.extra(x)


def test_a_submodule_that_forward_exchanges_for_one_of_the_same_weights_is_no_new_state() -> None:
    """As BigBird does, whose attention is another where the text is short."""
    unsplit, model = (Middle(choose_another_way) for _ in range(2))
    unsplit.extra, model.extra = (Way(copy.deepcopy(unsplit.last), 1.0) for _ in range(2))
    placed = again_at_random(baechi.trace(model, (X,)), seed=0, devices=2)
    assert_equal_steps(unsplit, placed, [(X,), (X + 1,)])


def settle_another_way(model: Any, x: Tensor) -> Tensor:
    if model.way == "long":
        model.extra, model.way = Way(model.extra.layer, -1.0), "short"
    return model.extra(x)


def test_the_way_that_forward_settles_with_an_exchanged_submodule_stays() -> None:
    unsplit, model = (Middle(settle_another_way) for _ in range(2))
    for each in (unsplit, model):
        each.extra, each.way = Way(copy.deepcopy(each.last), 1.0), "long"
    placed = lazily(model)
    assert_equal_steps(unsplit, placed, [(X,), (X + 1,), (X[:2],)])
    assert (placed.way, placed.extra.factor) == (unsplit.way, unsplit.extra.factor)


def scale_once(model: Any, x: Tensor) -> Tensor:
    """As RWKV, which scales its weights in the first call of evaluation."""
    if not model.scaled:
        with torch.no_grad():
            model.extra.weight.div_(2)
        model.scaled = True
    return model.extra(x)


def test_a_write_to_a_parameter_that_forward_does_once_is_refused_until_it_is_done() -> None:
    unsplit, model = (Middle(scale_once) for _ in range(2))
    for each in (unsplit, model):
        each.extra, each.scaled = copy.deepcopy(each.last), False
    with pytest.raises(baechi.TraceError, match=r"div_.*writes into a parameter.* sets scaled"):
        lazily(copy.deepcopy(model))(X)
    for each in (unsplit, model):
        each(X)
    assert_equal_steps(unsplit, lazily(model), [(X,), (X + 1,)])


def average(model: Any, x: Tensor) -> Tensor:
    """As a VQ-VAE, whose codes are averages, and whose `perplexity` is for the caller."""
    codes = model.extra.weight
    nearest = codes.detach()[torch.cdist(x.detach(), codes.detach()).argmin(-1)]
    codes.data.copy_(codes * 0.9 + x.detach().mean() * 0.1)
    model.spread = x.std()
    return x + nearest


def test_what_forward_sets_for_the_caller_does_not_keep_it_from_writing_a_parameter() -> None:
    unsplit, model = (Middle(average) for _ in range(2))
    for each in (unsplit, model):
        each.extra, each.spread = copy.deepcopy(each.last), torch.zeros(())
    with pytest.warns(UserWarning, match="changes spread in Python"):
        assert_equal_steps(unsplit, lazily(model), [(X,), (X + 1,)])


class Again(torch.autograd.Function):
    """As a reversible layer: it runs again in its own backward. It hands out a view."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module, found: list[Tensor]) -> Tensor:
        ctx.save_for_backward(x.detach())
        ctx.layer = layer
        found.append(x[:, :2])
        return layer(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x = ctx.saved_tensors[0].float().requires_grad_()
        with torch.enable_grad():
            ctx.layer(x).float().backward(gradients[0].float())
        return x.grad, None, None


class Reversible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        found: list[Tensor] = []
        torch.manual_seed(7)  # so it stays whole
        return Again.apply(x, self.layer, found), found[0]


class OfReversible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.inner, self.last = nn.Linear(4, 4), Reversible(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, view = self.inner(self.first(x))
        return self.last(y), view


@pytest.mark.parametrize("lower", [False, True])
def test_a_layer_that_runs_again_in_its_own_backward_is_as_unsplit(lower: bool) -> None:
    unsplit = OfReversible()
    placed = lazily(OfReversible())
    left = []
    for model in (unsplit, placed):
        # A cast of a weight that a tracer made would be in the cache of this autocast.
        with torch.autocast("cpu", torch.bfloat16, enabled=lower):
            result, view = model(X)
        assert type(result) is Tensor
        assert view.requires_grad
        (result.float().sum() + view.float().sum()).backward()
        left.append([result, view, *(parameter.grad for parameter in model.parameters())])
    assert all(map(torch.equal, *left))


# Random numbers.


def seeding(_: Any, x: Tensor) -> Tensor:
    torch.manual_seed(7)
    return x * torch.rand_like(x)


def making_a_generator(_: Any, x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return x * torch.rand(4, generator=generator) + torch.rand(4, generator=generator)


def seeding_its_generator(model: Any, x: Tensor) -> Tensor:
    model.generator.manual_seed(7)
    return x * torch.rand(4, generator=model.generator)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (seeding, r"what torch\.manual_seed asks for"),
        (making_a_generator, "from a torch.Generator of its own"),
        (seeding_its_generator, "from a torch.Generator of its own"),
    ],
)
def test_who_seeds_in_forward_stays_whole_or_is_refused(
    function: Callable[[Any, Tensor], Tensor], said: str
) -> None:
    model = Middle(function)
    model.generator = torch.Generator().manual_seed(1)
    state = model.generator.get_state()
    with pytest.raises(baechi.TraceError, match=said):
        baechi.trace(model, (X,))
    assert torch.equal(model.generator.get_state(), state)
    if function is not seeding_its_generator:
        placed = again_at_random(baechi.trace(within(function), (X,)), seed=0, devices=2)
        assert_equal_steps(within(function), placed, [(X,), (X + 1,)])


class Noise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        noise = torch.rand_like(x)
        ctx.save_for_backward(noise)
        return x * noise

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (noise,) = ctx.saved_tensors
        return gradient * noise


def under_autocast(_: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        weights = nn.functional.dropout(x @ x.T, 0.5).float()
    return weights @ x


def without_gradients(_: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        noise = Noise.apply(torch.ones_like(x)) * torch.rand_like(x)
    return x * noise


def branching(_: Any, x: Tensor) -> Tensor:
    return x * torch.rand_like(x) if x.sum().item() < 1e9 else x


class Stack(nn.Module):
    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.after = nn.Linear(4, 4), nn.Linear(4, 4)
        self.part = nn.Sequential(nn.Linear(4, 4), Inside(function), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.part(self.before(x)))


@pytest.mark.parametrize(
    ("function", "draws"),
    [
        (lambda _, x: Noise.apply(x), 1),
        (under_autocast, 1),
        (without_gradients, 2),
        (branching, 1),
    ],
)
def test_what_runs_again_draws_again(function: Callable[[Any, Tensor], Tensor], draws: int) -> None:
    traced = baechi.trace(Stack(function), (X,))
    assert sum(op.random for op in traced.ops) == draws
    placer = baechi.RandomPlacer(0)
    placed = place_on(traced, 1, placer, checkpoint=["part"], threads_per_device=1)
    assert_equal_steps(Stack(function), placed, [(X,), (X + 1,)])


# Blocks without gradients.


def guarded(_: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        factor = 2.0 if (x > 1e6).any() else 1.0
    return x * factor


def test_a_check_in_a_block_without_gradients_is_made() -> None:
    placed = again_at_random(baechi.trace(Middle(guarded), (X,)), seed=0, devices=2)
    assert_equal_steps(Middle(guarded), placed, [(X,), (X + 1,)])
    with pytest.raises(baechi.ExecutionError, match="would now read True"):
        placed(X * 1e9)


# Symbolic tracing, beside a submodule that stays whole.


class Whole(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 1.5 if x.sum().item() < 1e9 else x


class Asking(nn.Module):
    """Does something that fx cannot tell; which in a submodule would keep that whole."""

    def __init__(self, ask: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.whole, self.ask = Whole(), ask

    def forward(self, x: Tensor) -> Any:
        return self.ask(self.whole(x))


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda x: x * 2 if isinstance(x, Tensor) else x, "asks for the type of"),
        pytest.param(
            *(lambda x: x * 2 if torch.is_tensor(x) else x, "asks for the type of"),
            marks=pytest.mark.slow,
        ),
        (lambda x: x * 2 if type(x) is Tensor else x, "asks for the type of"),
        (lambda x: (x, torch.zeros(())), "returns a tensor that it makes"),
    ],
)
def test_what_symbolic_tracing_refuses_by_name_an_export_traces(
    ask: Callable[[Tensor], Any], said: str
) -> None:
    model = Asking(ask)
    module = at_random(model, (X,), devices=2)
    assert module.traced.rung == "torch.export (non-strict), opaque submodules"
    assert any(said in attempt.reason for attempt in module.traced.attempts)
    for x in (X, -2 * X):
        assert_same_values(module(x), Asking(ask)(x), **EXACT)
    module.unplace()


class Mean(nn.Module):
    """Keeps a mean in a plain attribute, and reads it before or after that; fx runs `2 * mean`."""

    def __init__(self, *, before: bool, factor: float) -> None:
        super().__init__()
        self.whole, self.mean = Whole(), torch.zeros(4)
        self.before, self.factor = before, factor

    def forward(self, x: Tensor) -> Tensor:
        known = self.factor * self.mean if self.before else None
        self.mean.lerp_(self.whole(x).detach().mean(0), 0.1)
        if known is None:
            known = self.factor * self.mean if self.factor != 1 else self.mean
        return x + known


@pytest.mark.parametrize("before", [True, False])
def test_what_symbolic_tracing_would_freeze_an_export_traces(before: bool) -> None:
    own, module = (Mean(before=before, factor=2) for _ in range(2))
    module = at_random(module, (X,), devices=2)
    reasons = [attempt.reason for attempt in module.traced.attempts]
    assert any("mean, into which it writes" in reason for reason in reasons)
    for _ in range(3):
        assert torch.equal(module(X), own(X))
        assert torch.equal(module.mean, own.mean)
    module.unplace()


def test_symbolic_tracing_takes_what_forward_writes_as_it_is() -> None:
    own, module = Mean(before=False, factor=1), Mean(before=False, factor=1)
    module = at_random(module, (X,), devices=2)
    for _ in range(2):
        assert torch.equal(module(X), own(X))
        assert torch.equal(module.mean, own.mean)
    module.unplace()


def test_what_symbolic_tracing_refuses_stays_whole_in_a_submodule() -> None:
    ask = Asking(lambda x: x * 2 if isinstance(x, Tensor) else x)
    traced = baechi.trace(nn.Sequential(nn.Linear(4, 4), ask, nn.Identity()), (X,))
    assert traced.rung == "module granularity, opaque leaves"


class Reads(nn.Module):
    """Returns an object that computes with a tensor later."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        weight = self.linear(x)
        if weight[0, 0].item() > 1e9:
            weight = weight * 2
        return SimpleNamespace(scale=lambda y: y * weight)


class Scales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.reads, self.last = Reads(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.reads(x).scale(x))


def test_what_returns_an_object_with_tensors_stays_whole_with_its_caller() -> None:
    torch.manual_seed(0)
    with pytest.raises(baechi.TraceError, match="reads stays whole and returns a SimpleNamespace"):
        baechi.trace(Scales(), (X,))
    model = nn.Sequential(nn.Linear(4, 4), Scales())
    unsplit = copy.deepcopy(model)
    placed = at_random(model, (X,), devices=2)
    for own in (placed, unsplit):
        own(X).sum().backward()
    assert [p.grad.tolist() for p in placed.parameters()] == [
        p.grad.tolist() for p in unsplit.parameters()
    ]
    placed.unplace()


class Slices(nn.Module):
    """Cuts by a number of numpy's, before a submodule that stays whole."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.whole, self.ends = nn.Linear(4, 4), Whole(), np.array([1, 3])

    def forward(self, x: Tensor) -> Tensor:
        return self.whole(self.linear(x)[:, self.ends[0] : self.ends[1]])


def test_numbers_of_numpy_are_numbers_beside_a_submodule_that_stays_whole() -> None:
    model = Slices()
    wanted = model(X)
    placed = at_random(model, (X,), devices=2)
    assert placed.traced.rung == "module granularity, opaque leaves"
    assert torch.equal(placed(X), wanted)
    placed.unplace()


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder, self.last = nn.TransformerEncoder(layer, 1), nn.Linear(8, 8)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        return self.last(self.encoder(x, src_key_padding_mask=padding))


@pytest.mark.filterwarnings("ignore:encoder of this Encoder, with 89%:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_encoder_that_drops_padding_drops_it() -> None:
    unsplit, placed = Encoder().eval(), lazily(Encoder().eval())
    x, padding = torch.linspace(-1, 1, 80).reshape(2, 5, 8).sin(), torch.zeros(2, 5).bool()
    padding[1, 3:] = True
    for gradients, rung in ((False, "opaque"), (True, "non-strict")):
        with torch.set_grad_enabled(gradients):
            assert torch.equal(placed(x, padding), unsplit(x, padding))
        assert rung in placed.traced.rung
    lines = {op.source.partition(":")[0] for op in placed.traced.ops if op.source}
    assert lines == {"test_unusual_models.py"}, "not the lines of what watches the encoder"


class Doubling(nn.Module):
    """As gpytorch's base class does, it takes arguments by their places alone."""

    def __call__(self, *args: Any, prior: bool = False) -> Any:
        result = super().__call__(*(arg * 2 for arg in args))
        return result * 3 if prior else result


class Called(Doubling):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu())


def test_a_model_with_a_call_of_its_own_is_called_as_the_caller_does() -> None:
    unsplit, placed = Called(), lazily(Called())
    for given in ({}, {"prior": True}):
        left = [step(model, (X,), given) for model in (unsplit, placed)]
        assert not left[0].differs_from(left[1])
    with pytest.raises(baechi.TraceError, match=r"__call__\(\) got an unexpected .* 'x'"):
        placed(x=X)
    placed.unplace()


# What changes after the trace.


class Times:
    """An object that is called, with a plain value."""

    def __init__(self) -> None:
        self.factor = 2.0

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.factor


class Scaled(Middle):
    scale = 1.0

    def __init__(self) -> None:
        super().__init__(
            lambda model, x: (
                (model.times(model.act(x)) * model.scale + model.table)
                * float(model.row[0] * model.beta)
            )
        )
        self.act = torch.relu
        self.row, self.beta = np.ones(2), np.float32(1)
        self.times = Times()


def set_class_attribute(model: nn.Module) -> None:
    model.scale = 3.0


def set_tensor(model: nn.Module) -> None:
    model.table = torch.ones(4)


def set_number_of_numpy(model: nn.Module) -> None:
    model.beta = np.float32(0.7)


def set_in_what_is_called(model: nn.Module) -> None:
    model.times.factor = 3.0


def set_array(model: nn.Module) -> None:
    model.row = np.zeros(2)


def set_function(model: nn.Module) -> None:
    model.act = nn.functional.gelu


@pytest.mark.parametrize(
    "change",
    [
        *(set_function, set_array, set_number_of_numpy, set_in_what_is_called),
        *(pytest.param(f, marks=pytest.mark.slow) for f in (set_class_attribute, set_tensor)),
    ],
)
def test_attributes_of_classes_tensors_and_functions_are_seen(change: Callable[..., None]) -> None:
    unsplit, placed = Scaled(), lazily(Scaled())
    assert_equal_steps(unsplit, placed, [(X,)])
    for model in (unsplit, placed):
        change(model)
    assert_equal_steps(unsplit, placed, [(X,), (X,)])
    assert len(placed._specializations) == 2


def test_a_dict_of_another_class_is_as_it_was_with_what_is_in_it() -> None:
    class Hparams(dict[str, Any]):
        pass

    unsplit = Middle(lambda model, x: x * model.hparams["scale"])
    unsplit.hparams = Hparams(scale=2.0, loss=nn.MSELoss(), table=torch.ones(4))
    placed = lazily(copy.deepcopy(unsplit))  # a warning would be an error
    assert_equal_steps(unsplit, placed, [(X,)])
    for model in (unsplit, placed):
        model.hparams["scale"] = 3.0
    assert_equal_steps(unsplit, placed, [(X,)])
    assert len(placed._specializations) == 2
    assert not placed.remarks
    placed.unplace()


class Dual(torch.fx.GraphModule):
    """As torchvision's feature extractors: one graph in training, and another in evaluation."""

    def __init__(self, root: nn.Module) -> None:
        graphs = {mode: torch.fx.Tracer().trace(root.train(mode)) for mode in (False, True)}
        super().__init__(root, graphs[True])
        self.graphs = graphs

    def train(self, mode: bool = True) -> "Dual":
        self.graph = self.graphs[mode]  # which compiles it
        return super().train(mode)


@pytest.mark.parametrize("inside", [False, True])
def test_a_graph_module_may_be_compiled_anew(inside: bool) -> None:
    def own(model: Any) -> Any:
        return model[0] if inside else model

    def make() -> nn.Module:
        graph = Dual(Middle(lambda model, x: x * 2 if model.training else x.relu()))
        return nn.Sequential(graph, nn.Linear(4, 4)) if inside else graph

    unsplit, placed = make(), lazily(make())
    for mode in (True, False, True, False):
        for model in (unsplit, placed):
            model.train(mode)
        assert_equal_steps(unsplit, placed, [(X,)])
    assert len(placed._specializations) == 2
    for model in (unsplit, placed):
        own(model).graph.find_nodes(op="call_method", target="relu")[0].target = "tanh"
        own(model).recompile()
    assert_equal_steps(unsplit, placed, [(X,)])
    placed = placed.unplace()
    for mode in (True, False):
        for model in (unsplit, placed):
            model.train(mode)
        assert_equal_steps(unsplit, placed, [(X,)])
