"""Draws `docs/timelines.svg`: one planted graph under three placers, side by side in time.

`python3 -m benchmarks.placement_quality.timelines`. An op has the color of its device in the
planted answer, so that one sees what a placer tears apart.
"""

from pathlib import Path

from benchmarks.placement_quality.generators import Planted, planted

import baechi
from baechi import Schedule

PICTURE = Path(__file__).parents[2] / "docs" / "timelines.svg"
PLACERS = ("m-etf", "contiguous", "auto")
SEED, OPS, DEVICES, CCR = 1, 60, 4, 3.0
# Okabe and Ito's colors, which people who confuse colors can tell apart.
_COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7")
_WIDTH, _LEFT, _RIGHT, _TOP = 900, 24, 20, 8
# Of a device's row: its work, what it receives, and the gap below; of a panel: title and gap.
_WORK, _RECEIVE, _GAP, _TITLE, _PANEL = 15, 4, 3, 22, 12


def main() -> None:
    """Writes the picture."""
    instance = planted(SEED, OPS, DEVICES, ccr=CCR)
    graph, cluster = instance.graph, instance.cluster
    schedules = {
        placer: baechi.simulate(graph, cluster, baechi.solve(graph, cluster, placer))
        for placer in PLACERS
    }
    PICTURE.write_text(svg(instance, schedules))
    for placer, schedule in schedules.items():
        print(f"{placer}: {schedule.makespan_ns / instance.optimum_ns:.3f} of the optimum")


def svg(instance: Planted, schedules: dict[str, Schedule]) -> str:
    """The picture, self-contained; a panel per schedule."""
    longest = max(schedule.makespan_ns for schedule in schedules.values())
    row, panel = _WORK + _RECEIVE + _GAP, _TITLE + _PANEL
    height = _TOP + len(schedules) * (panel + DEVICES * row)

    def x_of(time_ns: int) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * time_ns / longest

    def box(begin: int, end: int, y: float, tall: int, color: str) -> str:
        x = x_of(begin)
        wide = max(0.5, x_of(end) - x - 0.6)
        return f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{tall}" fill="{color}"/>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
    ]
    y = _TOP
    for placer, schedule in schedules.items():
        ratio = schedule.makespan_ns / instance.optimum_ns
        parts.append(
            f'<text x="{_LEFT}" y="{y + 14}"><tspan font-weight="bold">{placer}</tspan>: '
            f"{schedule.makespan_ns / 1e6:.1f} ms, {ratio:.2f} times the optimum</text>"
        )
        y += _TITLE
        for device in range(DEVICES):
            top = y + device * row
            parts.append(f'<text x="{_LEFT - 8}" y="{top + 12}" text-anchor="end">{device}</text>')
            parts.append(box(0, longest, top, _WORK + _RECEIVE, "#f2f2f2"))
        for span in schedule.spans:
            color = _COLORS[instance.placement.devices[span.op]]
            parts.append(box(span.start_ns, span.end_ns, y + span.device * row, _WORK, color))
        for sent in schedule.transfers:
            below = y + sent.dst * row + _WORK
            parts.append(box(sent.start_ns, sent.end_ns, below, _RECEIVE, "#777"))
        x, bottom = x_of(instance.optimum_ns), y + DEVICES * row
        parts.append(f'<path d="M{x:.1f} {y - 3}V{bottom}" stroke="#000" stroke-dasharray="4 3"/>')
        y = bottom + _PANEL
    return "\n".join([*parts, "</svg>\n"])


if __name__ == "__main__":
    main()
