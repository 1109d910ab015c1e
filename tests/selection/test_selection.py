"""What `make test` leaves out is there, and notices no mutant alone; how it is chosen."""

import re
from pathlib import Path

from choose import Times, covered, joined, noticing, without_group

ROOT = Path(__file__).parents[2]
COVERED = Path(__file__).with_name("covered.txt").read_text().splitlines()


def test_every_test_that_is_left_out_is_there() -> None:
    assert sorted(set(COVERED)) == COVERED
    for name in COVERED:
        file, function = re.fullmatch(r"([\w/.]+)::(\w+)(?:\[.*\])?", name).groups()  # type: ignore[union-attr]
        assert f"def {function}(" in (ROOT / file).read_text(), name


def test_what_notices_a_mutant_is_not_left_out() -> None:
    assert len(noticing()) > 100
    assert not set(noticing()) & {name.partition("[")[0] for name in COVERED}


def test_all_branches_are_taken_by_what_stays() -> None:
    times = Times()
    for name, seconds in (("a", 3), ("b[1]", 1), ("b[2]", 1), ("c", 0.1), ("d", 5), ("e", 9)):
        times.seconds[f"tests/{name}"] = seconds
    times.staying = {"tests/e"}
    rows = {"a": "123", "b[1]": "12", "b[2]": "45", "c": "4", "d": "35", "e": "4"}
    branches = {f"tests/{n}": {("f", int(line), 0) for line in row} for n, row in rows.items()}
    assert covered(branches, times) == ["tests/d"]  # others have more branches for their time


def test_a_function_stands_for_all_of_its_cases() -> None:
    known = ["f[1]", "f[2]", "g[1]", "g[2]", "h"]
    assert joined(["f[1]", "f[2]", "g[2]", "h"], known) == ["f", "g[2]", "h"]
    assert without_group("f[a@b]@ranks") == "f[a@b]"
    assert without_group("f[a@b]") == "f[a@b]"
