"""Jobs of a trace, and models of several on one GPU: by exclusion, in turns, or side by side.

A rate is work done per tick. `WORK` units are one tick of a whole GPU of speed 1: a number that all
small counts divide, so that turns among them are exact integers. docs/cluster.md has the rates.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import ClassVar, Final, final

from baechi.errors import InputError
from baechi.records.graph import OpGraph
from baechi.records.placement import Placement
from baechi.validation import check_count, check_name, check_positive

WHOLE: Final = 1000  # a GPU's compute, in the thousandths that shares are counted in
WORK: Final = 720_720  # the least common multiple of 1 to 16


@final
@dataclass(frozen=True, slots=True)
class Part:
    """The share of one job in one GPU.

    Attributes:
        memory_bytes: What it holds there.
        compute: The share of the GPU that it keeps busy when alone, in thousandths.
        limit: The share that it may use at most, in thousandths.
        stages: `Job.stages` of whose part it is.
        iteration: `Job.iteration` of whose part it is.
        opportunistic: Whether the priority of its job is below 0.
    """

    memory_bytes: int = 0
    compute: int = WHOLE
    limit: int = WHOLE
    stages: tuple[int, ...] = ()
    iteration: int = 0
    opportunistic: bool = False


class Sharing(ABC):
    """A model of a GPU that several jobs are on.

    Attributes:
        most: At most so many jobs on one GPU.
        wants_whole: Whether a GPU that others hold memory of is left out.
    """

    most: int
    wants_whole: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_positive(self.most, "the most jobs on a GPU")

    def admits(self, parts: Sequence[Part], part: Part) -> bool:
        """True if a job may join those that are there, memory apart."""
        del part
        return len(parts) < self.most

    @abstractmethod
    def rate(self, parts: Sequence[Part], part: Part, share: int) -> int:
        """Work per tick of the job with that part, which is among all parts there.

        The device has this share of a GPU, in thousandths.
        """


def _alone(part: Part, share: int) -> int:
    """The rate of a job that has a device for itself: what it keeps busy, or all that is there."""
    return min(WORK, WORK * share // part.compute)


@final
@dataclass(frozen=True, slots=True)
class Exclusive(Sharing):
    """One job per GPU or slice."""

    most: int = 1
    wants_whole: ClassVar[bool] = True

    def rate(self, parts: Sequence[Part], part: Part, share: int) -> int:
        """All of it."""
        del parts
        return _alone(part, share)


@final
@dataclass(frozen=True, slots=True)
class TimeSliced(Sharing):
    """Up to `most` jobs take turns: the driver's, or those of books of fractions."""

    most: int = 2

    def rate(self, parts: Sequence[Part], part: Part, share: int) -> int:
        """The nth part of its rate alone."""
        return _alone(part, share) // len(parts)


@final
@dataclass(frozen=True, slots=True)
class SideBySide(Sharing):
    """Up to `most` jobs at once, as under MPS: slowed down only by what they want beyond the whole.

    Attributes:
        packs: Whether jobs are admitted only while their compute fits the GPU (Gandiva's packing).
    """

    most: int = 2
    packs: bool = False

    def admits(self, parts: Sequence[Part], part: Part) -> bool:
        """As all, and within the GPU's compute where `packs`."""
        if len(parts) >= self.most or not parts or not self.packs:
            return len(parts) < self.most
        left = WHOLE - part.compute
        for other in parts:  # a sum over a generator takes twice as long
            left -= other.compute
        return left >= 0

    def rate(self, parts: Sequence[Part], part: Part, share: int) -> int:
        """`min(limit, share / sum of compute)`."""
        wanted = sum(other.compute for other in parts)
        return min(WORK, WORK * min(part.limit, share) // part.compute, WORK * share // wanted)


@final
@dataclass(frozen=True, slots=True)
class Job:
    """A job of a trace. Times are integer ticks of one unit for a whole trace, seconds for most.

    Attributes:
        name: Unique in its trace.
        gpus: How many GPUs it holds at once; all of them or none (a gang).
        duration: How long it runs on whole GPUs of speed 1.
        memory_bytes: What it holds on each of its GPUs.
        compute: The share of a GPU that it keeps busy when alone on it, in thousandths.
        limit: The share of a GPU that it may use at most (an MPS limit), in thousandths.
        graph: Its operators, for the scheme `baechi`, which then decides on how many devices and
            with how much memory on each.
        placement: How its graph is split over `gpus` devices, for the scheme `AsPlaced`.
        step_ns: What one step of the graph takes where `duration` was measured; the prediction on
            one device with room for everything if 0.
        most_gpus: Over how many GPUs its graph may be split; `gpus` if 0.
        owner: The user or tenant whose it is.
        priority: Higher is more urgent; below 0 it is opportunistic.
        kinds: Its speed on kinds of GPU, in thousandths, times `Gpu.speed`; 1,000 on others.
        curve: Its rate on 1, 2, ... GPUs, in thousandths of that on `gpus`: a policy may give it
            so many. Without one it takes `gpus`.
        across: Its rate where it is on several nodes of a switch, and on several switches, in
            thousandths; a split graph is predicted with its links instead.
        stages: How long an iteration needs each resource (input, CPU and GPU, network), any unit.
        iteration: How long an iteration takes alone, in that unit.

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
    owner: str = ""
    priority: int = 0
    kinds: tuple[tuple[str, int], ...] = ()
    curve: tuple[int, ...] = ()
    across: tuple[int, int] = (WHOLE, WHOLE)
    stages: tuple[int, ...] = ()
    iteration: int = 0

    def __post_init__(self) -> None:
        check_name(self.name, "a job's name")
        for name in ("gpus", "submit_time", "duration", "memory_bytes", "step_ns", "most_gpus"):
            check_count(getattr(self, name), f"{name} of job {self.name!r}")
        check_positive(self.gpus, f"gpus of job {self.name!r}")
        for name in ("compute", "limit"):
            what = f"{name} of job {self.name!r}, in thousandths of a GPU,"
            check_positive(getattr(self, name), what, WHOLE)
        for rate in (*self.curve, *self.across, *(speed for _, speed in self.kinds)):
            check_positive(rate, f"a rate of job {self.name!r}, in thousandths,")
        if self.curve and (len(self.curve) < self.gpus or self.curve[self.gpus - 1] != WHOLE):
            raise InputError(
                f"the curve of job {self.name!r} is {self.curve}; it must be {WHOLE} for "
                f"{self.gpus} GPUs, which its duration is for."
            )

    @property
    def part(self) -> Part:
        """Its share of each of its GPUs."""
        asked = self.memory_bytes, self.compute, self.limit
        return Part(*asked, self.stages, self.iteration, self.priority < 0)

    def speed_on(self, kind: str) -> int:
        """Its speed on a kind of GPU, in thousandths."""
        return next((speed for name, speed in self.kinds if name == kind), WHOLE)

    @property
    def shape(self) -> object:
        """All that a scheme looks at: jobs of equal shape fit on the same GPUs."""
        asked = self.gpus, self.memory_bytes, self.compute, self.limit
        parts = self.stages, self.iteration, self.priority < 0
        return *asked, *parts, id(self.graph), id(self.placement), self.step_ns, self.most_gpus


def clocked(rate: int, compute: int, clock: int) -> int:
    """A rate at a clock below the full one: the time in which the GPU is busy grows as it falls.

    Args:
        rate: At the full clock.
        compute: `Job.compute`.
        clock: In thousandths of the full one.
    """
    return rate * WHOLE * clock // (compute * WHOLE + (WHOLE - compute) * clock)


def draw(compute: int, clock: int) -> int:
    """What a job draws of a GPU's `watts`, in thousandths: by the cube of the clock while busy."""
    return clocked(compute, compute, clock) * clock**2 // WHOLE**2


def amdahl(gpus: int, most: int, serial: float) -> tuple[int, ...]:
    """The curve of a job of `gpus` of which a part is serial, up to `most` GPUs: Amdahl's law.

    Raises:
        InputError: The serial part is not from 0 to 1.
    """
    if not 0 <= serial <= 1:
        raise InputError(f"the serial part of a job is {serial}; give 0 to 1.")

    def time(count: int) -> float:
        return serial + (1 - serial) / count

    return tuple(max(1, round(WHOLE * time(gpus) / time(n))) for n in range(1, most + 1))


@final
@dataclass(frozen=True, slots=True)
class Grant:
    """The GPUs of a job.

    Attributes:
        gpus: Their indices; empty where they are only counted.
        parts: Its share of each of them.
        rate: Work per tick on whole GPUs: below `WORK` where being split slows the job down.
        sending: The part of its time that it sends on the uplinks of its nodes, in thousandths.
    """

    gpus: tuple[int, ...] = ()
    parts: tuple[Part, ...] = ()
    rate: int = WORK
    sending: int = 0


@final
@dataclass(eq=False, slots=True)
class JobRun:
    """The state of a job, as policies see it; what it counts is as in `Outcome`.

    Attributes:
        job: Its `duration` is for policies that know the future.
        index: Its rank by arrival time.
        running: Whether it holds GPUs.
        grant: The GPUs that it holds or held last.
        start_time: As in `Outcome`; -1 before, as is `end_time`.
        resume: How often it got GPUs.
        promote: The policy counts these.
        clock: The clock of its GPUs, in thousandths of the full one; a policy sets it.
        slowed: What jobs on its links leave of its rate, in thousandths, where that is modeled.
        rate: Its work per tick while it runs.
        asked: The size of the allocation that it has, where a policy allocates.
        version: Counts changes of its end: an event of an older one is stale.
    """

    job: Job
    index: int
    running: bool = False
    done: bool = False
    grant: Grant = Grant()
    start_time: int = -1
    end_time: int = -1
    preempt: int = 0
    resume: int = 0
    promote: int = 0
    overhead: int = 0
    clock: int = WHOLE
    slowed: int = WHOLE
    rate: int = 0
    asked: int = 0
    version: int = 0
    _remaining: int = field(init=False)
    _since: int = field(init=False)
    _ran: int = 0
    _waited: int = 0

    def __post_init__(self) -> None:
        self._remaining = self.job.duration * WORK
        self._since = self.job.submit_time

    def attained(self, now: int) -> int:
        """Ticks for which it has held GPUs."""
        return self._ran + now - self._since if self.running else self._ran

    def waited(self, now: int) -> int:
        """Ticks that it has waited since it arrived."""
        return self._waited if self.running else self._waited + now - self._since

    def remaining(self, now: int) -> int:
        """Ticks that it would still run on whole GPUs of speed 1, rounded up."""
        work = self._remaining
        if self.running:
            work -= self.rate * (now - self._since)
        return max(0, -(-work // WORK))

    def settle(self, now: int) -> None:
        """Books the time since the last change."""
        passed = now - self._since
        if self.running:
            self._ran += passed
            self._remaining = max(0, self._remaining - self.rate * passed)
        else:
            self._waited += passed
        self._since = now

    def add_overhead(self, ticks: int) -> None:
        """Adds work, for a restart."""
        self.overhead += ticks
        self._remaining += ticks * WORK

    def lose(self, now: int, ticks: int) -> None:
        """Takes back what it did in so many of the last ticks; it ends later."""
        self.settle(now)
        self._remaining += self.rate * ticks
        self.version += 1

    def ends_at(self) -> int:
        """The time of its end at its present rate; after `settle`."""
        return self._since - (-self._remaining // self.rate)

    def outcome(self, *, resumes: bool) -> "Outcome":
        """Its outcome; after it is done."""
        return Outcome(
            self.job,
            self.start_time,
            self.end_time,
            self._waited,
            self.preempt,
            self.resume if resumes else 0,
            self.promote,
            self.overhead,
            self.grant.gpus,
            tuple(part.memory_bytes for part in self.grant.parts),
        )


# The time of the end; index and version of the job, which break ties; the job.
_End = tuple[int, int, int, JobRun]


class Events:
    """Arrivals, and the ends of running jobs: a heap, in which ends at former rates are stale."""

    def __init__(self, arrivals: Iterable[int]) -> None:
        self._arrivals = sorted(set(arrivals), reverse=True)
        self._ends: list[_End] = []
        self._most = 64  # entries, before the stale ones are dropped

    @property
    def arrival(self) -> int | None:
        """The time of the next arrival."""
        return self._arrivals[-1] if self._arrivals else None

    @property
    def end(self) -> int | None:
        """The time of the next end."""
        while self._ends and not _is_fresh(self._ends[0]):
            heappop(self._ends)
        return self._ends[0][0] if self._ends else None

    def add(self, run: JobRun) -> None:
        """The end of a job at its present rate; earlier entries become stale."""
        heappush(self._ends, (run.ends_at(), run.index, run.version, run))
        if len(self._ends) > self._most:
            self._ends = list(filter(_is_fresh, self._ends))
            heapify(self._ends)
            self._most = 64 + 4 * len(self._ends)

    def next(self) -> int | None:
        """The time of the next arrival or end; `None` if none is left."""
        return min((time for time in (self.arrival, self.end) if time is not None), default=None)

    def take(self, now: int) -> list[JobRun]:
        """Removes the jobs that have ended by now; by end, and at one time by arrival."""
        if self._arrivals and self._arrivals[-1] <= now:
            self._arrivals.pop()
        ended = []
        while self._ends and self._ends[0][0] <= now:
            end = heappop(self._ends)
            if _is_fresh(end):
                ended.append(end[3])
        return ended

    def ending_at(self, time: int) -> list[JobRun]:
        """The jobs that end at that time, by arrival."""
        found = [end[3] for end in self._ends if end[0] == time and _is_fresh(end)]
        return sorted(found, key=lambda run: run.index)


def _is_fresh(end: _End) -> bool:
    return end[3].version == end[2]


@final
@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a job.

    Attributes:
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
