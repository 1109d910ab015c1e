"""The uplinks of nodes, and how much jobs that share them slow each other down.

Each job on a link computes and then sends, over and over. On a link of its own it sends for a part
u of its step. Jobs of one urgency share a link alike, and those of a higher one send first:

    stretch_j = (1 + sum of queue_k, over others of its urgency) / (1 - sum of use_k, over higher)
    queue_j = u_j stretch_j / (1 - u_j + u_j stretch_j)        the part of its time that it sends
    use_j = u_j / (1 - u_j + u_j stretch_j)                    the part of the link that this takes

The first line is that of mean value analysis for a shared server, with all of the others' queues
(so none is taken for shorter than it is), and Sevcik's for priorities ("Priority scheduling
disciplines in queuing network models of computer systems", 1977). No link carries more than it can.
A job has the stretch of its worst link. Switches are taken to pass on all that their nodes send.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Final, final

from baechi.cluster_simulation.fleet import Fleet
from baechi.cluster_simulation.jobs import WHOLE, JobRun
from baechi.cluster_simulation.policy_support.policy import Policy

_ROUNDS: Final = 16  # of the fixed point


def stretches(
    sending: Sequence[float], links: Sequence[Sequence[int]], urgency: Sequence[float]
) -> list[float]:
    """How many times as long each job sends, for others on its links.

    Args:
        sending: The part of its step that each job sends for when it is alone; below 1.
        links: The links that it sends on, at least one.
        urgency: Higher ones send first.
    """
    result = [1.0] * len(sending)
    used: defaultdict[int, float] = defaultdict(float)
    by_urgency = sorted(range(len(sending)), key=lambda job: (-urgency[job], job))
    for _, group in groupby(by_urgency, key=urgency.__getitem__):
        jobs = list(group)
        queue = dict.fromkeys(jobs, 0.0)
        for _ in range(_ROUNDS if len(jobs) > 1 else 1):
            total: defaultdict[int, float] = defaultdict(float)
            for job in jobs:
                for link in links[job]:
                    total[link] += queue[job]
            for job in jobs:
                waits = [(1 + total[at] - queue[job]) / (1 - used[at]) for at in links[job]]
                result[job] = max(1.0, *waits)
            queue = {j: sending[j] * result[j] / _step(sending[j], result[j]) for j in jobs}
        for job in jobs:
            for link in links[job]:
                used[link] += sending[job] / _step(sending[job], result[job])
    return result


def _step(sending: float, stretch: float) -> float:
    return 1 - sending + sending * stretch


@final
class Uplinks:
    """The link of every node, and the jobs that send on them."""

    def __init__(self, fleet: Fleet, policy: Policy) -> None:
        self._nodes = fleet.node_of
        self._policy = policy
        self._here: list[tuple[int, int]] = []

    def share(self, running: Iterable[JobRun]) -> list[JobRun]:
        """Sets `JobRun.slowed` of all that send, if they are others than before; these."""
        runs = [run for run in running if run.grant.sending]
        here = [(run.index, run.resume) for run in runs]
        if here == self._here:
            return []
        self._here = here
        sending = [min(run.grant.sending, WHOLE - 1) / WHOLE for run in runs]
        links = [sorted({self._nodes[gpu] for gpu in run.grant.gpus}) for run in runs]
        urgency = [self._policy.urgency(run) for run in runs]
        for run, part, many in zip(runs, sending, stretches(sending, links, urgency), strict=True):
            run.slowed = max(1, round(WHOLE / _step(part, many)))
        return runs
