"""The steps that are tests of this repository: each test is a row."""

import importlib.util
import os
from pathlib import Path
from typing import Any, Final, final

from benchmarks.gpu_check.check import Check, cores

_ROOT = Path(__file__).parents[2]
_GPU = "tests/runtime/test_gpu.py"
_RACES = "lanes_stay_right or sanitizer or another_stream"
_MODELS = "gpt2 or bert or resnet_train or towers or vit"
_BY_MODEL = "one_step_equals or by_cuda_graphs_follows or by_cuda_graphs_equals"
# What the files have beside tests of `_GPU`, where times are not tested.
_OTHERS: Final = (
    *("tests/probing/test_cluster_probe.py", "tests/runtime/test_step_measurement.py"),
    *("tests/torch_support/test_torch_internals.py", "tests/traced/test_checkpoint_units.py"),
    "tests/tracing/test_workarounds.py",
)
_WORKERS: Final = 3  # processes, where there is pytest-xdist and three such steps have room
# Of each step: files, the choice of tests, and that of a quick run.
_CHOICES: Final = {
    "contracts": (["tests/torch_support/test_cuda_contracts.py"], "", ""),
    "layouts": (["tests/runtime/test_gpu_layouts.py"], "", ""),
    "races": ([_GPU], _RACES, "sanitizer"),
    "values": (
        [_GPU, *_OTHERS],
        f"not ({_RACES}) and ({_MODELS} or not ({_BY_MODEL}))",
        "towers or capture_that_fails or dropout",
    ),
    "expandable": ([_GPU], f"cuda_graphs and ({_MODELS}) or capture_that_fails", "towers"),
    "several": ([_GPU], _MODELS, "towers"),
    "ranks": (["tests/processes/test_ranks.py"], "", "gpus_are"),
}


@final
class _Rows:
    """A plugin of pytest that writes a row for every test."""

    def __init__(self, check: Check) -> None:
        self._check = check

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        name = report.nodeid.split("::", 1)[-1].removeprefix("test_")
        if report.skipped:
            reason = report.longrepr[-1] if isinstance(report.longrepr, tuple) else ""
            self._check.row(name, "skip", report.duration, error=str(reason))
            return
        status = {"passed": "ok", "failed": "fail"}[report.outcome]
        crash = getattr(report.longrepr, "reprcrash", None)
        text = crash.message if crash is not None else report.longreprtext
        error = {} if report.passed else {"error": " ".join(text.split())[:300]}
        self._check.row(name, status, report.duration, **error)


def run(check: Check) -> None:
    """The tests of a step, in this process."""
    import pytest

    files, whole, quick = _CHOICES[check.step]
    chosen = (quick or whole) if check.quick else whole
    marked = "multigpu" if check.step == "several" else "gpu and not multigpu"
    options = ["-q", "-p", "no:cacheprovider", "-o", "budget_s=0", "-m", marked]
    if check.emulated and chosen:
        chosen = f"({chosen}) and not allocator_holds"  # whose matrices are too large for a CPU
    options += ["-k", chosen] if chosen else []
    if cores() >= 4 * _WORKERS and importlib.util.find_spec("xdist") and not check.quick:
        options += ["-p", "xdist", "-n", str(_WORKERS)]
    # What else is installed for pytest no test here needs, and some of it takes seconds to import.
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    status = pytest.main([*options, *files, f"--rootdir={_ROOT}"], plugins=[_Rows(check)])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        check.row("pytest", "error", 0.0, error=f"pytest ended with {status!r}")
