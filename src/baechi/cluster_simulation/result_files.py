"""The results of a simulation as files: CSV in the published simulators' columns, and JSON."""

import csv
import io
import json
from collections.abc import Iterable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

from baechi.cluster_simulation.results import ROW, Result
from baechi.storage.serialization import write_whole

JOB_COLUMNS: Final = (
    *("job_id", "num_gpu", "submit_time", "start_time", "end_time", "executed_time", "JCT"),
    *("duration", "pending_time", "preempt", "resume", "promote"),
)


def job_csv(result: Result) -> str:
    """A row per job that ended. As published, `executed_time` is from first start to end."""
    rows = (
        (
            outcome.job.name,
            outcome.job.gpus,
            outcome.job.submit_time,
            outcome.start_time,
            outcome.end_time,
            outcome.end_time - outcome.start_time,
            outcome.completion_time,
            outcome.job.duration,
            outcome.pending_time,
            outcome.preempt,
            outcome.resume,
            outcome.promote,
        )
        for outcome in result.outcomes
    )
    return _table(JOB_COLUMNS, rows)


def cluster_csv(result: Result) -> str:
    """A row per event: what was busy and who waited after it."""
    return _table(ROW, result.rows)


def summary(result: Result) -> dict[str, Any]:
    """The figures that policies are compared by, in ticks.

    `p99_jct` is the smallest time that 99 % of the jobs did not exceed; `makespan` is from the
    first arrival to the last end; `utilization` is the part of the GPU-time in between that was
    held, `memory_utilization` that of memory. Figures are `None` where there is nothing to tell.
    """
    times = sorted(outcome.completion_time for outcome in result.outcomes)
    count = len(times)
    first = min((outcome.job.submit_time for outcome in result.outcomes), default=0)
    last = max((outcome.end_time for outcome in result.outcomes), default=0)
    makespan = last - first
    return {
        "policy": result.policy,
        "gpus": result.gpus,
        "jobs": count + len(result.refused),
        "completed": count,
        "refused": [{"job_id": row.job.name, "reason": row.reason} for row in result.refused],
        "mean_jct": sum(times) / count if count else None,
        "median_jct": (times[(count - 1) // 2] + times[count // 2]) / 2 if count else None,
        "p99_jct": times[-(-count * 99 // 100) - 1] if count else None,
        "mean_pending": (
            sum(outcome.pending_time for outcome in result.outcomes) / count if count else None
        ),
        "makespan": makespan,
        "preemptions": sum(outcome.preempt for outcome in result.outcomes),
        "utilization": (
            float(Fraction(held_gpu_time(result), makespan * result.gpus)) if makespan else None
        ),
        "memory_utilization": (
            float(Fraction(result.byte_ticks, makespan * result.memory_bytes))
            if makespan and result.memory_bytes
            else None
        ),
    }


def held_gpu_time(result: Result) -> int:
    """GPU-ticks in which a GPU was held by at least one job."""
    total = 0
    for row, following in zip(result.rows, result.rows[1:], strict=False):
        total += row[ROW.index("busy_gpu")] * (following[0] - row[0])
    return total


def write_result(result: Result, folder: Path) -> None:
    """Writes `job.csv`, `cluster.csv` and `summary.json`, each whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "job.csv", job_csv(result))
    write_whole(folder / "cluster.csv", cluster_csv(result))
    write_whole(folder / "summary.json", json.dumps(summary(result), indent=2) + "\n")


def write_comparison(results: Sequence[Result], folder: Path) -> None:
    """Writes `comparison.csv` and `comparison.json`: a row per policy."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [summary(result) for result in results]
    columns = [column for column in (rows[0] if rows else ()) if column != "refused"]
    table = _table(columns, ([row[column] for column in columns] for row in rows))
    write_whole(folder / "comparison.csv", table)
    write_whole(folder / "comparison.json", json.dumps(rows, indent=2) + "\n")


def _table(columns: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue()
