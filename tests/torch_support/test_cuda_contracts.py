"""What the runtime relies on in torch's CUDA: one small test for each contract."""

import os
import threading
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional

from baechi.torch_support.graph_capture import CudaRecorder
from baechi.torch_support.torch_devices import blas_bytes

pytestmark = pytest.mark.gpu
PLACE = torch.device("cuda", 0)
LARGE = 3 * 2**20  # bytes, of a block of its own
SPIN = 20_000_000
# Emulated kernels make the host wait in ways of their own.
ON_A_GPU = pytest.mark.skipif(
    "Emulated" in (torch.cuda.get_device_name(0) if torch.cuda.device_count() else ""),
    reason="is of a GPU's own libraries",
)


def room() -> Tensor:
    return torch.empty(LARGE, dtype=torch.uint8, device=PLACE)


def in_a_thread(run: Callable[[], object]) -> None:
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def test_memory_goes_back_to_the_stream_of_its_allocation() -> None:
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.empty_cache()
    with torch.cuda.stream(one):
        made = room()
        address = made.data_ptr()
    with torch.cuda.stream(other):
        del made  # whatever is current when it is dropped
        assert room().data_ptr() != address
    with torch.cuda.stream(one):
        assert room().data_ptr() == address


def test_memory_is_taken_again_while_its_last_user_still_runs() -> None:
    """So a free needs waits beforehand, and a reader on the same stream needs none."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SPIN)
        made = room().fill_(1)
        address = made.data_ptr()
        del made
        again = room()
        assert again.data_ptr() == address
        again.fill_(2)
    torch.cuda.synchronize()
    assert bool((again == 2).all())


def test_streams_come_round_after_thirty_two() -> None:
    streams = [torch.cuda.Stream(PLACE) for _ in range(33)]
    assert len({stream.cuda_stream for stream in streams}) == 32
    assert streams[0].cuda_stream == streams[32].cuda_stream


def test_a_backward_runs_on_the_stream_of_its_forward() -> None:
    seen: list[torch.cuda.Stream] = []

    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.factor = 2
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            seen.append(torch.cuda.current_stream(PLACE))
            return gradient * ctx.factor

    x = torch.ones(8, device=PLACE, requires_grad=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        y = Seen.apply(x)
    torch.cuda.current_stream().wait_stream(stream)
    y.sum().backward()
    assert seen == [stream]


def test_a_recording_with_a_backward_is_replayed() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(64, 64).to(PLACE)
    x = torch.randn(2, 4, 16, 64, device=PLACE)

    def gradients() -> list[Tensor]:
        y = functional.scaled_dot_product_attention(layer(x), x, x)
        return list(torch.autograd.grad(y.square().sum(), list(layer.parameters())))

    for _ in range(3):
        expected = gradients()
    found: list[Tensor] = []
    recorder = CudaRecorder(PLACE)
    recorder.run(gradients)
    replay = recorder.record(lambda: found.extend(gradients()), 0)
    for _ in range(2):
        for tensor in found:
            tensor.zero_()
        replay()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_late_recording_leaves_the_memory_of_earlier_ones_alone() -> None:
    recorder, x = CudaRecorder(PLACE), torch.ones(2**20, device=PLACE)
    made: dict[int, Tensor] = {}
    replays = {rank: recorder.record(partial(_double, x, made, rank), rank) for rank in (0, 2, 1)}
    for rank in (0, 1, 2):
        replays[rank]()
    assert [float(made[rank].sum()) for rank in (0, 1, 2)] == [2.0**20 * (k + 2) for k in range(3)]


def _double(x: Tensor, made: dict[int, Tensor], rank: int) -> None:
    scratch = x + 1
    made[rank] = scratch + rank


def test_random_numbers_of_a_graph_are_those_of_the_same_seed() -> None:
    x, made = torch.ones(256, device=PLACE), []
    replay = CudaRecorder(PLACE).record(lambda: made.append(functional.dropout(x, 0.5)), 0)
    for seed in (1, 2):
        torch.manual_seed(seed)
        expected = [functional.dropout(x, 0.5) for _ in range(2)]
        torch.manual_seed(seed)
        for wanted in expected:
            replay()
            assert torch.equal(made[0], wanted)


def test_a_capture_that_fails_can_be_followed_by_another() -> None:
    recorder, x = CudaRecorder(PLACE), torch.ones(8, device=PLACE)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            recorder.record(lambda: torch.full((2,), x.sum().item()), 0)
        replay = recorder.record(lambda: _add(x), 0)
        replay()
    assert x.tolist() == [3.0] * 8


def _add(x: Tensor) -> None:
    x.add_(1)


def test_the_pool_of_a_dead_graph_comes_back_when_the_cache_is_emptied() -> None:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    kept: list[Tensor] = []
    replay = CudaRecorder(PLACE).record(lambda: kept.extend(room() for _ in range(20)), 0)
    assert torch.cuda.memory_reserved() >= before + 20 * LARGE
    del replay
    kept.clear()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == before


def _positive(x: Tensor) -> Tensor:
    return x[x > 0]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize(
    "waits",
    [
        lambda x: x.cpu(),
        *(pytest.param(f, marks=ON_A_GPU) for f in (Tensor.item, Tensor.nonzero, _positive)),
    ],
)
def test_torch_says_what_makes_the_host_wait(waits: Callable[[Tensor], object]) -> None:
    x = torch.ones(1, device=PLACE)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
            waits(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_copy_from_pinned_memory_is_made_when_its_event_has_passed() -> None:
    source = torch.arange(2.0**20).pin_memory()
    stream, event = torch.cuda.Stream(), torch.cuda.Event()
    target = torch.zeros(2**20, device=PLACE)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SPIN)
        target.copy_(source, non_blocking=True)
        event.record()
    torch.cuda.current_stream().wait_event(event)
    assert torch.equal(target.cpu(), source)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("width", [6, 64])
def test_fake_attention_has_the_real_ones_strides(dtype: torch.dtype, width: int) -> None:
    rows = [torch.randn(2, 16, 4, width, device=PLACE, dtype=dtype) for _ in range(3)]
    real = functional.scaled_dot_product_attention(*(row.transpose(1, 2) for row in rows))
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(row).transpose(1, 2) for row in rows]
        fake = functional.scaled_dot_product_attention(*fakes)
    assert fake.stride() == real.stride()


@ON_A_GPU
def test_cublas_keeps_one_workspace_for_each_thread_and_stream() -> None:
    x, bias = torch.randn(256, 256, device=PLACE), torch.randn(256, device=PLACE)
    setting = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
    room_bytes = blas_bytes(torch.cuda.get_device_capability(PLACE)[0], setting)
    stream = torch.cuda.Stream()

    def grown(run: Callable[[], object]) -> int:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        with torch.cuda.stream(stream):
            run()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated() - before

    torch.mm(x, x)
    first = grown(lambda: torch.mm(x, x))
    assert 0 < first <= room_bytes + 2**20
    assert grown(lambda: torch.mm(x, x)) == 0
    # cuBLASLt takes the same, or, as torch 2.11 on a Hopper GPU, a MiB of its own.
    assert grown(lambda: torch.addmm(bias, x, x)) <= 2**20
    assert grown(lambda: torch.addmm(bias, x, x)) == 0
    rows: list[int] = []
    in_a_thread(lambda: rows.append(grown(lambda: torch.mm(x, x))))
    assert rows[0] <= room_bytes + 2**20


@pytest.mark.multigpu
def test_a_copy_between_gpus_waits_for_both_streams() -> None:
    source, target = torch.zeros(2**20, device="cuda:0"), torch.zeros(2**20, device="cuda:1")
    torch.cuda.synchronize("cuda:0")
    with torch.cuda.device(1):
        torch.cuda._sleep(SPIN)
        target.fill_(7)
    torch.cuda._sleep(SPIN)
    source.fill_(3)
    target.copy_(source, non_blocking=True)
    read = target + 0  # the stream of the destination waits, too
    source.fill_(9)  # and that of the source, which may go on
    assert float(read.max()) == float(read.min()) == 3.0
