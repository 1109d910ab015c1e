"""Slices for online jobs, and offline jobs on other slices or beside them, by a matching: MIGER.

The rule (Zhang, Li, and Li, "MIGER: Integrating Multi-Instance GPU and Multi-Process Service for
Deep Learning Clusters", ICPP'24, and its published code): an online job has the smallest slice of a
GPU (MIG) that serves it in time. Offline jobs go to slices of their own, or beside an online job
that keeps at most 0.7 of its slice busy (MPS), so that the sum of their throughputs, each over that
on a whole GPU, is the largest.

Where we leave it: it also chooses how each GPU is cut; the slices of a cluster here are what they
are (`--slice`). It tries all ways on one GPU as a job comes; here the sum is over all GPUs,
maximized by a matching, in which a job that runs keeps its place for a hundredth less. In time
means: as fast as on a whole GPU, or on the largest slice. Online jobs are those of priority 0 and
more. Jobs that no slices of one size hold have any; offline ones of several are not matched.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, final

from baechi.cluster_simulation.jobs import WHOLE, JobRun
from baechi.cluster_simulation.policies.allocation import (
    AllocatingPolicy,
    Allocation,
    ClusterView,
)
from baechi.cluster_simulation.policies.optimal_choices import best_pairs

_BUSY: Final = 700  # thousandths of a slice
_STAYS: Final = 1.01


@final
class Miger(AllocatingPolicy):
    """Online jobs on the smallest slices that will do, and offline ones by a matching."""

    name = "miger"
    preemptive = True

    def allocate(self, view: ClusterView) -> Sequence[Allocation]:
        """Online jobs and then wide offline ones, by arrival; for the others the matching."""
        gpus = view.devices.fleet.gpus
        slices = {
            share: tuple(index for index, gpu in enumerate(gpus) if gpu.share == share)
            for share in sorted({gpu.share for gpu in gpus})
        }
        left = Counter(gpu.share for gpu in gpus)
        runs = sorted(view.runs, key=lambda r: (r.job.priority < 0, not r.running, r.index))
        hosts: dict[int, tuple[JobRun, int]] = {}
        answer = []
        guests = []
        for run in runs:
            if run.job.priority < 0 and view.needs(run) == 1:
                guests.append(run)
            elif taken := _smallest(view, run, slices, left):
                left.subtract(gpus[gpu].share for gpu in taken[: view.needs(run)])
                answer.append(Allocation(run, among=taken))
                if run.job.priority >= 0:
                    hosts[run.index] = run, min(gpus[gpu].share for gpu in taken)
        weights = {
            (guest.index, place): throughput
            for guest in guests
            for place, throughput in _places(view, guest, hosts, slices)
        }
        # Slices go by their negative share, so that hosts and slices are not mixed up.
        pairs = best_pairs(weights, {-share: max(0, count) for share, count in left.items()})
        for guest in guests:
            place = pairs.get(guest.index)
            if place is None:
                continue
            if place < 0:
                answer.append(Allocation(guest, among=slices[-place]))
            else:
                answer.append(Allocation(guest, beside=hosts[place][0]))
        return view.or_first(answer)


def _smallest(
    view: ClusterView, run: JobRun, slices: Mapping[int, tuple[int, ...]], left: Mapping[int, int]
) -> tuple[int, ...]:
    """What a job has; else the slices of the smallest size that serves it, if enough are free."""
    if run.running:
        held = Counter(view.devices.fleet.gpus[gpu].share for gpu in run.grant.gpus)
        return run.grant.gpus if all(left[share] >= held[share] for share in held) else ()
    least = min(run.job.compute, max(slices))
    able = [share for share in slices if share >= least and view.fits(run, slices[share])]
    if not able:
        return tuple(range(view.total)) if sum(left.values()) >= view.needs(run) else ()
    return next((slices[share] for share in able if left[share] >= view.needs(run)), ())


def _places(
    view: ClusterView,
    guest: JobRun,
    hosts: Mapping[int, tuple[JobRun, int]],
    slices: Mapping[int, tuple[int, ...]],
) -> Iterator[tuple[int, float]]:
    """Hosts and slices for an offline job of one GPU, and its throughput there."""
    rate, part = view.devices.sharing.rate, guest.job.part
    whole = rate([part], part, WHOLE)
    here = guest.grant.gpus if guest.running else ()
    owners = [view.devices.owners[gpu][0] for gpu in here]
    for share, gpus in slices.items():
        if view.fits(guest, gpus):
            stays = owners == [guest.index] and here[0] in gpus
            yield -share, rate([part], part, share) / whole * (_STAYS if stays else 1.0)
    for index, (host, share) in hosts.items():
        few = host.job.compute * WHOLE <= _BUSY * share and view.needs(host) == 1
        if few and view.may_share((host, guest)):
            stays = owners == [index]
            yield (
                index,
                rate([host.job.part, part], part, share) / whole * (_STAYS if stays else 1.0),
            )
