"""`python3 -m benchmarks.gpu_check`: whatever a step does, the others run and the page is there."""

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.gpu_check.__main__ import main
from benchmarks.gpu_check.check import Check
from benchmarks.gpu_check.steps import STEPS, Step
from benchmarks.gpu_check.tests import _CHOICES
from gpu_on_cpu import step_on_cpu

ROOT = Path(__file__).resolve().parents[2]
GOOD = """
def run(check):
    check.case("works", lambda: {"operator_us": 6.5})
    check.case("is wrong", wrong)
    check.case("lacks a package", lambda: __import__("a_package_of_no_one"))
    check.case("does not apply", skipped)
    check.case("raises", lambda: 1 / 0)

def wrong():
    assert 1 == 2, "1 is not 2"

def skipped():
    from benchmarks.gpu_check.check import Skipped
    raise Skipped("there is one GPU")
"""
CRASH = """
import os, signal
def run(check):
    check.case("before", lambda: None)
    check.case("the end", lambda: os.kill(os.getpid(), signal.SIGSEGV))
"""
EXIT = "import os\ndef run(check): os._exit(7)"
HANG = """
import subprocess, sys, time
def run(check):
    check.case("before", lambda: None)
    subprocess.run([sys.executable, "-c", "import time; time.sleep(600)"])
"""
STICKY = """
def run(check):
    check.case("the last", last)
    check.case("never comes", lambda: None)

def last():
    raise RuntimeError("CUDA error: an illegal memory access was encountered")
"""
MISSING = "import a_package_of_no_one\ndef run(check): pass"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs steps of the given code, and returns the exit status, rows and page."""
    monkeypatch.syspath_prepend(tmp_path)

    def steps(
        *arguments: str, imported: tuple[str, ...] = (), **code: str
    ) -> tuple[int, list[Any], str]:
        for name, text in code.items():
            (tmp_path / f"step_{name}.py").write_text(text)
        limits = dict.fromkeys(code, 60.0) | {"hang": 2.0}
        early = {"early": {"OF_A_STEP": "read"}}
        rows = [
            Step(
                *(name, f"step_{name}", limits[name], f"claims {name}", name == "timed"),
                environment=early.get(name, {}),
            )
            for name in code
        ]
        out = tmp_path / "results"
        status = main([*arguments, "--out", str(out)], rows, imported)
        (file,) = out.glob("*.jsonl")
        found = [json.loads(line) for line in file.read_text().splitlines()]
        return status, found, file.with_suffix(".txt").read_text()

    return steps


def shown(rows: list[Any]) -> list[tuple[str, str, str]]:
    return [(row["step"], row["case"], row["status"]) for row in rows]


def test_a_row_has_what_a_case_found_or_why_it_did_not(run: Any) -> None:
    status, rows, page = run(host=GOOD)
    assert status == 1
    assert [row["status"] for row in rows] == ["ok", "fail", "missing", "skip", "error"]
    assert rows[0]["operator_us"] == 6.5
    assert [row.get("error") for row in rows[1:]] == [
        "1 is not 2",
        "No module named 'a_package_of_no_one'",
        "there is one GPU",
        "ZeroDivisionError: division by zero",
    ]
    assert " 1  host, an operator                     6.5 us" in page
    assert "host         1 ok, 1 fail, 1 missing, 1 skip, 1 error" in page


def test_nothing_stops_the_run(run: Any) -> None:
    status, rows, page = run(crash=CRASH, exit=EXIT, missing=MISSING, sticky=STICKY, host=GOOD)
    assert status == 1
    assert shown(rows)[:7] == [
        *(("crash", "before", "ok"), ("crash", "step", "crash")),
        ("exit", "step", "crash"),
        ("missing", "import", "missing"),
        *(("sticky", "the last", "error"), ("sticky", "step", "crash")),
        ("host", "works", "ok"),
    ]
    assert rows[1]["error"].startswith("SIGSEGV: ")
    assert rows[2]["error"].startswith("exit status 7")
    assert "No module named 'a_package_of_no_one'" in page


def test_what_is_imported_for_all_may_be_missing_or_broken(run: Any, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("1 / 0")
    imported = ("a_package_of_no_one", "broken", "html.entities")
    code = "import sys\nthere = 'html.entities' in sys.modules\n"
    code += "def run(check): check.case(f'is there: {there}', lambda: None)"
    assert shown(run(host=code, imported=imported)[1]) == [("host", "is there: True", "ok")]
    (tmp_path / "broken.py").write_text("import os; os.abort()")
    status, rows, _ = run(host=GOOD, crash=CRASH, imported=imported)
    assert status == 1
    assert shown(rows) == [("host", "step", "crash"), ("crash", "step", "crash")]


def test_what_reads_variables_of_a_step_is_imported_anew(run: Any, tmp_path: Path) -> None:
    (tmp_path / "reading.py").write_text("import os\nREAD = os.environ.get('OF_A_STEP', 'nothing')")
    code = "import reading\ndef run(check): check.case(reading.READ, lambda: None)"
    rows = run(late=code, early=code, imported=("reading",))[1]
    assert shown(rows) == [("late", "nothing", "ok"), ("early", "read", "ok")]


def test_a_step_that_hangs_is_ended(run: Any) -> None:
    _, rows, _ = run("--patience", "0.5", hang=HANG, host=GOOD)
    (late,) = (row for row in rows if (row["step"], row["case"]) == ("hang", "step"))
    assert late["status"] == "timeout"
    assert late["error"].startswith("over 1 s: ")
    assert ("host", "works", "ok") in shown(rows)


def test_steps_without_time_left_are_rows(run: Any) -> None:
    status, rows, _ = run("--budget", "1", host=GOOD, crash=CRASH)
    assert status == 1
    assert shown(rows) == [("host", "step", "skipped"), ("crash", "step", "skipped")]


def test_the_first_step_ends_the_run_where_no_gpu_can_be_used(run: Any) -> None:
    code = "def run(check): check.case('torch', lambda: exec('assert 0, \"no driver\"'))"
    status, rows, page = run(environment=code, host=GOOD)
    assert (status, shown(rows)) == (1, [("environment", "torch", "fail")])
    assert "no driver" in page


TIMED = """
import time
from pathlib import Path
def run(check):
    check.case("begins", lambda: {"at": time.monotonic()})
    WAIT
    check.case("ends", lambda: {"at": time.monotonic()})
"""
MEETS = """here = Path(__file__)
    here.with_suffix(".begun").touch()
    while not here.with_name("step_OTHER.begun").exists():
        time.sleep(0.01)
    time.sleep(0.3)"""


def test_steps_run_together_where_they_measure_no_times(run: Any) -> None:
    # Those that are to run at once wait for each other; the others are long enough to overlap.
    waits = {"b": MEETS.replace("OTHER", "c"), "c": MEETS.replace("OTHER", "b")}
    code = {
        name: TIMED.replace("WAIT", waits.get(name, "time.sleep(0.5)"))
        for name in ("a", "timed", "b", "c", "d")
    }
    _, rows, page = run("--at-once", "2", "--budget", "60", **code)
    at = {(row["step"], row["case"]): row["at"] for row in rows}
    assert at["a", "ends"] < at["timed", "begins"] < at["timed", "ends"] < at["b", "begins"]
    assert at["c", "begins"] < at["b", "ends"]
    assert at["d", "begins"] > min(at["b", "ends"], at["c", "ends"])
    shown = [line.split()[0] for line in page.splitlines() if " ok " in line]
    assert sorted(shown[:10]) == sorted([*code, *code])  # those that run together as they come


def test_some_steps_by_name(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert {row["step"] for row in run("--only", "host", crash=CRASH, host=GOOD)[1]} == {"host"}
    with pytest.raises(SystemExit, match="no step is called nothing"):
        main(["--only", "nothing"])
    assert main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert all(f"{step.name:14}{step.limit_s:4} s  {step.claim}" in listed for step in STEPS)


@pytest.mark.parametrize("module", sorted({step.module for step in STEPS}))
def test_every_step_is_there_with_all_that_it_imports(module: str) -> None:
    assert callable(importlib.import_module(module).run)


NOT_HERE = {f"benchmarks.gpu_check.{name}" for name in ("machine", "tests")}
# They import what takes seconds of a process: torch's tests, Dynamo, transformers.
HEAVY = {f"benchmarks.gpu_check.{name}" for name in ("captures", "compiled", "ecosystem")}
FIGURES = [
    pytest.param(module, marks=pytest.mark.slow) if module in HEAVY else module
    for module in sorted({step.module for step in STEPS} - NOT_HERE)
]


@pytest.mark.parametrize("module", FIGURES)
def test_the_code_of_every_step_runs_on_a_cpu(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are tests run their tests on a GPU alone, and here choose some."""
    rows = tmp_path / "rows.jsonl"
    check = Check(module.rpartition(".")[2], rows, quick=True)
    check.emulated = True  # no inductor
    step_on_cpu(module, monkeypatch).run(check)
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    assert found
    assert [row for row in found if row["status"] not in ("ok", "skip")] == []


@pytest.mark.parametrize("step", sorted(_CHOICES))
def test_steps_that_are_tests_name_tests_that_are_there(step: str) -> None:
    files, *choices = _CHOICES[step]
    text = "".join((ROOT / file).read_text() for file in (*files, "tests/support/zoo.py"))
    names = set(re.findall(r"\w+", " ".join(choices))) - {"and", "or", "not"}
    assert {name for name in names if name not in text} == set()


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="there is a GPU")
def test_the_command_tells_why_there_is_no_gpu(tmp_path: Path) -> None:
    assert main(["--quick", "--out", str(tmp_path)], imported=()) == 1
    (file,) = tmp_path.glob("*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert {row["step"] for row in rows} == {"environment"}
    (wrong,) = (row for row in rows if row["status"] not in ("ok", "skip"))
    assert wrong["case"] == "torch"
    assert wrong["error"].startswith("no GPU can be used: torch ")


@pytest.mark.gpu
@pytest.mark.parametrize("step", [step.name for step in STEPS])
def test_every_step_runs(step: str, tmp_path: Path) -> None:
    """On a GPU, and on the emulated runtime (`make test-emulated`)."""
    main(["--quick", "--only", step, "--out", str(tmp_path), "--budget", "300"])
    (file,) = tmp_path.glob("*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    wrong = [row for row in rows if row["status"] not in ("ok", "skip", "missing")]
    assert step in {row["step"] for row in rows}
    assert not wrong
