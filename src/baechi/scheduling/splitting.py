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

A split costs a `solve` for each number of devices that is tried, some 0.1 s for 500 ops; equal
questions are answered from memory (`Machines.memo`), and whether a job fits whole is one question.
"""

from dataclasses import dataclass, replace
from typing import Final, final

from baechi.constraints import Constraints
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
        candidates: A split looks at no more GPUs than that: those with the most memory left, node
            by node.
        fewest: Whether a job is split over as few GPUs as possible; if not, over as many as make
            its predicted step shortest.
    """

    link: Link = NEAR
    node_link: Link = FAR
    effort: str = "fast"
    candidates: int = 16
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
            alone = _Left(0, _AMPLE, replace(row.gpu, node=0, switch=0, memory_bytes=None))
            question = (id(graph), job.step_ns, job.limit, alone)
            if question not in room.memo:
                room.memo[question] = self._answer(job, graph, [alone], 1)
            answer = room.memo[question]
            if not isinstance(answer, Grant) or not room.admits(row.index, answer.parts[0]):
                continue
            grant = Grant((row.index,), answer.parts, answer.rate)
            order = (-room.rate(grant, joins=True), row.nbytes, row.index)
            if best is None or order < best[0]:
                best = order, grant
        return None if best is None else best[1]

    def _split(
        self, job: Job, graph: OpGraph, room: Machines, left: list[_Left], most: int
    ) -> Grant | None:
        """On at most `most` of what is left."""
        left = left[: self.candidates]
        if not left:
            return None
        nodes = {
            node: rank for rank, node in enumerate(dict.fromkeys(row.gpu.node for row in left))
        }
        shape = tuple(
            (row.nbytes, replace(row.gpu, node=nodes[row.gpu.node], switch=0)) for row in left
        )
        question = (id(graph), most, job.step_ns, job.limit, shape)
        if question not in room.memo:
            room.memo[question] = self._answer(job, graph, left, most)
        answer = room.memo[question]
        if not isinstance(answer, Grant):
            return None
        gpus = tuple(left[place].index for place in answer.gpus)
        if not all(map(room.admits, gpus, answer.parts)):
            return None
        return Grant(gpus, answer.parts, answer.rate)

    def _left(self, job: Job, room: Machines) -> list[_Left]:
        """What is left of the GPUs that admit a job, those with the most memory first."""
        rows = []
        for index in room.open(Part(0, 1, job.limit)):
            memory = room.memory_left[index]
            rows.append(_Left(index, _AMPLE if memory is None else memory, room.fleet.gpus[index]))
        rows = [row for row in rows if row.nbytes]
        most: dict[int, int] = {}
        for row in rows:
            most[row.gpu.node] = max(most.get(row.gpu.node, 0), row.nbytes)
        rows.sort(key=lambda row: (-most[row.gpu.node], row.gpu.node, -row.nbytes, row.index))
        return rows

    def _answer(self, job: Job, graph: OpGraph, left: list[_Left], most: int) -> Grant | None:
        """A grant whose GPUs are places in `left`."""
        held = sum(op.persistent_bytes for op in graph.ops)
        if held > sum(sorted((row.nbytes for row in left), reverse=True)[:most]):
            return None
        links = tuple(
            tuple(
                None if a is b else self.link if a.gpu.node == b.gpu.node else self.node_link
                for b in left
            )
            for a in left
        )
        cluster = Cluster(tuple(row.device(place) for place, row in enumerate(left)), links)
        limits = Constraints(max_devices=most)
        placement = find(Problem(graph, cluster, limits), self.effort)
        if placement is None:
            return None
        schedule = simulate(graph, cluster, placement, limits)
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
