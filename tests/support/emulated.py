"""What tests ask of the emulated CUDA runtime beside CUDA: its clock, its calls, its failures."""

import contextlib
import ctypes
import os
from collections import Counter
from collections.abc import Iterator

import pytest

alone = pytest.mark.skipif("EMULATED_CUDA" not in os.environ, reason="needs the emulated CUDA")


def _runtime() -> ctypes.CDLL:
    runtime = ctypes.CDLL(None)
    runtime.emulated_set.argtypes = [ctypes.c_char_p, ctypes.c_int64]
    runtime.emulated_now_ns.restype = ctypes.c_int64
    runtime.emulated_calls.restype = ctypes.c_char_p
    return runtime


@contextlib.contextmanager
def settings(**numbers: int) -> Iterator[None]:
    """Numbers by their names in the README, of operators by `aten__mm`, until the end."""
    runtime = _runtime()
    names = {name.replace("__", "::").encode(): number for name, number in numbers.items()}
    for name, number in names.items():
        runtime.emulated_set(name, number)
    try:
        yield
    finally:
        for name in names:
            runtime.emulated_unset(name)


def on_the_clock() -> contextlib.AbstractContextManager[None]:
    """The virtual clock where CUDA is emulated, for tests of what takes time on a GPU."""
    return settings(CLOCK=1) if "EMULATED_CUDA" in os.environ else contextlib.nullcontext()


def now_ns() -> int:
    """The virtual time of the host."""
    return int(_runtime().emulated_now_ns())


def calls() -> Counter[str]:
    """The calls of the runtime so far, by name, and by the device that was current."""
    rows = (row.split("\t") for row in _runtime().emulated_calls().decode().splitlines())
    return Counter({name: int(number) for name, number in rows})
