"""A picture of a simulation, with plotly: what was busy, who waited, and how long jobs took."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from baechi.cluster_simulation.results import ROW, Result
from baechi.reporting.figures import color, dash, require_plotly
from baechi.storage.serialization import write_whole

_POINTS = 2000  # of a curve at most: more than a screen is wide


def cluster_figure(results: Sequence[Result]) -> Any:
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
        style = {"color": color(number), "width": 1.6, "dash": dash(number)}
        name = escape(result.policy)
        shared = {"name": name, "legendgroup": name, "mode": "lines"}
        rows = _thinned(result.rows)
        for place, column in ((1, busy), (2, waiting)):
            figure.add_scatter(
                x=[row[0] for row in rows],
                y=[row[column] for row in rows],
                line={**style, "shape": "hv"},
                showlegend=place == 1,
                row=place,
                col=1,
                **shared,
            )
        times = sorted(outcome.completion_time for outcome in result.outcomes)
        ranked = _thinned([(time, rank) for rank, time in enumerate(times, start=1)])
        figure.add_scatter(
            x=[time for time, _ in ranked],
            y=[rank / len(times) for _, rank in ranked],
            line={**style, "shape": "hv"},
            showlegend=False,
            row=3,
            col=1,
            **shared,
        )
    figure.update_layout(template="plotly_white", height=960, legend={"x": 1.02, "y": 1})
    figure.update_xaxes(title_text="time, ticks of the trace (seconds)", row=2)
    figure.update_xaxes(title_text="completion time, of waiting and running", type="log", row=3)
    figure.update_yaxes(rangemode="tozero")
    for row, title in enumerate(("GPUs", "jobs", "share of jobs"), start=1):
        figure.update_yaxes(title_text=title, row=row)
    return figure


def write_figure(results: Sequence[Result], path: Path) -> None:
    """Writes the picture as a page that opens without a network."""
    figure = cluster_figure(results)
    write_whole(path, figure.to_html(include_plotlyjs=True, div_id="cluster"))


def _thinned(rows: Sequence[tuple[int, ...]]) -> Sequence[tuple[int, ...]]:
    """Every nth row and the last, few enough to draw."""
    step = -(-len(rows) // _POINTS)
    return [*rows[::step], rows[-1]] if step > 1 else rows
