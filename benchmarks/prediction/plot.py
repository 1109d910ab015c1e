"""Predicted against measured, logarithmic both ways: `times.svg` and `peaks.svg`."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, log10
from pathlib import Path
from typing import Final, final
from xml.sax.saxutils import escape

from benchmarks.prediction.rows import Row

_SIDE, _LEFT, _TOP, _RIGHT, _BOTTOM = 460, 70, 40, 130, 55
# Okabe and Ito's colors, which people who confuse colors can tell apart.
_COLORS: Final = {"single": "#000000", "auto": "#0072b2", "few": "#009e73", "many": "#d55e00"}


@final
@dataclass(frozen=True)
class Point:
    """One prediction, in ms or MiB."""

    placement: str
    title: str
    predicted: float
    measured: float


def time_points(rows: Sequence[Row]) -> list[Point]:
    """Step times in ms."""
    return [
        Point(row.placement, _title(row), row.predicted_ns / 1e6, row.measured.step_ns / 1e6)
        for row in rows
    ]


def peak_points(rows: Sequence[Row]) -> list[Point]:
    """Peaks in MiB, one for each device that holds anything."""
    return [
        Point(row.placement, f"{_title(row)}, device {device}", predicted / 2**20, real / 2**20)
        for row in rows
        for device, (predicted, real) in enumerate(
            zip(row.predicted_bytes, row.measured.peak_bytes, strict=True)
        )
        if predicted and real
    ]


def _title(row: Row) -> str:
    return f"{row.model} {row.batch}, {row.mode}, {row.placement} on {row.devices}"


def write_plots(rows: Sequence[Row], folder: Path) -> None:
    """Two pictures; over a point a browser shows which one it is."""
    (folder / "times.svg").write_text(svg(time_points(rows), "Step, ms"))
    (folder / "peaks.svg").write_text(svg(peak_points(rows), "Peak, MiB"))


def svg(points: Sequence[Point], title: str) -> str:
    """The picture, self-contained: points, the line of right predictions, and 25 % beside it."""
    values = [value for point in points for value in (point.predicted, point.measured)] or [1.0]
    low, high = (
        floor(log10(min(values))),
        max(ceil(log10(max(values))), floor(log10(min(values))) + 1),
    )
    right, bottom = _LEFT + _SIDE, _TOP + _SIDE

    def along(value: float) -> float:
        return _SIDE * (log10(value) - low) / (high - low)

    width, height = right + _RIGHT, bottom + _BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{_LEFT}" y="24" font-size="15">{escape(title)}</text>',
        f'<clipPath id="inside"><rect x="{_LEFT}" y="{_TOP}" width="{_SIDE}" height="{_SIDE}"/>'
        "</clipPath>",
    ]
    for power in range(low, high + 1):
        x, y = _LEFT + along(10.0**power), bottom - along(10.0**power)
        parts.append(f'<path d="M{x:.1f} {_TOP}V{bottom}M{_LEFT} {y:.1f}H{right}" stroke="#ddd"/>')
        parts.append(
            f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{10.0**power:g}</text>'
        )
        parts.append(
            f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g}</text>'
        )
    for factor, dash in ((1.0, ""), (1.25, "4 4"), (0.75, "4 4")):
        shift = along(10.0**low * factor)
        line = f"M{_LEFT} {bottom - shift:.1f}L{right} {_TOP - shift:.1f}"
        style = f'stroke="#999" stroke-dasharray="{dash}" clip-path="url(#inside)"'
        parts.append(f'<path d="{line}" {style}/>')
    for point in points:
        x, y = _LEFT + along(point.measured), bottom - along(point.predicted)
        color = _COLORS.get(point.placement, "#cc79a7")
        mark = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{color}" fill-opacity="0.7">'
        numbers = f"predicted {point.predicted:.4g}, measured {point.measured:.4g}"
        parts.append(f"{mark}<title>{escape(point.title)}: {numbers}</title></circle>")
    for number, (placement, color) in enumerate(_COLORS.items()):
        y = _TOP + 12 + 20 * number
        parts.append(f'<circle cx="{right + 20}" cy="{y}" r="5" fill="{color}"/>')
        parts.append(f'<text x="{right + 32}" y="{y + 4}">{placement}</text>')
    y = _TOP + 12 + 20 * len(_COLORS)
    dashes = 'stroke="#999" stroke-dasharray="4 4"'
    parts.append(f'<path d="M{right + 10} {y}H{right + 30}" {dashes}/>')
    parts.append(f'<text x="{right + 34}" y="{y + 4}">25 % off</text>')
    middle = _LEFT + _SIDE / 2
    parts.append(f'<text x="{middle}" y="{height - 14}" text-anchor="middle">measured</text>')
    turned = f'transform="rotate(-90 16 {_TOP + _SIDE / 2})"'
    parts.append(
        f'<text x="16" y="{_TOP + _SIDE / 2}" text-anchor="middle" {turned}>predicted</text>'
    )
    return "\n".join([*parts, "</svg>\n"])
