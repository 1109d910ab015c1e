"""What runs is the program: in its order, with its gradients, and in no other process."""

import _thread
import copy
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from placed import at_random, cpus, made_up_profile, place_on
from torch import nn

import baechi
from baechi.program.race_proof import check_program
from baechi.runtime.executors.cpu_workers import CpuExecutor

FIRST_WENT_BACK = threading.Event()
LOG: list[str] = []


@torch.library.custom_op("baechi_tests::note", mutates_args=())
def note(x: torch.Tensor, name: str) -> torch.Tensor:
    """Doubles, and notes when it goes backward."""
    del name
    return x * 2


@note.register_fake
def _(x: torch.Tensor, name: str) -> torch.Tensor:
    del name
    return torch.empty_like(x)


@torch.library.custom_op("baechi_tests::note_back", mutates_args=())
def note_back(gradient: torch.Tensor, name: str) -> torch.Tensor:
    """The backward of `note`."""
    if name == "d":
        assert FIRST_WENT_BACK.wait(20), "d waits for a, and a for d"
    if name == "broken":
        raise IndexError("no way back")
    LOG.append(name)
    if name == "a":
        FIRST_WENT_BACK.set()
    return gradient * 2


@note_back.register_fake
def _(gradient: torch.Tensor, name: str) -> torch.Tensor:
    del name
    return torch.empty_like(gradient)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    del output
    ctx.name = inputs[1]


note.register_autograd(
    lambda ctx, gradient: (note_back(gradient, ctx.name), None), setup_context=_setup
)


class Branches(nn.Module):
    """a and b, one segment on a device; c after a and d after b, on another."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a, b = note(x, "a"), note(y, "b")
        return note(a, "c") + note(b, "d")


@pytest.mark.parametrize("training", [True, False])
def test_without_its_graph_a_placement_gives_the_same_program(training: bool) -> None:
    x, y = (torch.ones(3, requires_grad=True) for _ in range(2))
    traced = baechi.trace(Branches(), (x, y))
    placed = place_on(traced, 2, baechi.RandomPlacer(1), training=training)
    assert placed.program.graph_digest == placed.placement.graph_digest == placed.graph.digest
    assert placed.schedule is placed.schedule
    other = baechi.apply(traced, placed.placement, ["cpu", "cpu"])
    assert other.program == placed.program
    with pytest.raises(baechi.ExecutionError, match="not given the graph"):
        assert other.schedule


def test_a_graph_that_does_not_say_what_is_backward_is_refused() -> None:
    x, y = (torch.ones(3, requires_grad=True) for _ in range(2))
    traced = baechi.trace(Branches(), (x, y))
    graph = traced.graph(made_up_profile(traced))
    plain = baechi.OpGraph(
        tuple(replace(op, phase="forward", forward=()) for op in graph.ops), graph.tensors
    )
    placement = baechi.solve(graph, cpus(2), placer="m-etf")
    with pytest.raises(baechi.InputError, match=r"graph given is not of this Branches.*Op\.phase"):
        baechi.apply(traced, placement, ["cpu", "cpu"], graph=replace(plain, times=graph.times))


def test_a_segment_goes_backward_in_parts_as_the_placement_says() -> None:
    """d's backward waits until a's has run, so a's must not wait for d's gradient of b."""
    x, y = (torch.ones(3, requires_grad=True) for _ in range(2))
    traced = baechi.trace(Branches(), (x, y))
    graph = traced.graph(made_up_profile(traced))
    far = [i for i, op in enumerate(traced.ops) if {"note_2", "note_3", "add"} & set(op.nodes)]
    n = len(traced.ops)
    devices = [int(op in far) for op in range(n)]
    twins = {op: twin for op, twin in enumerate(graph.twins) if twin >= 0}
    by_node = {node: op for op, row in enumerate(traced.ops) for node in row.nodes}
    a, b, c, d, add = (by_node[k] for k in ("note", "note_1", "note_2", "note_3", "add"))
    everywhere = devices + [1] + [0] * (len(graph.ops) - n - 1)
    for op, twin in twins.items():
        everywhere[twin] = devices[op]
    order = (*range(n), n, *(twins[op] for op in (add, c, a, d, b)))
    placement = baechi.Placement(graph.digest, tuple(everywhere), order)
    placed = baechi.apply(traced, placement, ["cpu:0", "cpu:1"], graph=graph)
    LOG.clear()
    FIRST_WENT_BACK.clear()
    placed(x, y).sum().backward()
    assert LOG == ["c", "a", "d", "b"]
    assert torch.equal(x.grad, torch.full((3,), 4.0))
    placed.unplace()


def test_an_operator_that_fails_on_its_way_back_is_named_and_the_next_step_works() -> None:
    class Breaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linears = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for linear in self.linears:
                x = linear(x)
            return note(x, "broken") + x.sum()

    model, x = Breaks(), torch.ones(2, 4)
    placed = at_random(model, (x,), seed=0, devices=2)
    for _ in range(3):
        with pytest.raises(baechi.ExecutionError, match=r"failed on logical device.*no way back"):
            placed(x).sum().backward()
    with torch.no_grad():
        torch.testing.assert_close(placed(x), copy.deepcopy(model)(x))
    placed.unplace()


@torch.library.custom_op("baechi_tests::interrupt", mutates_args=())
def interrupt(x: torch.Tensor) -> torch.Tensor:
    """Presses Ctrl-C where the caller waits, if the first element says so."""
    if float(x.flatten()[0]) > 100:
        _thread.interrupt_main()
        time.sleep(0.05)
    return x * 1


@interrupt.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_ctrl_c_reaches_the_caller_and_the_next_call_works() -> None:
    class Interrupts(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(4):
                x = interrupt(x + 1)
            return x.exp()

    model, x = Interrupts(), torch.ones(3)
    placed = at_random(model, (x,), seed=1)
    with torch.no_grad():
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                placed(x + 1000)
            torch.testing.assert_close(placed(x), copy.deepcopy(model)(x))
    placed.unplace()


class Shares(nn.Module):
    """One weight in four operators, seen through one view; inputs of it on other devices."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 5) * 0.3)
        self.between = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = self.weight.t()
        x = x.view(-1, 5)
        for i, linear in enumerate(self.between):
            x = linear(x @ (turned if i % 2 else self.weight)).tanh() + x * self.weight.mean()
        return x


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("seed", range(6))
def test_gradients_of_what_many_read_are_equal_in_every_bit(seed: int) -> None:
    torch.manual_seed(seed)
    model, x = Shares(), torch.randn(2, 3, 5, requires_grad=True)
    placed = at_random(copy.deepcopy(model), (x,), seed=seed)
    assert len(placed.program.tapes) > 3
    try:
        found = []
        for module in (model, placed):
            x.grad = None
            module(x).square().sum().backward()
            found.append([x.grad, *(parameter.grad for parameter in module.parameters())])
        for one, other in zip(*found, strict=True):
            assert torch.equal(one, other)
    finally:
        placed.unplace()


def test_what_runs_was_proved() -> None:
    placed = at_random(Shares(), (torch.randn(2, 3, 5),), seed=1)
    program = placed.program
    check_program(program)
    assert len(program.phases) == 2
    assert program.explain().startswith("forward: ")


def test_what_needs_a_gradient_only_later_is_planned_anew_or_refused() -> None:
    """A placement has no backward for what needed none when the model was traced."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    x = torch.randn(2, 4)
    placed = at_random(model, (x,), seed=0, devices=1)
    placed(x).sum().backward()
    assert model[0].weight.grad is None
    model[0].requires_grad_(True)
    with pytest.raises(baechi.InputError, match="what needs a gradient"):
        placed(x)
    with torch.no_grad():
        placed(x)
    with pytest.raises(baechi.InputError, match="what needs a gradient"):
        placed(x.clone().requires_grad_())
    placed.unplace()
    model[0].requires_grad_(False)
    options = {"costs": "estimate", "progress": False, "threads_per_device": 1}
    again = baechi.place(model, {"cpu:0": "1GiB"}, **options)
    again(x).sum().backward()
    model[0].requires_grad_(True)
    model.zero_grad()
    leaf = x.clone().requires_grad_()
    again(leaf).sum().backward()
    mine = [leaf.grad, *(parameter.grad.clone() for parameter in model.parameters())]
    model.zero_grad()
    leaf.grad = None
    again.unplace()(leaf).sum().backward()
    for one, other in zip(mine, [leaf.grad, *(p.grad for p in model.parameters())], strict=True):
        torch.testing.assert_close(one, other)


def test_a_fork_without_the_workers_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 3, 5)
    placed = at_random(Shares(), (x,), seed=0)
    assert isinstance(placed._current._executor, CpuExecutor)
    monkeypatch.setattr("os.getpid", lambda: -1)
    with pytest.raises(baechi.ExecutionError, match="another process"):
        placed(x)
    monkeypatch.undo()
    placed(x)
    placed.unplace()


def test_a_metered_step_has_the_same_peaks_each_time() -> None:
    x = torch.randn(2, 3, 5)
    placed = at_random(Shares(), (x,), seed=2)
    peaks = set()
    for _ in range(4):
        placed.zero_grad()
        with placed.metered() as meter:
            placed(x).sum().backward()
        peaks.add(meter.peak_bytes)
    assert len(peaks) == 1
    placed.unplace()


class Normalizes(nn.Module):
    """Two towers with batch normalization, of which each updates its own statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.GELU(), nn.Linear(6, 6))
            for _ in range(2)
        )
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other = (tower(x) for tower in self.towers)
        return self.norm(one * other).square().mean()


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("make", ["AdamW", "SGD"])
def test_ten_steps_of_an_optimizer_end_where_the_unsplit_model_s_do(make: str) -> None:
    torch.manual_seed(0)
    model, batches = Normalizes(), [torch.randn(8, 6) for _ in range(10)]
    placed = at_random(copy.deepcopy(model), (batches[0],), seed=3)
    try:
        for module in (model, placed):
            options = {"lr": 0.1, "momentum": 0.9} if make == "SGD" else {"lr": 0.1}
            optimizer = getattr(torch.optim, make)(module.parameters(), **options)
            for x in batches:
                optimizer.zero_grad()
                module(x).backward()
                optimizer.step()
        state, expected = placed.state_dict(), model.state_dict()
        for name, tensor in expected.items():
            assert torch.equal(state[name], tensor), name
    finally:
        placed.unplace()


def test_two_placed_models_in_two_threads_do_not_disturb_each_other() -> None:
    x = torch.randn(2, 3, 5)
    models = [Shares() for _ in range(2)]
    placed = [at_random(copy.deepcopy(m), (x,), seed=i) for i, m in enumerate(models)]
    found: list[list[torch.Tensor]] = [[], []]

    def train(index: int) -> None:
        for _ in range(10):
            placed[index].zero_grad()
            placed[index](x).square().sum().backward()
        found[index] += [parameter.grad for parameter in placed[index].parameters()]

    threads = [threading.Thread(target=train, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for model, gradients in zip(models, found, strict=True):
        model(x).square().sum().backward()
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            torch.testing.assert_close(gradient, parameter.grad)
    for module in placed:
        module.unplace()
