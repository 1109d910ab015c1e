"""Ten minutes with a GPU: what of Baechi's CUDA path holds there, and what it costs.

`python3 -m benchmarks.gpu_check` (`make gpu-check`) runs the steps of `steps.py`, each in a process
of its own with a limit of time, so that a crash, a hang or a missing package of one is a row of the
table and no more. Those that measure times run alone, others together. Rows are written as they
come:

    benchmarks/results/<date>-gpu-check-<gpu>.jsonl     a row per case, the environment first
    benchmarks/results/<date>-gpu-check-<gpu>.txt       environment, table, ten tracked numbers

Needs nothing but Python to start; a step that needs torch, pytest or transformers says so. Without
a GPU it ends after the first step; on the emulated runtime every step runs, and times mean nothing:
`python3 tests/support/emulated_cuda/run.py -m benchmarks.gpu_check --quick`.
"""

import argparse
import datetime
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.gpu_check.check import cores
from benchmarks.gpu_check.launcher import Launcher
from benchmarks.gpu_check.report import page, unusable
from benchmarks.gpu_check.run_step import Row, rows_of, rows_of_all
from benchmarks.gpu_check.steps import IMPORTED, STEPS, Step

_ROOT = Path(__file__).parents[2]


def main(
    arguments: Sequence[str] | None = None,
    steps: Sequence[Step] = STEPS,
    imported: Sequence[str] = IMPORTED,
) -> int:
    """Run the steps, and return the exit status: 0 where no row failed."""
    wish = _parser(steps).parse_args(arguments)
    if wish.list:
        for step in steps:
            print(f"{step.name:14}{step.limit_s:4} s  {step.claim}")
        return 0
    unknown = set(wish.only) - {step.name for step in steps}
    if unknown:
        sys.exit(f"no step is called {', '.join(sorted(unknown))}; --list names all.")
    chosen = [s for s in steps if not wish.only or s.name in wish.only or s.name == "environment"]
    begun = time.monotonic()
    rows: list[Row] = []
    path = text = None
    kind = "-quick" if wish.quick else "-part" if wish.only else ""
    with tempfile.TemporaryDirectory() as folder, Launcher(imported) as launcher:

        def start(step: Step) -> Iterator[Row | None]:
            left_s = wish.patience * wish.budget - (time.monotonic() - begun)
            limited = replace(step, limit_s=wish.patience * step.limit_s)
            return rows_of(limited, launcher, Path(folder), quick=wish.quick, left_s=left_s)

        for some in (chosen[:1], chosen[1:]):
            for row in rows_of_all(some, start, wish.at_once):
                rows.append(row)
                _say(time.monotonic() - begun, row)
                if path is not None:
                    _append(path, [row])
                    _write_page(path, rows, time.monotonic() - begun)
            if path is None:  # the environment has told the GPU's name
                path = _path(wish.out, rows, kind)
                path.unlink(missing_ok=True)
                _append(path, rows)
            text = _write_page(path, rows, time.monotonic() - begun)
            if unusable(rows):
                break
    print(text)
    print(f"written to {path} and its .txt", file=sys.stderr)
    return int(any(row["status"] not in ("ok", "skip") for row in rows))


def _path(folder: Path, rows: Sequence[Row], kind: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    gpu = next((str(row["gpu"]) for row in rows if row.get("gpu")), "none")
    slug = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    return folder / f"{datetime.date.today()}-gpu-check-{slug}{kind}.jsonl"


def _write_page(path: Path, rows: Sequence[Row], seconds: float) -> str:
    """Of what there is, whatever ends the run."""
    text = page(rows, seconds)
    path.with_suffix(".txt").write_text(text)
    return text


def _append(path: Path, rows: Sequence[Row]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def _parser(steps: Sequence[Step]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python3 -m benchmarks.gpu_check",
        description="Check Baechi on this machine's GPUs, each step in a process of its own.",
    )
    parser.add_argument(
        "--quick", action="store_true", help="a few cases of each step, at small sizes"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="STEP",
        help=f"these steps alone: {', '.join(step.name for step in steps)}",
    )
    parser.add_argument("--list", action="store_true", help="print the steps and their limits")
    parser.add_argument(
        "--budget", type=float, default=570.0, metavar="S", help="seconds for all (570)"
    )
    parser.add_argument(
        "--at-once",
        type=int,
        default=3 if cores() >= 8 else 1,
        metavar="N",
        help="steps that run together where they measure no times (3 with 8 cores or more, else 1)",
    )
    parser.add_argument(
        "--patience", type=float, default=1.0, metavar="N", help="N times every limit of time (1)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=_ROOT / "benchmarks" / "results",
        help="folder of both files (benchmarks/results)",
    )
    return parser


def _say(elapsed_s: float, row: Row) -> None:
    shown = f" {row['error']}" if row.get("error") else ""
    case = f"{row['step']}: {row['case']}"
    print(
        f"[{elapsed_s:4.0f} s] {row['status']:7} {case}{shown}"[:150], file=sys.stderr, flush=True
    )


if __name__ == "__main__":
    sys.exit(main())
