"""The placed model is the user's own object: its class, methods, moves and copies."""

import copy
import inspect
import io
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import placed as placing
import pytest
import torch
from torch import distributed, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import baechi
from baechi.runtime.derived_class import placed_state
from baechi.runtime.executable import Executable

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

    def steps(self, x: torch.Tensor, n: int) -> Iterator[torch.Tensor]:
        for _ in range(n):
            x = self(x)
            yield x

    def copied(self) -> nn.Module:
        return copy.deepcopy(self)

    @property
    def width(self) -> int:
        return 4

    @staticmethod
    def plain(x: int) -> int:
        return x + 1

    @classmethod
    def named(cls) -> str:
        return cls.__name__


DEVICES = {"cpu:0": "1GiB", "cpu:1": "1GiB"}


@contextmanager
def counting() -> Iterator[list[object]]:
    """The placed steps that run inside the block."""
    calls: list[object] = []
    own = Executable.__call__

    def call(self: Executable, *args: Any) -> Any:
        calls.append(self)
        return own(self, *args)

    with patch.object(Executable, "__call__", call):
        yield calls


@pytest.fixture
def model() -> Trained:
    torch.manual_seed(0)
    return Trained()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(3, 4)


@pytest.fixture
def unsplit(model: Trained) -> Trained:
    return copy.deepcopy(model)


@pytest.fixture
def split(model: Trained, unsplit: Trained, x: torch.Tensor) -> Iterator[baechi.PlacedModule]:
    del unsplit  # made before
    yield placing.at_random(model, (x.clone().requires_grad_(),), seed=1, devices=2)
    if isinstance(model, baechi.PlacedModule):
        model.unplace()


@pytest.fixture
def lazy(model: Trained, unsplit: Trained) -> baechi.PlacedModule:
    del unsplit
    return placing.lazily(model, placer=baechi.RandomPlacer(1))


@pytest.mark.parametrize(
    ("name", "n"), [("loss", 1), ("twice", 2), ("helper", 2), ("outer", 3), ("direct", 2)]
)
def test_a_method_calls_the_placed_model(
    unsplit: Trained, lazy: baechi.PlacedModule, x: torch.Tensor, name: str, n: int
) -> None:
    with counting() as calls:
        assert torch.equal(getattr(lazy, name)(x), getattr(unsplit, name)(x))
    assert len(calls) == n


def test_gradients_flow_through_methods(
    unsplit: Trained, split: baechi.PlacedModule, x: torch.Tensor
) -> None:
    found = []
    for module in (unsplit, split):
        module.loss(x).backward()
        found.append([parameter.grad for parameter in module.parameters()])
    torch.testing.assert_close(*found)


def test_it_is_the_users_object_of_a_class_named_as_the_users(
    model: Trained, split: baechi.PlacedModule
) -> None:
    assert split is model
    assert isinstance(split, Trained)
    assert isinstance(split, baechi.PlacedModule)
    kind = type(split)
    assert (kind.__name__, kind.__qualname__) == ("Trained", Trained.__qualname__)
    assert (kind.__module__, kind.__doc__) == (Trained.__module__, Trained.__doc__)
    assert inspect.signature(split.forward) == inspect.signature(Trained().forward)
    assert split.width == 4
    assert split.plain(1) == 2
    assert split.named() == "Trained"
    assert not hasattr(split, "no_such_thing")
    assert split.unplace() is model
    assert type(model) is Trained
    assert vars(model).keys() == vars(Trained()).keys()


def test_a_generator_may_be_left_between_two_rows(
    unsplit: Trained, split: baechi.PlacedModule, x: torch.Tensor
) -> None:
    with counting() as calls:
        for n, (mine, own) in enumerate(zip(split.steps(x, 3), unsplit.steps(x, 3), strict=True)):
            assert torch.equal(mine, own)
            assert len(calls) == n + 1


def test_copies_and_pickles_are_unsplit(
    unsplit: Trained, split: baechi.PlacedModule, x: torch.Tensor
) -> None:
    expected = unsplit(x)
    saved = io.BytesIO()
    torch.save(split, saved)
    saved.seek(0)
    average = torch.optim.swa_utils.AveragedModel(split)
    average.update_parameters(split)
    pickled = [pickle.loads(pickle.dumps(split, protocol)) for protocol in (0, 2, 5)]
    loaded = torch.load(saved, weights_only=False)
    with counting() as calls:
        for made in (split.copied(), *pickled, loaded, average.module):
            assert type(made) is Trained
            assert vars(made).keys() == vars(unsplit).keys()
            assert torch.equal(made(x), expected)
            assert made.helper.__self__ is made
    assert not calls
    memo: dict[int, object] = {}
    copied = copy.deepcopy(nn.ModuleList([split, split]), memo)
    assert copied[0] is copied[1]
    assert memo[id(split.one.weight)] is copied[0].one.weight


def test_another_placement_of_the_same_trace_replaces_the_first(
    model: Trained, unsplit: Trained, x: torch.Tensor
) -> None:
    traced = baechi.trace(model, (x,))
    one = placing.again_at_random(traced, seed=1, devices=2)
    first = one.placement
    two = placing.again_at_random(traced, seed=2, devices=3)
    assert one is two
    assert one.placement != first
    assert torch.equal(one(x), unsplit(x))
    assert one.unplace() is model
    assert type(model) is Trained


def test_a_new_shape_is_traced_inside_of_a_method(unsplit: Trained, x: torch.Tensor) -> None:
    module = placing.lazily(copy.deepcopy(unsplit), placer=baechi.RandomPlacer(1), verify=True)
    for rows in (x, x[:2]):
        assert torch.equal(module.twice(rows), unsplit.twice(rows))
    assert repr(module) == "PlacedModule(Trained, 1 specialization)"  # the family's


def test_what_the_first_call_decides_is_not_there_before(
    lazy: baechi.PlacedModule, x: torch.Tensor
) -> None:
    for name in ("traced", "placement", "program", "graph", "schedule"):
        assert not hasattr(lazy, name)
    with pytest.raises(AttributeError, match="not specialized yet: call it once"):
        _ = lazy.schedule
    inspect.getmembers(lazy)
    lazy(x)
    assert lazy.schedule.makespan_ns > 0


class Named(nn.Module):
    """Has attributes, a method and a submodule named as what a placed model has."""

    def __init__(self) -> None:
        super().__init__()
        self.report, self.graph = nn.Linear(4, 4), "mine"

    def measure(self) -> int:
        return 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.report(x) * self.measure() * len(self.graph)


def test_names_of_the_model_are_the_models(x: torch.Tensor) -> None:
    unsplit = Named()
    module = placing.lazily(copy.deepcopy(unsplit))
    assert torch.equal(module(x), unsplit(x))
    assert isinstance(module.report, nn.Linear)
    assert (module.graph, module.measure()) == ("mine", 3)
    graph = baechi.PlacedModule.graph.fget(module)
    assert isinstance(graph, baechi.OpGraph)
    assert baechi.PlacedModule.report(module)
    assert len(module.placement.devices) == len(graph.ops)
    assert module.unplace()(x).shape == (3, 4)


class Slotted(nn.Module):
    """Keeps a number beside its dict, finds what is missing itself, and copies itself."""

    __slots__ = ("number",)

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        object.__setattr__(self, "number", 3)

    def __getattr__(self, name: str) -> Any:
        return 2.0 if name == "factor" else super().__getattr__(name)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Slotted":
        made = type(self)()
        made.load_state_dict(copy.deepcopy(self.state_dict(), memo))
        return made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.number * self.factor


class Registered(type):
    """Lets no class have a subclass."""

    def __new__(cls, name: str, bases: tuple[type, ...], space: dict[str, Any]) -> Any:
        if any(isinstance(base, Registered) for base in bases):
            raise ValueError(f"{name} is there already")
        return super().__new__(cls, name, bases, space)


def test_classes_with_ways_of_their_own(x: torch.Tensor) -> None:
    graph = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    for unsplit in (Slotted(), graph):
        module = placing.lazily(copy.deepcopy(unsplit), placer=baechi.RandomPlacer(1))
        assert torch.equal(module(x), unsplit(x))
        made = copy.deepcopy(module)
        assert type(made).__qualname__ == type(unsplit).__qualname__
        assert not isinstance(made, baechi.PlacedModule)
        assert torch.equal(made(x), unsplit(x))
        module.unplace()
    assert isinstance(graph.graph, torch.fx.Graph)
    alone = Registered("Alone", (nn.Linear,), {})(4, 4)
    with pytest.raises(baechi.InputError, match=r"no class can be derived .*Alone is there"):
        placing.lazily(alone)
    with pytest.warns((DeprecationWarning, FutureWarning), match="script"):
        scripted = torch.jit.script(nn.Linear(4, 4))
    with pytest.raises(baechi.TraceError, match="scripted"):
        placing.lazily(scripted)


# Moves and casts.


@pytest.mark.parametrize(
    "move",
    [
        *(lambda m: m.to("cpu"), lambda m: m.to(torch.float32), lambda m: m.cpu()),
        *(lambda m: m.float(), lambda m: nn.Sequential(m).to("cpu"), lambda m: m.share_memory()),
    ],
)
def test_what_moves_and_casts_nothing_is_accepted(
    unsplit: Trained, lazy: baechi.PlacedModule, x: torch.Tensor, move: Callable[..., Any]
) -> None:
    lazy(x)
    found = lazy.placement
    move(lazy)
    assert torch.equal(lazy(x), unsplit(x))
    assert lazy.placement is found


def test_a_cast_is_planned_anew(
    unsplit: Trained, lazy: baechi.PlacedModule, x: torch.Tensor
) -> None:
    lazy(x)
    weight = lazy.one.weight
    nn.ModuleList([lazy]).double()
    assert lazy.one.weight is weight
    assert not hasattr(lazy, "placement")
    assert torch.equal(lazy(x.double()), unsplit.double()(x.double()))
    assert lazy.dtype == torch.float64


def test_what_cannot_be_moved_or_cast_says_what_to_do_and_stays(
    split: baechi.PlacedModule, unsplit: Trained, x: torch.Tensor
) -> None:
    with pytest.raises(baechi.ExecutionError, match="meta is none of them"):
        split.to("meta")
    with pytest.raises(baechi.ExecutionError, match="`apply` was given one"):
        split.half()
    assert torch.equal(split(x), unsplit(x))


def test_data_parallel_is_refused(split: baechi.PlacedModule) -> None:
    with pytest.raises(baechi.ExecutionError, match="DistributedDataParallel"):
        split._replicate_for_data_parallel()


def test_devices_and_dtype_as_others_look_for_them(lazy: baechi.PlacedModule) -> None:
    assert (lazy.device, lazy.dtype) == (torch.device("cpu"), torch.float32)
    assert not hasattr(lazy, "hf_device_map"), "on CPUs everybody may move it, which moves nothing"


# Compilers and transforms around it.


def test_a_compiler_around_the_call_runs_the_placed_model(
    unsplit: Trained, split: baechi.PlacedModule, x: torch.Tensor
) -> None:
    """As `generate` of transformers compiles `self.__call__` on GPUs."""
    expected = unsplit(x)
    with counting() as calls:
        for around in (split, split.__call__):
            assert torch.equal(torch.compile(around, backend="eager")(x), expected)
    assert len(calls) == 2


class Doubling(TorchFunctionMode):
    """Changes what the model's own Python computes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is nn.functional.linear else result


def inside(mode: Any, model: nn.Module, x: torch.Tensor) -> Any:
    with mode:
        return model(x)


@pytest.mark.parametrize(
    ("name", "trace"),
    [
        ("torch.export", lambda m, x: torch.export.export(m, (x,))),
        ("torch.func", lambda m, x: torch.func.vmap(m)(x[None])),
        ("Doubling", lambda m, x: inside(Doubling(), m, x)),
    ],
)
def test_other_tracers_are_told_what_to_do(
    lazy: baechi.PlacedModule, x: torch.Tensor, name: str, trace: Callable[..., Any]
) -> None:
    with pytest.raises(baechi.ExecutionError, match=f"^{name} .* placed.unplace"):
        trace(lazy, x)
    with torch.device("cpu"):  # a mode that says where tensors are made
        assert lazy(x).shape == (3, 4)


@pytest.mark.parametrize(
    "way",
    [
        lambda m, x: torch.export.export(m, (x,)).module()(x),
        lambda m, x: torch.func.jacrev(m)(x),
        lambda m, x: torch.func.vmap(m)(torch.stack([x, x])),
        lambda m, x: inside(Doubling(), m, x),
        lambda m, x: torch.autograd.functional.hessian(lambda y: m(y).square().sum(), x),
    ],
    ids=["export", "jacrev", "vmap", "mode", "hessian"],
)
def test_tracers_and_transforms_see_a_model_on_one_device_as_it_is(
    unsplit: Trained, x: torch.Tensor, way: Callable[..., Any]
) -> None:
    expected = way(unsplit, x)
    module = baechi.place(
        *(copy.deepcopy(unsplit), {"cpu:0": "1GiB"}),
        **{"example_args": (x,), "costs": "estimate", "progress": False},
    )
    assert torch.equal(way(module, x), expected)


# Parts that are called from outside of the forward.


class Halves(nn.Module):
    """An encoder that its methods call by itself, as `generate` of an encoder-decoder does."""

    def __init__(self, *, looks: bool = False) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.decoder = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.act = Looks() if looks else nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.act(self.encoder(x)))

    def both(self, x: torch.Tensor) -> torch.Tensor:
        return self(self.act(self.encoder(x)))


class Looks(nn.Module):
    """What no tracer takes: it has to stay whole."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum().item() > 10**9:
            raise ValueError
        return x.numpy(force=True).shape[0] * x * self.scale


def halves(**options: Any) -> tuple[Halves, baechi.PlacedModule]:
    torch.manual_seed(0)
    unsplit = Halves()
    return unsplit, placing.lazily(copy.deepcopy(unsplit), **options)


def test_a_part_has_plans_of_its_own_around_the_weights(x: torch.Tensor) -> None:
    unsplit, module = halves(verify=True, dynamic=False)
    for n in (3, 2, 3):
        for one in (unsplit, module):
            one.zero_grad()
            one.both(x[:n]).square().sum().backward()
        for mine, own in zip(module.parameters(), unsplit.parameters(), strict=True):
            assert torch.equal(mine.grad, own.grad)
    assert repr(module) == "PlacedModule(Halves, 2 specializations, 2 of encoder)"
    first, second = (special.state_devices for special in placed_state(module).all[:2])
    assert len(set(module.placement.devices)) == 2
    assert all(second[weight] == device for weight, device in first.items())
    assert len(module.graph.ops) == len(module.placement.devices)
    module.unplace()
    with counting() as calls:
        unsplit.load_state_dict(module.state_dict())
        assert torch.equal(module.both(x), unsplit.both(x))
    assert not calls


def test_parts_that_come_and_go(x: torch.Tensor) -> None:
    unsplit, module = halves()
    for one in (unsplit, module):
        one.decoder(x)
    gone = module.decoder
    for one in (unsplit, module):
        torch.manual_seed(1)
        one.decoder = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    assert torch.equal(module(x), unsplit(x))
    with counting() as calls:
        gone(x)
        assert not calls
        assert torch.equal(module.decoder(x), unsplit.decoder(x))
        assert len(calls) == 1
    assert len(placed_state(module).all) == 2
    copied = copy.deepcopy(module.encoder), pickle.loads(pickle.dumps(module.encoder))
    for each in (*copied, copy.deepcopy(module)):
        assert all("_compiled_call_impl" not in vars(part) for part in each.modules())


def test_what_was_compiled_is_again_after_unplace() -> None:
    _, module = halves()
    module.unplace()
    module.encoder.compile(backend="eager")
    own = module.encoder._compiled_call_impl
    again = placing.lazily(module)
    assert again.encoder._compiled_call_impl is not own
    again.unplace()
    assert module.encoder._compiled_call_impl is own


def test_a_part_without_a_plan_runs_unsplit_and_says_so_once(x: torch.Tensor) -> None:
    unsplit = Looks()
    module = placing.lazily(nn.Sequential(nn.Linear(4, 4), copy.deepcopy(unsplit)))
    with pytest.warns(UserWarning, match=r"^1 of the placed Sequential .* ran unsplit, on cpu: "):
        assert torch.equal(module[1](x), unsplit(x))
    assert torch.equal(module[1](x), unsplit(x))
    assert repr(module) == "PlacedModule(Sequential, 0 specializations, 1 unsplit)"
    module(x)
    assert any("ran unsplit" in remark for remark in module.remarks)
    with pytest.warns(UserWarning, match=r"^0 .* `apply` was given one plan"):
        placing.at_random(nn.Sequential(nn.Linear(4, 4)), (x,))[0](x)


def test_inside_of_a_step_every_part_runs_as_it_is(x: torch.Tensor) -> None:
    """In workers, and where a checkpoint runs it again in the backward."""

    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.looks = nn.Linear(4, 4), Looks()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.looks(checkpoint(self.inner, x, use_reentrant=False))

    torch.manual_seed(0)
    unsplit = nn.Sequential(nn.Linear(4, 4), Again())
    for placer in ("single", baechi.RandomPlacer(1)):
        module = placing.lazily(copy.deepcopy(unsplit), placer=placer)
        found = []
        for one in (unsplit, module):
            one.zero_grad()
            one(x).sum().backward()
            found.append([parameter.grad for parameter in one.parameters()])
        assert all(map(torch.equal, *found))
        assert repr(module) == "PlacedModule(Sequential, 1 specialization)"
        module.unplace()


@pytest.mark.skipif(not distributed.is_available(), reason="torch has no distributed package")
def test_distributed_data_parallel_around_it(
    unsplit: Trained, lazy: baechi.PlacedModule, x: torch.Tensor
) -> None:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        around = nn.parallel.DistributedDataParallel(lazy)
        for one in (unsplit, around):
            one(x).square().sum().backward()
        for mine, own in zip(lazy.parameters(), unsplit.parameters(), strict=True):
            assert torch.equal(mine.grad, own.grad)
        assert around.state_dict().keys() == {f"module.{key}" for key in unsplit.state_dict()}
        # The reducer's end joins gloo's threads with the interpreter's lock held, and one that has
        # just run its last work still wants that lock.
        time.sleep(0.2)
    finally:
        distributed.destroy_process_group()
