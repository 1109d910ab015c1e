"""What is compared, and what one simulation tells."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

from baechi.cluster_simulation.fleet import Fleet
from baechi.cluster_simulation.jobs import Exclusive, Grant, Job, Sharing, SideBySide, TimeSliced
from baechi.cluster_simulation.placement_schemes import (
    LISTED,
    AsPlaced,
    Baechi,
    Consolidated,
    FirstFit,
    LeastLoaded,
    Scheme,
)
from baechi.cluster_simulation.policies.fifo import FitJobFirst
from baechi.cluster_simulation.policies.split_or_wait import SplitOrWait
from baechi.cluster_simulation.policy_support.policy import Policy
from baechi.cluster_simulation.results import SimulationResult, summary
from baechi.cluster_simulation.simulator import simulate_cluster


@final
@dataclass(frozen=True)
class Arm:
    """A way to schedule.

    Attributes:
        name: What it is called.
        policy: Whose turn it is. All take the first job that fits, in order of arrival.
        scheme: Where.
        most: At most so many jobs on a GPU, besides what others have there; 0 wants whole GPUs.
    """

    name: str
    policy: type[Policy]
    scheme: Scheme
    most: int


FIRST_FIT: Final = "whole, first fit"
RESIDUAL: Final = Baechi(effort=LISTED)
ARMS: Final = (
    Arm(FIRST_FIT, FitJobFirst, AsPlaced(FirstFit()), 0),
    Arm("whole, consolidated", FitJobFirst, AsPlaced(Consolidated()), 0),
    *(Arm(f"packing {k}", FitJobFirst, AsPlaced(LeastLoaded()), k) for k in (1, 2, 3)),
    *(Arm(f"splitting {k}", FitJobFirst, RESIDUAL, k) for k in (1, 2)),
    *(Arm(f"split or wait {k}", SplitOrWait, RESIDUAL, k) for k in (1, 2)),
)
SHARINGS: Final = ("time-sliced", "mps")


def sharing_of(name: str, most: int) -> Sharing:
    """Of whole GPUs where `most` is 0."""
    if not most:
        return Exclusive()
    return TimeSliced(most) if name == "time-sliced" else SideBySide(most)


@final
@dataclass(frozen=True)
class Row:
    """What one simulation tells. Times are seconds.

    Attributes:
        arm: The name of what was compared.
        sharing: How jobs shared GPUs.
        load: The load.
        seed: The seed.
        jobs: How many jobs ended.
        refused: How many fit not even the cluster without other jobs.
        mean_s: The mean completion time.
        p99_s: Its 99th percentile.
        makespan_s: From the first arrival to the last end.
        memory: The part of the memory that others leave that jobs held, over the makespan.
        oom: How often a job came to a GPU whose memory was less than what was then held there.
        split: How many jobs ran on more GPUs than their user asked for.
    """

    arm: str
    sharing: str
    load: float
    seed: int
    jobs: int
    refused: int
    mean_s: float
    p99_s: float
    makespan_s: float
    memory: float
    oom: int
    split: int


def row_of(
    arm: Arm,
    sharing: str,
    load: float,
    seed: int,
    jobs: Sequence[Job],
    fleet: Fleet,
    memo: dict[object, Grant | None],
) -> Row:
    """Simulates."""
    result = simulate_cluster(
        jobs, fleet, arm.policy(), arm.scheme, sharing=sharing_of(sharing, arm.most), memo=memo
    )
    figures = summary(result)
    return Row(
        arm.name,
        sharing,
        load,
        seed,
        len(result.outcomes),
        len(result.refused),
        figures["mean_jct"],
        figures["p99_jct"],
        figures["makespan"],
        figures["memory_utilization"],
        overflows(result, fleet),
        sum(len(row.gpus) > row.job.gpus for row in result.outcomes),
    )


def overflows(result: SimulationResult, fleet: Fleet) -> int:
    """How often a start left more held on a GPU than it has, counted from what jobs held when.

    From the outcomes alone, not from the simulator's own books; jobs are never preempted here.
    """
    held = [gpu.held_bytes for gpu in fleet.gpus]
    # At one moment jobs end before others start.
    events = sorted(
        event
        for index, row in enumerate(result.outcomes)
        for event in ((row.start_time, 1, index), (row.end_time, 0, index))
        if row.end_time > row.start_time
    )
    count = 0
    for _, starts, index in events:
        row = result.outcomes[index]
        for gpu, nbytes in zip(row.gpus, row.held_bytes, strict=True):
            held[gpu] += nbytes if starts else -nbytes
            count += bool(starts) and held[gpu] > (fleet.gpus[gpu].memory_bytes or 0)
    return count
