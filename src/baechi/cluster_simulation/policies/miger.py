"""Slices for online jobs, and offline jobs on other slices or beside them, by a matching: MIGER.

The rule (Zhang, Li, and Li, "MIGER: Integrating Multi-Instance GPU and Multi-Process Service for
Deep Learning Clusters", ICPP'24, and its published code): an online job has the smallest slice of a
GPU (MIG) that serves it in time. Offline jobs go to slices of their own, or beside an online job
that keeps at most 0.7 of its slice busy (MPS), so that the sum of their throughputs, each over that
on a whole GPU, is the largest.

Where we leave it: it also chooses how each GPU is cut; the slices of a cluster here are what they
are (`--slice`). It tries all ways on one GPU as a job comes; here the sum is over all GPUs,
maximized by a matching, at every event; of equal ones the one that moves few is taken. In time
means: as fast as on a whole GPU, or on the largest slice. Online jobs are those of priority 0 and
more. Jobs that no slices of one size hold have any; offline ones of several are not matched.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Final, final

from baechi.cluster_simulation.jobs import WHOLE, JobRun
from baechi.cluster_simulation.policies.allocation import (
    AllocatingPolicy,
    Allocation,
    ClusterView,
)
from baechi.cluster_simulation.policies.muxflow import couples

_BUSY: Final = 700  # thousandths of a slice
_Slices = Mapping[int, tuple[int, ...]]


@final
class Miger(AllocatingPolicy):
    """Online jobs on the smallest slices that will do, and offline ones by a matching."""

    name = "miger"
    preemptive = True

    def allocate(self, view: ClusterView) -> Sequence[Allocation]:
        """Online jobs and then wide offline ones, by arrival; for the others the matching."""
        gpus = view.devices.fleet.gpus
        slices: dict[int, tuple[int, ...]] = {
            share: tuple(index for index, gpu in enumerate(gpus) if gpu.share == share)
            for share in sorted({gpu.share for gpu in gpus})
        }
        left = Counter(gpu.share for gpu in gpus)
        runs = sorted(view.runs, key=lambda r: (r.job.priority < 0, not r.running, r.index))
        hosts: dict[int, JobRun] = {}
        alike: dict[int, list[JobRun]] = defaultdict(list)
        among: dict[tuple[int, int], list[int]] = defaultdict(list)
        answer = []
        for run in runs:
            if run.job.priority < 0 and view.needs(run) == 1:
                alike[view.alike(run)].append(run)
            elif taken := _smallest(view, run, slices, left):
                left.subtract(gpus[gpu].share for gpu in taken[: view.needs(run)])
                answer.append(Allocation(run, among=taken))
                if run.job.priority >= 0 and view.needs(run) == 1:
                    hosts[run.index] = run
                    among[gpus[taken[0]].share, view.alike(run)].append(run.index)
        # A slice goes by its negative share, so that hosts and slices are not mixed up.
        among.update({(share, -1): [-share] * max(0, left[share]) for share in slices})
        weights = {
            (one, place): throughput
            for one, (guest, *_) in alike.items()
            for place, rows in among.items()
            for host in [hosts.get(rows[0]) if rows else None]
            if (throughput := _throughput(view, guest, host, place[0], slices))
        }
        for guest, place in couples(view, alike, among, weights):
            if place < 0:
                answer.append(Allocation(guest, among=slices[-place]))
            else:
                answer.append(Allocation(guest, beside=hosts[place]))
        return view.or_first(answer)


def _smallest(
    view: ClusterView, run: JobRun, slices: _Slices, left: Mapping[int, int]
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


def _throughput(
    view: ClusterView, guest: JobRun, host: JobRun | None, share: int, slices: _Slices
) -> float:
    """That of an offline job on a slice, alone or beside a host, over that on a whole GPU."""
    rate, part = view.devices.sharing.rate, guest.job.part
    parts = [part] if host is None else [host.job.part, part]
    if host is None:
        may = view.fits(guest, slices[share])
    else:
        may = host.job.compute * WHOLE <= _BUSY * share and view.may_share((host, guest))
    return rate(parts, part, share) / rate([part], part, WHOLE) if may else 0.0
