"""Readers of published job traces.

| format | file | source |
|---|---|---|
| `tiresias` | CSV with `job_id,num_gpu,submit_time,duration` | SymbioticLab/Tiresias |
| `muri` | the same, in milliseconds that are cut to seconds | Rivendile/Muri |
| `philly` | JSON, `cluster_job_log`: jobs with attempts | msr-fiddle/philly-traces |
| `helios` | CSV, `cluster_log.csv` | S-Lab-System-Group/HeliosData |
| `pai` | CSV, `pai_task_table.csv` or a job list with a header | alibaba/clusterdata, 2020 |

Times are in seconds, from the first arrival where the file has clock times.

Three things may be wrong with an entry. It cannot be read, or its id was there before: that is an
error with line and reason, or, where asked for, counted and left out. Or it is a proper entry of
something that ran on no GPU, which real clusters have many of: left out and counted always.
Jobs come out by arrival; those of one time in the order of the file.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from baechi.cluster_simulation.jobs import Job
from baechi.cluster_simulation.traces.entries import BadEntryError, NoGpuError
from baechi.cluster_simulation.traces.formats import FORMATS
from baechi.errors import InputError, reason_of

MALFORMED: Final = ("strict", "skip")


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
        jobs: By arrival.
        malformed: Entries that could not be read.
        without_gpus: Entries of what never ran or needed no GPU.
    """

    jobs: tuple[Job, ...]
    malformed: tuple[Skipped, ...] = ()
    without_gpus: tuple[Skipped, ...] = ()


def read_trace(path: Path | str, format: str, *, malformed: str = "strict") -> Trace:  # noqa: A002
    """The jobs of a trace file.

    Args:
        path: The file.
        format: One of the formats above.
        malformed: `"strict"`: the first entry that cannot be read is an error; `"skip"`: such
            entries are left out and listed.

    Raises:
        InputError: An unknown format, a file that cannot be read or lacks columns, or, if strict,
            an entry that cannot be read.
    """
    if format not in FORMATS:
        raise InputError(f"trace format {format!r} is unknown; give one of {', '.join(FORMATS)}.")
    if malformed not in MALFORMED:
        raise InputError(f"malformed is {malformed!r}; give one of {', '.join(MALFORMED)}.")
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read trace {path}: {reason_of(error)}.") from error
    jobs: list[Job] = []
    bad: list[Skipped] = []
    without: list[Skipped] = []
    line_of: dict[str, int] = {}
    for line, entry in FORMATS[format](text, path):
        if isinstance(entry, Job) and entry.name in line_of:
            first = line_of[entry.name]
            entry = BadEntryError(f"job id {entry.name!r} is that of line {first} too")  # noqa: PLW2901
        if isinstance(entry, NoGpuError):
            without.append(Skipped(line, str(entry)))
        elif isinstance(entry, BadEntryError):
            if malformed == "strict":
                raise InputError(
                    f"{path}, line {line}: {entry}. Correct it, or leave such lines out with "
                    '--malformed skip (malformed="skip").'
                )
            bad.append(Skipped(line, str(entry)))
        else:
            line_of[entry.name] = line
            jobs.append(entry)
    jobs.sort(key=lambda job: job.submit_time)
    return Trace(tuple(jobs), tuple(bad), tuple(without))
