"""The interface of policies that say which job holds how many GPUs, of which kind, and with whom.

Ordering jobs (`policy.py`) is not enough for sizes, kinds of GPU and shares. An allocating policy
sees a `ClusterView`, with predicted rates, and answers with an `Allocation` for every job that
should hold GPUs. The simulator stops the others, leaves a job where it is if that will do, and
places the rest in the order of the answer, by the scheme of the simulation; who finds no room
waits. A job that changes its GPUs or their number has been preempted, and pays for it.

Two jobs share GPUs only where an allocation says so (`beside`), and where the sharing admits it.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from typing import ClassVar, final

from baechi.cluster_simulation.jobs import WHOLE, JobRun
from baechi.cluster_simulation.policy_support.policy import Policy
from baechi.cluster_simulation.policy_support.predictions import Predictions
from baechi.validation import check_positive


@final
@dataclass(frozen=True, slots=True)
class Allocation:
    """GPUs that a job should hold.

    Attributes:
        run: The job.
        gpus: So many; `Job.gpus` if 0.
        among: Some of these; of all GPUs if absent.
        beside: On just the GPUs of this job, whose allocation comes before.
        clock: Of its GPUs, in thousandths of the full one. To change it preempts nobody.
    """

    run: JobRun
    gpus: int = 0
    among: tuple[int, ...] | None = None
    beside: JobRun | None = None
    clock: int = WHOLE

    @property
    def size(self) -> int:
        """How many GPUs."""
        return self.gpus or self.run.job.gpus


@final
@dataclass(frozen=True)
class ClusterView(Predictions):
    """What a policy sees: what is on the cluster, and what jobs would do there."""

    @cached_property
    def waiting(self) -> list[JobRun]:
        """The jobs that hold no GPUs, by arrival."""
        return [run for run in self.runs if not run.running]

    @cached_property
    def idle(self) -> tuple[int, ...]:
        """The GPUs that no job is on."""
        return tuple(gpu for gpu, owners in enumerate(self.devices.owners) if not owners)

    @property
    def idle_by_kind(self) -> list[int]:
        """How many GPUs of every kind no job is on."""
        owners = self.devices.owners
        return [sum(not owners[gpu] for gpu in gpus) for gpus in self.kinds.values()]

    def kept(self, runs: Iterable[JobRun] | None = None) -> list[Allocation]:
        """Allocations for what the running jobs have, those who share after whom they joined."""
        first: dict[tuple[int, ...], JobRun] = {}
        allocations = []
        by_start = sorted(
            (run for run in (self.runs if runs is None else runs) if run.running),
            key=lambda run: self.devices.owners[run.grant.gpus[0]].index(run.index),
        )
        for run in by_start:
            gpus = run.grant.gpus
            allocations.append(Allocation(run, run.asked, gpus, first.get(gpus), run.clock))
            first.setdefault(gpus, run)
        return allocations

    def groups(self) -> list[list[JobRun]]:
        """The running jobs, those on the same GPUs together."""
        groups: dict[tuple[int, ...], list[JobRun]] = {}
        for allocation in self.kept():
            groups.setdefault(allocation.run.grant.gpus, []).append(allocation.run)
        return list(groups.values())

    def least_sizes(
        self, runs: Iterable[JobRun], free: int | None = None
    ) -> tuple[dict[int, int], int]:
        """The least sizes of the first jobs that find room, and the GPUs that are left.

        Args:
            runs: Most urgent first.
            free: GPUs that may be given; all if absent.
        """
        left = self.total if free is None else free
        sizes: dict[int, int] = {}
        for run in runs:
            least = self.least(run)
            if 0 < least <= left:
                sizes[run.index] = least
                left -= least
        return sizes, left

    def grow(
        self, sizes: dict[int, int], free: int, gain: Callable[[JobRun, int], float]
    ) -> dict[int, int]:
        """The sizes once the free GPUs have gone, one by one, to whom one more gains most.

        Args:
            sizes: Of the jobs that have GPUs, by index.
            free: GPUs that are left.
            gain: What a job of a size gains by one more; who gains nothing gets none.
        """
        sizes = dict(sizes)
        gains: list[tuple[float, int, JobRun]] = []

        def offer(run: JobRun) -> None:
            size = sizes[run.index]
            if size < self.most(run) and (more := gain(run, size)) > 0:
                heappush(gains, (-more, run.index, run))

        for run in self.runs:
            if run.index in sizes:
                offer(run)
        while free and gains:
            run = heappop(gains)[2]
            sizes[run.index] += 1
            free -= 1
            offer(run)
        return sizes

    def or_first(self, answer: Sequence[Allocation]) -> Sequence[Allocation]:
        """The answer; if it is none and nobody runs, the first job on any GPUs."""
        if answer or not self.runs:
            return answer
        return [Allocation(self.runs[0])]

    def on_best_kinds(self, runs: Iterable[JobRun], left: Sequence[int]) -> Iterator[Allocation]:
        """Allocations of the first jobs that find room: on the kind where they are fastest.

        A job that no single kind has room for takes any GPUs, if all are left.

        Args:
            runs: Most urgent first.
            left: GPUs that are free of every kind.
        """
        free = list(left)
        kinds = list(self.kinds)
        for run in runs:
            rates = self.rates_on_kinds(run)
            for kind in sorted(range(len(kinds)), key=lambda kind: (-rates[kind], kind)):
                needs = self.needs(run, kinds[kind])
                if rates[kind] and needs <= free[kind]:
                    free[kind] -= needs
                    yield Allocation(run, among=self.kinds[kinds[kind]])
                    break
            else:
                if not any(rates) and sum(free) == self.total:
                    free = [0] * len(free)
                    yield Allocation(run)


class AllocatingPolicy(Policy):
    """A policy that says who holds how many GPUs, of which kind, and with whom."""

    @abstractmethod
    def allocate(self, view: ClusterView) -> Sequence[Allocation]:
        """What each job should hold that should hold any, most urgent first."""


class RoundPolicy(AllocatingPolicy):
    """Decides at the beginning of every round; in between, who finds room starts.

    Attributes:
        round_ticks: The length of a round, where it is built without one.
    """

    preemptive = True
    round_ticks: ClassVar[int]

    def __init__(self, ticks: int | None = None) -> None:
        length = self.round_ticks if ticks is None else ticks
        self._ticks = check_positive(length, "the round in ticks")
        self._round = -1

    def allocate(self, view: ClusterView) -> Sequence[Allocation]:
        """As decided anew in a new round; else as it is, and jobs on what is idle."""
        turn = view.now // self._ticks
        anew = turn > self._round or not any(run.running for run in view.runs)
        if anew or self.urgent(view):
            self._round = turn
            return self.decide(view)
        return [*view.kept(), *self.fill(view)]

    @abstractmethod
    def decide(self, view: ClusterView) -> Sequence[Allocation]:
        """The allocation of a round."""

    def urgent(self, view: ClusterView) -> bool:
        """True if a job that waits cannot wait for the next round."""
        del view
        return False

    def fill(self, view: ClusterView) -> Iterable[Allocation]:
        """Allocations of waiting jobs for idle GPUs, in the middle of a round: those that fit."""
        return view.on_best_kinds(view.waiting, view.idle_by_kind)

    def wake(self, runs: Sequence[JobRun], now: int) -> int | None:
        """The beginning of the next round, while there are jobs."""
        return (now // self._ticks + 1) * self._ticks if runs else None
