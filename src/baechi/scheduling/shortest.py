"""Shortest remaining time, and shortest remaining GPU-time: policies that are told the future.

By remaining time, a waiting job's key stands still and all running jobs' keys fall alike. So the
order of the running jobs is that of their ends, and jobs that wait for equally many GPUs are in a
heap of their own: an event costs the jobs that change, and the running jobs behind the first one
that waits, instead of a sort of all jobs. Ties are broken as the stable sort in `order` does, which
tests compare with: a waiting job goes before a running one that has just caught up with it, a new
one behind all. Only where a job of zero length makes two events of one moment, may equals be in
another order.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import accumulate
from typing import Final, final

from baechi.scheduling.policies import Policy
from baechi.scheduling.runs import Run

# (remaining time while waiting, or end while running; the event that it came at; rank; the job)
_Entry = tuple[int, int, int, Run]

_LAST: Final = 1 << 62  # beyond every event


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
        self._count = 0

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
        for entry in starts:
            end, sign = self._place_of(entry, now)
            stamp = self._event if sign > 0 else -self._event
            insort(self._running, (end, stamp, entry[2], entry[3]))
        for run in stops:
            self._wait(run, now, new=0)
        return stops, [entry[3] for entry in starts]

    def _walk(self, now: int, free: int) -> tuple[list[Run], list[_Entry]]:
        """Gives GPUs to the waiting, and to the running jobs behind the first of them, in order."""
        heads = [row[0] for row in self._waiting.values() if row]
        if not heads:
            return [], []
        first = bisect_left(self._running, self._place_of(min(heads), now))
        behind = self._running[first:]
        sums = [0, *accumulate(entry[3].job.gpus for entry in behind)]
        free += sums[-1]
        kept: list[_Entry] = []
        stops: list[Run] = []
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
                    stops.append(entry[3])
            elif best is not None:
                heappop(self._waiting[needed])
                free -= needed
                starts.append(best)
            else:
                break
        if stops:
            self._running[first:] = kept
        return stops, starts

    def _place_of(self, waiting: _Entry, now: int) -> tuple[int, int]:
        """Where a waiting job goes among the running: a new one behind its equals, else before."""
        is_new = waiting[1] == 2 * self._event + 1
        return now + waiting[0], _LAST if is_new else -_LAST

    def _wait(self, run: Run, now: int, *, new: int) -> None:
        """Queues a job; at one event, the preempted go before the new."""
        self._count += 1
        event = 2 * self._event + new
        rank = (event << 64) + self._count
        row = self._waiting.setdefault(run.job.gpus, [])
        heappush(row, (run.remaining(now), event, rank, run))
