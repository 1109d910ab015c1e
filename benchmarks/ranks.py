"""Claim: two processes run a pipelined GPT in little more than half of the loop's time.

    OMP_NUM_THREADS=1 python3 -m benchmarks.ranks                  # --quick: few rounds

The GPT of `benchmarks.pipelined_steps` (6 layers, 256 wide, 16 x 64 tokens, 8 micro-batches) on
two ranks of one torch thread each, beside the loop over micro-batches in one thread and
Schedule1F1B of `torch.distributed.pipelining` in two gloo processes: the ways take turns, and a
figure is a ratio of medians. Loss and gradients of the ranks are the loop's in every bit, or this
fails.

`--edges` sends messages of several sizes from rank to rank and back, through shared memory and
gloo. `--kills 200` ends one of three ranks at so many random instants of planning or of a step, and
looks whether both others raise an error, and what is left in shared memory. `--setup` times `place`
of a GPT-2 small on four ranks beside that of one process, first measuring costs, then with them.
"""

import os
import random
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import torch
import typer
from benchmarks.environment import environment
from benchmarks.models.hugging_face import gpt2
from benchmarks.pipelined_steps import GPT, VOCABULARY, First, Last, check, criterion, loop
from benchmarks.torch_pipeline import Pipeline
from rich.console import Console
from rich.table import Table
from torch import multiprocessing
from torch.distributed import TCPStore

import baechi
from baechi.processes.tensor_messages import Message, receive, send

_M: Final = 8
_SIZES: Final = (1 << 10, 1 << 18, 1 << 22, 1 << 24)
_TRIPS: Final = 40
_PATIENCE_S: Final = 10


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Token numbers and targets."""
    torch.manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (16, 64))
    return ids, torch.randint(0, VOCABULARY, (16, 64))


class Processes:
    """Ranks that run a function of this file each; `ask` sends all an order and has the answers."""

    def __init__(self, n: int, run: Callable[..., None], *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        port = str(20_000 + os.getpid() % 20_000 + random.randrange(500))
        self.ends, self.processes = [], []
        for rank in range(n):
            here, there = context.Pipe()
            names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": n, "LOCAL_WORLD_SIZE": n}
            names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            process = context.Process(target=_begun, args=(names, run, there, *args), daemon=True)
            process.start()
            there.close()
            self.ends.append(here)
            self.processes.append(process)

    def ask(self, order: str) -> list[Any]:
        """The answers of all ranks."""
        for end in self.ends:
            end.send(order)
        return [end.recv() for end in self.ends]

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *_: object) -> None:
        for end, process in zip(self.ends, self.processes, strict=True):
            if process.is_alive():
                end.send("end")
        for process in self.processes:
            process.join()


def _begun(names: dict[str, Any], run: Callable[..., None], *args: Any) -> None:
    os.environ.update({name: str(value) for name, value in names.items()})
    torch.set_num_threads(1)
    run(*args)


def _step(end: Any) -> None:
    ranks = baechi.ranks(memory="8GiB")
    ids, targets = batch()
    torch.manual_seed(1)
    placed = baechi.place(GPT(), ranks, microbatches=_M, progress=False)
    run = partial(placed.step, ids, targets=targets, loss=criterion)
    run()
    while (order := end.recv()) != "end":
        placed.zero_grad()
        if order == "step":
            run()
            end.send(placed.rhythm.step_ns)
        else:
            loss = run()
            end.send((loss, {name: p.grad for name, p in placed.named_parameters()}))


def print_steps(console: Console, rounds: int) -> None:
    """The first table."""
    ids, targets = batch()
    torch.manual_seed(1)
    plain = GPT()
    with ExitStack() as stack:
        two = stack.enter_context(Processes(2, _step))
        loop(plain, ids, targets, _M)
        pairs = zip(ids.chunk(_M), targets.chunk(_M), strict=True)
        losses = [criterion(plain(c), t) / _M for c, t in pairs]
        wanted = {name: p.grad for name, p in plain.named_parameters()}
        found: dict[str, torch.Tensor] = {}
        for loss, mine in two.ask("gradients"):
            assert torch.equal(loss, sum(losses[1:], losses[0]).detach())
            found |= mine
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        ways: dict[str, Callable[[], Any]] = {
            "loop": lambda: loop(plain, ids, targets, _M),
            "two ranks, step": lambda: two.ask("step"),
        }
        for blocks in (3, 4):
            stages = [First(plain, blocks), Last(plain, blocks)]
            peer = stack.enter_context(Pipeline(stages, ids, targets, criterion, _M))
            check(peer.gradients(), plain, stages, ways["loop"])
            ways[f"Schedule1F1B, {blocks} blocks first"] = peer.run
        samples: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, run in ways.items():
                for timed in (False, True, True):
                    began = time.perf_counter()
                    run()
                    samples[name] += [time.perf_counter() - began] if timed else []
        predicted = two.ask("step")[0] / 1e9
    table = Table("", "ms", "of the loop")
    medians = {name: statistics.median(row) for name, row in samples.items()}
    for name, seconds in medians.items():
        table.add_row(name, f"{seconds * 1e3:.1f}", f"{seconds / medians['loop']:.3f}")
    console.print(table)
    mine = medians["two ranks, step"]
    best = min(seconds for name, seconds in medians.items() if name.startswith("Schedule"))
    console.print(f"of the better Schedule1F1B: {mine / best:.3f}")
    console.print(f"predicted {predicted * 1e3:.1f} ms, {predicted / mine:.3f} of that measured")
    console.print("loss and gradients are the loop's in every bit")


def _edges(end: Any, transport: str) -> None:
    ranks = baechi.ranks(memory="8GiB", transport=transport)
    ranks.reserve(max(_SIZES))
    peer, times = 1 - ranks.rank, {}
    for nbytes in _SIZES:
        tensor, readings = torch.zeros(nbytes, dtype=torch.uint8), []
        for number in range(_TRIPS):
            began = time.perf_counter()
            for turn in (0, 1):
                if ranks.rank == turn:
                    send(ranks.senders[peer], Message((number,), [tensor]))
                else:
                    receive(ranks.receivers[peer], (number,), ranks.device)
            readings.append((time.perf_counter() - began) / 2)
        times[nbytes] = statistics.median(readings[5:])
    end.recv()
    end.send(times)


def _gloo(end: Any, transport: str) -> None:  # noqa: ARG001 (torch's own send and recv)
    from torch import distributed

    distributed.init_process_group("gloo")
    rank, times = distributed.get_rank(), {}
    for nbytes in _SIZES:
        tensor, readings = torch.zeros(nbytes, dtype=torch.uint8), []
        for _ in range(_TRIPS):
            began = time.perf_counter()
            for turn in (0, 1):
                (distributed.send if rank == turn else distributed.recv)(tensor, 1 - rank)
            readings.append((time.perf_counter() - began) / 2)
        times[nbytes] = statistics.median(readings[5:])
    end.recv()
    end.send(times)
    distributed.destroy_process_group()


def print_edges(console: Console) -> None:
    """Time one way from rank to rank."""
    columns = {}
    for name, run in (("shared memory", _edges), ("gloo", _edges), ("torch's send", _gloo)):
        with Processes(2, run, "gloo" if name == "gloo" else "auto") as two:
            columns[name] = two.ask("times")[0]
    table = Table("bytes", *(f"{name}, us" for name in columns), "shared memory / torch's send")
    for nbytes in _SIZES:
        row = [column[nbytes] for column in columns.values()]
        table.add_row(f"{nbytes:,}", *(f"{s * 1e6:.0f}" for s in row), f"{row[0] / row[-1]:.2f}")
    console.print(table)


def _small(ranks: Any = None, **options: Any) -> Any:
    torch.manual_seed(1)
    model = GPT(layers=1, width=16)
    cheap = {"costs": "estimate", "placer": "round-robin", "progress": False, "microbatches": 4}
    return baechi.place(model, {"cpu": "8GiB"} if ranks is None else ranks, **cheap, **options)


def _killed(folder: Path, names: dict[str, str], rank: int) -> None:
    """In a process of its own: a rank notes how it learnt that another is gone."""
    os.environ.update(names | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
    ids, targets = batch()
    try:
        ranks = baechi.ranks(memory="8GiB", timeout_s=_PATIENCE_S)
        (folder / f"planning {rank}").touch()
        placed = _small(ranks)
        placed.step(ids, targets=targets, loss=criterion)
        (folder / f"stepping {rank}").touch()
        while True:
            placed.step(ids, targets=targets, loss=criterion)
    except BaseException as error:
        now = time.monotonic()
        known = isinstance(error, baechi.ExecutionError)
        text = f"{now} {error}" if known else traceback.format_exc()
        (folder / f"{'error' if known else 'other'} {rank}").write_text(text)
    os._exit(0)


def print_kills(console: Console, kills: int, first: int) -> None:
    """Each of these kills one of three ranks that plan or run a step, at an instant by its seed.

    They are forks of this process, which imports once, and has the launcher's store.
    """
    _small(example_args=batch()[:1]).unplace()  # imports what a trace does
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1"}
    common |= {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    waits, wrong = [], []
    for seed in range(first, first + kills):
        draw = random.Random(seed)
        victim, when, delay = (
            draw.randrange(3),
            draw.choice(("planning", "stepping")),
            draw.random(),
        )
        names = common | {"TORCHELASTIC_RESTART_COUNT": str(seed)}
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            children = []
            for rank in range(3):
                child = os.fork()
                if child == 0:
                    _killed(folder, names, rank)
                children.append(child)
            while not (folder / f"{when} {victim}").exists():
                assert not list(folder.glob("[eo]*")), [p.read_text() for p in folder.glob("[eo]*")]
                time.sleep(0.005)
            time.sleep(delay * 0.3)
            os.kill(children[victim], signal.SIGKILL)
            killed = time.monotonic()
            others = {*range(3)} - {victim}
            # A rank is given what it may take; one that is still there then hangs.
            while time.monotonic() - killed < 3 * _PATIENCE_S and len(others) > 0:
                others -= {rank for rank in others if os.waitpid(children[rank], os.WNOHANG)[0]}
                time.sleep(0.01)
            os.waitpid(children[victim], 0)
            for rank in others:
                os.kill(children[rank], signal.SIGKILL)
                os.waitpid(children[rank], 0)
            texts = dict.fromkeys({*range(3)} - {victim}, "")
            for path in folder.glob("[eo]*"):
                texts[int(path.name.split()[1])] = path.read_text()
            if all(f"rank {victim} is gone" in text for text in texts.values()):
                waits += [float(text.split()[0]) - killed for text in texts.values()]
            else:
                wrong.append(f"{seed}, rank {victim} killed while {when}: {texts}")
    left = [path.name for path in Path("/dev/shm").glob("baechi-*")]
    console.print(
        f"{kills} kills of a rank of three, seeds {first} to {first + kills - 1}: "
        f"{kills - len(wrong)} raised on both others, {len(wrong)} not"
    )
    for text in wrong[:5]:
        console.print(text, markup=False)
    if waits:
        console.print(f"after {statistics.median(waits):.2f} s, at most {max(waits):.2f} s")
    console.print(f"left in shared memory: {left or 'nothing'}; every process has ended")


def _setup(end: Any, alone: bool) -> None:
    torch.manual_seed(0)  # on every rank alike
    ids = torch.randint(0, 50_257, (1, 32))
    model = gpt2(dropout=False)
    end.send("ready")
    end.recv()
    began = time.perf_counter()
    four = [f"cpu:{i}" for i in range(4)] if alone else None
    devices = dict.fromkeys(four, "8GiB") if four else baechi.ranks(memory="8GiB")
    options = {"example_kwargs": {"input_ids": ids, "labels": ids}, "microbatches": 1}
    baechi.place(model, devices, progress=False, **options)
    end.send(time.perf_counter() - began)


def print_setup(console: Console) -> None:
    """Seconds for GPT-2 small: for the first time, and with the costs known from then."""
    table = Table("seconds", "one process, four devices", "four ranks", "four / one")
    with tempfile.TemporaryDirectory() as cache:
        rows = []
        for n in (1, 4):
            os.environ["XDG_CACHE_HOME"] = f"{cache}/{n}"
            rows.append([_seconds(n), statistics.median([_seconds(n) for _ in range(3)])])
    for name, one, four in zip(("first", "costs known"), *rows, strict=True):
        table.add_row(name, f"{one:.1f}", f"{four:.1f}", f"{four / one:.2f}")
    console.print(table)


def _seconds(n: int) -> float:
    with Processes(n, _setup, n == 1) as some:
        for end in some.ends:
            end.recv()
        return max(some.ask("place"))


def main(
    rounds: Annotated[int, typer.Option(help="Rounds of steps.")] = 15,
    quick: Annotated[bool, typer.Option(help="Few rounds.")] = False,
    edges: Annotated[bool, typer.Option(help="Messages of several sizes.")] = False,
    kills: Annotated[int, typer.Option(help="So many ends of a rank.")] = 0,
    first: Annotated[int, typer.Option(help="The seed of the first of them.")] = 0,
    setup: Annotated[bool, typer.Option(help="Time to place on four ranks.")] = False,
) -> None:
    """Print a table."""
    torch.set_num_threads(1)
    console = Console(width=110)
    console.print(environment())
    if edges:
        print_edges(console)
    elif kills:
        print_kills(console, kills, first)
    elif setup:
        print_setup(console)
    else:
        print_steps(console, 3 if quick else rounds)
    sys.stdout.flush()


if __name__ == "__main__":
    typer.run(main)
