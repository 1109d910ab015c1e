"""The ladder, and what a trace says of operators, storages and what autograd keeps."""

import copy
import dataclasses
import gc
import subprocess
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zoo
from placed import assert_as_unsplit, at_random, one_thread, step
from steps import case
from torch import Tensor, nn

import baechi
from baechi.tracing import ladder


def trace_of(name: str) -> baechi.Traced:
    return case(name).traced


def op_with(traced: baechi.Traced, node: str) -> int:
    return next(i for i, op in enumerate(traced.ops) if node in op.nodes)


def test_the_first_rung_takes_real_models_and_says_so() -> None:
    traced = trace_of("gpt2")
    assert traced.rung == "torch.export (non-strict)"
    assert [attempt.reason for attempt in traced.attempts] == [""]


class Trimmed(nn.Module):
    """As transformers trims a mask: to torch the size of what an argument is a view of shows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x[:, -x.shape[1] :].contiguous())


def test_arguments_may_be_parts_of_other_tensors() -> None:
    for x in (torch.rand(4, 8)[2:], torch.rand(2, 16)[:, 8:], torch.rand(3, 2, 8)[1]):
        traced = baechi.trace(Trimmed(), (x,))
        assert [attempt.reason for attempt in traced.attempts] == [""]
        assert_as_unsplit(traced.module.model, (x,), seeds=1)


class Branch(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if bool(x.sum() > 0) else x


class Compared(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum().item() > 0 else x


class HasBranch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.branch = Branch()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.branch(self.linear(x)) + 1


def test_a_lower_rung_is_taken_with_the_reason_and_the_models_own_line() -> None:
    traced = baechi.trace(HasBranch(), (torch.randn(2, 4),))
    assert traced.rung == "module granularity, opaque leaves"
    assert len(traced.attempts) == 2
    assert all(attempt.reason for attempt in traced.attempts[:-1])
    assert any("x * 2 if bool" in attempt.reason for attempt in traced.attempts)
    assert any("test_ladder.py" in attempt.reason for attempt in traced.attempts)


@pytest.mark.slow
def test_rungs_that_fail_print_nothing() -> None:
    """In a fresh process, since torch sets its logs up once."""
    code = (
        "import torch, baechi\n"
        "from torch import nn\n"
        "class Branch(nn.Module):\n"
        "    def forward(self, x): return x * 2 if bool(x.sum() > 0) else x\n"
        "model = nn.Sequential(nn.Linear(4, 4), Branch())\n"
        "print(baechi.trace(model, (torch.ones(2, 4),)).rung)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "module granularity, opaque leaves\n"
    assert run.stderr == ""


def test_a_model_that_no_rung_takes_says_why_for_each_in_the_notes() -> None:
    with pytest.raises(baechi.TraceError, match="Compared cannot be traced") as caught:
        baechi.trace(Compared(), (torch.randn(2, 4),))
    assert "  a number is read from a tensor (at test_ladder.py:" in str(caught.value)
    for rung in ("(non-strict)", "opaque leaves", ", truth values"):
        assert rung not in str(caught.value)
        assert any(rung in note for note in caught.value.__notes__)


def repeated(tensor: Any, times: int) -> Tensor:
    """A function of another library, which knows tensors by their type, as those of einops do."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"type {type(tensor)} is unknown")
    return tensor.repeat(times, 1)


class Repeats(nn.Module):
    """A part that has a layer twice and reads a number, behind a function of another library."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 4))
        self.whole = Compared()
        self.whole.layer = nn.Linear(4, 4)
        self.whole.again = nn.Sequential(self.whole.layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.whole(torch.cat((repeated(self.token, x.shape[0]), x)))


def test_functions_of_einops_are_operators_where_a_part_stays_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    traced = baechi.trace(Repeats(), (torch.randn(2, 4),))
    assert any("asks for the type of model_token" in row.reason for row in traced.attempts)
    assert traced.rung == "torch.export (non-strict), opaque submodules"
    monkeypatch.setitem(sys.modules, "einops", SimpleNamespace(repeated=repeated))
    model, x = Repeats(), torch.randn(2, 4)
    with one_thread():
        placed = at_random(copy.deepcopy(model), (x,))
        assert placed.traced.rung == "module granularity, opaque leaves"
        assert not step(model, (x,), {}).differs_from(step(placed, (x,), {}))


class Lacking(nn.Module):
    """Counts its calls in a buffer, draws a number, and then needs what is not installed."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if torch.rand(()) < 2:
            raise ImportError("install scipy")
        return x


def test_the_users_own_error_comes_first_and_alone() -> None:
    model = Lacking()
    x = torch.randn(2, 4)
    random = torch.get_rng_state()
    with pytest.raises(baechi.TraceError) as caught:
        baechi.trace(model, (x,))
    assert torch.equal(random, torch.get_rng_state())
    (line,) = str(caught.value).splitlines()
    assert line.startswith("Lacking does not run on x [2, 4]: ImportError: install scipy (at test_")
    assert isinstance(caught.value.__cause__, ImportError)
    assert model.calls == 0
    placed = baechi.place(nn.Linear(4, 4), {"cpu:0": "1MiB"}, costs="estimate", progress=False)
    placed(torch.randn(2, 4))
    with pytest.raises(baechi.TraceError, match=r"on input \[2, 5\]: RuntimeError: .* cannot"):
        placed(torch.randn(2, 5))


class Converting(nn.Module):
    """Makes sure of its router's type in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.router = self.router.to(x.dtype)
        return self.last(self.router(x).tanh())


def test_a_module_that_converts_its_own_stays_whole_or_is_refused_with_its_line() -> None:
    args = (torch.randn(2, 4),)
    with pytest.raises(baechi.TraceError, match=r"Couldn't swap.*test_ladder.py:.*self.router.to"):
        baechi.trace(Converting(), args)
    traced = baechi.trace(nn.Sequential(nn.Linear(4, 4), Converting()), args)
    assert traced.rung == "module granularity, opaque leaves"


def test_a_trace_changes_nothing_in_the_model() -> None:
    model, args, kwargs = zoo.AWKWARD["buffers"]()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    baechi.trace(model, args, kwargs)
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(random, torch.get_rng_state())


def test_no_garbage_is_collected_while_a_model_is_traced() -> None:
    seen = []

    class Asking(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(gc.isenabled())
            return x + 1

    baechi.trace(Asking(), (torch.ones(2),))
    assert not any(seen)
    assert gc.isenabled()


def test_a_model_on_the_meta_device_traces_without_weights() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(50_000, 200_000), nn.ReLU(), nn.Linear(200_000, 10))
        x = torch.empty(2, 50_000)
    traced = baechi.trace(model, (x,))
    parameters = sum(op.trained_bytes for op in traced.ops)
    assert parameters == sum(p.numel() for p in model.parameters()) * 4
    assert all(p.is_meta for p in model.parameters())


def test_positional_and_keyword_calls_are_the_same_call() -> None:
    model = nn.Linear(3, 3)
    x = torch.randn(2, 3)
    one, other = baechi.trace(model, (x,)), baechi.trace(model, (), {"input": x})
    assert one.digest == other.digest
    assert one == other


def test_views_and_in_place_results_belong_to_the_op_that_made_their_storage() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.exp()
            z = y.view(-1)
            z[0] = 3.0
            y.relu_()
            return y.t().sum() + z.mean()

    traced = baechi.trace(Model(), (torch.randn(2, 3),))
    exp = traced.ops[op_with(traced, "exp")]
    assert {"exp", "view", "relu_"} <= set(exp.nodes)
    made = [t for t in traced.tensors if t.producer == op_with(traced, "exp")]
    assert [t.nbytes for t in made] == [2 * 3 * 4]


def test_a_value_read_between_two_writes_is_read_in_between() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = x + 1
            before = y.sum()
            y.mul_(2)
            return before, y

    model = Model()
    x = torch.randn(3)
    traced = baechi.trace(model, (x,))
    assert op_with(traced, "sum_1") == op_with(traced, "mul_")


def test_who_reads_a_buffer_after_a_write_comes_after_the_writer() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(4))
            self.register_buffer("var", torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            normal = nn.functional.batch_norm(x, self.mean, self.var, training=True)
            return normal.sum(0) + self.mean.exp()

    traced = baechi.trace(Model(), (torch.randn(2, 4),))
    writer, reader = op_with(traced, "batch_norm"), op_with(traced, "exp")
    assert any(t.producer == writer and reader in t.consumers for t in traced.tensors)


def test_users_of_one_parameter_share_a_group_and_its_bytes_count_once() -> None:
    traced = trace_of("gpt2")
    model, _, _ = zoo.MODELS["gpt2"]()
    tied = [op for op in traced.ops if op.group and "wte" in op.group]
    assert len(tied) == 2
    assert sum(op.trained_bytes for op in traced.ops) == sum(
        p.numel() * p.element_size() for p in model.parameters()
    )


def test_a_buffer_that_is_only_read_travels_and_does_not_tie_its_readers() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.scale).exp() * self.scale

    traced = baechi.trace(Model(), (torch.randn(2, 4),))
    assert all(op.group is None for op in traced.ops)
    home = next(i for i, op in enumerate(traced.ops) if op.name == "state:scale")
    (tensor,) = [t for t in traced.tensors if t.producer == home]
    assert tensor.nbytes == 16
    assert len(tensor.consumers) == 2
    assert tensor.kept


def test_a_batch_norm_that_counts_its_calls_does_so_where_it_runs() -> None:
    """Else the counter, which nothing reads, goes to a device that is idle."""
    layers = [
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3),
        nn.BatchNorm2d(8),
    ]
    traced = baechi.trace(nn.Sequential(*layers), (torch.randn(2, 3, 8, 8),))
    counters = [op for op in traced.ops if any("num_batches" in name for name in op.parameters)]
    norms = [op for op in traced.ops if any("running_mean" in name for name in op.parameters)]
    assert [op.group for op in counters] == [op.group for op in norms]
    assert len({op.group for op in traced.ops}) == 1 + len(norms)  # and None for all others
    graph = traced.graph(baechi.estimate(traced, kind="H200"), training=True)
    cluster = baechi.Cluster.uniform(8, 2**33, baechi.Link(10_000, 1_000_000_000))
    for placer in ("auto", "m-etf", "m-sct", "heft", "peft"):
        placement = baechi.solve(graph, cluster, placer=placer)
        assert len(set(placement.devices)) == 1, placer


def test_what_autograd_keeps_is_what_a_real_run_keeps() -> None:
    model = nn.Sequential(
        nn.Linear(8, 16), nn.Tanh(), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4)
    )
    x = torch.randn(3, 8)
    kept: dict[int, int] = {}
    alive = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x)
    for parameter in model.parameters():
        kept.pop(parameter.untyped_storage()._cdata, None)
    traced = baechi.trace(model, (x,))
    tensors = {t for op in traced.ops for t in op.saves}
    said = sum(traced.tensors[t].nbytes for t in tensors) + sum(op.saved_bytes for op in traced.ops)
    assert said == sum(kept.values())


def test_equal_layers_have_equal_keys_and_different_ones_do_not() -> None:
    layers = [nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 5)]
    traced = baechi.trace(nn.Sequential(*layers), (torch.randn(2, 4, requires_grad=True),))
    keys = [op.key for op in traced.ops if op.name.split("/")[-1].startswith("linear")]
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.parametrize("training", [True, False])
def test_random_ops_are_known_only_where_they_draw(training: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Dropout(0.0)).train(training)
    traced = baechi.trace(model, (torch.randn(2, 4),))
    assert sum(op.random for op in traced.ops) == int(training)


def test_every_op_names_its_module_and_the_models_own_line() -> None:
    traced = trace_of("gpt2")
    fc = next(op for op in traced.ops if op.name.startswith("transformer.h.0.mlp.c_fc"))
    assert ".py:" in fc.source
    assert fc.parameters == ("transformer.h.0.mlp.c_fc.weight", "transformer.h.0.mlp.c_fc.bias")


def test_a_submodule_called_model_keeps_its_name() -> None:
    traced = trace_of("llama")
    assert any(op.name.startswith("model.layers.0.self_attn.q_proj/") for op in traced.ops)
    assert not any(op.name.startswith(".") for op in traced.ops)


def test_two_traces_of_one_model_are_equal() -> None:
    model, args, kwargs = zoo.MODELS["gpt2"]()
    assert baechi.trace(model, args, kwargs) == trace_of("gpt2")


def test_the_order_of_ops_is_topological() -> None:
    for name in ("gpt2", "llama", "towers"):
        traced = trace_of(name)
        for tensor in traced.tensors:
            assert all(consumer > tensor.producer for consumer in tensor.consumers)


def test_wrong_arguments_are_refused_with_the_signature() -> None:
    with pytest.raises(baechi.InputError, match="forward"):
        baechi.trace(nn.Linear(2, 2), (), {"y": torch.randn(2, 2)})
    with pytest.raises(baechi.InputError, match="Module"):
        baechi.trace(torch.relu, (torch.randn(2),))


def test_a_loaded_trace_says_that_it_has_no_model(tmp_path) -> None:
    traced = trace_of("towers")
    baechi.dump(traced, tmp_path / "trace.json")
    loaded = baechi.load(tmp_path / "trace.json")
    assert loaded == traced
    assert loaded.digest == traced.digest
    with pytest.raises(baechi.InputError, match="loaded from a file"):
        baechi.profile(loaded)
    assert dataclasses.is_dataclass(loaded)


class Cache:
    """A class that neither torch nor Baechi knows."""

    def __init__(self, key: torch.Tensor, layer: "Cache | None" = None) -> None:
        self.key, self.layer, self.length = key, layer, len(key)


class Caching(nn.Module):
    """Returns tensors inside of objects."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> dict[str, object]:
        hidden = self.first(x)
        return {"y": self.last(hidden), "cache": Cache(hidden, Cache(hidden * 2))}


def test_objects_are_returned_with_their_tensors() -> None:
    model, x = Caching(), torch.ones(3, 6)
    expected = model(x)
    placed = at_random(model, (x,))
    actual = placed(x)
    assert placed.traced.rung == "torch.export (non-strict)"
    assert type(actual["cache"]) is Cache
    assert actual["cache"].length == 3
    torch.testing.assert_close(actual["cache"].layer.key, expected["cache"].layer.key)
    torch.testing.assert_close(actual["y"], expected["y"])
    placed.unplace()


class Counted(nn.Module):
    """Counts to a number of an argument, or checks for finite numbers."""

    def __init__(self, checks: bool) -> None:
        super().__init__()
        self.body, self.checks = nn.Linear(4, 4), checks

    def forward(self, x: Tensor, group: Tensor) -> Tensor:
        x = self.body(x)
        if self.checks:
            return x if torch.isfinite(x).all() else x.clamp(-1, 1)
        return torch.stack([x[group == i].sum(0) for i in range(int(group.max()) + 1)])


@pytest.mark.parametrize("checks", [False, True])
def test_a_later_trace_begins_where_an_earlier_one_ended(
    checks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []
    rungs = ladder.rungs

    def noted(*args: Any) -> Any:
        for rung, capture in rungs(*args):
            yield rung, partial(_noted, tried, rung, capture)

    monkeypatch.setattr(ladder, "rungs", noted)
    placed = baechi.place(
        Counted(checks), ["cpu:0", "cpu:1"], placer="round-robin", costs="estimate", progress=False
    )
    for n in (3, 5):
        tried.clear()
        x, group = torch.randn(n, 4), torch.arange(n)
        assert torch.equal(placed(x, group), copy.deepcopy(placed)(x, group))
        assert tried[-1] == placed.traced.rung
        assert ({*tried} == {tried[-1]}) == (n > 3)
        reasons = [attempt.reason for attempt in placed.traced.attempts]
        assert len(reasons) > 1  # those of the first trace


def _noted(tried: list[str], rung: str, capture: Any, *args: Any) -> Any:
    tried.append(rung)
    return capture(*args)
