"""Claim: with two requests in flight, two devices do nearly twice as many as one at a time.

    OMP_NUM_THREADS=1 python3 -m benchmarks.streams            # --quick: few rounds

A GPT of 6 layers, 256 wide, requests of 4 sequences of 64 tokens, without gradients, on logical CPU
devices of one thread each, placed with `objective="throughput"`. References, in turns with it in
one process: the same placed model one call at a time; the unsplit model in one thread. A figure is
a ratio of medians; processor time is the process's. Before, all outputs are compared bit for bit.
"""

import copy
from collections.abc import Callable
from typing import Annotated, Final

import torch
import typer
from benchmarks.environment import environment
from benchmarks.pipelined_steps import GPT, VOCABULARY, timed
from rich.console import Console
from rich.table import Table
from torch import Tensor

import baechi

_REQUESTS: Final = 24
_TWO: Final = {"cpu:0": "8GiB", "cpu:1": "8GiB"}


def main(
    rounds: Annotated[int, typer.Option(help="Rounds of all ways.")] = 5,
    quick: Annotated[bool, typer.Option(help="Few rounds.")] = False,
) -> None:
    """Print the table."""
    torch.set_num_threads(1)
    console = Console(width=110)
    console.print(environment())
    torch.manual_seed(0)
    requests = [torch.randint(0, VOCABULARY, (4, 64)) for _ in range(_REQUESTS)]
    plain = GPT().eval()
    options = {"threads_per_device": 1, "progress": False, "training": False}
    placed = baechi.place(
        copy.deepcopy(plain), _TWO, objective="throughput", example_args=(requests[0],), **options
    )
    ways: dict[str, Callable[[], list[Tensor]]] = {
        "one at a time": lambda: [placed(x) for x in requests],
        "unsplit, one thread": lambda: [plain(x) for x in requests],
    }
    for n in (1, 2, 3, 4):
        ways[f"in flight {n}"] = lambda n=n: list(placed.stream(requests, in_flight=n))
    with torch.no_grad():
        expected = [plain(x) for x in requests]
        for name, run in ways.items():
            assert all(map(torch.equal, run(), expected)), name
        medians = timed(ways, 1 if quick else rounds)
    table = Table("", "requests/s", "of one at a time", "of unsplit", "its processor time")
    one, whole = medians["one at a time"], medians["unsplit, one thread"]
    for name, (seconds, worked) in medians.items():
        row = [name, f"{_REQUESTS / seconds:.1f}", f"{one[0] / seconds:.3f}"]
        table.add_row(*row, f"{whole[0] / seconds:.3f}", f"{worked / whole[1]:.3f}")
    console.print(table)
    stats, used = placed.placement.stats, len(set(placed.placement.devices))
    period, latency = stats["period_ns"], stats["latency_ns"]
    console.print(
        f"predicted, on {used} devices: {1e9 / period:.1f} requests/s, {1e9 / latency:.1f} one at "
        f"a time ({latency / period:.2f} times)"
    )


if __name__ == "__main__":
    typer.run(main)
