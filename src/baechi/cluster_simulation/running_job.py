"""Jobs on their way through the simulated cluster: their state, their ends, and their progress."""

from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from typing import Final, final

from baechi.cluster_simulation.contention import WORK
from baechi.cluster_simulation.free_devices import Grant
from baechi.cluster_simulation.jobs import Job, Outcome

# Events without an arrival or an end between two looks at what is left to do.
_EVENTS: Final = 10_000


class Run:
    """What policies see of a job.

    Attributes:
        job: The job; its `duration` is for policies that are told the future.
        index: Its rank by arrival.
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
        """Where it runs, or ran last; after it has started."""
        assert self.grant is not None, "a job that holds nothing was asked for what it holds"
        return self.grant

    def attained(self, now: int) -> int:
        """For how long it has held GPUs."""
        return self._ran + now - self._since if self.running else self._ran

    def waited(self, now: int) -> int:
        """For how long it has waited since it arrived."""
        return self._waited if self.running else self._waited + now - self._since

    def remaining(self, now: int) -> int:
        """For how long it would still run on whole GPUs of speed 1, rounded up."""
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
        """Makes its work longer, for a restart."""
        self.overhead += ticks
        self._remaining += ticks * WORK

    def ends_at(self) -> int:
        """When it ends at its present rate; after `settle`."""
        return self._since - (-self._remaining // self.rate)

    def outcome(self, *, resumes: bool) -> Outcome:
        """What became of it; after it is done."""
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


# When it ends, its index and version, which break ties, and the job.
_End = tuple[int, int, int, Run]


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

    def add(self, run: Run) -> None:
        """The end of a job at its present rate; what was known before is stale."""
        heappush(self._heap, (run.ends_at(), run.index, run.version, run))

    def next(self, running: int) -> int | None:
        """The time of the next arrival or end, where so many jobs run; `None` if none is left."""
        times = (self.arrival, self.first_end(running))
        return min((time for time in times if time is not None), default=None)

    def take(self, now: int) -> list[Run]:
        """Takes out what is due: who has ended by now, by end, and of one moment by arrival."""
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

    def ending_at(self, time: int) -> list[Run]:
        """Who ends at that time, by arrival."""
        found = [end[3] for end in self._heap if end[0] == time and end[3].version == end[2]]
        return sorted(found, key=lambda run: run.index)


@final
class Progress:
    """The least that was left to do, in all and of one job, since the last arrival or end."""

    def __init__(self) -> None:
        self._events = 0
        self._least: tuple[int, int] | None = None

    def is_stuck(self, runs: Iterable[Run], now: int, *, moves: bool) -> bool:
        """Whether for many events nothing ended, and no less is left than there was before.

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
