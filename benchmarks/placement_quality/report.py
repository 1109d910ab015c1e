"""Rows as files: CSV, JSON with the environment, and Markdown tables."""

import csv
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.environment import environment
from benchmarks.placement_quality.checks import Check, best_ns, by_case, geometric_mean
from benchmarks.placement_quality.rows import Row

# The fields that families differ in, in the order of the columns.
_FAMILY = ("source", "memory", "factor", "pass")
_LEGEND = (
    "An entry is over the cases where the placer found a placement; in brackets, on how many it "
    "found none though some placer did. The best known is the shortest of all rows, or the planted "
    "optimum."
)


def placers_of(rows: Iterable[Row]) -> list[str]:
    """The placers, in the order of their first row."""
    return list(dict.fromkeys(row.placer for row in rows))


def as_records(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows with gap, and with the ratio to the best that is known of their case."""
    best = {name: best_ns(case) for name, case in by_case(rows).items()}
    return [
        {
            **asdict(row),
            "gap": row.gap,
            "ratio_to_best": ratio(row.makespan_ns, best[row.case]),
        }
        for row in rows
    ]


def ratio(makespan_ns: int | None, best: int | None) -> float | None:
    """`None` where either is unknown; 1 where both are zero."""
    if makespan_ns is None or best is None:
        return None
    return makespan_ns / best if best else 1.0


def write_files(rows: Sequence[Row], found: Sequence[Check], folder: Path, command: str) -> None:
    """`placements.csv`, `placements.json` and `tables.md`."""
    folder.mkdir(parents=True, exist_ok=True)
    records = as_records(rows)
    with (folder / "placements.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(records[0]))
        writer.writeheader()
        writer.writerows(records)
    content = {
        "environment": environment(),
        "command": command,
        "checks": [asdict(check) for check in found],
        "rows": records,
    }
    (folder / "placements.json").write_text(json.dumps(content, indent=1) + "\n")
    (folder / "tables.md").write_text(markdown(rows, found, command))


def markdown(rows: Sequence[Row], found: Sequence[Check], command: str) -> str:
    """The families' geometric means, the placement times, and the checks."""
    facts = "\n".join(f"- {key}: {value}" for key, value in environment().items())
    marks = {True: "pass", False: "FAIL", None: "no data"}
    check_rows = [[check.claim, marks[check.holds], check.figure] for check in found]
    return "\n\n".join(
        [
            "# Placement quality",
            f"`{command}`\n\n{facts}",
            "## Step over the best known, geometric mean per family",
            table([*_FAMILY, "cases", *placers_of(rows)], family_rows(rows, quality)),
            _LEGEND,
            "## Step over the lower bound, geometric mean per family",
            table([*_FAMILY, "cases", *placers_of(rows)], family_rows(rows, gap)),
            "## Seconds to place, mean per family",
            table([*_FAMILY, "cases", *placers_of(rows)], family_rows(rows, seconds)),
            "## Checks",
            table(["claim", "", "measured"], check_rows),
        ]
    ) + "\n"  # fmt: skip


# From the rows of a placer in one family and the best of every case to a cell.
_Cell = Callable[[list[Row], dict[str, int | None]], str]


def quality(rows: list[Row], best: dict[str, int | None]) -> str:
    """Makespan over the best."""
    found = [ratio(row.makespan_ns, best[row.case]) for row in rows]
    missed = sum(row.makespan_ns is None and best[row.case] is not None for row in rows)
    return _mean(found) + (f" ({missed})" if missed else "")


def gap(rows: list[Row], best: dict[str, int | None]) -> str:  # noqa: ARG001 (a cell)
    """Makespan over the lower bound."""
    return _mean([None if row.gap is None else 1 + row.gap for row in rows])


def seconds(rows: list[Row], best: dict[str, int | None]) -> str:  # noqa: ARG001 (a cell)
    """Mean of the times to place."""
    return f"{sum(row.seconds for row in rows) / len(rows):.3f}" if rows else ""


def _mean(values: list[float | None]) -> str:
    mean = geometric_mean([value for value in values if value])
    return "" if math.isnan(mean) else f"{mean:.3f}"


def family_rows(rows: Sequence[Row], cell: _Cell) -> list[list[str]]:
    """A line per family, and one for all rows."""
    best = {name: best_ns(case) for name, case in by_case(rows).items()}
    families: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        families[row.family].append(row)
    names = placers_of(rows)
    lines = []
    for (source, memory, factor, training), members in [
        *sorted(families.items()),
        (("all", "", "", ""), list(rows)),
    ]:
        of = [cell([row for row in members if row.placer == name], best) for name in names]
        step = {True: "training", False: "forward"}.get(training, "")
        shown = f"{factor:g}" if isinstance(factor, float) else factor
        cases = str(len({row.case for row in members}))
        lines.append([source, memory, shown, step, cases, *of])
    return lines


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
