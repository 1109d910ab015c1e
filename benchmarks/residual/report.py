"""The tables: every figure as a mean over seeds, with half the width of its 95 % interval."""

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields

from benchmarks.residual.runs import ARMS, FIRST_FIT, SHARINGS, Row
from benchmarks.residual.statistics import interval


def of(rows: Sequence[Row], arm: str, sharing: str, load: float) -> list[Row]:
    """The rows of one cell, by seed. Arms that share no GPU have one row for both sharings."""
    alone = next(row.most < 2 for row in ARMS if row.name == arm)
    how = SHARINGS[0] if alone else sharing
    found = [row for row in rows if (row.arm, row.sharing, row.load) == (arm, how, load)]
    return sorted(found, key=lambda row: row.seed)


def difference(
    rows: Sequence[Row], arm: str, base: str, sharing: str, load: float
) -> tuple[float, float]:
    """By how much longer the mean completion time is than under another arm, seed by seed."""
    mine, theirs = of(rows, arm, sharing, load), of(rows, base, sharing, load)
    return interval([a.mean_s / b.mean_s - 1 for a, b in zip(mine, theirs, strict=True)])


def packing_of(arm: str) -> str | None:
    """The packing with as many jobs on a GPU, for arms that split."""
    most = next(row.most for row in ARMS if row.name == arm)
    return f"packing {most}" if arm.startswith("split") else None


def tables(rows: Sequence[Row]) -> str:
    """A table per way of sharing and load."""
    lines = []
    loads = sorted({row.load for row in rows})
    for sharing in SHARINGS:
        for load in loads:
            lines += ["", f"{sharing}, load {load:g}", HEAD]
            lines += [_line(rows, arm.name, sharing, load) for arm in ARMS]
    return "\n".join(lines)


HEAD = (
    f"{'':20}{'mean JCT, min':>16}{'than first fit':>16}{'than packing':>14}{'p99 JCT, min':>16}"
    f"{'makespan, h':>16}{'memory, %':>14}{'refused':>9}{'split':>7}{'OOM':>5}"
)


def _line(rows: Sequence[Row], arm: str, sharing: str, load: float) -> str:
    cell = of(rows, arm, sharing, load)

    def told(figure: Callable[[Row], float], digits: int, width: int) -> str:
        mean, half = interval([figure(row) for row in cell])
        return f"{mean:.{digits}f} ±{half:.{digits}f}".rjust(width)

    def against(base: str | None) -> str:
        if base is None:
            return ""
        mean, half = difference(rows, arm, base, sharing, load)
        return f"{100 * mean:+.0f} ±{100 * half:.0f} %"

    first = against(None if arm == FIRST_FIT else FIRST_FIT)
    return (
        f"{arm:20}{told(lambda row: row.mean_s / 60, 1, 16)}{first:>16}"
        f"{against(packing_of(arm)):>14}"
        f"{told(lambda row: row.p99_s / 60, 0, 16)}{told(lambda row: row.makespan_s / 3600, 1, 16)}"
        f"{told(lambda row: 100 * row.memory, 1, 14)}{sum(row.refused for row in cell):>9}"
        f"{sum(row.split for row in cell) / len(cell):>7.0f}{sum(row.oom for row in cell):>5}"
    )


def csv_of(rows: Sequence[Row]) -> str:
    """Every simulation."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(Row)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(map(asdict, rows))
    return text.getvalue()
