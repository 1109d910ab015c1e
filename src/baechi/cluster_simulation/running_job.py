"""A job on its way through the simulated cluster: the one value that changes."""

from baechi.cluster_simulation.contention import WORK
from baechi.cluster_simulation.free_devices import Grant
from baechi.cluster_simulation.jobs import Job, Outcome


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
        self.version = 0  # of its end: an event of an older one is void
        self._remaining = job.duration * WORK
        self._since = job.submit_time
        self._ran = self._waited = 0

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
