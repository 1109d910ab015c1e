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

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final, final

from baechi.cluster_simulation.jobs import WHOLE, JobRun
from baechi.cluster_simulation.policy_support.allocation import (
    AllocatingPolicy,
    Allocation,
    ClusterView,
)
from baechi.cluster_simulation.policy_support.optimal_choices import couples

_BUSY: Final = 700  # thousandths of a slice


@final
class Miger(AllocatingPolicy):
    """Online jobs on the smallest slices that will do, and offline ones by a matching."""

    name = "miger"
    preemptive = True

    def __init__(self) -> None:
        self._slices: dict[int, tuple[int, ...]] = {}  # by the share of a GPU that they have
        self._share: list[int] = []  # of every slice
        # Of guests that are alike, on slices of a share alone (-1) or beside hosts that are alike.
        self._throughputs: dict[tuple[int, tuple[int, int]], float] = {}

    def allocate(self, view: ClusterView) -> Sequence[Allocation]:
        """Online jobs and then wide offline ones, by arrival; for the others the matching."""
        if not self._slices:
            self._share = [gpu.share for gpu in view.devices.fleet.gpus]
            self._slices = {
                share: tuple(index for index, other in enumerate(self._share) if other == share)
                for share in sorted(set(self._share))
            }
        left = {share: len(slices) for share, slices in self._slices.items()}
        runs = sorted(view.runs, key=lambda r: (r.job.priority < 0, not r.running, r.index))
        hosts: dict[int, JobRun] = {}
        alike: dict[int, list[JobRun]] = defaultdict(list)
        among: dict[tuple[int, int], list[int]] = defaultdict(list)
        answer = []
        for run in runs:
            needs, kind = view.needs(run), view.alike(run)
            if run.job.priority < 0 and needs == 1:
                alike[kind].append(run)
            elif taken := self._smallest(view, run, left):
                for gpu in taken[:needs]:
                    left[self._share[gpu]] -= 1
                answer.append(Allocation(run, among=taken))
                if run.job.priority >= 0 and needs == 1:
                    hosts[run.index] = run
                    among[self._share[taken[0]], kind].append(run.index)
        # A slice goes by its negative share, so that hosts and slices are not mixed up.
        among.update({(share, -1): [-share] * max(0, left[share]) for share in self._slices})
        weights = {
            (one, place): throughput
            for one, (guest, *_) in alike.items()
            for place, rows in among.items()
            for host in [hosts.get(rows[0]) if rows else None]
            if (throughput := self._throughput(view, guest, host, place))
        }
        for guest, where in couples(view, alike, among, weights):
            if where < 0:
                answer.append(Allocation(guest, among=self._slices[-where]))
            else:
                answer.append(Allocation(guest, beside=hosts[where]))
        return view.or_first(answer)

    def _smallest(self, view: ClusterView, run: JobRun, left: Mapping[int, int]) -> tuple[int, ...]:
        """What a job has; else the slices of the smallest size that will do, if enough are free."""
        if run.running:
            held = [self._share[gpu] for gpu in run.grant.gpus]
            return run.grant.gpus if all(left[s] >= held.count(s) for s in set(held)) else ()
        least = min(run.job.compute, max(left))
        able = [s for s in left if s >= least and view.fits(run, self._slices[s])]
        if not able:
            return tuple(range(view.total)) if sum(left.values()) >= view.needs(run) else ()
        return next((self._slices[share] for share in able if left[share] >= view.needs(run)), ())

    def _throughput(
        self, view: ClusterView, guest: JobRun, host: JobRun | None, place: tuple[int, int]
    ) -> float:
        """That of an offline job on a slice, alone or beside a host, over that on a whole GPU."""
        asked, (share, _) = (view.alike(guest), place), place
        if asked not in self._throughputs:
            rate, part = view.devices.sharing.rate, guest.job.part
            parts = [part] if host is None else [host.job.part, part]
            if host is None:
                may = view.fits(guest, self._slices[share])
            else:
                may = host.job.compute * WHOLE <= _BUSY * share and view.may_share((host, guest))
            alone = rate([part], part, WHOLE)
            self._throughputs[asked] = rate(parts, part, share) / alone if may else 0.0
        return self._throughputs[asked]
