"""Methods of a model that are called through the placed module: what they call of it is placed."""

import copy
import pickle
import threading
from collections.abc import Iterator

import placed as placing
import pytest
import torch
from torch import nn

import baechi

pytestmark = pytest.mark.usefixtures("one_thread")


class Base(nn.Module):
    """What a subclass's methods reach by `super()`."""

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        """Of a call."""
        return self(x).square().mean()


class Trained(Base):
    """A model with methods that call it, in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.helper = self.twice
        self.kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x).relu())

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return super().loss(x) * 2

    def twice(self, x: torch.Tensor) -> torch.Tensor:
        return self(self(x))

    def outer(self, x: torch.Tensor) -> torch.Tensor:
        return self.twice(x) + self.loss(x)

    def direct(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x)

    def part(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x)

    def steps(self, x: torch.Tensor, n: int) -> Iterator[torch.Tensor]:
        for _ in range(n):
            x = self(x)
            yield x

    def fails(self, x: torch.Tensor) -> None:
        self(x)
        raise KeyError("own")

    def copied(self) -> nn.Module:
        return copy.deepcopy(self)

    def pickled(self) -> nn.Module:
        return pickle.loads(pickle.dumps(self))

    @property
    def width(self) -> int:
        return 4

    @staticmethod
    def plain(x: int) -> int:
        return x + 1

    @classmethod
    def named(cls) -> str:
        return cls.__name__


class Counting:
    """Counts the placed module's own calls."""

    def __init__(self, module: nn.Module) -> None:
        self.calls = 0
        module.register_forward_hook(self)

    def __call__(self, *_: object) -> None:
        self.calls += 1


@pytest.fixture
def model() -> Trained:
    torch.manual_seed(0)
    return Trained()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(3, 4)


@pytest.fixture
def split(model: Trained, x: torch.Tensor) -> Iterator[baechi.PlacedModule]:
    module = placing.at_random(model, (x.clone().requires_grad_(),), seed=1, devices=2)
    yield module
    module.unplace()


@pytest.mark.parametrize(
    ("name", "n"), [("loss", 1), ("twice", 2), ("helper", 2), ("outer", 3), ("direct", 0)]
)
def test_a_method_calls_the_placed_model(
    model: Trained, split: baechi.PlacedModule, x: torch.Tensor, name: str, n: int
) -> None:
    expected = getattr(model, name)(x)
    count = Counting(split)
    assert torch.equal(getattr(split, name)(x), expected)
    assert count.calls == n
    model(x), model.twice(x)
    assert count.calls == n, "the model by itself is unsplit"


def test_gradients_flow_through_methods(
    model: Trained, split: baechi.PlacedModule, x: torch.Tensor
) -> None:
    found = []
    for module in (model, split):
        module.zero_grad()
        module.loss(x).backward()
        found.append([parameter.grad for parameter in module.parameters()])
    torch.testing.assert_close(*found)


def test_what_is_no_method_of_the_model_is_as_it_is(
    model: Trained, split: baechi.PlacedModule
) -> None:
    assert split.width == 4
    assert split.plain(1) == 2
    assert split.named() == "Trained"
    assert split.kept is model.kept
    assert split.one is model.one
    assert split.loss.__name__ == "loss"
    assert split.steps.__wrapped__ == model.steps


def test_between_two_rows_of_a_generator_the_model_is_unsplit(
    model: Trained, split: baechi.PlacedModule, x: torch.Tensor
) -> None:
    expected = list(model.steps(x, 3))
    count = Counting(split)
    for n, row in enumerate(split.steps(x, 3)):
        assert torch.equal(row, expected[n])
        model(x)
        assert count.calls == n + 1


def test_an_error_ends_it(model: Trained, split: baechi.PlacedModule, x: torch.Tensor) -> None:
    count = Counting(split)
    before = dict(vars(model))
    with pytest.raises(KeyError, match="own"):
        split.fails(x)
    model(x)
    assert count.calls == 1
    assert vars(model) == before


def test_copies_made_inside_are_of_the_model_alone(
    split: baechi.PlacedModule, x: torch.Tensor
) -> None:
    expected, count = split(x), Counting(split)
    for made in (split.copied(), split.pickled()):
        assert type(made) is Trained
        assert torch.equal(made(x), expected)
    assert count.calls == 0


def test_other_threads_run_the_model_unsplit(
    model: Trained, split: baechi.PlacedModule, x: torch.Tensor
) -> None:
    count = Counting(split)
    seen = []

    def elsewhere(module: nn.Module, args: object) -> None:  # noqa: ARG001 (a hook)
        thread = threading.Thread(target=lambda: seen.append(model(x)))
        thread.start()
        thread.join()

    split.register_forward_pre_hook(elsewhere)
    expected = model.twice(x)
    assert torch.equal(split.twice(x), expected)
    assert count.calls == 2
    assert len(seen) == 2


def test_two_placed_modules_of_one_model_keep_apart(model: Trained, x: torch.Tensor) -> None:
    given = (x.clone().requires_grad_(),)
    both = [placing.at_random(model, given, seed=seed, devices=2) for seed in (1, 2)]
    counts = [Counting(module) for module in both]
    both[0].register_forward_pre_hook(lambda *_: both[1].loss(x).backward())
    both[0].twice(x)
    assert [count.calls for count in counts] == [2, 2]
    for module in both:
        module.unplace()


def test_a_new_shape_is_traced_inside_of_a_method(model: Trained, x: torch.Tensor) -> None:
    module = baechi.place(
        model,
        {"cpu:0": "1GiB", "cpu:1": "1GiB"},
        costs="estimate",
        placer=baechi.RandomPlacer(1),
        verify=True,
        progress=False,
    )
    assert torch.equal(module.twice(x), model.twice(x))
    assert torch.equal(module.twice(x[:2]), model.twice(x[:2]))
    assert repr(module) == "PlacedModule(Trained, 2 specializations)"
    module.unplace()
    with pytest.raises(baechi.ExecutionError, match="unplaced"):
        module.twice(x)


def test_what_the_model_was_compiled_to_comes_back(
    model: Trained, split: baechi.PlacedModule, x: torch.Tensor
) -> None:
    expected = split(x)
    model.compile(backend="eager")
    own = model._compiled_call_impl
    count = Counting(split)
    assert torch.equal(split.direct(x), expected)
    assert torch.equal(split.twice(x), split(expected))
    assert count.calls == 3
    assert model._compiled_call_impl is own


def test_a_compiler_around_the_call_runs_the_placed_model(
    model: Trained, split: baechi.PlacedModule, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `generate` of transformers compiles `self.__call__` on GPUs."""

    def compiled(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.compile(self.__call__, backend="eager")(x)

    monkeypatch.setattr(Trained, "compiled", compiled, raising=False)
    count = Counting(split)
    expected = model(x)
    for _ in range(3):
        assert torch.equal(split.compiled(x), expected)
    assert count.calls == 3
