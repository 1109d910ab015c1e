"""Results of a simulated cluster: their figures, their files, and a picture of them.

The files are CSV in the published simulators' columns, and JSON; the picture is plotly's.
"""

import csv
import io
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, final

from baechi.cluster_simulation.jobs import Outcome, Refusal
from baechi.reporting.figures import color, dash, require_plotly
from baechi.storage.serialization import write_whole

# The columns of `SimulationResult.rows`.
ROW = (
    *("time", "idle_node", "busy_node", "full_node", "idle_gpu", "busy_gpu"),
    *("pending_job", "running_job", "completed_job"),
)
# The columns of `job_csv`. As published, `executed_time` is from first start to end.
_JOB: Final[dict[str, Callable[[Outcome], object]]] = {
    "job_id": lambda row: row.job.name,
    "num_gpu": lambda row: row.job.gpus,
    "submit_time": lambda row: row.job.submit_time,
    "start_time": lambda row: row.start_time,
    "end_time": lambda row: row.end_time,
    "executed_time": lambda row: row.end_time - row.start_time,
    "JCT": lambda row: row.completion_time,
    "duration": lambda row: row.job.duration,
    "pending_time": lambda row: row.pending_time,
    "preempt": lambda row: row.preempt,
    "resume": lambda row: row.resume,
    "promote": lambda row: row.promote,
}
JOB_COLUMNS: Final = tuple(_JOB)
_POINTS = 2000  # of a curve at most, every nth and the last: more than a screen is wide


@final
@dataclass(frozen=True, slots=True)
class SimulationResult:
    """The result of a simulation.

    Attributes:
        outcomes: The jobs that ended, in the order in which they did; of one moment, by arrival.
        refused: The jobs that fit no empty cluster.
        rows: The cluster after every event, in the columns of `ROW`.
        memory_bytes: The memory of all GPUs that others leave; 0 where it is not modeled.
        byte_ticks: The memory that jobs held, times how long.
        milliwatt_ticks: What all GPUs drew, times how long; `None` where it is not modeled.
    """

    policy: str
    gpus: int
    outcomes: tuple[Outcome, ...]
    refused: tuple[Refusal, ...]
    rows: tuple[tuple[int, ...], ...]
    memory_bytes: int = 0
    byte_ticks: int = 0
    milliwatt_ticks: int | None = None


def job_csv(result: SimulationResult) -> str:
    """A row per job that ended."""
    rows = ([read(outcome) for read in _JOB.values()] for outcome in result.outcomes)
    return _table(JOB_COLUMNS, rows)


def cluster_csv(result: SimulationResult) -> str:
    """A row per event: busy devices and waiting jobs after it."""
    return _table(ROW, result.rows)


def summary(result: SimulationResult) -> dict[str, Any]:
    """The figures that policies are compared by, in ticks.

    `p99_jct` is the smallest time that 99 % of the jobs did not exceed; `makespan` is from the
    first arrival to the last end; `utilization` is the part of the GPU-time in between that was
    held, `memory_utilization` that of memory. Figures that no job contributes to are `None`.
    `energy_kwh` is there where power is modeled; a tick is a second for it.
    """
    outcomes = result.outcomes
    times = sorted(outcome.completion_time for outcome in outcomes)
    count = len(times)
    first = min((outcome.job.submit_time for outcome in outcomes), default=0)
    makespan = max((outcome.end_time for outcome in outcomes), default=0) - first
    busy = ROW.index("busy_gpu")
    held = sum(row[busy] * (after[0] - row[0]) for row, after in pairwise(result.rows))
    gpu_ticks, byte_ticks = makespan * result.gpus, makespan * result.memory_bytes
    drawn = result.milliwatt_ticks
    energy = {} if drawn is None else {"energy_kwh": drawn / 3.6e9}
    return {
        "policy": result.policy,
        "gpus": result.gpus,
        "jobs": count + len(result.refused),
        "completed": count,
        "refused": [{"job_id": row.job.name, "reason": row.reason} for row in result.refused],
        "mean_jct": sum(times) / count if count else None,
        "median_jct": (times[(count - 1) // 2] + times[count // 2]) / 2 if count else None,
        "p99_jct": times[-(-count * 99 // 100) - 1] if count else None,
        "mean_pending": sum(row.pending_time for row in outcomes) / count if count else None,
        "makespan": makespan,
        "preemptions": sum(outcome.preempt for outcome in outcomes),
        "utilization": held / gpu_ticks if gpu_ticks else None,
        "memory_utilization": result.byte_ticks / byte_ticks if byte_ticks else None,
        **energy,
    }


RESULT_FILES: Final = ("job.csv", "cluster.csv", "summary.json")
COMPARISON_FILES: Final = ("comparison.csv", "comparison.json")


def write_result(result: SimulationResult, folder: Path) -> None:
    """Writes `RESULT_FILES`, each whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "job.csv", job_csv(result))
    write_whole(folder / "cluster.csv", cluster_csv(result))
    write_whole(folder / "summary.json", json.dumps(summary(result), indent=2) + "\n")


def write_comparison(results: Sequence[SimulationResult], folder: Path) -> None:
    """Writes `COMPARISON_FILES`: a row per policy."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [summary(result) for result in results]
    columns = [column for column in (rows[0] if rows else ()) if column != "refused"]
    table = _table(columns, ([row[column] for column in columns] for row in rows))
    write_whole(folder / "comparison.csv", table)
    write_whole(folder / "comparison.json", json.dumps(rows, indent=2) + "\n")


def cluster_figure(results: Sequence[SimulationResult]) -> Any:
    """Busy GPUs and waiting jobs over time, and the share of jobs done within a time."""
    require_plotly()
    from plotly.subplots import make_subplots

    figure = make_subplots(
        rows=3,
        cols=1,
        vertical_spacing=0.12,
        subplot_titles=("busy GPUs", "waiting jobs", "jobs completed within a time"),
    )
    busy, waiting = ROW.index("busy_gpu"), ROW.index("pending_job")
    for number, result in enumerate(results):
        times = sorted(outcome.completion_time for outcome in result.outcomes)
        panels: tuple[list[tuple[int, float]], ...] = (
            [(row[0], row[busy]) for row in result.rows],
            [(row[0], row[waiting]) for row in result.rows],
            [(time, rank / len(times)) for rank, time in enumerate(times, start=1)],
        )
        name = escape(result.policy)
        for place, points in enumerate(panels, start=1):
            step = -(-len(points) // _POINTS)
            shown = [*points[::step], points[-1]] if step > 1 else points
            figure.add_scatter(
                x=[x for x, _ in shown],
                y=[y for _, y in shown],
                line={"color": color(number), "width": 1.6, "dash": dash(number), "shape": "hv"},
                showlegend=place == 1,
                row=place,
                col=1,
                name=name,
                legendgroup=name,
                mode="lines",
            )
    figure.update_layout(template="plotly_white", height=960, legend={"x": 1.02, "y": 1})
    figure.update_xaxes(title_text="time, ticks of the trace (seconds)", row=2)
    figure.update_xaxes(title_text="completion time, of waiting and running", type="log", row=3)
    figure.update_yaxes(rangemode="tozero")
    for row, title in enumerate(("GPUs", "jobs", "share of jobs"), start=1):
        figure.update_yaxes(title_text=title, row=row)
    return figure


def write_figure(results: Sequence[SimulationResult], path: Path) -> None:
    """Writes the picture, under a table of its policies, as a page that opens without a network."""
    figure = cluster_figure(results)
    page = figure.to_html(include_plotlyjs=True, div_id="cluster")
    page = page.replace("<body>", f"<body>{_html_table(results)}", 1)
    title = escape(f"Baechi: {', '.join(result.policy for result in results)}")
    write_whole(path, page.replace("<head>", f"<head><title>{title}</title>", 1))


# The columns of the page's table, and how their figures are written.
_SHOWN: Final = {
    "completed": "{:,}",
    "mean_jct": "{:,.0f}",
    "median_jct": "{:,.0f}",
    "p99_jct": "{:,}",
    "makespan": "{:,}",
    "preemptions": "{:,}",
    "utilization": "{:.1%}",
    "energy_kwh": "{:,.1f}",
}
_STYLE: Final = (
    "table{font:14px sans-serif;border-collapse:collapse;margin:1em}"
    "td,th{padding:2px 10px;text-align:right;border-bottom:1px solid #ddd}"
    "td:first-child,th:first-child{text-align:left}"
)


def _html_table(results: Sequence[SimulationResult]) -> str:
    """A row per policy, the least mean completion time first."""
    rows = [summary(result) for result in results]
    rows.sort(key=lambda row: (row["mean_jct"] is None, row["mean_jct"]))
    written = {key: text for key, text in _SHOWN.items() if not rows or key in rows[0]}
    head = "".join(f"<th>{column.replace('_', ' ')}</th>" for column in ("policy", *written))
    lines = [f"<style>{_STYLE}</style><table><tr>{head}</tr>"]
    for row in rows:
        shown = (
            "-" if row[key] is None else text.format(row[key]) for key, text in written.items()
        )
        cells = "".join(f"<td>{cell}</td>" for cell in (escape(row["policy"]), *shown))
        lines.append(f"<tr>{cells}</tr>")
    return "\n".join([*lines, "</table>"])


def _table(columns: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue()
