"""Offline jobs matched to the online jobs beside which they get most done: MuxFlow.

The rule (Zhao et al., "MuxFlow: Efficient and Safe GPU Sharing in Large-Scale Production Deep
Learning Clusters", 2023, arXiv 2303.13803): an online job runs on its GPUs as if alone, and one
offline job beside it on the multiprocessors that it leaves (MPS). Who is beside whom is a matching
of maximum weight between online and offline jobs, where the weight is the throughput of the offline
job there over that alone. It is found anew after every interval.

Where we leave it: the throughput is that of the simulation's sharing (`opportunistic`), not of a
learned predictor, the interval is ours, and the matching is a linear program. Online jobs are those
of priority 0 and more, as for `antman`, which chooses beside whom one by one and for good. They
start on whole GPUs in order of arrival, and offline jobs leave GPUs that they need. Two that share
have equally many GPUs. Offline jobs that are matched to nobody take GPUs that are free.
"""

from collections.abc import Sequence
from typing import Final, final

from baechi.cluster_simulation.jobs import JobRun
from baechi.cluster_simulation.policies.allocation import Allocation, ClusterView, RoundPolicy
from baechi.cluster_simulation.policies.optimal_choices import best_pairs

_INTERVAL: Final = 900


@final
class MuxFlow(RoundPolicy):
    """Online jobs by arrival, and offline ones by a matching."""

    name = "muxflow"

    def __init__(self, interval: int = _INTERVAL) -> None:
        super().__init__(interval)

    def urgent(self, run: JobRun) -> bool:
        """An online job."""
        return run.job.priority >= 0

    def decide(self, view: ClusterView) -> Sequence[Allocation]:
        """The online jobs that fit, who is matched to them, and who fits into the rest."""
        left, hosts = view.total, []
        by_start = sorted(view.runs, key=lambda run: (not run.running, run.index))
        for run in by_start:
            if run.job.priority >= 0 and view.needs(run) <= left:
                left -= view.needs(run)
                hosts.append(run)
        guests = [run for run in by_start if run.job.priority < 0]
        return [*map(Allocation, hosts), *_matched(view, guests, hosts, left)]

    def fill(self, view: ClusterView) -> Sequence[Allocation]:
        """In the middle of an interval those who wait are matched to those who are alone."""
        guests = [run for run in view.runs if not run.running]
        alone = [group[0] for group in view.groups() if len(group) == 1]
        hosts = [run for run in alone if run.job.priority >= 0]
        return _matched(view, guests, hosts, len(view.idle))


def _matched(
    view: ClusterView, guests: Sequence[JobRun], hosts: Sequence[JobRun], left: int
) -> list[Allocation]:
    """Allocations beside hosts by the matching, and on GPUs that are left."""
    by_index = {host.index: host for host in hosts}
    pairs = best_pairs(
        {
            (guest.index, host.index): view.slowed_together((host, guest))[1]
            for guest in guests
            for host in hosts
            if view.needs(host) == view.needs(guest) and view.may_share((host, guest))
        }
    )
    answer = []
    for guest in guests:
        if guest.index in pairs:
            answer.append(Allocation(guest, beside=by_index[pairs[guest.index]]))
        elif view.needs(guest) <= left:
            left -= view.needs(guest)
            answer.append(Allocation(guest))
    return answer
