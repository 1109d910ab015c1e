"""Jobs a stage apart on the same GPUs, as Muri's published simulator has them.

An iteration has stages, each of which needs one resource: input from storage and CPU, the GPU, the
network. Jobs on the same GPUs are a stage apart, and all take the time of the slowest at each step
(Zhao et al., SIGCOMM'22, section 3; `iteration_together`).

What its results need, too: the first stage takes two of four steps; running together costs 31, 48
and 35 % (two, three and four jobs) beside the 1.5 % that a job alone pays; and of every time
between two events at which a job goes on running it loses what a restart of all jobs on its GPUs
takes (`interruption`).
"""

from collections.abc import Sequence
from functools import cache
from itertools import permutations
from typing import ClassVar, Final, final

from baechi.cluster_simulation.jobs import WORK, Job, Part, Sharing

MOST: Final = 4
STEPS: Final = 4  # of resources: storage, CPU, GPU, network
# What an iteration of one to four jobs together takes, as measured there, over what the stages say.
_SLOWER: Final = (1.015, 1.33 / 1.015, 1.5 / 1.015, 1.37 / 1.015)
# Seconds of a restart on 1, 2, 4, 8, 16 and 32 GPUs, as measured there.
_RESTART: Final = {
    "vgg16": (7, 7, 8, 9, 9, 10),
    "vgg19": (7, 7, 8, 9, 10, 10),
    "resnet18": (4, 5, 5, 7, 7, 7),
    "shufflenet_v2_x1_0": (4, 4, 5, 5, 7, 8),
    "bert": (10, 10, 10, 10, 10, 10),
    "gpt2": (10, 10, 10, 10, 10, 10),
    "a2c": (38, 39, 39, 46, 46, 46),
    "dqn": (5, 5, 6, 6, 8, 8),
}
_UNKNOWN: Final = 10


def interruption(jobs: Sequence[Job]) -> int:
    """What jobs on the same GPUs lose at an event, in seconds."""
    size = min(5, (jobs[0].gpus - 1).bit_length())
    return sum(_RESTART[job.model][size] if job.model in _RESTART else _UNKNOWN for job in jobs)


# The stages of a job (input, GPU, network) and its iteration alone.
_Stages = tuple[tuple[int, ...], int]


@cache
def iteration_together(jobs: tuple[_Stages, ...]) -> float:
    """The time in which jobs do one iteration each, in the best order, with what sharing costs."""
    if len(jobs) == 1:
        return jobs[0][1] * _SLOWER[0]
    stages = [stages for stages, _ in jobs]
    best = min(map(_period, permutations(stages)))
    if len(jobs) == 2:  # two steps: one has its input read while the other computes and sends
        (a, b, c), (d, e, f) = stages
        best = min(best, max(a, e + f) + max(d, b + c))
    return best * _SLOWER[len(jobs) - 1]


def _period(stages: Sequence[Sequence[int]]) -> float:
    """The time of four steps once they repeat, with each job a step behind the one before."""
    done = [0.0]
    count = len(stages)
    for step in range(2 * STEPS):
        end = 0.0
        network, gpu, read = ((step + ahead) % STEPS for ahead in (1, 2, 3))
        if network < count:
            end = max(end, done[step] + stages[network][2])
        if gpu < count:
            end = max(end, done[step] + stages[gpu][1])
        if step and read < count:  # begun a step earlier
            end = max(end, done[step - 1] + stages[read][0])
        done.append(end)
        if step >= STEPS:
            now, before = end - done[step - 3], done[step] - done[step - 4]
            if now > 0 and abs(now - before) <= 1e-3 * max(now, before):
                return now
    return done[2 * STEPS] - done[STEPS]


@final
class Interleaved(Sharing):
    """Jobs a stage apart: each does an iteration in the time of `iteration_together`."""

    most: int = MOST
    wants_whole: ClassVar[bool] = True

    def admits(self, parts: Sequence[Part], part: Part) -> bool:
        """Only jobs that have three stages."""
        return not parts or (
            len(parts) < self.most
            and all(len(each.stages) == 3 and each.iteration for each in (*parts, part))
        )

    def rate(self, parts: Sequence[Part], part: Part, share: int) -> int:
        """Its iteration alone over that together."""
        alone = min(WORK, WORK * share // part.compute)
        if len(parts) == 1:
            return alone
        together = iteration_together(tuple(sorted((p.stages, p.iteration) for p in parts)))
        return min(alone, int(alone * part.iteration * _SLOWER[0] / together))
