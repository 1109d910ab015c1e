"""The interface of policies, which choose the jobs that hold GPUs, and the simplest policies.

A policy orders the jobs; the simulator gives GPUs in that order (`simulator.py`). Without
preemption the order is of the waiting jobs; with it, of all jobs, and those for which nothing is
left lose their GPUs. Jobs come in the order that the policy gave last, new ones behind, so that a
stable sort breaks ties as the published simulators do. A policy of your own:

    class MostGpusFirst(Policy):
        name = "most-gpus"

        def order(self, runs, now):
            return sorted(runs, key=lambda run: -run.job.gpus)

    simulate_cluster(jobs, fleet, MostGpusFirst())
"""

from abc import ABC
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from baechi.cluster_simulation.fleet import FreeDevices
from baechi.cluster_simulation.jobs import Events, Grant, Job, JobRun


@final
@dataclass(frozen=True, slots=True)
class Offer:
    """GPUs that a job could have now.

    Attributes:
        run: The job.
        grant: The GPUs.
        rate: Its work per tick on them, beside the jobs that are there.
        now: The time.
        running: The jobs that run.
        devices: The state of the cluster's devices.
    """

    run: JobRun
    grant: Grant
    rate: int
    now: int
    running: Iterable[JobRun]
    devices: FreeDevices

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
    """

    name: str
    preemptive: ClassVar[bool] = False
    blocking: ClassVar[bool] = False
    counts: bool = False

    def begin(self, gpus: int) -> None:
        """Called once, with the size of the cluster."""
        del gpus

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

    def accepts(self, offer: Offer) -> bool:
        """True if a job takes the GPUs that it is offered; if not, it waits for the next event."""
        del offer
        return True

    def select(
        self, now: int, arrived: Sequence[JobRun], ended: Sequence[JobRun], free: int
    ) -> tuple[list[JobRun], list[JobRun]]:
        """The jobs that stop and those that start, where GPUs are only counted.

        For policies that need not look at every job at every event: a policy that has this method
        is asked for `order` only where a scheme places jobs, or where preemption costs work.
        """
        raise NotImplementedError


class Fifo(Policy):
    """In order of arrival, without overtaking.

    That is also longest pending first: without preemption the longest waiting job is the first to
    have arrived. And it is Big Brain's order: how many jobs are on a GPU, and on which, is the part
    of the sharing model and the scheme (`policies.DEFAULTS`).
    """

    blocking = True

    def __init__(self, name: str = "fifo") -> None:
        self.name = name


@final
class FitJobFirst(Policy):
    """In order of arrival, but a job that finds room overtakes those that do not.

    Also Gandiva's order where it packs a second job on a GPU while the compute of both fits.
    """

    def __init__(self, name: str = "fjf") -> None:
        self.name = name


@final
class FewestGpusFirst(Policy):
    """Jobs of fewer GPUs first, preempting those of more."""

    name = "sjf"
    preemptive = True

    def order(self, runs: list[JobRun], now: int) -> list[JobRun]:
        """By GPUs; equals stay as they were."""
        del now
        return sorted(runs, key=lambda run: run.job.gpus)
