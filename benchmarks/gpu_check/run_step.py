"""One step in a process of its own, and the rows that it leaves, however it ends."""

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.launcher import Launcher
from benchmarks.gpu_check.steps import Step

Row = dict[str, Any]

_LEAST_S = 5.0
_POLL_S = 0.1
_LAST_LINES = 3


def rows_of(
    step: Step, launcher: Launcher, folder: Path, *, quick: bool, left_s: float
) -> Iterator[Row | None]:
    """The rows of a step as they come; one more if it did not end as it should; None meanwhile.

    Args:
        step: What to run.
        launcher: Begins its process.
        folder: For the row file, the log, and costs that steps measure and share.
        quick: Whether a few cases are enough.
        left_s: What is left of the time of all steps.
    """
    if left_s < _LEAST_S:
        yield _row(step, "step", "skipped", 0.0, f"{max(left_s, 0):.0f} s were left for it")
        return
    limit_s = min(step.limit_s, left_s)
    path, log = folder / f"{step.name}.jsonl", folder / f"{step.name}.log"
    path.touch()
    own = {"XDG_CACHE_HOME": str(folder / "cache")}
    arguments = (step.module, step.name, str(path), str(limit_s), "quick" if quick else "whole")
    begun = time.monotonic()
    try:
        process = launcher.begin(log, own, step.environment, *arguments)
    except (OSError, ValueError):
        yield _row(step, "step", "crash", 0.0, "what is imported for all steps ended Python")
        return
    with path.open() as found:
        try:
            late = False
            status = None
            while status is None:
                status = launcher.status(process)
                late = status is None and time.monotonic() - begun > limit_s
                if late:
                    _kill(process)
                    status = -signal.SIGKILL
                yield from _written(found)
                if status is None:
                    yield None
        finally:
            _kill(process)
    took_s = time.monotonic() - begun
    last = " | ".join(log.read_text(errors="replace").split("\n")[-_LAST_LINES - 1 :]).strip(" |")
    if late:
        yield _row(step, "step", "timeout", took_s, f"over {limit_s:.0f} s: {last}")
    elif status < 0:
        yield _row(step, "step", "crash", took_s, f"{signal.Signals(-status).name}: {last}")
    elif status:
        yield _row(step, "step", "crash", took_s, f"exit status {status}: {last}")


def rows_of_all(
    steps: Sequence[Step], start: Callable[[Step], Iterator[Row | None]], at_once: int
) -> Iterator[Row]:
    """The rows of steps, so many at once; those that measure times run alone."""
    waiting, running = list(steps), dict[str, Iterator[Row | None]]()
    alone = False
    while waiting or running:
        while waiting and (
            not running or not (alone or waiting[0].timed or len(running) == at_once)
        ):
            step = waiting.pop(0)
            running[step.name], alone = start(step), step.timed
        found = {name: next(rows, "end") for name, rows in running.items()}
        for name, row in found.items():
            if row == "end":
                del running[name]
            elif row is not None:
                yield row
        if found and not any(found.values()):
            time.sleep(_POLL_S)


def _written(file: Any) -> Iterator[Row]:
    """What whole lines there are; a process that is killed may leave half of one."""
    while True:
        begin = file.tell()
        line = file.readline()
        if not line.endswith("\n"):
            file.seek(begin)
            return
        yield json.loads(line)


def _kill(process: int) -> None:
    """End the process and all that it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended
        os.killpg(process, signal.SIGKILL)


def _row(step: Step, case: str, status: str, seconds: float, error: str) -> Row:
    return {
        "step": step.name,
        "case": case,
        "status": status,
        "seconds": round(seconds, 2),
        "error": error,
    }
