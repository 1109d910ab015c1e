"""Checks that every rank of a job makes, one after the other; `test_ranks.py` starts them.

    torchrun --nproc-per-node 2 tests/support/rank_checks.py FOLDER CHECK CHECK ...

Each rank has the unsplit model beside the placed one, and compares in every bit. What a rank finds
goes to `FOLDER/RANK.json`: by check a text, empty where all is as it should be.
"""

import copy
import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tied import Tied
from torch import Tensor, nn
from torch.nn import functional

import baechi
from baechi.processes.agreement import trace_of_all
from baechi.processes.world import Ranks
from baechi.runtime.autograd.tape import TapeCode

Check = Callable[[Ranks], None]
CHECKS: dict[str, Check] = {}
TIMEOUT_S = 10
CHECKPOINT = str(Path(sys.argv[1]).parent / "checkpoint") if __name__ == "__main__" else ""
X = torch.arange(16).remainder(11).view(8, 2)
T = torch.arange(16).remainder(7).view(8, 2)


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


def criterion(y: Tensor, t: Tensor) -> Tensor:
    return functional.cross_entropy(y, t.flatten())


def place(model: nn.Module, ranks: Ranks, seed: int = 0, **options: Any) -> Any:
    cheap = {"costs": "estimate", "placer": baechi.RandomPlacer(seed), "progress": False}
    return baechi.place(model, ranks, **cheap | options)


def twins(**options: Any) -> tuple[nn.Module, nn.Module]:
    """A model to be placed, and one like it."""
    model = Tied(**options)
    return model, copy.deepcopy(model)


def equal(a: Tensor, b: Tensor, what: str = "") -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0, msg=lambda text: f"{what}: {text}")


def same_state(placed: nn.Module, plain: nn.Module) -> int:
    """Compare what this rank has of parameters, gradients and buffers; how many tensors that is."""
    mine = {n: t for n, t in placed.state_dict(keep_vars=True).items() if not t.is_meta}
    whole = plain.state_dict(keep_vars=True)
    for name, tensor in mine.items():
        equal(tensor.detach(), whole[name].detach(), name)
        if whole[name].grad is not None:
            assert tensor.grad is not None, name
            equal(tensor.grad, whole[name].grad, f"the gradient of {name}")
    return len(mine)


def loop(model: nn.Module, n: int, x: Tensor = X, t: Tensor = T) -> Tensor:
    losses = []
    for c, d in zip(x.chunk(n), t.chunk(n), strict=True):
        losses.append(criterion(model(c), d) / n)
        losses[-1].backward()
    return sum(losses[1:], losses[0]).detach()


@check
def steps_are_the_loop(ranks: Ranks) -> None:
    """Loss, gradients and buffers of two steps; placements in which every rank sends."""
    cases = ((0, 4), (3, 1), (1, 2), (2, 8))
    for seed, n in cases[:2] if ranks.size == 2 else cases:
        model, plain = twins()
        placed = place(model, ranks, seed, microbatches=n)
        for _ in range(2):
            found = placed.step(X, targets=T, loss=criterion)
            equal(found, loop(plain, n), "the loss")
            same_state(placed, plain)
        assert len(set(placed.placement.devices)) == ranks.size


@check
def calls_are_the_model(ranks: Ranks) -> None:
    """Outputs are on every rank, with gradients; another shape and mode are plans of their own."""
    for n in (None, 4):
        model, plain = twins()
        placed = place(model, ranks, microbatches=n)
        for rows in (8,) if n and ranks.size == 2 else (8, 4):
            y = placed(X[:rows])
            z = torch.cat([plain(c) for c in X[:rows].chunk(n or 1)])
            equal(y, z, "the output")
            assert y.requires_grad
            criterion(y, T[:rows]).backward()
            criterion(z, T[:rows]).backward()
            assert same_state(placed, plain) < len(plain.state_dict())
        placed.eval(), plain.eval()
        with torch.no_grad():
            equal(placed(X), torch.cat([plain(c) for c in X.chunk(n or 1)]), "evaluation")


@check
def random_numbers_are_those_of_one_process(ranks: Ranks) -> None:
    for seed in range(1 if ranks.size == 2 else 2):
        model, plain = twins(dropout=0.5)
        placed = place(model, ranks, seed, microbatches=2)
        torch.manual_seed(5)
        y = placed(X)
        criterion(y, T).backward()
        after = torch.rand(1)
        torch.manual_seed(5)
        z = torch.cat([plain(c) for c in X.chunk(2)])
        criterion(z, T).backward()
        equal(y, z, "the output")
        equal(after, torch.rand(1), "the generator afterwards")
        same_state(placed, plain)


@check
def compiled_tapes_are_the_loop(ranks: Ranks) -> None:
    """A rank waits for others that compile in a first step, and no longer after that."""
    graphs: list[Any] = []

    def slow(graph: Any, _: Any) -> Any:
        if ranks.rank == 0 and not graphs:
            time.sleep(2.5)
        graphs.append(graph)
        return graph.forward

    model, plain = twins()
    placed = place(model, ranks, 3, microbatches=2, compile={"backend": slow})
    usual, ranks.timeout_s = ranks.timeout_s, 1
    numbers = []
    for _ in range(2):
        equal(placed.step(X, targets=T, loss=criterion), loop(plain, 2), "the loss")
        same_state(placed, plain)
        numbers.append(len(graphs))
    assert numbers[0] == numbers[1] > 0
    ranks.timeout_s = usual


class Chosen(nn.Module):
    """Reads what a mask chooses, and its size; fails if that is not a given one."""

    def __init__(self, wanted: int | None) -> None:
        super().__init__()
        self.first, self.last, self.wanted = nn.Linear(4, 4), nn.Linear(4, 4), wanted

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        rows = self.first(x)[mask]
        if self.wanted is not None:
            torch._check(rows.numel() == self.wanted)
        return self.last(x).sum() * rows.shape[0] + self.last(rows).sum()


@check
def sizes_and_numbers_that_values_decide_come_over(ranks: Ranks) -> None:
    x = torch.arange(16.0).view(4, 4)
    three, one = torch.tensor([True, True, False, True]), torch.tensor([False, True, False, False])
    for wanted, masks in ((None, (three, one)), (12, (three, three.flip(0)))):
        for seed in range(4):
            model = Chosen(wanted)
            placed = place(copy.deepcopy(model), ranks, seed, example_args=(x, three))
            for mask in masks:
                equal(placed(x, mask), model(x, mask))


@check
def what_runs_again_is_the_same(ranks: Ranks) -> None:
    model, plain = twins(dropout=0.5)
    placed = place(model, ranks, microbatches=4, checkpoint="layers.*")
    torch.manual_seed(5)
    found = placed.step(X, targets=T, loss=criterion)
    torch.manual_seed(5)
    equal(found, loop(plain, 4), "the loss")
    same_state(placed, plain)


@check
def streams_are_calls(ranks: Ranks) -> None:
    model, plain = twins()
    placed = place(model.eval(), ranks, training=False)
    requests = [(X + i) % 11 for i in range(6)]
    stream = placed.stream(requests, in_flight=3)
    equal(next(stream), plain.eval()(requests[0]).detach(), "the first request")
    equal(placed(X), plain(X).detach(), "a call in between, which waits for those under way")
    for y, x in zip(stream, requests[1:], strict=True):
        equal(y, plain(x).detach(), "a request")


@check
def a_language_model_generates(ranks: Ranks) -> None:
    from scripts import tiny_llama

    model = tiny_llama().eval()
    plain = copy.deepcopy(model)
    ids = torch.tensor([[3, 4, 5]])
    placed = place(model, ranks, training=False)
    options = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    equal(placed.generate(ids, **options), plain.generate(ids, **options), "tokens")


@check
def one_report_has_every_rank(ranks: Ranks) -> None:
    """The same on all; what each did in its order, and every send with a receive."""
    placed = place(Tied(), ranks, microbatches=4)
    placed.step(X, targets=T, loss=criterion)
    file = Path(CHECKPOINT).with_name(f"trace {ranks.rank}")
    text = placed.report(trace=file)
    assert {text} == {*ranks.exchange("test", text)}
    table = text[text.index("The latest step of each rank") :].split()
    events = json.loads(file.read_text())["traceEvents"]
    turns = {f"{way} of batch {n}" for way in ("forward", "backward") for n in range(4)}
    names = []
    for rank in range(ranks.size):
        assert f"rank{rank}" in table
        rows = [e for e in events if e.get("cat") == "measured" and e["pid"] == rank + 1]
        times = [time for e in rows for time in (e["ts"], e["ts"] + e["dur"])]
        assert all(a <= b + 0.01 for a, b in pairwise(times))
        assert turns <= {e["name"] for e in rows}
        names += [e["name"] for e in rows]
    assert names.count("send") == names.count("receive") > 0


@check
def state_is_where_it_lives(ranks: Ranks) -> None:
    model, plain = twins()
    placed = place(model, ranks, microbatches=2, optimizer="adamw", example_args=(X,))
    names = [
        set(json.loads(row))
        for row in ranks.exchange("test", json.dumps(list(placed.state_dict())))
    ]
    assert set.union(*names) == set(plain.state_dict())
    assert sum(map(len, names)) == len(plain.state_dict())
    optimizers = [torch.optim.AdamW(each.parameters(), 0.1) for each in (placed, plain)]
    for _ in range(3):
        placed.step(X, targets=T, loss=criterion)
        loop(plain, 2)
        equal(
            baechi.clip_grad_norm_(placed, 0.25),
            nn.utils.clip_grad_norm_(plain.parameters(), 0.25),
            "the norm",
        )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        same_state(placed, plain)
    whole = placed.state_dict(full=True)
    if ranks.rank:
        assert not whole
    else:
        assert list(whole) == list(plain.state_dict())
        for name, tensor in plain.state_dict().items():
            equal(whole[name], tensor, name)
    changed = {name: t + 1 for name, t in plain.state_dict().items()}
    placed.load_state_dict(changed)
    plain.load_state_dict(changed)
    same_state(placed, plain)
    placed.load_state_dict({name: t - 1 for name, t in placed.state_dict().items()})
    with pytest.raises(RuntimeError, match="another"):
        placed.load_state_dict({**changed, "another": X})


def trained(model: nn.Module, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    for _ in range(steps):
        train(model, optimizer)
    return model, optimizer


def train(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """A step, of the placed model or of one that is not."""
    if isinstance(model, baechi.PlacedModule):
        model.step(X, targets=T, loss=criterion)
    else:
        loop(model, 2)
    optimizer.step()
    optimizer.zero_grad()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    rows = get_optimizer_state_dict(model, optimizer, options=flat)
    return {"model": model.state_dict(), "optimizer": rows}


def loaded_from(model: nn.Module, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model of a checkpoint, in whatever it is."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    state = state_of(model, optimizer)
    checkpoint.load(state, checkpoint_id=CHECKPOINT, **options)
    model.load_state_dict(state["model"])
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=flat)
    return model, optimizer


@check
def a_checkpoint_is_that_of_the_whole_model(ranks: Ranks) -> None:
    """Saved by these ranks; loaded by them in another placement, and into the unsplit model."""
    from torch.distributed import checkpoint

    model, plain = twins()
    placed = place(model, ranks, 1, microbatches=2, example_args=(X,))
    _, reference = trained(plain, 2)
    checkpoint.save(state_of(*trained(placed, 2)), checkpoint_id=CHECKPOINT)
    train(plain, reference)
    other = place(changed(Tied()), ranks, 5, microbatches=2, example_args=(X,))
    assert other.placement.devices != placed.placement.devices
    train(*loaded_from(other))
    same_state(other, plain)
    whole, optimizer = loaded_from(changed(Tied()), no_dist=True)
    train(whole, optimizer)
    assert same_state(whole, plain) == len(plain.state_dict())


def changed(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    return model


@check
def a_checkpoint_of_two_ranks_loads_here(ranks: Ranks) -> None:
    """On any number of ranks."""
    _, plain = twins()
    trained(plain, 3)
    # With this seed three ranks have parameters, as optimizers want it.
    model = place(changed(Tied()), ranks, 29, microbatches=2, example_args=(X,))
    train(*loaded_from(model))
    assert same_state(model, plain) > 0


@check
def gpus_are_the_loop(ranks: Ranks) -> None:
    """Each rank has a GPU, or both have one; state and random numbers are there, too."""
    assert ranks.device.type == "cuda"
    for seed, dropout in ((0, 0.0), (1, 0.5)):
        model, plain = twins(dropout=dropout)
        placed = place(model, ranks, seed, microbatches=4, costs="measure")
        plain.to(ranks.device)
        torch.manual_seed(5)
        found = placed.step(X, targets=T, loss=criterion)
        torch.manual_seed(5)
        torch.testing.assert_close(
            found.cpu(), loop(plain, 4, X.to(ranks.device), T.to(ranks.device)).cpu()
        )
        whole = dict(plain.named_parameters())
        for name, parameter in placed.named_parameters():
            assert parameter.device == ranks.device
            torch.testing.assert_close(parameter.grad, whole[name].grad)
        saved = placed.state_dict(full=True)
        assert saved.keys() == (set() if ranks.rank else plain.state_dict().keys())


@check
def replicas_have_the_mean(ranks: Ranks) -> None:
    """Each has a part of the batch; two steps whose gradients are added, and a call.

    Means begin as the last backward of a parameter ends, and so before that of another one.
    """
    events: list[str] = []

    def noted(kind: type, name: str) -> Any:
        plain = getattr(kind, name)

        def function(self: Any, *args: Any) -> Any:
            events.append(name)
            return plain(self, *args)

        return patch.object(kind, name, function)

    model, plain = twins()
    on_gpu = ranks.device.type == "cuda"
    costs = "measure" if on_gpu else "estimate"
    placed = place(model, ranks, microbatches=2, costs=costs)
    plain.to(ranks.device)
    other = copy.deepcopy(plain)
    halves = [*zip(X.to(ranks.device).chunk(2), T.to(ranks.device).chunk(2), strict=True)]
    x, t = halves[ranks.first // ranks.size]
    for _ in range(2):
        events = []
        with noted(TapeCode, "backward"), noted(Ranks, "average"):
            placed.step(x, targets=t, loss=criterion)
        early = "backward" in events[events.index("average") :] if "average" in events else False
        for each, half in zip((plain, other), halves, strict=True):
            loop(each, 2, *half)
    assert ranks.size == 1 or "True" in ranks.exchange("test", str(early))
    means = {}
    for (name, one), two in zip(plain.named_parameters(), other.parameters(), strict=True):
        means[name] = (one.grad + two.grad) / 2
    for name, parameter in placed.named_parameters():
        torch.testing.assert_close(parameter.grad, means[name], rtol=1e-6, atol=1e-7)
    placed.zero_grad(), plain.zero_grad(), other.zero_grad()
    criterion(placed(x), t).backward()
    for each, half in zip((plain, other), halves, strict=True):
        y = torch.cat([each(c) for c in half[0].chunk(2)])
        criterion(y, half[1]).backward()
    for (name, one), two in zip(plain.named_parameters(), other.parameters(), strict=True):
        if name in dict(placed.named_parameters()):
            found, mean = dict(placed.named_parameters())[name].grad, (one.grad + two.grad) / 2
            torch.testing.assert_close(found, mean) if on_gpu else equal(found, mean, name)


@check
def what_one_rank_alone_would_see_is_refused(ranks: Ranks) -> None:
    placed = place(Tied(), ranks)
    placed(X)
    with pytest.raises(baechi.InputError, match="not metered"), placed.metered():
        pass
    with pytest.raises(baechi.InputError, match=r"state_dict\(full=True\)"):
        placed.save("part")
    assert not Path("part").exists()
    assert hasattr(placed, "hf_device_map") == (ranks.device.type == "cuda")
    writing = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4))
    with pytest.raises(baechi.InputError, match="forward writes into an argument"):
        place(writing, ranks)(torch.randn(2, 4))
    line = place(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), ranks)
    with pytest.raises(baechi.ExecutionError, match="an argument needs a gradient"):
        line(torch.randn(2, 4, requires_grad=True))


@check
def what_does_not_fit_is_an_error_on_every_rank(ranks: Ranks) -> None:
    usual = ranks.cluster
    rows = tuple(replace(device, memory_bytes=64) for device in usual.devices)
    for cluster, options, text in (
        (replace(usual, devices=rows), {}, "no device has room|does not fit|cannot place"),
        (usual, {"verify": True}, "verify= does not go with baechi.ranks"),
    ):
        ranks.cluster = cluster
        with pytest.raises(baechi.BaechiError, match=text):
            place(Tied(), ranks, placer="auto", example_args=(X,), **options)
    ranks.cluster = usual


@check
def what_cannot_be_traced_on_one_rank_is_an_error_on_all(ranks: Ranks) -> None:
    """Even where the error is none of Baechi's; then all go on."""

    def trace() -> Any:
        if ranks.rank == ranks.size - 1:
            raise RuntimeError("no room")
        return (), None

    last = ranks.rank == ranks.size - 1
    text = "no room" if last else f"rank {ranks.size - 1} cannot plan this call: no room"
    with pytest.raises(RuntimeError if last else baechi.InputError, match=text):
        trace_of_all(ranks, trace)


@check
def ranks_with_different_models_or_examples_are_told_where(ranks: Ranks) -> None:
    rows = 4 * (ranks.rank + 1)
    for width, bias, x, text in (
        (rows, 0, torch.ones(8, 2), r"row 0:\n.*0.weight \[4, 2\].*\n.*0.weight \[8, 2\]"),
        (4, ranks.rank, torch.ones(8, 2), r"row 1:\n.*0.bias \[4\] \[0.*\n.*0.bias \[4\] \[1"),
        (4, 0, torch.ones(rows, 2), r"row 0:\n.*float32\[4, 2\].*\n.*float32\[8, 2\]"),
    ):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, width), nn.ReLU())
        nn.init.constant_(model[0].bias, bias)
        with pytest.raises(baechi.InputError, match=f"(?s)between ranks 0 and 1.*{text}") as told:
            place(model, ranks, example_args=(x,))
        assert len(str(told.value)) < 900


@check
def ranks_with_batches_of_their_own_are_told(ranks: Ranks) -> None:
    """As `DistributedSampler` makes them, of one shape. Then all go on."""
    placed = place(Tied(), ranks, microbatches=2, example_args=(X,))
    apart = "ranks 0 and 1 were given different batches"
    with pytest.raises(baechi.InputError, match=apart):
        placed.step(X, targets=(T + ranks.rank) % 7, loss=criterion)
    placed.step(X, targets=T, loss=criterion)
    with pytest.raises(baechi.InputError, match=apart), torch.no_grad():
        placed.eval()((X + ranks.rank) % 11)
    placed = place(Tied(dropout=0.5), ranks)
    torch.manual_seed(ranks.rank)
    with pytest.raises(baechi.InputError, match=f"{apart}, or seeds"):
        placed(X)
    torch.manual_seed(0)


def fails_on_all(ranks: Ranks, part: str, line: str, x: Tensor, t: Tensor) -> None:
    """A step whose first operator of a name fails on the rank that runs it."""
    placed = place(Tied(), ranks, microbatches=4)
    placed.step(X, targets=T, loss=criterion)
    ranks.exchange("the first step")  # who is still in it would be told of the second one's error
    ops = placed.graph.ops
    home = next(d for op, d in zip(ops, placed.placement.devices, strict=True) if part in op.name)
    for _ in range(2):
        who = "" if ranks.rank == home else f"rank {home} failed: [^\n]*{part}.*"
        with pytest.raises(baechi.ExecutionError, match=f"(?s)^{who}.*{line}"):
            placed.step(x, targets=t, loss=criterion)


@check
def an_error_in_forward_is_one_of_all(ranks: Ranks) -> None:
    """A last check: no rank goes on. A token that the embedding does not have."""
    fails_on_all(ranks, "tokens", r"first = h = self.tokens\(x\)", X + 99, T)


@check
def an_error_in_the_loss_is_one_of_all(ranks: Ranks) -> None:
    """A last check. A target that there is not."""
    line = "in criterion: return functional.cross_entropy"
    fails_on_all(ranks, "cross_entropy", line, X, T + 99)


class OwnError(BaseException):
    """An error of the script, which ends its process."""


@check
def an_error_between_steps_is_one_of_all(ranks: Ranks) -> None:
    """A last check: what ends the process of the last rank, or of the first, is told to all."""
    placed = place(Tied(), ranks, microbatches=4)
    placed.step(X, targets=T, loss=criterion)
    ended = 0 if "first" in sys.argv else ranks.size - 1
    if ranks.rank == ended:
        raise OwnError("the data are at an end")
    told = rf"rank {ended} failed: OwnError: the data are at an end at .*rank_checks.py:\d+"
    with pytest.raises(baechi.ExecutionError, match=told):
        placed.step(X, targets=T, loss=criterion)


@check
def ranks_that_do_different_things_are_told(ranks: Ranks) -> None:
    """A last check: here another shape on one rank, which plans while the others run."""
    placed = place(Tied(), ranks)
    placed(X)
    with pytest.raises(baechi.ExecutionError, match="plans a call"):
        placed(X[: 8 - 4 * (ranks.rank == 1)])


@check
def ranks_that_take_different_plans_are_told(ranks: Ranks) -> None:
    """A last check: each rank has both plans, whose messages are of the same shapes."""
    placed, factor = place(Tied(), ranks, microbatches=2), [1.0]

    def scaled(y: Tensor, t: Tensor) -> Tensor:
        return factor[0] * criterion(y, t)

    for factor[0] in (1.0, 2.0):
        placed.step(X, targets=T, loss=scaled)
    factor[0] = 1.0 + (ranks.rank == 1)
    with pytest.raises(baechi.ExecutionError, match="the ranks run different calls"):
        placed.step(X, targets=T, loss=scaled)


@check
def steps_until_somebody_is_gone(ranks: Ranks) -> None:
    """A last check: the test ends or stops a rank."""
    placed = place(Tied(), ranks, 1, microbatches=4)
    began = time.monotonic()

    def steps() -> None:
        nonlocal began
        while True:
            began = time.monotonic()
            placed.step(X, targets=T, loss=criterion)
            sys.stdout.write("step\n")
            sys.stdout.flush()

    with pytest.raises(baechi.ExecutionError, match=r"rank 1 is gone|for rank 1, which is stopped"):
        steps()
    assert time.monotonic() - began < 3 * TIMEOUT_S + 5
    with pytest.raises(baechi.ExecutionError, match="No rank goes on"):
        placed.step(X, targets=T, loss=criterion)


def main() -> None:
    folder, *names = sys.argv[1:]
    torch.set_num_threads(1)
    options: Any = {"transport": "gloo"} if "gloo" in names else {}
    options |= {"replicas": 2} if "replicas_have_the_mean" in names else {}
    ranks = baechi.ranks(memory="8GiB", timeout_s=TIMEOUT_S, **options)
    found = {}
    for name in names or CHECKS:
        if name in CHECKS:
            try:
                CHECKS[name](ranks)
                found[name] = ""
            except Exception:
                found[name] = traceback.format_exc()
                break
    Path(folder, f"{ranks.first + ranks.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
