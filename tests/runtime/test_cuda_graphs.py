"""Tapes that are recorded and replayed do what they did when they ran one operator at a time."""

import copy
import functools
import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
import zoo
from placed import lazily, place_on, rounded_to
from recording import CpuRecorder
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

import baechi
from baechi.runtime.autograd.binding import bind
from baechi.runtime.autograd.tape import TapeCode
from baechi.runtime.executors.cuda_graphs import WARM_UP, Graphs
from baechi.runtime.executors.cuda_streams import CudaExecutor
from baechi.tracing.pytrees import tensors_in

STEPS = WARM_UP + 3


def placed_at_random(
    model: nn.Module, args: Any, kwargs: Any, seed: int, n_devices: int, training: bool = True
) -> baechi.PlacedModule:
    traced = baechi.trace(model, args, kwargs)
    return place_on(traced, n_devices, baechi.RandomPlacer(seed), training=training)


def replaying(
    placed: baechi.PlacedModule,
    refuse: Callable[[], bool] = lambda: False,
    ranks: list[int] | None = None,
    *,
    whole: bool = False,
) -> Graphs:
    """Let a placed module run as on CUDA with graphs, with a recorder for CPUs."""
    executable = placed._current
    program = executable._compiled(copy_lanes=True)
    bound = bind(executable.module, executable._structure, program, executable.places)
    noted: list[int] = [] if ranks is None else ranks
    graphs = Graphs(
        executable.module,
        program,
        bound,
        executable.places,
        recorder=lambda _: CpuRecorder(refuse, noted),
        whole=whole,
    )
    executable.close()
    executable.program = program
    executable._executor = CudaExecutor(program, bound, executable.places, graphs)
    return graphs


def other(value: Any, seed: int) -> Any:
    """The same shapes with other floats, and the rows of a batch in another order.

    What is one tensor remains one, as the ids and the labels of a language model.
    """

    @functools.cache
    def vary(tensor: torch.Tensor) -> torch.Tensor:
        fresh = tensor.detach().flip(0) if seed % 2 and tensor.dim() else tensor.detach().clone()
        if fresh.is_floating_point():
            fresh *= 1 + 0.1 * seed
        return fresh.requires_grad_(tensor.requires_grad)

    return pytree.tree_map_only(torch.Tensor, vary, value)


def step(module: nn.Module, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Outputs, gradients and buffers of a training step."""
    outputs = tensors_in(module(*args, **kwargs))
    torch.stack([t.float().square().mean() for t in outputs if t.requires_grad]).sum().backward()
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    inputs = [t.grad for t in tensors_in((args, kwargs)) if t.grad is not None]
    return [t.detach().clone() for t in (*outputs, *gradients, *inputs, *module.buffers())]


_SLOW = ("gpt2", "t5", "inception", "resnet_train", "lstm_lm", "awkward")


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(
    ("name", "n_devices"),
    [
        *(("towers", 1), ("towers", 3)),
        *((name, 3) for name in ("tied", "buffers", "in_place", "slice_assigned", "dropouts")),
        *(pytest.param(name, n, marks=pytest.mark.slow) for name in _SLOW for n in (1, 2)),
    ],
)
def test_replayed_training_equals_the_unsplit_model(name: str, n_devices: int, whole: bool) -> None:
    torch.manual_seed(0)
    model, args, kwargs = {**zoo.MODELS, **zoo.AWKWARD}[name]()
    reference = copy.deepcopy(model)
    placed = placed_at_random(model, args, kwargs, 3, n_devices)
    graphs = replaying(placed, whole=whole)
    assert any(not reason for reason in graphs.reasons)
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-4) for m in (reference, placed)]
    for number in range(STEPS):
        rows = []
        for module, optimizer in zip((reference, placed), optimizers, strict=True):
            optimizer.zero_grad()
            given, named = other((args, kwargs), number)
            torch.manual_seed(number)
            rows.append(step(module, given, named))
            optimizer.step()
        for one, two in zip(*rows, strict=True):
            torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fails", [1, 2])  # the forward, the backward
def test_lanes_that_are_no_common_graph_are_graphs_of_their_own(fails: int) -> None:
    torch.manual_seed(0)
    model, args, kwargs = zoo.MODELS["towers"]()
    reference, count = copy.deepcopy(model), itertools.count(1)
    placed = placed_at_random(model, args, kwargs, 3, 3)
    graphs = replaying(placed, lambda: next(count) == fails, ranks := [], whole=True)
    for number in range(2 * WARM_UP + 3):
        given, named = other((args, kwargs), number)
        rows = [step(module, given, named) for module in (reference, placed)]
        for one, two in zip(*rows, strict=True):
            torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-5)
        if number == WARM_UP + 1:
            what = ("it", "a backward of it")[fails - 1]
            apart = f"its lanes are no common CUDA graph: {what} could not be captured: "
            assert graphs.remarks[0].startswith(apart)
    assert len(ranks) > 3


class Tied(nn.Module):
    """A weight that operators far apart read."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(torch.tanh(x @ self.weight)))
        return torch.tanh(self.second(torch.tanh(x @ self.weight)))


def test_gradients_of_a_tied_weight_are_added_up_across_recorded_tapes() -> None:
    torch.manual_seed(0)
    model, x = Tied(), torch.randn(3, 4)
    placed = placed_at_random(model, (x,), {}, 0, 2)
    replaying(placed)
    assert any(tape.sums for tape in placed._current._executor.bound.tapes)
    expected = step(copy.deepcopy(model), (x,), {})
    for _ in range(STEPS):
        placed.zero_grad()
        for one, two in zip(expected, step(placed, (x,), {}), strict=True):
            torch.testing.assert_close(two, one)


def test_recordings_keep_no_node_of_a_parameter() -> None:
    """It would go on adding up gradients on the stream that was current when it was recorded."""
    model, args, kwargs = zoo.MODELS["towers"]()
    placed = placed_at_random(model, args, kwargs, 3, 2)
    graphs = replaying(placed)
    for _ in range(STEPS):
        step(placed, args, kwargs)
    assert "" in graphs.reasons
    placed._current.renew(-1)  # the node that outlives the steps, which is of their streams
    for parameter in placed.parameters():
        get_gradient_edge(parameter).node.metadata["kept"] = True
        assert "kept" not in get_gradient_edge(parameter).node.metadata


@pytest.mark.parametrize(
    "name", ["vit", *(pytest.param(n, marks=pytest.mark.slow) for n in ("inception", "t5"))]
)
def test_replayed_inference_equals_the_unsplit_model(name: str) -> None:
    model, args, kwargs = zoo.MODELS[name]()
    model.eval()
    reference = copy.deepcopy(model)
    with torch.no_grad():
        placed = placed_at_random(model, args, kwargs, 1, 3, training=False)
        replaying(placed)
        kept = []
        for number in range(STEPS):
            given, named = other((args, kwargs), number)
            expected = tensors_in(reference(*given, **named))
            actual = tensors_in(placed(*given, **named))
            kept.append((expected, actual))
        for expected, actual in kept:  # what the caller got, no later call has changed
            for one, two in zip(expected, actual, strict=True):
                torch.testing.assert_close(two, one)


class Split(nn.Module):
    """Two heads over one body, of which a step may train one or both."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.heads = nn.ModuleList([nn.Linear(8, 4), nn.Linear(8, 4)])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.tanh(self.body(x))
        return self.heads[0](x), self.heads[1](x)


def two_heads(seed: int = 0, n_devices: int = 2) -> tuple[nn.Module, baechi.PlacedModule, Graphs]:
    torch.manual_seed(0)
    model = Split()
    reference = copy.deepcopy(model)
    placed = placed_at_random(model, (torch.randn(4, 8),), {}, seed, n_devices)
    return reference, placed, replaying(placed)


def gradients(module: nn.Module, loss: torch.Tensor, **options: Any) -> list[torch.Tensor | None]:
    for parameter in module.parameters():
        parameter.grad = None
    loss.backward(**options)
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def assert_same(rows: list[Any], others: list[Any]) -> None:
    for one, two in zip(rows, others, strict=True):
        assert (one is None) == (two is None)
        if one is not None:
            torch.testing.assert_close(two, one)


def warm(placed: nn.Module) -> None:
    for _ in range(WARM_UP + 1):
        sum(y.sum() for y in placed(torch.randn(4, 8))).backward()


@pytest.mark.parametrize("seed", range(3))
def test_each_step_may_train_other_outputs(seed: int) -> None:
    reference, placed, _ = two_heads(seed)
    for number, heads in enumerate([(0, 1)] * WARM_UP + [(0,), (1,), (0, 1), (0,), (1,)]):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
        rows = [
            gradients(module, sum(module(x)[head].square().sum() for head in heads))
            for module in (reference, placed)
        ]
        assert_same(*rows)


def test_gradients_of_other_outputs_run_eagerly_before_they_are_recorded() -> None:
    """A library chooses kernels when it first runs them, which must not be in a capture."""
    ranks: list[int] = []
    reference, placed, graphs = two_heads()
    graphs._recorder = lambda _: CpuRecorder(lambda: False, ranks)
    x, counts = torch.randn(4, 8), []
    for heads in [(0, 1)] * (WARM_UP + 1) + [(0,)] * 3:
        outputs = [module(x) for module in (reference, placed)]
        losses = [sum(row[head].square().sum() for head in heads) for row in outputs]
        assert_same(*map(gradients, (reference, placed), losses))
        counts.append(len(ranks))
    *_, before, first, second, third = counts
    assert 0 < before == first < second == third


def test_each_thread_warms_up() -> None:
    """Handles and plans of libraries are a thread's own."""
    ranks: list[int] = []
    torch.manual_seed(0)
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    placed = placed_at_random(model, (x,), {}, 0, 1)
    replaying(placed, ranks=ranks)

    def recorded(calls: int) -> int:
        for _ in range(calls):
            placed(x).sum().backward()
        return len(ranks)

    with ThreadPoolExecutor(1) as other:
        assert recorded(WARM_UP) == 0
        assert other.submit(recorded, WARM_UP).result() == 0
        assert other.submit(recorded, 1).result() > 0


class Fan(nn.Module):
    """Two outputs; the gradients of its halves are one tensor from the first, two of the second."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        left, right = torch.tanh(self.body(x)).chunk(2, -1)
        left, right = left + 1, right + 1
        return left + right, 2 * left - 3 * right


@pytest.mark.parametrize("seed", range(3))
def test_gradients_that_were_one_tensor_may_be_two_in_another_step(seed: int) -> None:
    torch.manual_seed(0)
    model, x = Fan(), torch.randn(3, 4)
    reference = copy.deepcopy(model)
    placed = placed_at_random(model, (x,), {}, seed, 2)
    replaying(placed)
    for head in (*[0] * (WARM_UP + 1), 1, 0, 1):
        losses = [module(x)[head].square().sum() for module in (reference, placed)]
        rows = zip((reference, placed), losses, strict=True)
        assert_same(*(gradients(module, loss) for module, loss in rows))


def test_a_graph_that_is_retained_goes_backward_again() -> None:
    reference, placed, _ = two_heads()
    warm(placed)
    x = torch.randn(4, 8)
    for module in (reference, placed):
        loss = sum(y.square().sum() for y in module(x))
        once = gradients(module, loss, retain_graph=True)
        assert_same(once, gradients(module, loss))
        if module is reference:
            expected = once
    assert_same(expected, once)


def test_steps_under_way_together_do_not_disturb_each_other() -> None:
    reference, placed, _ = two_heads()
    warm(placed)
    x, y = torch.randn(4, 8), torch.randn(4, 8)
    rows = []
    for module in (reference, placed):
        first = sum(t.square().sum() for t in module(x))
        second = sum(t.square().sum() for t in module(y))  # its activations go elsewhere
        with torch.no_grad():
            seen = module(y)
        rows.append([*seen, *gradients(module, first), *gradients(module, second), *module(x)])
    assert_same(*rows)


def test_a_step_that_never_goes_backward_is_forgotten() -> None:
    _, placed, graphs = two_heads()
    warm(placed)
    outputs = placed(torch.randn(4, 8))
    launch = placed._current._executor._together
    assert not graphs.begin(_like(placed), launch)  # it may still go backward
    del outputs
    gc.collect()
    assert graphs.begin(_like(placed), launch)


def _like(placed: baechi.PlacedModule) -> Any:
    from baechi.runtime.autograd.step import Step

    sizes = placed._current._executor.bound.sizes
    return Step(True, None, (torch.randn(4, 8),), sizes)


def test_recordings_are_made_anew_when_parameters_move_or_freeze() -> None:
    ranks: list[int] = []
    torch.manual_seed(0)
    model = Split()
    reference = copy.deepcopy(model)
    placed = placed_at_random(model, (torch.randn(4, 8),), {}, 0, 2)
    replaying(placed, ranks=ranks)
    x = torch.randn(4, 8)

    def train() -> None:
        for _ in range(WARM_UP + 2):
            losses = [sum(y.square().sum() for y in m(x)) for m in (reference, placed)]
            rows = zip((reference, placed), losses, strict=True)
            assert_same(*(gradients(module, loss) for module, loss in rows))

    train()
    once = list(ranks)
    assert once == sorted(once)
    train()
    assert ranks == once  # nothing changed, nothing is recorded
    for module in (reference, placed):
        weight = module.body.weight
        weight.data = weight.data * 2
    train()
    assert ranks == once * 2
    for module in (reference, placed):
        module.heads[0].bias.requires_grad_(False)
    train()
    assert len(ranks) > len(once) * 2


def sdpa_math() -> AbstractContextManager[None]:
    return sdpa_kernel(SDPBackend.MATH)


@contextmanager
def tf32() -> Iterator[None]:
    with rounded_to("tf32", torch.backends.cuda.matmul):
        yield


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("setting", [sdpa_math, tf32, deterministic])
def test_recordings_are_of_the_kernels_that_torch_would_choose(
    setting: Callable[[], AbstractContextManager[None]],
) -> None:
    ranks: list[int] = []
    placed = placed_at_random(Split(), (torch.randn(4, 8),), {}, 0, 2)
    replaying(placed, ranks=ranks).most_shapes = 2

    def train(calls: int) -> None:
        for _ in range(calls):
            sum(y.square().sum() for y in placed(torch.randn(4, 8))).backward()

    train(WARM_UP + 1)
    once = list(ranks)
    assert once
    with setting():
        train(WARM_UP)
        assert ranks == once
        train(1)
        assert ranks == once * 2
    train(2)
    assert ranks == once * 2  # those of before


class Rows(nn.Module):
    """What runs at any number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x))) / x.shape[0]


def family_of_rows(most: int) -> tuple[nn.Module, baechi.PlacedModule, Graphs, list[int]]:
    """A model, and it placed for any number of rows, with graphs of so many shapes kept."""
    torch.manual_seed(0)
    model = Rows()
    placed = lazily(copy.deepcopy(model))
    for n in (2, 3):
        step(placed, (torch.randn(n, 4),), {})
    ranks: list[int] = []
    graphs = replaying(placed, ranks=ranks)
    graphs.most_shapes = most
    return model, placed, graphs, ranks


def train_rows(model: nn.Module, placed: nn.Module, n: int, calls: int) -> None:
    for _ in range(calls):
        x = torch.randn(n, 4)
        for module in (model, placed):
            module.zero_grad()
        for one, two in zip(step(model, (x,), {}), step(placed, (x,), {}), strict=True):
            assert torch.equal(one, two)


def test_graphs_of_the_latest_shapes_are_kept() -> None:
    model, placed, graphs, ranks = family_of_rows(2)
    mode = graphs._modes[True]
    for n in (2, 3):
        train_rows(model, placed, n, WARM_UP + 1)
    once = len(ranks)
    assert once
    for n in (2, 3, 2, 3, 2):
        train_rows(model, placed, n, 1)
    assert len(ranks) == once  # all of them were replays
    rows_of_3 = weakref.ref(next(iter(mode.shapes.values()))[0].statics)
    train_rows(model, placed, 5, WARM_UP)
    assert len(ranks) == once  # what is not captured yet drops nothing
    assert rows_of_3() is not None
    train_rows(model, placed, 5, 1)
    gc.collect()
    assert rows_of_3() is None
    assert len(mode.shapes) == 2
    again = len(ranks)
    train_rows(model, placed, 2, 1)
    assert len(ranks) == again
    train_rows(model, placed, 3, WARM_UP + 1)
    assert len(ranks) > again
    for module in (model, placed):
        module.first.weight.data = module.first.weight.data * 2  # addresses are in all graphs
    for n in (2, 3):
        train_rows(model, placed, n, 1)
    assert not mode.shapes


def test_a_step_of_another_shape_runs_eagerly_until_the_first_went_backward() -> None:
    model, placed, _, _ = family_of_rows(2)
    for n in (2, 3):
        train_rows(model, placed, n, WARM_UP + 1)
    xs = [torch.randn(n, 4) for n in (2, 3)]
    rows = []
    for module in (model, placed):
        module.zero_grad()
        early, late = (module(x) for x in xs)
        (late.sum() + 0).backward()
        early.square().sum().backward()
        rows.append([early, late, *(p.grad for p in module.parameters())])
    for one, two in zip(*rows, strict=True):
        assert torch.equal(one, two)


def test_shapes_whose_eager_calls_are_counted_are_forgotten_in_time() -> None:
    _, placed, graphs, _ = family_of_rows(1)
    with torch.no_grad():
        for n in range(2, 100):
            placed(torch.randn(n, 4))
    assert len(graphs._modes[False]._warming.calls) == 64


def test_inference_in_a_training_placement_has_recordings_of_its_own() -> None:
    reference, placed, _ = two_heads()
    warm(placed)
    for _ in range(WARM_UP + 2):
        x = torch.randn(4, 8)
        with torch.no_grad():
            assert_same(list(reference(x)), list(placed(x)))
        losses = [sum(y.square().sum() for y in m(x)) for m in (reference, placed)]
        rows = zip((reference, placed), losses, strict=True)
        assert_same(*(gradients(module, loss) for module, loss in rows))


@pytest.mark.parametrize("failing", range(8))
def test_what_cannot_be_captured_runs_eagerly_and_says_so(failing: int) -> None:
    torch.manual_seed(0)
    model = Split()
    reference = copy.deepcopy(model)
    placed = placed_at_random(model, (torch.randn(4, 8),), {}, 1, 2)
    count = iter(range(1000))
    graphs = replaying(placed, refuse=lambda: next(count) == failing)
    x = torch.randn(4, 8)
    for _ in range(WARM_UP + 3):
        losses = [sum(y.square().sum() for y in m(x)) for m in (reference, placed)]
        rows = zip((reference, placed), losses, strict=True)
        assert_same(*(gradients(module, loss) for module, loss in rows))
    assert failing < next(count)
    (reason,) = filter(None, graphs.reasons)
    assert reason.endswith("it could not be captured: not permitted when stream is capturing")


@pytest.mark.parametrize(("n_devices", "fails"), [(1, 2), (1, 3), (2, 3)])
def test_a_backward_that_cannot_be_captured_leaves_all_else_replayed(
    n_devices: int, fails: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forward, and the backward for other gradients; lanes remain one graph."""
    reference, placed, _ = two_heads(n_devices=n_devices)
    count, eager = itertools.count(1), []
    usual = TapeCode.forward

    def forward(code: TapeCode, step: Any) -> None:
        eager.append(code.index)
        usual(code, step)

    monkeypatch.setattr(TapeCode, "forward", forward)
    graphs = replaying(placed, lambda: next(count) == fails, whole=n_devices > 1)
    x = torch.randn(4, 8)
    for heads in [(0, 1)] * (WARM_UP + 1) + [(0,)] * 4 + [(0, 1)]:
        outputs = [module(x) for module in (reference, placed)]
        losses = [sum(row[head].square().sum() for head in heads) for row in outputs]
        assert_same(*map(gradients, (reference, placed), losses))
    assert len(eager) == (WARM_UP + 1) * len(graphs.reasons)
    assert next(count) == 4  # the forward, and once each of both backwards
    (remark,) = graphs.remarks
    wrong = "a backward of it could not be captured: not permitted when stream is capturing"
    assert remark.endswith(wrong)


def test_what_runs_eagerly_is_counted_and_may_be_refused() -> None:
    _, placed, graphs = two_heads()
    n = len(graphs.reasons)
    graphs.demand()
    assert graphs.remarks == ()
    executable = placed._current
    bound, places = executable._executor.bound, executable.places
    none = Graphs(executable.module, executable.program, bound, places)
    reason = "a cpu device has no CUDA graphs"
    assert none.remarks == (f"{n} of {n} tapes run without CUDA graphs: {reason}",)
    with pytest.raises(baechi.InputError, match=f"{n} of {n} tapes cannot be captured"):
        none.demand()


def test_a_tape_that_launches_nothing_is_no_reason_to_refuse() -> None:
    placed = placed_at_random(Fan(), (torch.randn(3, 4),), {}, 4, 2)
    graphs = replaying(placed)
    assert "it launches nothing" in graphs.reasons
    graphs.demand()


def test_gradients_are_the_callers_to_keep() -> None:
    _, placed, _ = two_heads()
    warm(placed)
    x = torch.randn(4, 8, requires_grad=False)
    kept = []
    for scale in (1.0, 2.0):
        loss = sum(y.square().sum() for y in placed(x * scale))
        kept.append(torch.autograd.grad(loss, list(placed.parameters())))
    copies = [g.clone() for g in kept[1]]
    assert any(not torch.equal(a, b) for a, b in zip(kept[0], copies, strict=True))
    loss = sum(y.square().sum() for y in placed(x * 3.0))
    torch.autograd.grad(loss, list(placed.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(kept[1], copies, strict=True))


def test_a_metered_step_is_no_replay() -> None:
    reference, placed, _ = two_heads()
    warm(placed)
    x = torch.randn(4, 8)
    with placed.metered():
        loss = sum(y.square().sum() for y in placed(x))
    assert_same(
        gradients(reference, sum(y.square().sum() for y in reference(x))), gradients(placed, loss)
    )


def test_measured_steps_are_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that run eagerly and the one that records are over before a step is timed."""
    torch.manual_seed(0)
    placed = placed_at_random(Tied(), (torch.randn(3, 4),), {}, 0, 2)
    graphs = replaying(placed)
    placed._current.graphs = graphs
    begun: list[bool] = []
    begin = Graphs.begin

    def noted(self: Graphs, step: Any, launch: Any) -> bool:
        replayed = begin(self, step, launch)
        if step.meter is None:
            begun.append(replayed)
        return replayed

    monkeypatch.setattr(Graphs, "begin", noted)
    placed.measure(1)
    assert begun[-2:] == [True, True]
