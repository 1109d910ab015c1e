"""Models of the zoo with measured costs, and the peaks that their steps are metered at."""

from functools import cache

import torch
import zoo

import baechi
from baechi.tracing.pytrees import tensors_in

ALL = {**zoo.MODELS, **zoo.AWKWARD}


@cache
def example(name: str) -> tuple[zoo.Example, baechi.Traced, baechi.Profile]:
    model, args, kwargs = ALL[name]()
    traced = baechi.trace(model, args, kwargs)
    return (model, args, kwargs), traced, baechi.profile(traced, "cpu", threads=1, progress=False)


def measured(placed: baechi.PlacedModule, call: zoo.Example, optimizer: str | None) -> list[int]:
    """The peak of every device in the second step, when the optimizer has its state."""
    model, args, kwargs = call
    parameters = [p for p in model.parameters() if p.requires_grad]
    stepper = None
    if optimizer == "adamw" and parameters:
        stepper = torch.optim.AdamW(parameters, lr=1e-4)
    for last in (False, True):
        with placed.metered(stepper) as meter:
            if optimizer is None:
                with torch.no_grad():
                    placed(*args, **kwargs)
            else:
                leaves = [t for t in tensors_in(placed(*args, **kwargs)) if t.requires_grad]
                torch.stack([(leaf.float() ** 2).sum() for leaf in leaves]).sum().backward()
                del leaves
        if stepper is not None and not last:
            stepper.step()
        model.zero_grad()
    return list(meter.peak_bytes)
