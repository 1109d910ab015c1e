"""What a call does in Python beside the operators, counted."""

import sys
from typing import Any

import torch
from benchmarks.calls import Halves
from placed import place_on
from torch import nn

import baechi
from baechi.runtime.executors import cpu_workers


def _opcodes(layers: int) -> int:
    """Those of the caller's thread in a training step, but for its wait for the workers."""
    model, x = nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers))), torch.ones(1, 2)
    traced = baechi.trace(model, (x,))
    placed = place_on(traced, 2, Halves(), threads_per_device=1)
    count = 0

    def seen(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        if frame.f_code.co_filename == cpu_workers.__file__:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return seen

    sys._getframe().f_trace_opcodes = True  # Python 3.12 looks for one when tracing begins
    for traces in (None, None, seen):  # what is found once is known then
        placed.zero_grad()
        sys.settrace(traces)
        try:
            placed(x).sum().backward()
        finally:
            sys.settrace(None)
    placed.unplace()
    return count


def test_a_step_runs_no_python_for_each_parameter() -> None:
    few, many = _opcodes(4), _opcodes(12)
    assert 0 < few == many
