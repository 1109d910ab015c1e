"""Mean completion time over load, a panel for each way of sharing, logarithmic upwards."""

from collections.abc import Sequence
from math import log10
from typing import Final
from xml.sax.saxutils import escape

from benchmarks.residual.report import of
from benchmarks.residual.runs import ARMS, SHARINGS, Row
from benchmarks.residual.statistics import interval

_SIDE, _HIGH, _LEFT, _TOP, _GAP, _RIGHT, _BOTTOM = 360, 340, 60, 60, 40, 190, 50
# Okabe and Ito's colors, which people who confuse colors can tell apart.
_STYLES: Final = {
    "whole, first fit": ("#000000", ""),
    "whole, consolidated": ("#000000", "5 4"),
    "packing 1": ("#e69f00", ""),
    "packing 2": ("#e69f00", "5 4"),
    "packing 3": ("#e69f00", "2 3"),
    "splitting 1": ("#d55e00", ""),
    "splitting 2": ("#d55e00", "5 4"),
    "split or wait 1": ("#0072b2", ""),
    "split or wait 2": ("#0072b2", "5 4"),
}


def svg(rows: Sequence[Row]) -> str:
    """The picture, self-contained; bars are 95 % intervals over seeds."""
    loads = sorted({row.load for row in rows})
    curves = {
        (arm.name, sharing): [
            (load, *interval([row.mean_s / 60 for row in of(rows, arm.name, sharing, load)]))
            for load in loads
        ]
        for arm in ARMS
        for sharing in SHARINGS
    }
    every = [mean for curve in curves.values() for _, mean, _ in curve]
    low, high = log10(min(every)) - 0.05, log10(max(every)) + 0.08
    first, span = loads[0], (loads[-1] - loads[0]) or 1.0
    bottom = _TOP + _HIGH
    width = _LEFT + 2 * _SIDE + _GAP + _RIGHT

    def up(value: float) -> float:
        return bottom - _HIGH * (log10(max(value, 1e-9)) - low) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom + _BOTTOM}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect x="0" y="0" width="{width}" height="{bottom + _BOTTOM}" fill="white"/>',
        f'<text x="{_LEFT}" y="24" font-size="15">Mean completion time, minutes '
        "(bars: 95 % intervals over seeds)</text>",
    ]
    ticks = [n * 10**power for power in range(5) for n in (1, 2, 5)]
    for panel, sharing in enumerate(SHARINGS):
        left = _LEFT + panel * (_SIDE + _GAP)
        parts.append(f'<text x="{left}" y="{_TOP - 12}">GPUs shared: {escape(sharing)}</text>')
        for tick in ticks:
            if low <= log10(tick) <= high:
                y = up(tick)
                parts.append(f'<path d="M{left} {y:.1f}H{left + _SIDE}" stroke="#ddd"/>')
                if not panel:
                    parts.append(
                        f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{tick}</text>'
                    )
        for load in loads:
            x = left + 12 + (_SIDE - 24) * (load - first) / span
            parts.append(
                f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{load:g}</text>'
            )
        middle = left + _SIDE / 2
        parts.append(f'<text x="{middle}" y="{bottom + 38}" text-anchor="middle">load</text>')
        for arm in ARMS:
            color, dash = _STYLES[arm.name]
            points = []
            for load, mean, half in curves[arm.name, sharing]:
                x, y = left + 12 + (_SIDE - 24) * (load - first) / span, up(mean)
                points.append(f"{x:.1f},{y:.1f}")
                if half > 0:
                    ends = up(mean + half), up(max(mean - half, 10**low))
                    parts.append(
                        f'<path d="M{x:.1f} {ends[0]:.1f}V{ends[1]:.1f}" stroke="{color}" '
                        'stroke-opacity="0.5"/>'
                    )
            parts.append(
                f'<polyline points="{" ".join(points)}" fill="none" stroke="{color}" '
                f'stroke-width="1.8" stroke-dasharray="{dash}"/>'
            )
    right = width - _RIGHT + 12
    for number, (name, (color, dash)) in enumerate(_STYLES.items()):
        y = _TOP + 12 + 20 * number
        parts.append(
            f'<polyline points="{right},{y} {right + 22},{y}" fill="none" stroke="{color}" '
            f'stroke-width="1.8" stroke-dasharray="{dash}"/>'
        )
        parts.append(f'<text x="{right + 28}" y="{y + 4}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>\n"])
