"""Entries of trace files: rows of CSV files, read as jobs or as errors."""

import csv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from baechi.cluster_simulation.jobs import Job
from baechi.errors import InputError


class BadEntryError(ValueError):
    """An entry cannot be read; the text is the reason."""


class NoGpuError(ValueError):
    """An entry is of no job that ran on GPUs; the text is the reason."""


# A line and either the job or what is wrong.
Entry = tuple[int, Job | BadEntryError | NoGpuError]

# The fields of a row by column.
Row = dict[str, str] | BadEntryError

T = TypeVar("T")


def rows_of(
    text: str, path: Path, columns: tuple[str, ...], header: tuple[str, ...] | None = None
) -> Iterator[tuple[int, Row]]:
    """The rows of a CSV file with their line; a header that lacks columns is an error.

    Each line is read by itself, so that a quote that does not end spoils one line and not the rest.
    """
    lines = list(enumerate(text.splitlines(), start=1))
    if header is None:
        names = tuple(name.strip() for name in _fields(lines.pop(0)[1]) or ()) if lines else ()
    else:
        names = header
    missing = [column for column in columns if column not in names]
    if missing:
        raise InputError(
            f"{path} has columns {', '.join(names) or 'none'}; it lacks {', '.join(missing)}. "
            "Is it of another format?"
        )
    for number, line in lines:
        if not line.strip():
            continue
        row = _fields(line)
        if row is None:
            yield number, BadEntryError("a quote does not end, or ends within a field")
        elif len(row) != len(names):
            yield number, BadEntryError(f"{len(row)} fields instead of {len(names)}")
        else:
            yield number, dict(zip(names, map(str.strip, row), strict=True))


def _fields(line: str) -> list[str] | None:
    """The fields of a line of a CSV file; `None` where its quotes are wrong."""
    try:
        return next(csv.reader([line], strict=True), [])
    except csv.Error:
        return None


def jobs_of(
    rows: Iterator[tuple[int, Row]], read: Callable[[dict[str, str]], Job]
) -> Iterator[Entry]:
    """Reads rows as jobs, or as the error of those that cannot be read."""
    for line, row in rows:
        yield line, row if isinstance(row, BadEntryError) else job_or_error(read, row)


def job_or_error(read: Callable[[T], Job], source: T) -> Job | BadEntryError | NoGpuError:
    """The job that is read from a row or an object, or its error.

    Fields that are right one by one, but make no job, are an error of the entry, too.
    """
    try:
        return read(source)
    except (BadEntryError, NoGpuError) as error:
        return error
    except InputError as error:
        return BadEntryError(str(error).rstrip("."))


def number_in(row: dict[str, str], column: str) -> float:
    """A number from 0."""
    try:
        value = float(row[column])
    except ValueError:
        raise BadEntryError(f"{column} is {row[column]!r}, no number") from None
    if not 0 <= value < 2**53:
        raise BadEntryError(f"{column} is {row[column]}; it must be from 0 to 2**53")
    return value


def gpus_in(row: dict[str, str], column: str) -> int:
    """A whole number from 1."""
    value = number_in(row, column)
    if value != int(value) or value < 1:
        raise BadEntryError(f"{column} is {row[column]}; it must be a whole number from 1")
    return int(value)


def name_in(row: dict[str, str], column: str) -> str:
    """A text that is not empty."""
    if not row[column]:
        raise BadEntryError(f"{column} is empty")
    return row[column]
