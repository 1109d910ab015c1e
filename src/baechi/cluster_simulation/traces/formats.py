"""Published formats of traces: for each a function from a file's text to its entries."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

from baechi.cluster_simulation.jobs import WHOLE, Job
from baechi.cluster_simulation.traces.entries import (
    BadEntryError,
    Entry,
    NoGpuError,
    Row,
    gpus_in,
    job_or_error,
    jobs_of,
    name_in,
    number_in,
    rows_of,
)
from baechi.errors import InputError

_PAI_TASKS: Final = (
    *("job_name", "task_name", "inst_num", "status", "start_time", "end_time"),
    *("plan_cpu", "plan_mem", "plan_gpu", "gpu_type"),
)


def _of_simulator(row: dict[str, str], divisor: int) -> Job:
    return Job(
        name_in(row, "job_id"),
        gpus_in(row, "num_gpu"),
        int(number_in(row, "submit_time")) // divisor,
        int(number_in(row, "duration")) // divisor,
        row.get("model_name", ""),
    )


def _simulators(divisor: int) -> Callable[[str, Path], Iterator[Entry]]:
    columns = ("job_id", "num_gpu", "submit_time", "duration")

    def entries(text: str, path: Path) -> Iterator[Entry]:
        return jobs_of(rows_of(text, path, columns), lambda row: _of_simulator(row, divisor))

    return entries


def _helios(text: str, path: Path) -> Iterator[Entry]:
    """Helios: clock times; many jobs are for CPUs alone."""
    columns = ("job_id", "gpu_num", "submit_time", "duration")

    def read(row: dict[str, str]) -> Job:
        if number_in(row, "gpu_num") == 0:
            raise NoGpuError("it asks for no GPU")
        return Job(
            name_in(row, "job_id"),
            gpus_in(row, "gpu_num"),
            _seconds(row["submit_time"], "submit_time"),
            int(number_in(row, "duration")),
            row.get("vc", ""),
        )

    return _from_zero(jobs_of(rows_of(text, path, columns), read))


def _philly(text: str, path: Path) -> Iterator[Entry]:
    """Philly: what all attempts of a job took is its duration, the most GPUs of one its gang."""
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is no JSON: {error}.") from error
    if not isinstance(entries, list):
        raise InputError(f"{path} holds a {type(entries).__name__}; a Philly log is a list.")

    numbered = enumerate(entries, start=1)
    return _from_zero((number, job_or_error(_of_philly, entry)) for number, entry in numbered)


def _of_philly(entry: Any) -> Job:
    if not isinstance(entry, dict):
        raise BadEntryError(f"it is a {type(entry).__name__}, no object")
    name = entry.get("jobid")
    attempts = entry.get("attempts")
    if not isinstance(name, str) or not name:
        raise BadEntryError(f"jobid is {name!r}")
    if not isinstance(attempts, list) or not all(isinstance(row, dict) for row in attempts):
        raise BadEntryError("attempts is no list of objects")
    submitted = _seconds(entry.get("submitted_time"), "submitted_time")
    duration = gpus = 0
    for attempt in attempts:
        times = attempt.get("start_time"), attempt.get("end_time")
        if any(time in (None, "", "None") for time in times):
            continue
        start, end = (_seconds(time, "an attempt's time") for time in times)
        if end < start:
            raise BadEntryError(f"an attempt ends at {times[1]}, before it starts at {times[0]}")
        detail = attempt.get("detail")
        if not isinstance(detail, list):
            raise BadEntryError("an attempt's detail is no list")
        duration += end - start
        gpus = max(gpus, sum(len(_listed(row)) for row in detail))
    if not gpus:
        raise NoGpuError("it never ran on a GPU to the end of an attempt")
    return Job(name, gpus, submitted, duration, str(entry.get("vc") or ""))


def _listed(row: Any) -> list[Any]:
    gpus = row.get("gpus") if isinstance(row, dict) else None
    if not isinstance(gpus, list):
        raise BadEntryError("an attempt's detail lists no gpus")
    return gpus


def _pai(text: str, path: Path) -> Iterator[Entry]:
    """Alibaba PAI: a table of tasks (percent of GPUs, several to a job), or a list of jobs."""
    first = text.split("\n", 1)[0]
    if "job_id" in first and "num_gpu" in first:
        columns = ("job_id", "num_gpu", "submit_time", "duration")
        return jobs_of(rows_of(text, path, columns), _of_pai)
    header = None if "job_name" in first else _PAI_TASKS
    needed = ("job_name", "inst_num", "start_time", "end_time", "plan_gpu")
    return _from_zero(_pai_jobs(rows_of(text, path, needed, header)))


def _of_pai(row: dict[str, str]) -> Job:
    gpus = number_in(row, "num_gpu")
    if not gpus:
        raise NoGpuError("it asks for no GPU")
    instances = gpus_in(row, "num_inst") if row.get("num_inst") else 1
    return Job(
        name_in(row, "job_id"),
        instances * -int(-gpus // 1),
        int(number_in(row, "submit_time")),
        int(number_in(row, "duration")),
        row.get("group", ""),
        compute=_share(gpus * WHOLE),
    )


def _pai_jobs(rows: Iterator[tuple[int, Row]]) -> Iterator[Entry]:
    """Adds up the tasks of each job, from the first start to the last end."""
    found: dict[str, tuple[int, Job]] = {}
    unread: list[Entry] = []
    for line, row in rows:
        task = row if isinstance(row, BadEntryError) else job_or_error(_of_task, row)
        if isinstance(task, Job):
            first, other = found.get(task.name, (line, None))
            task = task if other is None else job_or_error(partial(_added, other), task)
        if isinstance(task, Job):
            found[task.name] = first, task
        else:
            unread.append((line, task))
    yield from sorted([*unread, *found.values()], key=lambda entry: entry[0])


def _added(one: Job, other: Job) -> Job:
    start = min(one.submit_time, other.submit_time)
    end = max(job.submit_time + job.duration for job in (one, other))
    share = max(one.compute, other.compute)
    return Job(one.name, one.gpus + other.gpus, start, end - start, compute=share)


def _of_task(row: dict[str, str]) -> Job:
    name = name_in(row, "job_name")
    percent = number_in(row, "plan_gpu") if row["plan_gpu"] else 0
    if not percent:
        raise NoGpuError("the task asks for no GPU")
    if not row["start_time"] or not row["end_time"]:
        raise NoGpuError("the task never ran to an end")
    start, end = int(number_in(row, "start_time")), int(number_in(row, "end_time"))
    if not start or not end:
        raise NoGpuError("the task never ran to an end")
    if end < start:
        raise BadEntryError(f"the task ends at {end}, before it starts at {start}")
    gpus = gpus_in(row, "inst_num") * -int(-percent // 100)
    return Job(name, gpus, start, end - start, compute=_share(percent * WHOLE / 100))


def _share(thousandths: float) -> int:
    """A part of a GPU stays one; more than a GPU are whole ones."""
    return min(WHOLE, max(1, round(thousandths)))


def _seconds(text: Any, what: str) -> int:
    """A clock time as seconds, without a time zone as the traces have it."""
    try:
        moment = datetime.strptime(str(text), "%Y-%m-%d %H:%M:%S")
    except ValueError:
        raise BadEntryError(f"{what} is {text!r}, no time such as 2017-10-07 01:11:39") from None
    return round((moment - datetime(1970, 1, 1)).total_seconds())


def _from_zero(entries: Iterator[Entry]) -> Iterator[Entry]:
    """Lets time start with the first job."""
    rows = list(entries)
    zero = min((job.submit_time for _, job in rows if isinstance(job, Job)), default=0)
    for line, entry in rows:
        if isinstance(entry, Job):
            yield line, replace(entry, submit_time=entry.submit_time - zero)
        else:
            yield line, entry


FORMATS: Final[dict[str, Callable[[str, Path], Iterator[Entry]]]] = {
    "tiresias": _simulators(1),
    "muri": _simulators(1000),
    "philly": _philly,
    "helios": _helios,
    "pai": _pai,
}
