"""Policies: which jobs hold GPUs. The interface, and those that fit in a few lines.

A policy orders the jobs; the simulator gives GPUs in that order (`simulator.py`). Without
preemption the order is of the jobs that wait; with it, of all, and those for which nothing is left
lose their GPUs. Jobs come in the order that the policy gave last, new ones behind, so that a stable
sort breaks ties as the published simulators do. A policy of your own:

    class MostGpusFirst(Policy):
        name = "most-gpus"

        def order(self, runs, now):
            return sorted(runs, key=lambda run: -run.job.gpus)

    simulate_cluster(jobs, fleet, MostGpusFirst())
"""

from abc import ABC
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from baechi.cluster_simulation.free_devices import Grant, Room
from baechi.cluster_simulation.jobs import Job
from baechi.cluster_simulation.placement_schemes import Scheme
from baechi.cluster_simulation.running_job import Events, Run


@final
@dataclass(frozen=True, slots=True)
class Offer:
    """A place that a job could have now.

    Attributes:
        run: The job.
        grant: The place.
        rate: Its work per tick there, among those that are there.
        now: The time.
        running: The jobs that run.
        room: What is taken and what is free.
    """

    run: Run
    grant: Grant
    rate: int
    now: int
    running: Collection[Run]
    room: Room

    def rate_after(self, ended: Sequence[Run]) -> int:
        """Its work per tick in the place that it would get if others had ended; 0 for none."""
        for other in ended:
            self.room.give(other.index, other.job, other.held)
        grant = self.room.place(self.run.job)
        rate = self.room.rate(grant, joins=True) if grant is not None else 0
        for other in reversed(ended):
            self.room.take(other.index, other.job, other.held)
        return rate


class Policy(ABC):
    """Orders jobs.

    Attributes:
        name: What it is called on the command line and in results.
        preemptive: Whether running jobs may lose their GPUs.
        blocking: Whether the first job that finds no room holds up all behind it.
    """

    name: ClassVar[str]
    preemptive: ClassVar[bool] = False
    blocking: ClassVar[bool] = False

    def begin(self, gpus: int) -> None:
        """Called once, with the size of the cluster."""
        del gpus

    def scheme(self, given: Scheme | None) -> Scheme | None:
        """The scheme that it uses; that of the simulation, unless it has its own."""
        return given

    def events(self, admitted: Sequence[Job], refused: Sequence[Job]) -> Events:
        """The calendar of a simulation of these jobs, of which some can never run."""
        del refused
        return Events(job.submit_time for job in admitted)

    def order(self, runs: list[Run], now: int) -> list[Run]:
        """The jobs, most urgent first; all of them."""
        del now
        return runs

    def walk(self, runs: list[Run]) -> Iterator[Run]:
        """The waiting jobs in turn, without preemption; each is `running` next if it started."""
        return iter(runs)

    def wake(self, runs: Sequence[Run], now: int) -> int | None:
        """When the order changes though no job arrives or ends; `None` if it does not."""
        del runs, now
        return None

    def accepts(self, offer: Offer) -> bool:
        """Whether a job takes free room that it is offered; if not, it waits for the next event."""
        del offer
        return True

    def select(
        self, now: int, arrived: Sequence[Run], ended: Sequence[Run], free: int
    ) -> tuple[list[Run], list[Run]] | None:
        """Which jobs stop and which start, where GPUs are only counted; `None`: ask `order`.

        For policies that need not look at every job at every event.
        """
        del now, arrived, ended, free
        return None


@final
class Fifo(Policy):
    """In order of arrival; nobody overtakes."""

    name = "fifo"
    blocking = True


@final
class FitJobFirst(Policy):
    """In order of arrival, but a job that finds room overtakes those that do not."""

    name = "fjf"


@final
class FewestGpusFirst(Policy):
    """Jobs of fewer GPUs first, preempting those of more."""

    name = "sjf"
    preemptive = True

    def order(self, runs: list[Run], now: int) -> list[Run]:
        """By GPUs; equals stay as they were."""
        del now
        return sorted(runs, key=lambda run: run.job.gpus)


class LongestPending(Policy):
    """Who has waited longest first; nobody overtakes.

    Without preemption the longest waiting job is the first to have arrived, as under `fifo`.
    """

    name = "lpjf"
    blocking = True


@final
class GandivaPacking(Policy):
    """Whoever finds room goes, in order of arrival."""

    name = "gandiva-packing"


@final
class PackingFactor(Policy):
    """In order of arrival; nobody overtakes."""

    name = "big-brain"
    blocking = True
