"""Shortest remaining time, and shortest remaining GPU-time: policies that are told the future.

By remaining time, a waiting job's key stands still and all running jobs' keys fall alike. So the
order of the running jobs is that of their ends, and jobs that wait for equally many GPUs are in a
heap of their own: an event costs the jobs that change, and the running jobs behind the first one
that waits, instead of a sort of all jobs. Ties are broken as the stable sort in `order` does, which
tests compare with: a waiting job goes before a running one that has just caught up with it, a new
one behind all.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import final

from baechi.scheduling.policies import Policy
from baechi.scheduling.runs import Run

# (remaining time while waiting, or end while running; the event that it came at; rank; the job)
_Entry = tuple[int, int, int, Run]


@final
class ShortestGpuTime(Policy):
    """The least remaining time times GPUs first, preempting."""

    name = "shortest-gpu"
    preemptive = True

    def order(self, runs: list[Run], now: int) -> list[Run]:
        """By remaining GPU-time; equals stay as they were."""
        return sorted(runs, key=lambda run: run.remaining(now) * run.job.gpus)


@final
class ShortestTime(Policy):
    """The least remaining time first, preempting."""

    name = "shortest"
    preemptive = True

    def __init__(self) -> None:
        self._waiting: dict[int, list[_Entry]] = {}  # by GPUs
        self._running: list[_Entry] = []
        self._event = 0
        self._rank = 0

    def order(self, runs: list[Run], now: int) -> list[Run]:
        """By remaining time; equals stay as they were."""
        return sorted(runs, key=lambda run: run.remaining(now))

    def select(
        self, now: int, arrived: Sequence[Run], ended: Sequence[Run], free: int
    ) -> tuple[list[Run], list[Run]]:
        """As a walk over `order`, from the heaps."""
        self._event += 1
        del self._running[: len(ended)]
        for run in arrived:
            self._wait(run, now, new=1)
        stops, starts = self._walk(now, free)
        for _, event, rank, run in reversed(starts):
            # Behind its equals if it is new, else before them.
            stamp = self._event if event == 2 * self._event + 1 else -self._event
            insort(self._running, (now + run.remaining(now), stamp, rank, run))
        for run in stops:
            self._wait(run, now, new=0)
        return stops, [entry[3] for entry in starts]

    def _walk(self, now: int, free: int) -> tuple[list[Run], list[_Entry]]:
        """Gives GPUs to the waiting, and to the running jobs behind the first of them, in order."""
        heads = [row[0] for row in self._waiting.values() if row]
        if not heads:
            return [], []
        remaining, event, _, _ = min(heads)
        old = event != 2 * self._event + 1
        first = bisect_left(self._running, (now + remaining, -(1 << 62) if old else 1 << 62))
        behind = self._running[first:]
        free += sum(entry[3].job.gpus for entry in behind)
        kept: list[_Entry] = []
        stops: list[Run] = []
        starts: list[_Entry] = []
        place = 0
        while True:
            fitting = [row[0] for gpus, row in self._waiting.items() if row and gpus <= free]
            if not fitting:
                break
            best = min(fitting)
            if place < len(behind) and self._before(behind[place], best, now):
                entry = behind[place]
                place += 1
                gpus = entry[3].job.gpus
                if gpus <= free:
                    free -= gpus
                    kept.append(entry)
                else:
                    stops.append(entry[3])
            else:
                heappop(self._waiting[best[3].job.gpus])
                free -= best[3].job.gpus
                starts.append(best)
        for entry in behind[place:]:
            gpus = entry[3].job.gpus
            if gpus <= free:
                free -= gpus
                kept.append(entry)
            else:
                stops.append(entry[3])
        if stops:
            self._running[first:] = kept
        return stops, starts

    def _before(self, running: _Entry, waiting: _Entry, now: int) -> bool:
        """Whether a running job goes before a waiting one: a new one is behind its equals."""
        left = running[0] - now
        return left < waiting[0] or (left == waiting[0] and waiting[1] == 2 * self._event + 1)

    def _wait(self, run: Run, now: int, *, new: int) -> None:
        """Queues a job; at one event, the preempted go before the new."""
        self._rank += 1
        row = self._waiting.setdefault(run.job.gpus, [])
        heappush(row, (run.remaining(now), 2 * self._event + new, self._rank, run))
