"""What the simulator asks about a job's place: held, offered, or never to be had."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from baechi.cluster_simulation.free_devices import Grant, Room
from baechi.cluster_simulation.jobs import Job, Refusal
from baechi.cluster_simulation.policies.policy import Offer
from baechi.cluster_simulation.running_job import Run
from baechi.units import format_bytes


@dataclass(frozen=True, slots=True)
class RoomOffer(Offer):
    """An offer, with the room to ask about others."""

    run: Run
    grant: Grant
    rate: int
    now: int
    running: Collection[Run]
    room: Room

    def rate_after(self, ended: Sequence[Run]) -> int:
        """As if what they hold were given back; then it is taken again."""
        for other in ended:
            self.room.give(other.index, other.job, held_by(other))
        grant = self.room.place(self.run.job)
        rate = self.room.rate(grant, joins=True) if grant is not None else 0
        for other in reversed(ended):
            self.room.take(other.index, other.job, held_by(other))
        return rate


def held_by(run: Run) -> Grant:
    """Where a job that has started runs, or ran last."""
    assert run.grant is not None, "a job that holds nothing was asked for what it holds"
    return run.grant


def shape_of(job: Job) -> object:
    """What a scheme looks at: jobs of one shape fit in the same places."""
    asked = job.gpus, job.memory_bytes, job.compute, job.limit
    return *asked, id(job.graph), id(job.placement), job.step_ns, job.most_gpus


def admission(jobs: Sequence[Job], empty: Room, gpus: int) -> tuple[list[Refusal], list[Job]]:
    """The jobs that never fit a cluster of so many GPUs, empty, and those that do, by arrival."""
    refused: list[Refusal] = []
    admitted: list[Job] = []
    known: dict[object, bool] = {}
    for job in sorted(jobs, key=lambda job: job.submit_time):
        shape = shape_of(job)
        if shape not in known:
            known[shape] = empty.place(job) is not None
        if known[shape]:
            admitted.append(job)
        else:
            refused.append(Refusal(job, _reason_for(job, gpus)))
    return refused, admitted


def _reason_for(job: Job, gpus: int) -> str:
    """Why a job fits no empty cluster of so many GPUs."""
    if job.gpus > gpus:
        return f"asks for {job.gpus} GPUs of {gpus}"
    what = "its operator graph" if job.graph else f"{format_bytes(job.memory_bytes)} on each"
    return (
        f"asks for {job.gpus} GPUs with room for {what}; under this scheme not even the empty "
        "cluster has that"
    )
