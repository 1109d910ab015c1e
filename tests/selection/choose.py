"""Chooses the tests that `make test` leaves out: other tests run what they run.

    make covered        # all tests with coverage: some twenty minutes on two cores

A test is left out if every branch of `src/baechi/` that it takes is taken by a test that stays. A
test stays if it is short, notices a mutant (`tests/README.md`), draws its cases, or does what
coverage does not see: it starts processes, or runs another library. Of the others those stay that
together take all branches, in little time: again and again the one with the most new branches for
its time. The names go to `covered.txt`, of which `conftest.py` makes the marker `covered`.
"""

import re
import resource
import sqlite3
import sys
import tempfile
from collections import defaultdict
from collections.abc import Generator, Iterable
from contextlib import closing
from pathlib import Path

import pytest
import typer

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
# Shorter tests all stay: they find much in little time.
SHORT_S = 0.25
# Other libraries decide what runs; cases are drawn by seeds.
STAYING = ("tests/ecosystem/", "tests/runtime/test_random_")
Branch = tuple[str, int, int]  # file, from line, to line


class Times:
    """Seconds that each test takes with its fixtures; those that draw cases or start processes."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.staying: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = without_group(report.nodeid)
        self.seconds[name] += report.duration
        if report.user_properties:
            self.staying.add(name)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Note where a test starts processes or draws its cases; pytest-xdist sends properties."""
    begun = _of_children()
    yield
    assert sys.gettrace() is not None, "after this test nothing is measured any more"
    drawn = getattr(getattr(item, "function", None), "is_hypothesis_test", False)
    if _of_children() > begun or drawn:
        item.user_properties.append(("stays", True))


def _of_children() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return children.ru_utime + children.ru_stime


def without_group(nodeid: str) -> str:
    """A test's name without the group that pytest-xdist writes behind it."""
    return re.sub(r"@\w+$", "", nodeid)


def run(data: Path) -> Times:
    """Run all tests that are not slow, with branch coverage of each."""
    times = Times()
    config = data.with_name("coveragerc")
    config.write_text(f"[run]\nbranch = True\nsource_pkgs = baechi\ndata_file = {data}\n")
    arguments = ["-q", "-n", "2", "--dist", "loadgroup", "-o", "budget_s=0", "-W", "ignore"]
    measured = ["--cov", f"--cov-config={config}", "--cov-context=test", "--cov-report="]
    code = pytest.main([*arguments, *measured, "-p", "choose"], plugins=[times])
    if code != pytest.ExitCode.OK:
        sys.exit("Where a test fails, what it runs is not known.")
    return times


def branches_of(data: Path) -> dict[str, set[Branch]]:
    """The branches that each test takes in this process, by its name."""
    rows = """
        select context.context, file.path, arc.fromno, arc.tono
        from arc join context on context.id = arc.context_id join file on file.id = arc.file_id
        where context.context != ''
    """  # https://coverage.readthedocs.io/en/latest/dbschema.html
    result: defaultdict[str, set[Branch]] = defaultdict(set)
    with closing(sqlite3.connect(data)) as store:
        for context, *branch in store.execute(rows):
            result[without_group(context.rpartition("|")[0])].add(tuple(branch))
    return result


def noticing() -> list[str]:
    """The tests that notice a mutant, by the table of `tests/README.md`."""
    found = re.findall(r"`([\w/]+\.py::\w+)`", (ROOT / "tests/README.md").read_text())
    return [f"tests/{name}" for name in found]


def covered(branches: dict[str, set[Branch]], times: Times) -> list[str]:
    """The tests without which all branches are taken."""
    staying = (*STAYING, *noticing())
    seconds = {name: max(times.seconds[name], 0.05) for name in branches}
    left = {
        name: set(taken)
        for name, taken in branches.items()
        if seconds[name] >= SHORT_S and name.startswith("tests/")
        if name not in times.staying and not name.startswith(staying)
    }
    new = set().union(*(row for name, row in branches.items() if name not in left))
    while new:
        for row in left.values():
            row.difference_update(new)
        best = max(left, key=lambda name: (len(left[name]) / seconds[name], name), default=None)
        new = left.pop(best) if best is not None and left[best] else set()
    return sorted(left)


def joined(names: Iterable[str], known: Iterable[str]) -> list[str]:
    """Names, with one for a function of which all cases are there."""
    cases: defaultdict[str, set[str]] = defaultdict(set)
    for name in known:
        cases[name.partition("[")[0]].add(name)
    chosen = set(names)
    return sorted({f if cases[f] <= chosen else n for n in names for f in [n.partition("[")[0]]})


def main() -> None:
    """Run all tests, and write `covered.txt`."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "coverage")
        times = run(data)
        names = covered(branches_of(data), times)
    FOLDER.joinpath("covered.txt").write_text("\n".join(joined(names, times.seconds)) + "\n")
    took, all_s = sum(map(times.seconds.__getitem__, names)), sum(times.seconds.values())
    typer.echo(
        f"{len(names)} of {len(times.seconds)} tests are left out: {took:.0f} of {all_s:.0f} s"
    )


if __name__ == "__main__":
    main()
