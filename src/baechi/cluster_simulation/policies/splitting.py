"""Jobs split over what is left of GPUs: schemes for operator graphs, and a policy that may wait.

`Baechi` is a scheme: it places a job's graph on the residual memory of the GPUs that admit another
job: whole on one where that is possible, else on as few as possible, at most `Job.most_gpus`. Its
rate and memory there are in `step_time.py`. A job without a graph is placed as by
`best-fit`. `AsPlaced` is for comparison: it leaves a graph split as its user has split it.

`SplitOrWait` is a policy: a job that is offered a place compares when it would end there with when
it would end in the place that it would get once the next running jobs have ended, and waits if that
is sooner. Both assume that nothing else changes, but for this: what ends is there for one job, so
one that waits for it is not waited for by those behind.

A split costs a `solve` for each number of devices that is tried, some 0.1 s for 500 ops, more where
none fits. So answers are kept (`DeviceStates.memo`): whether a job fits whole is one for
all GPUs of a kind; memory that is left is rounded down to 32nds of a GPU's; where nothing fitted,
nothing is tried with less on every device; and nothing is tried where all devices together have
less than the whole job holds at its peak, which leaves out splits that would hold less.
"""

import operator
from dataclasses import dataclass, field, replace
from typing import final

from baechi.cluster_simulation.contention import WORK, Part
from baechi.cluster_simulation.free_devices import DeviceStates, Grant
from baechi.cluster_simulation.jobs import Job
from baechi.cluster_simulation.placement_schemes import BestFit, Scheme
from baechi.cluster_simulation.policies.policy import Offer, Policy
from baechi.cluster_simulation.running_job import JobRun
from baechi.cluster_simulation.step_time import (
    AMPLE,
    Links,
    ResidualGpu,
    cluster_of,
    shape_of,
    solved,
    stepped,
)
from baechi.records.graph import OpGraph


@final
@dataclass(frozen=True, slots=True)
class Baechi(Scheme):
    """Places graphs as `baechi.solve` does, on what is left.

    Attributes:
        links: Between GPUs.
        effort: As `solve`'s, or `step_time.LISTED` for simulations of many jobs.
        fewest: True if a job is split over as few GPUs as possible; if not, over as many as make
            its predicted step shortest.
    """

    links: Links = field(default_factory=Links)
    effort: str = "fast"
    fewest: bool = True

    def place(self, job: Job, devices: DeviceStates) -> Grant | None:
        """The first of whole, two, three, ... GPUs that fits; `None` if none does."""
        if job.graph is None:
            return BestFit().place(job, devices)
        left = self._left(job, devices)
        if not self.fewest:
            return self._split(job, job.graph, devices, left, _most(job))
        found = self._whole(job, job.graph, devices, left)
        for most in range(2, min(_most(job), len(left)) + 1):
            if found is None:
                found = self._split(job, job.graph, devices, left, most)
        return found

    def _whole(
        self, job: Job, graph: OpGraph, devices: DeviceStates, left: list[ResidualGpu]
    ) -> Grant | None:
        """On one GPU: where it is fastest, and among those where the least memory is left."""
        best: tuple[tuple[int, int, int], Grant] | None = None
        for row in left:
            answer = self._alone(job, graph, devices, row)
            if answer is None or not devices.admits(row.index, answer.parts[0]):
                continue
            grant = Grant((row.index,), answer.parts, answer.rate)
            order = (-devices.rate(grant, joins=True), row.nbytes, row.index)
            if best is None or order < best[0]:
                best = order, grant
        return None if best is None else best[1]

    def _alone(
        self, job: Job, graph: OpGraph, devices: DeviceStates, row: ResidualGpu
    ) -> Grant | None:
        """On one GPU of its kind that has memory for anything."""
        ample = ResidualGpu(
            0, AMPLE, replace(row.gpu, node=0, switch=0, memory_bytes=None, held_bytes=0)
        )
        question = (*self._key(job, graph), ample)
        if question not in devices.memo:
            devices.memo[question] = solved(job, graph, [ample], self.links, self.effort)
        answer = devices.memo[question]
        return answer if isinstance(answer, Grant) else None

    def _key(self, job: Job, graph: OpGraph) -> tuple[object, ...]:
        """Everything but the GPUs that an answer depends on."""
        return self, id(graph), job.step_ns, job.compute, job.limit

    def _least(self, job: Job, graph: OpGraph, devices: DeviceStates, row: ResidualGpu) -> int:
        """Peak bytes of the whole job on one GPU."""
        alone = self._alone(job, graph, devices, row)
        return alone.parts[0].memory_bytes if alone is not None else 0

    def _split(
        self, job: Job, graph: OpGraph, devices: DeviceStates, left: list[ResidualGpu], most: int
    ) -> Grant | None:
        """On at most `most` GPUs, those with the most memory: of one node if that is enough."""
        least = max((self._least(job, graph, devices, row) for row in left[:1]), default=0)
        nodes_left: dict[int, list[ResidualGpu]] = {}
        for row in left:
            nodes_left.setdefault(row.gpu.node, []).append(row)
        choices = [*nodes_left.values(), left]
        offers = [sorted(row, key=_most_memory)[:most] for row in choices]
        enough = [row for row in offers if row and sum(one.nbytes for one in row) >= least]
        if not enough:
            return None
        near = [row for row in enough[:-1] if len(row) == most] or enough[-1:]
        left = [row.rounded() for row in max(near, key=lambda row: sum(one.nbytes for one in row))]
        memory = tuple(row.nbytes for row in left)
        question = (*self._key(job, graph), shape_of(left))
        refused = devices.refused.setdefault((*self._key(job, graph), most), [])
        if any(
            len(memory) <= len(before) and all(map(operator.le, memory, before))
            for before in refused
        ):
            return None
        if question not in devices.memo:
            devices.memo[question] = solved(job, graph, left, self.links, self.effort)
        answer = devices.memo[question]
        if not isinstance(answer, Grant):
            refused.append(memory)
            return None
        gpus = tuple(left[place].index for place in answer.gpus)
        if not all(map(devices.admits, gpus, answer.parts)):
            return None
        return Grant(gpus, answer.parts, answer.rate)

    def _left(self, job: Job, devices: DeviceStates) -> list[ResidualGpu]:
        """The GPUs that admit a job, with the memory that is left on them."""
        rows = []
        for index in devices.open(Part(0, 1, job.limit)):
            memory = devices.memory_left[index]
            rows.append(
                ResidualGpu(index, AMPLE if memory is None else memory, devices.fleet.gpus[index])
            )
        return [row for row in rows if row.nbytes]


@final
@dataclass(frozen=True, slots=True)
class AsPlaced(Scheme):
    """Takes GPUs as another scheme does, and splits a graph over them as `Job.placement` says.

    Attributes:
        scheme: Which GPUs; each has room for `Job.memory_bytes`.
        links: Between GPUs.
    """

    scheme: Scheme
    links: Links = field(default_factory=Links)

    def place(self, job: Job, devices: DeviceStates) -> Grant | None:
        """On the scheme's GPUs; the rate is that of the predicted step there."""
        grant = self.scheme.place(job, devices)
        if grant is None or job.graph is None or job.placement is None:
            return grant
        left = [ResidualGpu(index, AMPLE, devices.fleet.gpus[index]) for index in grant.gpus]
        asked = (id(job.graph), id(job.placement), job.step_ns, job.compute, job.limit)
        question = (self, *asked, shape_of(left))
        if question not in devices.memo:
            cluster = cluster_of(left, self.links, job)
            devices.memo[question] = stepped(job, job.graph, job.placement, cluster, left)
        answer = devices.memo[question]
        assert isinstance(answer, Grant), "a placement did not fit ample memory"
        gpus = tuple(grant.gpus[place] for place in answer.gpus)
        if not all(map(devices.admits, gpus, answer.parts)):
            return None
        return Grant(gpus, answer.parts, answer.rate)


def _most(job: Job) -> int:
    return job.most_gpus or job.gpus


def _most_memory(row: ResidualGpu) -> tuple[int, int]:
    return -row.nbytes, row.index


@final
class SplitOrWait(Policy):
    """Takes what is left, split if need be, unless waiting for the next ends is sooner.

    Args:
        looks: How many of the next ends are looked at.
    """

    name = "split-or-wait"

    def __init__(self, looks: int = 3) -> None:
        self._looks = looks
        self._claimed: set[int] = set()

    def order(self, runs: list[JobRun], now: int) -> list[JobRun]:
        """In order of arrival; and nobody waits for an end yet."""
        del now
        self._claimed.clear()
        return runs

    def accepts(self, offer: Offer) -> bool:
        """True if waiting for one of the next ends would not end the job sooner."""
        remaining = offer.run.remaining(offer.now) * WORK
        here = offer.now - (-remaining // offer.rate)
        soonest = sorted(
            ((other.ends_at(), other.index, other) for other in offer.running),
            key=lambda row: row[:2],
        )
        ended = []
        for end, index, other in soonest[: self._looks]:
            if end >= here:
                break
            if index in self._claimed:
                continue
            ended.append(other)
            rate = offer.rate_after(ended)
            if rate and end - (-remaining // rate) < here:
                self._claimed.update(each.index for each in ended)
                return False
        return True
