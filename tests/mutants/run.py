"""Breaks the code in one small place after another; the tests must notice each.

Each mutant of `mutants.toml` is applied alone, in a copy of the tree. First the tests that should
notice it run; if they pass, the whole default run. What no test notices survives: then a test is
missing, or the suite has become too short. In the end the tests that noticed something run once
more on the unbroken copy, where they must pass.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

ROOT = Path(__file__).parents[2]
# A mutant may make tests wait for ever: that is noticed, too.
PATIENCE_S = {"its tests": 1200, "all tests": 3600}
# Those of `make test`.
CASES = "not gpu and not multigpu and not slow and not kubernetes and not covered"


@dataclass(frozen=True)
class Mutant:
    """One row of `mutants.toml`: `find` is replaced, and `tests` should notice it."""

    name: str
    file: str
    find: str
    replace: str
    tests: list[str]


class Copy:
    """A copy of the tree with a compiled core; the working tree itself stays as it is."""

    def __init__(self, folder: Path) -> None:
        self.tree, self._build, self._cache = folder / "tree", folder / "build", folder / "cache"
        self.log = folder / "log"
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for name in filter(None, names.split("\0")):
            if (ROOT / name).is_file():
                target = self.tree / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, target)
        core = find_spec("baechi._core")
        assert core is not None, "baechi is not installed"
        assert core.origin is not None
        self._core = Path(core.origin)
        self._put(self._core)
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        own = {"PYTHONPATH": str(self.tree / "src"), "PATH": path, "OMP_NUM_THREADS": "1"}
        self._env = {**os.environ, **own}  # as `make test` runs them
        where = self._do(sys.executable, "-c", "import baechi._core; print(baechi._core.__file__)")
        assert str(self.tree) in where, f"the tests would run {where}; is baechi editable?"

    @contextlib.contextmanager
    def broken(self, mutant: Mutant) -> Iterator[None]:
        """The block runs with the mutant."""
        path = self.tree / mutant.file
        before = path.read_text()
        assert before.count(mutant.find) == 1, f"{mutant.file} has not one {mutant.find!r}"
        path.write_text(before.replace(mutant.find, mutant.replace))
        try:
            if path.suffix in (".cc", ".h"):
                self._compile()
            yield
        finally:
            path.write_text(before)
            self._put(self._core)

    def test(self, *arguments: str, patience_s: int) -> tuple[bool, list[str]]:
        """Whether the tests pass; else those that failed, or what else happened."""
        shutil.rmtree(self._cache, ignore_errors=True)
        command = [sys.executable, "-m", "pytest", "-q", "--ignore", "tests/mutants", *arguments]
        command += ["-m", CASES]
        command += ["-o", f"cache_dir={self._cache}", "--hypothesis-profile", "mutants"]
        command += ["-o", "budget_s=0"]  # a mutant that is only slower is not noticed
        with self.log.open("w") as log:
            tests = subprocess.Popen(
                command, cwd=self.tree, env=self._env, stdout=log, stderr=log, process_group=0
            )
            try:
                code = tests.wait(patience_s)
            except BaseException as error:  # Ctrl-C comes to this process alone
                os.killpg(tests.pid, signal.SIGKILL)
                tests.wait()
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                return False, [f"no end in {patience_s} s"]
        if code < 0:
            return False, [f"a crash, by signal {-code}"]
        if code > 1:
            raise RuntimeError(f"these tests cannot run: {self.log.read_text()[-2000:]}")
        failed = self._cache / "v/cache/lastfailed"
        return code == 0, list(json.loads(failed.read_text())) if code else []

    def _compile(self) -> None:
        """Builds what has changed since the last mutant, and puts the core in its place."""
        python = f"-DPython_EXECUTABLE={sys.executable}"
        options = ["-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", python]
        self._do("cmake", "-S", str(self.tree), "-B", str(self._build), *options)
        self._do("cmake", "--build", str(self._build))
        self._put(next(self._build.glob("_core*.so")))

    def _put(self, core: Path) -> None:
        target = self.tree / "src/baechi" / core.name
        target.unlink(missing_ok=True)
        shutil.copy(core, target)

    def _do(self, *command: str) -> str:
        done = subprocess.run(
            command, cwd=self.tree, env=self._env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout


def load() -> list[Mutant]:
    """All mutants."""
    text = Path(__file__).with_name("mutants.toml").read_text()
    rows: list[dict[str, Any]] = tomllib.loads(text)["mutant"]
    return [Mutant(**row) for row in rows]


def notice(copy: Copy, mutant: Mutant, quick: bool) -> list[str]:
    """The test that notices the mutant first; none if it survives."""
    with copy.broken(mutant):
        passed, failed = copy.test("-x", *mutant.tests, patience_s=PATIENCE_S["its tests"])
        if passed and not quick:
            passed, failed = copy.test("-x", patience_s=PATIENCE_S["all tests"])
    return failed


def main(
    words: Annotated[
        list[str] | None, typer.Argument(help="Only mutants with one of these in name or file.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Only the tests that are named for each mutant.")
    ] = False,
) -> None:
    """Break the code in one place after another: the tests must notice each mutant.

    Prints which test notices which mutant, as a Markdown table; leaves with 1 if a mutant survives.
    `make test` must pass before.
    """
    mutants = [m for m in load() if not words or any(w in m.name or w in m.file for w in words)]
    survivors: list[str] = []
    tests: dict[str, None] = {}
    typer.echo("| mutant | noticed by | s |\n|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Copy(Path(folder))
        for mutant in mutants:
            begun = time.monotonic()
            found = notice(copy, mutant, quick)
            tests.update(dict.fromkeys(row for row in found if "::" in row))
            seconds = time.monotonic() - begun
            typer.echo(f"| {mutant.name} | {_seen(found)} | {seconds:.0f} |")
            if not found:
                survivors.append(mutant.name)
        healthy, failed = copy.test(*tests, patience_s=3600) if tests else (True, [])
    if survivors or not healthy:
        typer.echo(f"survived: {survivors}; tests that fail without a mutant: {failed}", err=True)
        raise typer.Exit(1)


def _seen(found: Sequence[str]) -> str:
    """The first of the tests, without its parameters."""
    if not found:
        return "**nothing**"
    test = found[0].partition("[")[0].removeprefix("tests/")
    return f"`{test}`" if "::" in test else test


if __name__ == "__main__":
    typer.run(main)
