"""A placed model lasts: through hundreds of steps, errors in them, threads, and other processes."""

import _thread
import copy
import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import placed
import pytest
import torch
import zoo
from seeds import some
from torch import nn

import baechi
from baechi.torch_support.memory_meter import saved_inside_bytes

# Which call of `strikes` or of its backward does what.
STRIKES: dict[str, int] = {}
COUNTS = {"forward": 0, "backward": 0}


def count(way: str) -> None:
    COUNTS[way] += 1
    if STRIKES.get(way) == COUNTS[way]:
        raise IndexError(f"struck {way}")
    if STRIKES.get(f"interrupt {way}") == COUNTS[way]:
        _thread.interrupt_main()
        time.sleep(0.1)


@torch.library.custom_op("baechi_endurance::strikes", mutates_args=())
def strikes(x: torch.Tensor) -> torch.Tensor:
    """The identity, but for the call that is to go wrong."""
    count("forward")
    return x * 1


@torch.library.custom_op("baechi_endurance::strikes_back", mutates_args=())
def strikes_back(gradient: torch.Tensor) -> torch.Tensor:
    count("backward")
    return gradient * 1


@strikes.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@strikes_back.register_fake
def _(gradient: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(gradient)


strikes.register_autograd(lambda _, gradient: strikes_back(gradient))


class Strikes(nn.Module):
    """Two branches, with an operator in one of them that may go wrong."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, width) for _ in range(2))
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, two = (layer(x) for layer in self.layers)
        return self.norm(strikes(one.tanh()) * two.sigmoid())


@pytest.fixture(autouse=True)
def _calm() -> None:
    STRIKES.clear()
    COUNTS.update(forward=0, backward=0)


def live_tensors() -> int:
    gc.collect()
    return sum(type(one) in (torch.Tensor, nn.Parameter) for one in gc.get_objects())


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def takes_steps(module: nn.Module, x: torch.Tensor, n_steps: int) -> None:
    for i in range(n_steps):
        module.zero_grad()
        loss = module(x).square().mean()
        loss.backward(retain_graph=i % 7 == 0)
        if i % 5 == 0:
            with torch.no_grad():
                module(x)
        if i % 11 == 0:
            module(x)  # and never goes backward


def leaks_nothing(module: baechi.PlacedModule, x: torch.Tensor, bound_bytes: int) -> None:
    takes_steps(module, x, 50)
    tensors, threads, held = live_tensors(), set(threading.enumerate()), resident_bytes()
    objects = len(gc.get_objects())
    takes_steps(module, x, 400)
    assert live_tensors() <= tensors
    assert set(threading.enumerate()) <= threads
    assert len(gc.get_objects()) <= objects + 100
    assert resident_bytes() - held < bound_bytes


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's own account")
def test_hundreds_of_steps_leak_no_memory_and_no_threads() -> None:
    """Of what a step makes, 128 KiB and more at a time, one left over in each would be seen."""
    module, x = placed.at_random(Strikes(512), (torch.randn(64, 4),), devices=2), torch.randn(64, 4)
    leaks_nothing(module, x, 32 << 20)
    module.unplace()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "resnet_train", "clip"])
def test_a_thousand_steps_of_a_real_model_leak_nothing(name: str) -> None:
    model, args, kwargs = zoo.MODELS[name]()
    module = placed.at_random(model, args, kwargs, devices=3)

    def steps(n_steps: int) -> None:
        for _ in range(n_steps):
            placed.step(module, args, kwargs)

    steps(20)
    tensors, threads, held = live_tensors(), set(threading.enumerate()), resident_bytes()
    steps(1000)
    assert live_tensors() <= tensors
    assert set(threading.enumerate()) <= threads
    assert resident_bytes() - held < 64 << 20
    module.unplace()


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_an_error_in_the_100th_step_reaches_the_caller_and_the_next_steps_are_right(
    way: str,
) -> None:
    model, x = Strikes(), torch.randn(6, 4)
    module = placed.at_random(model, (x,), seed=1, devices=2)
    COUNTS.update(forward=0, backward=0)
    STRIKES[way] = 100
    for i in range(1, 121):
        before = copy.deepcopy(model.state_dict()) if i == 101 else {}
        if i == 100:
            named = r"^strikes \(.*in forward: " if way == "forward" else "on logical device"
            with pytest.raises(baechi.ExecutionError, match=f"{named}.*struck {way}"):
                placed.step(module, (x,), {})
            STRIKES.clear()
            continue
        left = placed.step(module, (x,), {})
        if before:
            reference = Strikes()
            reference.load_state_dict(before)
            with placed.one_thread():
                expected = placed.step(reference, (x,), {})
            assert not expected.differs_from(left)
    assert len(threading.enumerate()) >= 3
    module.unplace()


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_ctrl_c_in_either_direction_stops_the_step_and_the_next_one_is_right(way: str) -> None:
    model, x = Strikes(), torch.randn(6, 4)
    module = placed.at_random(copy.deepcopy(model), (x,), seed=1, devices=2)
    COUNTS.update(forward=0, backward=0)
    STRIKES[f"interrupt {way}"] = 3
    for _ in range(2):
        placed.step(module, (x,), {})
    with pytest.raises(KeyboardInterrupt):
        placed.step(module, (x,), {})
    STRIKES.clear()
    model.load_state_dict(module.state_dict())
    with placed.one_thread():
        assert not placed.step(model, (x,), {}).differs_from(placed.step(module, (x,), {}))
    module.unplace()


def test_steps_that_fail_leave_nothing_behind() -> None:
    model, x = Strikes(), torch.randn(6, 4)
    module = placed.at_random(model, (x,), seed=1, devices=2)
    placed.step(module, (x,), {})

    def fail(n: int) -> None:
        for i in range(n):
            way = "backward" if i % 2 else "forward"
            STRIKES.clear()
            STRIKES[way] = COUNTS[way] + 1
            with pytest.raises(baechi.ExecutionError):
                placed.step(module, (x,), {})
            module.zero_grad()
        module._current.renew(-1)  # tokens of steps to come

    fail(4)
    before = live_tensors()
    fail(40)
    assert live_tensors() <= before
    module.unplace()


def test_what_a_placed_model_holds_goes_with_it() -> None:
    model, x = Strikes(), torch.randn(6, 4)
    earlier = threading.enumerate()
    module = placed.at_random(model, (x,), devices=2)
    placed.step(module, (x,), {})
    gone = weakref.ref(module), weakref.ref(module._current)
    new = [t for t in threading.enumerate() if t not in earlier]
    workers = [t for t in new if t.name.startswith("baechi-")]
    assert len(workers) == 2
    del module, model  # one object
    gc.collect()
    assert [one() for one in gone] == [None, None]
    for worker in workers:
        worker.join(20)
        assert not worker.is_alive()


@pytest.mark.parametrize("name", some(zoo.MODELS, 16, 3))
def test_no_weight_outlives_its_model(name: str) -> None:
    """What autograd keeps of a trace, of a measured operator or of a step holds nothing else."""
    model, args, kwargs = zoo.MODELS[name]()
    weights = [weakref.ref(tensor) for tensor in (*model.parameters(), *model.buffers())]
    costs = "measure" if name in ("towers", "lstm_lm") else "estimate"
    module = baechi.place(
        *(model, ["cpu:0/a", "cpu:0/b"]),
        **{"example_args": args, "example_kwargs": kwargs, "costs": costs, "progress": False},
    )
    placed.step(module, args, kwargs)
    del model, module
    gc.collect()
    assert not any(weight() is not None for weight in weights)


def test_torch_keeps_no_weight_of_the_model_that_was_traced_last() -> None:
    """Behind a `no_grad`, an LSTM's weight is a constant of a graph that its exporter notes."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = torch.nn.LSTM(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                twice = x * 2
            return self.lstm(x)[0] + twice

    model = Model()
    weights = [weakref.ref(tensor) for tensor in model.parameters()]
    traced = baechi.trace(model, (torch.randn(2, 3, 4),))
    del model, traced
    gc.collect()
    assert not any(weight() is not None for weight in weights)


def test_what_autograd_keeps_of_an_operator_is_let_go_of() -> None:
    """tanh keeps its own result, whose graph keeps what tanh keeps."""
    x = torch.randn(4, requires_grad=True)
    gone = weakref.ref(x)
    assert saved_inside_bytes(partial(torch.tanh, x), [x]) == 0
    del x
    assert gone() is None


def test_one_placed_model_trained_from_two_threads() -> None:
    model, (x,), _ = zoo.towers()
    module = placed.at_random(copy.deepcopy(model), (x,), devices=2)
    rows = [x * (1 + i) for i in range(2)]
    found: list[list[Any]] = [[], []]

    def work(index: int) -> None:
        for _ in range(20):
            loss = module(rows[index]).square().mean()
            found[index].append(torch.autograd.grad(loss, list(module.parameters())))

    run_in_threads(work)
    with placed.one_thread():
        for row, gradients in zip(rows, found, strict=True):
            expected = torch.autograd.grad(model(row).square().mean(), list(model.parameters()))
            assert len(gradients) == 20
            for actual in gradients:
                assert all(map(placed.same, expected, actual))
    module.unplace()


def test_the_first_call_from_two_threads_plans_once() -> None:
    model, (x,), _ = zoo.towers()
    module = baechi.place(
        model, {"cpu:0": "1GiB", "cpu:1": "1GiB"}, costs="estimate", progress=False, max_shapes=1
    )
    found: list[torch.Tensor] = []
    run_in_threads(lambda _: found.append(module(x)))
    assert len(found) == 2
    for result in found:
        torch.testing.assert_close(result, copy.deepcopy(model)(x))
    assert repr(module) == "PlacedModule(Towers, 1 specialization)"
    module.unplace()


def test_a_thread_that_plans_another_shape_disturbs_no_other_thread() -> None:
    """A trace replaces the model's parameters and its hooks for as long as it lasts."""
    model, (x,), _ = zoo.towers()
    module = baechi.place(
        copy.deepcopy(model),
        ["cpu:0", "cpu:1"],
        example_args=(x,),
        costs="estimate",
        progress=False,
    )
    planned, ran = threading.Event(), threading.Event()
    runs: list[bool] = []

    def run() -> None:
        assert placed.same(module(x), expected)
        runs.append(planned.is_set())
        ran.set()

    def work(index: int) -> None:
        if index:
            ran.wait(60)
            try:
                for rows in range(1, 5):
                    module(x[:1].repeat(rows, *(1 for _ in x.shape[1:])))
            finally:
                planned.set()
        else:
            while not planned.is_set():
                run()
            run()

    with placed.one_thread():
        expected = module(x)
        before = list(module._specializations)
        run_in_threads(work)
    assert runs.count(False) > 1  # beside the other's plan
    assert list(module._specializations) != before
    module.unplace()


def run_in_threads(work: Any) -> None:
    failures: list[BaseException] = []

    def guarded(index: int) -> None:
        try:
            work(index)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


SCRIPT = """
import hashlib, os, sys, warnings
import torch
import baechi, placed, zoo

torch.set_num_threads(int(sys.argv[1]))
from baechi.storage.serialization import dumps

found = hashlib.sha256()
for name in ("towers", "awkward"):
    model, args, kwargs = {**zoo.MODELS, **zoo.AWKWARD}[name]()
    module = placed.at_random(model, args, kwargs, seed=4, threads=None)
    found.update(dumps(module.program).encode())
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    for _ in range(3):
        left = placed.step(module, args, kwargs)
        optimizer.step()
    for tensor in [*left.outputs, *module.state_dict().values()]:
        found.update(tensor.detach().contiguous().numpy().tobytes())
print(found.hexdigest())
warnings.simplefilter("ignore")  # Python 3.12 warns of forks beside threads
sys.stdout.flush()
child = os.fork()
if not child:
    try:
        module(*args, **kwargs)
    except baechi.ExecutionError as error:
        os._exit(7 if "another process" in str(error) else 8)
    os._exit(9)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.slow
def test_hash_seeds_and_thread_counts_change_no_bit_and_a_fork_is_told() -> None:
    """Nor does a process hang at its end with workers that nobody has stopped."""
    tests = Path(__file__).parents[1]
    found = []
    for hash_seed, threads in (("0", "1"), ("77", "4")):
        path = os.pathsep.join([str(tests / "support"), str(tests.parent)])
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": hash_seed}
        result = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", SCRIPT, threads],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        digest, child = result.stdout.split()
        assert child == "7"
        found.append(digest)
    assert len(set(found)) == 1
