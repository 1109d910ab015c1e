"""The step `compile`: compiled segments give the eager values, and no step compiles again.

With `compile=True`, inductor; on the emulated runtime, which runs no Triton, `aot_eager`, whose
guards, threads and devices are the same.
"""

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from benchmarks.gpu_check.check import Check
from benchmarks.gpu_check.prediction import loss_of
from benchmarks.models.towers import Towers
from torch import nn

import baechi
from baechi.tracing.pytrees import tensors_in

_PLACE = "cuda:0"
_LANES = (f"{_PLACE}/a", f"{_PLACE}/b")
_STEPS = 6


def run(check: Check) -> None:
    """A row per model and way."""
    wish: Any = {"backend": "aot_eager"} if check.emulated else True
    ways: Mapping[str, Mapping[str, Any]] = {
        "1 lane": {"devices": [_PLACE]},
        "2 lanes": {"devices": list(_LANES), "placer": baechi.RandomPlacer(1)},
        "1 lane, graphs": {"devices": [_PLACE], "cuda_graphs": "auto"},
        "1 lane, checkpoint": {"devices": [_PLACE], "checkpoint": True},
    }
    for name in ("towers",) if check.quick else ("towers", "gpt2"):
        for way in list(ways)[:2] if check.quick else ways:
            check.case(f"{name}, {way}", partial(_trained, name, {"compile": wish, **ways[way]}))


def _trained(name: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
    torch.manual_seed(0)
    model, kwargs = _example(name)
    reference = copy.deepcopy(model)
    if options.get("checkpoint"):
        first = next(iter(dict(model.named_children())))
        options = {**options, "checkpoint": f"{first}.*"}
    placed = baechi.place(
        model,
        **{"guard": False, "progress": False, "example_args": (), "example_kwargs": dict(kwargs)},
        **options,
    )
    worst, compiled = 0.0, []
    for _ in range(_STEPS):
        for one, other in zip(_step(reference, kwargs), _step(placed, kwargs), strict=True):
            scale = one.abs().max().clamp(min=1e-6)
            worst = max(worst, float((one - other.to(one.device)).abs().max() / scale))
        compiled.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    remarks = list(placed.remarks)
    placed.unplace()
    assert worst < 1e-3, f"the largest error is {worst:.2g} of the largest value; {remarks}"
    assert compiled[0] == compiled[-1], f"graphs compiled by the end of each step: {compiled}"
    return {"worst_error": worst, "compiled": compiled[-1], "remarks": remarks}


def _example(name: str) -> tuple[nn.Module, Mapping[str, Any]]:
    if name == "towers":
        return Towers(2, 2, 64).to(_PLACE), {"x": torch.randn(8, 64, device=_PLACE)}
    from benchmarks.models import hugging_face

    sizes = {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 256}
    ids = torch.randint(0, 256, (2, 64), device=_PLACE)
    model = hugging_face.gpt2(dropout=False, bos_token_id=0, eos_token_id=0, **sizes)
    return model.to(_PLACE), {"input_ids": ids, "labels": ids}


def _step(model: nn.Module, kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    model.zero_grad()
    outputs = tensors_in(model(**kwargs))
    loss_of([t for t in outputs if t.requires_grad]).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [t.detach().clone() for t in (*outputs, *gradients)]
