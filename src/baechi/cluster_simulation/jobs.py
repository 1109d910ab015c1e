"""Jobs of a trace, and their outcomes."""

from dataclasses import dataclass
from typing import Final, final

from baechi.errors import InputError
from baechi.records.graph import OpGraph
from baechi.records.placement import Placement
from baechi.validation import check_count, check_name

# A whole GPU's compute, in the thousandths that shares are counted in.
WHOLE: Final = 1000


@final
@dataclass(frozen=True, slots=True)
class Job:
    """A job of a trace. Times are integer ticks of one unit for a whole trace, seconds for most.

    Attributes:
        name: Unique in its trace.
        gpus: How many GPUs it holds at once; all of them or none (a gang).
        submit_time: When it arrives.
        duration: How long it runs on whole GPUs of speed 1.
        model: The trace's name of its model.
        memory_bytes: What it holds on each of its GPUs.
        compute: The share of a GPU that it keeps busy when alone on it, in thousandths.
        limit: The share of a GPU that it may use at most (an MPS limit), in thousandths.
        graph: Its operators, for the scheme `baechi`, which then decides on how many devices and
            with how much memory on each.
        placement: How its graph is split over `gpus` devices, for the scheme `AsPlaced`.
        step_ns: What one step of the graph takes where `duration` was measured; the prediction on
            one device with room for everything if 0.
        most_gpus: Over how many GPUs its graph may be split; `gpus` if 0.

    Raises:
        InputError: A value is out of its range.
    """

    name: str
    gpus: int
    submit_time: int
    duration: int
    model: str = ""
    memory_bytes: int = 0
    compute: int = WHOLE
    limit: int = WHOLE
    graph: OpGraph | None = None
    placement: Placement | None = None
    step_ns: int = 0
    most_gpus: int = 0

    def __post_init__(self) -> None:
        check_name(self.name, "a job's name")
        counts = ("gpus", "submit_time", "duration", "memory_bytes", "step_ns", "most_gpus")
        for field in counts:
            check_count(getattr(self, field), f"{field} of job {self.name!r}")
        if self.gpus < 1:
            raise InputError(f"job {self.name!r} asks for {self.gpus} GPUs; give at least 1.")
        for field in ("compute", "limit"):
            share = check_count(getattr(self, field), f"{field} of job {self.name!r}")
            if not 1 <= share <= WHOLE:
                raise InputError(
                    f"{field} of job {self.name!r} is {share}; give thousandths of a GPU, 1 to "
                    f"{WHOLE}."
                )

    @property
    def shape(self) -> object:
        """All that a scheme looks at: jobs of equal shape fit on the same GPUs."""
        asked = self.gpus, self.memory_bytes, self.compute, self.limit
        return *asked, id(self.graph), id(self.placement), self.step_ns, self.most_gpus


@final
@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a job.

    Attributes:
        job: The job.
        start_time: When it first held its GPUs.
        end_time: When it was done.
        pending_time: Ticks without GPUs, between arrival and end.
        preempt: How often it lost its GPUs before it was done.
        resume: How often a policy that preempts gave it GPUs, the first time included; 0 under one
            that does not, as the published simulators count.
        promote: How often it was put back into the first queue because it had waited for long.
        overhead: Ticks of work that preemptions and restarts added.
        gpus: The GPUs that it held last; empty where the scheme only counts.
        held_bytes: The memory that it held on each of them.
    """

    job: Job
    start_time: int
    end_time: int
    pending_time: int
    preempt: int = 0
    resume: int = 0
    promote: int = 0
    overhead: int = 0
    gpus: tuple[int, ...] = ()
    held_bytes: tuple[int, ...] = ()

    @property
    def completion_time(self) -> int:
        """From arrival to end."""
        return self.end_time - self.job.submit_time


@final
@dataclass(frozen=True, slots=True)
class Refusal:
    """A job that can never run on this cluster, and why."""

    job: Job
    reason: str
