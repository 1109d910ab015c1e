"""Random jobs: Poisson arrivals, and durations from a distribution."""

import math
from collections.abc import Callable, Sequence
from random import Random

from baechi.cluster_simulation.jobs import WHOLE, Job
from baechi.errors import InputError


def poisson_jobs(
    *,
    per_tick: float,
    durations: Callable[[Random], int] | int,
    seed: int,
    count: int | None = None,
    until: int | None = None,
    gpus: Sequence[int] = (1,),
    weights: Sequence[float] | None = None,
    memory_bytes: int = 0,
    compute: int = WHOLE,
    limit: int = WHOLE,
) -> tuple[Job, ...]:
    """Jobs with exponential gaps between arrivals; the same arguments give the same jobs.

    Args:
        per_tick: How many arrive per tick, on average.
        durations: Draws a job's duration, or is the duration of all.
        seed: Of all that is drawn.
        count: Stop after so many jobs.
        until: Stop at this time.
        gpus: How many GPUs a job may ask for.
        weights: How often, in proportion; equally if absent.
        memory_bytes: On each GPU, for all.
        compute: As `Job.compute`.
        limit: As `Job.limit`.

    Raises:
        InputError: A rate that is not positive, or neither `count` nor `until`.
    """
    if not (per_tick > 0 and math.isfinite(per_tick)):
        raise InputError(f"per_tick is {per_tick}; give a positive, finite rate of arrivals.")
    if count is None and until is None:
        raise InputError("give count or until, or jobs arrive for ever.")
    draw = Random(seed)
    jobs: list[Job] = []
    moment = 0.0
    while count is None or len(jobs) < count:
        moment += draw.expovariate(per_tick)
        if until is not None and moment >= until:
            break
        duration = durations if isinstance(durations, int) else durations(draw)
        width = draw.choices(gpus, weights)[0]
        jobs.append(
            Job(
                f"job{len(jobs)}",
                width,
                int(moment),
                duration,
                memory_bytes=memory_bytes,
                compute=compute,
                limit=limit,
            )
        )
    return tuple(jobs)


def exponential(mean: float) -> Callable[[Random], int]:
    """Durations with this mean, rounded, at least one tick."""
    return lambda draw: max(1, round(draw.expovariate(1 / mean)))


def log_normal(median: float, sigma: float) -> Callable[[Random], int]:
    """Durations with a heavy tail, as clusters have: the logarithm is normal with `sigma`."""
    return lambda draw: max(1, round(draw.lognormvariate(math.log(median), sigma)))
