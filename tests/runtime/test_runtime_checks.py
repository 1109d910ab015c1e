"""Guards of a call: replaced state, and arguments that share memory or lie in it otherwise."""

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from placed import at_random
from seeds import covering
from torch import nn

import baechi

X = torch.ones(2, 3)
Arguments = Callable[[], tuple[torch.Tensor, torch.Tensor]]
DEVICES = {"cpu:0": "1GiB", "cpu:1": "1GiB"}


def on_the_runtime(model: nn.Module) -> baechi.PlacedModule:
    """On one device, where the model itself would run but for an option."""
    options = {"costs": "estimate", "progress": False, "threads_per_device": 1}
    return baechi.place(model, ["cpu"], example_args=(X,), **options)


def at_random_on_two(model: nn.Module, **options: Any) -> baechi.PlacedModule:
    options |= {"costs": "estimate", "progress": False, "threads_per_device": 1, "guard": False}
    return baechi.place(model, DEVICES, placer=baechi.RandomPlacer(1), **options)


def placed() -> baechi.PlacedModule:
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    return at_random_on_two(model, example_args=(X,))


def assign(model: baechi.PlacedModule) -> None:
    model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()}, assign=True)


def replace_parameter(model: baechi.PlacedModule) -> None:
    model.get_submodule("0").weight = nn.Parameter(torch.zeros(3, 3))


def replace_buffer(model: baechi.PlacedModule) -> None:
    model.get_submodule("1.1").running_mean = torch.ones(3)


def cast_a_part(model: nn.Module) -> None:
    model.get_submodule("1").double()
    model.get_submodule("1").register_forward_pre_hook(lambda _, given: (given[0].double(),))


CHANGES = [assign, replace_parameter, replace_buffer, cast_a_part]


@pytest.mark.parametrize("change", CHANGES)
def test_what_replaces_placed_state_is_placed_anew(change: Callable[[nn.Module], None]) -> None:
    mine = placed()
    mine(X)
    gone, own = weakref.ref(mine.get_parameter("0.weight")), copy.deepcopy(mine)
    results = []
    for model in (mine, own):
        change(model)
        y = model(X)
        y.pow(2).sum().backward()
        results.append([y, *(p.grad for p in model.parameters()), *model.buffers()])
    assert len(set(mine.placement.devices)) == 2
    assert all(map(torch.equal, *results))
    gc.collect()
    assert (gone() is None) == (change in (assign, replace_parameter))


class Table(nn.Module):
    """Tokens, the table of which may be resized as by `resize_token_embeddings` of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 4
        self.tokens, self.head = nn.Embedding(4, 3), nn.Linear(3, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.tokens(tokens).tanh()).view(-1, self.size)

    def resize(self, size: int) -> None:
        self.size = size
        for parameter in (self.tokens.weight, self.head.weight, self.head.bias):
            parameter.data = torch.ones(size, *parameter.shape[1:])


def test_a_parameter_that_is_resized_as_it_is_trains_on() -> None:
    """Autograd's node of a parameter, which outlives steps, has its shape."""
    tokens, results = torch.arange(3).repeat(4), []
    table = Table()
    for model in (table, at_random_on_two(copy.deepcopy(table))):
        model(tokens).sum().backward()
        model.resize(6)
        model.zero_grad()
        y = model(tokens)
        y.pow(2).sum().backward()
        results.append([y, *(p.grad for p in model.parameters())])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("change", [assign, replace_parameter, replace_buffer])
def test_what_replaces_applied_state_is_refused(change: Callable[[nn.Module], None]) -> None:
    model = at_random(placed().unplace(), (X,))
    model(X)
    change(model)
    with pytest.raises(baechi.ExecutionError, match="was replaced after the model was placed"):
        model(X)


def test_a_backward_may_still_come_when_weights_are_replaced() -> None:
    mine = placed()
    results = []
    for model in (mine, copy.deepcopy(mine)):
        before = model(X)
        replace_parameter(model)
        (before.square().sum() * model(X).sum()).backward()
        results.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *results))


def test_weights_that_are_replaced_time_and_again_are_warned_of() -> None:
    model = placed()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(4):
            replace_parameter(model)
            model(X)
    (warning,) = seen
    assert "for the third time" in str(warning.message)
    assert warning.filename == __file__


def test_a_replaced_submodule_is_placed_anew() -> None:
    model = placed()
    nested = model.get_submodule("1")
    nested.register_module("0", nn.Linear(3, 3))
    y = model(X)
    y.sum().backward()
    assert nested.get_parameter("0.weight").grad is not None
    model.eval()
    torch.testing.assert_close(model(X), model.unplace()(X))


class Branch(nn.Module):
    """Stays whole, and replaces its own buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = self.mean * 0.9 + x.detach().mean(0) * 0.1
        return self.linear(x) if bool(x.sum() > 0) else x


@pytest.mark.parametrize("name", ["0", "1.linear"])
def test_parameters_of_submodules_that_stay_whole_count_too(name: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), Branch())
    mine = on_the_runtime(model)
    assert mine.traced.rung == "module granularity, opaque leaves"
    mine(X)
    mine(X)
    mine(X)
    plan = mine.traced
    model.get_submodule(name).weight = nn.Parameter(torch.zeros(3, 3))
    expected = copy.deepcopy(model)(X)
    assert torch.equal(mine(X), expected)
    assert mine.traced is not plan


def test_a_functional_call_is_refused_and_the_next_call_works() -> None:
    model = placed()
    state = {name: value * 2 for name, value in model.state_dict().items()}
    with pytest.raises(baechi.ExecutionError, match="functional_call"):
        torch.func.functional_call(model, state, (X,))
    model(X)


def test_what_is_written_into_placed_state_runs() -> None:
    model = placed()
    model.load_state_dict({k: v * 0 for k, v in model.state_dict().items()})
    assert not model(X).any()
    model.get_parameter("1.1.bias").data = torch.ones(3)
    assert (model(X) == 1).all()


class Tied(nn.Module):
    """One weight under two names, a layer without a bias, and tensors in plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.two.weight = self.one.weight
        self.scale = torch.tensor(2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x).tanh()) * self.scale


def untie_first(model: nn.Module) -> None:
    model.get_submodule("one").weight = nn.Parameter(torch.zeros(3, 3))


def untie_second(model: nn.Module) -> None:
    model.get_submodule("two").weight = nn.Parameter(torch.zeros(3, 3))


def give_a_bias(model: nn.Module) -> None:
    model.get_submodule("two").bias = nn.Parameter(torch.ones(3))


@pytest.mark.parametrize("change", [untie_first, untie_second, give_a_bias])
def test_what_the_graph_reads_by_another_name_or_not_yet_counts_too(
    change: Callable[[nn.Module], None],
) -> None:
    model = Tied()
    mine = on_the_runtime(model)
    model.scale.fill_(4)
    torch.testing.assert_close(mine(X), copy.deepcopy(model)(X))
    change(model)
    assert torch.equal(mine(X), copy.deepcopy(model)(X))


def test_an_exchanged_tensor_in_a_plain_attribute_is_another_plan():
    model, other = Tied(), Tied()
    mine = on_the_runtime(model)
    placed = baechi.apply(
        traced := baechi.trace(other, (X,)),
        baechi.solve(graph := traced.graph(baechi.estimate(traced, "cpu")), baechi.probe("cpu:0")),
        graph=graph,
        cluster=baechi.probe("cpu:0"),
    )
    for value in (3.0, 5.0):
        model.scale = other.scale = torch.tensor(value)
        torch.testing.assert_close(mine(X), copy.deepcopy(model)(X))
        with pytest.raises(baechi.InputError, match="scale"):
            placed(X)


class Both(nn.Module):
    """Reads two arguments, and writes into the first if it is told to."""

    def __init__(self, *, write: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.write = write

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        last = self.b(y)
        if self.write:
            x.add_(1)
        return self.a(x) - y * 2, last


class Doubles(nn.Module):
    """Writes into what may be its argument or a copy of it."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x.contiguous().mul_(2)) + x


def apart() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(3, 4), torch.randn(3, 4)


def one() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(3, 4)
    return x, x


def overlapping() -> tuple[torch.Tensor, torch.Tensor]:
    base = torch.randn(5, 4)
    return base[:3], base[2:]


def seen(model: nn.Module, calls: list[Callable[[], Any]]) -> list[Any]:
    """Results of calls without gradients, and their arguments after each."""
    torch.manual_seed(1)
    rows: list[Any] = []
    with torch.no_grad():
        for make in calls:
            arguments = make()
            rows += [model(*arguments), [argument.clone() for argument in arguments]]
    return rows


@pytest.mark.parametrize(("first", "write"), covering([apart, one, overlapping], [False, True]))
def test_what_is_shared_in_one_call_may_be_apart_in_the_next(first: Arguments, write: bool) -> None:
    torch.manual_seed(0)
    model = Both(write=write)
    calls = [first, one, apart, overlapping]
    expected = seen(model, calls)
    placed = baechi.place(
        model, DEVICES, costs="estimate", placer=baechi.RandomPlacer(0), progress=False
    )
    torch.testing.assert_close(seen(placed, calls), expected)
    placed.unplace()


def test_a_trace_of_one_tensor_given_twice_refuses_two() -> None:
    placed = at_random(Both(write=False), one())
    placed(*one())
    with pytest.raises(baechi.InputError, match="which arguments are one tensor"):
        placed(*apart())


def test_a_trace_that_writes_refuses_memory_that_it_took_to_be_apart() -> None:
    placed = at_random(Both(write=True), apart())
    with torch.no_grad():
        placed(*apart())
        with pytest.raises(baechi.InputError, match="share memory that is written"):
            placed(*overlapping())


def test_other_strides_are_another_call() -> None:
    torch.manual_seed(0)
    model = Doubles()
    calls: list[Callable[[], Any]] = [
        lambda: (torch.randn(4, 4),),
        lambda: (torch.randn(4, 4).t(),),
        lambda: (torch.randn(4, 8)[:, :4],),
        lambda: (torch.randn(4, 4),),
    ]
    expected = seen(model, calls)
    placed = baechi.place(model, DEVICES, costs="estimate", progress=False)
    torch.testing.assert_close(seen(placed, calls), expected)
    placed.unplace()
    placed = at_random(model, (torch.randn(4, 4),))
    with pytest.raises(baechi.InputError, match="strides"):
        placed(torch.randn(4, 4).t())


def test_strides_of_a_single_row_do_not_matter() -> None:
    placed = at_random(Doubles(), (torch.randn(1, 4),))
    with torch.no_grad():
        placed(torch.randn(4, 8)[1:2, :4])
