"""The steps of gpu-check with the CPU in the place of the GPU: all their code runs.

A step is loaded with every `cuda` of its devices made `cpu`, and what it calls of `torch.cuda` is
played: streams order nothing, a graph's replay does nothing, a spin moves the clock of events. So a
name of Baechi's that has moved, or an argument that is no more, shows where there is no GPU; the
figures mean nothing.
"""

import contextlib
import importlib.util
import sys
import time
from collections import defaultdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from baechi.torch_support import graph_capture

_MADE_CPU = {
    '"cuda:0"': '"cpu:0"',
    'torch.device("cuda", 0)': 'torch.device("cpu")',
    "cuda_graphs=True": 'cuda_graphs="auto"',  # which no CPU refuses
    "ProfilerActivity.CUDA": "ProfilerActivity.CPU",
}
# Modules that others of them import, in that order.
_PARTS = ("benchmarks.runtime.gpu", "benchmarks.gpu_check.host", "benchmarks.gpu_check.prediction")
_SPUN_NS = [0]


class _Event:
    def __init__(self, **_: Any) -> None:
        self.at_ns = 0

    def record(self, _: Any = None) -> None:
        self.at_ns = time.perf_counter_ns() + _SPUN_NS[0]

    def synchronize(self) -> None:
        """It has passed."""

    def elapsed_time(self, end: "_Event") -> float:
        return (end.at_ns - self.at_ns) / 1e6


class _Stream:
    stream_id = device_index = device_type = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cpu")

    def wait_stream(self, _: "_Stream") -> None:
        """Nothing runs there."""

    wait_event = wait_stream

    def record_event(self) -> _Event:
        event = _Event()
        event.record()
        return event


class _Graph:
    def capture_begin(self, **_: Any) -> None:
        """What is captured runs."""

    capture_end = replay = capture_begin


def _spin(cycles: int) -> None:
    _SPUN_NS[0] += cycles


def _nothing(*_: Any, **__: Any) -> None:
    """No device is waited for."""


def _bytes(*_: Any) -> int:
    return 1


def _inside(*_: Any) -> Any:
    return contextlib.nullcontext()


_CUDA = {
    "Event": _Event,
    "Stream": _Stream,
    "CUDAGraph": _Graph,
    "_sleep": _spin,
    "current_stream": _Stream,
    "memory_stats": lambda: defaultdict(int),
    "get_device_capability": lambda _: (9, 0),
    "get_device_properties": lambda _: SimpleNamespace(total_memory=2**34),
    "get_sync_debug_mode": lambda: 0,
    **dict.fromkeys(("device", "graph", "stream"), _inside),
    **dict.fromkeys(("empty_cache", "graph_pool_handle", "synchronize"), _nothing),
    **dict.fromkeys(("reset_peak_memory_stats", "set_sync_debug_mode"), _nothing),
    **dict.fromkeys(("memory_allocated", "memory_reserved"), _bytes),
    **dict.fromkeys(("max_memory_allocated", "max_memory_reserved"), _bytes),
}


def step_on_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of gpu-check by its whole name, whose devices are the CPU's."""
    for attribute, played in _CUDA.items():
        monkeypatch.setattr(torch.cuda, attribute, played)
    monkeypatch.setattr(graph_capture, "is_captured", lambda _: False)
    for part in _PARTS:
        monkeypatch.setitem(sys.modules, part, _loaded(part))
        parent, _, short = part.rpartition(".")
        monkeypatch.setattr(sys.modules[parent], short, sys.modules[part], raising=False)
    return _loaded(name)


def _loaded(name: str) -> ModuleType:
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    text = Path(spec.origin).read_text()
    for gpu, cpu in _MADE_CPU.items():
        text = text.replace(gpu, cpu)
    module = importlib.util.module_from_spec(spec)
    exec(compile(text.replace('"cuda:0/', '"cpu:0/'), spec.origin, "exec"), vars(module))
    return module
