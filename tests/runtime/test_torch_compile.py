"""Segments that torch compiles: equal to the unsplit model, compiled once and by one thread."""

import copy
import threading
import warnings
from collections.abc import Iterator
from itertools import compress, pairwise
from typing import Any

import pytest
import torch
from placed import EXACT, assert_same_values, cpus, lazily, place_on
from seeds import some
from steps import ALL, Case, assert_same_step, case, infer, train
from torch import nn

import baechi
from baechi.runtime.torch_compile import compile_options

# What fits in a few seconds of every test run.
QUICK = ["towers", "buffers", "in_place", "input_written", "slice_assigned", "parameter_twice"]
AOT = {"backend": "aot_eager"}
# Inductor fuses, so it rounds less often.
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
# Through a ResNet's batch normalizations the gradient of its first layer, of up to 5, is 4.5e-4
# off; so it is where torch.compile has the whole model.
NORMALIZED = {"rtol": 1e-4, "atol": 1e-3}


# One process imports the compiler, for all tests of it.
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.xdist_group("compile")]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def placed(
    model: nn.Module, args: Any, how: Any, n_devices: int = 2, placer: Any = None, **kwargs: Any
) -> baechi.PlacedModule:
    traced = baechi.trace(model, args, kwargs)
    return place_on(traced, n_devices, placer or baechi.RandomPlacer(0), compile=how)


def placed_case(name: str, how: Any, placer: Any) -> tuple[Case, baechi.PlacedModule]:
    it = case(name)
    it.reset()
    cluster = cpus(3)
    placement = baechi.solve(it.training, cluster, placer=placer)
    options = {"graph": it.training, "cluster": cluster, "compile": how}
    return it, baechi.apply(it.traced, placement, **options)


def assert_compiled_equals_unsplit(
    name: str, how: Any, placer: Any, **tolerances: float
) -> tuple[str, ...]:
    it, module = placed_case(name, how, placer)
    try:
        for _ in range(2):  # one thread compiles as it runs; then workers run what is there
            it.reset()
            assert_same_step(train(module, it.example()), it.trained, **tolerances)
        for _ in range(2):
            it.reset()
            actual = infer(module, it.example())
            assert_same_values(actual.outputs, it.inferred.outputs, **tolerances)
            for key, tensor in it.inferred.state.items():
                torch.testing.assert_close(actual.state[key], tensor, **tolerances)
        return module.remarks
    finally:
        module.unplace()


@pytest.mark.parametrize("name", some(QUICK, 6))
def test_what_aot_autograd_runs_equals_the_unsplit_model_in_every_bit(name: str) -> None:
    assert not assert_compiled_equals_unsplit(name, AOT, baechi.RandomPlacer(0), **EXACT)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*runs uncompiled")
@pytest.mark.parametrize("name", [name for name in ALL if name not in QUICK])
def test_every_model_of_the_zoo_equals_the_unsplit_one(name: str) -> None:
    assert_compiled_equals_unsplit(name, AOT, baechi.RandomPlacer(1), **EXACT)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*runs uncompiled")
@pytest.mark.parametrize("name", ["gpt2", "bert", "resnet_train", "towers", "awkward"])
def test_what_inductor_runs_is_close_to_the_unsplit_model(name: str) -> None:
    close = NORMALIZED if name == "resnet_train" else CLOSE
    assert_compiled_equals_unsplit(name, True, "m-etf", **close)


class Small(nn.Module):
    """A dropout on each of two branches."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left = nn.functional.dropout(self.left(x), 0.5, self.training)
        right = nn.functional.dropout(self.right(x), 0.5, self.training)
        return left.relu() + right


def seeded_step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(3)
    y = model(x)
    y.square().sum().backward()
    rows = [y.detach(), *(p.grad for p in model.parameters())]
    model.zero_grad()
    return rows


INDUCTOR = pytest.param("inductor", 2, marks=pytest.mark.slow)


@pytest.mark.parametrize(("backend", "n_devices"), [("aot_eager", 2), INDUCTOR])
def test_masks_are_the_unsplit_model_s_and_a_graph_may_be_kept(
    backend: str, n_devices: int
) -> None:
    model, x = Small(), torch.randn(4, 8)
    module = placed(model, (x,), {"backend": backend}, n_devices)
    expected = seeded_step(copy.deepcopy(model), x)
    for _ in range(3):
        torch.testing.assert_close(seeded_step(module, x), expected)
    loss = module(x).square().sum()
    loss.backward(retain_graph=True)
    once = [parameter.grad.clone() for parameter in model.parameters()]
    loss.backward()
    for parameter, gradient in zip(model.parameters(), once, strict=True):
        assert torch.equal(parameter.grad, 2 * gradient)
    assert not module.remarks
    module.unplace()


class Block(nn.Module):
    """A layer of a transformer without its attention, with a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x + nn.functional.dropout(y, 0.1, self.training)


@pytest.mark.parametrize(("backend", "n_devices"), [("aot_eager", 2), INDUCTOR])
def test_what_runs_again_runs_compiled_with_the_same_masks(backend: str, n_devices: int) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Block() for _ in range(3))), torch.randn(8, 16)
    reference = copy.deepcopy(model)
    traced = baechi.trace(model, (x,))
    how, again = {"backend": backend}, ["0", "1", "2"]
    module = place_on(traced, n_devices, "contiguous", checkpoint=again, compile=how)
    for _ in range(3):
        torch.testing.assert_close(seeded_step(module, x), seeded_step(reference, x))
    assert sum(segment.again for segment in module.program.phases[1].segments) >= 1
    assert not module.remarks
    module.unplace()


class Fused(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * 2 + 1).relu()


@pytest.mark.slow
def test_inductor_is_what_compiles_unless_told_otherwise() -> None:
    x = torch.randn(64)
    module = placed(Fused(), (x,), True, n_devices=1)
    with torch.no_grad():
        torch.testing.assert_close(module(x), Fused()(x), **CLOSE)
    assert not module.remarks
    module.unplace()


def test_each_tape_compiles_once_for_a_mode_in_the_caller_s_thread() -> None:
    from torch._dynamo.backends.debugging import aot_eager

    compiled_by: list[threading.Thread] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        compiled_by.append(threading.current_thread())
        return aot_eager(graph, inputs)

    model, x = Small().eval(), torch.randn(4, 8)
    module = placed(model, (x,), {"backend": backend}, n_devices=3)
    n_tapes = len(module.program.tapes)
    assert n_tapes > 1

    def infers() -> None:
        with torch.no_grad():
            module(x)

    def infers_for_good() -> None:
        with torch.inference_mode():
            module(x)

    def infers_deterministically() -> None:
        torch.use_deterministic_algorithms(True)
        try:
            infers()
        finally:
            torch.use_deterministic_algorithms(False)

    def infers_frozen() -> None:
        model.requires_grad_(False)
        infers()
        model.requires_grad_(True)

    def infers_of_inference() -> None:
        with torch.inference_mode():
            y = x.clone()
        with torch.no_grad():
            module(y)

    runs = (infers, infers_for_good, infers_deterministically, infers_frozen, infers_of_inference)
    for run in (lambda: module(x).sum().backward(), *runs):
        before = len(compiled_by)
        for _ in range(3):
            run()
            assert len(compiled_by) <= before + n_tapes
        assert len(compiled_by) > before
    assert set(compiled_by) == {threading.current_thread()}
    module.unplace()


# At a batch as large as the features torch takes both for one symbol, which weights fix.
@pytest.mark.parametrize(
    ("batches", "compiling", "again"),
    [([4, 6, 9, 3], [4, 6], None), ([4, 8, 6, 9], [4, 8, 6], ["0", "1"])],
)
def test_a_family_of_shapes_has_one_plan_whose_segments_compile_with_symbols(
    batches: list[int], compiling: list[int], again: Any
) -> None:
    from torch._dynamo.backends.debugging import aot_eager

    n_compiled = 0

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        nonlocal n_compiled
        n_compiled += 1
        return aot_eager(graph, inputs)

    torch.manual_seed(0)
    model = nn.Sequential(Small(), Small()).eval()
    unsplit = copy.deepcopy(model)
    module = lazily(model, compile={"backend": backend}, checkpoint=again)
    counts = [0]
    rounds = [*batches, *batches]
    for batch in rounds:
        x = torch.randn(batch, 8)
        for _ in range(2):  # in one thread, and on workers
            actual, expected = seeded_step(module, x), seeded_step(unsplit, x)
            for one, other in zip(actual, expected, strict=True):
                assert torch.equal(one, other)
        counts.append(n_compiled)
        assert len(module._specializations) == 1
    grown = (before < after for before, after in pairwise(counts))
    assert list(compress(rounds, grown)) == compiling
    assert counts[1] > 1
    assert counts[-1] <= len(compiling) * counts[1]
    assert not module.remarks
    module.unplace()


def square(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return (y - t).square().mean()


def seeded_batches(
    model: nn.Module, x: torch.Tensor, n: int, seed: int, *, steps: bool
) -> list[torch.Tensor]:
    """A step or a call of micro-batches, on top of the gradients that are there."""
    torch.manual_seed(seed)
    if isinstance(model, baechi.PlacedModule):
        rows = [model.step(x, targets=-x, loss=square) if steps else model(x)]
    elif steps:
        losses = [square(model(c), -c) / n for c in x.chunk(n)]
        for loss in losses:
            loss.backward()
        rows = [sum(losses[1:], losses[0])]
    else:
        rows = [torch.cat([model(c) for c in x.chunk(n)])]
    if not steps:
        square(rows[0], -x).backward()
    return [rows[0].detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize(
    ("steps", "again"),
    [
        *(pytest.param(steps, None, marks=pytest.mark.slow) for steps in (True, False)),
        (True, ["0", "1"]),
    ],
    ids=str,
)
def test_micro_batches_share_what_compiles_once(steps: bool, again: Any) -> None:
    from torch._dynamo.backends.debugging import aot_eager

    compiled_by: list[threading.Thread] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        compiled_by.append(threading.current_thread())
        return aot_eager(graph, inputs)

    torch.manual_seed(0)
    plain = nn.Sequential(Small(), Small())
    module = lazily(
        *(copy.deepcopy(plain),), microbatches=4, compile={"backend": backend}, checkpoint=again
    )
    counts = [0]
    for batch in (8, 12, 8):  # one of another size has a plan of its own
        x = torch.randn(batch, 8)
        for seed in range(3):  # in one thread, then on workers, one on top of the other
            actual = seeded_batches(module, x, 4, seed, steps=steps)
            expected = seeded_batches(plain, x, 4, seed, steps=steps)
            for one, other in zip(actual, expected, strict=True):
                assert torch.equal(one, other)
            counts.append(len(compiled_by))
    assert counts[1] <= len(module.program.tapes)  # not of each micro-batch
    assert 0 < counts[1] == counts[3] < counts[4] == counts[-1] <= 2 * counts[1]
    assert set(compiled_by) == {threading.current_thread()}
    assert not module.remarks
    module.unplace()


@pytest.mark.slow
def test_micro_batches_of_inductor_are_close_to_the_loop_over_its_model() -> None:
    torch.manual_seed(0)
    plain, x = nn.Sequential(*(Block() for _ in range(2))).eval(), torch.randn(8, 16)
    module = lazily(copy.deepcopy(plain), microbatches=2, compile=True)
    whole = torch.compile(plain, fullgraph=True)
    for seed in range(2):
        for steps in (True, False):
            actual = seeded_batches(module, x, 2, seed, steps=steps)
            torch.testing.assert_close(
                actual, seeded_batches(whole, x, 2, seed, steps=steps), **CLOSE
            )
    assert not module.remarks
    module.unplace()


def test_a_step_under_compile_is_metered_as_predicted() -> None:
    torch.manual_seed(0)
    module = lazily(nn.Sequential(Small(), Small()), microbatches=4, compile=AOT)
    x = torch.randn(8, 8)
    for _ in range(2):
        module.step(x, targets=-x, loss=square)
    module.zero_grad()
    with module.metered() as meter:
        module.step(x, targets=-x, loss=square)
    for seen, said in zip(meter.peak_bytes, module.rhythm.peak_bytes, strict=True):
        assert 0 < seen <= 1.002 * said
    module.unplace()


def test_autocast_is_each_micro_batch_s_own() -> None:
    model, x = Small().eval(), torch.randn(4, 8)
    module = lazily(copy.deepcopy(model), microbatches=2, compile=AOT)
    for _ in range(2):
        rows = []
        for one in (module, model):
            parts = [x] if one is module else x.chunk(2)
            found = []
            for part in parts:
                with torch.autocast("cpu", torch.bfloat16):
                    found.append(one(part))
            torch.cat(found).float().square().sum().backward()
            rows.append([torch.cat(found).detach(), *(p.grad for p in one.parameters())])
        for own, other in zip(*rows, strict=True):
            assert torch.equal(own, other)
    assert rows[0][0].dtype == torch.bfloat16
    module.unplace()


@pytest.mark.parametrize("how", [{"backend": "cudagraphs"}, {"mode": "reduce-overhead"}, True])
def test_what_records_cuda_graphs_of_its_own_is_refused_on_cuda(how: Any) -> None:
    from torch._inductor import config

    places = [torch.device("cpu"), torch.device("cuda", 0)]
    compile_options(True, places)
    with config.patch({"triton.cudagraphs": how is True}):
        compile_options(how, places[:1])
        with pytest.raises(baechi.InputError, match="records CUDA graphs of its own"):
            compile_options(how, places)


def test_autocast_is_honoured_as_on_the_unsplit_model() -> None:
    model, x = Small().eval(), torch.randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        module = placed(model, (x,), AOT)
        expected = seeded_step(copy.deepcopy(model), x)
        assert expected[0].dtype == torch.bfloat16
        for _ in range(2):
            for one, other in zip(seeded_step(module, x), expected, strict=True):
                assert torch.equal(one, other)
    module.unplace()


def test_a_parameter_frozen_later_gets_no_gradient_and_the_others_theirs() -> None:
    model, x = Small().eval(), torch.randn(4, 8)
    module = placed(model, (x,), AOT)
    module(x).sum().backward()
    model.zero_grad()
    model.left.weight.requires_grad_(False)
    for _ in range(2):
        module(x).sum().backward()
        assert model.left.weight.grad is None
        assert model.right.weight.grad is not None
    module.unplace()


@torch.library.custom_op("baechi_tests::fussy", mutates_args=())
def fussy(x: torch.Tensor) -> torch.Tensor:
    """Refuses negative sums when it runs."""
    if float(x.sum()) < 0:
        raise IndexError("too negative")
    return x * 2


@fussy.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class CallsFussy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return fussy(x.exp().log()).relu()


@pytest.mark.parametrize("devices", [1, 2])
def test_an_operator_that_fails_in_compiled_code_is_named_with_its_line(devices: int) -> None:
    x = torch.ones(2, 3)
    module = placed(CallsFussy(), (x,), AOT, n_devices=devices)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(module(x), 2 * x)
            with pytest.raises(
                baechi.ExecutionError, match=r"fussy \(test_torch_compile.py:\d+ in .*too negative"
            ) as caught:
                module(-x)
            assert isinstance(caught.value.__cause__, IndexError)
    module.unplace()


class Signed(nn.Module):
    """Looks at values, so that it stays whole and cannot be compiled."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if bool(x.sum() > 0) else -x


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.signed, self.lstm = nn.Linear(4, 4), Signed(), nn.LSTM(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(self.signed(self.linear(x)))[0]


def test_what_torch_cannot_compile_runs_as_generated_and_says_why() -> None:
    model, x = Mixed(), torch.randn(3, 4)
    module = placed(model, (x,), AOT, n_devices=4)
    with pytest.warns(UserWarning, match="runs uncompiled"):
        actual = module(x)
    torch.testing.assert_close(actual, model(x), **EXACT)
    assert any("data-dependent" in remark and "at signed" in remark for remark in module.remarks)
    compiles = torch.__version__ >= "2.15"
    assert any("LSTM" in remark for remark in module.remarks) != compiles
    assert all(remark in module.report() for remark in module.remarks)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it was said once
        torch.testing.assert_close(module(-x), model(-x), **EXACT)
    module.unplace()


def test_where_there_is_no_compiler_of_c_plus_plus_it_runs_as_generated() -> None:
    none = {"cpp.cxx": ("no-such-compiler",), "fx_graph_cache": False}
    model, x = Small(), torch.randn(5, 8)
    module = placed(model, (x,), {"options": none}, n_devices=1)
    expected = seeded_step(copy.deepcopy(model), x)
    with pytest.warns(UserWarning, match=r"runs uncompiled: .*C\+\+ compiler"):
        actual = seeded_step(module, x)
    torch.testing.assert_close(actual, expected, **EXACT)
    assert module.remarks
    module.unplace()


@pytest.mark.parametrize(
    ("how", "wrong"),
    [
        ("inductor", "'inductor'"),
        (1, "1"),
        ({"fullgraph": False}, "fullgraph"),
        ({"backend": "no-such"}, "no-such"),
        ({"mode": "no-such"}, "no-such"),
        ({"options": {"no_such": 1}}, "no_such"),
        ({"mode": "default", "options": {}}, "mode"),
    ],
)
def test_a_wrong_option_is_refused_with_its_value(how: Any, wrong: str) -> None:
    model, x = Small(), torch.randn(4, 8)
    with pytest.raises(baechi.InputError, match=wrong):
        placed(model, (x,), how)
    with pytest.raises(baechi.InputError, match=wrong):
        baechi.place(model, {"cpu:0": "1GiB"}, compile=how)


def test_place_compiles_too() -> None:
    model, x = Small().eval(), torch.randn(4, 8)
    devices = {"cpu:0": "1GiB", "cpu:1": "1GiB"}
    module = baechi.place(model, devices, costs="estimate", compile=AOT, verify=True)
    assert torch.equal(module(x), copy.deepcopy(model)(x))
    measured = module.measure(2)
    assert measured.peak_bytes
    module.unplace()
