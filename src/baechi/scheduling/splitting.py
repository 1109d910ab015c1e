"""Splitting a job over left-overs: its operator graph, what is left, and whether to wait instead.

`Baechi` is a scheme: it places a job's graph on the residual memory of the GPUs that admit another
job: whole on one where that is possible, else on as few as possible, at most `Job.gpus`. The
predicted step gives the job's rate, the predicted peaks what it holds on each GPU, the busy time
what share of each GPU's compute it keeps busy. The rate is that of the placement on free GPUs; what
others on them take away is the sharing model's matter. A job without a graph is placed as by
`best-fit`.

`SplitOrWait` is a policy: a job that is offered a place compares when it would end there with when
it would end in the place that it would get once one of the next running jobs has ended, and waits
if that is sooner. Both assume that nothing else changes.

A split costs a `solve` for each number of devices that is tried, some 0.1 s for 500 ops, more where
none fits. So questions are not asked twice (`Machines.memo`): whether a job fits whole is one for
all GPUs of a kind; memory that is left is rounded down to 64ths of a GPU's; where nothing fitted,
nothing is tried with less on every device; and nothing is tried where all devices together have
less than the whole job holds at its peak, which leaves out splits that would hold less.
"""

import operator
from dataclasses import dataclass, replace
from typing import Final, final

from baechi.devices import Cluster, Device, Link
from baechi.graph import OpGraph
from baechi.problem import Problem
from baechi.scheduling.fleet import Gpu
from baechi.scheduling.jobs import WHOLE, Job
from baechi.scheduling.policies import Offer, Policy
from baechi.scheduling.rooms import Grant, Machines
from baechi.scheduling.schemes import BestFit, Scheme
from baechi.scheduling.sharing import WORK, Part
from baechi.simulation import simulate
from baechi.solving import find

_AMPLE: Final = 2**61  # bytes, where memory is not modeled
NEAR: Final = Link(10_000, 50 * 10**9)
FAR: Final = Link(30_000, 10 * 10**9)


@final
@dataclass(frozen=True, slots=True)
class _Left:
    """What is left on a GPU."""

    index: int
    nbytes: int
    gpu: Gpu

    def rounded(self) -> "_Left":
        """With memory in 64ths of the GPU's, rounded down, so that fewer questions differ."""
        unit = (self.gpu.memory_bytes or 0) // 64
        return replace(self, nbytes=self.nbytes // unit * unit) if unit else self

    def device(self, place: int) -> Device:
        """As `solve` reads it: a slice is a slower GPU."""
        speed = self.gpu.speed * self.gpu.share / WHOLE**2
        return Device(f"gpu{place}", self.nbytes, speed, self.gpu.kind)


@final
@dataclass(frozen=True, slots=True)
class Baechi(Scheme):
    """Places graphs as `baechi.solve` does, on what is left.

    Attributes:
        link: Between GPUs of a node.
        node_link: Between GPUs of different nodes.
        effort: As `solve`'s.
        fewest: Whether a job is split over as few GPUs as possible; if not, over as many as make
            its predicted step shortest.
    """

    link: Link = NEAR
    node_link: Link = FAR
    effort: str = "fast"
    fewest: bool = True

    def place(self, job: Job, room: Machines) -> Grant | None:
        """The first of whole, two, three, ... GPUs that fits; `None` if none does."""
        if job.graph is None:
            return BestFit().place(job, room)
        left = self._left(job, room)
        if not self.fewest:
            return self._split(job, job.graph, room, left, job.gpus)
        found = self._whole(job, job.graph, room, left)
        for most in range(2, min(job.gpus, len(left)) + 1):
            if found is None:
                found = self._split(job, job.graph, room, left, most)
        return found

    def _whole(self, job: Job, graph: OpGraph, room: Machines, left: list[_Left]) -> Grant | None:
        """On one GPU: where it is fastest, and among those where the least memory is left."""
        best: tuple[tuple[int, int, int], Grant] | None = None
        for row in left:
            answer = self._alone(job, graph, room, row)
            if answer is None or not room.admits(row.index, answer.parts[0]):
                continue
            grant = Grant((row.index,), answer.parts, answer.rate)
            order = (-room.rate(grant, joins=True), row.nbytes, row.index)
            if best is None or order < best[0]:
                best = order, grant
        return None if best is None else best[1]

    def _alone(self, job: Job, graph: OpGraph, room: Machines, row: _Left) -> Grant | None:
        """On one GPU of its kind that has memory for anything."""
        ample = _Left(0, _AMPLE, replace(row.gpu, node=0, switch=0, memory_bytes=None))
        question = (id(graph), job.step_ns, job.limit, ample)
        if question not in room.memo:
            room.memo[question] = self._answer(job, graph, [ample])
        answer = room.memo[question]
        return answer if isinstance(answer, Grant) else None

    def _least(self, job: Job, graph: OpGraph, room: Machines, row: _Left) -> int:
        """What the whole job holds at its peak."""
        alone = self._alone(job, graph, room, row)
        return alone.parts[0].memory_bytes if alone is not None else 0

    def _split(
        self, job: Job, graph: OpGraph, room: Machines, left: list[_Left], most: int
    ) -> Grant | None:
        """On at most `most` GPUs, those with the most memory: of one node if that is enough."""
        least = max((self._least(job, graph, room, row) for row in left[:1]), default=0)
        nodes_left: dict[int, list[_Left]] = {}
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
        nodes = {
            node: rank for rank, node in enumerate(dict.fromkeys(row.gpu.node for row in left))
        }
        shape = (
            memory,
            tuple(replace(row.gpu, node=nodes[row.gpu.node], switch=0) for row in left),
        )
        question = (id(graph), most, job.step_ns, job.limit)
        failed = room.memo.setdefault((*question, shape[1]), [])
        assert isinstance(failed, list)
        if any(all(map(operator.le, memory, before)) for before in failed):
            return None
        if (*question, shape) not in room.memo:
            room.memo[*question, shape] = self._answer(job, graph, left)
        answer = room.memo[*question, shape]
        if not isinstance(answer, Grant):
            failed.append(memory)
            return None
        gpus = tuple(left[place].index for place in answer.gpus)
        if not all(map(room.admits, gpus, answer.parts)):
            return None
        return Grant(gpus, answer.parts, answer.rate)

    def _left(self, job: Job, room: Machines) -> list[_Left]:
        """What is left of the GPUs that admit a job."""
        rows = []
        for index in room.open(Part(0, 1, job.limit)):
            memory = room.memory_left[index]
            rows.append(_Left(index, _AMPLE if memory is None else memory, room.fleet.gpus[index]))
        return [row for row in rows if row.nbytes]

    def _answer(self, job: Job, graph: OpGraph, left: list[_Left]) -> Grant | None:
        """A grant whose GPUs are places in `left`."""
        links = tuple(
            tuple(
                None if a is b else self.link if a.gpu.node == b.gpu.node else self.node_link
                for b in left
            )
            for a in left
        )
        cluster = Cluster(tuple(row.device(place) for place, row in enumerate(left)), links)
        placement = find(Problem(graph, cluster), self.effort)
        if placement is None:
            return None
        schedule = simulate(graph, cluster, placement)
        if any(peak > row.nbytes for peak, row in zip(schedule.peak_bytes, left, strict=True)):
            return None
        step_ns = max(1, schedule.makespan_ns)
        busy_ns = [0] * len(left)
        for span in schedule.spans:
            busy_ns[span.device] += span.end_ns - span.start_ns
        used = sorted({span.device for span in schedule.spans})
        parts = tuple(
            Part(
                schedule.peak_bytes[place],
                max(1, -(-busy_ns[place] * left[place].gpu.share // step_ns)),
                job.limit,
            )
            for place in used
        )
        whole_ns = job.step_ns or sum(op.time_ns for op in graph.ops)
        # Speeds are in the predicted step; `Machines.rate` multiplies by the slowest once more.
        slowest = min(left[place].gpu.speed for place in used)
        rate = WORK * whole_ns * WHOLE // (step_ns * slowest)
        return Grant(tuple(used), parts, max(1, rate))


def _most_memory(row: _Left) -> tuple[int, int]:
    return -row.nbytes, row.index


@final
class SplitOrWait(Policy):
    """Takes what is left, split if need be, unless waiting for one of the next ends is sooner.

    Args:
        looks: How many of the next ends are looked at.
    """

    name = "split-or-wait"

    def __init__(self, looks: int = 3) -> None:
        self._looks = looks

    def accepts(self, offer: Offer) -> bool:
        """Whether no wait that was looked at ends sooner."""
        remaining = offer.run.remaining(offer.now) * WORK
        here = offer.now - (-remaining // offer.rate)
        soonest = sorted((other.ends_at(), other.index) for other in offer.running)
        known = {other.index: other for other in offer.running}
        for end, index in soonest[: self._looks]:
            if end >= here:
                break
            rate = offer.rate_after(known[index])
            if rate and end - (-remaining // rate) < here:
                return False
        return True
