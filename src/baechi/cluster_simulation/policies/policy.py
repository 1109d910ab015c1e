"""The interface of policies, which choose the jobs that hold GPUs, and all but Tiresias's.

A policy orders the jobs; the simulator gives GPUs in that order (`simulator.py`). Without
preemption the order is of the waiting jobs; with it, of all jobs, and those for which nothing is
left lose their GPUs. Jobs come in the order that the policy gave last, new ones behind, so that a
stable sort breaks ties as the published simulators do. docs/cluster.md has a policy of your own.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from heapq import heappop, heappush
from itertools import accumulate
from typing import ClassVar, Final, final

from baechi.cluster_simulation.fleet import FreeDevices
from baechi.cluster_simulation.jobs import WORK, Events, Grant, Job, JobRun
from baechi.validation import check_positive

_LOOKS: Final = 3  # of the next ends
# Remaining time, event, rank and job while waiting; while running its end, what orders equals
# (plus the moment if it was new, minus the moment if it had waited), rank and job.
_Entry = tuple[int, int, int, JobRun]


@final
@dataclass(frozen=True, slots=True)
class Offer:
    """GPUs that a job could have now, beside the jobs that run."""

    run: JobRun
    grant: Grant
    now: int
    running: Iterable[JobRun]
    devices: FreeDevices

    @property
    def rate(self) -> int:
        """Its work per tick on them, beside the jobs that are there."""
        return self.devices.rate(self.grant, joins=True)

    def rate_after(self, ended: Sequence[JobRun]) -> int:
        """Its work per tick on the GPUs that it would get if others had ended; 0 for none."""
        for other in ended:
            self.devices.give(other)
        grant = self.devices.place(self.run.job)
        rate = self.devices.rate(grant, joins=True) if grant is not None else 0
        for other in reversed(ended):
            self.devices.take(other, other.grant)
        return rate


class Policy(ABC):
    """Orders jobs.

    Attributes:
        name: Its name on the command line and in results.
        preemptive: Whether running jobs may lose their GPUs.
        blocking: Whether the first job that finds no room holds up all behind it.
        counts: Whether GPUs are only counted, whatever the scheme.
        gpus: The size of the cluster, once a simulation has begun.
    """

    name: str
    preemptive: ClassVar[bool] = False
    blocking: ClassVar[bool] = False
    counts: bool = False
    gpus: int = 1

    def events(self, admitted: Sequence[Job], refused: Sequence[Job]) -> Events:
        """The calendar of a simulation of these jobs, of which some can never run."""
        del refused
        return Events(job.submit_time for job in admitted)

    def order(self, runs: list[JobRun], now: int) -> list[JobRun]:
        """The jobs, most urgent first; all of them."""
        del now
        return runs

    def walk(self, runs: list[JobRun]) -> Iterator[JobRun]:
        """The waiting jobs in turn, without preemption; each is `running` next if it started."""
        return iter(runs)

    def wake(self, runs: Sequence[JobRun], now: int) -> int | None:
        """The time at which the order changes without an arrival or end; `None` if it does not."""
        del runs, now
        return None

    def accepts(self, offer: Offer) -> bool:
        """True if a job takes the GPUs that it is offered; if not, it waits for the next event."""
        del offer
        return True


class SelectingPolicy(Policy):
    """A policy that need not look at every job at every event, where GPUs are only counted.

    It is asked for `order` only where a scheme places jobs, or where preemption costs work.
    """

    @abstractmethod
    def select(
        self, now: int, arrived: Sequence[JobRun], ended: Sequence[JobRun], free: int
    ) -> tuple[list[JobRun], list[JobRun]]:
        """The jobs that stop and those that start."""


class Fifo(Policy):
    """In order of arrival, without overtaking: also longest pending first, and Big Brain's."""

    blocking = True

    def __init__(self, name: str = "fifo") -> None:
        self.name = name


@final
class FitJobFirst(Policy):
    """In order of arrival, but a job that finds room overtakes those that do not."""

    def __init__(self, name: str = "fjf") -> None:
        self.name = name


@final
class FewestGpusFirst(Policy):
    """Jobs of fewer GPUs first, preempting those of more."""

    name = "sjf"
    preemptive = True

    def order(self, runs: list[JobRun], now: int) -> list[JobRun]:
        """By GPUs; equals stay as they were."""
        del now
        return sorted(runs, key=lambda run: run.job.gpus)


@final
class ShortestGpuTime(Policy):
    """The least remaining time times GPUs first, preempting."""

    name = "shortest-gpu"
    preemptive = True

    def order(self, runs: list[JobRun], now: int) -> list[JobRun]:
        """By remaining GPU-time; equals stay as they were."""
        return sorted(runs, key=lambda run: run.remaining(now) * run.job.gpus)


@final
class ShortestTime(SelectingPolicy):
    """The least remaining time first, preempting.

    A waiting job's key stands still and all running jobs' keys fall alike. So the order of the
    running jobs is that of their ends, and jobs that wait for equally many GPUs are in a heap of
    their own: an event costs the jobs that change, and the running jobs behind the first one that
    waits. Ties are broken as the stable sort in `order` does, which tests compare with: a waiting
    job goes before a running one that has just caught up with it, a new one behind all. A job of
    zero length makes two events of one moment: at the second, who came or lost its GPUs at the
    first is still where it was then.
    """

    name = "shortest"
    preemptive = True

    def __init__(self) -> None:
        self._waiting: dict[int, list[_Entry]] = {}  # by GPUs
        self._running: list[_Entry] = []
        self._event = 0  # the moment of the last one, from 1
        self._count = 0
        self._stopped: dict[int, tuple[int, int]] = {}  # places that were lost at this moment

    def order(self, runs: list[JobRun], now: int) -> list[JobRun]:
        """By remaining time; equals stay as they were."""
        return sorted(runs, key=lambda run: run.remaining(now))

    def select(
        self, now: int, arrived: Sequence[JobRun], ended: Sequence[JobRun], free: int
    ) -> tuple[list[JobRun], list[JobRun]]:
        """As a walk over `order`, from the heaps."""
        if now >= self._event:
            self._event = now + 1
            self._stopped.clear()
        del self._running[: len(ended)]
        for run in arrived:
            self._wait(run, now, new=1)
        stops, starts = self._walk(now, free)
        for entry in starts:
            insort(self._running, (*self._place_of(entry, now), entry[3]))
        for _, stamp, rank, run in stops:
            if abs(stamp) == self._event:  # it had just started
                self._queue(run, now, rank)
            else:
                self._stopped[run.index] = stamp, rank
                self._wait(run, now, new=0)
        return [entry[3] for entry in stops], [entry[3] for entry in starts]

    def _walk(self, now: int, free: int) -> tuple[list[_Entry], list[_Entry]]:
        """Gives GPUs to the waiting, and to the running jobs behind the first of them, in order."""
        heads = [row[0] for row in self._waiting.values() if row]
        if not heads:
            return [], []
        first = bisect_left(self._running, self._place_of(min(heads), now))
        behind = self._running[first:]
        sums = [0, *accumulate(entry[3].job.gpus for entry in behind)]
        free += sums[-1]
        kept: list[_Entry] = []
        stops: list[_Entry] = []
        starts: list[_Entry] = []
        place = 0
        while place < len(behind) or free:
            fitting = [row[0] for gpus, row in self._waiting.items() if row and gpus <= free]
            best = min(fitting, default=None)
            needed = best[3].job.gpus if best is not None else 0
            # Running jobs go on together, up to the first waiting job or the first without room.
            last = len(behind)
            if best is not None:
                last = bisect_left(behind, self._place_of(best, now), place)
            enough = bisect_right(sums, sums[place] + free - needed, place) - 1
            jump = min(last, enough)
            kept += behind[place:jump]
            free -= sums[jump] - sums[place]
            place = jump
            if place < last:
                entry = behind[place]
                place += 1
                if entry[3].job.gpus <= free:
                    free -= entry[3].job.gpus
                    kept.append(entry)
                else:
                    stops.append(entry)
            elif best is not None:
                heappop(self._waiting[needed])
                free -= needed
                starts.append(best)
            else:
                break
        if stops:
            self._running[first:] = kept
        return stops, starts

    def _place_of(self, waiting: _Entry, now: int) -> tuple[int, int, int]:
        """A waiting job's place among the running: a new one behind its equals, else before."""
        remaining, event, rank, run = waiting
        stamp = self._event if event == 2 * self._event + 1 else -self._event
        return now + remaining, *self._stopped.get(run.index, (stamp, rank))

    def _wait(self, run: JobRun, now: int, *, new: int) -> None:
        """Queues a job; at one event, the preempted go before the new."""
        self._count += 1
        self._queue(run, now, (2 * self._event + new << 64) + self._count)

    def _queue(self, run: JobRun, now: int, rank: int) -> None:
        row = self._waiting.setdefault(run.job.gpus, [])
        heappush(row, (run.remaining(now), rank >> 64, rank, run))


class _Periodic(Policy):
    """Deals GPUs out anew at the end of every quantum; in between, jobs keep what they have."""

    preemptive = True

    def __init__(self, quantum: int) -> None:
        self._quantum = check_positive(quantum, "the quantum in ticks")
        self._turn = -1

    def order(self, runs: list[JobRun], now: int) -> list[JobRun]:
        """As dealt anew in a new quantum, else running jobs first."""
        turn = now // self._quantum
        if turn <= self._turn:
            return sorted(runs, key=lambda run: not run.running)
        self._turn = turn
        return self._dealt(runs, now)

    @abstractmethod
    def _dealt(self, runs: list[JobRun], now: int) -> list[JobRun]:
        """The jobs, most urgent first, at the beginning of a quantum."""

    def wake(self, runs: Sequence[JobRun], now: int) -> int | None:
        """The next multiple of the quantum, while a job waits and another runs."""
        mixed = any(run.running for run in runs) and any(not run.running for run in runs)
        return (now // self._quantum + 1) * self._quantum if mixed else None


@final
class TimeSlicing(_Periodic):
    """Gandiva's round robin (OSDI'18): at a new quantum, those that held GPUs least go first."""

    name = "gandiva"

    def __init__(self, quantum: int = 60) -> None:
        super().__init__(quantum)

    def _dealt(self, runs: list[JobRun], now: int) -> list[JobRun]:
        return sorted(runs, key=lambda run: (run.attained(now), run.index))


@final
class FinishTimeFairness(_Periodic):
    """Themis (NSDI'20): leases of GPUs to the jobs that are treated worst.

    We leave out the auction, which makes agents tell the truth about what they gain; a simulator
    knows.
    """

    name = "themis"

    def __init__(self, lease: int = 600) -> None:
        super().__init__(lease)

    def _dealt(self, runs: list[JobRun], now: int) -> list[JobRun]:
        rho = {run.index: self.rho(run, len(runs), now) for run in runs}
        return sorted(runs, key=lambda run: (-rho[run.index], run.index))

    def rho(self, run: JobRun, jobs: int, now: int) -> Fraction:
        """Finish-time fairness if it ran from now on: 1 is fair, above is worse.

        `(time since arrival + remaining time) / time on a fair share alone`. The share is an equal
        part of the cluster among the jobs that are there; a wider job runs slower in proportion.
        """
        job = run.job
        alone = max(Fraction(1), Fraction(job.gpus * jobs, self.gpus)) * max(1, job.duration)
        return (now - job.submit_time + run.remaining(now)) / alone


@final
class SplitOrWait(Policy):
    """Takes the first place, split if need be, unless waiting for the next ends is sooner.

    A job that is offered a place compares when it would end there with when it would end in the
    place that it would get once the next running jobs have ended. Both assume that nothing else
    changes, but for this: what ends is there for one job, so one that waits for it is not waited
    for by those behind.
    """

    name = "split-or-wait"

    def __init__(self) -> None:
        self._claimed: set[int] = set()

    def order(self, runs: list[JobRun], now: int) -> list[JobRun]:
        """In order of arrival; and nobody waits for an end yet."""
        del now
        self._claimed.clear()
        return runs

    def accepts(self, offer: Offer) -> bool:
        """True if waiting for one of the next ends would not end the job sooner."""
        remaining = offer.run.remaining(offer.now) * WORK
        here = offer.now - (-remaining // offer.rate)
        soonest = sorted(offer.running, key=lambda run: (run.ends_at(), run.index))
        ended: list[JobRun] = []
        for other in soonest[:_LOOKS]:
            end = other.ends_at()
            if end >= here:
                break
            if other.index in self._claimed:
                continue
            ended.append(other)
            rate = offer.rate_after(ended)
            if rate and end - (-remaining // rate) < here:
                self._claimed.update(each.index for each in ended)
                return False
        return True
