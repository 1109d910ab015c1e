"""Micro-batches give what the loop over them gives, in every bit."""

import copy
import random
import re
import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import zoo
from fake_cuda import Gpu, sanitized
from placed import cpus, lazily, made_up_profile, one_thread, same
from scripts import tiny_llama
from seeds import covering, some
from tied import Tied
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm

import baechi
from baechi.errors import ExecutionError, InfeasibleError, InputError, TraceError
from baechi.runtime.autograd.binding import bind
from baechi.runtime.batched_calls import Microbatches, ModelWithLoss, train
from baechi.runtime.executable import Executable
from baechi.runtime.executors.cuda_streams import CudaExecutor
from baechi.runtime.runtime_checks import placed_step
from baechi.runtime.torch_compile import CompileOptions
from baechi.tracing.batch_dimension import BatchDimensions
from baechi.tracing.calling_convention import canonical_call
from baechi.tracing.pytrees import tensors_in

X = torch.arange(16).remainder(11).view(8, 2)
T = torch.arange(16).remainder(7).view(8, 2)


class Twice(nn.Module):
    """A running mean that two calls in one forward move, far from each other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.norm = nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.two(self.norm(self.one(x.float()))))
        return h.unsqueeze(1).expand(-1, 2, -1)


class Normalized(nn.Module):
    """Weights that several operators read, each as a conversion that gives the weight itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = (spectral_norm(nn.Linear(*size)) for size in ((2, 16), (16, 2)))

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x.float()).tanh()).unsqueeze(1).expand(-1, 2, -1)


def criterion(y: Tensor, t: Tensor) -> Tensor:
    """Cross entropy, of any outputs."""
    return functional.cross_entropy(y.flatten(0, -2), t.flatten() % y.shape[-1])


def left_by(model: nn.Module, *values: Tensor) -> dict[str, Tensor | None]:
    """What a step leaves: its values, all gradients and buffers."""
    found: dict[str, Tensor | None] = {f"value {i}": v.detach() for i, v in enumerate(values)}
    found |= {name: copy.deepcopy(p.grad) for name, p in model.named_parameters()}
    return found | {f"buffer {name}": b.clone() for name, b in model.named_buffers()}


def loop(
    model: nn.Module, x: Tensor, t: Tensor, weights: Sequence[float]
) -> dict[str, Tensor | None]:
    """The reference of a step."""
    losses = []
    for weight, c, d in zip(weights, x.chunk(len(weights)), t.chunk(len(weights)), strict=True):
        losses.append(weight * criterion(model(c), d))
        losses[-1].backward()
    return left_by(model, sum(losses[1:], losses[0]))


def merged(model: nn.Module, x: Tensor, t: Tensor, n: int) -> dict[str, Tensor | None]:
    """The reference of a call."""
    y = torch.cat([model(c) for c in x.chunk(n)])
    loss = criterion(y, t)
    loss.backward()
    return left_by(model, y, loss)


@cache
def traced(kind: Callable[[], nn.Module], n: int, loss: bool) -> tuple[nn.Module, baechi.Traced]:
    model = kind()
    x, t = X.chunk(n)[0], T.chunk(n)[0]
    module = ModelWithLoss(model, criterion) if loss else model
    return model, baechi.trace(module, (x,), {"targets": t} if loss else {})


def executable(
    kind: Callable[[], nn.Module],
    n: int,
    loss: bool,
    seed: int,
    options: CompileOptions | None = None,
) -> Executable:
    """Ops on random devices, and turns in a random order."""
    _, trace = traced(kind, n, loss)
    graph = trace.graph(made_up_profile(trace))
    placement = baechi.solve(graph, cpus(3), placer=baechi.RandomPlacer(seed))
    places = [torch.device("cpu")] * 3
    return Executable(
        *(trace, placed_step(trace, placement, graph), placement, places),
        threads=1,
        options=options,
        graph=graph,
        cluster=cpus(3),
        batches=n,
        own_loss=loss,
        dimensions=BatchDimensions((0,), ()),
    )


@pytest.fixture
def any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """All turns in any order that is possible."""

    def shuffled(self: Executable, segments: Sequence[object]) -> list[tuple[int, int]]:
        turns = [(row, batch) for row in range(len(segments)) for batch in range(self.batches)]
        random.Random(len(turns)).shuffle(turns)
        return turns

    monkeypatch.setattr(Executable, "_turns", shuffled)


@pytest.mark.usefixtures("any_order")
@pytest.mark.parametrize(
    ("kind", "n"), covering([Tied, partial(Tied, 0.5), Twice, Normalized], [4, 2])
)
def test_any_placement_in_any_order_of_turns(kind: Callable[[], nn.Module], n: int) -> None:
    """A call and a backward, a step, and a second step on top of its gradients."""
    with one_thread():
        for seed in range(2):
            check_calls(kind, n, seed)
            check_steps(kind, n, seed)


def check_calls(kind: Callable[[], nn.Module], n: int, seed: int, *options: CompileOptions) -> None:
    """Calls of a random placement are the loop's."""
    (model, _), plain = traced(kind, n, False), kind()
    model.load_state_dict(plain.state_dict())
    model.zero_grad()
    special = executable(kind, n, False, seed, *options)
    for again in range(2):
        torch.manual_seed(again)
        wanted = merged(plain, X, T, n)
        torch.manual_seed(again)
        y = special(parts_of(model, n, loss=False))
        loss = criterion(y, T)
        loss.backward()
        assert differing(left_by(model, y, loss), wanted) == []
    special.close()


def check_steps(kind: Callable[[], nn.Module], n: int, seed: int, *options: CompileOptions) -> None:
    """Steps of a random placement are the loop's."""
    (model, _), plain = traced(kind, n, True), kind()
    model.load_state_dict(plain.state_dict())
    model.zero_grad()
    special = executable(kind, n, True, seed, *options)
    weights = [0.5, 1.25, 0.75, 1.5][:n]
    for again in range(2):
        torch.manual_seed(again)
        wanted = loop(plain, X, T, weights)
        torch.manual_seed(again)
        calls = parts_of(special.module.model, n, loss=True)
        assert differing(left_by(model, train(special, calls, weights, None)), wanted) == []
    special.close()


@pytest.mark.usefixtures("any_order")
@pytest.mark.xdist_group("compile")
@pytest.mark.parametrize("kind", [partial(Tied, 0.5), Twice], ids=["random", "twice"])
@pytest.mark.parametrize("check", [check_calls, check_steps])
def test_any_placement_in_any_order_of_turns_compiled(
    kind: Callable[[], nn.Module], check: Callable[..., None]
) -> None:
    """The first step of each compiles in one thread; the second one is on workers."""
    try:
        with one_thread():
            check(kind, 4, 1, CompileOptions("aot_eager", {}))
    finally:
        torch._dynamo.reset()


@pytest.mark.usefixtures("any_order")
@pytest.mark.parametrize("loss", [False, True])
def test_lanes_of_a_gpu_wait_for_what_they_use(loss: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    n, (model, _), plain = 4, traced(Tied, 4, loss), Tied()
    model.load_state_dict(plain.state_dict())
    special = executable(Tied, n, loss, 1)
    weights = [1 / n] * n
    with sanitized(monkeypatch) as sanitizer, one_thread():
        program = special._compiled(copy_lanes=True)
        bound = bind(special.module, special._structure, program, special.places)
        special.close()
        gpus: Any = [Gpu() for _ in special.places]
        special._executor = CudaExecutor(program, bound, gpus)
        for _ in range(2):
            model.zero_grad()
            calls = parts_of(special.module.model, n, loss)
            value = train(special, calls, weights, None) if loss else special(calls)
            if not loss:
                criterion(value, T).backward()
    assert not sanitizer.found
    for _ in range(2):
        plain.zero_grad()
        wanted = loop(plain, X, T, weights) if loss else merged(plain, X, T, n)
    found = left_by(model, value)
    assert [name for name in wanted if name in found and not same(found[name], wanted[name])] == []


def parts_of(model: nn.Module, n: int, loss: bool) -> list[Any]:
    """The calls of the micro-batches."""
    kwargs = {"targets": T} if loss else {}
    batch = {"x": 0} if not loss else {"args.0": 0, "targets": 0}
    return Microbatches(n, batch).split(canonical_call(model, (X,), kwargs))


def differing(found: dict[str, Tensor | None], wanted: dict[str, Tensor | None]) -> list[str]:
    """The names of what is not equal in every bit."""
    return [name for name, value in wanted.items() if not same(found[name], value)]


def test_a_model_with_its_own_loss_and_a_tied_head_trains_by_steps() -> None:
    """Whose tokens count by their share; gradients stay from step to step."""
    plain, _, kwargs = zoo.gpt2()
    kwargs = {name: torch.cat([value] * 2) for name, value in kwargs.items()}
    placed = lazily(copy.deepcopy(plain), microbatches=2)
    weights = [0.25, 0.75]
    with one_thread():
        for _ in range(2):
            found = placed.step(**kwargs, weights=weights)
            losses = []
            for i, weight in enumerate(weights):
                part = {name: value.chunk(2)[i] for name, value in kwargs.items()}
                losses.append(weight * plain(**part).loss)
                losses[-1].backward()
            assert (
                differing(left_by(placed, found), left_by(plain, sum(losses[1:], losses[0]))) == []
            )
    assert len(set(placed.placement.devices)) == 2


@pytest.mark.parametrize("n", [2, "auto"])
def test_an_example_with_its_own_loss_plans_a_step(n: int | str) -> None:
    class Scored(Chain):
        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            y = super().forward(x)
            return {"loss": square(y, labels), "logits": y}

    plain, kwargs = Scored(8), {"x": torch.randn(6, 8), "labels": torch.randn(6, 8)}
    placed = lazily(copy.deepcopy(plain), microbatches=n, placer="auto", example_kwargs=kwargs)
    planned = placed.placement
    number = baechi.runtime.derived_class.placed_state(placed).microbatches.n
    with one_thread():
        found = placed.step(**kwargs)
        for i in range(number):
            part = {name: value.chunk(number)[i] for name, value in kwargs.items()}
            (plain(**part)["loss"] / number).backward()
    assert placed.placement is planned
    assert differing(left_by(placed, found), left_by(plain, found)) == []
    if number > 1:
        with pytest.raises(InputError, match=r"its own loss.*placed\.step"):
            placed(**kwargs)


@pytest.mark.parametrize(("n", "keyed"), [(2, True), ("auto", False)])
def test_an_example_with_a_part_of_a_loss_waits_for_the_loss(n: Any, keyed: bool) -> None:
    """As an autoencoder's, which returns what it rebuilt and its divergence."""

    class Encoder(Chain):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            return {"rebuilt": y, "divergence": y.mean()} if keyed else (y, y.mean())

    def loss(result: Any, target: Tensor) -> Tensor:
        y, divergence = result.values() if keyed else result
        return square(y, target) + divergence

    plain, x = Encoder(8), torch.randn(6, 8)
    placed = lazily(copy.deepcopy(plain), microbatches=n, placer="auto", example_args=(x,))
    assert not hasattr(placed, "placement")
    with one_thread():
        with pytest.raises(InputError, match=r"loss.*step\(\.\.\., targets=\.\.\., loss="):
            placed.step(x)
        found = placed.step(x, targets=x, loss=loss)
        number = baechi.runtime.derived_class.placed_state(placed).microbatches.n
        for part in x.chunk(number):
            (loss(plain(part), part) / number).backward()
    assert placed.placement is not None
    assert differing(left_by(placed, found), left_by(plain, found)) == []


def test_what_a_model_asks_of_its_own_values_does_not_keep_it_whole_in_a_step() -> None:
    """Where another answer makes it raise an error."""

    class Sampler(Chain):
        def forward(self, x: Tensor) -> Any:
            mean = super().forward(x)
            if (x.sub(mean).square() < 0).any():  # as torch.distributions check what they are given
                raise ValueError
            return mean

    plain, x = Sampler(8), torch.randn(6, 8)
    placed = lazily(copy.deepcopy(plain), microbatches=2)
    with one_thread():
        found = placed.step(x, targets=x, loss=square)
        for part in x.chunk(2):
            (square(plain(part), part) / 2).backward()
    assert len(set(placed.placement.devices)) == 2
    assert differing(left_by(placed, found), left_by(plain, found)) == []


def masked_call(padding: list[int]) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """Arguments of a Llama whose rows begin with so much padding, and those of its two halves."""
    ids = torch.arange(3, 27).view(4, 6)
    mask = (torch.arange(6) >= torch.tensor(padding)[:, None]).long()
    call = {"input_ids": ids, "attention_mask": mask, "labels": ids.where(mask > 0, -100)}
    return call, [{name: tensor[i : i + 2] for name, tensor in call.items()} for i in (0, 2)]


def test_micro_batches_may_differ_in_what_their_masks_mask() -> None:
    """Forward drops a mask that masks nothing, which one part's says of no other part's."""
    plain, model = (tiny_llama(attn_implementation="sdpa") for _ in range(2))
    placed = lazily(model, microbatches=2, placer=baechi.RandomPlacer(1))
    with one_thread():
        for padding in ([0, 0, 0, 0], [0, 0, 2, 1]):
            call, rows = masked_call(padding)
            plain.zero_grad()
            placed.zero_grad()
            losses = [0.5 * plain(**row).loss for row in rows]
            losses[0].backward()
            losses[1].backward()
            wanted, found = left_by(plain, sum(losses)), left_by(placed, placed.step(**call))
            kernels = {"rtol": 1e-5, "atol": 1e-7} if any(padding) else {"rtol": 0.0, "atol": 0.0}
            torch.testing.assert_close(found, wanted, **kernels)
    placed.unplace()


def test_micro_batches_of_a_call_may_differ_in_what_their_masks_mask() -> None:
    plain, model = (tiny_llama(attn_implementation="sdpa") for _ in range(2))
    placed = lazily(model, microbatches=2, placer=baechi.RandomPlacer(1))
    call, rows = masked_call([0, 0, 2, 1])
    with one_thread(), torch.no_grad():
        logits = torch.cat([plain(**row).logits for row in rows])
        del call["labels"]
        torch.testing.assert_close(placed(**call).logits, logits, rtol=1e-5, atol=1e-7)
    placed.unplace()


class UpToTheLast(nn.Module):
    """Sums rows up to the last one that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        return self.two(self.one(x)[:, : int(length.max())].sum(1))


def test_micro_batches_that_must_differ_in_what_forward_reads_are_refused() -> None:
    placed = lazily(UpToTheLast(), microbatches=2)
    x = torch.ones(4, 3, 2)
    assert placed(x, torch.tensor([1, 2, 2, 1])).shape == (4, 2)
    with pytest.raises(TraceError, match="Micro-batches differ in what forward asks"):
        placed(x, torch.tensor([1, 2, 3, 1]))
    placed.unplace()


class Choosing(nn.Module):
    """Looks at values, so that it stays whole."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return sum((self.inner(x[row]).sum() for row in range(int(x[:, 0].argmax()))), x)


class WithAPart(nn.Module):
    """Returns its own loss, as the mixtures of experts of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.part, self.two = nn.Linear(2, 2), Choosing(), nn.Linear(2, 4)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        y = self.two(self.part(self.one(x)))[..., 1:]
        return {"loss": functional.cross_entropy(y, labels), "y": y[..., None]}


def test_a_step_of_a_model_with_a_part_that_stays_whole() -> None:
    plain, model = WithAPart(), WithAPart()
    placed = lazily(model, microbatches=2)
    x, labels = torch.randn(8, 2), torch.arange(8) % 3
    with one_thread():
        losses = [
            0.5 * plain(c, t)["loss"] for c, t in zip(x.chunk(2), labels.chunk(2), strict=True)
        ]
        losses[0].backward()
        losses[1].backward()
        found = left_by(placed, placed.step(x, labels=labels))
        assert differing(found, left_by(plain, sum(losses))) == []
    assert "module granularity" in placed.traced.rung
    placed.unplace()


def test_a_call_gives_the_caller_what_the_model_would() -> None:
    """Gradients of the batch, nested outputs, and no graph where none is wanted."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor, shift: Tensor, scale: float) -> dict[str, Any]:
            h = torch.relu(self.one(x)) + shift
            return {"rows": h, "others": (self.two(h).t() * scale, None)}

    plain, shift = Pair(), torch.randn(3)
    placed = lazily(copy.deepcopy(plain), microbatches=2)
    x = torch.randn(4, 3)
    mine, own = x.clone().requires_grad_(), x.clone().requires_grad_()
    with one_thread():
        found = placed(mine, shift, scale=2.0)
        parts = [plain(c, shift, scale=2.0) for c in own.chunk(2)]
        wanted = (
            torch.cat([p["rows"] for p in parts]),
            torch.cat([p["others"][0] for p in parts], 1),
        )
        assert found["others"][1] is None
        for rows in (tensors_in(found), wanted):
            sum((row * row).sum() for row in rows).backward()
        assert all(map(torch.equal, tensors_in(found), wanted))
        assert differing(left_by(placed, mine.grad), left_by(plain, own.grad)) == []
        with torch.no_grad():
            assert not placed(x, shift, scale=2.0)["rows"].requires_grad
        with pytest.raises(ExecutionError, match="needs a gradient"):
            placed.step(mine, shift, scale=2.0, targets=x, loss=lambda y, t: (y["rows"] - t).sum())


def test_what_micro_batches_cannot_be_is_said() -> None:
    placed = lazily(Tied(), microbatches=4)
    with pytest.raises(InputError, match=r"a batch of 6 .* into 4 .*one of 1, 2, 3, 6"):
        placed(X[:6])
    with pytest.raises(InputError, match=r"a batch of 0 .* into 4 .*Give a batch of 4"):
        placed(X[:0])
    for weights in ([1.0], torch.tensor(1.0), [1, 2, 3, "a"]):
        with pytest.raises(InputError, match="number for each of the 4"):
            placed.step(X, targets=T, loss=criterion, weights=weights)
    with pytest.raises(InputError, match="leave loss= out"):
        placed.step(X, loss=criterion)
    with pytest.raises(InputError, match="different numbers of samples: x has 8, targets has 16"):
        lazily(Tied(), microbatches=2, batch={"x": 0, "targets": 0}).step(
            X, targets=T.flatten(), loss=criterion
        )
    with pytest.raises(InputError, match=r"batch has 'x': 2, but .* x \[8, 2\]"):
        lazily(Tied(), microbatches=2, batch={"x": 2, "targets": 0})(X)
    with pytest.raises(InputError, match=r"batch has 'target': 0, but .*Tied takes x"):
        lazily(Tied(), microbatches=2, batch={"x": 0, "target": 0})
    with pytest.raises(InputError, match="cuda_graphs= does not go with microbatches='auto'"):
        lazily(Tied(), microbatches="auto", cuda_graphs="auto")
    with pytest.raises(InputError, match="verify= does not go with microbatches"):
        lazily(Tied(), microbatches=2, verify=True)


class Chain(nn.Sequential):
    """Layers that two devices can share well, if there are several batches."""

    def __init__(self, width: int) -> None:
        super().__init__(*(nn.Linear(width, width) for _ in range(2)))


def square(y: Tensor, t: Tensor) -> Tensor:
    """The mean of the squares."""
    return (y - t).square().mean()


@pytest.mark.parametrize(("width", "batch", "several"), [(8, 3, False), (512, 268, True)])
def test_auto_takes_the_number_of_micro_batches_with_the_shortest_step(
    width: int, batch: int, several: bool
) -> None:
    model, x = Chain(width), torch.randn(batch, width)
    other = copy.deepcopy(model)
    placed = lazily(model, microbatches="auto", placer="auto")
    with one_thread():
        loss = placed.step(x, targets=x, loss=square)
    state = baechi.runtime.derived_class.placed_state(placed)
    n, numbers = state.microbatches.n, Microbatches(0).choices(canonical_call(other, (x,), {}))
    assert (n > 1) == several
    steps = {}
    if n > 1:  # where it is 1 there are no turns in order
        steps[n] = placed.rhythm.step_ns + 20_000 * len(placed.rhythm.turns)
    for each in (row for row in numbers if row not in steps):
        alone = lazily(copy.deepcopy(other), microbatches=each, placer="auto")
        alone.step(x, targets=x, loss=square)
        assert alone.rhythm is not None
        steps[each] = alone.rhythm.step_ns + 20_000 * len(alone.rhythm.turns)
    assert n == min(steps, key=steps.__getitem__)
    assert f"chose {n}, by predicted steps (1: " in placed.report()
    with one_thread():
        for c in x.chunk(n):
            (square(other(c), c) / n).backward()
    rows = zip(placed.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(mine.grad, own.grad) for mine, own in rows)
    assert torch.isfinite(loss)
    if several:
        with pytest.raises(InputError, match=f"cannot be cut into {n} equal"):
            placed(x[:-1])


def test_auto_is_one_where_samples_are_mixed_and_says_why() -> None:
    placed = lazily(Mixes(), microbatches="auto", example_args=(X.float(),))
    with one_thread():
        assert torch.equal(placed(X.float()), Mixes()(X.float()))
    (remark,) = (text for text in placed.remarks if "chose 1" in text)
    assert re.search(r"Not 2: .*softmax", remark)
    numbers = {6: [1, 2, 6], 15: [1, 3, 15], 24: [1, 2, 4, 8, 24], 128: [1, 2, 4, 8, 16, 32]}
    for size, expected in numbers.items():
        call = canonical_call(Mixes(), (torch.ones(size, 1),), {})
        assert Microbatches(0).choices(call) == expected


class Mixes(nn.Module):
    """A softmax over the batch."""

    def forward(self, x: Tensor) -> Tensor:
        return x.softmax(0)


def test_hooks_of_parameters_run_once_a_step_or_are_refused() -> None:
    model, seen = Tied(), []
    placed = lazily(model, microbatches=4)
    weight = placed.layers[0].weight
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    placed.step(X, targets=T, loss=criterion)
    assert len(seen) == 1
    assert torch.equal(seen[0], weight.grad)
    weight.register_hook(lambda g: g)
    with pytest.raises(ExecutionError, match="register_post_accumulate_grad_hook"):
        placed.step(X, targets=T, loss=criterion)


def test_one_plan_is_for_all_losses_of_one_line() -> None:
    """A loss that is written in the training loop is another function in each turn of it."""
    placed = lazily(Tied(), microbatches=2)
    for _ in range(3):
        placed.step(X, targets=T, loss=lambda y, t: 2 * criterion(y, t))
    state = baechi.runtime.derived_class.placed_state(placed)
    assert len(state.steps) == 1
    assert sum(len(entry.specializations) for entry in state.steps.values()) == 1


def test_what_a_loss_notes_in_a_dict_is_warned_of_and_not_left_by_its_trace() -> None:
    placed, notes, calls = lazily(Tied(), microbatches=2), {}, [0]

    def noting(y: Tensor, t: Tensor) -> Tensor:
        calls[0] += 1
        notes["loss"] = criterion(y, t)
        return notes["loss"]

    with pytest.warns(UserWarning, match="changes values_of_loss in Python"):
        placed.step(X, targets=T, loss=noting)
    placed.step(X, targets=T, loss=noting)
    assert (notes, calls) == ({}, [0])
    assert len(baechi.runtime.derived_class.placed_state(placed).steps) == 1


def test_what_is_no_loss_is_named() -> None:
    placed = lazily(Tied(), microbatches=2)
    with pytest.raises(TraceError, match="loss= returns a float"):
        placed.step(X, targets=T, loss=lambda y, t: criterion(y, t).item())
    with pytest.raises(TraceError, match="loss= returns a dict"):
        placed.step(X, targets=T, loss=lambda y, t: {"rows": y.sum(), "loss": criterion(y, t)})
    with pytest.raises(InputError, match=r"targets.*give loss= beside targets="):
        placed.step(X, targets=T)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of another kind in each torch
        scripted = torch.jit.script(nn.CrossEntropyLoss())
    for loss in ("cross entropy", scripted):
        with pytest.raises(InputError, match="give a function in Python"):
            placed.step(X, targets=T, loss=loss)


class Reading(nn.Module):
    """It stays whole, since it reads a number."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum().item() > 0 else -x


def test_a_loss_beside_what_stays_whole_is_named_too() -> None:
    placed = lazily(nn.Sequential(Reading(), nn.Linear(4, 2)), microbatches=2)
    x, t = torch.randn(4, 4), torch.randn(4, 2)
    with pytest.raises(InputError, match="the loss of a step is no tensor"):
        placed.step(x, targets=t, loss=lambda y, t: (y - t).sum().item())
    placed.step(x, targets=t, loss=nn.functional.mse_loss)
    assert "How Sequential with its loss was traced" in str(placed.report())
    placed.unplace()


def test_a_step_that_would_leave_no_gradient_is_refused() -> None:
    def detached(y: Tensor, t: Tensor) -> Tensor:
        return criterion(y, t).detach()

    placed = lazily(Tied(), microbatches=2)
    with pytest.raises(ExecutionError, match="the loss is detached"):
        placed.step(X, targets=T, loss=detached)
    with torch.inference_mode():
        placed.step(X, targets=T, loss=criterion)
    assert all(parameter.grad is not None for parameter in placed.parameters())
    placed.requires_grad_(False)
    with pytest.raises(ExecutionError, match="no parameter needs one"):
        placed.step(X, targets=T, loss=criterion)
    with pytest.raises(ExecutionError, match="training=False"):
        lazily(Tied(), microbatches=2, training=False).step(X, targets=T, loss=criterion)


def test_an_error_in_a_loss_of_torch_names_no_line_of_ours() -> None:
    torch.manual_seed(0)
    placed = lazily(Chain(4), microbatches=2)
    with pytest.raises(ExecutionError, match=r"^cross_entropy_loss failed on .*out of bounds"):
        placed.step(torch.rand(4, 4), targets=torch.full((4,), 9), loss=functional.cross_entropy)


def test_a_step_of_many_holds_what_one_of_few_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the order of turns goes back as soon as it can."""

    def one_by_one(self: Executable, segments: Sequence[object]) -> list[tuple[int, int]]:
        return [(row, batch) for batch in range(self.batches) for row in range(len(segments))]

    monkeypatch.setattr(Executable, "_turns", one_by_one)
    peaks = []
    for n in (4, 8):
        x = torch.arange(32 * n).remainder(11).view(2 * n, 16)
        placed = lazily(Tied(), microbatches=n)
        placed.step(x, targets=x, loss=criterion)
        placed.zero_grad()
        with placed.metered() as meter:
            placed.step(x, targets=x, loss=criterion)
        peaks.append(meter.peak_bytes)
    few, many = map(sum, peaks)
    assert many <= 1.02 * few


class Wide(nn.Module):
    """Weights that are more than a micro-batch: an embedding, layers, and a head of its own."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(100, 64), nn.Linear(64, 100, bias=False)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x)
        for layer in self.layers:
            h = torch.tanh(layer(h))
        return self.head(h)


@pytest.mark.parametrize(("tied", "inside", "n"), [(0, 1, 4), (1, 1, 4), (1, 0, 8)])
def test_gradients_that_wait_to_be_added_are_in_the_predicted_peak(
    tied: bool, inside: bool, n: int
) -> None:
    """Those of a shared weight until they meet, and the sum that the second micro-batch begins."""
    x = torch.arange(8 * n).remainder(97).view(2 * n, 4)
    placed = lazily(Wide(tied), microbatches=n)

    def step() -> None:
        if inside:
            placed.step(x, targets=x, loss=criterion)
        else:
            criterion(placed(x), x).backward()

    step()
    placed.zero_grad()
    with placed.metered() as meter:
        step()
    said = placed.rhythm.peak_bytes
    for seen, predicted in zip(meter.peak_bytes, said, strict=True):
        assert 0.97 * seen <= predicted <= 1.15 * seen


class Branched(nn.Module):
    """Sums whose backwards take no time, one after another on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.a(x), self.b(x)
        return (a * 2 + a.tanh()) * (b * 2 + b.tanh())


@pytest.mark.parametrize("seed", [0, 2])
def test_a_step_takes_the_turns_of_its_plan(seed: int) -> None:
    model = nn.Sequential(Branched(), Branched(), Branched())
    placed = lazily(model, microbatches=2, placer=baechi.RandomPlacer(seed))
    placed.step(torch.rand(4, 8), targets=torch.rand(4, 8), loss=functional.mse_loss)
    assert placed.rhythm.turns == placed.placement.turns
    assert placed.rhythm.peak_bytes == placed.schedule.peak_bytes
    assert placed.rhythm.step_ns == placed.schedule.makespan_ns


class Deep(nn.Module):
    """Layers with skips, whose activations are more than their weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        return x


# By default a random one, and the usual one.
@pytest.mark.parametrize(
    ("planned", "inside"),
    [
        pytest.param((placer, n), inside, marks=() if inside is usual else (pytest.mark.slow,))
        for placer, n, usual in [
            *((baechi.RandomPlacer(0), 4, True), ("auto", 4, False)),
            *(("round-robin", 4, None), (baechi.RandomPlacer(1), 8, None)),
        ]
        for inside in (True, False)
    ],
)
def test_no_device_of_a_plan_that_parts_everywhere_holds_more_than_predicted(
    planned: tuple[str | baechi.RandomPlacer, int], inside: bool
) -> None:
    placer, n = planned
    x = torch.randn(64 * n, 16)
    placed = lazily(Deep(), microbatches=n, placer=placer)

    def step() -> None:
        if inside:
            placed.step(x, targets=x, loss=square)
        else:
            square(placed(x), x).backward()

    step()
    placed.zero_grad()
    with placed.metered() as meter:
        step()
    for seen, said in zip(meter.peak_bytes, placed.rhythm.peak_bytes, strict=True):
        assert seen <= 1.002 * said  # a sum of losses is in no graph


def test_a_call_that_keeps_more_than_there_is_is_refused_and_a_step_is_not() -> None:
    x = torch.randn(512, 16)
    free = lazily(Deep(), microbatches=4)
    square(free(x), x).backward()
    room = max(free.rhythm.peak_bytes) * 2 // 3
    with patch("baechi.placing.probe", lambda _: cpus(2, room)):
        placed = baechi.place(
            *(Deep(), ["cpu:0", "cpu:1"]),
            microbatches=4,
            placer="round-robin",
            costs="estimate",
            threads_per_device=1,
            progress=False,
        )
    with pytest.raises(InfeasibleError, match=r"4 micro-batches, .*keeps less"):
        placed(x)
    placed.step(x, targets=x, loss=square)
    placed.zero_grad()
    with placed.metered() as meter:
        placed.step(x, targets=x, loss=square)
    assert max(meter.peak_bytes) <= room


class Blocks(nn.Module):
    """Blocks between a first and a last layer, with dropout where it is wanted."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 16), nn.Linear(16, 4)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(dropout), nn.Linear(64, 16))
            for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = h + block(h)
        return self.last(h)


class Rounded(Blocks):
    """The same in bfloat16 inside."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = super().forward(x)
        return y.float()


def loop_of(model: nn.Module, x: Tensor, t: Tensor, n: int, scale: float = 1.0) -> Tensor:
    """The loss of the reference of a step, whose gradients are in `.grad`."""
    losses = []
    for c, d in zip(x.chunk(n), t.chunk(n), strict=True):
        losses.append(square(model(c), d) * (scale / n))
        losses[-1].backward()
    return sum(losses[1:], losses[0]).detach()


@pytest.mark.parametrize(
    ("checkpoint", "dropout"), covering(["blocks.1", ("blocks.*",)], [0.0, 0.5])
)
def test_a_step_runs_parts_again_and_gives_the_same_bits(
    checkpoint: str | tuple[str, ...], dropout: float
) -> None:
    plain, x, t = Blocks(dropout), torch.randn(32, 4), torch.randn(32, 4)
    placed = lazily(copy.deepcopy(plain), microbatches=4, checkpoint=checkpoint)
    with one_thread():
        for seed in range(2):  # the second adds to the gradients of the first
            torch.manual_seed(seed)
            wanted = loop_of(plain, x, t, 4)
            torch.manual_seed(seed)
            found = placed.step(x, targets=t, loss=square)
            assert differing(left_by(placed, found), left_by(plain, wanted)) == []
    phase = placed.program.phases[0]
    assert any(segment.again for segment in phase.segments)
    assert len(set(placed.placement.devices)) == 2


def test_a_step_that_runs_parts_again_holds_less_and_no_more_than_predicted() -> None:
    x, peaks = torch.randn(512, 4), {}
    for checkpoint in (None, "blocks.?"):
        placed = lazily(Blocks(), microbatches=4, checkpoint=checkpoint)
        placed.step(x, targets=x, loss=square)
        placed.zero_grad()
        with placed.metered() as meter:
            placed.step(x, targets=x, loss=square)
        rows = zip(meter.peak_bytes, placed.rhythm.peak_bytes, strict=True)
        assert all(seen <= 1.002 * said for seen, said in rows)
        peaks[checkpoint] = sum(meter.peak_bytes)
    assert peaks["blocks.?"] < 0.7 * peaks[None]


def test_autocast_is_of_the_model_or_around_a_call_and_not_around_a_step() -> None:
    """Each micro-batch casts weights for itself, as in an autocast of its own."""
    x, t = torch.randn(8, 4), torch.randn(8, 4)
    inside, around = Rounded(), Blocks()
    lower = partial(torch.autocast, "cpu", torch.bfloat16)
    with one_thread():
        placed = lazily(copy.deepcopy(inside), microbatches=2)
        wanted = loop_of(inside, x, t, 2)
        found = placed.step(x, targets=t, loss=square)
        assert differing(left_by(placed, found), left_by(inside, wanted)) == []

        placed = lazily(copy.deepcopy(around), microbatches=2)
        with lower():
            y = placed(x)
            with pytest.raises(ExecutionError, match=r"step\(\) was called under autocast"):
                placed.step(x, targets=t, loss=square)
        parts = []
        for c in x.chunk(2):
            with lower():
                parts.append(around(c))
        z = torch.cat(parts)
        assert y.dtype == torch.bfloat16
        for result in (y, z):
            square(result, t).backward()
        assert differing(left_by(placed, y), left_by(around, z)) == []


def test_steps_train_with_a_scaler_clipping_and_an_optimizer_as_the_loop_does() -> None:
    """The scale goes into the weights; every parameter is equal in every bit after three steps."""
    plain = Blocks()
    placed = lazily(copy.deepcopy(plain), microbatches=4, optimizer="adamw")
    models: list[Any] = [plain, placed]
    optimizers = [torch.optim.AdamW(model.parameters(), 0.1) for model in models]
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**12) for _ in models]
    with one_thread():
        for seed in range(3):
            torch.manual_seed(seed)
            x, t = torch.randn(8, 4), torch.randn(8, 4)
            for model, optimizer, scaler in zip(models, optimizers, scalers, strict=True):
                scale = float(scaler.scale(torch.ones(())))
                if model is plain:
                    loop_of(model, x, t, 4, scale)
                else:
                    model.step(x, targets=t, loss=square, weights=[scale / 4] * 4)
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    assert scalers[0].get_scale() == scalers[1].get_scale()
    assert differing(placed.state_dict(), plain.state_dict()) == []


def test_a_step_of_one_batch_is_verified_and_refuses_cuda_graphs() -> None:
    plain, x, t = Blocks(), torch.randn(8, 4), torch.randn(8, 4)
    with one_thread():
        placed = lazily(copy.deepcopy(plain), verify=True)
        wanted = loop_of(plain, x, t, 1)
        found = placed.step(x, targets=t, loss=square)
        assert differing(left_by(placed, found), left_by(plain, wanted)) == []


def _sum_of_squares(y: Any, t: Tensor) -> Tensor:
    rows = [row for row in tensors_in(y) if row.is_floating_point()]
    return torch.stack([row.float().square().mean() for row in rows]).sum() + 0 * t.sum()


_IN_BATCHES = ["gpt2", "bert", "t5", "llama", "vit", "lstm_lm", "branches", "resnet_eval"]


@pytest.mark.parametrize("name", some(_IN_BATCHES, 8))
def test_no_device_holds_more_than_predicted_in_a_step_of_a_model(name: str) -> None:
    model, args, kwargs = zoo.MODELS[name]()
    given = {f"{i}": value for i, value in enumerate(args)} | kwargs
    given = {key: torch.cat([v] * 4) if torch.is_tensor(v) else v for key, v in given.items()}
    args = [given.pop(f"{i}") for i in range(len(args))]
    if "labels" not in given:
        given |= {"targets": torch.zeros(len(args[0])), "loss": _sum_of_squares}
    placed = lazily(model, microbatches=4, placer=baechi.RandomPlacer(1))
    placed.step(*args, **given)
    placed.zero_grad()
    with placed.metered() as meter:
        placed.step(*args, **given)
    for seen, said in zip(meter.peak_bytes, placed.rhythm.peak_bytes, strict=True):
        assert seen <= 1.002 * said
