"""Gandiva's time slicing."""

from typing import final

from baechi.cluster_simulation.jobs import JobRun
from baechi.cluster_simulation.policy_support.policy import Periodic


@final
class TimeSlicing(Periodic):
    """Gandiva's round robin (OSDI'18): at a new quantum, those that held GPUs least go first."""

    name = "gandiva"
    quantum_ticks = 60

    def _dealt(self, runs: list[JobRun], now: int) -> list[JobRun]:
        return sorted(runs, key=lambda run: (run.attained(now), run.index))
