"""What a call of a placed model costs beside the operators, by the number of parameters.

    OMP_NUM_THREADS=1 python3 -m benchmarks.calls

Claim: between the caller and the first kernel, and after the last, there are at most 60 us per
forward and 100 us per training step for a model of 200 operators and 150 parameters on two logical
devices.

Microseconds of calls without those in which the executor runs the program's tapes, which hand over
what they made once: the median, and what a twentieth stays below, as on a quiet machine. A step has
the forward with gradients, and the backward from the first of the step's nodes to the last; then
autograd hands every parameter its gradient, as it does in eager.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from benchmarks.environment import environment
from torch import nn

import baechi
from baechi.placers.placer import Placer, in_index_order
from baechi.problem.problem_arrays import Problem
from baechi.records.placement import Placement
from baechi.runtime.autograd.step import OutputFunction
from baechi.runtime.step_function import LeavesFunction
from baechi.torch_support.torch_devices import torch_threads

DEVICES = {"cpu:0": "1GiB", "cpu:1": "1GiB"}


class Halves(Placer):
    """The first half of the groups on one device, the second on the other."""

    name = "halves"
    fixed = True

    def place(self, problem: Problem) -> Placement | None:
        """A placement by the rule of the class."""
        n = len(problem.group_ops)
        return in_index_order(problem, [2 * g // n for g in problem.op_group], self.name)


class Operators(nn.Module):
    """Linear layers, and pointwise operators up to a number of operators in all."""

    def __init__(self, parameters: int, operators: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(parameters // 2))
        self.pointwise = max(operators - len(self.layers), 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share = self.pointwise / len(self.layers)
        for i, layer in enumerate(self.layers):
            x = layer(x)
            for _ in range(round((i + 1) * share) - round(i * share)):
                x = torch.tanh(x)
        return x


def us(samples: list[float]) -> tuple[float, float]:
    """The median, and what a twentieth stays below."""
    return statistics.median(samples) * 1e6, statistics.quantiles(samples, n=20)[0] * 1e6


def beside(module: Any, call: Callable[[], Any], rounds: int) -> tuple[float, float]:
    """Microseconds of a call beside the tapes, which hand over what they made the first time.

    Of a backward those from the first of its nodes to the last.
    """
    executor = next(iter(module._specializations))._executor
    run, made, spent = executor.run, {}, [0.0]
    first, last = OutputFunction.backward, LeavesFunction.backward

    def ready(steps: Any, phase: int) -> None:
        spent[0] += time.perf_counter()
        (step,) = steps
        if phase not in made:
            run(steps, phase)
            made[phase] = list(step.grads if phase else step.results), list(step.flags)
        found, flags = made[phase]
        copies = [value if value is None else value.detach().clone() for value in found]
        step.flags[:] = flags
        (step.grads if phase else step.results)[:] = copies
        spent[0] -= time.perf_counter()

    def begun(*args: Any) -> Any:
        spent[0] -= time.perf_counter()
        return first(*args)

    def ended(*args: Any) -> Any:
        result = last(*args)
        spent[0] += time.perf_counter()
        return result

    samples = []
    with (
        patch.object(executor, "run", ready),
        patch.object(OutputFunction, "backward", staticmethod(begun)),
        patch.object(LeavesFunction, "backward", staticmethod(ended)),
    ):
        for _ in range(rounds):
            module.zero_grad()
            spent[0] = -time.perf_counter()
            output = call()
            spent[0] += time.perf_counter()
            if output.requires_grad:
                output.sum().backward()
            samples.append(spent[0])
            del output
    return us(samples[rounds // 10 :])


def row(parameters: int, operators: int, rounds: int) -> dict[str, tuple[float, float]]:
    """What calls of one model cost."""
    torch.manual_seed(0)
    model, x = Operators(parameters, operators), torch.randn(4, 8)
    module: Any = baechi.place(
        model, DEVICES, placer=Halves(), costs="estimate", progress=False, guard=False
    )

    def forward() -> Any:
        with torch.no_grad():
            return module(x)

    forward()
    module(x).sum().backward()
    found = {"forward": beside(module, forward, rounds)}
    found["step"] = beside(module, lambda: module(x), rounds)
    module.unplace()
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", default="50,150,600")
    parser.add_argument("--operators", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=400)
    options = parser.parse_args()
    print(environment())
    with torch_threads(1):
        for parameters in map(int, options.parameters.split(",")):
            found = row(parameters, options.operators, options.rounds)
            cells = (f"{name} {a:.0f} ({b:.0f})" for name, (a, b) in found.items())
            print(f"{parameters} parameters: " + ", ".join(cells), flush=True)


if __name__ == "__main__":
    main()
