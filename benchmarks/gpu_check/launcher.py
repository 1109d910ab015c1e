"""The process that the steps are forked from, so that what they import is imported once.

`python3 -m benchmarks.gpu_check.launcher MODULE ...` imports these, and then answers each line of
its standard input: what a step needs (`check.begin`), by the number of its process; such a number,
by the exit status, or by null while it runs. It asks for no GPU: no process that is forked after
that could use one.
"""

import contextlib
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

from benchmarks.gpu_check import check

_ROOT = Path(__file__).parents[2]


@final
class Launcher:
    """The other side: starts that process, and asks it."""

    def __init__(self, modules: Sequence[str]) -> None:
        paths = os.pathsep.join([*filter(None, sys.path), str(_ROOT)])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu_check.launcher", *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
            env={**os.environ, "PYTHONPATH": paths},
            start_new_session=True,
        )

    def __enter__(self) -> "Launcher":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # it has ended, and not read its last line
            self._process.communicate()

    def begin(
        self, log: Path, own: Mapping[str, str], early: Mapping[str, str], *arguments: str
    ) -> int:
        """Fork the process of a step; `check.begin` has the arguments."""
        return int(self._ask([str(log), own, early, arguments]))

    def status(self, process: int) -> int | None:
        """How a process has ended: its exit status, or minus the signal; None while it runs."""
        status: int | None = self._ask(process)
        return status

    def _ask(self, wish: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(wish), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())


def main(modules: Sequence[str]) -> None:
    """Import, and answer."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what is imported may print
    for module in modules:
        with contextlib.suppress(Exception):  # the step that needs it says what is wrong
            importlib.import_module(module)
    for line in sys.stdin:
        wish = json.loads(line)
        if isinstance(wish, int):
            ended, status = os.waitpid(wish, os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if ended else None
        else:
            answer = os.fork()
            if not answer:
                answers.close()
                check.begin(*wish)
                return
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
