"""Computed costs: FLOPs and bytes by hand, structure as measured, and no weight allocated."""

import itertools
import json
import subprocess
import sys
from typing import Any

import pytest
import torch
import transformers
import zoo
from placed import rounded_to
from seeds import some
from steps import case
from torch import Tensor, nn
from torch.nn import functional

import baechi
from baechi.costs.estimation import (
    SEEN,
    UNSEEN,
    UNSEEN_BACKWARD,
    _recurrent_bytes,
    rescaled,
    rounded_classes,
    workloads,
)
from baechi.records.device_kinds import Kernel, find

KIND = "H100-SXM-80GB"


class Only(nn.Module):
    """A function as a model."""

    def __init__(self, function, **state):
        super().__init__()
        self.function = function
        for name, tensor in state.items():
            self.register_parameter(name, nn.Parameter(tensor))

    def forward(self, *tensors):
        return self.function(self, *tensors)


def kernels(model, *tensors):
    """The kernels of all operators: forward, backward."""
    traced = baechi.trace(model, tensors)
    loads = workloads(traced)
    runs = [loads[op.key] for op in traced.ops]
    flat = itertools.chain.from_iterable
    return list(flat(r.forward for r in runs)), list(flat(r.backward for r in runs))


class Wide(torch.autograd.Function):
    """One operator: wide inside, with a weight read at its end."""

    @staticmethod
    def forward(_, x, up, down):
        return (x @ up).relu() @ down

    @staticmethod
    def backward(_, __):
        return None, None, None


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.ones(8, 512)), nn.Parameter(torch.ones(512, 8))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        with torch.no_grad():
            made = Wide.apply(x, self.up, self.down)
        return made * self.scale


def test_weights_that_an_operator_only_looks_at_are_no_results_of_it():
    x = torch.randn(4, 8)
    traced = baechi.trace(Frozen(), (x,))
    loads = workloads(traced)
    scratch = max(loads[op.key].workspace_bytes for op in traced.ops)
    assert scratch == 2 * 4 * 4 * 512 - x.nbytes  # both wide values, less the result


def products(found):
    return [kernel for kernel in found if kernel.flops]


def test_a_product_has_2mnk_flops_and_each_matrix_once():
    m, n, k = 3, 5, 7
    x, weight = torch.randn(m, k, requires_grad=True), torch.randn(k, n)
    forward, backward = kernels(Only(lambda s, x: x @ s.weight, weight=weight), x)
    sizes = 4 * (m * k + k * n + m * n)
    assert forward == [Kernel("matmul", "fp32", 2 * m * n * k, sizes)]
    assert products(backward) == [Kernel("matmul", "fp32", 2 * m * n * k, sizes)] * 2


def test_a_backward_has_a_product_per_input_that_needs_a_gradient():
    linear = nn.Linear(8, 16)
    for x_grad, w_grad in itertools.product((False, True), repeat=2):
        linear.weight.requires_grad_(w_grad)
        x = torch.randn(4, 8, requires_grad=x_grad)
        _, backward = kernels(nn.Sequential(linear), x)
        assert len(products(backward)) == x_grad + w_grad


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a_convolution_has_its_products_whatever_its_groups(groups):
    conv = nn.Conv2d(4, 8, 3, groups=groups, bias=False)
    x = torch.randn(2, 4, 10, 10, requires_grad=True)
    forward, backward = kernels(nn.Sequential(conv), x)
    flops = 2 * (2 * 8 * 8) * 8 * (4 // groups) * 9
    assert [kernel.flops for kernel in forward] == [flops]
    assert [kernel.flops for kernel in products(backward)] == [2 * flops]
    assert forward[0].op_class == backward[0].op_class == "convolution"


def test_a_frozen_convolution_has_one_product_backward():
    conv = nn.Conv2d(4, 8, 3).requires_grad_(False)
    forward, backward = kernels(conv, torch.randn(2, 4, 10, 10, requires_grad=True))
    assert products(backward)[0].flops == forward[0].flops


def test_attention_has_two_products_forward_and_five_backward():
    query, key = torch.randn(2, 4, 6, 8, requires_grad=True), torch.randn(2, 4, 10, 8)
    key.requires_grad_()
    model = Only(lambda _, q, k: functional.scaled_dot_product_attention(q, k, k))
    forward, backward = kernels(model, query, key)
    product = 2 * 2 * 4 * 6 * 10 * 8
    assert [kernel.flops for kernel in products(forward)] == [2 * product]
    assert [kernel.flops for kernel in products(backward)] == [5 * product]
    assert forward[0].op_class == "attention"


def test_an_lstm_has_a_product_per_step_and_weight():
    lstm = nn.LSTM(3, 5)
    forward, backward = kernels(lstm, torch.randn(7, 2, 3))
    flops = 2 * (7 * 2) * (4 * 5 * 3 + 4 * 5 * 5)
    assert sum(kernel.flops for kernel in forward) == flops
    assert sum(kernel.flops for kernel in backward) == 2 * flops


def test_a_window_counts_its_places():
    forward, _ = kernels(nn.MaxPool2d(2), torch.randn(1, 3, 8, 8))
    assert [(k.op_class, k.flops) for k in forward] == [("pooling", 3 * 4 * 4 * 4)]


@pytest.mark.parametrize(
    "view",
    [
        lambda _, x: x.view(-1),
        lambda _, x: x.transpose(0, 1),
        lambda _, x: x[1:].unsqueeze(0),
        lambda _, x: x.expand(3, *x.shape),
        lambda _, x: x.chunk(2)[1],
    ],
)
def test_views_cost_nothing(view):
    forward, _ = kernels(Only(view), torch.randn(4, 6))
    assert forward == []


def test_elementwise_reads_and_writes_and_a_broadcast_is_read_as_stored():
    forward, _ = kernels(Only(lambda _, x, y: x + y), torch.randn(10, 6), torch.randn(6))
    assert forward == [Kernel("elementwise", "fp32", 0, 4 * (60 + 6 + 60))]
    forward, _ = kernels(Only(lambda _, x: x * x), torch.randn(10, 6))
    assert forward == [Kernel("elementwise", "fp32", 0, 4 * (60 + 60))]
    expanded = Only(lambda _, x: x.expand(100, 6) + 1)
    assert kernels(expanded, torch.randn(6))[0] == [Kernel("elementwise", "fp32", 0, 4 * 606)]


def test_what_is_written_in_place_is_not_made_anew():
    model = Only(lambda _, x: (x + 1).mul_(2).relu_())
    forward, _ = kernels(model, torch.randn(8))
    assert [kernel.nbytes for kernel in forward] == [64, 64, 64]
    filled = Only(lambda _, x: torch.empty_like(x).copy_(x))
    assert [kernel.nbytes for kernel in kernels(filled, torch.randn(8))[0]] == [64]


def test_a_gather_reads_what_it_picks():
    forward, backward = kernels(nn.Embedding(1000, 4), torch.zeros(3, dtype=torch.long))
    assert forward == [Kernel("gather", "fp32", 0, 3 * 8 + 2 * 3 * 4 * 4)]
    # The gradient of the whole table is filled, and three rows of it added to.
    assert [kernel.nbytes for kernel in backward] == [3 * 8 + 1000 * 16 + 3 * 3 * 16]


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.bfloat16, "bf16"), (torch.float16, "fp16"), (torch.float64, "fp64")],
)
def test_a_kernel_computes_in_the_type_of_its_tensors(dtype, name):
    forward, _ = kernels(nn.Linear(4, 4).to(dtype), torch.randn(2, 4).to(dtype))
    assert {kernel.dtype for kernel in forward} == {name}


def test_the_time_of_a_product_by_hand():
    with torch.device("meta"):
        model = nn.Linear(4096, 4096, bias=False, dtype=torch.bfloat16)
        x = torch.empty(8192, 4096, dtype=torch.bfloat16)
    profile = baechi.estimate(baechi.trace(model, (x,)), KIND)
    kind = find(KIND)
    ideal_ns = 1e9 * 2 * 8192 * 4096 * 4096 / 989.4e12
    share = kind.efficiency("matmul", "bf16").compute
    (cost,) = [cost for cost in profile.costs if cost.forward_ns]
    assert abs(cost.forward_ns - (ideal_ns / share + kind.launch_ns)) < 2
    assert abs(cost.backward_ns - (ideal_ns / share + kind.launch_ns)) < 2
    # The host launches one kernel each way.
    assert cost.forward_launch_ns == cost.backward_launch_ns == kind.host_launch_ns == 5_000


def test_tf32_is_for_the_products_that_are_told():
    # Large enough for its FLOPs to bind in either type.
    with torch.device("meta"):
        traced = baechi.trace(nn.Linear(4096, 4096), (torch.empty(4096, 4096),))
    fast, slow, default = (
        sum(c.forward_ns for c in baechi.estimate(traced, KIND, tf32=tf32).costs)
        for tf32 in (True, False, None)
    )
    assert fast < slow / 3
    assert default == slow
    assert baechi.estimate(traced, "V100-SXM-16GB", tf32=True).environment.endswith("nothing")


def test_tf32_is_asked_for_class_by_class():
    """As torch's documents set it since 2.9; one question for all of them raises an error then."""
    assert rounded_classes(find(KIND), None) == {"convolution", "recurrent"}
    backends = torch.backends
    with rounded_to("tf32", backends.cuda.matmul), rounded_to("ieee", backends.cudnn.conv):
        assert rounded_classes(find(KIND), None) == {"matmul", "recurrent"}


@pytest.mark.parametrize("name", some(sorted(zoo.MODELS), 6, 1))
def test_every_operator_of_every_model_runs_on_shapes_alone(name):
    traced = case(name).traced
    costs = baechi.estimate(traced, KIND).costs
    for op, cost in zip(traced.ops, costs, strict=True):
        # The backward of this one reads values in transformers 5.17, and in 5.23 no more.
        reads = "grouped_mm_fallback" in op.name and transformers.__version__.startswith("5.17.")
        assert reads or not cost.remark
        assert op.differentiable or cost.backward_ns == 0
        assert cost.parameter_bytes == op.trained_bytes + op.frozen_bytes
        # Fake tensors do not show what oneDNN keeps of an LSTM.
        assert cost.saved_bytes == op.saved_bytes or "lstm" in op.name


@pytest.mark.parametrize("name", some(["lstm_lm", "gpt2", "resnet_train", "towers"], 3))
def test_computed_and_measured_graphs_differ_in_costs_only(name):
    model, args, kwargs = zoo.MODELS[name]()
    traced = baechi.trace(model, args, kwargs)
    computed = baechi.estimate(traced, "cpu")
    measured = baechi.profile(traced, threads=1, progress=False)
    assert (computed.kind, computed.source, measured.source) == ("cpu", "computed", "measured")
    for one, other in zip(computed.costs, measured.costs, strict=True):
        assert (one.parameter_bytes, one.output_bytes) == (
            other.parameter_bytes,
            other.output_bytes,
        )
        # A kernel of the device, such as a recurrent one, may keep less than is counted.
        assert one.saved_bytes >= other.saved_bytes
        assert one.saved_bytes == other.saved_bytes or name == "lstm_lm"
    for training in (True, False):
        one = traced.graph(computed, training=training, optimizer="adam" if training else None)
        other = traced.graph(measured, training=training, optimizer="adam" if training else None)
        for a, b in zip(one.tensors, other.tensors, strict=True):
            assert (a.producer, a.consumers, a.kept) == (b.producer, b.consumers, b.kept)
            assert a.nbytes == b.nbytes or name == "lstm_lm"
        for a, b in zip(one.ops, other.ops, strict=True):
            assert (a.name, a.persistent_bytes, a.group) == (b.name, b.persistent_bytes, b.group)


def test_scratch_is_what_the_dispatcher_sees():
    model = Only(lambda _, x: functional.cross_entropy(x.float(), torch.zeros(64).long()))
    traced = baechi.trace(model, (torch.randn(64, 100, dtype=torch.half, requires_grad=True),))
    pairs = zip(traced.ops, baechi.estimate(traced, KIND).costs, strict=True)
    (entropy,) = [cost for op, cost in pairs if "cross_entropy" in op.name]
    # But for the loss's own gradient, which has gone by then.
    assert entropy.backward_workspace_bytes + 8 >= 64 * 100 * 4


def test_what_depends_on_values_is_counted_on_the_example_and_says_so():
    model, args, kwargs = zoo.AWKWARD["data_dependent"]()
    traced = baechi.trace(model, args, kwargs)
    profile = baechi.estimate(traced, "cpu")
    assert [cost.remark for cost in profile.costs if cost.remark] == [SEEN, SEEN]
    assert all(cost.forward_ns > 0 for cost in profile.costs if cost.remark)
    assert baechi.estimate(traced, "cpu") == profile


def test_what_does_not_run_on_its_example_is_guessed_from_its_bytes_and_says_so():
    model = Typed()
    traced = baechi.trace(model, (torch.randn(4), torch.randn(8).double()))
    model.branching.forward = None
    profile = baechi.estimate(traced, "cpu")
    (cost,) = [cost for cost in profile.costs if cost.remark]
    assert cost.remark == UNSEEN
    assert cost.forward_ns > 0


class _OneWay(torch.autograd.Function):
    """Makes room that it does not keep, and refuses its backward, as reversible layers may."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.repeat(16, 1, 1).sin().sum(0)

    @staticmethod
    def backward(*_: Any) -> Tensor:
        raise AssertionError("only in training")


class OneWay(nn.Module):
    """A layer in front of it, so that a gradient would go there."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return _OneWay.apply(self.first(x))


def test_where_a_backward_refuses_the_forward_is_counted_as_it_is():
    args = (torch.randn(64, 32),)
    placed = baechi.place(
        OneWay().eval(),
        {"cpu:0": "1GiB"},
        example_args=args,
        training=False,
        costs="estimate",
        progress=False,
    )
    (seen,) = placed.measure(1).peak_bytes
    (said,) = placed.schedule.peak_bytes
    assert seen <= said <= 1.05 * seen
    loads = workloads(placed.traced).values()
    assert [load.remark for load in loads if load.remark] == [UNSEEN_BACKWARD]
    placed.unplace()


class Branching(nn.Module):
    """Looks at a number in a tensor, so it stays whole."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x


class Typed(nn.Module):
    """An operator tells another a type."""

    def __init__(self) -> None:
        super().__init__()
        self.branching = Branching()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return y.to(self.branching(x).dtype)


@pytest.mark.parametrize("measured", [False, True])
def test_what_one_operator_tells_another_need_not_be_a_tensor(measured: bool):
    traced = baechi.trace(Typed(), (torch.randn(4), torch.randn(8).double()))
    assert traced.rung == "module granularity, opaque leaves"
    if measured:
        profile = baechi.profile(traced, "cpu", threads=1, progress=False, cache=False)
    else:
        profile = baechi.estimate(traced, "cpu")
    (cost,) = [c for op, c in zip(traced.ops, profile.costs, strict=True) if op.name == "to"]
    assert cost.remark == ""


class Reversed(torch.autograd.Function):
    """Runs a layer backward itself, as reversible layers do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            ctx.layer(x).backward(gradient)
        return x.grad, None


class Reversible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.branching = nn.Linear(4, 4), Branching()

    def forward(self, x: Tensor) -> Tensor:
        return Reversed.apply(self.branching(x), self.layer)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(4, 4), Reversible()

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(self.first(x))
        return y.sum()


def test_a_backward_that_accumulates_leaves_no_gradient():
    model = Outer()
    traced = baechi.trace(model, (torch.randn(2, 4),))
    kept = torch.ones(4, 4)
    model.inner.layer.weight.grad = kept
    baechi.estimate(traced, "cpu")
    assert model.inner.layer.weight.grad is kept
    assert torch.equal(kept, torch.ones(4, 4))
    assert model.inner.layer.bias.grad is None


class Stacks(nn.Module):
    """Joins tensors that have a gradient only since they were written into."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = [torch.full((2, 3), -torch.inf) for _ in range(2)]
        for row in wide:
            row[:, :2] = self.linear(x)
        return torch.stack(wide).exp()


def test_what_is_written_into_the_parts_of_a_join_is_estimated() -> None:
    traced = baechi.trace(Stacks(), (torch.randn(2, 4),))
    assert len(baechi.estimate(traced, "cpu").costs) == len(traced.ops)


def test_estimating_is_deterministic_and_leaves_the_model_alone():
    model, args, kwargs = zoo.MODELS["resnet_train"]()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    traced = baechi.trace(model, args, kwargs)
    assert baechi.estimate(traced, "T4") == baechi.estimate(traced, "T4")
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
    assert baechi.estimate(traced, "Tesla T4").costs == baechi.estimate(traced, "T4").costs
    assert baechi.estimate(traced, "Tesla T4").kind == "Tesla T4"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.backends.cudnn.enabled, reason="cuDNN is off")
def test_a_model_on_a_gpu_is_estimated_as_one_on_a_cpu():
    model, args, kwargs = zoo.MODELS["resnet_eval"]()
    here = baechi.estimate(baechi.trace(model, args, kwargs), "T4")
    there = baechi.trace(model.cuda(), tuple(tensor.cuda() for tensor in args), kwargs)
    assert baechi.estimate(there, "T4").costs == here.costs


def test_a_trace_from_a_file_is_refused(tmp_path):
    baechi.dump(baechi.trace(nn.Linear(2, 2), (torch.randn(1, 2),)), tmp_path / "t.json")
    with pytest.raises(baechi.InputError, match="loaded from a file and has no shapes"):
        baechi.estimate(baechi.load(tmp_path / "t.json"), "T4")


def test_an_unknown_kind_and_a_wrong_calibration_are_refused():
    traced = baechi.trace(nn.Linear(2, 2), (torch.randn(1, 2),))
    with pytest.raises(baechi.InputError, match="Did you mean H100-PCIe-80GB or H100-SXM-80GB"):
        baechi.estimate(traced, "H100")
    with pytest.raises(baechi.InputError, match="is for device kind 'L4', not 'T4'"):
        baechi.estimate(traced, "T4", calibration=baechi.Calibration("L4", (), 1))
    with pytest.raises(baechi.InputError, match="give a Calibration"):
        baechi.estimate(traced, "T4", calibration="cpu.json")


LLAMA = """
import json, pathlib, torch, baechi
from baechi.records import device_kinds
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(vocab_size=128256, hidden_size=8192, intermediate_size=28672,
    num_hidden_layers=4, num_attention_heads=64, num_key_value_heads=8, use_cache=False)
with torch.device("meta"):
    model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    tokens = torch.zeros(1, 2048, dtype=torch.long)
traced = baechi.trace(model, (tokens,))
profile = baechi.estimate(traced, "H100-SXM-80GB")
graph = traced.graph(profile, training=False)
cluster = device_kinds.cluster("2xA100-SXM-40GB", baechi.Link(10_000, 200 * 10**9))
placement = baechi.solve(graph, cluster, effort="fast")
rows = dict(l.split(":", 1) for l in pathlib.Path("/proc/self/status").read_text().splitlines())
print(json.dumps({
    "weights": sum(c.parameter_bytes for c in profile.costs),
    "forward_ns": sum(c.forward_ns for c in profile.costs),
    "makespan_ns": baechi.simulate(graph, cluster, placement).makespan_ns,
    "peak": int(rows["VmHWM"].split()[0]) * 1024,
}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_model_that_fits_nowhere_here_is_traced_estimated_and_solved():
    done = subprocess.run(
        [sys.executable, "-c", LLAMA], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["weights"] > 11 * 10**9
    assert found["peak"] < 2 * 2**30
    # 2 FLOPs per weight but the embedding's, and token, at no more than the peak.
    weights = (found["weights"] - 2 * 128256 * 8192) / 2
    assert found["forward_ns"] > 1e9 * 2 * weights * 2048 / 989.4e12
    assert found["makespan_ns"] >= found["forward_ns"] // 2


@pytest.mark.parametrize(
    ("points", "at", "found"),
    [
        ([(10, 50), (20, 90)], 15, 70),  # between, and beyond on the line
        ([(20, 90), (10, 50)], 40, 170),
        ([(10, 50), (20, 90)], 5, 30),
        ([(10, 50), (20, 150)], 4, 20),  # never below what is in proportion
        ([(10, 90), (20, 50)], 15, 70),  # noise: on the line between, in proportion beyond
        ([(10, 90), (20, 50)], 40, 100),
        ([(10, 90), (20, 50)], 5, 45),
        ([(10, 50), (10, 70)], 20, 140),
        ([(10, 50)], 30, 150),
        ([(0, 7)], 0, 7),
    ],
)
def test_times_at_another_size_follow_from_those_at_two(
    points: list[tuple[int, int]], at: int, found: int
) -> None:
    def profile(kind: str, time_ns: int) -> baechi.Profile:
        times = {"forward_ns": time_ns, "backward_ns": 2 * time_ns, "inference_ns": 3 * time_ns}
        costs = (baechi.OpCost(**times, saved_bytes=at),)
        return baechi.Profile(traced_digest="any", kind=kind, costs=costs)

    known = [(profile("mine", y), profile("cpu", x)) for x, y in points]
    expected = profile("mine", found)
    assert rescaled(known, profile("cpu", at)) == expected


def test_on_lanes_an_operator_takes_t_max_1_k_u():
    """A large product fills a GPU, u is nearly 1; of a small one all but the launch is little."""
    kind, sizes = find(KIND), (64, 8192)
    for size in sizes:
        traced = baechi.trace(Only(lambda _, x: x @ x), (torch.zeros(size, size, device="meta"),))
        (kernel,) = workloads(traced)[traced.ops[-1].key].forward
        alone, two, four = (
            baechi.estimate(traced, name, tf32=False).costs[-1].forward_ns
            for name in (KIND, f"{KIND}, 2 lanes", f"{KIND}, 4 lanes")
        )
        work_ns = kind.kernel_ns(kernel)
        share = work_ns / (work_ns + kind.launch_ns)
        assert alone == pytest.approx(work_ns + kind.launch_ns, abs=1)
        assert two == pytest.approx(alone * max(1, 2 * share), rel=1e-3)
        assert four == pytest.approx(alone * max(1, 4 * share), rel=1e-3)
        assert (two == four == alone) == (size == sizes[0])
    assert baechi.estimate(traced, f"{KIND}, 2 lanes").kind == f"{KIND}, 2 lanes"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(20, 8, 64, 64), (7, 30, 300, 100), (50, 3, 100, 256)])
def test_what_onednn_keeps_of_an_lstm_is_counted(dtype, sizes):
    steps, batch, width, hidden = sizes
    x, entering, again, bias, state = (
        torch.zeros(shape, dtype=dtype)
        for shape in (
            *((steps, batch, width), (4 * hidden, width), (4 * hidden, hidden)),
            *((4 * hidden,), (1, batch, hidden)),
        )
    )
    options = (False, [], 2, hidden, 1, True, False, False, True)
    layer = torch.ops.aten.mkldnn_rnn_layer.default
    try:
        *_, kept = layer(x, entering, again, bias, bias, state, state, *options)
    except RuntimeError:
        pytest.skip("oneDNN has no recurrent layers in this dtype for this CPU")
    assert kept.nbytes <= _recurrent_bytes(x, entering, again) <= 1.35 * kept.nbytes
