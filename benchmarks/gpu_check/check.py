"""The process of one step: cases, each of which is a row, whatever it raises.

`launcher.py` forks it, and calls `begin`. Where that needs a new Python, it is
`python3 -m benchmarks.gpu_check.check MODULE NAME ROWS LIMIT quick|whole`.
"""

import faulthandler
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

# After one of these a process can do no more on its GPU.
_STICKY = ("illegal memory access", "device-side assert", "unspecified launch failure")


class Skipped(Exception):  # noqa: N818 (nothing is wrong)
    """A case means nothing on this machine."""


class WrongError(AssertionError):
    """A case is wrong, and these are its figures."""

    def __init__(self, text: str, **figures: Any) -> None:
        super().__init__(text)
        self.figures = figures


def cores() -> int:
    """Of the machine, that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@final
class Check:
    """What a step is given to write its rows with.

    Attributes:
        step: The step's name.
        quick: Whether a few cases at small sizes are enough.
        emulated: Whether CUDA is emulated: there is no Triton, and no time.
    """

    def __init__(self, step: str, path: Path, *, quick: bool) -> None:
        self.step = step
        self.quick = quick
        self.emulated = "EMULATED_CUDA" in os.environ
        self._path = path

    def row(self, case: str, status: str, seconds: float, **figures: Any) -> None:
        """Write a row."""
        row = {"step": self.step, "case": case, "status": status, "seconds": round(seconds, 2)}
        with self._path.open("a") as file:
            file.write(json.dumps({**row, **figures}) + "\n")

    def case(self, name: str, figures: Callable[[], Mapping[str, Any] | None]) -> None:
        """A row of figures, or of what they raised: a false assertion is a failure."""
        print(f"case {name}", flush=True)
        begun = time.monotonic()
        found: Mapping[str, Any] = {}
        status, error = "ok", ""
        try:
            found = figures() or {}
        except Skipped as why:
            status, error = "skip", str(why)
        except ImportError as missing:
            status, error = "missing", str(missing)
        except AssertionError as wrong:
            status, error = "fail", _brief(wrong)
            found = getattr(wrong, "figures", {})
        except Exception as wrong:
            status, error = "error", f"{type(wrong).__name__}: {_brief(wrong)}"
        rest = {"error": error} if error else {}
        self.row(name, status, time.monotonic() - begun, **found, **rest)
        if any(text in error for text in _STICKY):
            sys.exit(f"{name} ended CUDA in this process: {error}")


def _brief(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def begin(
    log: str, own: Mapping[str, str], early: Mapping[str, str], arguments: Sequence[str]
) -> None:
    """Become the process of a step, in a forked one.

    Args:
        log: Where what it prints goes.
        own: Variables of its environment.
        early: Those that torch reads when it is loaded, so that it must be loaded anew.
        arguments: Of `main`.
    """
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.environ.update({**own, **early})
    torch: Any = sys.modules.get("torch")
    if early or (torch is not None and torch.cuda._is_in_bad_fork()):
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks.gpu_check.check", *arguments])
    main(*arguments)


def main(module: str, step: str, path: str, limit_s: str, size: str) -> None:
    """Run a step's module."""
    faulthandler.enable()
    check = Check(step, Path(path), quick=size == "quick")
    try:
        run = importlib.import_module(module).run
    except ImportError as missing:
        check.row("import", "missing", 0.0, error=str(missing))
        return
    # Ahead of the end that the limit brings: the row then tells where it hangs.
    faulthandler.dump_traceback_later(0.8 * float(limit_s))
    run(check)
    sys.stdout.flush()
    os._exit(0)  # workers that compile may hold up an orderly end for minutes


if __name__ == "__main__":
    # As the steps import it: a class of `__main__` would be another.
    importlib.import_module("benchmarks.gpu_check.check").main(*sys.argv[1:])
