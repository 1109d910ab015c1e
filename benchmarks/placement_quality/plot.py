"""The performance profile: per placer, on which share of the cases it is within x of the best.

As a picture (`profile.svg`, written by hand so that nothing has to render it) and as a page where
one can look closer (`profile.html`).
"""

from bisect import bisect_right
from collections.abc import Sequence
from math import log
from pathlib import Path
from xml.sax.saxutils import escape

import plotly.graph_objects as go
from benchmarks.placement_quality.checks import best_ns, by_case
from benchmarks.placement_quality.report import placers_of, ratio
from benchmarks.placement_quality.rows import EXACT, Row

# Ratios from 1 to this, on a logarithmic axis.
_LARGEST = 4.0
_TICKS = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 4.0)
_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 900, 460, 60, 40, 150, 55
# Okabe and Ito's colors, which people who confuse colors can tell apart; then the same, dashed.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")

Curve = list[tuple[float, float]]


def profile(rows: Sequence[Row]) -> dict[str, Curve]:
    """Label to steps (x, share from there on), from x = 1 on.

    A case that nobody solved counts for none, and one without the placer's row not for it.
    """
    table = by_case(rows)
    best = {name: best_ns(case) for name, case in table.items()}
    solved = [name for name, shortest in best.items() if shortest is not None]
    curves = {}
    for placer in placers_of(rows):
        if placer == EXACT:
            continue
        mine = [row for row in rows if row.placer == placer and best[row.case] is not None]
        if not mine:
            continue
        found = sorted(
            known for row in mine if (known := ratio(row.makespan_ns, best[row.case])) is not None
        )
        xs = sorted({1.0, *found})
        label = placer if len(mine) == len(solved) else f"{placer} ({len(mine)} cases)"
        curves[label] = [(x, bisect_right(found, x) / len(mine)) for x in xs]
    return curves


def write_plots(rows: Sequence[Row], folder: Path) -> None:
    """`profile.svg` and `profile.html`."""
    curves = profile(rows)
    cases = len({row.case for row in rows})
    title = f"Share of {cases} cases within a factor of the best known step"
    (folder / "profile.svg").write_text(svg(curves, title))
    figure = go.Figure(
        [
            go.Scatter(
                x=[x for x, _ in curve],
                y=[y for _, y in curve],
                name=name,
                mode="lines",
                line_shape="hv",
            )
            for name, curve in curves.items()
        ]
    )
    figure.update_layout(
        title=title, xaxis_title="step / best known step", yaxis_title="share of cases",
        xaxis_type="log", template="plotly_white",
    )  # fmt: skip
    figure.write_html(folder / "profile.html", include_plotlyjs=True)


def svg(curves: dict[str, Curve], title: str) -> str:
    """The picture, self-contained."""
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def x_of(value: float) -> float:
        return _LEFT + (right - _LEFT) * log(value) / log(_LARGEST)

    def y_of(share: float) -> float:
        return bottom - (bottom - _TOP) * share

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="24" font-size="15">{escape(title)}</text>',
    ]
    for tick in _TICKS:
        x = x_of(tick)
        parts.append(f'<path d="M{x:.1f} {_TOP}V{bottom}" stroke="#ddd"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{tick:g}</text>')
    for tenth in range(0, 11, 2):
        y = y_of(tenth / 10)
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{right}" stroke="#ddd"/>')
        parts.append(
            f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tenth * 10} %</text>'
        )
    parts.append(
        f'<text x="{(_LEFT + right) / 2:.0f}" y="{_HEIGHT - 12}" text-anchor="middle">'
        "step / best known step</text>"
    )
    for number, (name, curve) in enumerate(curves.items()):
        color = _COLORS[number % len(_COLORS)]
        dash = ' stroke-dasharray="6 3"' if number >= len(_COLORS) else ""
        path = f"M{_LEFT} {y_of(curve[0][1]):.1f}"
        path += "".join(f"H{x_of(x):.1f}V{y_of(y):.1f}" for x, y in curve if x <= _LARGEST)
        line = f'fill="none" stroke="{color}" stroke-width="2"{dash}'
        parts.append(f'<path d="{path}H{right}" {line}/>')
        y = _TOP + 12 + 20 * number
        parts.append(f'<path d="M{right + 14} {y}h24" {line}/>')
        parts.append(f'<text x="{right + 44}" y="{y + 4}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>\n"])
