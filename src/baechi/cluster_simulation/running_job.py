"""The state of a job in the simulated cluster, the calendar of events, and a check for stalls."""

from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from typing import Final, final

from baechi.cluster_simulation.contention import WORK
from baechi.cluster_simulation.free_devices import Grant
from baechi.cluster_simulation.jobs import Job, Outcome

# Events without an arrival or an end between two looks at the remaining work.
_EVENTS: Final = 10_000


class JobRun:
    """The state of a job, as policies see it.

    Attributes:
        job: The job; its `duration` is for policies that know the future.
        index: Its rank by arrival time.
        running: Whether it holds GPUs.
        done: Whether it has ended.
        grant: The GPUs that it holds or held last.
        start_time: When it first held GPUs, -1 before.
        preempt: How often it lost them.
        promote: How often a policy put it back into its first queue; the policy counts.
    """

    __slots__ = (
        "_ran",
        "_remaining",
        "_since",
        "_waited",
        "done",
        "end_time",
        "grant",
        "index",
        "job",
        "overhead",
        "preempt",
        "promote",
        "rate",
        "resume",
        "running",
        "start_time",
        "version",
    )

    def __init__(self, job: Job, index: int) -> None:
        self.job = job
        self.index = index
        self.running = self.done = False
        self.grant: Grant | None = None
        self.start_time = self.end_time = -1
        self.preempt = self.resume = self.promote = self.overhead = 0
        self.rate = 0
        self.version = 0  # of its end: an event of an older one is stale
        self._remaining = job.duration * WORK
        self._since = job.submit_time
        self._ran = self._waited = 0

    @property
    def held(self) -> Grant:
        """The GPUs that it has, or had last; only after it has started."""
        assert self.grant is not None, "the job has not started"
        return self.grant

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

    def ends_at(self) -> int:
        """The time of its end at its present rate; after `settle`."""
        return self._since - (-self._remaining // self.rate)

    def outcome(self, *, resumes: bool) -> Outcome:
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
            self.grant.gpus if self.grant is not None else (),
            tuple(part.memory_bytes for part in self.grant.parts) if self.grant is not None else (),
        )


# The time of the end; index and version of the job, which break ties; the job.
_End = tuple[int, int, int, JobRun]


class Events:
    """Arrivals, and the ends of running jobs: a heap, in which ends at former rates are stale.

    Memory is linear in the jobs that have yet to arrive or run.
    """

    def __init__(self, arrivals: Iterable[int]) -> None:
        self._arrivals = sorted(set(arrivals), reverse=True)
        self._heap: list[_End] = []

    @property
    def arrival(self) -> int | None:
        """The time of the next arrival."""
        return self._arrivals[-1] if self._arrivals else None

    def add(self, run: JobRun) -> None:
        """The end of a job at its present rate; earlier entries become stale."""
        heappush(self._heap, (run.ends_at(), run.index, run.version, run))

    def next(self, running: int) -> int | None:
        """The time of the next arrival or end, where so many jobs run; `None` if none is left."""
        times = (self.arrival, self.first_end(running))
        return min((time for time in times if time is not None), default=None)

    def take(self, now: int) -> list[JobRun]:
        """Removes the jobs that have ended by now; by end, and at one time by arrival."""
        if self._arrivals and self._arrivals[-1] <= now:
            self._arrivals.pop()
        found = []
        while self._heap and self._heap[0][0] <= now:
            _, _, version, run = heappop(self._heap)
            if run.version == version:
                found.append(run)
        return found

    def first_end(self, running: int) -> int | None:
        """The time of the next end, where so many jobs run; `None` if none does."""
        heap = self._heap
        while heap and heap[0][3].version != heap[0][2]:
            heappop(heap)
        if len(heap) > 64 + 4 * running:
            heap[:] = [end for end in heap if end[3].version == end[2]]
            heapify(heap)
        return heap[0][0] if heap else None

    def ending_at(self, time: int) -> list[JobRun]:
        """The jobs that end at that time, by arrival."""
        found = [end[3] for end in self._heap if end[0] == time and end[3].version == end[2]]
        return sorted(found, key=lambda run: run.index)


@final
class StallDetector:
    """Notices a simulation that would never end: preemptions cost jobs all that they get done.

    Keeps the least remaining work, in all and of one job, since the last arrival or end.
    """

    def __init__(self) -> None:
        self._events = 0
        self._least: tuple[int, int] | None = None

    def is_stalled(self, runs: Iterable[JobRun], now: int, *, moves: bool) -> bool:
        """True if for many events nothing has ended and the remaining work has not fallen.

        Args:
            runs: All jobs.
            now: The time.
            moves: Whether a job has just arrived or ended, or will arrive.
        """
        if moves:
            self._events, self._least = 0, None
            return False
        self._events += 1
        if self._events % _EVENTS:
            return False
        left = [run.remaining(now) for run in runs if not run.done]
        here = sum(left), min(left, default=0)
        before = self._least or (here[0] + 1, here[1] + 1)
        self._least = min(before[0], here[0]), min(before[1], here[1])
        return self._least == before
