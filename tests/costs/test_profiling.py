"""Measured costs: once per distinct operator, honest about time and about what is not there."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import zoo
from placed import rounded_to
from seeds import some
from steps import case
from torch import nn
from torch.nn import functional

import baechi
from baechi.costs import profiling
from baechi.costs.example_inputs import ExampleInputs
from baechi.costs.op_benchmark import Addition, Bench
from baechi.costs.profile_cache import Measured
from baechi.costs.profiling import _additions
from baechi.costs.whole_step import WholeStep
from baechi.records import device_kinds
from baechi.torch_support.memory_meter import Meter
from baechi.tracing.fx_nodes import operator_name


def test_a_deep_model_is_measured_as_its_distinct_layers() -> None:
    deep = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(12)])
    traced = baechi.trace(deep, (torch.randn(4, 32, requires_grad=True),))
    profile = baechi.profile(traced, threads=1, progress=False)
    linear = [c for op, c in zip(traced.ops, profile.costs, strict=True) if "linear" in op.name]
    assert len(linear) == 12
    assert len(set(linear)) == 1


def test_heavier_operators_cost_more() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1024), nn.Linear(1024, 1024))
    traced = baechi.trace(model, (torch.randn(256, 64),))
    costs = baechi.profile(traced, threads=1, progress=False).costs
    small, _, large = [c for c in costs if c.parameter_bytes]
    assert large.forward_ns > 10 * small.forward_ns
    assert large.backward_ns > large.forward_ns


@pytest.mark.slow
def test_a_profile_of_a_branchy_model_covers_every_op() -> None:
    model, args, kwargs = zoo.MODELS["awkward"]()
    traced = baechi.trace(model, args, kwargs)
    profile = baechi.profile(traced, threads=1, progress=False)
    assert len(profile.costs) == len(traced.ops)
    assert profile.traced_digest == traced.digest
    assert profile.kind == "cpu"
    for op, cost in zip(traced.ops, profile.costs, strict=True):
        assert op.differentiable or cost.backward_ns == 0
        assert cost.parameter_bytes == op.trained_bytes + op.frozen_bytes


def test_a_model_without_weights_is_measured_too() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(100, 16), nn.Linear(16, 16))
        x = torch.zeros(2, 5, dtype=torch.long)
    profile = baechi.profile(baechi.trace(model, (x,)), threads=1, progress=False)
    assert sum(cost.forward_ns for cost in profile.costs) > 0


def test_profiling_leaves_the_model_and_the_thread_count_alone() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    threads = torch.get_num_threads()
    baechi.profile(baechi.trace(model, (torch.randn(2, 3, 8, 8),)), threads=1, progress=False)
    assert torch.get_num_threads() == threads
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("threads", [0, -1, 1.5])
def test_a_silly_thread_count_is_refused(threads: float) -> None:
    traced = baechi.trace(nn.Linear(2, 2), (torch.randn(1, 2),))
    with pytest.raises(baechi.InputError, match="threads"):
        baechi.profile(traced, threads=threads, progress=False)


def test_a_meter_counts_what_is_made_until_it_is_freed() -> None:
    meter = Meter([100, 0])
    with meter.counting(1):
        one = torch.ones(256)
        view = one.view(16, 16)
        two = one * 2
        assert meter.live_bytes == (100, 2048)
        del one, view
        assert meter.live_bytes == (100, 1024)
        del two
    assert meter.live_bytes == (100, 0)
    assert meter.peak_bytes == (100, 2048)


def test_a_meter_counts_a_copy_for_who_gets_it_as_long_as_a_view_of_it_lives() -> None:
    meter = Meter([0, 0])
    tensor = torch.ones(256)
    with meter.counting(0):
        copy = meter.copy(1, tensor)
        view = copy[:3]
        del copy
    assert (meter.live_bytes, meter.moved_bytes) == ((0, 1024), 1024)
    del view
    assert meter.live_bytes == (0, 0)
    mine = meter.copy(1, tensor[:4], moved=False)  # without the base of the view
    assert (meter.live_bytes, meter.moved_bytes) == ((0, 16), 1024)
    del mine
    assert meter.live_bytes == (0, 0)


def key_of(module: nn.Module, x: torch.Tensor) -> str:
    return baechi.trace(module, (x,)).ops[1].key


def test_a_key_says_what_the_cost_depends_on() -> None:
    x = torch.randn(4, 8)
    keys = [
        key_of(nn.ReLU(), x),
        key_of(nn.GELU(), x),
        key_of(nn.ReLU(), torch.randn(8, 4)),
        key_of(nn.ReLU(), torch.randn(8, 4).T),
        key_of(nn.ReLU(), x.double()),
        key_of(nn.ReLU(), torch.randn(4, 8, requires_grad=True)),
        key_of(nn.LeakyReLU(0.1), x),
        key_of(nn.LeakyReLU(0.2), x),
    ]
    assert len(set(keys)) == len(keys)
    assert keys[0] == key_of(nn.ReLU(), torch.randn(4, 8))
    assert not any(" at 0x" in key for key in keys)


@pytest.mark.parametrize("name", some(zoo.MODELS, 12))
def test_keys_have_no_addresses(name: str) -> None:
    assert not any("0x" in op.key for op in case(name).traced.ops)


def counted(monkeypatch: pytest.MonkeyPatch, *, held_up: bool = False) -> list[str]:
    """What is measured from now on, pass by pass; on a machine where each pass is like the last."""
    measured: list[str] = []
    operator, add = Bench.operator, Bench.addition

    def steady(found: Measured) -> Measured:
        spread = 10_000 if held_up else 0
        return replace(
            found,
            forward_ns=10_000,
            backward_ns=10_000,
            forward_spread_ns=spread,
            backward_spread_ns=spread,
        )

    def count_operator(bench: Bench, index: int, before: Measured | None = None) -> Measured:
        measured.append(bench.traced.ops[index].name)
        return steady(operator(bench, index, before))

    def count_addition(bench: Bench, addition: Addition) -> Measured:
        measured.append(addition.key)
        return steady(add(bench, addition))

    monkeypatch.setattr(Bench, "operator", count_operator)
    monkeypatch.setattr(Bench, "addition", count_addition)
    monkeypatch.setattr(WholeStep, "measured", lambda *_: Measured(0))  # operators stay as they are
    return measured


def residual() -> tuple[nn.Module, torch.Tensor]:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(16, 16)
            self.second = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            return x + self.second(x).relu()

    return Residual(), torch.randn(4, 16)


def test_a_second_run_measures_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    measured = counted(monkeypatch)
    model, x = residual()
    first = baechi.profile(baechi.trace(model, (x,)), threads=1, cache=tmp_path / "a")
    names = measured[:5]  # two unlike linears, a relu, an add, and the sum of two gradients
    assert measured == names + names  # two passes over everything
    second = baechi.profile(baechi.trace(model, (x,)), threads=1, cache=tmp_path / "a")
    assert len(measured) == 10
    assert first == second
    baechi.profile(baechi.trace(model, (x,)), threads=2, cache=tmp_path / "a")
    assert len(measured) == 20
    baechi.profile(baechi.trace(model, (x,)), threads=1, cache=False)
    assert len(measured) == 30
    baechi.profile(baechi.trace(model, (torch.randn(5, 16),)), threads=1, cache=tmp_path / "a")
    assert len(measured) == 40


def test_what_is_uncertain_is_said_each_time_and_measured_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(profiling, "_MORE_NS", 0)
    model, x = residual()
    traced = baechi.trace(model, (x,))
    with monkeypatch.context() as busy:
        counted(busy, held_up=True)
        profile = baechi.profile(traced, threads=1, cache=tmp_path / "a")
    rows = list(zip(traced.ops, profile.costs, strict=True))
    assert all(("uncertain" in cost.remark) == (cost.forward_ns > 0) for _, cost in rows)
    assert "5 of 5 distinct operators vary" in capsys.readouterr().err
    measured = counted(monkeypatch)
    profile = baechi.profile(traced, threads=1, cache=tmp_path / "a")
    assert not measured
    assert [cost.remark for cost in profile.costs] == [cost.remark for _, cost in rows]
    assert "5 of 5 distinct operators vary" in capsys.readouterr().err


def test_what_was_measured_beside_another_process_is_said_and_not_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = counted(monkeypatch)
    model, x = residual()
    traced = baechi.trace(model, (x,))
    with monkeypatch.context() as shared:
        shared.setattr(profiling, "processes_on", lambda _: 2)
        profile = baechi.profile(traced, threads=1, cache=tmp_path / "a")
    rows = zip(traced.ops, profile.costs, strict=True)
    assert all(("another process" in c.remark) == (c.forward_ns > 0) for _, c in rows)
    assert "5 of 5 distinct operators were measured beside" in capsys.readouterr().err
    profile = baechi.profile(traced, threads=1, cache=tmp_path / "a")
    assert len(measured) == 20
    assert not any("another process" in cost.remark for cost in profile.costs)
    assert "beside another process" not in capsys.readouterr().err


def test_sizes_are_of_the_first_pass() -> None:
    model, x = residual()
    traced = baechi.trace(model, (x,))
    bench = Bench(traced, torch.device("cpu"), 1)
    known = Measured(1, 2, 3, 4, 5, 6, 7, 8, "as it was", 9)
    with torch.random.fork_rng():
        found = bench.operator(1, known)
    times = {"forward_ns": 1, "backward_ns": 2, "forward_spread_ns": 7, "backward_spread_ns": 8}
    assert found.forward_ns > 1
    assert found.remark == ""  # it is of the last pass
    assert replace(found, forward_launch_ns=0, remark="as it was", **times) == known


def test_on_a_cpu_a_call_holds_the_lock_for_a_part_of_its_time() -> None:
    for size in (1, 512):
        traced = baechi.trace(nn.Linear(size, size), (torch.randn(size, size),))
        costs = baechi.profile(traced, threads=1, progress=False, cache=False).costs
        (cost,) = [cost for cost in costs if cost.forward_ns]
        assert 0 < cost.forward_launch_ns <= cost.forward_ns
        assert cost.backward_launch_ns == 0  # autograd's engine holds no lock
    assert cost.forward_launch_ns < cost.forward_ns / 10


def test_adding_up_gradients_is_in_the_backward_of_who_made_the_tensor() -> None:
    model, x = residual()
    traced = baechi.trace(model, (x,))
    names = [op.name for op in traced.ops]
    additions = _additions(traced)
    assert {names[i]: dict(row) for i, row in enumerate(additions) if row} == {
        next(n for n in names if n.startswith("first")): {Addition(4 * 16 * 4): 1}
    }


def test_later_micro_batches_add_up_gradients_of_parameters(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    counted(monkeypatch)  # ten microseconds each
    model, x = residual()
    model.second.requires_grad_(False)
    traced = baechi.trace(model, (x,))

    def costs_of(n: int) -> dict[str, baechi.OpCost]:
        found = baechi.profile(traced, threads=1, cache=tmp_path / "a", microbatches=n)
        return dict(zip([op.name for op in traced.ops], found.costs, strict=True))

    once, four = costs_of(1), costs_of(4)
    first = next(name for name in once if name.startswith("first"))
    assert four[first] == replace(
        once[first],
        backward_ns=once[first].backward_ns + 7_500,
        backward_launch_ns=four[first].backward_launch_ns,
    )
    assert {**four, first: None} == {**once, first: None}
    with pytest.raises(baechi.InputError, match="microbatches"):
        baechi.profile(traced, microbatches=0)


def test_a_plan_of_micro_batches_has_the_additions_of_their_gradients() -> None:
    model, x = residual()
    placed = baechi.place(
        *(model, {"cpu:0": "1GiB"}),
        example_args=(x,),
        costs="estimate",
        microbatches=4,
        progress=False,
    )
    costs = baechi.estimate(baechi.trace(model, (x[:1],)), "cpu", microbatches=4).costs
    turns_ns = 4 * sum(cost.forward_ns + cost.backward_ns for cost in costs)
    alone = baechi.estimate(baechi.trace(model, (x[:1],)), "cpu").costs
    assert turns_ns > 4 * sum(cost.forward_ns + cost.backward_ns for cost in alone)
    assert placed.schedule.makespan_ns == turns_ns
    gpu = [baechi.estimate(baechi.trace(model, (x,)), "T4", microbatches=n).costs for n in (1, 2)]
    launch_ns = [sum(cost.backward_launch_ns for cost in row) for row in gpu]
    one = device_kinds.find("T4").host_launch_ns
    assert launch_ns[1] - launch_ns[0] == 2 * (one // 2) > 0  # an addition for each linear


def test_ctrl_c_keeps_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, x = residual()
    traced = baechi.trace(model, (x,))
    with monkeypatch.context() as once:
        measured = counted(once)
        operator = Bench.operator

        def interrupted(bench: Bench, index: int, before: Measured | None = None) -> Measured:
            if len(measured) == 2:
                raise KeyboardInterrupt
            return operator(bench, index, before)

        once.setattr(Bench, "operator", interrupted)
        with pytest.raises(KeyboardInterrupt):
            baechi.profile(traced, threads=1, cache=tmp_path / "a")
    assert "2 of 7 were measured" in capsys.readouterr().err
    measured = counted(monkeypatch)
    baechi.profile(traced, threads=1, cache=tmp_path / "a")
    assert len(measured) == 8  # one pass over the two, two over the others


def test_where_nothing_can_be_kept_the_costs_come_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    traced = baechi.trace(nn.Linear(4, 4), (torch.randn(2, 4),))
    with pytest.warns(RuntimeWarning, match="not kept"):
        profile = baechi.profile(traced, threads=1, cache=tmp_path / "file" / "a")
    assert sum(cost.forward_ns for cost in profile.costs) > 0


@torch.library.custom_op("baechi_tests::picky", mutates_args=())
def picky(x: torch.Tensor) -> torch.Tensor:
    if float(x.sum().abs()) > 1e-3:
        raise ValueError("the values do not sum to nothing")
    return x * 2


@picky.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Centered(nn.Module):
    def __init__(self, *, center: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.center = center

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.linear(x)).detach()
        return picky(x - x.mean() if self.center else x + 1)


def test_an_operator_that_fails_alone_is_measured_in_place() -> None:
    model = Centered()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    traced = baechi.trace(model, (torch.randn(4, 8),))
    costs = baechi.profile(traced, threads=1, cache=False).costs
    (index,) = [i for i, op in enumerate(traced.ops) if "picky" in op.key]
    assert costs[index].forward_ns > 0
    assert "fails alone (ValueError: the values do not sum to nothing)" in costs[index].remark
    assert "sum to nothing); measured in place" in costs[index].remark
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())


def test_an_operator_that_fails_in_the_model_too_is_named() -> None:
    traced = baechi.trace(Centered(center=False), (torch.randn(4, 8),))
    with pytest.raises(baechi.InputError, match=r"picky.*test_profiling.py.*sum to nothing"):
        baechi.profile(traced, threads=1, cache=False)


class Routed(nn.Module):
    """Positions, a mask and a choice that follows from activations."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        best = x.sum(-1).argmax(-1)
        mask = torch.ones(6, 6).tril().log()[None]
        picked = x[torch.arange(ids.shape[0]), best]
        return functional.scaled_dot_product_attention(x, x, x, attn_mask=mask) + picked[:, None]


def test_values_are_in_range() -> None:
    traced = baechi.trace(Routed(), (torch.randint(50, (3, 6)),))
    inputs = ExampleInputs(traced.module, torch.device("cpu"))
    graph = traced.module.graph_module.graph
    index = next(n for n in graph.nodes if operator_name(n) == "index")
    best = next(n for n in index.all_input_nodes if "argmax" in n.name)
    values = inputs.make(best, [index])
    assert values.dtype == torch.int64
    assert 0 <= int(values.min()) <= int(values.max()) < 6
    attention = next(n for n in graph.nodes if "attention" in operator_name(n))
    mask = inputs.make(attention.args[3], [attention])
    assert set(mask.flatten().tolist()) == {0.0, float("-inf")}


def test_several_kinds_of_device_share_one_graph() -> None:
    traced = baechi.trace(nn.Linear(4, 4), (torch.randn(2, 4),))
    n = len(traced.ops)

    def made(kind: str, ns: int, scratch: int) -> baechi.Profile:
        costs = [baechi.OpCost(ns, 2 * ns, workspace_bytes=scratch) for _ in range(n)]
        return baechi.Profile(traced.digest, kind, tuple(costs))

    slow, fast = made("cpu", 100, 5), made("GPU", 10, 7)
    graph = traced.graph([slow, fast])
    assert set(graph.times) == {"cpu", "GPU"}
    assert graph.times["cpu"] == tuple(op.time_ns for op in graph.ops)
    assert [10 * t for t in graph.times["GPU"]] == list(graph.times["cpu"])
    assert max(op.workspace_bytes for op in graph.ops) == 7
    assert set(traced.graph([slow, fast], training=False).times["GPU"]) == {10}
    assert traced.graph([slow]) == traced.graph(slow)
    for wrong, said in (
        ([slow, slow], "two profiles are of kind 'cpu'"),
        ([slow, made("", 1, 1)], "names no kind"),
        ([], "no profile"),
        ([slow, baechi.Profile("x", "GPU", fast.costs)], "another model"),
    ):
        with pytest.raises(baechi.InputError, match=said):
            traced.graph(wrong)


def test_a_meter_follows_a_storage_that_grows_and_counts_no_stranger() -> None:
    meter = Meter([0])
    stranger = torch.ones(4096)
    with meter.counting(0):
        grown = torch.ones(16)
        grown.resize_(64)
        assert meter.live_bytes == (256,)
        stranger.add_(1)
        view = stranger[2:]
        assert meter.live_bytes == (256,)
    del grown, view
    assert meter.live_bytes == (0,)


def test_the_groups_of_a_grouped_product_share_its_rows() -> None:
    model, args, kwargs = zoo.MODELS["mixtral"]()
    traced = baechi.trace(model, args, kwargs)
    inputs = ExampleInputs(traced.module, torch.device("cpu"))
    found = 0
    for nodes in traced.module.nodes:
        for node in nodes:
            if "grouped_mm" not in operator_name(node):
                continue
            rows, _, ends = node.args[:3]
            made = inputs.make(ends, nodes).tolist()
            assert made == sorted(made)
            assert made[-1] == traced.module.facts.nodes[rows].values[0].shape[0]
            assert min(b - a for a, b in zip([0, *made], made, strict=False)) > 0
            found += 1
    assert found > 0


class Masked(nn.Module):
    """Attention whose mask has a gradient."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.bias = nn.Embedding(tokens * tokens, 4)
        self.register_buffer("places", torch.arange(tokens * tokens).view(tokens, tokens))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = self.bias(self.places).permute(2, 0, 1)[None]
        return functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)


def test_a_forward_for_inference_is_measured_without_gradients() -> None:
    tokens = 64
    traced = baechi.trace(Masked(tokens), (torch.randn(1, 4, tokens, 8),))
    profile = baechi.profile(traced, threads=1, cache=False)
    (index,) = [i for i, op in enumerate(traced.ops) if "attention" in op.name]
    cost = profile.costs[index]
    scores = 4 * 4 * tokens * tokens
    assert cost.saved_bytes >= scores > (cost.inference_workspace_bytes or 0)
    op = traced.graph(profile, training=False).ops[index]
    assert op.workspace_bytes == cost.inference_workspace_bytes


class Turned(nn.Module):
    """A weight for the transpose of what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.transpose(0, 1))


def test_a_made_up_weight_is_as_much_of_a_leaf_as_the_model_s() -> None:
    """A product with a weight that needs a gradient copies a transposed input, even without one."""
    x = torch.randn(8, 64, 16)
    model = Turned()
    traced = baechi.trace(model, (x,))
    profile = baechi.profile(traced, threads=1, cache=False)
    (index,) = [i for i, op in enumerate(traced.ops) if "linear" in op.name]
    assert profile.costs[index].inference_workspace_bytes == x.nbytes
    placed = baechi.place(
        model, ["cpu"], example_args=(x,), training=False, costs=profile, threads_per_device=1
    )
    measured = placed.measure(steps=1)
    assert measured.peak_bytes == placed.schedule.peak_bytes


def test_a_backward_s_gradients_take_the_room_of_what_autograd_kept() -> None:
    """Layer by layer in a recurrent kernel: its scratch is the peak less what the clock counts."""

    def reused(layers: int) -> int:
        model = nn.LSTM(16, 16, num_layers=layers)
        traced = baechi.trace(model, (torch.randn(8, 4, 16),))
        profile = baechi.profile(traced, threads=1, cache=False)
        (index,) = [i for i, op in enumerate(traced.ops) if op.name.endswith("lstm")]
        cost = profile.costs[index]
        graph = traced.graph(profile)
        backward = graph.ops[graph.twins[index]]
        assert backward.reused_bytes == cost.backward_reused_bytes <= cost.saved_bytes
        costs = tuple(replace(cost, backward_reused_bytes=0) for cost in profile.costs)
        other = traced.graph([profile, replace(profile, kind="other", costs=costs)])
        assert other.ops[graph.op_index[backward.name]].reused_bytes == 0
        return backward.reused_bytes

    assert reused(3) > reused(2) > 0


def test_a_trace_made_on_a_gpu_has_its_known_values_without_one() -> None:
    """Its factories name that GPU; and what the model holds may be on another device by now."""
    traced = baechi.trace(Routed(), (torch.randint(50, (3, 6)),))
    nodes = traced.module.graph_module.graph.nodes
    for node in nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": torch.device("cuda", 0)}
    inputs = ExampleInputs(traced.module, torch.device("cpu"))
    attention = next(n for n in nodes if "attention" in operator_name(n))
    mask = inputs.make(attention.args[3], [attention])
    assert set(mask.flatten().tolist()) == {0.0, float("-inf")}


def test_precisions_that_were_set_apart_are_told_apart() -> None:
    """As torch's documents say since 2.9; one question for all raises an error then."""
    traced = baechi.trace(nn.Linear(2, 2), (torch.ones(1, 2),))
    first = Bench(traced, torch.device("cpu"), 1)
    with rounded_to("tf32", torch.backends.cuda.matmul):
        with pytest.raises(RuntimeError, match="legacy and new"):
            torch.get_float32_matmul_precision()
        second = Bench(traced, torch.device("cpu"), 1)
    assert second.conditions != first.conditions


def test_only_a_gpu_has_lanes():
    traced = baechi.trace(nn.Tanh(), (torch.zeros(2),))
    with pytest.raises(baechi.InputError, match="lanes=2 is for a GPU, and cpu is none"):
        baechi.profile(traced, lanes=2)
    with pytest.raises(baechi.InputError, match="lanes is 0"):
        baechi.profile(traced, lanes=0)
