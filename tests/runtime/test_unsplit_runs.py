"""A placement on one device runs the user's own model, with nothing in between."""

import copy
import random
import threading
import time
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import spectral_norm

import baechi
from baechi.runtime.derived_class import placed_state
from baechi.runtime.specialization import CallLock

ONE = {"cpu:0": "1GiB"}
X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Counting(nn.Module):
    """Counts its calls in Python, which no program does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        self.calls = 0

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        self.calls += 1
        return self.inner(x) * scale


class Untraceable(nn.Module):
    """No tracer takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * float(x.detach().numpy().sum())


def place(model: nn.Module, devices: Any = None, **options: Any) -> Any:
    return baechi.place(model, devices or ONE, progress=False, costs="estimate", **options)


def test_the_model_s_own_python_runs_in_every_call() -> None:
    unsplit = Counting()
    placed = place(copy.deepcopy(unsplit))
    for _ in range(3):
        assert torch.equal(placed(X), unsplit(X))
    assert placed.calls == unsplit.calls == 3
    assert placed.schedule.makespan_ns > 0
    assert placed.measure(2).step_ns > 0
    assert placed.calls == 3  # nothing of what was measured is left


def test_weights_that_parametrize_keeps_are_the_model_s_own() -> None:
    """What the trace computes of them is not kept; and no split takes part in such a block."""
    unsplit = nn.Sequential(spectral_norm(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 4))
    placed = place(copy.deepcopy(unsplit))
    for model in (placed, unsplit):
        with parametrize.cached():  # the first call, for which `place` traces and measures
            (model(X) + model(X)).sum().backward()
            assert model[0].weight is model[0].weight
    for one, two in zip(placed.parameters(), unsplit.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)
    split = place(copy.deepcopy(unsplit), ["cpu:0", "cpu:1"], placer="round-robin", guard=False)
    assert torch.equal(split(X), unsplit(X))
    with parametrize.cached(), pytest.raises(baechi.ExecutionError, match="end the block"):
        split(X)
    split.unplace()


class Noting(nn.Module):
    """Its first call sets hooks that take notes for forward, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.notes, self.handle = nn.Linear(4, 4), [], None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.handle is None:
            self.handle = self.inner.register_forward_hook(self.note)
        self.notes.clear()
        return self.inner(x) + self.notes[-1]

    def note(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        del module, args
        self.notes.append(output)


def test_measured_steps_have_the_notes_that_forward_reads() -> None:
    unsplit = Noting()
    placed = place(copy.deepcopy(unsplit))
    assert torch.equal(placed(X), unsplit(X))
    assert placed.measure(2).step_ns > 0
    assert torch.equal(placed(X), unsplit(X))


def test_nothing_is_refused() -> None:
    unsplit = Counting()
    placed = place(copy.deepcopy(unsplit))
    placed(X)
    for model in (placed, unsplit):  # hooks that change what passes
        model.inner[0].register_forward_hook(lambda _, __, y: y * 2)
        model.inner[2].weight.register_hook(lambda grad: grad * 3)
    rows = []
    for model in (placed, unsplit):
        x = X.clone().requires_grad_()
        (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        grad.square().sum().backward()  # a second derivative
        rows.append((x.grad, model.inner[2].weight.grad))
    assert all(torch.equal(mine, own) for mine, own in zip(*rows, strict=True))


def test_other_calls_are_planned_once_and_run_the_model() -> None:
    unsplit = Counting()
    placed = place(copy.deepcopy(unsplit))
    for n in (3, 5, 7, 3, 5):
        x = torch.randn(n, 4)
        assert torch.equal(placed(x), unsplit(x))
        assert torch.equal(placed(x, scale=0.5), unsplit(x, scale=0.5))
    assert placed.calls == 10
    with pytest.raises(baechi.InfeasibleError):
        place(nn.Linear(4, 4), {"cpu:0": "64KiB"})(torch.zeros(1 << 16, 4))


class Kept:
    """Tensors of earlier calls, and who has them."""

    def __init__(self, length: int, step: int = 1) -> None:
        self.step, self.dtype = step, torch.float32
        self.layers: list[Any] = [{"keys": torch.ones(length, 4)}]
        self.owner, self.kind = weakref.ref(self), Kept


class Reading(nn.Module):
    def forward(self, x: torch.Tensor, kept: Kept | nn.Module) -> torch.Tensor:
        keys = kept.layers[0]["keys"] if isinstance(kept, Kept) else kept(x)
        return x @ keys.T


def test_calls_with_objects_like_one_before_are_known_at_a_glance() -> None:
    placed = place(Reading())
    state = placed_state(placed)
    seen = set()
    for kept in (Kept(3), Kept(5), Kept(3, step=2)):
        for each in (kept, copy.copy(kept)):
            assert torch.equal(placed(X, each), Reading()(X, each))
            seen.add(state._glance((X, each), {}))
        assert state._glance((X, kept), {}) in state._glances
    assert len(seen) == 3
    module = nn.Tanh()  # it may be anything
    assert torch.equal(placed(X, module), Reading()(X, module))
    assert state._glance((X, module), {}) is None
    kept.layers.append(kept.layers)  # a list that has itself has no end
    assert state._glance((X, kept), {}) is None


def test_a_shape_that_does_not_fit_is_refused() -> None:
    placed = place(nn.Linear(4, 4), {"cpu:0": "64KiB"})
    placed(torch.zeros(2, 4))
    with pytest.raises(baechi.InfeasibleError):
        placed(torch.zeros(1 << 16, 4))
    assert torch.equal(placed(torch.zeros(2, 4)), placed.bias.expand(2, 4))


def test_without_training_there_are_no_gradients() -> None:
    placed = place(Counting(), training=False)
    for _ in range(2):
        assert not placed(X).requires_grad
    assert placed.calls == 2


def test_a_model_that_no_tracer_takes_runs_on_one_device() -> None:
    unsplit = Untraceable()
    placed = place(copy.deepcopy(unsplit))
    with pytest.warns(UserWarning, match="Untraceable ran unsplit, on cpu: "):
        placed(X)
    assert torch.equal(placed(X), unsplit(X))
    with pytest.raises(AttributeError, match="ran unsplit"):
        _ = placed.schedule
    with pytest.raises(baechi.TraceError):
        place(copy.deepcopy(unsplit), {"cpu:0": "1GiB", "cpu:1": "1GiB"})(X)


class Chain(nn.Module):
    """Keeps no reference to what lies between; a loop that did would hold all of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = [x]
        for _ in range(6):
            kept.append(kept[-1] + 1)
        return kept[-1]


def test_what_python_may_hold_on_to_has_room_or_the_program_runs() -> None:
    x = torch.zeros(1 << 14)  # 64 KiB
    tight = place(Chain(), {"cpu:0": "320KiB"}, training=False)
    wide = place(Chain(), {"cpu:0": "640KiB"}, training=False)
    for placed, alone in ((tight, False), (wide, True)):
        placed(x)
        (special,) = placed._specializations
        assert (special.unsplit_on is not None) is alone
    assert tight.schedule.peak_bytes == wide.schedule.peak_bytes


@pytest.mark.parametrize("option", [{"threads_per_device": 1}, {"checkpoint": ["inner"]}])
def test_who_asks_for_the_runtime_gets_it(option: dict[str, Any]) -> None:
    placed = place(Counting(), **option)
    with pytest.warns(UserWarning, match="this Counting changes calls in Python"):
        placed(X), placed(X)
    (special,) = placed._specializations
    assert special.unsplit_on is None


def test_parts_have_no_plans_while_the_model_itself_runs() -> None:
    placed = place(Counting(), {"cpu:0": "1GiB", "cpu:1": "1GiB"}, placer="single")
    state = placed_state(placed)
    assert state is not None
    assert state.entries
    placed(X)
    assert not state.entries
    assert torch.equal(placed.inner(X), placed(X))
    assert repr(placed) == "PlacedModule(Counting, 1 specialization)"


def test_guests_run_side_by_side_and_owners_alone() -> None:
    lock, guests, owners = CallLock(), [0], [0]
    together: list[int] = []
    overlaps: list[int] = []

    def call() -> None:
        for _ in range(300):
            lock.enter()
            guests[0] += 1
            together.append(guests[0])
            overlaps.append(owners[0])
            time.sleep(0)
            lock.enter()
            assert lock.is_mine
            lock.leave()
            guests[0] -= 1
            lock.leave()

    def plan() -> None:
        for _ in range(100):
            with lock, lock:
                owners[0] += 1
                overlaps.append(owners[0] - 1 + guests[0])
                time.sleep(0)
                owners[0] -= 1

    threads = [threading.Thread(target=work) for work in (call, call, call, plan, plan)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not any(overlaps)
    assert max(together) > 1
    assert not lock.is_mine


class Carrying(nn.Module):
    """What published models keep in attributes: counts, auxiliary losses, last hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4))
        self.recurrent, self.steps, self.hidden = nn.LSTM(4, 4), 0, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        self.mode, self._ran = "regression", True  # settled by the first call: no state
        self.input_device = x.device  # which accelerate's hooks keep
        x = x * random.random()
        x, self.hidden = self.recurrent(self.inner(x)[None])
        self.loss = x.square().mean()
        return x[0]


def test_what_forward_sets_is_told_where_its_python_does_not_run() -> None:
    x, devices = torch.randn(2, 4), {"cpu:0": "1GiB", "cpu:1": "1GiB"}
    placed = baechi.place(Carrying(), "cpu", progress=False)
    random.seed(0)
    placed(x)
    drawn = random.random()
    random.seed(0)
    assert [random.random(), random.random()][1] == drawn, "planning drew, too"
    assert placed.steps == 1  # without a word
    placed.unplace()
    split = baechi.place(Carrying(), devices, placer="round-robin", progress=False)
    with pytest.warns(
        UserWarning,
        match="this Carrying changes hidden, loss, steps, the state of `random` in Python",
    ):
        split(x)
    assert any("they leave that as it is" in remark for remark in split.remarks)
    split(x)  # and is told once
    split.unplace()


class Remembers(nn.Module):
    """Goes on from call to call, or only notes or keeps what is the same in every call."""

    hidden: torch.Tensor | None = None

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.one, self.two = kind, nn.Linear(4, 4), nn.Linear(4, 4)
        self.table: torch.Tensor | None = None
        self.cached = 0
        self.register_buffer("cache", torch.zeros(64, 4))

    def positions(self, n: int) -> torch.Tensor:
        """As rotary-embedding-torch keeps them: in a buffer, with their number in an attribute."""
        if n > self.cached:
            made = torch.arange(4.0 * n).cos().view(n, 4)
            self.cache[:n], self.cached = made, n
            return made
        return self.cache[:n]

    def forward(self, x: torch.Tensor, last: torch.Tensor | None = None) -> torch.Tensor:
        made = self.one(x)
        if self.kind == "caches":
            made = made + self.positions(len(x))
        if self.kind == "goes on" and self.hidden is not None:
            made = made + self.hidden
        if self.kind == "later" and last is not None:
            made = made + (0 if self.hidden is None else self.hidden) * last
        if self.kind == "keeps" and self.table is None:
            self.table = torch.arange(4.0)
        if last is None:
            self.hidden = made.detach().mean(0)
        return self.two(made if self.table is None else made + self.table)


@pytest.mark.parametrize("kind", ["goes on", "later", "notes", "keeps", "caches"])
def test_what_goes_on_from_call_to_call_is_refused_where_results_would_differ(kind: str) -> None:
    model = Remembers(kind)
    unsplit = copy.deepcopy(model)
    devices = {"cpu:0": "1GiB", "cpu:1": "1GiB"}
    placed = place(model, devices, placer="round-robin", training=False)
    said = "reads hidden, which an earlier call sets"
    if kind == "goes on":
        with pytest.raises(baechi.TraceError, match=said):
            placed(X)
        assert model.hidden is None
        return
    with pytest.warns(UserWarning, match="changes .* in Python"), torch.no_grad():
        assert torch.equal(placed(X), unsplit(X))
    if kind == "later":
        with pytest.raises(baechi.TraceError, match=said):
            placed(X, torch.ones(4))
    with torch.no_grad():
        assert torch.equal(placed(X), unsplit(X))
    placed.unplace()
    alone = place(Remembers(kind), training=False)
    assert alone(X, torch.ones(4)).shape == X.shape
