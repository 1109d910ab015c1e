"""What libraries keep from one script to the next."""

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _fresh_accelerator() -> Iterator[None]:
    """Accelerate keeps the precision of the first Accelerator of a process."""
    yield
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)
