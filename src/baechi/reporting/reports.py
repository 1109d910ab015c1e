"""The report as text for a terminal, and as one HTML file that opens offline."""

import io
import os
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any, Final, final

from rich import box
from rich.console import Console, Group
from rich.table import Table as TextTable
from rich.text import Text

from baechi.problem.simulation import peak_holdings
from baechi.reporting.facts import (
    Plan,
    comparison,
    host_rows,
    percent,
    placer_tables,
    summary,
    tracing_table,
)
from baechi.reporting.figures import color, graph_figure, require_plotly, time_figure
from baechi.storage.serialization import write_whole
from baechi.units import format_bytes, format_ns

_ROWS: Final = 15  # in each table of the slowest ops and the largest transfers

_PAGE: Final = Path(__file__).with_name("page.html")


@final
class Report(Group):
    """A report that rich draws at the width of a terminal, and `str` in 100 columns."""

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=100, color_system=None, record=True)
        console.print(self)
        return console.export_text()


def text_report(plan: Plan) -> Report:
    """The report as text: `str` of it, or drawn by rich, `rich.print(text_report(...))`."""
    header = ["device", ">ops", ">busy", ">peak memory", ">limit", ">full", ">received", ">sent"]
    devices = [
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
    devices += [[name, str(n), f"{busy:.0%}", *[""] * 5] for name, n, busy in host_rows(plan)]
    tables = [("Devices", header, devices), *comparison(plan), *placer_tables(plan)]
    if plan.traced is not None:
        tables.append(tracing_table(plan.traced))
    return Report(*map(Text, summary(plan)), *(_text_table(*table) for table in tables))


def _text_table(title: str, header: list[str], rows: list[list[str]]) -> TextTable:
    table = TextTable(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.show_header = any(column.strip(">") for column in header)
    for column in header:
        table.add_column(column.removeprefix(">"), justify="right" if column[:1] == ">" else "left")
        table.columns[-1].overflow = "fold"  # on a narrow terminal: a number that is cut is another
    for row in rows:
        table.add_row(*map(Text, row))  # names are not markup
    return table


def write_html(path: str | os.PathLike[str], plan: Plan, *, title: str = "") -> None:
    """Write the report as one HTML file, atomically; equal inputs give equal bytes.

    An empty title stands for the model and the number of devices.

    Raises:
        InputError: plotly is not installed, or the path cannot be written.
    """
    require_plotly()
    from plotly.offline import get_plotlyjs

    model = plan.traced.name if plan.traced is not None else "a graph"
    heading = title or f"Baechi: {model} on {len(plan.devices)} devices"
    tables = (f"\n<h2>{name}</h2>\n{_table(head, rows)}" for name, head, rows in comparison(plan))
    text = Template(_PAGE.read_text(encoding="utf-8")).substitute(
        title=escape(heading),
        plotly=get_plotlyjs(),
        summary="\n".join(f"<p>{escape(line)}</p>" for line in summary(plan)),
        devices=_devices(plan),
        comparison="".join(tables),
        graph=_figure(graph_figure(plan.one), "graph"),
        time=_figure(time_figure(plan), "time"),
        details="\n".join(_details(plan)),
    )
    write_whole(path, text)


def _figure(figure: Any, name: str) -> str:
    config = {"displaylogo": False, "responsive": True, "scrollZoom": False}
    html: str = figure.to_html(
        full_html=False, include_plotlyjs=False, include_mathjax=False, div_id=name, config=config
    )
    return html


def _devices(plan: Plan) -> str:
    peaks = peak_holdings(plan.graph, plan.cluster, plan.schedule)
    rows = []
    for device, (facts, (time_ns, held)) in enumerate(zip(plan.devices, peaks, strict=True)):
        largest = sorted(held.items(), key=lambda item: (-item[1], item[0]))
        largest.append(("more as it runs", max(facts.peak_bytes - sum(held.values()), 0)))
        contents = ", ".join(f"{name} {format_bytes(size)}" for name, size in largest if size)
        key = f'<span class="key" style="background:{color(device)}"></span>'
        row = [_Html(key + escape(facts.name)), str(facts.ops)]
        row += [_Html(_bar(facts.busy_share, device)), _Html(_bar(facts.peak_share, device))]
        row.append(f"{format_bytes(facts.peak_bytes)} of {format_bytes(facts.memory_bytes)}")
        row.append(f"{contents} (at {format_ns(time_ns)})" if contents else "")
        rows.append([*row, format_bytes(facts.received_bytes), format_bytes(facts.sent_bytes)])
    for name, ops, busy in host_rows(plan):
        rows.append([name, str(ops), _Html(_bar(busy, -1)), *[""] * 5])
    header = ["device", ">ops", "computes", "memory at its peak", ">bytes", "of which"]
    return _table([*header, ">received", ">sent"], rows)


def _details(plan: Plan) -> Iterable[str]:
    graph, n = plan.graph, len(plan.one.graph.ops)  # of further micro-batches every op comes again
    for title, header, rows in placer_tables(plan):
        yield _fold(title, _table(header, rows), is_open=True)
    if plan.traced is not None:
        title, header, rows = tracing_table(plan.traced)
        rows = [[rung, _Html(f"<pre>{escape(text)}</pre>")] for rung, text in rows]
        yield _fold(title, _table(header, rows))
    slowest = sorted(plan.span_of[:n], key=lambda s: (s.start_ns - s.end_ns, s.op))[:_ROWS]
    times = [(format_ns(s.end_ns - s.start_ns), s.op) for s in slowest]
    yield _fold("The slowest ops", _ops(plan, "time", times))
    largest = sorted(range(n), key=lambda op: (-graph.ops[op].persistent_bytes, op))[:_ROWS]
    held = [(format_bytes(graph.ops[op].persistent_bytes), op) for op in largest]
    yield _fold("The ops that hold most for the whole step", _ops(plan, "bytes", held))
    sent = [t for t in plan.schedule.transfers if graph.tensors[t.tensor].producer < n]
    if sent:
        by_size = sorted(sent, key=lambda t: -graph.tensors[t.tensor].nbytes)
        rows = [
            [
                graph.ops[graph.tensors[t.tensor].producer].name,
                f"{plan.cluster.devices[t.src].name} → {plan.cluster.devices[t.dst].name}",
                format_bytes(graph.tensors[t.tensor].nbytes),
                format_ns(t.end_ns - t.start_ns),
                format_ns(t.start_ns),
            ]
            for t in by_size[:_ROWS]
        ]
        header = ["made by", "way", ">bytes", ">time", ">starts at"]
        yield _fold("The largest transfers", _table(header, rows))


def _ops(plan: Plan, what: str, rows: Sequence[tuple[str, int]]) -> str:
    devices = plan.cluster.devices
    cells = [
        [plan.graph.ops[op].name, devices[plan.placement.devices[op]].name, text, plan.sources[op]]
        for text, op in rows
    ]
    return _table(["op", "device", f">{what}", "source"], cells)


class _Html(str):
    """A cell that is HTML already; all others are escaped."""

    __slots__ = ()


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; a column whose title begins with > is flush right."""
    classes = [' class="n"' if title.startswith(">") else "" for title in header]
    titles = [escape(title.removeprefix(">")) for title in header]
    lines = []
    if any(titles):
        cells = (f"<th{c}>{title}</th>" for c, title in zip(classes, titles, strict=True))
        lines.append(f"<tr>{''.join(cells)}</tr>")
    for row in rows:
        texts = [cell if isinstance(cell, _Html) else escape(cell) for cell in row]
        cells = (f"<td{c}>{text}</td>" for c, text in zip(classes, texts, strict=True))
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return '<div class="wide"><table>\n' + "\n".join(lines) + "\n</table></div>"


def _bar(share: float, device: int) -> str:
    width = f"{min(share, 1.0):.1%}"
    style = f"width:{width};background:{color(device)}"
    return f'<span class="bar"><i style="{style}"></i></span> {percent(share)}'


def _fold(heading: str, content: str, *, is_open: bool = False) -> str:
    opened = " open" if is_open else ""
    return f"<details{opened}><summary>{escape(heading)}</summary>{content}</details>"
