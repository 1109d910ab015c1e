"""The interface of policies, which choose the jobs that hold GPUs.

A policy orders the jobs; the simulator gives GPUs in that order (`simulator.py`). Without
preemption the order is of the waiting jobs; with it, of all jobs, and those for which nothing is
left lose their GPUs. Jobs come in the order that the policy gave last, new ones behind, so that a
stable sort breaks ties as the published simulators do. docs/cluster.md has a policy of your own.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from baechi.cluster_simulation.fleet import FreeDevices
from baechi.cluster_simulation.jobs import Events, Grant, Job, JobRun
from baechi.validation import check_positive


@final
@dataclass(frozen=True, slots=True)
class Offer:
    """GPUs that a job could have now, beside the jobs that run."""

    run: JobRun
    grant: Grant
    now: int
    running: Iterable[JobRun]
    devices: FreeDevices

    @property
    def rate(self) -> int:
        """Its work per tick on them, beside the jobs that are there."""
        return self.devices.rate(self.grant, joins=True)

    def rate_after(self, ended: Sequence[JobRun]) -> int:
        """Its work per tick on the GPUs that it would get if others had ended; 0 for none."""
        for other in ended:
            self.devices.give(other)
        grant = self.devices.place(self.run.job)
        rate = self.devices.rate(grant, joins=True) if grant is not None else 0
        for other in reversed(ended):
            self.devices.take(other, other.grant)
        return rate


class Policy(ABC):
    """Orders jobs.

    Attributes:
        name: Its name on the command line and in results.
        preemptive: Whether running jobs may lose their GPUs.
        blocking: Whether the first job that finds no room holds up all behind it.
        counts: Whether GPUs are only counted, whatever the scheme.
        gpus: The size of the cluster, once a simulation has begun.
    """

    name: str
    preemptive: ClassVar[bool] = False
    blocking: ClassVar[bool] = False
    counts: bool = False
    gpus: int = 1

    def events(self, admitted: Sequence[Job], refused: Sequence[Job]) -> Events:
        """The calendar of a simulation of these jobs, of which some can never run."""
        del refused
        return Events(job.submit_time for job in admitted)

    def order(self, runs: list[JobRun], now: int) -> list[JobRun]:
        """The jobs, most urgent first; all of them."""
        del now
        return runs

    def walk(self, runs: list[JobRun]) -> Iterator[JobRun]:
        """The waiting jobs in turn, without preemption; each is `running` next if it started."""
        return iter(runs)

    def wake(self, runs: Sequence[JobRun], now: int) -> int | None:
        """The time at which the order changes without an arrival or end; `None` if it does not."""
        del runs, now
        return None

    def urgency(self, run: JobRun) -> float:
        """Whose flows go first on links that jobs share; those of equal urgency share alike."""
        del run
        return 0.0

    def accepts(self, offer: Offer) -> bool:
        """True if a job takes the GPUs that it is offered; if not, it waits for the next event."""
        del offer
        return True


class SelectingPolicy(Policy):
    """A policy that need not look at every job at every event, where GPUs are only counted.

    It is asked for `order` only where a scheme places jobs, or where preemption costs work.
    """

    @abstractmethod
    def select(
        self, now: int, arrived: Sequence[JobRun], ended: Sequence[JobRun], free: int
    ) -> tuple[list[JobRun], list[JobRun]]:
        """The jobs that stop and those that start."""


class Periodic(Policy):
    """Deals GPUs out anew at the end of every quantum; in between, jobs keep what they have."""

    preemptive = True
    quantum_ticks: ClassVar[int]

    def __init__(self, quantum: int | None = None) -> None:
        length = self.quantum_ticks if quantum is None else quantum
        self._quantum = check_positive(length, "the quantum in ticks")
        self._turn = -1

    def order(self, runs: list[JobRun], now: int) -> list[JobRun]:
        """As dealt anew in a new quantum, else running jobs first."""
        turn = now // self._quantum
        if turn <= self._turn:
            return sorted(runs, key=lambda run: not run.running)
        self._turn = turn
        return self._dealt(runs, now)

    @abstractmethod
    def _dealt(self, runs: list[JobRun], now: int) -> list[JobRun]:
        """The jobs, most urgent first, at the beginning of a quantum."""

    def wake(self, runs: Sequence[JobRun], now: int) -> int | None:
        """The next multiple of the quantum, while a job waits and another runs."""
        mixed = any(run.running for run in runs) and any(not run.running for run in runs)
        return (now // self._quantum + 1) * self._quantum if mixed else None
