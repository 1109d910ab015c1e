"""Every test run keeps its measured costs in a folder of its own; what many tests ask for."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def _cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    before = os.environ.get("XDG_CACHE_HOME")
    folder = tmp_path_factory.mktemp("cache")
    os.environ["XDG_CACHE_HOME"] = str(folder)
    yield folder
    del os.environ["XDG_CACHE_HOME"]
    if before is not None:
        os.environ["XDG_CACHE_HOME"] = before


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One torch thread, as a worker has: sums are in its order, and no thread waits for another."""
    from baechi.torch_devices import torch_threads

    with torch_threads(1):
        yield
