"""What is dropped from a traced graph or read once in it, and what stays."""

import copy
import operator
from collections.abc import Callable
from functools import partial

import pytest
import torch
from placed import again_at_random, one_thread, step
from seeds import some
from torch import Tensor, fx, nn
from torch.nn import functional

import baechi
from baechi.tracing.fx_nodes import target_name


def targets(traced: baechi.Traced) -> list[str]:
    modules = traced.module.graph_module.modules()
    parts = [part for part in modules if isinstance(part, torch.fx.GraphModule)]
    return [str(node.target) for part in parts for node in part.graph.nodes]


class Casts(nn.Module):
    """The embedding is read twice, once through a cast to its own type."""

    def __init__(self, **how: object) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.how = how

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        with torch.autocast("cpu", enabled=False):
            other = self.first(hidden.to(**self.how))
        return self.last(other).to(hidden.dtype) + hidden


@pytest.mark.parametrize("how", [{"dtype": torch.float32}, {"device": "cpu"}])
def test_casts_to_what_is_there_and_checks_are_dropped(how: dict[str, object]) -> None:
    model, tokens = Casts(**how), torch.tensor([[1, 2, 3]])
    traced = baechi.trace(model, (tokens,))
    assert traced.rung == "torch.export (non-strict)"
    assert not [name for name in targets(traced) if ".to." in name or "assert" in name]
    torch.testing.assert_close(traced.module.graph_module(tokens)[0], model(tokens), rtol=0, atol=0)


CONVERSIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "type_as": lambda x: x.type_as(torch.zeros(1)),
    "flatten": lambda x: x.flatten(1),
    "sum_to_size": lambda x: x.sum_to_size(x.shape),
    "to_dense": lambda x: x.to_dense(),
    "real": lambda x: x.real,
    "conj": lambda x: x.conj(),
    "conj_physical": lambda x: x.conj_physical(),
    "resolve_conj": lambda x: x.resolve_conj(),
    "resolve_neg": lambda x: x.resolve_neg(),
    "positive": lambda x: +x,
    "atleast_1d": torch.atleast_1d,
    "atleast_2d": torch.atleast_2d,
}


class Converts(nn.Module):
    """A tensor is read by itself and as what a conversion with nothing to convert returns."""

    def __init__(self, how: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        a, b, c, d = self.layers
        hidden = a(x)
        assert self.how(hidden) is hidden or isinstance(hidden, fx.Proxy)
        return b(hidden) * c(self.how(hidden)) + d(hidden) * self.how(self.how(hidden)).sin()


@pytest.mark.parametrize("name", some(CONVERSIONS, 3))
def test_conversions_with_nothing_to_convert_are_dropped(name: str) -> None:
    model, x = Converts(CONVERSIONS[name]), torch.randn(8, 16)
    traced = baechi.trace(model, (x,))
    assert not [target for target in targets(traced) if name in target]
    with one_thread():
        expected = step(copy.deepcopy(model), (x,), {})
        for seed in range(3):
            module = again_at_random(traced, seed=seed, devices=3)
            assert not expected.differs_from(step(module, (x,), {}))
            module.unplace()


def test_conversions_that_change_something_stay() -> None:
    class Changes(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            other = torch.complex(x, x)
            return x.flatten(), other.real, x.sum_to_size(1, 4), x.type_as(other), other.conj()

    traced = baechi.trace(Changes(), (torch.randn(3, 4),))
    for name in ("flatten", "real", "sum_to_size", "type_as", "conj"):
        assert [target for target in targets(traced) if name in target], name


class Kept(nn.Module):
    """Casts with an effect: to another type, to new storage, to other strides."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        copy = x.to(torch.float32, copy=True)
        turned = x.to(x.dtype, memory_format=torch.channels_last)
        return x.to(torch.float64), copy.add_(1), turned


def test_casts_with_an_effect_stay() -> None:
    model, x = Kept(), torch.randn(2, 3, 4, 5)
    traced = baechi.trace(model, (x,))
    before = x.clone()
    wide, copy, turned = traced.module.graph_module(x)
    assert torch.equal(x, before)
    assert wide.dtype == torch.float64
    assert torch.equal(copy, x + 1)
    assert turned.is_contiguous(memory_format=torch.channels_last)


class Scaled(nn.Module):
    """Divides rows by their length: the product with itself is one reader of two."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.first(x)
        return self.last(rows * torch.rsqrt((rows * rows).sum(-1, keepdim=True) + 1e-6)).tanh()


class Stacked(nn.Module):
    """Joins a value three times with itself, and has another reader of it before."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.first(x)
        other = rows.tanh()
        return self.last(torch.stack([rows, rows, rows])).tanh() * other


class Written(nn.Module):
    """A value that was written is read by views of its own operator, and by others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        rows = self.first(x)
        rows[1].add_(rows[0])
        rows.mul_(self.last(x))
        return rows.sum(0) + rows.tanh(), rows.t().sin(), rows[:, 3] * 2, self.last(rows)


@pytest.mark.parametrize("kind", [Scaled, Stacked, Written])
def test_a_value_that_is_read_twice_beside_another_reader(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, args = kind(), (torch.randn(64, 16),)
    with one_thread():
        expected = step(copy.deepcopy(model), args, {})
        traced = baechi.trace(model, args)
        for seed in range(4):
            placed = again_at_random(traced, seed=seed, devices=3)
            assert step(placed, args, {}).differs_from(expected) == []
            placed.unplace()


class Other(nn.Module):
    """Nothing to do: the only reader, one that writes, and a product, which is many nodes."""

    def forward(self, x: Tensor) -> Tensor:
        alone = x.exp()
        square = x.sin()
        written = (alone * alone).clone()
        written.mul_(written)
        return written + square @ square + square


@pytest.mark.parametrize(("model", "count"), [(Scaled(), 1), (Stacked(), 2), (Other(), 0)])
def test_only_where_the_order_of_adding_up_is_told_by_it(model: nn.Module, count: int) -> None:
    traced = baechi.trace(model, (torch.randn(16, 16, requires_grad=True),))
    names = [str(node.target) for node in traced.module.graph_module.graph.nodes]
    assert names.count("aten.alias.default") == count


def test_the_name_of_a_function_has_no_address() -> None:
    graph = fx.Graph()
    for function in (torch.arange, operator.add, functional.relu, torch.relu):
        name = target_name(graph.call_function(function))
        assert "0x" not in name
        assert name.endswith(function.__name__)


class Asks(nn.Module):
    """Looks at a value, and so stays whole where the model does."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum().item() < 1e9 else x


class Unread(nn.Module):
    """Normalizations and an embedding whose results nobody reads, but which write state."""

    def __init__(self, last: nn.Module) -> None:
        super().__init__()
        self.last = last
        self.batch, self.table = nn.BatchNorm1d(4), nn.Embedding(5, 4, max_norm=0.1)
        self.instance = nn.InstanceNorm1d(4, track_running_stats=True)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        self.batch(x), self.instance(x), self.table(tokens)
        return self.last(x)


@pytest.mark.parametrize("last", [nn.Tanh, Asks])
@pytest.mark.parametrize("training", [True, False])
def test_what_nobody_reads_stays_if_it_writes_state(
    training: bool, last: Callable[[], nn.Module]
) -> None:
    model, args = Unread(last()).train(training), (torch.randn(3, 4, 5), torch.tensor([1, 2]))
    own = copy.deepcopy(model)
    own(*args)
    traced = baechi.trace(model, args)
    module = again_at_random(traced, seed=0, devices=2)
    with torch.no_grad():
        module(*args)
    expected = own.state_dict()
    assert not [n for n, t in module.state_dict().items() if not torch.equal(t, expected[n])]
    if last is not Asks:
        assert any("batch_norm" in name for name in targets(traced)) == training
    module.unplace()


class IdleDropout(nn.Module):
    """Layers that read a value, and others behind a dropout that passes it on."""

    def __init__(self, dropout: nn.Module) -> None:
        super().__init__()
        self.first, self.dropout = nn.Linear(4, 4), dropout
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        before = self.first(x)
        after = self.dropout(before)
        both = [before, after] * 3
        return sum(layer(v).tanh() for layer, v in zip(self.layers, both, strict=True)) + after


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "dropout", [nn.Dropout, nn.AlphaDropout, partial(nn.Dropout, inplace=True)]
)
def test_a_dropout_that_drops_nothing_is_what_it_gets(
    dropout: Callable[[float], nn.Module], training: bool
) -> None:
    model = IdleDropout(dropout(0.0 if training else 0.5)).train(training)
    args = (torch.randn(3, 4, requires_grad=True),)
    traced = baechi.trace(model, args)
    assert not any("dropout" in target for target in targets(traced))
    with one_thread():
        placed = again_at_random(traced, seed=1, devices=2)
        assert not step(copy.deepcopy(model), args, {}).differs_from(step(placed, args, {}))
        placed.unplace()
