"""What a tape costs when its operators are called without Python.

    OMP_NUM_THREADS=1 python3 -m benchmarks.tapes
    OMP_NUM_THREADS=1 python3 -m benchmarks.tapes --only siamese,CLIPModel

The operators of a whole model as one tape: from generated Python code, as the runtime calls them,
and from TorchScript's interpreter without its optimizations, which calls the same kernels from C++
and holds no lock of Python's meanwhile. Milliseconds of a forward, and of a forward with its
backward: in one thread, and in the slower of two threads that run side by side. The ways take
turns; a figure is a median. `equal` says whether outputs and gradients are equal in every bit.
"""

import argparse
import copy
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from benchmarks.environment import environment
from benchmarks.small_steps import SMALL, example

import baechi
from baechi.torch_support.torch_devices import torch_threads

Tape = Callable[..., Sequence[Any]]
SKIPPED = ("MambaForCausalLM",)  # its scan is thousands of operators, and tracing takes minutes


def tapes(traced: baechi.Traced) -> tuple[Tape, Tape, list[Any]]:
    """All operators as one tape from Python and from C++, and the arguments."""
    graph = traced.graph(baechi.estimate(traced, "cpu"), training=False)
    cluster = baechi.Cluster.uniform(1, memory="8GiB", link=baechi.Link(0, 1))
    placed: Any = baechi.apply(traced, baechi.solve(graph, cluster), ["cpu"], graph=graph)
    (tape,) = next(iter(placed._specializations))._executor.bound.tapes
    arguments = list(tape.template)
    for argument, index in tape.given:
        arguments[argument] = traced.module.call.tensors[index]
    placed.unplace()

    places = [i for i, value in enumerate(arguments) if isinstance(value, torch.Tensor)]
    tensors = [arguments[i] for i in places]

    def plain(*values: Any) -> tuple[Any, ...]:
        row = list(arguments)  # with submodules that stay whole
        for i, value in zip(places, values, strict=True):
            row[i] = value
        return tuple(value for value in tape.function(row) if isinstance(value, torch.Tensor))

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return plain, torch.jit.trace(plain, tuple(tensors), check_trace=False), tensors


def step(tape: Tape, arguments: Sequence[Any], training: bool) -> Sequence[Any]:
    """Outputs; in training the gradients of their sum."""
    if not training:
        with torch.no_grad():
            return tape(*arguments)
    loss: Any = sum(value.sum() for value in tape(*arguments) if value.requires_grad)
    leaves = [value for value in arguments if value.requires_grad]
    return torch.autograd.grad(loss, leaves, allow_unused=True)


def at_once(runs: Sequence[Callable[[], Any]], repeats: int) -> float:
    """Milliseconds of a run in the slower of threads that start together."""
    barrier, spent = threading.Barrier(len(runs)), []

    def work(run: Callable[[], Any]) -> None:
        torch.set_num_threads(1)
        barrier.wait()
        began = time.perf_counter_ns()
        for _ in range(repeats):
            run()
        spent.append((time.perf_counter_ns() - began) / repeats / 1e6)

    threads = [threading.Thread(target=work, args=(run,)) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return max(spent)


def row(name: str, training: bool, rounds: int) -> list[str]:
    """The cells of a model."""
    model, args, kwargs = example(name)
    model.train(training)
    torch.manual_seed(0)
    sides = [tapes(baechi.trace(copy.deepcopy(model), args, kwargs)) for _ in range(2)]
    ways = {
        way: [partial(step, side[number], side[2], training) for side in sides]  # one per thread
        for number, way in enumerate(("Python", "C++"))
    }
    outcomes = []
    for runs in ways.values():
        torch.manual_seed(1)
        outcomes.append(runs[0]())
    equal = all(one is two or torch.equal(one, two) for one, two in zip(*outcomes, strict=True))
    samples: dict[tuple[str, int], list[float]] = {(w, n): [] for w in ways for n in (1, 2)}
    for number in range(rounds + 1):
        for (way, threads), found in samples.items():
            found.extend([at_once(ways[way][:threads], 4)] if number else [])
    took = {key: statistics.median(found) for key, found in samples.items()}
    cells = [f"{took[way, n]:.2f}" for n in (1, 2) for way in ways]
    gains = [f"{1 - took['C++', n] / took['Python', n]:.0%}" for n in (1, 2)]
    return [name, "training" if training else "forward", *cells, *gains, str(equal)]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(n for n in SMALL if n not in SKIPPED))
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    print(environment())
    columns = "one thread: Python ms", "C++ ms", "two at once: Python ms", "C++ ms"
    print("|", " | ".join(("model", "mode", *columns, "gain, one", "gain, two", "equal")), "|")
    print("|---" * 9 + "|")
    with torch_threads(1), torch.jit.optimized_execution(False):
        for name in options.only.split(","):
            for training in (False, True):
                print("|", " | ".join(row(name, training, options.rounds)), "|", flush=True)


if __name__ == "__main__":
    main()
