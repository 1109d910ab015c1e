"""Jobs of the least remaining time first, from heaps."""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import accumulate
from typing import final

from baechi.cluster_simulation.jobs import JobRun
from baechi.cluster_simulation.policy_support.policy import SelectingPolicy

# Remaining time, event, rank and job while waiting; while running its end, what orders equals
# (plus the moment if it was new, minus the moment if it had waited), rank and job.
_Entry = tuple[int, int, int, JobRun]


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
