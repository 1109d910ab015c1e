"""What a call does in Python beside the operators, counted."""

import sys
from collections import Counter
from typing import Any

import pytest
import torch
from benchmarks.calls import Halves
from placed import place_on
from torch import nn

import baechi
from baechi._core import same_contents
from baechi.runtime.executors import cpu_workers
from baechi.tracing import guards


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

    before = sys.gettrace()  # that of a run with coverage
    sys._getframe().f_trace_opcodes = True  # Python 3.12 looks for one when tracing begins
    for traces in (None, None, seen):  # what is found once is known then
        placed.zero_grad()
        sys.settrace(traces)
        try:
            placed(x).sum().backward()
        finally:
            sys.settrace(before)
    placed.unplace()
    return count


def test_a_step_runs_no_python_for_each_parameter() -> None:
    few, many = _opcodes(4), _opcodes(12)
    assert 0 < few == many


def test_a_call_looks_once_at_each_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    """At its dtype, and whether its module still holds it; in the core, where no opcode shows."""
    looks: Counter[int] = Counter()

    def seen(holders: list[Any], rows: list[Any]) -> bool:
        looks.update(map(id, holders))
        return same_contents(holders, rows)

    model, x = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4))), torch.ones(1, 2)
    placed: Any = baechi.place(
        *(model, ["cpu:0", "cpu:1"]),
        placer=Halves(),
        costs="estimate",
        progress=False,
        guard=False,
    )
    for _ in range(2):
        placed(x).sum().backward()
    monkeypatch.setattr(guards, "same_contents", seen)
    placed(x).sum().backward()
    placed.unplace()
    assert [looks[id(p)] for p in model.parameters()] == [1] * 8
    assert [looks[id(layer._parameters)] for layer in model] == [1] * 4
