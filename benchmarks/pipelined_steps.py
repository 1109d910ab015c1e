"""Claim: micro-batches put a chain of layers on two devices in little more than half of the time.

    OMP_NUM_THREADS=1 python3 -m benchmarks.pipelined_steps            # --quick: few rounds

A GPT of 6 layers, 256 wide, 16 sequences of 64 tokens in 8 micro-batches, on two logical CPU
devices of one thread each; the loop over micro-batches in one thread is the reference. Ideal is
(M + 1) / 2M = 0.5625. Then the same turns on one logical device, which should take what the loop
does. All ways take turns in one process; a figure is a ratio of medians of time.

With `--peer`, Schedule1F1B of `torch.distributed.pipelining` in two gloo processes takes its turns,
too, cut after three and after four blocks; its gradients are the loop's in every bit.

`--models` does the same with GPT-2 small, whose head is its embedding, and with two towers and a
trunk: a step beside the placement without micro-batches and the line of stages.

`--peaks` prints the metered peaks of steps of 8 and of 32 micro-batches of one size, and `--plans`
the time that place() takes for 2 and for 32, and of it solve().
"""

import copy
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Annotated, Any, Final, TypeAlias
from unittest.mock import patch

import torch
import typer
from benchmarks.environment import environment
from benchmarks.models.hugging_face import gpt2
from benchmarks.torch_pipeline import Pipeline
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

import baechi
from baechi.program import stream_memory

VOCABULARY: Final = 1_000
Times: TypeAlias = dict[str, tuple[float, float]]  # by way, seconds and those of the processor
_M: Final = 8
_PEER: Final = "Schedule1F1B"
_ONE: Final = {"cpu:0": "8GiB"}
_TWO: Final = {"cpu:0": "8GiB", "cpu:1": "8GiB"}


class Block(nn.Module):
    """Attention and a perceptron, each behind a layer norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Of [batch, length, width], the same shape."""
        batch, length, width = x.shape
        rows = self.qkv(self.before(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = rows.permute(2, 0, 3, 1, 4)
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(found.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.between(x))))


class GPT(nn.Module):
    """Token and position embeddings, blocks, and a head."""

    def __init__(self, layers: int = 6, width: int = 256, length: int = 64) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits, [batch, length, vocabulary], of token numbers, [batch, length]."""
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def criterion(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class First(nn.Module):
    """Embeddings and the first blocks."""

    def __init__(self, model: GPT, blocks: int) -> None:
        super().__init__()
        self.tokens, self.places = model.tokens, model.places
        self.blocks = model.blocks[:blocks]

    def forward(self, ids: Tensor) -> Tensor:
        """Hidden states of token numbers."""
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return x


class Last(nn.Module):
    """The other blocks and the head."""

    def __init__(self, model: GPT, blocks: int) -> None:
        super().__init__()
        self.blocks, self.norm, self.head = model.blocks[blocks:], model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        """Logits of hidden states."""
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loop(model: nn.Module, ids: Tensor, targets: Tensor, n: int) -> None:
    """The reference: micro-batches one after the other."""
    for c, t in zip(ids.chunk(n), targets.chunk(n), strict=True):
        (criterion(model(c), t) / n).backward()


def whole(model: nn.Module, ids: Tensor, targets: Tensor) -> None:
    """A call and a loss of the whole batch."""
    criterion(model(ids), targets).backward()


def timed(ways: dict[str, Callable[[], Any]], rounds: int) -> Times:
    """Median seconds of each way, and of processor time; the first of three does not count."""
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, run in ways.items():
            run()
            for _ in range(2):
                began, worked = time.perf_counter(), time.process_time()
                run()
                ended = time.perf_counter() - began, time.process_time() - worked
                samples[name].append(ended)
    return {
        name: (statistics.median(a for a, _ in row), statistics.median(b for _, b in row))
        for name, row in samples.items()
    }


def main(
    rounds: Annotated[int, typer.Option(help="Rounds of steps.")] = 15,
    quick: Annotated[bool, typer.Option(help="Few rounds.")] = False,
    peaks: Annotated[bool, typer.Option(help="Metered peaks for 8 and 32.")] = False,
    plans: Annotated[bool, typer.Option(help="Time of place() for 2 and 32.")] = False,
    peer: Annotated[bool, typer.Option(help="Beside Schedule1F1B in two processes.")] = False,
    models: Annotated[bool, typer.Option(help="Two other models.")] = False,
) -> None:
    """Print the table."""
    torch.set_num_threads(1)
    console = Console(width=110)
    console.print(environment())
    torch.manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (16, 64))
    targets = torch.randint(0, VOCABULARY, (16, 64))
    plain = GPT()
    if plans:
        return print_plans(console, plain)
    if peaks:
        return print_peaks(console, plain)
    if models:
        return print_models(console, 3 if quick else rounds)
    options = {"microbatches": _M, "threads_per_device": 1, "progress": False}
    two = baechi.place(copy.deepcopy(plain), _TWO, **options)
    calls = baechi.place(copy.deepcopy(plain), _TWO, **options)
    one = baechi.place(copy.deepcopy(plain), _ONE, **options)
    ways: dict[str, Callable[[], Any]] = {
        "loop": lambda: loop(plain, ids, targets, _M),
        "step": lambda: two.step(ids, targets=targets, loss=criterion),
        "placed(x)": lambda: whole(calls, ids, targets),
        "one device": lambda: one.step(ids, targets=targets, loss=criterion),
    }
    with ExitStack() as stack:
        for blocks in (3, 4) if peer else ():
            stages = [First(plain, blocks), Last(plain, blocks)]
            pipeline = stack.enter_context(Pipeline(stages, ids, targets, criterion, _M))
            check(pipeline.gradients(), plain, stages, ways["loop"])
            ways[f"{_PEER}, {blocks} blocks first"] = pipeline.run
        found = timed(ways, 3 if quick else rounds)
    print_table(console, found, {"step": two, "placed(x)": calls, "one device": one})
    return None


def check(
    found: list[Tensor], model: nn.Module, stages: list[nn.Module], run: Callable[[], Any]
) -> None:
    """Fail unless these are the gradients of the loop."""
    model.zero_grad()
    run()
    wanted = [row.grad for stage in stages for row in stage.parameters()]
    if not all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)):
        raise SystemExit("Schedule1F1B has other gradients than the loop.")


def predicted_ns(placed: Any) -> int:
    """The predicted step."""
    return placed.schedule.makespan_ns if placed.rhythm is None else placed.rhythm.step_ns


def print_table(console: Console, found: Times, placed: dict[str, Any]) -> None:
    """Each way's time, beside the first's and its prediction."""
    table = Table(
        *("", "devices", "ms", "of the loop", "its processor time"),
        *("predicted ms", "predicted / measured"),
    )
    (reference, reference_work), *_ = found.values()
    for name, (seconds, worked) in found.items():
        peer = name.startswith(_PEER)
        row = [name, "2" if peer else "1", f"{seconds * 1e3:.1f}", f"{seconds / reference:.3f}"]
        row.append("" if peer else f"{worked / reference_work:.3f}")  # in processes of its own
        if name in placed:
            predicted = predicted_ns(placed[name]) / 1e9
            row[1] = str(len(set(placed[name].placement.devices)))
            row += [f"{predicted * 1e3:.1f}", f"{predicted / seconds:.3f}"]
        table.add_row(*row)
    console.print(table)


class TowersAndTrunk(nn.Module):
    """Two towers of dense layers that meet in a trunk of as many."""

    def __init__(self, depth: int = 6, width: int = 512) -> None:
        super().__init__()
        self.left, self.right, self.trunk = (
            nn.Sequential(
                *(layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.GELU()))
            )
            for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Of [batch, width], the same shape."""
        return self.trunk(self.left(x) + self.right(x))


def print_models(console: Console, rounds: int) -> None:
    """Steps with micro-batches beside other ways to place the same model on two devices."""
    ids = torch.randint(0, 50_257, (_M, 32))
    tokens = {"input_ids": ids, "labels": ids}
    rows, wanted = torch.randn(64 * _M, 512), torch.randn(64 * _M, 512)
    towers = {"x": rows, "targets": wanted, "loss": functional.mse_loss}

    def gpt2_loop(model: nn.Module) -> None:
        for c in ids.chunk(_M):
            (model(input_ids=c, labels=c).loss / _M).backward()

    def towers_loop(model: nn.Module) -> None:
        for c, t in zip(rows.chunk(_M), wanted.chunk(_M), strict=True):
            (functional.mse_loss(model(c), t) / _M).backward()

    def gpt2_whole(model: nn.Module) -> None:
        model(input_ids=ids, labels=ids).loss.backward()

    def towers_whole(model: nn.Module) -> None:
        functional.mse_loss(model(rows), wanted).backward()

    cases: tuple[tuple[str, nn.Module, dict[str, Any], Any, Any, int], ...] = (
        ("towers and trunk", TowersAndTrunk(), towers, towers_loop, towers_whole, rounds),
        ("GPT-2 small", gpt2(dropout=False), tokens, gpt2_loop, gpt2_whole, max(2, rounds // 5)),
    )
    for title, plain, arguments, run_loop, run_whole, n in cases:
        options = {"threads_per_device": 1, "progress": False, "guard": False}
        turns = baechi.place(copy.deepcopy(plain), _TWO, microbatches=_M, **options)
        line = baechi.place(
            copy.deepcopy(plain), _TWO, microbatches=_M, placer="contiguous", **options
        )
        unpipelined = baechi.place(copy.deepcopy(plain), _TWO, **options)
        ways: dict[str, Callable[[], Any]] = {
            "loop": partial(run_loop, plain),
            "step": partial(turns.step, **arguments),
            "step, a line of stages": partial(line.step, **arguments),
            "the whole batch, placed": partial(run_whole, unpipelined),
        }
        found = timed(ways, n)
        console.print(title)
        print_table(
            console, found, dict(zip(list(ways)[1:], (turns, line, unpipelined), strict=True))
        )


def print_peaks(console: Console, plain: nn.Module) -> None:
    """Metered peaks of steps, with micro-batches of two sequences."""
    table = Table("micro-batches", "metered MiB", "predicted MiB")
    for n in (8, 32):
        ids = torch.randint(0, VOCABULARY, (2 * n, 64))
        options = {"microbatches": n, "threads_per_device": 1, "progress": False}
        placed = baechi.place(copy.deepcopy(plain), _TWO, **options)
        placed.step(ids, targets=ids, loss=criterion)
        placed.zero_grad()
        with placed.metered() as meter:
            placed.step(ids, targets=ids, loss=criterion)
        rows = (meter.peak_bytes, placed.rhythm.peak_bytes)
        table.add_row(str(n), *(", ".join(f"{b / 2**20:.2f}" for b in row) for row in rows))
    console.print(table)


class Scored(nn.Module):
    """A model that returns its loss, so that `place` plans a step."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """The loss."""
        return {"loss": criterion(self.model(ids), targets)}


def print_plans(console: Console, plain: nn.Module) -> None:
    """Seconds of processor time that `place` takes for so many micro-batches, and `solve` of it.

    The first plan measures operators, whose costs the others find in the store.
    """
    table = Table("micro-batches", "segments", "place, s", "of it solve, s")
    for n in (2, 2, 32, 2, 32, 2, 32):
        ids = torch.randint(0, VOCABULARY, (2 * n, 64))
        model = Scored(copy.deepcopy(plain))
        options = {"microbatches": n, "threads_per_device": 1, "progress": False}
        with solving() as seconds:
            began = time.process_time()
            placed = baechi.place(model, _TWO, example_args=(ids, ids), **options)
            took = time.process_time() - began
        turns = placed.rhythm
        assert turns is not None
        table.add_row(str(n), str(len(turns.segments)), f"{took:.2f}", f"{sum(seconds):.2f}")
    console.print(table)


@contextmanager
def solving() -> Iterator[list[float]]:
    """Seconds of processor time of every `solve` inside the block."""
    seconds, plain = [], stream_memory.solve

    def timed_solve(*args: Any, **options: Any) -> Any:
        began = time.process_time()
        found = plain(*args, **options)
        seconds.append(time.process_time() - began)
        return found

    with patch.object(stream_memory, "solve", timed_solve):
        yield seconds


if __name__ == "__main__":
    typer.run(main)
