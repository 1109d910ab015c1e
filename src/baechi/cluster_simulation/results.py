"""What a simulation of a cluster found."""

from dataclasses import dataclass
from typing import final

from baechi.cluster_simulation.jobs import Outcome, Refusal

# What `Result.rows` has in each row, after every event.
ROW = (
    *("time", "idle_node", "busy_node", "full_node", "idle_gpu", "busy_gpu"),
    *("pending_job", "running_job", "completed_job"),
)


@final
@dataclass(frozen=True, slots=True)
class Result:
    """What a simulation found.

    Attributes:
        policy: The policy's name.
        gpus: How many GPUs there were.
        outcomes: The jobs that ended, in the order in which they did; of one moment, by arrival.
        refused: The jobs that fit no empty cluster.
        rows: The cluster after every event, in the columns of `ROW`.
        memory_bytes: The memory of all GPUs that others leave; 0 where it is not modeled.
        byte_ticks: The memory that jobs held, times how long.
    """

    policy: str
    gpus: int
    outcomes: tuple[Outcome, ...]
    refused: tuple[Refusal, ...]
    rows: tuple[tuple[int, ...], ...]
    memory_bytes: int = 0
    byte_ticks: int = 0
