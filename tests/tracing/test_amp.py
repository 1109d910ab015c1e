"""Mixed precision: autocast, gradient scaling, and models in half precision, as unsplit."""

import copy
from functools import wraps
from types import MethodType
from typing import Any

import placed
import pytest
import torch
import zoo
from torch import nn

import baechi
from baechi.tracing import ladder
from baechi.tracing.family_traces import resized


@pytest.mark.parametrize(
    "name",
    [
        "gpt2",
        "recurrent",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "resnet_train")),
    ],
)
def test_outputs_and_gradients_under_autocast_are_the_unsplit_models(name: str) -> None:
    if name == "recurrent" and not recurrent_in_bf16():
        pytest.skip("torch has no recurrent layers in bf16 for this CPU")
    model, args, kwargs = {**zoo.MODELS, **zoo.AWKWARD}[name]()
    reference = copy.deepcopy(model)
    with placed.one_thread(), torch.autocast("cpu", torch.bfloat16):
        module = placed.at_random(model, args, kwargs)
        expected, actual = (placed.step(m, args, kwargs) for m in (reference, module))
    module.unplace()
    assert not expected.differs_from(actual)


class Again(nn.Module):
    """Towers that share layers, one of which comes back; the embedding's weight is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 16)
        self.tower = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 16))
        self.layer, self.head = nn.Linear(16, 16), nn.Linear(16, 32, bias=False)
        self.head.weight = self.table.weight

    def forward(self, one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
        x, y = (self.layer(self.tower(self.table(i))).tanh() for i in (one, two))
        x = self.layer(x) + x
        return self.head(x * y).float().log_softmax(-1).mean() + self.head(y).float().std()


class Siamese(nn.Module):
    """Two calls of one tower."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 16))

    def forward(self, one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
        return (self.tower(one.float()) - self.tower(two.float())).float().pow(2).mean()


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("kind", [Again, Siamese])
def test_the_gradients_of_casts_are_added_up_as_autocast_s_cache_has_them(
    kind: type[nn.Module], cached: bool
) -> None:
    """In the lower precision if readers of a weight share its cast, else in full precision."""
    torch.manual_seed(0)
    model, args = kind(), tuple(torch.randint(32, (2, 4, 5)))
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=cached):
        placed.assert_as_unsplit(model, args, seeds=6)


class Block(nn.Module):
    """A layer that comes back in a block under autocast; with `others`, outside of it, too."""

    def __init__(self, cached: bool | None, *, others: bool = False) -> None:
        super().__init__()
        self.layer, self.cached, self.others = nn.Linear(16, 16), cached, others

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=self.cached):
            y = self.layer(self.layer(x).tanh())
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=self.cached):
            z = self.layer(self.layer(y.float().exp()).tanh()) if self.others else y.exp()
        x = y.float() + z.float()
        return self.layer(x) if self.others else x


@pytest.mark.parametrize("cached", [None, True, False])
@pytest.mark.parametrize("outside", [True, False])
def test_a_block_under_autocast_in_forward_has_the_cache_that_it_has_unsplit(
    cached: bool | None, outside: bool
) -> None:
    """Casts that are not shared are added up as one where others read the weight (runtime.md)."""
    torch.manual_seed(0)
    model, x = Block(cached, others=outside if cached is None else cached), torch.randn(4, 16)
    with placed.one_thread():
        torch.set_autocast_cache_enabled(outside)
        try:
            traced = baechi.trace(model, (x,))
            expected = placed.step(copy.deepcopy(model), (x,), {})
        finally:
            torch.set_autocast_cache_enabled(True)
        for seed in range(3):
            module = placed.again_at_random(traced, seed=seed, devices=3)
            assert not expected.differs_from(placed.step(module, (x,), {})), seed
            module.unplace()


def test_torch_still_exports_autocast_without_its_cache() -> None:
    """Else `workarounds.caches_told` can go."""
    exported = torch.export.export(Block(None), (torch.randn(4, 16),), strict=False)
    blocks = [n for n in exported.graph.nodes if str(n.target) == "wrap_with_autocast"]
    assert [node.args[3] for node in blocks] == [False, False]


def test_a_cast_is_shared_where_autocast_would_keep_it() -> None:
    """Where several operators that it casts for read an fp32 weight that is trained."""

    def casts(model: nn.Module, *, lower: bool = True, cached: bool = True) -> int:
        with torch.autocast("cpu", torch.bfloat16, enabled=lower, cache_enabled=cached):
            traced = baechi.trace(model, tuple(torch.randint(32, (2, 4, 5))))
        return sum(op.key.startswith('call_function aten.to.dtype(("<state') for op in traced.ops)

    model = Again()
    assert casts(model) == len([*model.parameters()])
    assert casts(model, lower=False) == casts(model, cached=False) == 0
    model.layer.requires_grad_(False)
    model.head = nn.Linear(16, 32, bias=False).double()
    assert casts(model) == len([*model.tower.parameters()])


def recurrent_in_bf16() -> bool:
    """True if oneDNN, which torch asks without a way back, runs them here: with AVX-512 it does."""
    try:
        with torch.autocast("cpu", torch.bfloat16):
            nn.LSTM(4, 4)(torch.randn(3, 2, 4))
    except RuntimeError:
        return False
    return True


class Casts(nn.Module):
    """A cast that changes nothing without autocast, and a part that stays in full precision."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.layers[0](x).float().exp()
        with torch.autocast("cpu", enabled=False):
            x = self.layers[1](x)
        y = self.layers[2](x)
        return y, y.float().sum()


def test_each_state_of_autocast_is_planned_for_itself() -> None:
    """A cast that changed nothing when the model was traced is not in the trace."""
    model, x = Casts(), torch.randn(4, 8)
    module = placed.lazily(model, verify=True)
    for dtype in (None, torch.bfloat16, torch.float16, None, torch.bfloat16):
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            expected, actual = copy.deepcopy(model)(x), module(x)
        for one, two in zip(expected, actual, strict=True):
            assert one.dtype == two.dtype
            torch.testing.assert_close(two, one)
    assert repr(module) == "PlacedModule(Casts, 3 specializations)"
    module.unplace()


def test_another_autocast_than_the_traced_one_is_refused_by_apply() -> None:
    model, args, _ = zoo.towers()
    module = placed.at_random(model, args)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(baechi.InputError, match="autocast"):
        module(*args)
    module.unplace()
    with torch.autocast("cpu", torch.bfloat16):
        module = placed.at_random(model, args)
    with pytest.raises(baechi.InputError, match="autocast"):
        module(*args)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(module(*args), copy.deepcopy(model)(*args))
    for other in ({"dtype": torch.float16}, {"dtype": torch.bfloat16, "cache_enabled": False}):
        with torch.autocast("cpu", **other), pytest.raises(baechi.InputError, match="autocast"):
            module(*args)
    module.unplace()


def test_what_was_traced_under_autocast_is_measured_under_it() -> None:
    model, args, _ = zoo.towers()
    with torch.autocast("cpu", torch.bfloat16):
        traced = baechi.trace(model, args)
    plain = baechi.trace(model, args)
    assert not {op.key for op in traced.ops} & {op.key for op in plain.ops}
    profile = baechi.profile(traced, progress=False, cache=False)
    cluster = baechi.probe({"cpu:0": "1GiB", "cpu:1": "1GiB"})
    graph = traced.graph(profile)
    placement = baechi.solve(graph, cluster, placer="round-robin")
    module = baechi.apply(traced, placement, graph=graph, cluster=cluster)
    assert module.measure(steps=2).step_ns > 0
    module.unplace()


def test_a_gradient_scaler_scales_clips_and_steps_as_on_the_unsplit_model() -> None:
    """With an overflow in the third step, which it must see and skip."""
    model, args, _ = zoo.towers()
    reference = copy.deepcopy(model)
    norms: list[list[float]] = []
    scales = []
    with placed.one_thread():
        with torch.autocast("cpu", torch.bfloat16):
            module = placed.at_random(model, args)
        for one in (reference, module):
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
            optimizer = torch.optim.AdamW(one.parameters(), lr=1e-2)
            row = []
            for i in range(6):
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.bfloat16):
                    loss = one(*args).float().square().mean()
                scaler.scale(loss * (float("inf") if i == 2 else 1.0)).backward()
                scaler.unscale_(optimizer)
                norm = torch.nn.utils.clip_grad_norm_(one.parameters(), 0.1)
                row.append(float(torch.nan_to_num(norm)))
                scaler.step(optimizer)
                scaler.update()
            norms.append(row)
            scales.append(scaler.get_scale())
    assert norms[0] == norms[1]
    assert scales == [2.0**7] * 2
    for key, tensor in reference.state_dict().items():
        assert torch.equal(module.state_dict()[key], tensor), key
    module.unplace()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("gpt2", torch.bfloat16),
        pytest.param("resnet_train", torch.bfloat16, marks=pytest.mark.slow),
        ("towers", torch.float16),
    ],
)
def test_a_model_in_half_precision_trains_as_unsplit(name: str, dtype: torch.dtype) -> None:
    model, args, kwargs = zoo.MODELS[name]()
    model = model.to(dtype)

    def halved(value: Any) -> Any:
        floats = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if floats else value

    args = tuple(map(halved, args))
    kwargs = {key: halved(value) for key, value in kwargs.items()}
    reference = copy.deepcopy(model)
    with placed.one_thread():
        module = placed.at_random(model, args, kwargs)
        expected, actual = (placed.step(m, args, kwargs) for m in (reference, module))
    assert not expected.differs_from(actual)
    assert {gradient.dtype for gradient in actual.gradients.values()} == {dtype}
    module.unplace()


@pytest.mark.filterwarnings("ignore:The tensor attributes self._flat_weights")
def test_torch_still_exports_recurrent_layers_in_other_dtypes() -> None:
    """If this fails, torch is mended: `recurrent_layers.gives_traced_dtypes` may go."""
    if not recurrent_in_bf16():
        pytest.skip("torch has no recurrent layers in bf16 for this CPU")
    layer, x = nn.LSTM(4, 4), torch.randn(3, 2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        exported = torch.export.export(layer, (x,), strict=False).module()
        nodes = [node for node in exported.graph.nodes if "lstm" in str(node.target)]
        assert [node.meta["val"][0].dtype for node in nodes] == [torch.float32]
        assert layer(x)[0].dtype is torch.bfloat16


class Attending(nn.Module):
    """Layers, positions that are made without autocast, and a loss outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.middle = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            places = torch.arange(x.shape[1]).float().outer(torch.ones(16)).cos()
        x = self.first(x)
        for layer in self.middle:
            x = x + layer(x * places).relu()
        return self.last(x)


class Decorated(Attending):
    """The same, whose own forward is decorated."""

    forward = torch.autocast("cpu", torch.bfloat16)(Attending.forward)


def wrapped(model: nn.Module) -> nn.Module:
    """The model with another forward, as Accelerate and so Trainer give it for bf16."""
    decorated = torch.autocast("cpu", torch.bfloat16)(model.forward.__func__)  # type: ignore
    model.forward = MethodType(decorated, model)  # type: ignore[method-assign]
    return model


def computing(model: nn.Module) -> nn.Module:
    """The same, and a decorator around it that computes outside of autocast."""
    forward, scale = wrapped(model).forward.__func__, torch.linspace(-1, 1, 16).view(4, 4)  # type: ignore

    @wraps(forward)
    def computed(*args: Any, **kwargs: Any) -> torch.Tensor:
        found: torch.Tensor = forward(*args, **kwargs).float() @ scale
        return found

    model.forward = MethodType(computed, model)  # type: ignore[method-assign]
    return model


def test_what_a_decorator_computes_outside_of_autocast_is_in_fp32() -> None:
    torch.manual_seed(0)
    model, args = Attending(), (torch.randn(2, 5, 8),)
    unsplit = computing(copy.deepcopy(model))
    with placed.one_thread():
        split = computing(placed.lazily(model, placer=baechi.RandomPlacer(0)))
        expected, actual = (placed.step(each, args, {}) for each in (unsplit, split))
    assert not expected.differs_from(actual)
    split.unplace()


@pytest.mark.parametrize("late", [True, False, None], ids=["late", "early", "own"])
def test_a_decorated_forward_is_split(late: bool | None) -> None:
    torch.manual_seed(0)
    model = Decorated() if late is None else Attending()
    unsplit = copy.deepcopy(model) if late is None else wrapped(copy.deepcopy(model))
    with placed.one_thread():
        split = placed.lazily(
            model if late in (True, None) else wrapped(model), placer=baechi.RandomPlacer(0)
        )
        if late:
            wrapped(split)
        for batch in (2, 3, 2):
            args = (torch.randn(batch, 5, 8),)
            expected, actual = (placed.step(each, args, {}) for each in (unsplit, split))
            assert not expected.differs_from(actual)
        assert len(split.traced.ops) > 12
        assert len(split._specializations) == 1
        split.eval()
        unsplit.eval()
        with torch.no_grad():
            assert torch.equal(unsplit(*args), split(*args))
    split.unplace()


class Remembering(nn.Module):
    """A recurrent layer, in a forward that `torch.fx` cannot follow."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.before, self.layer, self.after = nn.Linear(8, 8), kind(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        found, _ = self.layer(x)
        return self.after(found.float().exp()) if found.dtype.is_floating_point else found


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_layer_under_autocast_is_an_operator(kind: type[nn.RNNBase]) -> None:
    if not recurrent_in_bf16():
        pytest.skip("torch has no recurrent layers in bf16 for this CPU")
    torch.manual_seed(0)
    model, args = Remembering(kind), (torch.randn(5, 3, 8),)
    with placed.one_thread(), torch.autocast("cpu", torch.bfloat16):
        module = placed.at_random(copy.deepcopy(model), args)
        assert module.traced.rung == "torch.export (non-strict)"
        assert not placed.step(model, args, {}).differs_from(placed.step(module, args, {}))
    module.unplace()


class Starting(nn.Module):
    """A layer whose kernel, of fp16 beside fp32, gives fp16 without gradients, and fp32 with them.

    Its fake kernel knows one of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.after = nn.LSTM(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return self.after(self.layer(x.half(), (state, state))[0].float().exp())


def test_a_layer_whose_dtypes_a_trace_does_not_know_stays_whole() -> None:
    model, args = Starting(), (torch.randn(5, 3, 8), torch.randn(1, 3, 8))
    with torch.autocast("cpu", torch.float16):
        try:
            with torch.no_grad():
                found, _ = model.layer(args[0].half(), (args[1], args[1]))
        except RuntimeError:
            found = None
        if found is None or found.dtype is not torch.float16:
            pytest.skip("torch has no recurrent layers in fp16 for this CPU")
        traced = baechi.trace(copy.deepcopy(model), args)
        assert any("other dtypes" in attempt.reason for attempt in traced.attempts)
        for gradients in (True, False):
            module = placed.at_random(copy.deepcopy(model), args)
            with torch.set_grad_enabled(gradients), placed.one_thread():
                assert torch.equal(module(*args), model(*args))
            module.unplace()


def test_casts_that_autocast_keeps_do_not_count_as_saved_at_other_sizes() -> None:
    """They count once, for the whole step; the second layer saves its input beside them."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    with torch.autocast("cpu", torch.bfloat16):
        family = ladder.trace(model, (torch.randn(16, 64),), places=frozenset({(0, 0)}))
        static = baechi.trace(model, (torch.randn(32, 64),))
    for traced in (resized(family, (32,)), static):
        assert sum(op.saved_bytes for op in traced.ops) == 32 * 64 * 2
        assert sum(op.frozen_bytes for op in traced.ops) == 2 * (64 * 64 + 64) * 2


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_casts_of_a_recurrent_layer_count_once_at_all_sizes(kind: type[nn.RNNBase]) -> None:
    if not recurrent_in_bf16():
        pytest.skip("torch has no recurrent layers in bf16 for this CPU")
    model = kind(8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        family = ladder.trace(model, (torch.randn(4, 3, 8),), places=frozenset({(0, 0)}))
        static = baechi.trace(model, (torch.randn(9, 3, 8),))
    (found,), (known,) = (
        {(op.saved_bytes, op.frozen_bytes) for op in traced.ops if op.frozen_bytes}
        for traced in (resized(family, (9,)), static)
    )
    assert found == known
    assert known[1] == sum(2 * weight.numel() for weight in model.parameters())
