"""Short steps: one logical device beside eager, and two devices beside one, with and without guard.

    python3 -m benchmarks.small_steps                      # all models
    python3 -m benchmarks.small_steps --only unet,dlrm     # some

Claims: a model placed on one device takes at most 1.01 of the eager model's time in the median over
the models and 1.03 at worst; where two devices are offered, a step takes at most 1.02 of one
device's with the guard, and 1.05 without.

Steps of all ways are timed in turns, four at a time, of which the first is not counted: it finds
the caches of the way before. One process, one thread per logical device; a ratio is of medians.
Costs are measured anew for each row. What the gradients of outputs are made of is not timed.
"""

import argparse
import copy
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from benchmarks.architectures.catalog import example
from benchmarks.environment import environment
from benchmarks.models import googlenet, lstm_lm, resnet
from torch import nn

import baechi
from baechi.torch_support.torch_devices import torch_threads
from baechi.tracing.pytrees import tensors_in

ONE = {"cpu:0": "4GiB"}
TWO = {"cpu:0": "4GiB", "cpu:1": "4GiB"}
SMALL = (
    *("dlrm", "unet", "siamese", "BartForConditionalGeneration", "MistralForCausalLM"),
    *("SwinForImageClassification", "SegformerForSemanticSegmentation", "MambaForCausalLM"),
    "CLIPModel",
)
LARGE: dict[str, Callable[[], Any]] = {
    "lstm": lambda: lstm_lm.example(2),
    "resnet18": lambda: resnet.example(1),
    "googlenet": lambda: googlenet.example(1),
}


def step(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], training: bool) -> int:
    """Nanoseconds of a step as predicted: forward, in training also backward, without a loss."""
    model.zero_grad()
    began = time.perf_counter_ns()
    if not training:
        with torch.no_grad():
            model(*args, **kwargs)
        return time.perf_counter_ns() - began
    result = model(*args, **kwargs)
    forward_ns = time.perf_counter_ns() - began
    outputs = list({id(t): t for t in tensors_in(result) if t.requires_grad}.values())
    outputs = next(([t] for t in outputs if t.dim() == 0), outputs)
    gradients = [torch.ones_like(t) for t in outputs]
    began = time.perf_counter_ns()
    torch.autograd.backward(outputs, gradients)
    return forward_ns + time.perf_counter_ns() - began


def ways(model: nn.Module, training: bool) -> dict[str, nn.Module]:
    """The unsplit model twice, since two copies differ, too, and three ways to place it."""

    def placed(devices: dict[str, str], **options: Any) -> nn.Module:
        own = copy.deepcopy(model)
        return baechi.place(own, devices, training=training, progress=False, **options)

    return {
        "eager": copy.deepcopy(model),
        "eager again": copy.deepcopy(model),
        "one": placed(ONE),
        "two": placed(TWO),
        "two, no guard": placed(TWO, guard=False),
    }


@contextmanager
def own_costs() -> Iterator[None]:
    """Costs are measured anew inside: this machine's speed is another by the minute."""
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, XDG_CACHE_HOME=folder):
        yield


def row(name: str, training: bool, rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Median milliseconds of a step in every way, and those predicted where it was placed."""
    model, args, kwargs = LARGE[name]() if name in LARGE else example(name)
    sides = ways(model.train(training), training)
    samples: dict[str, list[int]] = {way: [] for way in sides}
    for one in range(rounds + 1):
        for way, side in sides.items():
            found = [step(side, args, kwargs, training) for _ in range(4)]
            samples[way] += found[1:] if one else []
    predicted = {}
    for way, side in sides.items():
        if isinstance(side, baechi.PlacedModule):
            predicted[way] = side.schedule.makespan_ns / 1e6
            side.unplace()
    return {way: statistics.median(row) / 1e6 for way, row in samples.items()}, predicted


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join((*SMALL, *LARGE)))
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    print(environment())
    heads = (
        *("model", "mode", "eager ms", "again", "one / eager", "two / one", "without guard"),
        *("predicted / one", "predicted / two", "predicted / without guard"),
    )
    print("| " + " | ".join(heads) + " |")
    print("|---" * len(heads) + "|")
    ratios: dict[str, list[float]] = {head: [] for head in heads[3:]}
    with torch_threads(1):
        for name in options.only.split(","):
            for training in (False, True):
                with own_costs():
                    ms, predicted = row(name, training, options.rounds)
                found = (
                    ms["eager again"] / ms["eager"],
                    ms["one"] / ms["eager"],
                    ms["two"] / ms["one"],
                    ms["two, no guard"] / ms["one"],
                    predicted["one"] / ms["one"],
                    predicted["two"] / ms["two"],
                    predicted["two, no guard"] / ms["two, no guard"],
                )
                mode = "training" if training else "forward"
                cells = [name, mode, f"{ms['eager']:.2f}", *(f"{value:.3f}" for value in found)]
                print("| " + " | ".join(cells) + " |", flush=True)
                for head, value in zip(heads[3:], found, strict=True):
                    ratios[head].append(value)
    for head, values in ratios.items():
        line = f"{head}: median {statistics.median(values):.3f}, worst {max(values):.3f}"
        if head.startswith("predicted"):
            errors = [abs(value - 1) for value in values]
            line = f"{head}, error: median {statistics.median(errors):.1%}, worst {max(errors):.1%}"
        print(line)


if __name__ == "__main__":
    main()
