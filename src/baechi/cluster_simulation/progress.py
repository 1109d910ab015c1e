"""Notices a simulation that would go on for ever: jobs lose by preemptions what they get done."""

from collections.abc import Iterable
from typing import Final, final

from baechi.cluster_simulation.running_job import Run

# Events without an arrival or an end between two looks at what is left to do.
_EVENTS: Final = 10_000


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
