"""Submodules that no tracer takes, in models that `torch.export` alone can trace."""

import copy
from typing import Any, NamedTuple

import pytest
import torch
from placed import again_at_random, at_random, lazily, one_thread, step
from seeds import some
from torch import Tensor, nn

import baechi
from baechi.errors import ExecutionError, TraceError
from baechi.tracing.ladder import trace

WHOLE = "torch.export (non-strict), opaque submodules"


class Experts(nn.Module):
    """A layer that runs those of its parts that are hit, as many do."""

    scale: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, *, bias: Tensor | None = None) -> tuple[Tensor, Tensor, None]:
        weights = self.gate(x).softmax(-1)
        chosen, made = weights.argmax(-1), torch.zeros_like(x)
        for number in chosen.unique():
            rows = torch.where(chosen == number)
            made[rows] = self.experts[int(number)](x[rows]) * weights[rows][:, int(number), None]
        self.hit = len(chosen.unique())
        scale = 1 if self.scale is None else self.scale
        return made * scale if bias is None else made + bias, weights, None


class Model(nn.Module):
    """Writes into what it computed, which fx does not take, between two layers of experts."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.one, self.two = Experts(), Experts()

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        x[:, :1] = 0
        if self.kind == "sets":
            self.two.scale = x.mean()
        made, weights, _ = self.one(x)
        if self.kind == "reads":
            made = made * self.one.hit
        with torch.set_grad_enabled(self.kind != "without gradients"):
            made, _, _ = self.two(x + made, bias=weights.mean())
        return self.last(made) + weights.sum()


def test_layers_that_cannot_be_traced_stay_whole_in_an_export() -> None:
    model = Model()
    hooked = []
    model.two.register_forward_hook(lambda _, given, made: hooked.append(len(given)) or made)
    traced = baechi.trace(model, (torch.randn(2, 5, 8),))
    assert traced.rung == WHOLE
    names = [op.name for op in traced.ops]
    assert [name for name in names if "whole" in name] == ["one/whole", "two/whole_1"]
    assert len(names) > 6
    with one_thread():
        for seed in range(2):
            placed = again_at_random(traced, seed=seed, devices=3)
            hooked.clear()
            for _ in range(3):  # other parts are hit
                args = (torch.randn(2, 5, 8),)
                unsplit = copy.deepcopy(model)
                unsplit.two._forward_hooks.clear()
                assert not step(unsplit, args, {}).differs_from(step(placed, args, {}))
            assert hooked == [1, 1, 1]
            placed.unplace()


def test_lazily_placed_models_train_and_answer_with_such_layers() -> None:
    unsplit, model = Model(), Model()
    with one_thread():
        placed = lazily(model, max_shapes=4)
        for shape in ((2, 5, 8), (3, 5, 8), (2, 5, 8)):
            args = (torch.randn(shape),)
            assert not step(unsplit, args, {}).differs_from(step(placed, args, {}))
            with torch.no_grad():
                assert torch.equal(unsplit(*args), placed(*args))
    placed.unplace()


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("sets", "forward sets 'scale' of two, which cannot be traced"),
        ("reads", "forward reads 'hit' of one, which cannot be traced"),
        ("without gradients", "two cannot stay whole where forward switches gradients"),
    ],
)
def test_what_such_a_layer_would_not_be_told_is_refused(kind: str, said: str) -> None:
    with pytest.raises(TraceError, match=said):
        baechi.trace(Model(kind), (torch.randn(2, 5, 8),))


class Headed(nn.Module):
    """fx can trace what is around the decoder, in which nearly all parameters are."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder, self.head = Model(), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.decoder(x))


def test_most_of_a_model_does_not_stay_whole_for_the_layers_that_look_at_values() -> None:
    model = Headed()
    traced = baechi.trace(model, (torch.randn(2, 5, 8),))
    assert traced.rung == WHOLE
    whole = [op.name for op in traced.ops if "whole" in op.name]
    assert whole == ["decoder.one/whole", "decoder.two/whole_1"]
    with one_thread():
        placed = again_at_random(traced, seed=0, devices=3)
        for _ in range(2):
            args = (torch.randn(2, 5, 8),)
            unsplit = copy.deepcopy(model)
            assert not step(unsplit, args, {}).differs_from(step(placed, args, {}))
        placed.unplace()


class Told(nn.Module):
    """fx can trace all but the layer of experts, which is told something, or tells something."""

    def __init__(self, *, sets: bool) -> None:
        super().__init__()
        self.first, self.experts, self.last = nn.Linear(8, 8), Experts(), nn.Linear(8, 64)
        self.sets = sets

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.sets:
            self.experts.scale = x.mean()
        made, _, _ = self.experts(x)
        return self.last(made if self.sets else made * self.experts.hit)


@pytest.mark.parametrize("sets", [True, False])
def test_what_fx_would_lose_is_refused_too(sets: bool) -> None:
    said = "sets 'scale' of experts" if sets else "reads 'hit' that a submodule sets"
    model, x = Told(sets=sets), torch.randn(2, 5, 8)
    model(x)  # which sets it
    with pytest.raises(TraceError, match=f"forward {said}"):
        baechi.trace(model, (x,))


class Selecting(nn.Module):
    """Gives as many rows as the values choose, inside of lists."""

    def forward(self, x: Tensor) -> tuple[list[Tensor], Tensor]:
        rows = [x[int(row)] for row in (x.sum(-1) > 0).nonzero()[:, 0]]
        return [torch.stack(rows)], x * 2


class Selected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.part, self.last = nn.Linear(4, 4), Selecting(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x[:, :1] = 0
        (x,), twice = self.part(x)
        return self.last(x) / x.shape[0] + twice.mean(0)


def test_results_of_other_sizes_than_in_the_trace_are_an_error() -> None:
    torch.manual_seed(0)
    model = Selected()
    x = torch.randn(8, 4)
    traced = baechi.trace(model, (x,))
    assert traced.rung == WHOLE
    with one_thread():
        placed = again_at_random(traced, seed=0, devices=2)
        assert torch.equal(placed(x), copy.deepcopy(model)(x))
        with pytest.raises(ExecutionError, match=r"part/sizes.*sizes mismatch"):
            placed(-x * 2 + 1)
    placed.unplace()


class Named(NamedTuple):
    """What a submodule may give."""

    made: Tensor
    rest: dict[str, list[Tensor]]


class Naming(nn.Module):
    """A layer of experts whose results have names, in a model that fx does not take."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.experts = nn.Linear(8, 8), WithNames()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x[:, :1] = 0
        found = self.experts(x)
        made: Tensor = found.made + found[1]["weights"][0].sum()
        return made


class WithNames(Experts):
    """Experts whose results have names."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        made, weights, _ = super().forward(x)
        return Named(made, {"weights": [weights]})


def test_the_results_of_what_stays_whole_may_have_names() -> None:
    model, x = Naming(), torch.randn(6, 8)
    with one_thread():
        placed = at_random(copy.deepcopy(model), (x,))
        assert placed.traced.rung == WHOLE
        assert not step(model, (x,), {}).differs_from(step(placed, (x,), {}))


class Sized(nn.Module):
    """A layer that looks at values, and gives results of several sizes."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, *, mask: Tensor) -> tuple[Tensor, ...]:
        self.calls += 1
        y = self.linear(x)
        y = y * 2 if y.sum().item() > 1e9 else y
        flat = nn.functional.dropout(y.flatten(0, 1).sin(), 0.2, self.training)
        twice = torch.cat([y, y * mask.unsqueeze(-1)], dim=1).transpose(0, 1).exp()
        if self.kind == "aliases":
            return flat, twice, x
        return flat, twice, (y[0, 0, :2] if self.kind == "" else y.flatten(0, 2)[: x.shape[1] // 2])


class AtAnySize(nn.Module):
    """Reads all that such a layer gives, and may have two of them; fx does not take it."""

    def __init__(self, kind: str = "", *, experts: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8))
        self.last = nn.Linear(8, 8)
        self.sized, self.experts = Sized(kind), Experts() if experts else None

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.first(x)
        x[:, :1] = 0
        flat, twice, few = self.sized(x, mask=mask)
        made = flat.view(x.shape)
        if self.experts is not None:
            made, _, _ = self.experts(made)
        made += 1
        x = self.last(made + twice[: x.shape[1]].transpose(0, 1)) * few.sum()
        return x + twice.shape[0]


def assert_one_step(unsplit: nn.Module, placed: nn.Module, args: tuple[Tensor, ...]) -> None:
    """Both draw the same, and leave the same bits."""
    left = []
    for model in (unsplit, placed):
        torch.manual_seed(3)
        left.append(step(model, args, {}))
    assert not left[0].differs_from(left[1])


@pytest.mark.parametrize("training", some([True, False], 2))
def test_there_is_one_plan_for_all_sizes_of_what_stays_whole(training: bool) -> None:
    unsplit, model = (AtAnySize(experts=True).train(training) for _ in range(2))
    with one_thread():
        placed = lazily(model, training=training, placer=baechi.RandomPlacer(1))
        for shape in ((2, 6), (3, 9), (5, 4), (2, 6)):
            args = (torch.randn(*shape, 8), torch.randn(shape))
            if training:
                assert_one_step(unsplit, placed, args)
            else:
                assert torch.equal(unsplit(*args), placed(*args))
        assert placed.traced.rung == WHOLE
        assert placed.traced.module.family is not None
        assert torch.equal(placed.sized.calls, unsplit.sized.calls)
        assert len(placed._specializations) == 1
    placed.unplace()


@pytest.mark.parametrize("kind", ["cuts", "aliases"])
def test_other_sizes_of_what_stays_whole_have_plans_of_their_own(kind: str) -> None:
    unsplit, model = AtAnySize(kind), AtAnySize(kind)
    remarks: list[str] = []
    with one_thread():
        placed = lazily(model, placer=baechi.RandomPlacer(1), max_shapes=4)
        for shape in ((2, 6), (2, 9), (2, 6)):
            assert_one_step(unsplit, placed, (torch.randn(*shape, 8), torch.randn(shape)))
            remarks += placed.remarks
        assert len(placed._specializations) == 2
        assert any("a plan for each shape" in remark for remark in remarks)
    placed.unplace()


@pytest.mark.parametrize(
    ("kind", "said"),
    [("cuts", "those of its results do not"), ("aliases", "sized gives a part of what it reads")],
)
def test_why_a_plan_is_not_for_other_sizes_of_what_stays_whole_is_said(
    kind: str, said: str
) -> None:
    args = (torch.randn(2, 6, 8), torch.randn(2, 6))
    with pytest.raises(TraceError, match=said):
        trace(AtAnySize(kind), args, places=frozenset({(0, 1), (1, 1)}))


def test_a_batch_as_large_as_it_is_long_is_known_apart() -> None:
    unsplit, model = AtAnySize(), AtAnySize()
    both = {0: "batch", 1: ("length", 2, 9)}
    with one_thread():
        placed = lazily(model, placer=baechi.RandomPlacer(1), dynamic={"x": both, "mask": both})
        for shape in ((4, 4), (3, 6), (5, 2)):
            assert_one_step(unsplit, placed, (torch.randn(*shape, 8), torch.randn(shape)))
        assert len(placed._specializations) == 1
    placed.unplace()
