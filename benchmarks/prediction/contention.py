"""What an op slows down when the other logical devices compute too: a term the clock has not.

`python3 -m benchmarks.prediction.contention`: each op runs on one thread alone, then on several
threads at once, in turns; the figure is the ratio of the shortest times, which other processes
disturb least. Beside it is what the clock would predict for a host that each op has for so long.
"""

import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

_ROUNDS = 40
_READING_NS = 20_000_000
_HOST_NS = 15_000

Op = Callable[[], object]


def _add() -> Op:
    one, out = torch.randn(8 << 20), torch.empty(8 << 20)
    return lambda: torch.add(one, 1.0, out=out)


def _fresh() -> Op:
    return lambda: torch.empty(4 << 20).fill_(1.0)


def _cached() -> Op:
    one, out = torch.randn(64 << 10), torch.empty(64 << 10)
    return lambda: torch.add(one, 1.0, out=out)


def _product() -> Op:
    one, out = torch.randn(512, 512), torch.empty(512, 512)
    return lambda: torch.mm(one, one, out=out)


def _weights(rows: int, width: int) -> Op:
    one, weights = torch.randn(rows, width), torch.randn(width, width)
    return lambda: torch.mm(one, weights)


def _convolution() -> Op:
    image, weights = torch.randn(1, 64, 56, 56), torch.randn(64, 64, 3, 3)
    return lambda: torch.conv2d(image, weights, padding=1)


def _tiny() -> Op:
    one = torch.randn(16)
    return lambda: one.add(1.0)


OPS: dict[str, Callable[[], Op]] = {
    "add, 32 MiB to 32 MiB": _add,
    "fill 16 MiB of fresh memory": _fresh,
    "add, 256 KiB in cache": _cached,
    "matrix product, 512 wide": _product,
    "matrix product, 8 rows by 16 MiB of weights": partial(_weights, 8, 2048),
    "matrix product, 32 rows by 256 KiB": partial(_weights, 32, 256),
    "matrix product, 32 rows by 64 KiB": partial(_weights, 32, 128),
    "matrix product, 8 rows by 64 KiB": partial(_weights, 8, 128),
    "matrix product, 8 rows by 16 KiB": partial(_weights, 8, 64),
    "convolution, 64 channels of 56 x 56": _convolution,
    "tiny op: Python and its lock": _tiny,
}


def slowdown(make: Callable[[], Op], threads: int) -> tuple[float, float]:
    """(ns alone, ns of the slowest of `threads` at once), the shortest of the rounds each."""
    repeats = max(int(_READING_NS / _together(make, 1, 3)), 1)
    readings: dict[int, list[float]] = {1: [], threads: []}
    for _ in range(_ROUNDS):
        for count, row in readings.items():
            row.append(_together(make, count, repeats))
    return min(readings[1]), min(readings[threads])


def _together(make: Callable[[], Op], count: int, repeats: int) -> float:
    """The time of one op on the slowest of so many threads that start together."""
    barrier = threading.Barrier(count)
    times: list[float] = []

    def run() -> None:
        torch.set_num_threads(1)
        op = make()
        op()
        barrier.wait()
        start = time.perf_counter_ns()
        for _ in range(repeats):
            op()
        times.append((time.perf_counter_ns() - start) / repeats)

    workers = [threading.Thread(target=run) for _ in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return max(times)


def main(
    threads: Annotated[int, typer.Option(help="How many at once; all cores if 0.")] = 0,
) -> None:
    """Prints the slowdown of each kind of op."""
    count = threads or len(os.sched_getaffinity(0))
    table = Table(title=f"One thread alone and {count} at once")
    for column in ("op", "alone", "at once", "slowdown", f"host, {_HOST_NS / 1e3:.0f} us"):
        table.add_column(column, justify="left" if column == "op" else "right")
    with torch.no_grad():
        for name, make in OPS.items():
            alone, together = slowdown(make, count)
            ratio = f"{together / alone:.2f}"
            hosted = f"{max(count * min(alone, _HOST_NS), alone) / alone:.2f}"
            table.add_row(name, f"{alone / 1e3:.1f} us", f"{together / 1e3:.1f} us", ratio, hosted)
    Console(width=100).print(table)


if __name__ == "__main__":
    typer.run(main)
