"""The report as text, for a terminal."""

import io
from typing import final

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from baechi.records.cluster import Cluster
from baechi.records.graph import OpGraph
from baechi.records.placement import Measurement, Placement, Schedule
from baechi.reporting.facts import Plan, candidates, comparison, percent, stats, summary
from baechi.traced.traced_model import Traced
from baechi.units import format_bytes


@final
class Report(Group):
    """A report that rich draws at the width of a terminal, and `str` in 100 columns."""

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=100, color_system=None, record=True)
        console.print(self)
        return console.export_text()


def text_report(
    graph: OpGraph,
    cluster: Cluster,
    placement: Placement,
    schedule: Schedule,
    *,
    traced: Traced | None = None,
    measured: Measurement | None = None,
) -> Report:
    """The report as text: `str` of it, or drawn by rich, `rich.print(text_report(...))`.

    Args:
        graph: The placed graph.
        cluster: Its devices.
        placement: Its placement.
        schedule: `simulate(graph, cluster, placement)`.
        traced: Source of the tracing method, if traced.
        measured: A measurement to compare with the prediction.

    Raises:
        InputError: The values do not belong together.
    """
    plan = Plan(graph, cluster, placement, schedule, traced, measured)
    parts: list[Text | Table] = [Text(line) for line in summary(plan)]
    parts.append(_devices(plan))
    if comparison(plan):
        header = ["", ">predicted", ">measured", ">error"]
        rows = [list(row) for row in comparison(plan)]
        parts.append(_table("Predicted beside measured", header, rows))
    if candidates(plan):
        rows = [list(row) for row in candidates(plan)]
        parts.append(
            _table(f"What {placement.placer} chose from", ["candidate", ">step", ""], rows)
        )
    if stats(plan):
        rows = [list(row) for row in stats(plan)]
        parts.append(_table(f"What placer {placement.placer} says", ["", ">"], rows))
    if traced is not None:
        rows = [[a.rung, a.reason or "taken"] for a in traced.attempts]
        parts.append(_table(f"How {traced.name} was traced", ["rung", "what happened"], rows))
    return Report(*parts)


def _devices(plan: Plan) -> Table:
    header = ["device", ">ops", ">busy", ">peak memory", ">limit", ">full", ">received", ">sent"]
    rows = [
        [
            facts.name,
            str(facts.ops),
            f"{facts.busy_share:.0%}",
            format_bytes(facts.peak_bytes),
            format_bytes(facts.memory_bytes),
            percent(facts.peak_share),
            format_bytes(facts.received_bytes),
            format_bytes(facts.sent_bytes),
        ]
        for facts in plan.devices
    ]
    return _table("Devices", header, rows)


def _table(title: str, header: list[str], rows: list[list[str]]) -> Table:
    """A table; a column whose title begins with > is flush right."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.show_header = any(column.strip(">") for column in header)
    for column in header:
        table.add_column(column.removeprefix(">"), justify="right" if column[:1] == ">" else "left")
    for row in rows:
        table.add_row(*map(Text, row))  # names are not markup
    return table
