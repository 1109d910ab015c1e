"""What the driver tells of a GPU."""

import ctypes
import uuid
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_cuda import shared_with

from baechi.torch_support.torch_devices import processes_on

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("processes", [1, 3])
def test_processes_on_a_gpu_are_counted(processes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    row = SimpleNamespace(uuid=uuid.UUID(int=7))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: row)
    shared_with(monkeypatch, processes)
    assert processes_on(GPU) == processes
    row.uuid = "of no GPU"
    assert processes_on(GPU) == 0


def test_where_the_driver_tells_nothing_no_process_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = SimpleNamespace(uuid=uuid.UUID(int=7))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: row)
    old = SimpleNamespace(
        nvmlInit_v2=lambda: 0, nvmlDeviceGetHandleByUUID=lambda *_: 0, nvmlShutdown=lambda: 0
    )

    def absent(name: str) -> Any:
        raise OSError(name)

    for library in (absent, lambda _: old):
        monkeypatch.setattr(ctypes, "CDLL", library)
        assert processes_on(GPU) == 0
