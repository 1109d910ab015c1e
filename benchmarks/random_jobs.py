"""Random jobs for the simulator of clusters."""

import math
from collections.abc import Callable, Sequence
from random import Random

from baechi.cluster_simulation.jobs import Job


def poisson_jobs(
    *,
    per_tick: float,
    durations: Callable[[Random], int] | int,
    seed: int,
    count: int | None = None,
    until: int | None = None,
    gpus: Sequence[int] = (1,),
    weights: Sequence[float] | None = None,
) -> tuple[Job, ...]:
    """Jobs with exponential gaps between arrivals; the same arguments give the same jobs.

    They stop after `count` jobs or at the time `until`, and ask for one of the numbers of `gpus`,
    in proportion to their weights.
    """
    assert per_tick > 0
    assert count is not None or until is not None, "or jobs arrive for ever"
    draw = Random(seed)
    jobs: list[Job] = []
    moment = 0.0
    while count is None or len(jobs) < count:
        moment += draw.expovariate(per_tick)
        if until is not None and moment >= until:
            break
        duration = durations if isinstance(durations, int) else durations(draw)
        width = draw.choices(gpus, weights)[0]
        jobs.append(Job(f"job{len(jobs)}", width, int(moment), duration))
    return tuple(jobs)


def log_normal(median: float, sigma: float) -> Callable[[Random], int]:
    """Durations with a heavy tail, as clusters have: the logarithm is normal with `sigma`."""
    return lambda draw: max(1, round(draw.lognormvariate(math.log(median), sigma)))
