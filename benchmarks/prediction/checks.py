"""Errors of predictions, and the targets that they are held to."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, final

from benchmarks.prediction.rows import MODES, Row

from baechi.records.placement import error_of

# (median, worst) of the step time's error, as shares of what was measured.
TIME_TARGETS: Final = {"cpu": (0.10, 0.25), "cuda": (0.05, 0.15)}
PEAK_MEDIAN: Final = 0.05
PEAK_UNDER: Final = 0.03
# More logical devices than a machine has cores wait for each other, which no target is about.
_MOST_DEVICES: Final = 2


@final
@dataclass(frozen=True)
class Check:
    """A target: what was seen, and whether it holds."""

    claim: str
    figure: str
    holds: bool


@final
@dataclass(frozen=True)
class Errors:
    """The errors of some rows: of their step times, and of the peak of each of their devices.

    Above 0 a prediction was too high. A figure of no rows is 0.
    """

    times: tuple[float, ...]
    peaks: tuple[float, ...]

    @property
    def median_time(self) -> float:
        """The median size of the step time's errors."""
        return statistics.median(map(abs, self.times)) if self.times else 0.0

    @property
    def worst_time(self) -> float:
        """The error of the step time that is farthest from 0."""
        return max(self.times, key=abs, default=0.0)

    @property
    def median_peak(self) -> float:
        """The median size of the peaks' errors."""
        return statistics.median(map(abs, self.peaks)) if self.peaks else 0.0

    @property
    def lowest_peak(self) -> float:
        """The error of the peak that was most underestimated."""
        return min(self.peaks, default=0.0)

    @property
    def highest_peak(self) -> float:
        """The error of the peak that was most overestimated."""
        return max(self.peaks, default=0.0)


def time_error(row: Row) -> float:
    """The step time's error as a share of what was measured."""
    return error_of(row.predicted_ns, row.measured.step_ns) or 0.0


def peak_errors(row: Row) -> list[float]:
    """The error of the peak of every device that holds anything."""
    pairs = zip(row.predicted_bytes, row.measured.peak_bytes, strict=True)
    found = (error_of(predicted, measured) for predicted, measured in pairs if measured)
    return [error for error in found if error is not None]


def errors(rows: Sequence[Row]) -> Errors:
    """The errors of all rows."""
    peaks = tuple(error for row in rows for error in peak_errors(row))
    return Errors(tuple(map(time_error, rows)), peaks)


def families(rows: Sequence[Row]) -> Iterator[tuple[str, int, str, list[Row]]]:
    """The rows by mode, number of devices and placement."""
    for mode in MODES:
        for devices in sorted({row.devices for row in rows}):
            for placement in dict.fromkeys(row.placement for row in rows):
                wanted = (mode, devices, placement)
                found = [r for r in rows if (r.mode, r.devices, r.placement) == wanted]
                if found:
                    yield *wanted, found


def segment_ns(rows: Sequence[Row]) -> float | None:
    """What one more segment adds to a step beyond its prediction, the median over models.

    From a placement of few cuts to one of many, of the same model on the same devices.
    """
    by_case: dict[tuple[object, ...], dict[str, Row]] = {}
    for row in rows:
        case = (row.model, row.batch, row.mode, row.devices)
        by_case.setdefault(case, {})[row.placement] = row
    slopes = []
    for case in by_case.values():
        few, many = case.get("few"), case.get("many")
        if few is not None and many is not None and many.segments > few.segments:
            missed = [row.measured.step_ns - row.predicted_ns for row in (few, many)]
            slopes.append((missed[1] - missed[0]) / (many.segments - few.segments))
    return statistics.median(slopes) if slopes else None


def checks(rows: Sequence[Row], kind: str) -> list[Check]:
    """The targets, for at most two devices; rows of a disturbed machine count as well."""
    found = errors([row for row in rows if row.devices <= _MOST_DEVICES])
    median, worst = TIME_TARGETS[kind]
    claims = (
        ("step time, median error", abs(found.median_time), median),
        ("step time, worst error", abs(found.worst_time), worst),
        ("peak memory, median error", found.median_peak, PEAK_MEDIAN),
        ("peak memory, most underestimated", max(-found.lowest_peak, 0.0), PEAK_UNDER),
    )
    return [
        Check(f"{claim} at most {limit:.0%}", f"{value:.1%}", value <= limit)
        for claim, value, limit in claims
    ]
