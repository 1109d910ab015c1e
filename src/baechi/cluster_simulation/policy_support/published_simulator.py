"""Defects of the published simulator of Tiresias that its results need.

docs/cluster.md lists it all.
"""

from collections.abc import Iterable, Iterator
from typing import final

from baechi.cluster_simulation.jobs import Events, JobRun
from baechi.cluster_simulation.policy_support.policy import Policy


@final
class PublishedLongestPending(Policy):
    """As the published simulator: a misspelled field does not sort, and starts spoil the walk."""

    name = "lpjf"
    blocking = True

    def walk(self, runs: list[JobRun]) -> Iterator[JobRun]:
        """Without the job behind each one that starts: it is taken out of the list on the way."""
        walk = iter(runs)
        for run in walk:
            yield run
            if run.running:
                next(walk, None)


@final
class PublishedEvents(Events):
    """Ends that fall on the next arrival, as the published simulator notes them."""

    def __init__(self, arrivals: Iterable[int]) -> None:
        super().__init__(arrivals)
        self._noted: list[JobRun] = []

    def next(self) -> int | None:
        """As always; notes the jobs that are to end with the next arrival."""
        if self.end is not None and self.end == self.arrival:
            self._noted = self.ending_at(self.end)
        return super().next()

    def take(self, now: int) -> list[JobRun]:
        """Noted jobs end with the arrival, unless others end then."""
        arrives = self.arrival is not None and self.arrival <= now
        ended = super().take(now)
        if arrives:
            ended, self._noted = ended or self._noted, []
        return ended
