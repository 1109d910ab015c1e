"""Measured steps: what they say, that nothing of them stays, and how they stand in reports."""

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import zoo
from fake_cuda import Gpu
from placed import at_random
from seeds import some
from torch import nn

import baechi
from baechi import InputError, Measurement
from baechi.records.placement import error_of
from baechi.runtime import step_measurement as measuring
from baechi.runtime.executors.cuda_streams import CudaExecutor
from baechi.torch_support.memory_meter import Meter

pytestmark = pytest.mark.usefixtures("one_thread")


class TwoHalves(nn.Module):
    """Two linear layers of known sizes, an activation, a dropout and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.norm = nn.BatchNorm1d(32)
        self.second = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(nn.functional.dropout(self.norm(self.first(x)).tanh(), 0.5))


def placed_halves(*, training: bool = True, optimizer: str | None = None) -> baechi.PlacedModule:
    torch.manual_seed(0)
    model = TwoHalves()
    traced = baechi.trace(model, (torch.randn(4, 16),))
    costs = tuple(baechi.OpCost(10_000, 20_000) for _ in traced.ops)
    profile = baechi.Profile(traced.digest, "", costs)
    graph = traced.graph(profile, training=training, optimizer=optimizer)
    cluster = baechi.Cluster.connected(
        [baechi.Device("cpu:0", "1GiB"), baechi.Device("cpu:1", "1GiB")], baechi.Link(0, 10**12)
    )
    placement = baechi.solve(graph, cluster, placer=baechi.RandomPlacer(3))
    return baechi.apply(traced, placement, graph=graph, cluster=cluster)


def test_a_measurement_has_the_median_of_its_samples_and_a_peak_per_device() -> None:
    placed = placed_halves()
    measured = placed.measure(5)
    assert len(measured.samples_ns) == 5
    assert measured.step_ns == sorted(measured.samples_ns)[2] > 0
    assert len(measured.peak_bytes) == 2
    own = sum(p.nbytes for p in placed.parameters()) + sum(b.nbytes for b in placed.buffers())
    assert sum(measured.peak_bytes) > own
    assert measured.moved_bytes > 0
    assert measured.absent_bytes == ()


def test_an_inference_step_has_no_gradients_in_its_peak() -> None:
    training = placed_halves().measure(1)
    inference = placed_halves(training=False).measure(1)
    assert sum(inference.peak_bytes) < sum(training.peak_bytes)


def test_nothing_of_the_measured_steps_stays() -> None:
    placed = placed_halves()
    placed(torch.randn(4, 16)).sum().backward()
    gradients = {name: p.grad for name, p in placed.named_parameters()}
    values = copy.deepcopy([p.grad for p in placed.parameters()])
    state = copy.deepcopy(placed.state_dict())
    random = torch.get_rng_state()
    placed.measure(2)
    assert torch.equal(torch.get_rng_state(), random)
    for name, parameter in placed.named_parameters():
        assert parameter.grad is gradients[name]
    for parameter, value in zip(placed.parameters(), values, strict=True):
        assert torch.equal(parameter.grad, value)
    for name, value in placed.state_dict().items():
        assert torch.equal(value, state[name]), name


@pytest.mark.parametrize("stops_at", [1, 4, 6])  # warming up, timed, metered
def test_an_interrupt_passes_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, stops_at: int
) -> None:
    placed = placed_halves()
    state = copy.deepcopy(placed.state_dict())
    real, seen = measuring.canonical_call, []

    def stop(*args: object) -> object:
        seen.append(1)
        if len(seen) == stops_at:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(measuring, "canonical_call", stop)
    with pytest.raises(KeyboardInterrupt):
        placed.measure(3)
    assert all(parameter.grad is None for parameter in placed.parameters())
    for name, value in placed.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert "measured" not in placed.report()
    monkeypatch.undo()
    assert placed.measure(1).step_ns > 0


def test_state_that_is_planned_and_absent_is_named_until_the_optimizer_has_it() -> None:
    placed = placed_halves(optimizer="adam")
    trained = [p.nbytes for p in placed.parameters()]
    optimizer = torch.optim.Adam(placed.parameters())
    without = placed.measure(1, optimizer=optimizer)  # it has made no step yet
    assert without == placed._current.measured
    assert sum(without.absent_bytes) >= 2 * sum(trained)
    placed(torch.randn(4, 16)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with_state = placed.measure(1, optimizer=optimizer)
    assert with_state.absent_bytes == ()
    state = [v for row in optimizer.state.values() for v in row.values()]
    grown = sum(with_state.peak_bytes) - sum(without.peak_bytes)
    assert grown == pytest.approx(sum(tensor.nbytes for tensor in state), rel=0.02)


def test_the_report_has_the_error_once_there_is_a_measurement(tmp_path) -> None:
    pytest.importorskip("plotly")
    placed = placed_halves(optimizer="momentum")
    assert "Predicted beside measured" not in placed.report()
    placed.measure(1)
    text = placed.report(tmp_path / "page.html")
    assert "Predicted beside measured" in text
    assert "of optimizer state" in text
    assert " %" in text
    assert "Predicted beside measured" in (tmp_path / "page.html").read_text()


def test_each_shape_of_call_keeps_its_own_measurement() -> None:
    placed = baechi.place(
        TwoHalves(),
        {"cpu:0": "1GiB"},
        example_args=(torch.randn(4, 16),),
        progress=False,
        dynamic=False,
    )
    placed.measure(1)
    assert "Predicted beside measured" in placed.report()
    placed(torch.randn(6, 16))
    assert "Predicted beside measured" not in placed.report()
    placed(torch.randn(4, 16))
    assert "Predicted beside measured" in placed.report()


@pytest.mark.parametrize(
    "name", some(["gpt2", "resnet_train", "clip", "lstm_lm", "nn_transformer"], 3)
)
def test_models_are_measured_with_their_own_loss_or_the_sum_of_outputs(name: str) -> None:
    model, args, kwargs = getattr(zoo, name)()
    traced = baechi.trace(model, args, kwargs)
    costs = tuple(baechi.OpCost(10_000, 20_000) for _ in traced.ops)
    graph = traced.graph(baechi.Profile(traced.digest, "", costs), training=True)
    cluster = baechi.Cluster.connected([baechi.Device("cpu:0", "1GiB")], baechi.Link(0, 1))
    placement = baechi.solve(graph, cluster)
    placed = baechi.apply(traced, placement, graph=graph, cluster=cluster)
    (peak,) = placed.measure(1).peak_bytes
    trained = sum(p.nbytes for p in model.parameters())
    assert peak > 2 * trained  # parameters and gradients: there was a backward


def test_an_input_that_is_written_is_fresh_in_every_step() -> None:
    model, args, kwargs = zoo.input_written()
    before = [tensor.clone() for tensor in args]
    traced = baechi.trace(model, args, kwargs)
    costs = tuple(baechi.OpCost(10_000, 20_000) for _ in traced.ops)
    graph = traced.graph(baechi.Profile(traced.digest, "", costs), training=True)
    cluster = baechi.Cluster.connected([baechi.Device("cpu:0", "1GiB")], baechi.Link(0, 1))
    placed = baechi.apply(traced, baechi.solve(graph, cluster), graph=graph, cluster=cluster)
    placed.measure(2)
    for tensor, value in zip(args, before, strict=True):
        assert torch.equal(tensor, value)


@pytest.mark.parametrize("steps", [0, -1, 2.5, True])
def test_a_wrong_number_of_steps_is_refused(steps: object) -> None:
    with pytest.raises(InputError, match="must be a positive integer"):
        placed_halves().measure(steps)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ((-1, (), ()), "step_ns measured is -1"),
        ((1, (2.5,), ()), "one of the peak_bytes measured is 2.5"),
        ((1, (), (-3,)), "one of the samples_ns measured is -3"),
        ((1, (1,), (1,), -1), "moved_bytes measured is -1"),
        ((1, (1, 2), (1,), 0, (1,)), "absent_bytes is of 1 devices and peak_bytes of 2"),
    ],
)
def test_a_wrong_measurement_is_refused(fields: tuple, text: str) -> None:
    with pytest.raises(InputError, match=text):
        Measurement(*fields)


def test_an_error_is_a_share_of_what_was_measured() -> None:
    assert error_of(110, 100) == pytest.approx(0.1)
    assert error_of(50, 100) == -0.5
    assert error_of(0, 0) == 0
    assert error_of(1, 0) is None


class Looked(nn.Module):
    """Looks up rows, and gives a sparse gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4, sparse=True)
        self.layer = nn.Linear(4, 4)

    def forward(self, rows: torch.Tensor, mine: torch.Tensor) -> torch.Tensor:
        seen = nn.functional.embedding(rows, mine, sparse=True)
        return self.layer(self.table(rows) + seen).sum()


@pytest.mark.parametrize("devices", [1, 2])
def test_sparse_gradients_are_counted(devices: int) -> None:
    args = torch.tensor([1, 2]), torch.randn(9, 4, requires_grad=True)
    placed = at_random(Looked(), args, seed=1, devices=devices)
    measured = placed.measure(1)
    assert sum(measured.peak_bytes) > sum(p.nbytes for p in placed.parameters())


class _Allocator:
    """Counts as a GPU's caching allocator does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.live = self.peak = 0
        for name, function in (
            ("synchronize", lambda _: None),
            ("reset_peak_memory_stats", lambda _: setattr(self, "peak", self.live)),
            ("memory_allocated", lambda _: self.live),
            ("max_memory_allocated", lambda _: self.peak),
        ):
            monkeypatch.setattr(torch.cuda, name, function)

    def take(self, nbytes: int) -> None:
        self.live += nbytes
        self.peak = max(self.peak, self.live)


def test_inputs_count_on_a_gpu_once_where_they_are_copied_or_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    allocator = _Allocator(monkeypatch)

    class Steps:
        """Has two inputs of 400 bytes; copies one, writes into the other, and makes 1,000 more."""

        def clear(self) -> None:
            self.inputs: tuple[torch.Tensor, ...] = ()
            allocator.live = 0

        def step(self, reading: measuring.Reading, meter: Meter) -> None:
            self.inputs = torch.zeros(100), torch.zeros(100)
            allocator.take(800)
            meter.hold(0, self.inputs[1])
            reading(lambda: allocator.take(400 + 1000))
            reading(lambda: allocator.take(0))

    @contextlib.contextmanager
    def metered() -> Iterator[Meter]:
        yield Meter([50])

    steps: Any = Steps()
    gpu: Any = Gpu()
    assert measuring._peaks(steps, metered, [gpu]) == ((50 + 800 + 1000,), 0)


def test_what_is_sent_between_torch_devices_counts_as_moved() -> None:
    """Copies to `cpu:0` are as those to a GPU: torch names no tensor's device so."""
    placed = placed_halves()
    executable = placed._current
    with placed.metered() as handed_over:
        placed(torch.randn(4, 16)).sum().backward()
    bound, n = executable._counted.bound, len(executable.places)
    program = executable._counted._program
    elsewhere = [torch.device("cpu", 0)] * n
    executable.__dict__["_counted"] = CudaExecutor(program, bound, elsewhere)
    with placed.metered() as sent:
        placed(torch.randn(4, 16)).sum().backward()
    assert sent.moved_bytes == handed_over.moved_bytes > 0


def placed_on_gpu(names: list[str]) -> baechi.PlacedModule:
    torch.manual_seed(0)
    x = torch.randn(4, 16, device="cuda:0")
    traced = baechi.trace(TwoHalves().to("cuda:0"), (x,))
    costs = tuple(baechi.OpCost(10_000, 20_000) for _ in traced.ops)
    graph = traced.graph(baechi.Profile(traced.digest, "", costs), training=True)
    rows = [baechi.Device(name, "1GiB") for name in names]
    cluster = baechi.Cluster.connected(rows, baechi.Link(0, 10**12))
    placer = baechi.RandomPlacer(3) if len(names) > 1 else "single"
    placement = baechi.solve(graph, cluster, placer=placer)
    return baechi.apply(traced, placement, graph=graph, cluster=cluster)


@pytest.mark.gpu
def test_the_allocator_tells_the_peak_of_a_gpu_that_is_one_device() -> None:
    placed = placed_on_gpu(["cuda:0"])
    other = torch.zeros(1 << 24, device="cuda:0")  # somebody else's memory is not the step's
    (peak,) = placed.measure(3).peak_bytes
    own = sum(p.nbytes for p in placed.parameters())
    assert 2 * own < peak < other.nbytes


@pytest.mark.gpu
def test_logical_devices_of_one_gpu_have_a_peak_each() -> None:
    placed = placed_on_gpu(["cuda:0/a", "cuda:0/b"])
    measured = placed.measure(3)
    own = sum(p.nbytes for p in placed.parameters())
    assert min(measured.peak_bytes) > 0
    assert sum(measured.peak_bytes) > 2 * own
    assert measured.step_ns > 0


class Thinned(nn.Module):
    """Returns rows drawn at random, of another number each time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)[torch.rand(len(x)) > 0.5]


def test_steps_whose_outputs_have_other_sizes_each_time_are_measured() -> None:
    placed = at_random(Thinned(), (torch.randn(64, 8),))
    assert len(placed.measure(5).samples_ns) == 5
