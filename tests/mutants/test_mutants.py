"""Every mutant still fits the code; `make mutants` runs the tests with each."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
MUTANTS = tomllib.loads(Path(__file__).with_name("mutants.toml").read_text())["mutant"]


def test_every_mutant_changes_one_place_of_its_file() -> None:
    for mutant in MUTANTS:
        assert (ROOT / mutant["file"]).read_text().count(mutant["find"]) == 1, mutant
        assert mutant["replace"] != mutant["find"], mutant


def test_every_mutant_has_a_name_of_its_own_and_tests_that_are_there() -> None:
    names = [mutant["name"] for mutant in MUTANTS]
    assert len(names) == len(set(names))
    for mutant in MUTANTS:
        assert mutant["tests"]
        assert all((ROOT / path).is_file() for path in mutant["tests"]), mutant


def test_the_table_has_every_mutant() -> None:
    table = (ROOT / "tests/README.md").read_text()
    assert [m["name"] for m in MUTANTS if f"| {m['name']} |" not in table] == []
