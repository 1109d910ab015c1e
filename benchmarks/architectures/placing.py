"""An architecture on two logical devices of a CPU, at random, with computed costs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

import baechi

DEVICES = {"cpu:0": "8GiB", "cpu:1": "8GiB"}


def at_random(model: nn.Module, seed: int, **options: Any) -> baechi.PlacedModule:
    """The model in its mode, whose operators are where the seed puts them."""
    return baechi.place(
        model,
        DEVICES,
        placer=baechi.RandomPlacer(seed),
        training=model.training,
        costs="estimate",
        progress=False,
        threads_per_device=1,
        **options,
    )


@contextmanager
def errors_noted(problems: list[str]) -> Iterator[None]:
    """Add what is raised inside to the problems: a refusal, or what only the split model raises."""
    try:
        yield
    except baechi.BaechiError as error:
        problems.append(f"{type(error).__name__}: {error}")
    except Exception as error:  # whatever it is
        problems.append(f"fails when placed: {type(error).__name__}: {error}")
