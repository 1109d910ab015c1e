"""What a forward leaves in its model: buffers are written, and nothing of a tracer stays."""

import collections
import copy
import functools
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from placed import EXACT, again_at_random, assert_same_values, lazily
from seeds import covering
from torch import Tensor, nn

import baechi
from baechi.tracing.model_notes import draws_kept

X = torch.arange(12.0).reshape(3, 4)


class Stateful(nn.Module):
    """A linear layer, and a function of the model and of its output."""

    def __init__(self, change: Callable[["Stateful", torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 4)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("before", torch.ones(8))
        self.seen: torch.Tensor | None = None
        self.object = SimpleNamespace(seen=None)
        self.loose = [torch.zeros(8), torch.ones(8)]
        self.row: collections.OrderedDict[int, None] = collections.OrderedDict()
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.change(self, self.first(x)))


def replaced_buffer(model: Stateful, x: torch.Tensor) -> torch.Tensor:
    model.mean = model.mean * 0.9 + x.detach().mean(0) * 0.1
    return x - model.mean


def remembered(model: Stateful, x: torch.Tensor) -> torch.Tensor:
    model.seen = x.detach() * 2
    return x + model.seen


def remembered_in_an_object(model: Stateful, x: torch.Tensor) -> torch.Tensor:
    normal = torch.distributions.Normal(x.detach(), torch.ones(8), validate_args=False)
    model.object.seen = normal
    return x + normal.mean


def written_but_no_buffer(model: Stateful, x: torch.Tensor) -> torch.Tensor:
    model.loose[0].add_(1)
    return x + model.loose[0] * model.loose[1]


def shifted_buffers(model: Stateful, x: torch.Tensor) -> torch.Tensor:
    model.before, model.mean = model.mean, x.detach().mean(0)
    return x + model.before


def exchanged_buffers(model: Stateful, x: torch.Tensor) -> torch.Tensor:
    model.before, model.mean = model.mean + 1, model.before
    model.before, model.mean = model.mean, model.before
    return x + model.before + 2 * model.mean


def replaced_parameter(model: Stateful, x: torch.Tensor) -> torch.Tensor:
    model.last.weight = nn.Parameter(model.last.weight * 0.9)
    return x


def exchanged_memory(model: Stateful, x: torch.Tensor) -> torch.Tensor:
    for parameter in model.last.parameters():  # the model itself, which fx would not see
        parameter.data = parameter.data * 0.9
    return x


def exchanged_memory_of_another(model: Stateful, x: torch.Tensor) -> torch.Tensor:
    model.loose[0].data = model.loose[0] + 1
    return x + model.loose[0]


def counted(model: Stateful, x: torch.Tensor) -> torch.Tensor:
    count = model.loose[0] = model.loose[0] + 1
    if float(x.detach().sum()) > 1e9:  # so it stays whole
        return x
    model.loose[1].mul_(0.5)
    return x + count * model.loose[1]


def counted_in_a_row(model: Stateful, x: torch.Tensor) -> torch.Tensor:
    """Notes each call in an `OrderedDict`, which has an order beside its items."""
    model.row[len(model.row)] = None
    if float(x.detach().sum()) > 1e9:
        return x
    return x + len(list(model.row))


def without_gradients_of_before(model: Stateful, x: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    return counted(model, x)


def grown_buffer(model: Stateful, x: torch.Tensor) -> torch.Tensor:
    model.mean = torch.cat([model.mean, model.mean])
    return x


def steps(model: nn.Module) -> list[torch.Tensor]:
    """Outputs, gradients and state of two steps, and what is no state in the end."""
    values: list[torch.Tensor] = []
    for _ in range(2):
        y = model(X)
        y.square().mean().backward()
        values.append(y.detach())
    loose = next(part.loose for part in model.modules() if isinstance(part, Stateful))
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [*values, *gradients, *model.state_dict().values(), *loose]


EXPORT, WHOLE = "torch.export (non-strict)", "module granularity, opaque leaves"
KEPT = [
    (remembered, EXPORT),
    (written_but_no_buffer, EXPORT),
    (replaced_buffer, WHOLE),
    (shifted_buffers, WHOLE),
    (exchanged_memory, WHOLE),
    (counted, WHOLE),
]


@pytest.mark.parametrize(("change", "rung"), KEPT, ids=lambda each: getattr(each, "__name__", ""))
def test_the_placed_model_does_it_too(change: Callable[..., torch.Tensor], rung: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Stateful(change))
    unsplit = copy.deepcopy(model)
    traced = baechi.trace(model, (X,))
    placed = again_at_random(traced, seed=0, devices=2)
    assert traced.rung == rung
    assert_same_values(steps(placed), steps(unsplit), **EXACT)


@pytest.mark.parametrize("change", [replaced_buffer, grown_buffer, exchanged_buffers])
def test_a_buffer_that_the_model_itself_replaces_is_refused(change: Callable[..., Tensor]) -> None:
    model = Stateful(change)
    mean = model.mean
    with pytest.raises(baechi.TraceError, match=r"replaces buffer '(mean|before)'.*copy_"):
        baechi.trace(model, (X,))
    assert model.mean is mean
    assert mean.equal(torch.zeros(8))


def test_a_parameter_that_the_model_itself_replaces_is_refused() -> None:
    model = Stateful(replaced_parameter)
    weight = model.last.weight
    with pytest.raises(baechi.TraceError, match=r"replaces parameter 'last.weight'"):
        baechi.trace(model, (X,))
    assert model.last.weight is weight


@pytest.mark.parametrize(
    "change",
    [exchanged_memory, exchanged_memory_of_another, counted, without_gradients_of_before],
)
def test_a_model_that_cannot_be_traced_is_as_it_was(change: Callable[..., Tensor]) -> None:
    model = Stateful(change)
    model(X).sum().backward()
    own = [*model.parameters(), *model.buffers(), *model.loose]
    before = [(tensor.grad, tensor.data_ptr(), tensor.detach().clone()) for tensor in own]
    with pytest.raises(baechi.TraceError):
        baechi.trace(model, (X,))
    now = [*model.parameters(), *model.buffers(), *model.loose]
    for tensor, other, (gradient, memory, value) in zip(own, now, before, strict=True):
        assert tensor is other
        assert tensor.grad is gradient
        assert tensor.data_ptr() == memory
        assert tensor.equal(value)


@pytest.mark.filterwarnings("ignore:1 of this Sequential")  # a large part stays on one device
@pytest.mark.parametrize(
    ("count", "options"),
    covering([counted, counted_in_a_row], [{}, {"verify": True}, {"costs": "measure"}]),
)
def test_what_a_part_that_stays_whole_counts_it_counts_in_calls_alone(
    count: Callable[..., Tensor], options: Any
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Stateful(count))
    unsplit = copy.deepcopy(model)
    placed = lazily(model, **options)
    outputs = [placed(X)]
    placed.measure(steps=1)
    outputs.append(placed(X))
    assert_same_values(outputs, [unsplit(X), unsplit(X)], **EXACT)


class Caches(nn.Module):
    """Keeps positions in a buffer, and their number in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.n = 0
        self.register_buffer("cache", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = x.shape[-1]
        if n > self.n:
            self.cache[:n], self.n = torch.arange(float(n)).cos(), n
        return x + self.cache[:n]


def test_what_a_shared_part_notes_is_as_before_a_trace() -> None:
    """torch.export has proxies of it; with its note, and without its buffer, it reads zeros."""
    torch.manual_seed(0)
    part = Caches()
    model = nn.Sequential(part, nn.Linear(4, 4), part)
    unsplit = copy.deepcopy(model)
    baechi.trace(model, (X,))
    assert part.n == 0
    placed = again_at_random(baechi.trace(model, (X,)), seed=0, devices=2)
    assert_same_values([placed(X), model(X)], [unsplit(X)] * 2, **EXACT)


@pytest.mark.parametrize("change", [remembered, remembered_in_an_object])
def test_the_model_holds_no_fake_tensor_after_a_trace(change: Callable[..., Tensor]) -> None:
    model = Stateful(change)
    baechi.trace(model, (X,))
    assert model.seen is None
    assert model.object.seen is None
    model(X)


TABLES: dict[int, Tensor] = {}


def cosines(n: int) -> Tensor:
    return torch.arange(n, dtype=torch.float32)[:, None].cos()


def hidden(function: Callable[[int], Tensor]) -> Callable[[int], Tensor]:
    """A decorator of somebody else's, as transformers has one."""
    cached = functools.lru_cache(maxsize=4)(function)

    @functools.wraps(function)
    def wrapper(n: int) -> Tensor:
        return cached(n)

    return wrapper


class Remembers(nn.Module):
    """Asks for a table of its input's length, which it remembers in one of several ways."""

    of_all: dict[int, Tensor]

    def __init__(self, way: str, *, whole: bool) -> None:
        super().__init__()
        self.way, self.whole = way, whole
        self.own: dict[int, Tensor] = {}
        self.cached = functools.cache(cosines)

    @staticmethod
    @hidden
    def static(n: int) -> Tensor:
        return cosines(n)

    def table(self, n: int) -> Tensor:
        if self.way == "static":
            return self.static(n)
        if self.way == "attribute":
            return self.cached(n)
        rows = {"dict": self.own, "class": type(self).of_all, "module": TABLES}[self.way]
        if n not in rows:
            rows[n] = cosines(n)
        return rows[n]

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.table(len(x))
        if self.whole and int(x.argmax()) > 99:  # no tracer can tell
            y = y + 1
        return y + self.table(len(x))


WAYS = ["static", "attribute", "dict", "class", "module"]


@pytest.fixture(autouse=True)
def _forgotten() -> None:
    Remembers.of_all = {}
    TABLES.clear()


@pytest.mark.parametrize(
    ("whole", "way"),
    [
        *((False, way) for way in WAYS),
        (True, "dict"),
        *(pytest.param(True, way, marks=pytest.mark.slow) for way in WAYS if way != "dict"),
    ],
)
def test_no_tensor_of_a_tracer_is_remembered(way: str, whole: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Remembers(way, whole=whole))
    traced = baechi.trace(model, (X,))
    assert traced.rung.startswith("module granularity" if whole else "torch.export (non-strict)")
    assert len(traced.attempts) == (2 if whole else 1)
    baechi.estimate(traced, "cpu")
    placed = again_at_random(traced, seed=0, devices=2)
    y = placed(X)
    Remembers.of_all = {}
    TABLES.clear()
    fresh = nn.Sequential(copy.deepcopy(model[0]), Remembers(way, whole=whole))
    assert torch.equal(y, fresh(X))
    assert torch.equal(placed.unplace()(X), y)
    assert type(model[1].table(len(X))) is Tensor


class Part(nn.Module):
    def __init__(self, settings: dict[str, float]) -> None:
        super().__init__()
        self.linear, self.settings = nn.Linear(4, 4), settings

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.settings["scale"]


class Sharing(nn.Module):
    """Settings that parts share with the caller, and notes that forward makes."""

    def __init__(self, settings: dict[str, float]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part(settings) for _ in range(2))
        self.settings, self.shapes = settings, ([1.0], {"bias": [2.0]})
        self.notes: dict[str, list[Tensor]] = collections.defaultdict(list)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x) + self.shapes[1]["bias"][0] + self.shapes[0][0]
        self.notes["outputs"].append(x.detach())
        return x


@pytest.mark.filterwarnings("ignore:forward of this Sharing changes notes")
def test_a_model_goes_on_sharing_its_lists_and_dicts() -> None:
    settings = {"scale": 1.0}
    model = Sharing(settings)
    plain = copy.deepcopy(model)
    shapes, notes = model.shapes, model.notes
    placed = lazily(model)
    for scale, bias in ((1.0, 2.0), (3.0, 2.0), (3.0, 5.0)):
        settings["scale"] = plain.settings["scale"] = scale
        shapes[1]["bias"][0] = plain.shapes[1]["bias"][0] = bias
        assert torch.equal(placed(X), plain(X))
        assert model.shapes is shapes
        assert all(part.settings is settings for part in (model, *model.parts))
        assert model.notes is notes
        assert not notes
    placed.unplace()


class Channels(tuple[int, ...]):
    """A tuple that refuses to tell its length, as e3nn's Irreps do."""

    def __len__(self) -> int:
        raise NotImplementedError


def test_a_tuple_that_refuses_to_tell_its_length_may_be_an_attribute() -> None:
    model = nn.Linear(4, 4)
    vars(model)["channels"] = Channels((1, 2))
    assert baechi.trace(model, (torch.ones(2, 4),)).rung == EXPORT


def test_torch_still_copies_lists() -> None:
    model = Sharing({"scale": 1.0})
    settings = model.settings
    torch.export.export(model, (X,), strict=False)
    assert model.settings is not settings


@pytest.mark.parametrize(
    ("draw", "named"),
    [
        (lambda: None, []),
        (random.random, ["the state of `random`"]),
        (numpy.random.rand, ["the state of `numpy.random`"]),
        (numpy.random.randn, ["the state of `numpy.random`"]),
    ],
)
def test_draws_are_named_and_undone(draw: Callable[[], object], named: list[str]) -> None:
    with draws_kept(nn.Module()) as drew:
        first = draw()
    assert drew == named
    with draws_kept(nn.Module()):
        assert draw() == first
