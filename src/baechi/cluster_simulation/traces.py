"""Job traces: readers of published formats (docs/cluster.md).

Times are in seconds, from the first arrival where the file has clock times.
"""

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar, final

from baechi.cluster_simulation.jobs import WHOLE, Job
from baechi.errors import InputError, reason_of
from baechi.validation import check_choice

_JOB_LIST: Final = ("job_id", "num_gpu", "submit_time", "duration")
_PAI_TASKS: Final = (
    *("job_name", "task_name", "inst_num", "status", "start_time", "end_time"),
    *("plan_cpu", "plan_mem", "plan_gpu", "gpu_type"),
)


class _BadEntryError(ValueError):
    """An entry cannot be read; the text is the reason."""


class _NoGpuError(ValueError):
    """An entry is of no job that ran on GPUs; the text is the reason."""


_T = TypeVar("_T")
_Row = dict[str, str]  # the fields by column
# A line and either the job or what is wrong.
_Entry = tuple[int, Job | _BadEntryError | _NoGpuError]


@final
@dataclass(frozen=True, slots=True)
class Skipped:
    """An entry that was left out: its line (in JSON, its number from 1) and why."""

    line: int
    reason: str


@final
@dataclass(frozen=True, slots=True)
class Trace:
    """The jobs of a trace.

    Attributes:
        jobs: By arrival; those of one time in the order of the file.
        malformed: Entries that could not be read.
        without_gpus: Entries of what never ran or needed no GPU.
    """

    jobs: tuple[Job, ...]
    malformed: tuple[Skipped, ...] = ()
    without_gpus: tuple[Skipped, ...] = ()


def read_trace(path: Path | str, format: str, *, malformed: str = "strict") -> Trace:  # noqa: A002
    """The jobs of a trace file in one of `FORMATS`.

    Where `malformed` is `"strict"` the first entry that cannot be read is an error; where it is
    `"skip"` such entries are left out and listed.

    Raises:
        InputError: An unknown format, a file that cannot be read or lacks columns, or, if strict,
            an entry that cannot be read.
    """
    check_choice(format, tuple(FORMATS), "format of the trace")
    check_choice(malformed, ("strict", "skip"), "malformed")
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read trace {path}: {reason_of(error)}.") from error
    jobs: dict[str, tuple[int, Job]] = {}
    bad: list[Skipped] = []
    without: list[Skipped] = []
    for line, found in FORMATS[format](text, path):
        entry = found
        if isinstance(entry, Job) and entry.name in jobs:
            first, _ = jobs[entry.name]
            entry = _BadEntryError(f"job id {entry.name!r} is that of line {first} too")
        if isinstance(entry, Job):
            jobs[entry.name] = line, entry
        elif isinstance(entry, _NoGpuError):
            without.append(Skipped(line, str(entry)))
        elif malformed == "skip":
            bad.append(Skipped(line, str(entry)))
        else:
            raise InputError(
                f"{path}, line {line}: {entry}. Correct it, or leave such lines out with "
                '--malformed skip (malformed="skip").'
            )
    ordered = sorted((job for _, job in jobs.values()), key=lambda job: job.submit_time)
    return Trace(tuple(ordered), tuple(bad), tuple(without))


# Muri's: the time of an iteration that each resource takes. Its priority 1 is an opportunistic job.
_STAGES: Final = ("resource_time_0", "resource_time_1", "resource_time_2")


def _simulators(divisor: int, urgency: int, text: str, path: Path) -> Iterator[_Entry]:
    """Jobs with times in such parts of a second; a higher priority times `urgency` is urgent."""

    def read(row: _Row) -> Job:
        return Job(
            _name_in(row, "job_id"),
            _gpus_in(row, "num_gpu"),
            int(_number_in(row, "submit_time")) // divisor,
            int(_number_in(row, "duration")) // divisor,
            row.get("model_name", ""),
            owner=row.get("owner", ""),
            priority=_priority_in(row) * urgency,
            stages=tuple(_thousands_in(row, name) for name in _STAGES if row.get(name)),
            iteration=_thousands_in(row, "iteration_time") if row.get("iteration_time") else 0,
        )

    return _csv(text, path, _JOB_LIST, read)


def _helios(text: str, path: Path) -> Iterator[_Entry]:
    """Helios: clock times; many jobs are for CPUs alone."""

    def read(row: _Row) -> Job:
        if _number_in(row, "gpu_num") == 0:
            raise _NoGpuError("it asks for no GPU")
        return Job(
            _name_in(row, "job_id"),
            _gpus_in(row, "gpu_num"),
            _seconds(row["submit_time"], "submit_time"),
            int(_number_in(row, "duration")),
            row.get("vc", ""),
            owner=row.get("vc", ""),
        )

    columns = ("job_id", "gpu_num", "submit_time", "duration")
    return _from_zero(_csv(text, path, columns, read))


def _philly(text: str, path: Path) -> Iterator[_Entry]:
    """Philly: what all attempts of a job took is its duration, the most GPUs of one its gang."""
    try:
        log = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is no JSON: {error}.") from error
    if not isinstance(log, list):
        raise InputError(f"{path} holds a {type(log).__name__}; a Philly log is a list.")
    numbered = enumerate(log, start=1)
    return _from_zero((number, _job_or_error(_of_philly, entry)) for number, entry in numbered)


def _of_philly(entry: Any) -> Job:
    if not isinstance(entry, dict):
        raise _BadEntryError(f"it is a {type(entry).__name__}, no object")
    name = entry.get("jobid")
    attempts = entry.get("attempts")
    if not isinstance(name, str) or not name:
        raise _BadEntryError(f"jobid is {name!r}")
    if not isinstance(attempts, list) or not all(isinstance(row, dict) for row in attempts):
        raise _BadEntryError("attempts is no list of objects")
    submitted = _seconds(entry.get("submitted_time"), "submitted_time")
    duration = gpus = 0
    for attempt in attempts:
        times = attempt.get("start_time"), attempt.get("end_time")
        if any(time in (None, "", "None") for time in times):
            continue
        start, end = (_seconds(time, "an attempt's time") for time in times)
        if end < start:
            raise _BadEntryError(f"an attempt ends at {times[1]}, before it starts at {times[0]}")
        detail = attempt.get("detail")
        if not isinstance(detail, list):
            raise _BadEntryError("an attempt's detail is no list")
        count = 0
        for row in detail:
            listed = row.get("gpus") if isinstance(row, dict) else None
            if not isinstance(listed, list):
                raise _BadEntryError("an attempt's detail lists no gpus")
            count += len(listed)
        duration += end - start
        gpus = max(gpus, count)
    if not gpus:
        raise _NoGpuError("it never ran on a GPU to the end of an attempt")
    vc = str(entry.get("vc") or "")
    return Job(name, gpus, submitted, duration, vc, owner=vc)


def _pai(text: str, path: Path) -> Iterator[_Entry]:
    """Alibaba PAI: a table of tasks (percent of GPUs, several to a job), or a list of jobs."""
    first = text.split("\n", 1)[0]
    if "job_id" in first and "num_gpu" in first:
        return _csv(text, path, _JOB_LIST, _of_pai)
    header = None if "job_name" in first else _PAI_TASKS
    needed = ("job_name", "inst_num", "start_time", "end_time", "plan_gpu")
    return _from_zero(_added_up(_csv(text, path, needed, _of_task, header)))


def _of_pai(row: _Row) -> Job:
    gpus = _number_in(row, "num_gpu")
    if not gpus:
        raise _NoGpuError("it asks for no GPU")
    instances = _gpus_in(row, "num_inst") if row.get("num_inst") else 1
    return Job(
        _name_in(row, "job_id"),
        instances * -int(-gpus // 1),
        int(_number_in(row, "submit_time")),
        int(_number_in(row, "duration")),
        row.get("group", ""),
        compute=_share(gpus * WHOLE),
        owner=row.get("user", ""),
    )


def _of_task(row: _Row) -> Job:
    name = _name_in(row, "job_name")
    percent = _number_in(row, "plan_gpu") if row["plan_gpu"] else 0
    if not percent:
        raise _NoGpuError("the task asks for no GPU")
    if not row["start_time"] or not row["end_time"]:
        raise _NoGpuError("the task never ran to an end")
    start, end = int(_number_in(row, "start_time")), int(_number_in(row, "end_time"))
    if not start or not end:
        raise _NoGpuError("the task never ran to an end")
    if end < start:
        raise _BadEntryError(f"the task ends at {end}, before it starts at {start}")
    gpus = _gpus_in(row, "inst_num") * -int(-percent // 100)
    return Job(name, gpus, start, end - start, compute=_share(percent * WHOLE / 100))


def _added_up(tasks: Iterable[_Entry]) -> Iterator[_Entry]:
    """Adds up the tasks of each job, from the first start to the last end."""
    found: dict[str, tuple[int, Job]] = {}
    unread: list[_Entry] = []
    for line, task in tasks:
        first, entry = line, task
        if isinstance(task, Job) and task.name in found:
            first, other = found[task.name]
            entry = _job_or_error(partial(_sum, other), task)
        if isinstance(entry, Job):
            found[entry.name] = first, entry
        else:
            unread.append((line, entry))
    yield from sorted([*unread, *found.values()], key=lambda entry: entry[0])


def _sum(one: Job, other: Job) -> Job:
    start = min(one.submit_time, other.submit_time)
    end = max(job.submit_time + job.duration for job in (one, other))
    share = max(one.compute, other.compute)
    return Job(one.name, one.gpus + other.gpus, start, end - start, compute=share)


def _share(thousandths: float) -> int:
    """A part of a GPU stays one; more than a GPU are whole ones."""
    return min(WHOLE, max(1, round(thousandths)))


# For each format a function from a file's text to its entries.
FORMATS: Final[dict[str, Callable[[str, Path], Iterator[_Entry]]]] = {
    "tiresias": partial(_simulators, 1, 1),
    "muri": partial(_simulators, 1000, -1),
    "philly": _philly,
    "helios": _helios,
    "pai": _pai,
}


def _csv(
    text: str,
    path: Path,
    columns: tuple[str, ...],
    read: Callable[[_Row], Job],
    header: tuple[str, ...] | None = None,
) -> Iterator[_Entry]:
    """The entries of a CSV file, each line by itself: a quote that does not end spoils only one."""
    lines = list(enumerate(text.splitlines(), start=1))
    if header is None:
        header = tuple(map(str.strip, _fields(lines.pop(0)[1]) or ())) if lines else ()
    names = header
    missing = [column for column in columns if column not in names]
    if missing:
        raise InputError(
            f"{path} has columns {', '.join(names) or 'none'}; it lacks {', '.join(missing)}. "
            "Is it of another format?"
        )

    def job(line: str) -> Job:
        row = _fields(line)
        if row is None:
            raise _BadEntryError("a quote does not end, or ends within a field")
        if len(row) != len(names):
            raise _BadEntryError(f"{len(row)} fields instead of {len(names)}")
        return read(dict(zip(names, map(str.strip, row), strict=True)))

    for number, line in lines:
        if line.strip():
            yield number, _job_or_error(job, line)


def _fields(line: str) -> list[str] | None:
    """The fields of a line of a CSV file; `None` where its quotes are wrong."""
    try:
        return next(csv.reader([line], strict=True), [])
    except csv.Error:
        return None


def _job_or_error(read: Callable[[_T], Job], source: _T) -> Job | _BadEntryError | _NoGpuError:
    try:
        return read(source)
    except (_BadEntryError, _NoGpuError) as error:
        return error
    except InputError as error:  # fields that are right one by one, but make no job
        return _BadEntryError(str(error).rstrip("."))


def _from_zero(entries: Iterable[_Entry]) -> Iterator[_Entry]:
    """Lets time start with the first job."""
    rows = list(entries)
    zero = min((job.submit_time for _, job in rows if isinstance(job, Job)), default=0)
    for line, entry in rows:
        if isinstance(entry, Job):
            yield line, replace(entry, submit_time=entry.submit_time - zero)
        else:
            yield line, entry


def _number_in(row: _Row, column: str) -> float:
    try:
        value = float(row[column])
    except ValueError:
        raise _BadEntryError(f"{column} is {row[column]!r}, no number") from None
    if not 0 <= value < 2**53:
        raise _BadEntryError(f"{column} is {row[column]}; it must be from 0 to 2**53")
    return value


def _gpus_in(row: _Row, column: str) -> int:
    value = _number_in(row, column)
    if value != int(value) or value < 1:
        raise _BadEntryError(f"{column} is {row[column]}; it must be a whole number from 1")
    return int(value)


def _priority_in(row: _Row) -> int:
    try:
        return int(row.get("priority") or 0)
    except ValueError:
        raise _BadEntryError(f"priority is {row['priority']!r}, no whole number") from None


def _thousands_in(row: _Row, column: str) -> int:
    """A number in thousandths: Muri's milliseconds have decimals."""
    return round(_number_in(row, column) * 1000)


def _name_in(row: _Row, column: str) -> str:
    if not row[column]:
        raise _BadEntryError(f"{column} is empty")
    return row[column]


def _seconds(text: Any, what: str) -> int:
    """A clock time as seconds, without a time zone as the traces have it."""
    try:
        moment = datetime.strptime(str(text), "%Y-%m-%d %H:%M:%S")
    except ValueError:
        raise _BadEntryError(f"{what} is {text!r}, no time such as 2017-10-07 01:11:39") from None
    return round((moment - datetime(1970, 1, 1)).total_seconds())
