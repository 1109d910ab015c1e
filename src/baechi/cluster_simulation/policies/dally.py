"""Timers for how near a job's GPUs must be, tuned by past waits: Dally.

The rule (Sharma et al., "GPU Cluster Scheduling for Network-Sensitive Deep Learning", 2024, arXiv
2401.16492): delay scheduling with three components. A job waits for GPUs of one machine until a
timer runs out, then for those of one rack, then takes any. The timers tune themselves: each is what
jobs that did get such GPUs have waited for them of late. And jobs that suffer most from the network
go first, with preemption: those that have made the least progress for the time since they arrived,
against what they would make on near GPUs.

Where we leave it: a timer is the mean of the last ten such waits for jobs of as many GPUs, times
two, and 300 ticks before there is one. Priorities are looked at every 300 ticks, as at each event a
job might lose its GPUs soon after it got them. Who runs far apart is not moved while it keeps its
GPUs. The paper's simulator of networks is here `Job.across`.
"""

from collections import deque
from collections.abc import Sequence
from statistics import fmean
from typing import Final, final

from baechi.cluster_simulation.jobs import JobRun
from baechi.cluster_simulation.policy_support.allocation import Allocation, ClusterView, RoundPolicy
from baechi.cluster_simulation.policy_support.locality import LEVELS, distance, in_order

_TIMER: Final = 300
_WAITS: Final = 10
_MARGIN: Final = 2


@final
class Dally(RoundPolicy):
    """The least progress first, on GPUs as near as its timers still ask for."""

    name = "dally"
    round_ticks = 300

    def __init__(self, ticks: int | None = None) -> None:
        super().__init__(ticks)
        self._waits: dict[tuple[int, int], deque[int]] = {}  # by GPUs and level
        self._noted: dict[int, int] = {}  # how often a job had started when its wait was noted
        self._stopped: dict[int, int] = {}  # what a job had waited when it last ran

    def timer(self, gpus: int, level: int) -> int:
        """How long a job of so many GPUs insists on a level."""
        waits = self._waits.get((gpus, level))
        return round(_MARGIN * fmean(waits)) if waits else _TIMER

    def insists(self, run: JobRun, now: int) -> tuple[int, int | None]:
        """How near its GPUs must be, by what it has waited since it last ran, and for how long."""
        left = self._stopped.get(run.index, 0) - run.waited(now)
        for level in range(LEVELS - 1):
            left += self.timer(run.job.gpus, level)
            if left > 0:
                return level, left
        return LEVELS - 1, None

    def wake(self, runs: Sequence[JobRun], now: int) -> int | None:
        """The next round, or the time at which a waiting job insists on less."""
        turn = super().wake(runs, now)
        waiting = (self.insists(run, now)[1] for run in runs if not run.running)
        times = [now + left for left in waiting if left is not None]
        return min([turn, *times]) if turn is not None else None

    def decide(self, view: ClusterView) -> Sequence[Allocation]:
        """By progress; those of equal progress in order of arrival."""
        self._note(view)
        order = sorted(view.runs, key=lambda run: (self._progress(run, view.now), run.index))
        return view.or_first(in_order(view, order, lambda run: self.insists(run, view.now)[0]))

    def fill(self, view: ClusterView) -> Sequence[Allocation]:
        """In the middle of a round nobody loses GPUs."""
        self._note(view)
        running = [run for run in view.runs if run.running]
        order = [*running, *(run for run in view.runs if not run.running)]
        return in_order(view, order, lambda run: self.insists(run, view.now)[0])[len(running) :]

    def _progress(self, run: JobRun, now: int) -> float:
        """The work that is done, over the time since it arrived; below 1, and 1 for a new job."""
        since = now - run.job.submit_time
        return (run.job.duration - run.remaining(now)) / since if since else 1.0

    def _note(self, view: ClusterView) -> None:
        """Notes the waits of jobs that have started since, by the level that they got."""
        fleet = view.devices.fleet
        for run in view.runs:
            if run.running and self._noted.get(run.index) != run.resume:
                self._noted[run.index] = run.resume
                waited = run.waited(view.now)
                key = run.job.gpus, distance(fleet, run.grant.gpus)
                row = self._waits.setdefault(key, deque(maxlen=_WAITS))
                row.append(waited - self._stopped.get(run.index, 0))
                self._stopped[run.index] = waited
