"""When running jobs end: a heap, in which the end of a job whose rate changed since is void."""

from heapq import heapify, heappop, heappush

from baechi.cluster_simulation.running_job import Run

# When it ends, its index and version, which break ties, and the job.
_End = tuple[int, int, int, Run]


class Ends:
    """The ends of running jobs. Memory is linear in the running jobs."""

    def __init__(self) -> None:
        self._heap: list[_End] = []

    def add(self, run: Run) -> None:
        """The end of a job at its present rate; what was known before is void."""
        heappush(self._heap, (run.ends_at(), run.index, run.version, run))

    def first(self, running: int) -> int | None:
        """The time of the next end, where so many jobs run; `None` if none does."""
        heap = self._heap
        while heap and heap[0][3].version != heap[0][2]:
            heappop(heap)
        if len(heap) > 64 + 4 * running:
            heap[:] = [end for end in heap if end[3].version == end[2]]
            heapify(heap)
        return heap[0][0] if heap else None

    def at(self, time: int) -> list[Run]:
        """Who ends at that time, by arrival."""
        found = [end[3] for end in self._heap if end[0] == time and end[3].version == end[2]]
        return sorted(found, key=lambda run: run.index)

    def due(self, now: int) -> list[Run]:
        """Takes out who has ended by now: by end, and of one moment by arrival."""
        found = []
        while self._heap and self._heap[0][0] <= now:
            _, _, version, run = heappop(self._heap)
            if run.version == version:
                found.append(run)
        return found
