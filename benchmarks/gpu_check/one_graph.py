"""The step `one-graph`: lanes of one GPU against eager and against one sequential CUDA graph.

The figures are ratios to one graph of the whole model with the copies that a placed model makes, of
input and output; below 1 is faster. `python3 -m benchmarks.runtime.gpu` has more models and sizes.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from benchmarks.gpu_check.check import Check
from benchmarks.models.towers import Towers
from benchmarks.runtime.gpu import ONE_GRAPH, Measured, measured


def run(check: Check) -> None:
    """Three rows per model, batch and mode: of steps alone, of steps in a row, and predicted."""
    names = ("small towers",) if check.quick else ("two towers", "googlenet")
    for name in names:
        for batch in (1,) if check.quick else (1, 8):
            for training in (False,) if check.quick else (False, True):
                mode = "training" if training else "forward"
                found: list[Measured] = []
                title = f"{name} b{batch} {mode}"
                check.case(title, partial(_alone, check.quick, name, batch, training, found))
                for each in found:
                    check.case(f"{title}, in a row", partial(_ratios, each.in_a_row))
                    check.case(f"{title}, predicted", partial(_predicted, each))


def _alone(
    quick: bool, name: str, batch: int, training: bool, found: list[Measured]
) -> Mapping[str, Any]:
    options: dict[str, Any] = {"lanes": (1, 2), "rounds": 3} if quick else {"rounds": 20}
    if quick:
        options["models"] = {name: lambda n: (Towers(2, 2, 32), torch.randn(n, 32))}
    found.append(measured(name, batch, training=training, **options))
    return _ratios(found[0].alone)


def _ratios(took: Mapping[str, float]) -> Mapping[str, Any]:
    whole = max(took[ONE_GRAPH], 1e-9)
    ratios = {side: ms / whole for side, ms in took.items() if side != ONE_GRAPH}
    best = min(ratio for side, ratio in ratios.items() if "lanes" in side)
    return {"one_graph_ms": whole, **ratios, "best_lanes_over_one_graph": best}


def _predicted(found: Measured) -> Mapping[str, Any]:
    """Milliseconds of lanes, and how many of them each plan uses."""
    used = {f"{side} used": number for side, number in found.used.items()}
    return {**found.predicted, **used}
