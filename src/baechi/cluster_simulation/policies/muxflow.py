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

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import final

from baechi.cluster_simulation.jobs import JobRun
from baechi.cluster_simulation.policy_support.allocation import Allocation, ClusterView, RoundPolicy
from baechi.cluster_simulation.policy_support.optimal_choices import couples


@final
class MuxFlow(RoundPolicy):
    """Online jobs by arrival, and offline ones by a matching."""

    name = "muxflow"
    round_ticks = 900

    def urgent(self, view: ClusterView) -> bool:
        """An online job that finds room once offline ones leave."""
        online = [run for run in view.runs if run.job.priority >= 0]
        left = view.total - sum(len(run.grant.gpus) for run in online if run.running)
        waiting = (view.needs(run) for run in online if not run.running)
        return any(len(view.idle) < needs <= left for needs in waiting)

    def decide(self, view: ClusterView) -> Sequence[Allocation]:
        """The online jobs that fit, who is matched to them, and who fits into the rest."""
        hosts = [run for run in view.runs if run.job.priority >= 0]
        guests = [run for run in view.runs if run.job.priority < 0]
        return list(_matched(view, hosts, guests, (), view.total))

    def fill(self, view: ClusterView) -> Iterable[Allocation]:
        """In the middle of an interval those who wait, on idle GPUs and beside who is alone."""
        hosts = [run for run in view.waiting if run.job.priority >= 0]
        guests = [run for run in view.waiting if run.job.priority < 0]
        alone = [group[0] for group in view.groups() if len(group) == 1]
        open_hosts = [run for run in alone if run.job.priority >= 0]
        return _matched(view, hosts, guests, open_hosts, len(view.idle))


def _matched(
    view: ClusterView,
    hosts: Iterable[JobRun],
    guests: Iterable[JobRun],
    others: Iterable[JobRun],
    left: int,
) -> Iterator[Allocation]:
    """Allocations of hosts that fit, of guests beside them or `others`, and of other guests."""
    places = [*others]
    for run in sorted(hosts, key=lambda run: (not run.running, run.index)):
        if view.needs(run) <= left:
            left -= view.needs(run)
            places.append(run)
            yield Allocation(run)
    alike = defaultdict(list)
    for guest in guests:
        alike[view.alike(guest)].append(guest)
    among = defaultdict(list)
    for host in places:
        among[view.alike(host)].append(host.index)
    by_index = {host.index: host for host in places}
    weights = {}
    for one, (guest, *_) in alike.items():
        for other, indices in among.items():
            pair = by_index[indices[0]], guest
            if view.needs(pair[0]) == view.needs(guest) and view.may_share(pair):
                weights[one, other] = view.slowed_together(pair)[1]
    taken = set()
    for guest, place in couples(view, alike, among, weights):
        taken.add(guest.index)
        yield Allocation(guest, beside=by_index[place])
    for guest in sorted(guests, key=lambda run: (not run.running, run.index)):
        if guest.index not in taken and view.needs(guest) <= left:
            left -= view.needs(guest)
            yield Allocation(guest)
