"""What the emulated CUDA can show and a GPU cannot, or seldom: layouts, failures, limits, times."""

import copy
import gc
import sys
import threading
from typing import Any

import emulated
import pytest
import torch
import zoo
from on_gpus import (
    GPUS,
    LANES,
    TOLERANCES,
    TWO_GPUS,
    Branches,
    placed_as,
    placed_randomly,
    script,
    step,
    to_gpu,
)
from torch import nn
from torch.nn import functional

import baechi
from baechi.program.flights import flights
from baechi.runtime.executable import Executable
from baechi.runtime.executors.cuda_graphs import WARM_UP

FAILURES = (RuntimeError, baechi.ExecutionError)  # torch's own, and in an operator
pytestmark = [pytest.mark.gpu, emulated.alone]


def assert_same_steps(
    reference: nn.Module, placed: nn.Module, args: Any, kwargs: Any, steps: int = 2
) -> None:
    for _ in range(steps):
        for one, other in zip(
            step(reference, args, kwargs), step(placed, args, kwargs), strict=True
        ):
            torch.testing.assert_close(other, one, **TOLERANCES)


class Attention(nn.Module):
    """Attention as nanoGPT writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 72 if i % 2 == 0 else 24) for i in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        for inner, outer in zip(self.layers[::2], self.layers[1::2], strict=True):
            q, k, v = (y.view(b, t, 4, c // 4).transpose(1, 2) for y in inner(x).split(c, 2))
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + outer(y.transpose(1, 2).contiguous().view(b, t, c))
        return x


class Pictures(nn.Module):
    """Convolutions whose results are viewed."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.max_pool2d(self.norm(self.first(x)).relu(), 2)
        rows = self.second(x).permute(0, 2, 3, 1).contiguous()
        return rows.view(rows.shape[0], -1).tanh()


@pytest.mark.parametrize("cuda_graphs", [False, "auto"])
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(
    ("model", "shape"),
    [(Attention, (2, 5, 24)), (Pictures, (2, 3, 8, 8))],
    ids=["attention", "pictures"],
)
def test_kernels_may_lay_their_results_out_otherwise_than_in_the_trace(
    model: type[nn.Module], shape: tuple[int, ...], seed: int, cuda_graphs: Any
) -> None:
    own, x = model(), torch.randn(shape)
    reference = copy.deepcopy(own).to("cuda:0")
    with emulated.settings(LAYOUTS=seed):
        placed = placed_randomly(own, (x,), {}, LANES[:2], seed, cuda_graphs=cuda_graphs)
        assert_same_steps(reference, placed, (x.to("cuda:0"),), {}, WARM_UP + 2)
    if cuda_graphs:
        assert "" in placed._current.graphs.reasons


@pytest.mark.parametrize("name", ["gpt2", "vit", "inception", "resnet_eval", "clip"])
def test_the_models_of_the_zoo_run_under_other_layouts(name: str) -> None:
    model, args, kwargs = zoo.MODELS[name]()
    reference = copy.deepcopy(model).to("cuda:0")
    with emulated.settings(LAYOUTS=1):
        placed = placed_randomly(model, args, kwargs, LANES[:2], 0)
        assert_same_steps(reference, placed, *to_gpu((args, kwargs)))


def test_no_kernel_reads_the_memory_of_another_gpu_or_of_the_host() -> None:
    x = torch.ones(4, device="cuda:0")
    with pytest.raises(RuntimeError, match="expected all tensors to be on the same device"):
        torch.add(x, torch.ones(4))
    if torch.cuda.device_count() > 1:
        with pytest.raises(RuntimeError, match="expected all tensors to be on the same device"):
            torch.add(x, x.to("cuda:1"))


@pytest.mark.parametrize("told", [True, False])
def test_memory_that_is_let_go_of_too_early_has_no_numbers(told: bool) -> None:
    """Unless the allocator is told of the other stream that reads it."""
    side, right = torch.cuda.Stream(), []
    for _ in range(20):
        x = torch.ones(700_000, device="cuda:0")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(1_000)
            y = x + 1
        if told:
            x.record_stream(side)
        del x
        torch.empty(700_000, device="cuda:0")  # what takes it next
        torch.cuda.synchronize()
        right.append(bool((y == 2).all()))
    assert all(right) == told


@pytest.mark.multigpu
def test_a_kernel_on_the_stream_of_another_gpu_is_refused() -> None:
    x, other = torch.ones(4, device="cuda:0"), torch.cuda.Stream("cuda:1")
    falsely = torch.cuda.ExternalStream(other.cuda_stream, device="cuda:0")
    with torch.cuda.stream(falsely), pytest.raises(RuntimeError, match="invalid resource handle"):
        x + 1


def launches_of(run: Any) -> int:
    gc.collect()  # what it frees calls the runtime, too
    before = emulated.calls()
    run()
    return (emulated.calls() - before)["cudaLaunchKernel"]


@pytest.mark.parametrize("devices", [LANES, TWO_GPUS])
def test_a_step_whose_nth_launch_fails_leaves_nothing_half_done(devices: list[str]) -> None:
    model = Branches().to("cuda:0")
    reference, x = copy.deepcopy(model), torch.randn(8, 256, device="cuda:0")
    placed = placed_randomly(model, (x,), {}, devices, 0)
    expected = step(reference, (x,), {})
    count = launches_of(lambda: step(placed, (x,), {}))
    held = set()
    gc.collect()  # what earlier tests have left
    for number in range(1, count, max(1, count // 25)):
        placed.zero_grad(set_to_none=True)
        with emulated.settings(FAIL_AT=number), pytest.raises(FAILURES, match="too many resources"):
            step(placed, (x,), {})
        for one, other in zip(expected, step(placed, (x,), {}), strict=True):
            torch.testing.assert_close(other, one, **TOLERANCES)
        placed.zero_grad(set_to_none=True)
        held.add(torch.cuda.memory_allocated())
    assert len(held) == 1  # nothing of a failed step stays


def test_a_launch_that_fails_in_a_capture_leaves_the_step_right() -> None:
    model = Branches().to("cuda:0")
    reference, x = copy.deepcopy(model), torch.randn(8, 256, device="cuda:0")
    expected = step(reference, (x,), {})
    placed = placed_randomly(model, (x,), {}, LANES[:2], 0, cuda_graphs="auto")
    count = launches_of(lambda: step(placed, (x,), {}))
    for number in range(1, count, max(1, count // 6)):
        again = placed_randomly(
            copy.deepcopy(reference), (x,), {}, LANES[:2], 0, cuda_graphs="auto"
        )
        for _ in range(WARM_UP):
            step(again, (x,), {})
        for fails in (True, False, False):
            with emulated.settings(**({"FAIL_AT": number} if fails else {})):
                try:
                    rows = step(again, (x,), {})
                except FAILURES as error:
                    if not fails or "too many resources" not in str(error):
                        raise
                    continue
            for one, other in zip(expected, rows, strict=True):
                torch.testing.assert_close(other, one, **TOLERANCES)


_STICKS = """
import emulated, on_gpus, torch
import baechi
model, x = on_gpus.Branches().to("cuda:0"), torch.randn(8, 256, device="cuda:0")
placed = on_gpus.placed_randomly(model, (x,), {}, on_gpus.LANES, 0)
on_gpus.step(placed, (x,), {})
with emulated.settings(FAIL_AT=5, FAIL_STICKS=1):
    for _ in range(2):
        try:
            on_gpus.step(placed, (x,), {})
        except (RuntimeError, baechi.ExecutionError) as error:
            assert "illegal memory access" in str(error), error
            print(type(error).__name__)
"""


def test_an_error_that_sticks_is_told_by_its_own_name() -> None:
    assert len(script(_STICKS)[0].splitlines()) == 2


_LIMITED = """
import baechi, emulated, on_gpus, torch
from torch import nn
model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.GELU())])
model, x = model.to("cuda:0"), torch.randn(4096, 512, device="cuda:0")
placed = on_gpus.placed_randomly(model, (x,), {}, on_gpus.LANES[:2], 0)
def step(x):
    placed.zero_grad(set_to_none=True)
    placed(x).sum().backward()
step(x)
torch.cuda.synchronize()
reserved = torch.cuda.memory_reserved() + (500 << 20)
placed.zero_grad(set_to_none=True)
resident = torch.cuda.memory_allocated()
torch.cuda.empty_cache()
with emulated.settings(MEMORY=reserved):
    for _ in range(2):
        step(x)  # as much as it takes is enough
assert torch.cuda.memory_stats()["num_ooms"] == 0
with emulated.settings(MEMORY=reserved * 2 // 3 + (150 << 20)):
    placed.zero_grad(set_to_none=True)
    torch.cuda.empty_cache()
    for _ in range(2):
        try:
            step(x)
        except baechi.ExecutionError as error:
            assert "CUDA out of memory" in str(error), error
            print("out of memory")
placed.zero_grad(set_to_none=True)
assert torch.cuda.memory_allocated() == resident  # nothing of the failed steps is held
step(x)
print("through")
"""


def test_a_step_that_runs_out_of_memory_holds_none() -> None:
    assert script(_LIMITED)[0].splitlines() == ["out of memory"] * 2 + ["through"]


def active_bytes(which: str) -> list[int]:
    """The "current" or "peak" bytes of every GPU, with what is let go of and not free yet."""
    return [torch.cuda.memory_stats(gpu)[f"active_bytes.all.{which}"] for gpu in GPUS]


def forget_peaks() -> None:
    for gpu in GPUS:
        torch.cuda.synchronize(gpu)
        torch.cuda.reset_peak_memory_stats(gpu)


@pytest.mark.multigpu
def test_no_peak_depends_on_how_far_the_host_is_ahead() -> None:
    """What a stream was told of stays until that has come so far."""
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(6)]).to("cuda:0")
    x = torch.randn(8, 512, device="cuda:0", requires_grad=True)
    placed = placed_as(model, (x,), GPUS, lambda op: op // 4 % 2)
    side = [torch.cuda.Stream(gpu) for gpu in GPUS]

    def peaks(*, waits: bool, told: bool = False) -> list[int]:
        forget_peaks()
        for _ in range(6):
            placed.zero_grad(set_to_none=True)
            x.grad = None
            placed(x).square().mean().backward()
            for stream in side if told else ():
                stream.wait_stream(torch.cuda.current_stream(stream.device))
            for parameter in placed.parameters() if told else ():
                parameter.grad.record_stream(side[parameter.device.index])
            for gpu in GPUS if waits else ():
                torch.cuda.synchronize(gpu)
        return active_bytes("peak")

    with emulated.settings(CLOCK=1, KERNEL_NS=1_000_000):  # and the host takes no time
        peaks(waits=True)
        usual = peaks(waits=True)
        assert peaks(waits=False) == usual
        more = peaks(waits=False, told=True)
    assert all(one > other for one, other in zip(more, usual, strict=True)), (more, usual)


def test_recordings_are_made_in_the_thread_that_has_warmed_up() -> None:
    """What libraries prepare for each thread is not prepared in a capture."""
    model = Branches().to("cuda:0").eval()
    x = torch.randn(8, 256, device="cuda:0")
    with torch.no_grad():
        expected = model(x)
        placed = placed_randomly(model, (x,), {}, LANES[:1], 0, training=False, cuda_graphs="auto")
        found: list[torch.Tensor] = []

        def call() -> None:
            with torch.no_grad():
                found.append(placed(x))

        def call_elsewhere() -> None:
            thread = threading.Thread(target=call)
            thread.start()
            thread.join()

        with emulated.settings(PLANS=1):
            for each in (
                *[call] * WARM_UP,
                *[call_elsewhere] * (WARM_UP + 1),
                call,
                call_elsewhere,
            ):
                each()
    for other in found:
        torch.testing.assert_close(other, expected, **TOLERANCES)
    assert len(found) == 2 * WARM_UP + 3
    assert set(placed._current.graphs.reasons) == {""}


class Ends(nn.Module):
    """Two results of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 6), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.one(x).tanh(), self.two(x).tanh()


def test_a_loss_of_other_results_is_warmed_up_before_it_is_recorded() -> None:
    model, x = Ends().to("cuda:0"), torch.randn(3, 8, device="cuda:0")
    reference = copy.deepcopy(model)
    placed = placed_randomly(model, (x,), {}, LANES[:1], 0, cuda_graphs="auto")
    with emulated.settings(PLANS=1):
        for which in (*[0] * (WARM_UP + 2), *[1] * 3):
            for module in (placed, reference):  # what one has warmed up is warm for the other
                module.zero_grad(set_to_none=True)
                module(x)[which].square().sum().backward()
            for one, other in zip(reference.parameters(), placed.parameters(), strict=True):
                torch.testing.assert_close(other.grad, one.grad, **TOLERANCES)
    assert set(placed._current.graphs.reasons) == {""}


@pytest.mark.parametrize("devices", [LANES, TWO_GPUS])
def test_steps_of_two_streams_go_backward_together(devices: list[str]) -> None:
    model = Branches().to("cuda:0")
    reference = copy.deepcopy(model)
    xs = [torch.randn(8, 256, device="cuda:0") for _ in range(2)]
    sum(reference(x).square().mean() for x in xs).backward()
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    for seed in range(6):
        placed = placed_randomly(copy.deepcopy(model), (xs[0],), {}, devices, seed)
        losses = []
        for x, stream in zip(xs, streams, strict=True):
            stream.wait_stream(streams[0])
            with torch.cuda.stream(stream):
                losses.append(placed(x).square().mean())
        streams[0].wait_stream(streams[1])
        torch.stack([loss.to("cuda:0") for loss in losses]).sum().backward()
        for one, other in zip(reference.parameters(), placed.parameters(), strict=True):
            torch.testing.assert_close(other.grad.cpu(), one.grad.cpu(), **TOLERANCES)


_TWO_IN_FLIGHT = """
import threading
import baechi, on_gpus, torch
from torch import nn

class Ends(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = (nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))

    def forward(self, x):
        y, z = self.one(x), self.two(x)
        return y + z.tanh(), z + y.tanh()

torch.manual_seed(0)
model, xs = Ends().to("cuda:0"), [torch.randn(4, 8, device="cuda:0") for _ in range(2)]
def losses(module):
    (a, _), (_, b) = module(xs[0]), module(xs[1])
    return a.sum().to("cuda:0") + b.sum().to("cuda:0")
losses(model).backward()
expected = [p.grad.cpu() for p in model.parameters()]
model.zero_grad()
for seed in range(8):
    placed = on_gpus.placed_randomly(model, (xs[0],), {}, on_gpus.GPUS, seed)
    for _ in range(6):
        placed.zero_grad()
        losses(placed).backward()
        for one, other in zip(expected, placed.parameters()):
            torch.testing.assert_close(other.grad.cpu(), one)
    def train():
        for _ in range(6):
            losses(placed).backward()
    threads = [threading.Thread(target=train) for _ in range(2)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    placed = placed.unplace().to("cuda:0")
print("through")
"""


@pytest.mark.multigpu
def test_two_steps_in_flight_whose_outputs_are_on_two_gpus_never_block() -> None:
    assert script(_TWO_IN_FLIGHT, 120)[0] == "through"


def step_ns(run: Any) -> int:
    """The virtual time of a step, from nothing launched to everything done."""
    torch.cuda.synchronize()
    begun = emulated.now_ns()
    run()
    torch.cuda.synchronize()
    return emulated.now_ns() - begun


class Two(nn.Module):
    """Two chains of eight layers, and their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.chains = nn.ModuleList(
            nn.Sequential(*[nn.Linear(32, 32) for _ in range(8)]) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.chains[0](x) + self.chains[1](x)


def two_on(devices: list[str], *, training: bool, cuda_graphs: Any = False) -> Any:
    """The placed model, which is planned with 100 us for every operator, and a step of it."""
    model, x = Two().to("cuda:0"), torch.randn(4, 32, device="cuda:0")
    traced = baechi.trace(model, (x,))
    costs = tuple(baechi.OpCost(100_000, 200_000) for _ in traced.ops)
    graph = traced.graph(baechi.Profile(traced.digest, "", costs), training=training)
    rows = [baechi.Device(name, "4GiB") for name in devices]
    cluster = baechi.Cluster.connected(rows, baechi.Link(1_000, 10**12))
    placement = baechi.solve(graph, cluster, placer="m-etf")
    placed = baechi.apply(traced, placement, graph=graph, cluster=cluster, cuda_graphs=cuda_graphs)

    def run() -> None:
        with torch.set_grad_enabled(training):
            y = placed(x)
        if training:
            placed.zero_grad(set_to_none=True)
            y.sum().backward()

    for _ in range(WARM_UP + 2):
        run()
    return placed, run


def test_the_clock_tells_who_waits_for_whom() -> None:
    x = torch.ones(4, device="cuda:0")
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def run(*, waits: bool) -> None:
        for number, stream in enumerate(streams):
            stream.wait_stream(torch.cuda.current_stream())
            if number and waits:
                stream.wait_stream(streams[0])
            with torch.cuda.stream(stream):
                events[0].record()
                for _ in range(5):
                    x + 1
                events[1].record()

    with emulated.settings(CLOCK=1, KERNEL_NS=100_000):
        assert step_ns(lambda: run(waits=False)) == 500_000  # side by side
        assert step_ns(lambda: run(waits=True)) == 1_000_000
        assert events[0].elapsed_time(events[1]) == pytest.approx(0.5)
        with emulated.settings(cudaLaunchKernel=200_000):
            assert step_ns(lambda: run(waits=False)) == 10 * 200_000 + 100_000


@pytest.mark.parametrize("devices", [LANES[:2], TWO_GPUS])
@pytest.mark.parametrize("cuda_graphs", [False, "auto"])
def test_a_step_takes_no_longer_than_the_plan_lets_it(devices: list[str], cuda_graphs: Any) -> None:
    """Where the host costs nothing, lanes wait for nothing but what they read."""
    with emulated.settings(CLOCK=1, KERNEL_NS=100_000, COPY_NS=1_000):
        placed, run = two_on(devices, training=False, cuda_graphs=cuda_graphs)
        assert 900_000 <= step_ns(run) <= placed.schedule.makespan_ns
        _, alone = two_on(LANES[:1], training=True, cuda_graphs=cuda_graphs)
        _, run = two_on(devices, training=True, cuda_graphs=cuda_graphs)
        assert step_ns(run) < 0.55 * step_ns(alone)


@pytest.mark.multigpu
def test_copies_run_beside_what_computes() -> None:
    """The sum waits for a copy, and the chain beside it for none."""
    with emulated.settings(CLOCK=1, KERNEL_NS=100_000, COPY_NS=300_000):
        _, run = two_on(["cuda:0", "cuda:1"], training=False)
        assert step_ns(run) <= 300_000 + 800_000 + 300_000 + 100_000


def test_short_kernels_are_bound_by_their_launches_and_graphs_are_not() -> None:
    """So a second lane gains nothing there, whatever a plan without the host's time predicts."""
    host = {"CALL_NS": 1_000, "cudaLaunchKernel": 10_000, "cudaGraphLaunch": 7_000}
    with emulated.settings(CLOCK=1, KERNEL_NS=2_000, **host):
        one, two = (step_ns(two_on(LANES[:n], training=True)[1]) for n in (1, 2))
        assert one > 60 * 10_000
        assert two > one
        assert step_ns(two_on(LANES[:1], training=True, cuda_graphs=True)[1]) < 0.4 * one


def test_a_replayed_call_is_few_calls_of_python() -> None:
    """A graph of small kernels takes the GPU some ten microseconds, and a call of Python one."""
    _, run = two_on(LANES[:1], training=False, cuda_graphs=True)
    calls = 0

    def count(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    assert calls < 400


# How often a step of `Two` calls the runtime, beside kernels. Each costs the host a microsecond,
# and Python some more: where there are fewer now, enter the new number.
@pytest.mark.parametrize(
    ("devices", "training", "cuda_graphs", "counts"),
    [
        (LANES[:1], False, False, {}),
        (LANES[:1], True, False, {}),
        (LANES[:1], True, "auto", {"Graph": 2, "Record": 2, "Wait": 2, "Copy": 2}),
        (LANES[:2], False, False, {"Record": 11, "Wait": 12, "Copy": 1}),
        (LANES[:2], True, False, {"Record": 26, "Wait": 28, "Copy": 1}),
        (
            *(LANES[:2], True, "auto"),
            {"Graph": 2, "Record": 2, "Wait": 2, "Copy": 2},
        ),
        pytest.param(
            *(["cuda:0", "cuda:1"], False, False),
            {"Record": 25, "Wait": 26, "Copy": 2},
            marks=pytest.mark.multigpu,
        ),
        pytest.param(
            *(["cuda:0", "cuda:1"], True, False),
            {"Create": 17, "Record": 70, "Wait": 72, "Copy": 3},
            marks=pytest.mark.multigpu,
        ),
    ],
)
def test_a_step_calls_the_runtime_so_often(
    devices: list[str], training: bool, cuda_graphs: Any, counts: dict[str, int]
) -> None:
    names = {
        "Create": "cudaEventCreateWithFlags",
        "Record": "cudaEventRecordWithFlags",
        "Wait": "cudaStreamWaitEvent",
        "Copy": "cudaMemcpyAsync",
        "Graph": "cudaGraphLaunch",
    }
    _, run = two_on(devices, training=training, cuda_graphs=cuda_graphs)
    gc.collect()  # what it frees calls the runtime, too
    before = emulated.calls()
    run()
    made = emulated.calls() - before
    assert {short: made[name] for short, name in names.items() if made[name]} == counts
    own = {"cudaLaunchKernel", "cudaEventDestroy", *names.values()}
    # No memory is asked for, and the host waits for nothing.
    assert {name for name in made if not name.startswith("device")} <= own


_ELSEWHERE = """
import emulated, on_gpus, torch
model, x = on_gpus.Branches().to("cuda:1"), torch.randn(8, 256, device="cuda:1")
placed = on_gpus.placed_as(model, (x,), DEVICES, lambda op: 1 if "cuda:0" in DEVICES else op % 2)
for _ in range(2):
    placed(x).sum().backward()
torch.cuda.synchronize(1)
print(emulated.calls()["device 0"])
"""


@pytest.mark.multigpu
@pytest.mark.parametrize("devices", [["cuda:1/a", "cuda:1/b"], ["cuda:0", "cuda:1"]])
def test_a_step_on_the_second_gpu_does_not_use_the_first(devices: list[str]) -> None:
    """Nor where a placement leaves it out."""
    assert script(_ELSEWHERE.replace("DEVICES", repr(devices)))[0] == "0"


@pytest.mark.parametrize("devices", [LANES[:1], LANES, TWO_GPUS])
def test_compiled_segments_are_compiled_once_for_all_threads_and_gpus(devices: list[str]) -> None:
    """Backwards run in threads of autograd, whose state must not make torch compile again."""
    model = Branches().to("cuda:0")
    reference, x = copy.deepcopy(model), torch.randn(8, 256, device="cuda:0")
    placed = placed_randomly(model, (x,), {}, devices, 0, compile={"backend": "aot_eager"})
    graphs = [torch._dynamo.utils.counters["stats"]["unique_graphs"]]
    for _ in range(3):
        assert_same_steps(reference, placed, (x,), {}, 1)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] < graphs[1] == graphs[-1]
    assert not placed.remarks


def square(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return (y - t.to(y.device)).square().mean()


class Skips(nn.Module):
    """Layers that read what is far before them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x
        for layer in self.layers:
            x = torch.tanh(layer(x)) + first
        return x


class Encoded(nn.Module):
    """Layers that read what needs no gradient, so nothing comes back to where that is made."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.first(torch.cos(x))) + self.second(torch.sin(x))


@pytest.mark.parametrize("devices", [TWO_GPUS, LANES])
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("placer", ["round-robin", baechi.RandomPlacer(1)], ids=["turns", "random"])
def test_micro_batches_give_the_loop_and_hold_no_more_than_predicted(
    devices: list[str], inside: bool, placer: Any
) -> None:
    """What crosses streams stays to the end of the step, so it grows with the micro-batches."""
    plain, n = Skips(), 8
    x, t = torch.randn(256 * n, 16), torch.randn(256 * n, 16)
    mine, wanted = x.to("cuda:0"), t.to("cuda:0")
    gc.collect()
    before = active_bytes("current")
    placed = baechi.place(
        copy.deepcopy(plain), devices, microbatches=n, placer=placer, progress=False
    )

    def run() -> torch.Tensor:
        if inside:
            return placed.step(mine, targets=wanted, loss=square)
        loss = square(placed(mine), wanted)
        loss.backward()
        return loss.detach()

    for number in range(3):
        placed.zero_grad()
        if number == 2:
            forget_peaks()
        found = run()
    seen = active_bytes("peak")
    seen = [peak - base for peak, base in zip(seen, before, strict=True)]
    said = placed.rhythm.peak_bytes
    said = list(said) if len(devices) == 2 else [sum(said), 0]
    assert all(mine <= 1.01 * own for mine, own in zip(seen, said, strict=True))
    if inside:
        losses = [square(plain(c), d) / n for c, d in zip(x.chunk(n), t.chunk(n), strict=True)]
        for loss in losses:
            loss.backward()
        total = sum(losses[1:], losses[0])
    else:
        total = square(torch.cat([plain(c) for c in x.chunk(n)]), t)
        total.backward()
    torch.testing.assert_close(found.cpu(), total.detach(), **TOLERANCES)
    for own, other in zip(placed.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad.cpu(), other.grad, **TOLERANCES)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("devices", [LANES, TWO_GPUS])
def test_micro_batches_run_segments_that_are_compiled_once(
    devices: list[str], inside: bool
) -> None:
    torch.manual_seed(0)
    plain, n = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3))), 4
    x, t = torch.randn(16, 16), torch.randn(16, 16)
    placed = baechi.place(
        *(copy.deepcopy(plain), devices),
        microbatches=n,
        placer=baechi.RandomPlacer(1),
        compile={"backend": "aot_eager"},
        progress=False,
    )
    graphs = []
    for _ in range(3):
        placed.zero_grad()
        if inside:
            placed.step(x.to("cuda:0"), targets=t.to("cuda:0"), loss=square)
        else:
            square(placed(x.to("cuda:0")), t.to("cuda:0")).backward()
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert 0 < graphs[0] == graphs[-1]
    square(torch.cat([plain(c) for c in x.chunk(n)]), t).backward()
    for own, other in zip(placed.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad.cpu(), other.grad, **TOLERANCES)
    assert not placed.remarks
    placed.unplace()


@pytest.mark.parametrize("devices", [TWO_GPUS, LANES[:2]])
@pytest.mark.parametrize(
    ("model", "n"), [(Skips, 1), (Skips, 6), (Encoded, 12)], ids=lambda value: str(value)[-12:]
)
@pytest.mark.parametrize(
    "placer", ["single", "round-robin", baechi.RandomPlacer(1)], ids=["one", "turns", "random"]
)
def test_micro_batches_of_a_step_are_replayed_from_a_capture_per_slot(
    devices: list[str], model: type[nn.Module], n: int, placer: Any
) -> None:
    plain = model().to("cuda:0")
    options: Any = {} if n == 1 else {"microbatches": n}
    placed = baechi.place(
        copy.deepcopy(plain), devices, placer=placer, cuda_graphs=True, progress=False, **options
    )
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (plain, placed)]
    launches, captures = [], []
    for number in range(WARM_UP + 4):
        x, t = torch.randn(8 * n, 16, device="cuda:0"), torch.randn(8 * n, 16, device="cuda:0")
        for optimizer in optimizers if number % 3 else ():  # else it is added to what is there
            optimizer.zero_grad()
        total = torch.zeros((), device="cuda:0")
        for c, d in zip(x.chunk(n), t.chunk(n), strict=True):
            loss = square(plain(c), d) * (1 / n)
            loss.backward()
            total = total + loss.detach()
        before = emulated.calls()
        found = placed.step(x, targets=t, loss=square)
        made = emulated.calls() - before
        launches.append(made["cudaGraphLaunch"])
        captures.append(made["cudaStreamBeginCapture"])
        assert torch.equal(found.to("cuda:0"), total)
        for own, other in zip(placed.parameters(), plain.parameters(), strict=True):
            assert torch.equal(own.grad.to("cuda:0"), other.grad)
        for optimizer in optimizers:
            optimizer.step()
    found_slots = flights(placed._current.program)
    assert launches[1:WARM_UP] == [0] * (WARM_UP - 1)
    tapes, rest = divmod(launches[WARM_UP], n)
    assert tapes >= 2
    assert rest == 0
    assert launches[WARM_UP:] == [launches[-1]] * 4
    assert captures[WARM_UP:] == [tapes * found_slots.n, 0, 0, 0]


@pytest.mark.parametrize("devices", [TWO_GPUS])
def test_a_micro_batch_writes_no_memory_that_the_one_before_in_its_slot_still_reads(
    devices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first GPU has nothing to wait for, and one slot for all."""
    n, plain = 6, Encoded().to("cuda:0")
    monkeypatch.setattr(
        Executable, "_turns", lambda _, rows: [(i, b) for b in range(n) for i in range(len(rows))]
    )
    ahead = ("input:x0", "model/cos", "model/sin")
    behind = ("input:x1", "model.first/linear", "model/tanh", "model.second/linear_1", "model/add")
    pins = dict.fromkeys(ahead, devices[0]) | dict.fromkeys(behind, devices[1])
    placed = baechi.place(
        copy.deepcopy(plain),
        devices,
        microbatches=n,
        constraints=baechi.Constraints(pins=pins | dict.fromkeys(("sub", "mean"), devices[1])),
        cuda_graphs=True,
        progress=False,
    )
    for _ in range(WARM_UP + 4):
        x, t = torch.randn(8 * n, 16, device="cuda:0"), torch.randn(8 * n, 16, device="cuda:0")
        for model in (plain, placed):
            model.zero_grad()
        for c, d in zip(x.chunk(n), t.chunk(n), strict=True):
            (square(plain(c), d) * (1 / n)).backward()
        placed.step(x, targets=t, loss=square)
        for own, other in zip(placed.parameters(), plain.parameters(), strict=True):
            assert torch.equal(own.grad.to("cuda:0"), other.grad)
    assert flights(placed._current.program).n == 1


@pytest.mark.parametrize("devices", [TWO_GPUS, LANES[:2]])
@pytest.mark.parametrize("placer", ["round-robin", baechi.RandomPlacer(1)], ids=["turns", "random"])
def test_graphs_of_micro_batches_hold_no_more_than_predicted(
    devices: list[str], placer: Any
) -> None:
    n, plain = 6, Skips()
    x, t = (torch.randn(256 * n, 16, device="cuda:0") for _ in range(2))
    gc.collect()
    before = active_bytes("current")
    placed = baechi.place(
        plain, devices, microbatches=n, placer=placer, cuda_graphs=True, progress=False
    )
    for number in range(WARM_UP + 3):
        placed.zero_grad()
        if number == WARM_UP + 1:
            forget_peaks()
        placed.step(x, targets=t, loss=square)
    seen = active_bytes("peak")
    seen = [peak - base for peak, base in zip(seen, before, strict=True)]
    said = placed.schedule.peak_bytes
    if devices == GPUS:  # eager lanes hold all that crosses, of each micro-batch
        assert sum(said) > 1.5 * sum(placed.rhythm.peak_bytes)
    said = list(said) if devices == GPUS else [sum(said), 0]
    assert all(mine <= 1.01 * own for mine, own in zip(seen, said, strict=True))
    with pytest.raises(baechi.InputError, match="cuda_graphs=True, but a call has 6 micro-batches"):
        placed(x)


@pytest.mark.parametrize("devices", [TWO_GPUS])
def test_memory_of_a_step_does_not_grow_with_its_micro_batches(devices: list[str]) -> None:
    """What arrives goes with its last reader, so four times as many hold no more on any GPU."""
    peaks, plain = [], Skips()
    for n in (4, 16):
        x, t = torch.randn(256 * n, 16), torch.randn(256 * n, 16)
        mine, wanted = x.to("cuda:0"), t.to("cuda:0")
        gc.collect()
        before = active_bytes("current")
        placed = baechi.place(
            copy.deepcopy(plain),
            devices,
            microbatches=n,
            placer=baechi.RandomPlacer(1),
            progress=False,
        )
        for number in range(3):
            placed.zero_grad()
            if number == 2:
                forget_peaks()
            placed.step(mine, targets=wanted, loss=square)
        seen = active_bytes("peak")
        seen = [peak - base for peak, base in zip(seen, before, strict=True)]
        said = placed.rhythm.peak_bytes
        assert all(mine <= own for mine, own in zip(seen, said, strict=True))
        assert len(placed.rhythm.turns) >= 8 * n  # it is cut in many parts
        peaks.append((seen, said))
        del placed
    (few, fewer_said), (many, more_said) = peaks
    assert all(b <= 1.1 * a for a, b in zip(few, many, strict=True))
    assert all(b <= 1.02 * a for a, b in zip(fewer_said, more_said, strict=True))


@pytest.mark.parametrize("devices", [TWO_GPUS])
def test_a_copy_takes_no_memory_that_an_earlier_micro_batch_still_reads(
    devices: list[str],
) -> None:
    """One GPU sends all micro-batches, and waits for none that the other has to read."""
    plain, x = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6))), torch.randn(512, 16)
    pins = {"0/linear": devices[0], "2/linear_2": devices[0], "3/linear_3": devices[1]}
    half = baechi.Constraints(pins=pins | {"5/linear_5": devices[1]})
    placed = baechi.place(
        copy.deepcopy(plain),
        devices,
        microbatches=32,
        training=False,
        constraints=half,
        progress=False,
    )
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(placed(x.to("cuda:0")).cpu(), plain(x), **TOLERANCES)
    assert set(placed._current.placement.devices) == {0, 1}
