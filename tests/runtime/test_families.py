"""Families: one plan for calls of many shapes, equal to the unsplit model in every bit at each."""

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from placed import lazily
from torch import nn

import baechi
from baechi.costs.estimation import estimate
from baechi.errors import NotSpecializedError
from baechi.probing.worker_costs import crowded
from baechi.tracing.calling_convention import canonical_call
from baechi.tracing.families import differing
from baechi.tracing.family_traces import resized, sized
from baechi.tracing.ladder import trace

pytestmark = pytest.mark.usefixtures("one_thread")


class Mixed(nn.Module):
    """Attention, a batch norm, views, sums over parts, and a buffer that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.qkv = nn.Linear(8, 24)
        self.norm = nn.BatchNorm1d(8)
        self.out = nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        x = self.embed(ids)
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, 2, 4).permute(2, 0, 3, 1, 4)
        weights = q @ k.transpose(-1, -2) / length
        if mask is not None:
            weights = weights.masked_fill(~mask[:, None, None, :], -1e9)
        heads = (weights.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, 8)
        x = self.norm((x + heads).reshape(-1, 8)).view(batch, length, 8)
        self.count += 1
        x = torch.cat([x[:, 1:], x[:, :1]], 1) + x.mean(1, keepdim=True).expand_as(x)
        return {"x": self.out(x), "pooled": x[:, : length // 2].sum(1), "length": length}


def ids_of(*shape: int) -> torch.Tensor:
    return torch.randint(0, 32, shape, generator=torch.Generator().manual_seed(sum(shape)))


def step(model: nn.Module, *args: Any) -> list[Any]:
    """Outputs, gradients and buffers of one step."""
    model.zero_grad()
    out = model(*args)
    tensors = [value for value in out.values() if isinstance(value, torch.Tensor)]
    if torch.is_grad_enabled():
        sum(value.square().sum() for value in tensors).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return [*out.values(), *gradients, *(buffer.clone() for buffer in model.buffers())]


def run_beside(model: nn.Module, calls: Sequence[tuple[Any, ...]]) -> tuple[int, tuple[str, ...]]:
    """The plans after steps that are equal to the unsplit model's, and the remarks."""
    unsplit = copy.deepcopy(model)
    module = lazily(model, placer="round-robin")
    for args in calls:
        check_equal(step(module, *args), step(unsplit, *args))
    found = n_plans(module), module.remarks
    module.unplace()
    return found


def check_equal(one: Sequence[Any], two: Sequence[Any]) -> None:
    for mine, theirs in zip(one, two, strict=True):
        if isinstance(theirs, torch.Tensor):
            assert torch.equal(mine, theirs)
        else:
            assert mine == theirs
            assert type(mine) is type(theirs)


def n_plans(module: Any) -> int:
    return len(module._specializations)


in_one_process = pytest.mark.xdist_group("pair")  # which makes the fixture once


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Any, nn.Module]]:
    """A placed model, cut in many places, that has seen two shapes; and its copy."""
    torch.manual_seed(0)
    model = Mixed().train()
    unsplit = copy.deepcopy(model)
    module = lazily(model, placer="round-robin")
    for shape in ((3, 7), (2, 5)):
        check_equal(step(module, ids_of(*shape)), step(unsplit, ids_of(*shape)))
    assert n_plans(module) == 1
    yield module, unsplit
    module.unplace()


class Shifted(nn.Module):
    """A loss of tokens and of those that follow, which a caller cuts from one tensor."""

    def __init__(self, writes: bool = False) -> None:
        super().__init__()
        self.embed, self.head, self.writes = nn.Embedding(32, 8), nn.Linear(8, 32), writes

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.writes:
            ids += 1
        logits = self.head(self.embed(ids))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.reshape(-1))
        return {"loss": loss, "logits": logits}


@pytest.mark.parametrize("writes", [False, True])
def test_arguments_may_be_parts_of_one_tensor(writes: bool) -> None:
    torch.manual_seed(0)
    plain = Shifted(writes)
    placed = lazily(copy.deepcopy(plain), costs="estimate")
    for length in (5, 8) if writes else (5, 8, 11):
        mine, own = ids_of(3, length) % 16, ids_of(3, length) % 16
        found = step(placed, mine[:, :-1], mine[:, 1:])
        wanted = step(plain, own[:, :-1], own[:, 1:])
        assert all(map(torch.equal, [*found, mine], [*wanted, own]))
    plans = [*baechi.runtime.derived_class.placed_state(placed).root.specializations]
    assert len(plans) == (2 if writes else 1), placed.remarks


@in_one_process
@pytest.mark.parametrize("shape", [(4, 9), (2, 4), (3, 31)])
def test_any_further_shape_has_the_bits_of_the_unsplit_model(pair: Any, shape: Any) -> None:
    module, unsplit = pair
    for _ in range(2):
        check_equal(step(module, ids_of(*shape)), step(unsplit, ids_of(*shape)))
    assert n_plans(module) == 1
    assert len(set(module.placement.devices)) == 2


@in_one_process
def test_sizes_of_one_are_of_another_family(pair: Any) -> None:
    module, unsplit = pair
    before = n_plans(module)
    check_equal(step(module, ids_of(4, 1)), step(unsplit, ids_of(4, 1)))
    assert n_plans(module) == before + 1


@in_one_process
def test_other_strides_are_of_another_family_or_equal(pair: Any) -> None:
    module, unsplit = pair
    for shape in ((6, 4), (8, 3)):
        turned = ids_of(*shape).t()
        check_equal(step(module, turned), step(unsplit, turned))


def test_without_dynamic_each_shape_has_its_plan() -> None:
    module = lazily(nn.Linear(4, 4), dynamic=False, placer="single")
    for n in (2, 3, 4):
        module(torch.zeros(n, 4))
    assert n_plans(module) == 3
    module.unplace()


class Branches(nn.Module):
    """Its forward asks what a guard must keep: one of the questions at a time."""

    def __init__(self, question: str) -> None:
        super().__init__()
        self.question = question
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, n: int = 2) -> torch.Tensor:
        length = x.shape[0]
        asked = {
            "size": lambda: length > 8,
            "odd": lambda: length % 2 == 1,
            "number": lambda: n > 8,
            "value": lambda: bool((torch.arange(length) < 8).all()),
            "middle": lambda: bool(torch.arange(length)[: length // 2].sum() > 8),
            "contiguous": lambda: x[: length - 8].is_contiguous() if length > 8 else False,
        }[self.question]()
        x = self.inner(x)
        return x.relu() * n if asked else x.tanh() + n


@pytest.mark.parametrize("question", ["size", "odd", "number", "value", "middle", "contiguous"])
def test_what_forward_asks_about_sizes_is_asked_again(question: str) -> None:
    torch.manual_seed(0)
    model = Branches(question)
    unsplit = copy.deepcopy(model)
    module = lazily(model, placer="single")
    for size in (4, 6, 8, 12, 3, 7, 20, 9, 16):
        x = torch.randn(size, 4)
        n = size if question == "number" else 2
        assert torch.equal(module(x, n), unsplit(x, n)), size
    assert n_plans(module) <= (5 if question in ("odd", "contiguous") else 4)
    module.unplace()


class Asking(nn.Module):
    """Asks whether it is long, and does the same, or almost."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self.part = part
        self.inner = nn.Linear(4, 4)
        self.mean = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> Any:
        long, y = bool(x.shape[0] > 8), self.inner(x)
        if self.part == "nothing":
            return {"x": (y.tanh, y.tanh)[long]()}
        if self.part == "constant":
            return {"x": y * torch.tensor(2.0 if long else 3.0)}
        if self.part == "number":
            return {"x": y * (2.0 if long else 3.0)}
        if self.part == "parameter":
            return {"x": y * (self.mean if long else self.inner.bias)}
        if self.part == "gradient":
            with torch.set_grad_enabled(long):
                return {"x": y, "z": y.tanh()}
        if self.part == "inner graph":
            with torch.no_grad():
                z = y.exp() * (2.0 if long else 3.0)
            return {"x": y, "z": z + y}
        if self.part == "order":
            z = y.tanh()
            return {"x": y, "z": z} if long else {"z": y, "x": z}
        return {"x": y} if long else {"y": y}


PARTED = ["constant", "number", "parameter", "gradient", "inner graph", "order", "names"]


@pytest.mark.parametrize(("part", "plans"), [("nothing", 1), *((part, 2) for part in PARTED)])
def test_beyond_its_guards_a_family_takes_what_runs_the_same(part: str, plans: int) -> None:
    torch.manual_seed(0)
    model = Asking(part)
    unsplit = copy.deepcopy(model)
    module = lazily(model)
    for n in (3, 5, 9, 12, 4, 10):
        x = torch.randn(n, 4)
        mine, theirs = module(x), unsplit(x)
        assert list(mine) == list(theirs)
        flags = [[value.requires_grad for value in each.values()] for each in (mine, theirs)]
        assert flags[0] == flags[1]
        check_equal(step(module, x), step(unsplit, x))
    assert n_plans(module) == plans
    module.unplace()


def test_ints_that_change_are_symbols_and_the_rest_is_named() -> None:
    class Timed(nn.Module):
        def forward(self, x: torch.Tensor, timestep: int, scale: float) -> torch.Tensor:
            return x * timestep + scale

    module = lazily(Timed(), placer="single", max_shapes=1)
    x = torch.ones(3)
    for timestep in (900, 810, 720, 540, 450):
        assert torch.equal(module(x, timestep, 0.5), x * timestep + 0.5)
    assert n_plans(module) == 1
    with pytest.warns(UserWarning, match=r"scale is 0.75 \(was 0.5\)"):
        module(x, 450, 0.75)
    assert torch.equal(module(x, 360, 0.5), x * 360 + 0.5)
    module(x, 450, 1.5)  # one warning is enough
    assert n_plans(module) == 1
    module.unplace()


def test_the_least_recently_used_plan_is_dropped_and_its_graph_lives_on() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    unsplit = copy.deepcopy(model)
    module = lazily(model, placer="single", dynamic=False, max_shapes=2)
    xs = {n: torch.randn(n, 4) for n in (2, 3, 4)}
    early = module(xs[2])
    module(xs[3])
    with pytest.warns(UserWarning, match=r"plans for 2 families"):
        module(xs[4])
    early.sum().backward()
    unsplit(xs[2]).sum().backward()
    assert torch.equal(module.weight.grad, unsplit.weight.grad)
    assert n_plans(module) == 2
    module.unplace()


def test_declared_sizes_are_symbols_at_once_and_placed_for_the_largest() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    unsplit = copy.deepcopy(model)
    module = lazily(model, dynamic={"input": {0: ("batch", 2, 512)}}, placer="single")
    for n in (3, 5, 512):
        x = torch.randn(n, 64)
        assert torch.equal(module(x), unsplit(x))
    assert n_plans(module) == 1
    assert max(tensor.nbytes for tensor in module.graph.tensors) == 512 * 64 * 4
    module.unplace()


@pytest.mark.parametrize("wrong", [3, {"input": 0}, {"input": {0: ("n", 1, 4)}}, {"input": {0: 4}}])
def test_a_wrong_declaration_is_refused(wrong: Any) -> None:
    with pytest.raises(baechi.InputError, match="dynamic"):
        lazily(nn.Linear(4, 4), dynamic=wrong)


def test_an_argument_that_is_not_there_is_named() -> None:
    module = lazily(nn.Linear(4, 4), dynamic={"ids": {0: "n"}})
    with pytest.raises(baechi.InputError, match=r"'ids'.*it gives input"):
        module(torch.zeros(2, 4))


def test_a_shape_that_does_not_fit_is_refused_with_the_largest_that_does() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    module = baechi.place(
        model,
        {"cpu:0": "400KiB"},
        costs="estimate",
        progress=False,
        placer="single",
        threads_per_device=1,
    )
    for n in (4, 8, 16, 32):
        module(torch.randn(n, 64))
    assert n_plans(module) == 1
    with pytest.raises(baechi.InfeasibleError, match=r"input, dimension 0: \d+ fits, 4096 does"):
        module(torch.randn(4096, 64))
    module(torch.randn(24, 64))
    module.unplace()


def test_cuda_graphs_of_as_many_shapes_are_kept_as_fit_beside_each_other() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    module = baechi.place(
        model, {"cpu:0": "400KiB"}, costs="estimate", progress=False, placer="single"
    )
    for n in (16, 32):
        module(torch.randn(n, 64))
    admission = module._current.admission
    state = sum(op.persistent_bytes for op in module.graph.ops)
    fit = {}
    for n in (32, 64, 96, 160, 32):
        step_bytes = admission._schedule_at([n]).peak_bytes[0] - state
        fit[n] = (400 * 1024 - state) // step_bytes
        assert fit[n] >= 1
        assert admission.most_replayed([n]) == min(4, *fit.values())
    assert max(fit.values()) > 4 > min(fit.values())
    module.unplace()


def tokenwise() -> nn.Module:
    """What has a family at once, and costs that grow with its sizes."""
    return nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))


def test_the_schedule_of_another_shape_has_its_computed_times() -> None:
    module = lazily(tokenwise())
    module(ids_of(3, 64))
    with pytest.raises(NotSpecializedError, match="twice, with other sizes"):
        module.schedule_of(ids_of(2, 32))
    assert module.schedule_of(ids_of(3, 64)) == module.schedule
    module(ids_of(2, 32))
    placed_for = module.schedule
    assert module.schedule_of(ids_of(3, 64)) == placed_for
    for shape in ((2, 32), (2, 5), (8, 512)):
        call = canonical_call(module, (ids_of(*shape),), {})
        traced = sized(module.traced, module._current.calls.joined(call))
        costs = estimate(traced, "cpu")
        graph = traced.graph([costs, crowded(costs, 2, whole=True)])
        placement = replace(module.placement, graph_digest=graph.digest)
        expected = baechi.simulate(graph, module.cluster, placement)
        assert module.schedule_of(ids_of(*shape)).makespan_ns == expected.makespan_ns
    assert module.schedule == placed_for
    module.unplace()


def test_a_step_is_measured_at_the_sizes_that_were_planned_for() -> None:
    moved = []
    for shapes in ([(2, 32), (3, 64)], [(3, 64), (2, 32)]):  # the second one is traced
        module = lazily(tokenwise())
        for shape in shapes:
            module(ids_of(*shape))
        moved.append(module.measure(1).moved_bytes)
        module.unplace()
    assert moved[0] == moved[1] > 0


def test_measured_times_of_another_shape_follow_from_those_of_two(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured: list[int] = []

    def profile(traced: baechi.Traced, *_: Any, **__: Any) -> baechi.Profile:
        """Ten times what is computed, and 1 ms."""
        found = estimate(traced, "cpu")
        measured.append(traced.module.call.tensors[0].shape[0])
        rows = (replace(c, forward_ns=10 * c.forward_ns + 1_000_000) for c in found.costs)
        return replace(found, costs=tuple(rows), source="measured")

    monkeypatch.setattr("baechi.planning.device_costs.profile", profile)
    module = lazily(nn.Linear(512, 512), costs="measure", placer="single", training=False)
    for n in (4096, 1024):
        module(torch.randn(n, 512))
    (linear,) = (i for i, op in enumerate(module.graph.ops) if "linear" in op.name)
    before = list(measured)
    for n in (2048, 8192, 16):
        x = torch.randn(n, 512)
        call = canonical_call(module, (x,), {})
        traced = sized(module.traced, module._current.calls.joined(call))
        computed_ns = estimate(traced, "cpu").costs[linear].forward_ns
        (span,) = (s for s in module.schedule_of(x).spans if s.op == linear)
        found_ns = span.end_ns - span.start_ns
        assert found_ns == pytest.approx(10 * computed_ns + 1_000_000, abs=10)
    assert measured == [*before, 4096, 1024]  # once, when they are asked for first
    module.unplace()


def test_a_family_at_another_shape_is_the_trace_of_that_shape() -> None:
    torch.manual_seed(0)
    model = Mixed().train()
    one, two = (
        canonical_call(model, (ids_of(3, 7),), {}),
        canonical_call(model, (ids_of(2, 5),), {}),
    )
    places = differing(one, two)
    assert places == {(0, 0), (0, 1)}
    family = trace(model, (ids_of(2, 5),), places=places).module.family
    assert family.joined(one) == (3, 7) or family.joined(one) == (7, 3)
    assert family.joined(canonical_call(model, (ids_of(3, 1),), {})) is None
    assert family.joined(canonical_call(model, (ids_of(3, 7).int(),), {})) is None
    assert family.joined(canonical_call(model, (ids_of(7, 3).t(),), {})) is None


class Counting(nn.Module):
    """Makes a tensor without naming its dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * torch.full((4,), 1 / 3)


def test_another_default_dtype_has_a_plan_of_its_own() -> None:
    unsplit = Counting()
    placed = lazily(copy.deepcopy(unsplit))
    try:
        kinds = (torch.float32, torch.float64) * 3
        for rows, default in zip((2, 3, 2, 3, 4, 4), kinds, strict=True):
            torch.set_default_dtype(default)
            x = torch.ones(rows, 4, dtype=torch.float32)
            one, two = placed(x), unsplit(x)
            assert one.dtype is two.dtype is default
            assert torch.equal(one, two)
    finally:
        torch.set_default_dtype(torch.float32)
    placed.unplace()


class Rows(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x.new_ones(len(range(x.shape[0])), 1)


def test_sizes_that_python_fixes_have_a_plan_each_and_a_remark() -> None:
    placed = lazily(Rows())
    for n in (2, 3, 5):
        x = torch.randn(n, 4)
        assert torch.equal(placed(x), Rows()(x))
    assert any("as range(size) does" in remark for remark in placed.remarks)
    assert len(placed._specializations) == 3


class Scaled(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


def test_what_one_part_fixes_another_does_not() -> None:
    model = nn.ModuleDict({"fixing": Scaled(), "free": nn.Linear(4, 4)})
    model.forward = lambda x: model["free"](model["fixing"](x))
    placed = lazily(model, training=False)
    placed(torch.randn(2, 4))
    for part, plans in (("fixing", 3), ("free", 1)):
        module = placed[part]
        with torch.no_grad():
            for n in (2, 3, 5):
                assert module(torch.randn(n, 4)).shape == (n, 4)
        entry = vars(placed)["_baechi_placed"].entries[module]
        assert len(entry.specializations) == plans


@torch.no_grad()
def centred(x: torch.Tensor) -> torch.Tensor:
    """A graph inside the graph, which makes tensors of symbolic sizes."""
    return x.mean(1, keepdim=True) * torch.ones(x.shape[0], 1)


@torch.autocast("cpu", enabled=False)
def doubled(x: torch.Tensor, last: int) -> torch.Tensor:
    """A graph inside the graph, which returns a number that another one reads, too."""
    return x[-last:] * 2


class Unusual(nn.Module):
    """Its forward does some of the things that once cost a plan for each shape."""

    def __init__(self, *parts: str) -> None:
        super().__init__()
        self.parts = parts
        self.inner = nn.Linear(4, 4)
        self.recurrent = nn.GRU(4, 4, batch_first=True)
        self.cell, self.long = nn.RNNCell(4, 4), nn.LSTMCell(4, 4)
        self.lstm = nn.LSTM(4, 4, 2, bidirectional=True)
        self.projected = nn.LSTM(4, 4, proj_size=2, batch_first=True)
        convolution = nn.Conv2d(4, 4, 1, bias=False)
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), convolution, nn.BatchNorm2d(4))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        x = self.inner(x)
        parts = {
            "truth value": lambda: x.exp() if torch.isfinite(x).all() else x,
            "distribution": lambda: torch.distributions.Normal(x, x.exp()).log_prob(x),
            "image": lambda: nn.functional.interpolate(
                x[:, None, None], scale_factor=(2.0, 1.5), mode="bilinear"
            ),
            "images of a size": lambda: nn.functional.interpolate(
                x[:, None, None], size=(3, 7), mode="nearest"
            ),
            "inner graph": lambda: x + centred(x),
            "autocast": lambda: doubled(x, len(x)) + doubled(x, len(x)).exp(),
            "whole": lambda: (
                x[: len(x), :].exp()
                + torch.arange(len(x))[: len(x), None]
                .expand(-1, 4)[: x.shape[0], :]
                .unsqueeze(0)[0]
                + x[: x.shape[0]][-len(x) :]
            ),
            "length": lambda: x * len(x) + torch.arange(len(x))[:, None],
            "one head": lambda: x.view(-1, 1, 1, 4).transpose(1, 2).mul(2) + 1,
            "baddbmm": lambda: torch.baddbmm(x[:, None, :1], x[:, :, None], x[:, None], beta=0.5),
            "scatter": lambda: x.masked_scatter(x > 0, x.flip(0)),
            "triangular": lambda: torch.linalg.solve_triangular(
                x[:, :, None] * x[:, None] + 9 * torch.eye(4), x[:, :, None], upper=False
            ),
            "selection": lambda: x.masked_select(x > 0).tanh(),
            "index": lambda: x[x > 0].tanh() + 1,
            "patches": lambda: nn.functional.unfold(x[:, None, None].expand(-1, 2, 3, 4), 2),
            "recurrent": lambda: self.recurrent(x[:, None].expand(-1, 2, 4))[0],
            "cell": lambda: self.cell(x),
            "long cell": lambda: self.long(x)[1],
            "steps": lambda: self.lstm(x[:, None] * torch.ones(2, 1))[0],
            "projected": lambda: self.projected(x[:, None].expand(-1, 2, 4))[0],
            "pooled map": lambda: nn.functional.interpolate(
                self.pool(x[:, None, None].repeat(1, 3, 3, 1).permute(0, 3, 1, 2)), size=(3, 3)
            ),
        }
        return {name: parts[name]() for name in self.parts}


NEWER = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="torch below 2.13 has no symbols for these operators"
)
# Those of a row are in one model: neither changes what is traced of the others.
PARTS: list[Any] = [
    ["distribution", "image", "images of a size", "inner graph", "length", "autocast"],
    ["one head", "baddbmm", "scatter", "triangular", "patches"],
    ["recurrent", "cell", "long cell", "steps"],
    pytest.param(["projected"], marks=NEWER),
    ["whole", "pooled map"],
]


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("parts", PARTS, ids=", ".join)
def test_unusual_operators_have_families(parts: list[str]) -> None:
    torch.manual_seed(0)
    model = Unusual(*parts)
    unsplit = copy.deepcopy(model)
    module = lazily(model, placer="round-robin")
    for n in (3, 5, 8, 2):
        x = torch.randn(n, 4)
        check_equal(step(module, x), step(unsplit, x))
    assert n_plans(module) == 1
    module.unplace()


class Inserted(nn.Module):
    """Puts features where tokens are 9, and checks how many there are, as transformers does."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.by = by
        self.embed, self.features = nn.Embedding(10, 4), nn.Linear(3, 4)
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 10)

    def forward(self, tokens: torch.Tensor, given: torch.Tensor) -> dict[str, torch.Tensor]:
        x, features = self.embed(tokens), self.features(given)
        mask = (tokens == 9).unsqueeze(-1).expand_as(x)
        if self.by == "number":
            torch._check(x[mask].numel() == features.numel(), lambda: "they do not match")
        else:
            n = mask.sum()
            torch._check_tensor_all_with(ValueError, n == features.numel(), lambda: "no match")
        x = x.masked_scatter(mask, features)
        return {"x": self.head(torch.tanh(self.body(x)))}


@pytest.mark.parametrize("by", ["number", "tensor"])
def test_checks_of_values_stay_in_families(by: str) -> None:
    torch.manual_seed(0)
    unsplit = Inserted(by)
    module = lazily(copy.deepcopy(unsplit), placer="round-robin")
    for length, n in ((5, 4), (7, 4), (6, 6)):
        tokens = torch.arange(2 * length).view(2, length) % 9
        tokens[:, : n // 2] = 9
        given = torch.randn(n, 3)
        check_equal(step(module, tokens, given), step(unsplit, tokens, given))
    assert n_plans(module) == 1
    for wrong in (torch.cat([given, given]), given[:2]):
        with pytest.raises((RuntimeError, ValueError), match="match"):
            unsplit(tokens, wrong)
        with pytest.raises(baechi.BaechiError, match=r"a check of the model fails|masked_scatter"):
            module(tokens, wrong)
    module.unplace()


class Layers(nn.Module):
    """torch's own layers, which run fused kernels in evaluation without gradients."""

    def __init__(self, *, masked: bool = False, decodes: bool = False) -> None:
        super().__init__()
        self.masked, self.decodes = masked, decodes
        encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(encoder, 1, enable_nested_tensor=False)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        if decodes:
            decoder = nn.TransformerDecoderLayer(8, 2, 16, batch_first=True)
            self.decoder = nn.TransformerDecoder(decoder, 1)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        n = x.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(n) if self.masked else None
        y = self.encoder(x, mask=mask)
        x = self.decoder(y, x, tgt_mask=mask) if self.decodes else y
        return {"x": self.attention(x, x, x, need_weights=False)[0]}


@NEWER
@pytest.mark.parametrize(
    ("masked", "decodes", "modes"),
    [
        (False, False, [False, True]),
        pytest.param(False, True, [False, True], marks=pytest.mark.slow),
        pytest.param(True, True, [False], marks=pytest.mark.slow),
    ],
)
def test_fused_layers_are_fused_where_an_eager_run_fuses_them(
    masked: bool, decodes: bool, modes: list[bool]
) -> None:
    torch.manual_seed(0)
    unsplit = Layers(masked=masked, decodes=decodes).eval()
    module = lazily(copy.deepcopy(unsplit), placer="round-robin")
    for gradients in modes:
        with torch.set_grad_enabled(gradients):
            for shape in ((2, 6, 8), (3, 7, 8)):
                x = torch.randn(shape)
                check_equal([module(x)["x"]], [unsplit(x)["x"]])
        names = {op.name.rpartition("/")[2] for op in module.traced.ops}
        assert ("_transformer_encoder_layer_fwd" in names) is not gradients
        assert ("_native_multi_head_attention" in names) is not gradients
    assert n_plans(module) == len(modes)
    module.unplace()


@contextmanager
def unfused() -> Iterator[None]:
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


@pytest.mark.parametrize("block", [unfused, lambda: torch.device("cpu")], ids=["flag", "device"])
def test_layers_have_a_plan_for_themselves_where_torch_does_not_fuse_them(block: Any) -> None:
    torch.manual_seed(0)
    unsplit = Layers().eval()
    module = lazily(copy.deepcopy(unsplit), placer="round-robin")
    x, ops = torch.randn(2, 6, 8), []
    with torch.no_grad():
        for around in (block, nullcontext) * 2:
            with around():
                check_equal([module(x)["x"]], [unsplit(x)["x"]])
            ops.append(len(module.traced.ops))
    assert ops[0] > ops[1]
    assert n_plans(module) == 2
    module.unplace()


def test_a_selection_of_any_size_joins() -> None:
    torch.manual_seed(0)
    model = Unusual("selection", "index")
    unsplit = copy.deepcopy(model)
    module = lazily(model, placer="round-robin")
    for n, shift in ((3, 0.0), (5, 9.0), (5, -9.0), (8, 0.5), (2, 0.0)):
        x = torch.randn(n, 4) * 0.1 + shift
        check_equal(step(module, x), step(unsplit, x))
    assert n_plans(module) == 1
    module.unplace()


class Neighbours(nn.Module):
    """Sums over the edges of graphs, without loops of their own, and over each graph."""

    def __init__(self) -> None:
        super().__init__()
        self.of_edges, self.of_lonely = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, edges: torch.Tensor, graph: torch.Tensor) -> Any:
        mask = edges[0] != edges[1]
        edges = torch.cat([edges[:, mask], torch.arange(len(x)).expand(2, -1)], 1)
        degree = torch.zeros(len(x)).index_add(0, edges[1], torch.ones(edges.shape[1]))
        sent = self.of_edges(x)[edges[0]] / degree[edges[0]][:, None]
        x = torch.zeros_like(x).index_add(0, edges[1], sent).relu()
        lonely = (degree < 3).nonzero()[:, 0]
        x = x.index_add(0, lonely, self.of_lonely(x[lonely]))
        return {"x": x.new_zeros(int(graph.max()) + 1, 8).index_add(0, graph, x)}


def graphs_of(nodes: int, edges: int, loops: int) -> tuple[torch.Tensor, ...]:
    ends = torch.randint(0, nodes - 1, (2, edges))
    ends[1] += ends[1] >= ends[0]
    ends[1, :loops] = ends[0, :loops]
    return torch.randn(nodes, 8), ends, torch.arange(nodes) * 2 // nodes


def test_graphs_of_any_size_have_one_plan_though_values_decide_sizes() -> None:
    torch.manual_seed(0)
    model = Neighbours()
    unsplit = copy.deepcopy(model)
    module = lazily(model, placer=baechi.RandomPlacer(0))
    for sizes in ((9, 20, 3), (11, 30, 7), (11, 30, 0), (7, 25, 24), (30, 60, 2)):
        given = graphs_of(*sizes)
        check_equal(step(module, *given), step(unsplit, *given))
        assert n_plans(module) == 1
    module.unplace()


class Parts(nn.Module):
    """Sums over parts of a sequence, whose lengths are computed in many ways."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(4, 8), nn.Linear(8, 2)

    def lengths(self, x: torch.Tensor, given: torch.Tensor) -> list[int]:
        n = x.shape[1]
        parts = [int(n * 0.75), math.ceil(float(n) / 2), int(math.sqrt(n)), divmod(n, 3)[0]]
        longest = int(given.max())  # at most n, and once n
        parts += [longest, min(longest, 5), int(given.float().mean() * 0.75)]
        numbers = isinstance(parts[-1], int) and type(parts[0]) is int
        return parts if numbers and not isinstance(parts[-1], float | torch.Tensor) else []

    def forward(self, x: torch.Tensor, given: torch.Tensor) -> Any:
        length, lengths, x = x.shape[1], self.lengths(x, given), self.before(x)
        x = self.after(sum(x[:, :n].sum(1) for n in lengths).relu()) / float(given.sum())
        x = x / torch.tensor([length, length * 0.5]) + torch.as_tensor([(length,)])
        whole = torch.zeros(len(given), dtype=int)  # type: ignore[call-overload]
        return {"x": x.new_zeros(int(given.max()) + 1, 2).index_add(0, given + whole, x)}


def test_numbers_that_code_makes_of_sizes_and_of_values_are_symbols() -> None:
    torch.manual_seed(0)
    model = Parts()
    unsplit = copy.deepcopy(model)
    module = lazily(model, placer=baechi.RandomPlacer(0))
    for n, *given in ((12, 3, 7), (17, 6, 17), (33, 4, 9)):
        call = torch.randn(len(given), n, 4), torch.tensor(given)
        check_equal(step(module, *call), step(unsplit, *call))
        assert n_plans(module) == 1
    module.unplace()


class Strided(nn.Module):
    """Reads strides of a view whose shape is computed, as Longformer does for its chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.inner(x)
        x = x.view(x.shape[0] * x.shape[1] // 2, 2, 4)
        return {"x": x.as_strided((len(x), 4), (x.stride()[0], x.stride()[2]))}


def test_a_product_of_sizes_chooses_no_strides() -> None:
    torch.manual_seed(0)
    plans, _ = run_beside(Strided(), [(torch.randn(3, length, 4),) for length in (4, 6, 10)])
    assert plans == 1


class Cropped(nn.Module):
    """Cuts off what padding added, which here is nothing, as image models do."""

    def __init__(self, *, again: bool) -> None:
        super().__init__()
        self.again, self.inner = again, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        length, x = x.shape[1], self.inner(x)
        return {"x": x[:, :length, : x.shape[2]], **({"y": x.cos()} if self.again else {})}


@pytest.mark.parametrize("again", [False, True])
def test_a_slice_of_all_makes_no_plan(again: bool) -> None:
    torch.manual_seed(0)
    calls = [(torch.randn(3, length, 4),) for length in (4, 6, 10)]
    plans, _ = run_beside(Cropped(again=again), calls)
    assert plans == 1


def test_what_values_choose_is_expected_to_be_the_examples_part_of_it() -> None:
    torch.manual_seed(0)
    model, one = Neighbours(), graphs_of(9, 20, 3)
    two = (torch.cat([one[0]] * 2), torch.cat([one[1], one[1] + 9], 1), one[2].repeat(2))
    calls = [canonical_call(model, given, {}) for given in (one, two)]
    family = trace(model, one, places=differing(*calls) or frozenset())
    choosing = (torch.ops.aten.index.Tensor, torch.ops.aten.nonzero.default)
    for given, call in zip((one, two), calls, strict=True):
        values = family.module.family.joined(call)
        facts = [resized(family, values).module.facts, trace(model, given).module.facts]
        found, own = (
            [row.values[0].shape for node, row in each.nodes.items() if node.target in choosing]
            for each in facts
        )
        assert found == own


def test_another_truth_value_at_another_shape_is_refused() -> None:
    torch.manual_seed(0)
    model = Unusual("truth value")
    unsplit = copy.deepcopy(model)
    module = lazily(model, placer="round-robin")
    for n in (3, 5, 8, 2):
        x = torch.randn(n, 4)
        check_equal(step(module, x), step(unsplit, x))
    assert n_plans(module) == 1
    with pytest.raises(baechi.ExecutionError, match="forward read True"):
        module(torch.full((7, 4), float("nan")))
    module.unplace()


class Noted(nn.Module):
    """Its forward needs what a hook has noted, as transformers' hidden states are."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.notes: list[torch.Tensor] = []
        self.inner.register_forward_hook(self.note)

    def note(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:  # noqa: ARG002
        self.notes.append(output)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.notes.clear()
        result = self.inner(x)
        if x.shape[0] > 4 and x.flatten()[0].item() > 1e9:  # no tracer follows this
            return self.notes[0] + 1
        return self.notes[0] + result


def test_what_cannot_be_traced_is_not_said_to_fail() -> None:
    module = lazily(Noted(), placer="round-robin")
    with pytest.raises(baechi.TraceError, match="cannot be traced, though it runs"):
        module(torch.randn(5, 4))
    module.unplace()


def test_a_call_that_fails_does_not_end_the_family() -> None:
    module = lazily(Unusual("one head"), placer="round-robin")
    module(torch.randn(3, 4))
    with pytest.raises(baechi.TraceError, match="does not run"):
        module(torch.randn(5, 3))
    module(torch.randn(5, 4))
    module(torch.randn(7, 4))
    assert n_plans(module) == 1
    module.unplace()


class Pooled(nn.Module):
    """Returns a length, which may be no symbol."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        length = x.shape[0]
        if type(length) is not int:
            raise TypeError("no length")
        return {"x": self.inner(x).sum(0) / length, "length": length}


def test_a_trace_that_failed_leaves_no_symbols_to_the_next() -> None:
    model = Pooled()
    unsplit = copy.deepcopy(model)
    module = lazily(model, placer="round-robin")
    for length in (3, 5, 2):
        x = torch.randn(length, 4)
        check_equal(step(module, x), step(unsplit, x))
        assert not any("dynamo" in name for name in vars(x))
    module.unplace()


class Causal(nn.Module):
    """Attention that is causal where there are several positions, as decoders write it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        q, k, v = self.qkv(x).chunk(3, -1)
        attend = nn.functional.scaled_dot_product_attention
        return {"y": self.out(attend(q, k, v, is_causal=x.shape[1] > 1))}


@NEWER
def test_whether_attention_is_causal_may_depend_on_sizes() -> None:
    torch.manual_seed(0)
    model = Causal()
    unsplit = copy.deepcopy(model)
    module = lazily(model)
    for length in (5, 7, 4):
        x = torch.randn(2, length, 8)
        check_equal(step(module, x), step(unsplit, x))
    assert n_plans(module) == 1


class Fixing(nn.Module):
    """Fixes the length of one argument, and not of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        return {"x": sum(self.inner(row) for row in x), "y": self.inner(y)}


class Ranked(nn.Module):
    """Takes arguments of any rank."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"x": self.inner(x)}


def test_calls_of_other_ranks_are_of_other_families() -> None:
    torch.manual_seed(0)
    model = Ranked()
    unsplit = copy.deepcopy(model)
    module = lazily(model, placer="round-robin")
    for shape in ((4,), (3, 2, 4), (5, 2, 4), (3, 4), (5, 4), (6, 2, 4)):
        x = torch.randn(shape)
        check_equal(step(module, x), step(unsplit, x))
    assert n_plans(module) == 3
    module.unplace()


def test_a_batch_of_one_has_a_family_of_its_own() -> None:
    torch.manual_seed(0)
    shapes = ((4, 5), (1, 7), (1, 8), (1, 3), (3, 9))
    plans, remarks = run_beside(Ranked(), [(torch.randn(*shape, 4),) for shape in shapes])
    assert plans == 2
    assert not any("each shape" in remark for remark in remarks)


class Native(nn.Module):
    """Has a branch for one length, as a vision transformer for its native resolution."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"x": self.inner(x) if len(x) == 8 else self.inner(2 * x)}


def test_a_length_with_a_branch_of_its_own_keeps_no_others_from_a_family() -> None:
    torch.manual_seed(0)
    plans, _ = run_beside(Native(), [(torch.randn(n, 4),) for n in (6, 8, 7, 5, 8)])
    assert plans == 2


class Numbered(nn.Module):
    """Takes numbers beside its tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, times: int, by: int = 5) -> dict[str, Any]:
        return {"x": self.inner(x[:, -times:] * times) / by}


def test_a_number_that_changes_after_a_size_is_seen() -> None:
    torch.manual_seed(0)
    rows = ((4, 3), (5, 3), (5, 4), (6, 2), (6, 4, 6))
    plans, _ = run_beside(Numbered(), [(torch.randn(2, n, 4), *numbers) for n, *numbers in rows])
    assert plans <= 4


class Annealed(nn.Module):
    """Takes floats that change from call to call, beside its tensor and nested."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, tau: float, options: dict[str, float]) -> dict[str, Any]:
        weight = options["weight"]
        probable = torch.softmax(self.inner(x) / tau, -1) * (1 - tau)
        made = torch.tensor([tau, weight]).sum()
        return {
            "x": self.last(probable.clamp(max=weight)) + made * weight,
            "y": x.add(x, alpha=tau),
        }


def test_floats_that_change_are_symbols() -> None:
    torch.manual_seed(0)
    rows = ((5, 0.5, 1.0), (5, 0.3, 0.9), (6, 0.1, 1.7), (4, 3.5, -0.25))
    calls = [(torch.randn(n, 4), tau, {"weight": weight}) for n, tau, weight in rows]
    plans, remarks = run_beside(Annealed(), calls)
    assert plans == 1
    assert not any("each shape" in remark for remark in remarks)


class Switched(nn.Module):
    """Looks at a float in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, rate: float) -> dict[str, Any]:
        return {"x": self.inner(x) if rate > 0.5 else self.inner(x * rate)}


def test_floats_that_code_looks_at_have_a_plan_each() -> None:
    torch.manual_seed(0)
    calls = [(torch.randn(5, 4), rate) for rate in (0.25, 0.75, 0.3)]
    plans, remarks = run_beside(Switched(), calls)
    assert plans == 3
    assert any("each shape" in remark for remark in remarks)


class Resized(nn.Module):
    """Resizes images, and a parameter to images, as vision transformers do their positions."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(3, 4, 2, 2)
        self.positions = nn.Parameter(torch.randn(1, 4, 8, 8))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        inner = self.inner(x)
        resized = nn.functional.interpolate(self.positions, inner.shape[-2:], mode="bicubic")
        larger = nn.functional.interpolate(inner, x.shape[-2:], mode="bilinear", align_corners=True)
        twice = nn.functional.interpolate(inner[None], scale_factor=2, mode="trilinear")
        resize = partial(nn.functional.interpolate, antialias=True)
        smooth = resize(self.positions, inner.shape[-2:], mode="bicubic")
        smaller = resize(inner, scale_factor=0.6, mode="bilinear")
        return {"x": inner * resized * smooth, "larger": larger, "twice": twice, "y": smaller}


def test_images_of_any_size_that_are_resized_have_a_family() -> None:
    torch.manual_seed(0)
    sizes = ((8, 12), (10, 14), (12, 6))
    plans, _ = run_beside(Resized(), [(torch.randn(2, 3, *size),) for size in sizes])
    assert plans == 1


def test_a_fixed_size_is_named() -> None:
    torch.manual_seed(0)
    model = Fixing()
    unsplit = copy.deepcopy(model)
    module = lazily(model, placer="round-robin")
    for n in (2, 3, 5):
        args = torch.randn(n, 4), torch.randn(n, 4)
        check_equal(step(module, *args), step(unsplit, *args))
    assert n_plans(module) == 3
    assert any("fixes dimension 0 of x" in remark for remark in module.remarks)
    module.unplace()


class Rotary(nn.Module):
    """Turns what it computes by angles that are complex numbers, as Llama 4 does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    @torch.no_grad()
    def turns(self, positions: torch.Tensor) -> torch.Tensor:
        angles = positions[..., None].float() / torch.tensor([1.0, 100.0])
        return torch.polar(torch.ones_like(angles), angles) * 1.0

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        turns = self.turns(torch.arange(x.shape[1])[None])
        x = self.inner(x * mask[..., None])
        x = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return {"x": torch.view_as_real(x * turns).flatten(2)}


@NEWER
def test_rotary_positions_of_complex_numbers_have_families() -> None:
    torch.manual_seed(0)
    masks = {n: (torch.arange(2 * n).view(2, n) > 2).long() for n in (6, 9, 12)}
    plans, _ = run_beside(Rotary(), [(torch.randn(2, n, 4), mask) for n, mask in masks.items()])
    assert plans == 1


@NEWER
@pytest.mark.slow
def test_rotary_positions_of_llama_4_have_families() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Llama4TextConfig(
        **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 32),
        **dict.fromkeys(("intermediate_size_mlp", "attention_chunk_size"), 32),
        **dict.fromkeys(("num_hidden_layers", "num_local_experts"), 1),
        **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 2),
        **{"head_dim": 16, "pad_token_id": 0, "use_cache": False},
    )
    torch.manual_seed(0)
    unsplit = transformers.Llama4ForCausalLM(config)
    module = lazily(copy.deepcopy(unsplit), placer="round-robin")
    for n in (6, 9, 12):
        args = ids_of(2, n), (torch.arange(2 * n).view(2, n) > 2).long()
        check_equal(step(module, *args), step(unsplit, *args))
    assert n_plans(module) == 1


class ByLength(nn.Module):
    """Takes another way from four rows on, and from eight."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = x.shape[1]
        way = self.ways[0 if n < 4 else 1 if n < 8 else 2]
        return way(x).softmax(1).flatten(1)


def test_a_family_is_traced_once_at_an_earlier_call(monkeypatch: pytest.MonkeyPatch) -> None:
    symbolic = []

    def traced(model: nn.Module, args: Any, kwargs: Any, **options: Any) -> Any:
        if options.get("places"):
            symbolic.append(kwargs["x"].shape[1])
        return trace(model, args, kwargs, **options)

    monkeypatch.setattr("baechi.tracing.ladder.trace", traced)
    torch.manual_seed(0)
    unsplit = ByLength()
    module = lazily(copy.deepcopy(unsplit), placer="round-robin")
    for n in (2, 5, 6, 9, 12, 3):
        x = torch.randn(2, n, 4)
        check_equal([module(x)], [unsplit(x)])
    # Each length that no family takes, and the first one's, which could have been of one more.
    assert sorted(symbolic) == [2, 3, 5, 9]
    assert n_plans(module) == 3
    module.unplace()
