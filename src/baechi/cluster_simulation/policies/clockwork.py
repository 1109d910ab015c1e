"""Jobs with a deadline, in the order in which they must start to meet it: Clockwork.

The rule (Gujarati et al., "Serving DNNs like Clockwork: Performance Predictability from the Bottom
Up", OSDI'20): how long a request will take is known. It must have started by its deadline less
that time, and requests are taken in the order of these times, one at a time on a GPU.
An action is not sent where it would come too late, and a request that no GPU can finish in time any
more is rejected, so that it does not make others late.

Where we leave it: nobody is rejected here, as no job of a simulation is lost; who is too late, and
who has no deadline (priority below 0), goes last, in order of arrival. A deadline is ten times what
the job takes where it is fastest, from its arrival. The time is predicted for each kind of GPU.
There are no batches of requests, and no loading of models.
"""

from collections.abc import Sequence
from typing import Final, final

from baechi.cluster_simulation.jobs import JobRun
from baechi.cluster_simulation.policy_support.allocation import (
    AllocatingPolicy,
    Allocation,
    ClusterView,
)

_SLO: Final = 10  # as 100 ms for requests that take some ms


@final
class Clockwork(AllocatingPolicy):
    """The earliest time to start at first."""

    name = "clockwork"

    def __init__(self, slo: float = _SLO) -> None:
        self._slo = slo
        self._alone: dict[int, float] = {}  # what a job takes where it is fastest

    def allocate(self, view: ClusterView) -> Sequence[Allocation]:
        """The running jobs, and the first that find GPUs on which they are not too late."""
        answer = view.kept()
        free = view.idle_by_kind
        waiting = list(view.waiting)
        times = {
            run.index: [view.time_left(run, kind=kind) for kind in view.kinds] for run in waiting
        }
        for run in waiting:
            self._alone.setdefault(run.index, min(*times[run.index], view.time_left(run)))
        latest = {run.index: self._latest(run) for run in waiting}
        late = {index for index, time in latest.items() if time < view.now}
        waiting.sort(
            key=lambda r: (r.index in late, r.index not in late and latest[r.index], r.index)
        )
        for run in waiting:
            due = latest[run.index] + self._alone[run.index]
            if run.index in late:
                due = float("inf")
            for time, (place, kind) in sorted(
                zip(times[run.index], enumerate(view.kinds), strict=True)
            ):
                needs = view.needs(run, kind)
                if time < float("inf") and needs <= free[place] and view.now + time <= due:
                    free[place] -= needs
                    answer.append(Allocation(run, among=view.kinds[kind]))
                    break
        wide = [run for run in waiting if min(times[run.index]) == float("inf")]
        return [*answer, *view.on_best_kinds(wide, free)]

    def wake(self, runs: Sequence[JobRun], now: int) -> int | None:
        """The time at which the first job that waits becomes too late."""
        waiting = (run for run in runs if not run.running)
        times = [int(self._latest(run)) + 1 for run in waiting if now <= self._latest(run)]
        return min(times, default=None)

    def _latest(self, run: JobRun) -> float:
        """When it must have started; before all times if it has no deadline."""
        if run.job.priority < 0:
            return -1.0
        return run.job.submit_time + (self._slo - 1) * self._alone[run.index]
