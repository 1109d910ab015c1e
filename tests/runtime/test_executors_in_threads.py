"""The executors: parallel, orderly in failure, and gone when their module is."""

import copy
import gc
import threading
import time
import unittest.mock
from typing import Any

import pytest
import torch
import zoo
from placed import again_at_random, place_on, same
from seeds import some
from torch import nn
from torch.utils import _pytree as pytree

import baechi
from baechi.runtime.executors import cpu_workers
from baechi.runtime.executors.cuda_streams import CudaExecutor


def towers() -> tuple[nn.Module, tuple[Any, ...]]:
    model, args, _ = zoo.MODELS["towers"]()
    return model, args


class Fussy(nn.Module):
    """Refuses negative sums, so it must stay whole; and runs when asked nicely."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool(x.sum() < 0):
            raise IndexError("too negative")
        return x * 2


class HasFussy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fussy = Fussy()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.fussy(x)) + self.linear(x)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_failing_op_reaches_the_caller_with_its_name_and_the_next_call_works(
    devices: int,
) -> None:
    model, x = HasFussy(), torch.ones(2, 3)
    placed = place_on(baechi.trace(model, (x,)), devices, baechi.RandomPlacer(3))
    where = r"fussy/\w+ \(test_executors_in_threads\.py:\d+ in forward: return .*\)"
    line = where + ".*IndexError: too negative"
    with pytest.raises(baechi.ExecutionError, match=line) as caught:
        placed(-x)
    assert isinstance(caught.value.__cause__, IndexError)
    torch.testing.assert_close(placed(x), copy.deepcopy(model)(x))


BARRIER = threading.Barrier(2, timeout=20)
THREADS: dict[str, int] = {}


@torch.library.custom_op("baechi_tests::meet", mutates_args=())
def meet(x: torch.Tensor) -> torch.Tensor:
    """Goes on only when another thread is here too."""
    BARRIER.wait()
    THREADS[threading.current_thread().name] = torch.get_num_threads()
    return x + 1


@meet.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Meets(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return meet(x) * meet(y)


def test_an_error_names_the_operator_among_many_and_the_models_own_line() -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.table = nn.Embedding(3, 4)

        def forward(self, x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
            y = self.linear(x).relu()
            return y * self.table(i) + self.linear(y)

    x, i = torch.ones(2, 4), torch.tensor([0, 2])
    placed = place_on(baechi.trace(Looks(), (x, i)), 1, "single")
    with pytest.raises(baechi.ExecutionError, match=r"^table/embedding \(.*\.py:\d+ in forward"):
        placed(x, torch.tensor([0, 3]))
    assert placed(x, i).shape == (2, 4)


def test_logical_devices_run_side_by_side_with_their_share_of_threads() -> None:
    """Two branches that wait for each other can only end if both run at once."""
    x = torch.ones(3)
    traced = baechi.trace(Meets(), (x, x.clone()))
    costs = baechi.Profile(traced.digest, "cpu", tuple(baechi.OpCost(10**6) for _ in traced.ops))
    graph = traced.graph(costs, training=False)
    second = [i for i, op in enumerate(traced.ops) if {"meet_1", "x1"} & set(op.nodes)]
    devices = tuple(1 if i in second else 0 for i in range(len(traced.ops)))
    placement = baechi.Placement(graph.digest, devices, tuple(range(len(devices))))
    before = torch.get_num_threads()
    placed = baechi.apply(traced, placement, ["cpu:0", "cpu:1"], threads_per_device=1)
    with torch.no_grad():
        torch.testing.assert_close(placed(x, x.clone()), torch.full((3,), 4.0))
    assert THREADS == {"baechi-0": 1, "baechi-1": 1}
    assert torch.get_num_threads() == before


def test_workers_end_with_their_module() -> None:
    def workers() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name.startswith("baechi-")}

    model, args = towers()
    before = workers()  # those of earlier tests, which may end meanwhile
    placed = place_on(baechi.trace(model, args), 2, "round-robin")
    placed(*args)
    assert len(workers() - before) == 2
    placed.unplace()
    _wait_until(lambda: workers() <= before)
    placed = place_on(baechi.trace(model, args), 2, "round-robin")
    placed(*args)
    assert len(workers() - before) == 2
    del placed, model  # one object
    gc.collect()
    _wait_until(lambda: workers() <= before)


def _wait_until(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_model_without_weights_cannot_run_and_says_so() -> None:
    with torch.device("meta"):
        model, x = nn.Linear(2, 2), torch.empty(1, 2)
    with pytest.raises(baechi.InputError, match="meta device"):
        place_on(baechi.trace(model, (x,)), 1, "single")


def test_the_stream_executor_launches_in_an_order_that_is_right_without_streams_too() -> None:
    """Its CPU devices run inline, in launch order; what streams add is tested on a GPU."""
    model, args, kwargs = zoo.MODELS["t5"]()
    traced = baechi.trace(model, args, kwargs)
    placed = place_on(traced, 3, baechi.RandomPlacer(5))
    executable = placed._current
    places = [torch.device("cpu")] * 3
    inline = CudaExecutor(executable.program, executable._executor.bound, places)
    unsplit = copy.deepcopy(model)
    loss = unsplit(*args, **kwargs).loss
    loss.backward()
    expected = [parameter.grad for parameter in unsplit.parameters()]
    with unittest.mock.patch.object(executable, "_executor", inline):
        other = placed(*args, **kwargs).loss
        other.backward()
    torch.testing.assert_close(other, loss)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_a_backward_after_unplace_says_so_and_does_not_wait_for_ever() -> None:
    model, args = towers()
    placed = place_on(baechi.trace(model, args), 2, "round-robin")
    loss = placed(*args).sum()
    placed.unplace()
    errors = in_a_thread(loss.backward)
    assert [type(error) for error in errors] == [baechi.ExecutionError]
    assert "unplaced within a step" in str(errors[0])


def test_a_ctrl_c_before_a_worker_was_woken_leaves_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, args = towers()
    placed = place_on(baechi.trace(model, args), 2, "round-robin")
    expected = placed(*args)
    own, left = cpu_workers._ring, ["one"]

    def ring(bell: Any) -> None:
        if left and not threading.current_thread().name.startswith("baechi-"):
            raise KeyboardInterrupt(left.pop())
        own(bell)

    monkeypatch.setattr(cpu_workers, "_ring", ring)
    assert [type(error) for error in in_a_thread(lambda: placed(*args))] == [KeyboardInterrupt]
    found: list[torch.Tensor] = []
    assert not in_a_thread(lambda: found.append(placed(*args)))
    assert torch.equal(found[0], expected)


def test_what_a_backward_that_failed_left_behind_is_in_no_later_one() -> None:
    model, x = Pair(), torch.randn(3, 4)
    placed = place_on(baechi.trace(model, (x,)), 2, "round-robin")
    found = []
    for module in (copy.deepcopy(model), placed):
        module.zero_grad()
        first, second = module(x)

        def fail(_: torch.Tensor) -> None:
            raise IndexError("struck")

        handle = first.register_hook(fail)
        with pytest.raises(IndexError, match="struck"):
            (first.sum() + second.sum()).backward(retain_graph=True)
        handle.remove()
        module.zero_grad()
        first.square().sum().backward()
        found.append([parameter.grad for parameter in module.parameters()])
    assert all(map(same, *found))


class Pair(nn.Module):
    """Has two outputs, the second made last."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.trunk(x).tanh()
        return self.one(x), self.two(x)


def in_a_thread(run: Any) -> list[BaseException]:
    """What a call raises, in a thread that may be left behind where it never returns."""
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            run()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=guarded, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "it hangs"
    return errors


def test_one_placed_module_may_be_called_from_two_threads() -> None:
    model, args = towers()
    placed = place_on(baechi.trace(model, args), 2, "round-robin")
    expected = copy.deepcopy(model)(*args)
    results: list[torch.Tensor] = []

    def call() -> None:
        results.extend(placed(*args) for _ in range(20))

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 40
    for result in results:
        torch.testing.assert_close(result, expected)


def test_grad_mode_inference_mode_and_autocast_are_the_callers() -> None:
    model, args = towers()
    placed = place_on(baechi.trace(model, args), 2, "round-robin", threads_per_device=1)
    assert placed(*args).requires_grad
    with torch.no_grad():
        assert not placed(*args).requires_grad
    with torch.inference_mode():
        assert placed(*args).is_inference()
    with torch.autocast("cpu", torch.bfloat16):
        placed = place_on(baechi.trace(model, args), 2, "round-robin", threads_per_device=1)
        expected, actual = copy.deepcopy(model)(*args), placed(*args)
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected)


def test_backward_twice_with_retain_graph_adds_up() -> None:
    model, args = towers()
    placed = place_on(baechi.trace(model, args), 3, baechi.RandomPlacer(0))
    placed.zero_grad()
    loss = placed(*args).square().mean()
    loss.backward(retain_graph=True)
    once = [parameter.grad.clone() for parameter in placed.parameters()]
    loss.backward()
    for parameter, gradient in zip(placed.parameters(), once, strict=True):
        torch.testing.assert_close(parameter.grad, 2 * gradient)
    placed.zero_grad()


def test_a_second_backward_without_retain_graph_is_refused() -> None:
    model, args = towers()
    placed = place_on(baechi.trace(model, args), 2, "round-robin")
    loss = placed(*args).square().mean()
    loss.backward()
    with pytest.raises(RuntimeError):
        loss.backward()
    y = placed(*args)
    y.sum().backward()
    with pytest.raises(baechi.ExecutionError, match="retain_graph=True"):
        (2 * y).sum().backward()
    placed.zero_grad()


def test_one_tensor_given_twice_gets_both_gradients() -> None:
    class Weighs(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return 2 * x + 5 * y

    x = torch.ones(3, requires_grad=True)
    place_on(baechi.trace(Weighs(), (x, x)), 2, "round-robin")(x, x).sum().backward()
    torch.testing.assert_close(x.grad, torch.full((3,), 7.0))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("seed", some(range(2), 2))
def test_gradients_of_a_value_read_inside_and_outside_are_summed_in_autograds_order(
    seed: int,
) -> None:
    """CLIP's logits are returned, viewed, returned as the view, and read by the loss."""
    model, args, kwargs = zoo.MODELS["clip"]()
    traced = baechi.trace(model, args, kwargs)
    placed = again_at_random(traced, seed=seed, devices=3)

    def gradients(module: nn.Module) -> list[torch.Tensor]:
        module.zero_grad()
        outputs = [t for t in pytree.tree_leaves(module(*args, **kwargs)) if t.requires_grad]
        torch.stack([tensor.square().mean() for tensor in outputs]).sum().backward()
        return [parameter.grad.clone() for parameter in module.parameters()]

    try:
        unsplit = copy.deepcopy(model)
        for one, other in zip(gradients(unsplit), gradients(placed), strict=True):
            assert torch.equal(one, other)
    finally:
        placed.unplace()


@pytest.mark.parametrize("devices", [1, 2])
def test_gradients_of_gradients_are_refused_not_wrong(devices: int) -> None:
    model, args = towers()
    placed = place_on(baechi.trace(model, args), devices, "round-robin")
    wanted = [next(placed.parameters())]
    with pytest.raises(baechi.ExecutionError, match="a placed model has no second derivatives"):
        torch.autograd.grad(placed(*args).sum(), wanted, create_graph=True)
    y = placed(*args)
    v = torch.ones_like(y, requires_grad=True)
    (gradient,) = torch.autograd.grad(y, wanted, v)
    assert not gradient.requires_grad


@pytest.mark.parametrize("devices", [1, 2])
def test_the_callers_gradient_of_an_output_stays_the_callers(devices: int) -> None:
    """Where it is a parameter's gradient as it is, autograd must not take it for its own."""

    class Shifts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.shift = nn.Linear(4, 4), nn.Parameter(torch.zeros(3, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) + self.shift

    model, x, gradient = Shifts(), torch.randn(3, 4), torch.ones(3, 4)
    placed = place_on(baechi.trace(model, (x,)), devices, "round-robin")
    for _ in range(3):
        placed(x).backward(gradient)
    assert torch.equal(gradient, torch.ones(3, 4))
    assert torch.equal(model.shift.grad, torch.full((3, 4), 3.0))


def test_frozen_parameters_get_no_gradient() -> None:
    model, args, _ = zoo.MODELS["towers"]()
    placed = place_on(baechi.trace(model, args), 2, "round-robin")
    first = next(placed.parameters())
    first.requires_grad_(False)
    placed(*args).sum().backward()
    assert first.grad is None
    assert all(p.grad is not None for p in list(placed.parameters())[1:])


def test_dropout_is_reproducible_under_a_seed_and_equals_the_unsplit_one_on_one_device() -> None:
    model = nn.Sequential(
        *[nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.ReLU()) for _ in range(4)]
    )
    x = torch.randn(8, 16)

    def run(module: nn.Module) -> torch.Tensor:
        torch.manual_seed(7)
        return module(x)

    expected = run(model)
    assert torch.equal(run(place_on(baechi.trace(model, (x,)), 1, "single")), expected)
    split = place_on(baechi.trace(model, (x,)), 3, baechi.RandomPlacer(1))
    first = run(split)
    for _ in range(10):
        assert torch.equal(run(split), first)


def test_activations_are_freed_when_autograd_does_not_keep_them() -> None:
    """A chain of adds keeps nothing, so a placed one must not hold its activations either."""

    class Adds(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(20):
                x = x + 1
            return x

    x = torch.zeros(1 << 18, requires_grad=True)  # 1 MiB
    placed = place_on(baechi.trace(Adds(), (x,)), 2, "round-robin")
    with placed.metered() as meter:
        y = placed(x)
    assert y.requires_grad
    assert sum(meter.peak_bytes) <= 8 << 20
    assert meter.moved_bytes >= 15 << 20


def test_many_steps_leak_nothing() -> None:
    model, args = towers()
    placed = place_on(baechi.trace(model, args), 2, baechi.RandomPlacer(0), threads_per_device=1)

    def steps(n: int) -> None:
        for _ in range(n):
            placed.zero_grad()
            placed(*args).sum().backward()

    def tensors() -> int:
        gc.collect()
        return sum(type(o) in (torch.Tensor, nn.Parameter) for o in gc.get_objects())

    steps(3)
    before = tensors()
    steps(30)
    assert tensors() <= before
    placed.zero_grad()


def test_the_peak_that_was_predicted_is_not_passed() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(6)])
    x = torch.randn(512, 256)
    placed = baechi.place(
        model,
        {"cpu:0": "64MiB", "cpu:1": "64MiB"},
        example_args=(x,),
        placer="m-topo",
        progress=False,
        threads_per_device=1,
    )
    predicted = placed.schedule.peak_bytes
    with placed.metered() as meter:
        y = placed(x)
        (y * y).sum().backward()
    for said, seen in zip(predicted, meter.peak_bytes, strict=True):
        assert 0.9 * said <= seen <= 1.02 * said


class Positions(nn.Module):
    """Makes tensors where its argument is, in a block without gradients, too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            positions = torch.arange(x.shape[1], device=x.device)
            mean = x.detach().mean().to(x.device, torch.float32)
            scale = torch.cos(positions.float() * mean)
        return x * scale + torch.ones(x.shape[1], device=x.device)


def test_what_a_trace_made_on_another_device_is_made_where_it_runs() -> None:
    """As for a model that is traced on a CPU and runs on a GPU, or the other way round."""
    model = Positions()
    traced = baechi.trace(model, (torch.ones(2, 3, device="meta", requires_grad=True),))
    profile = baechi.profile(traced, "cpu", cache=False, progress=False)
    assert not any("fails alone" in cost.remark for cost in profile.costs)
    graph = traced.graph(profile)
    cluster = baechi.Cluster.connected([baechi.Device("cpu:0", "1GiB")], baechi.Link(1, 10**9))
    placement = baechi.solve(graph, cluster)
    placed = baechi.apply(traced, placement, graph=graph, cluster=cluster)
    x = torch.rand(2, 3, requires_grad=True)
    assert torch.equal(placed(x), copy.deepcopy(model)(x))
