"""Figures of a plan, with plotly: the graph by device, and the step over time.

In the graph x is the column: the longest path to the op, counted in forward ops, so that a forward
step runs from left to right; a backward op stands in the column of its forward op, so that the
backward runs back below it. y is the row: each device has a band, and in it one row per branch that
is open at the same column, forward rows above backward rows. An op takes the row of its first
producer where that is free, so that branches are straight.
"""

from collections import defaultdict
from collections.abc import Sequence
from html import escape
from itertools import chain, count
from typing import Any, Final, NamedTuple

from baechi.errors import InputError
from baechi.problem.simulation import Launch, memory_profile
from baechi.records.graph import OpGraph
from baechi.records.placement import Span, Transfer
from baechi.reporting.facts import Plan
from baechi.units import format_bytes, format_ns

# Okabe and Ito, "Color Universal Design" (2008): distinct to color-blind readers. Their black and
# yellow vanish on a dark or a light page; wine (from Paul Tol's palettes) and gray replace them.
COLORS: Final = (
    *("#0072B2", "#E69F00", "#009E73", "#CC79A7"),
    *("#56B4E9", "#D55E00", "#882255", "#8A8A8A"),
)
_SYMBOLS: Final = ("circle", "square", "diamond", "triangle-up", "cross", "star")
_DASHES: Final = ("solid", "dot", "dashdot", "longdashdot")  # "dash" is a limit's
# A limit above this many times the highest peak is not drawn: it would squash the figure.
_FAR: Final = 10
_TIMES: Final = (("seconds", 10**9), ("milliseconds", 10**6), ("microseconds", 10**3))
_SIZES: Final = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_GAP: Final = 2  # rows between two bands
_GRID: Final = "rgba(128,128,128,0.22)"
_LINE: Final = "rgba(128,128,128,0.45)"


def color(device: int) -> str:
    """The color of a device in every picture and table."""
    return COLORS[device % len(COLORS)]


def dash(number: int) -> str:
    """The dash style of a line, to distinguish it from others of the same color."""
    return _DASHES[number // len(COLORS) % len(_DASHES)]


def require_plotly() -> Any:
    """The module `plotly.graph_objects`.

    Raises:
        InputError: plotly is not installed.
    """
    try:
        import plotly.graph_objects
    except ImportError as error:
        raise InputError(
            "the HTML report needs plotly, which is not installed: pip install 'baechi[viz]'. "
            "The text report and the Perfetto trace need nothing."
        ) from error
    return plotly.graph_objects


def graph_figure(plan: Plan) -> Any:
    """Every op as a point, colored by device; the edges between devices stand out."""
    go = require_plotly()
    graph, devices = plan.graph, plan.placement.devices
    layout = lay_out(graph, devices, len(plan.cluster.devices))
    x, y = layout.columns, layout.rows
    columns = max(x, default=0) + 1
    figure = go.Figure()
    _draw_edges(figure, plan, x, y)
    largest_px = min(20.0, max(7.0, 1500 / columns))
    longest_ns = max((op.time_ns for op in graph.ops), default=0) or 1
    for device, target in enumerate(plan.cluster.devices):
        ops = [op for op, home in enumerate(devices) if home == device]
        sizes = [4 + (largest_px - 4) * (graph.ops[op].time_ns / longest_ns) ** 0.5 for op in ops]
        figure.add_scatter(
            x=[x[op] for op in ops],
            y=[y[op] for op in ops],
            mode="markers",
            name=escape(target.name),
            marker={
                "color": color(device),
                "opacity": 1,
                "size": [round(size, 1) for size in sizes],
                "symbol": _SYMBOLS[device // len(COLORS) % len(_SYMBOLS)],
                "line": {"width": 0.5, "color": _LINE},
            },
            hovertext=[_op_text(plan, op) for op in ops],
            hoverinfo="text",
        )
    bands = [(device, band) for device, band in enumerate(layout.bands) if band is not None]
    for device, (first, last) in bands:
        figure.add_hrect(
            first - 0.9, last + 0.9, fillcolor=color(device), opacity=0.08, line_width=0
        )
    marks = sections(graph, layout.columns)
    height = max(y, default=0) + 1
    _style(figure, min(1100, 190 + max(14, min(26, 520 // height)) * height))
    figure.update_xaxes(
        tickvals=[column for column, _ in marks],
        ticktext=[escape(name) for _, name in marks],
        range=[-0.015 * columns - 0.5, 1.015 * columns - 0.5],
        tickangle=45,
        showgrid=bool(marks),
        gridcolor=_GRID,
    )
    figure.update_yaxes(
        tickvals=[(first + last) / 2 for _, (first, last) in bands],
        ticktext=[escape(plan.cluster.devices[device].name) for device, _ in bands],
        range=[height - 0.1, -0.9],
        showgrid=False,
    )
    return figure


def time_figure(plan: Plan) -> Any:
    """Ops and incoming transfers of every device over time, what hosts launch; memory below."""
    require_plotly()
    from plotly.subplots import make_subplots

    count = len(plan.cluster.devices)
    lanes_px = 46 * count + 23 * len(plan.launches) + 30
    memory_px = 300
    figure = make_subplots(
        rows=2,
        cols=1,
        shared_xaxes=True,
        vertical_spacing=24 / (lanes_px + memory_px),
        row_heights=[lanes_px, memory_px],
    )
    _draw_timeline(figure, plan)
    _draw_memory(figure, plan)
    _style(figure, lanes_px + memory_px + 170)
    figure.update_layout(barmode="overlay", bargap=0.12)
    unit, scale = _time_unit(plan)
    end = plan.schedule.makespan_ns / scale or 1.0
    figure.update_xaxes(range=[-0.01 * end, 1.01 * end], gridcolor=_GRID, showgrid=True)
    figure.update_xaxes(title_text=f"{unit} from the start of the step", row=2)
    figure.update_yaxes(autorange="reversed", showgrid=False, row=1)
    return figure


def _draw_edges(figure: Any, plan: Plan, x: tuple[int, ...], y: tuple[int, ...]) -> None:
    """Edges inside a device as one faint trace, those between devices strong, one per source."""
    graph, devices = plan.graph, plan.placement.devices
    backward = [op.in_backward for op in graph.ops]
    inside = [(tensor.producer, op) for tensor in graph.tensors for op in tensor.consumers]
    sent: dict[int, list[tuple[int, int]]] = {}
    middles: list[tuple[float, float]] = []
    texts = []
    for transfer in plan.schedule.transfers:
        tensor = graph.tensors[transfer.tensor]
        there = [op for op in tensor.consumers if devices[op] == transfer.dst]
        if there:  # sent once, to the first; the others read that copy
            a, b = tensor.producer, there[0]
            sent.setdefault(transfer.src, []).append((a, b))
            middles.append(((x[a] + x[b]) / 2, (y[a] + y[b]) / 2))
            texts.append(_transfer_text(plan, transfer))
            inside += [(b, other) for other in there[1:]]

    def lines(pairs: Sequence[tuple[int, int]]) -> dict[str, list[int | None]]:
        return {
            name: [value for a, b in pairs for value in (place[a], place[b], None)]
            for name, place in (("x", x), ("y", y))
        }

    # Saved tensors would be vertical lines that hide everything else.
    near = [(a, b) for a, b in inside if devices[a] == devices[b] and backward[a] == backward[b]]
    hidden = {"hoverinfo": "skip", "showlegend": False}
    faint = {"color": _LINE, "width": 0.7}
    figure.add_scatter(**lines(near), mode="lines", line=faint, **hidden)
    many = len(texts) > 300  # then thin and pale, so that ops stay visible
    for src, pairs in sorted(sent.items()):
        line = {"color": color(src), "width": 0.8 if many else 1.6, "dash": "dot"}
        opacity = 0.4 if many else 0.9
        figure.add_scatter(**lines(pairs), mode="lines", line=line, opacity=opacity, **hidden)
    xs, ys = [x for x, _ in middles], [y for _, y in middles]
    rest = {"hovertext": texts, "hoverinfo": "text", "showlegend": False}
    figure.add_scatter(x=xs, y=ys, mode="markers", marker={"size": 9, "opacity": 0}, **rest)


def _draw_timeline(figure: Any, plan: Plan) -> None:
    schedule = plan.schedule
    outline = 0.6 if len(schedule.spans) <= 400 else 0  # an outline would hide thin bars
    for device, target in enumerate(plan.cluster.devices):
        spans = [span for span in schedule.spans if span.device == device]
        one = plan.one.graph.ops
        backward = [one[span.op % len(one)].in_backward for span in spans]
        marker: dict[str, Any] = {
            "color": color(device),
            "opacity": [0.6 if back else 1.0 for back in backward] or 1.0,
            "line": {"width": outline if spans else 0, "color": "rgba(255,255,255,0.7)"},
        }
        texts = [_op_text(plan, span.op) for span in spans]
        _add_bars(figure, plan, target.name, "", spans, texts, marker=marker)
        arriving = [transfer for transfer in schedule.transfers if transfer.dst == device]
        senders = [color(transfer.src) for transfer in arriving] or _LINE
        # The outline shows bars of no width, such as a hand-over between CPU workers.
        line = {"width": 1 if arriving else 0, "color": senders}
        marker = {"color": senders, "opacity": 0.85, "line": line}
        texts = [_transfer_text(plan, transfer) for transfer in arriving]
        _add_bars(figure, plan, target.name, "to ", arriving, texts, marker=marker, width=0.45)
    for host, launches in plan.launches.items():
        colors = [color(plan.placement.devices[launch.op]) for launch in launches] or _LINE
        texts = [_launch_text(plan, launch) for launch in launches]
        _add_bars(
            figure, plan, host, "host ", launches, texts, marker={"color": colors}, width=0.45
        )


def _add_bars(
    figure: Any,
    plan: Plan,
    device: str,
    prefix: str,
    rows: Sequence[Span | Transfer | Launch],
    texts: list[str],
    **style: Any,
) -> None:
    """A lane for a device, even an empty one."""
    name = escape(device)
    scale = _time_unit(plan)[1]
    figure.add_bar(
        orientation="h",
        name=prefix + name,
        y=[prefix + name] * max(1, len(rows)),
        base=[row.start_ns / scale for row in rows] or [0],
        x=[(row.end_ns - row.start_ns) / scale for row in rows] or [0],
        hovertext=texts or [""],
        hoverinfo="text" if rows else "skip",
        legendgroup=name,
        showlegend=False,
        row=1,
        col=1,
        **style,
    )


def _draw_memory(figure: Any, plan: Plan) -> None:
    devices = plan.cluster.devices
    limits = [device.memory_bytes for device in devices]
    most = max(plan.schedule.peak_bytes)
    drawn = [i for i, limit in enumerate(limits) if limit <= _FAR * most or not most]
    top = max(most, *(limits[device] for device in drawn), 0)
    unit, scale = next((row for row in _SIZES if top >= row[1]), ("bytes", 1))
    time_scale = _time_unit(plan)[1]
    below: dict[str, Any] = {"hoverinfo": "text", "row": 2, "col": 1}
    for device, steps in enumerate(memory_profile(plan.graph, plan.cluster, plan.schedule)):
        name = escape(devices[device].name)
        figure.add_scatter(
            x=[time_ns / time_scale for time_ns, _ in steps],
            y=[nbytes / scale for _, nbytes in steps],
            mode="lines",
            line={"shape": "hv", "color": color(device), "width": 1.8, "dash": dash(device)},
            name=name,
            legendgroup=name,
            hovertext=[f"{name}: {format_bytes(nbytes)}" for _, nbytes in steps],
            **below,
        )
    # A dashed line for each limit, or one gray line where all are equal.
    one = len(set(limits)) == 1
    for device in drawn[:1] if one else drawn:
        label = "limit of every device" if one else f"limit of {escape(devices[device].name)}"
        figure.add_scatter(
            x=[0, plan.schedule.makespan_ns / time_scale],
            y=[limits[device] / scale] * 2,
            mode="lines",
            line={"color": COLORS[-1] if one else color(device), "width": 1.4, "dash": "dash"},
            name=label,
            hovertext=f"{label}: {format_bytes(limits[device])}",
            **below,
        )
    title = f"{unit} in memory" if drawn else f"{unit}, far below all limits"
    figure.update_yaxes(title_text=title, rangemode="tozero", gridcolor=_GRID, row=2)


def _time_unit(plan: Plan) -> tuple[str, int]:
    """The unit of the axis of time, and its ns."""
    end_ns = plan.schedule.makespan_ns
    return next((row for row in _TIMES if end_ns >= 2 * row[1]), ("nanoseconds", 1))


def _op_text(plan: Plan, op: int) -> str:
    """Hover text of an op."""
    entry, span = plan.graph.ops[op], plan.span_of[op]
    given = sum(plan.graph.tensors[tensor].nbytes for tensor in plan.graph.op_outputs[op])
    lines = [
        f"<b>{escape(entry.name)}</b> on {escape(plan.cluster.devices[span.device].name)}",
        f"{format_ns(span.end_ns - span.start_ns)}, from {format_ns(span.start_ns)}",
        f"gives {format_bytes(given)}, holds {format_bytes(entry.persistent_bytes)} all the time, "
        f"workspace {format_bytes(entry.workspace_bytes)}",
    ]
    if plan.sources[op]:
        lines.append(f"<i>{escape(plan.sources[op])}</i>")
    return "<br>".join(lines)


def _launch_text(plan: Plan, launch: Launch) -> str:
    """Hover text of a launch."""
    return (
        f"launch of <b>{escape(plan.graph.ops[launch.op].name)}</b><br>"
        f"{format_ns(launch.end_ns - launch.start_ns)}, from {format_ns(launch.start_ns)}"
    )


def _transfer_text(plan: Plan, transfer: Transfer) -> str:
    """Hover text of a transfer."""
    tensor = plan.graph.tensors[transfer.tensor]
    src, dst = (escape(plan.cluster.devices[d].name) for d in (transfer.src, transfer.dst))
    return (
        f"<b>{src} → {dst}</b><br>{escape(plan.graph.ops[tensor.producer].name)}<br>"
        f"{format_bytes(tensor.nbytes)} in {format_ns(transfer.end_ns - transfer.start_ns)}, "
        f"from {format_ns(transfer.start_ns)}"
    )


def _style(figure: Any, height: int) -> None:
    """Apply the common style: no background, to suit light and dark pages."""
    figure.update_layout(
        template="none",
        height=height,
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        margin={"l": 10, "r": 10, "t": 60, "b": 10},
        font={"family": "system-ui, sans-serif", "size": 12, "color": "#808080"},
        legend={
            **{"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom"},
            **{"itemsizing": "constant", "bgcolor": "rgba(0,0,0,0)"},
        },
        modebar={"bgcolor": "rgba(0,0,0,0)", "color": "#8A8A8A", "activecolor": "#0072B2"},
        hovermode="closest",
        dragmode="zoom",
    )
    figure.update_xaxes(zeroline=False, automargin=True)
    figure.update_yaxes(zeroline=False, automargin=True)


class Layout(NamedTuple):
    """Positions of ops: x and y of each, y growing downwards; first and last row of each device."""

    columns: tuple[int, ...]
    rows: tuple[int, ...]
    bands: tuple[tuple[int, int] | None, ...]


def lay_out(graph: OpGraph, devices: tuple[int, ...], n_devices: int) -> Layout:
    """The positions of all ops; O((ops + tensors) log) time, no two ops at one place."""
    columns = _columns(graph)
    homes = [(device, op.in_backward) for device, op in zip(devices, graph.ops, strict=True)]
    # The row of each op within its device and direction, and their numbers of rows.
    lanes: list[int] = []
    heights: dict[tuple[int, bool], int] = defaultdict(int)
    taken: dict[tuple[int, bool, int], set[int]] = defaultdict(set)
    for op, home in enumerate(homes):
        used = taken[*home, columns[op]]
        producers = (graph.tensors[tensor].producer for tensor in graph.op_inputs[op])
        wished = [lanes[producer] for producer in producers if homes[producer] == home]
        lane = next(lane for lane in chain(wished, count()) if lane not in used)
        lanes.append(lane)
        used.add(lane)
        heights[home] = max(heights[home], lane + 1)
    top = 0
    start: dict[tuple[int, bool], int] = {}
    bands: list[tuple[int, int] | None] = []
    for device in range(n_devices):
        first = top
        for backward in (False, True):
            start[device, backward] = top
            top += heights[device, backward]
        bands.append((first, top - 1) if top > first else None)
        top += _GAP if top > first else 0
    rows = (start[home] + lane for home, lane in zip(homes, lanes, strict=True))
    return Layout(tuple(columns), tuple(rows), tuple(bands))


def _columns(graph: OpGraph) -> list[int]:
    columns: list[int] = []
    for index, op in enumerate(graph.ops):
        producers = (graph.tensors[tensor].producer for tensor in graph.op_inputs[index])
        column = max((columns[producer] + 1 for producer in producers), default=0)
        columns.append(columns[op.forward[0]] if op.phase == "backward" else column)
    uses = {
        source: [c for tensor in graph.op_outputs[source] for c in graph.tensors[tensor].consumers]
        for source in graph.inputs
        if graph.ops[source].phase != "backward"
    }
    for source, users in reversed(uses.items()):
        if users:  # a constant is placed beside its user, not at the far left
            columns[source] = max(0, min(columns[user] for user in users) - 1)
    for source, users in uses.items():
        if not users and source:  # as the counter of a batch norm
            columns[source] = columns[source - 1]
    return columns


def sections(graph: OpGraph, columns: tuple[int, ...], most: int = 24) -> list[tuple[int, str]]:
    """Labels of the parts of a model along x: (column, name), far enough apart to be readable.

    Op names are paths (`h.0.attn/linear`); the deepest level with at most `most` parts is taken.
    If two parts begin close to each other, the longer one is named.
    """
    paths: dict[int, list[str]] = {}
    for column, op in sorted(zip(columns, graph.ops, strict=True), key=lambda pair: pair[0]):
        if "/" in op.name and op.phase != "backward":
            paths.setdefault(column, op.name.partition("/")[0].split("."))
    best: list[tuple[int, str]] = []
    for depth in range(1, max((len(path) for path in paths.values()), default=0) + 1):
        found: list[tuple[int, str]] = []
        for column, path in paths.items():
            name = ".".join(path[:depth])
            if not found or found[-1][1] != name:
                found.append((column, name))
        if len(found) > most:
            break
        best = found
    end = max(columns, default=0) + 1
    ends = [*(column for column, _ in best[1:]), end][: len(best)]
    lengths = [stop - start for (start, _), stop in zip(best, ends, strict=True)]
    named: list[tuple[int, str]] = []
    for _, part in sorted(zip(lengths, best, strict=True), key=lambda pair: (-pair[0], pair[1])):
        if all(abs(part[0] - column) * 1.5 * most >= end for column, _ in named):
            named.append(part)
    return sorted(named)
