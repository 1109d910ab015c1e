"""The tables and the result file of a run."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.environment import environment
from benchmarks.prediction.checks import (
    Check,
    errors,
    families,
    peak_errors,
    segment_ns,
    time_error,
)
from benchmarks.prediction.rows import Row

from baechi.records.placement import Measurement, error_of
from baechi.units import format_ns

FAMILY_HEADER = ("mode", "devices", "placement", "rows", "time, median", "time, worst",
                 "peak, median", "peak, lowest", "peak, highest")  # fmt: skip
ROW_HEADER = ("model", "batch", "mode", "devices", "placement", "segments", "predicted",
              "measured", "error", "errors of passes", "peak error, lowest", "highest")  # fmt: skip


def family_rows(rows: Sequence[Row]) -> list[list[str]]:
    """A line per mode, number of devices and placement."""
    lines = []
    for mode, devices, placement, found in families(rows):
        seen = errors(found)
        figures = (f"{seen.median_time:.1%}", f"{seen.worst_time:+.1%}", f"{seen.median_peak:.1%}",
                   f"{seen.lowest_peak:+.1%}", f"{seen.highest_peak:+.1%}")  # fmt: skip
        lines.append([mode, str(devices), placement, str(len(found)), *figures])
    return lines


def row_lines(rows: Sequence[Row]) -> list[list[str]]:
    """A line per placement."""
    lines = []
    for row in rows:
        peaks = peak_errors(row) or [0.0]
        lines.append(
            [
                row.model,
                str(row.batch),
                row.mode,
                str(row.devices),
                row.placement,
                str(row.segments),
                format_ns(row.predicted_ns),
                format_ns(row.measured.step_ns),
                f"{time_error(row):+.1%}" + " (disturbed)" * row.disturbed,
                " ".join(map(_pass_text, row.passes_ns)),
                f"{min(peaks):+.1%}",
                f"{max(peaks):+.1%}",
            ]
        )
    return lines


def _pass_text(found: tuple[int, int, bool]) -> str:
    """The error of a pass; in parentheses where the machine was disturbed."""
    predicted_ns, step_ns, calm = found
    text = f"{error_of(predicted_ns, step_ns) or 0.0:+.0%}"
    return text if calm else f"({text})"


def segment_line(rows: Sequence[Row]) -> str:
    """What a segment costs that the clock does not know."""
    found = segment_ns(rows)
    if found is None:
        return "No placements of few and of many cuts to compare."
    return f"One more segment adds {found / 1000:.1f} us to a step beyond its prediction."


def disturbed_line(rows: Sequence[Row]) -> str:
    """How many rows are of a disturbed machine, and how far these are off."""
    found = [row for row in rows if row.disturbed]
    if not found:
        return f"The machine was quiet for all {len(rows)} rows."
    seen = errors(found)
    return (
        f"The machine was disturbed for {len(found)} of {len(rows)} rows. Their step times are "
        f"{seen.median_time:.1%} off in the median and {seen.worst_time:+.1%} at worst."
    )


def write_files(rows: Sequence[Row], found: Sequence[Check], folder: Path, command: str) -> None:
    """`result.json` with every sample, and `tables.md`."""
    folder.mkdir(parents=True, exist_ok=True)
    result = {
        "command": command,
        "environment": environment(),
        "checks": [asdict(check) for check in found],
        "rows": [asdict(row) for row in rows],
    }
    (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    verdicts = [[c.claim, "holds" if c.holds else "FAILS", c.figure] for c in found]
    parts = [
        f"Made by `{command}`. Errors are (predicted - measured) / measured.\n",
        _table(("target", "", "measured"), verdicts),
        disturbed_line(rows) + "\n",
        segment_line(rows) + "\n",
        _table(FAMILY_HEADER, family_rows(rows)),
        _table(ROW_HEADER, row_lines(rows)),
    ]
    (folder / "tables.md").write_text("\n".join(parts))


def read_rows(folder: Path) -> list[Row]:
    """The rows that `write_files` wrote; none where it has not."""
    path = folder / "result.json"
    found = json.loads(path.read_text())["rows"] if path.exists() else []
    return [
        Row(
            **{
                **row,
                "predicted_bytes": tuple(row["predicted_bytes"]),
                "passes_ns": tuple(map(tuple, row["passes_ns"])),
                "measured": Measurement(**row["measured"]),
            }
        )
        for row in found
    ]


def _table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [header, ["---"] * len(header), *lines]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
