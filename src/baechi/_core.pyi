from typing import Any

from numpy import float64, int32, int64, uint8
from numpy.typing import NDArray

class Graph:
    def __init__(
        self,
        *,
        workspace: NDArray[int64],
        beside_begin: NDArray[int64],
        beside: NDArray[int32],
        beside_bytes: NDArray[int64],
        group: NDArray[int32],
        group_persistent: NDArray[int64],
        producer: NDArray[int32],
        nbytes: NDArray[int64],
        kept: NDArray[uint8],
        consumer_begin: NDArray[int64],
        consumers: NDArray[int32],
        part_begin: NDArray[int64],
        part_bytes: NDArray[int64],
        reader_begin: NDArray[int64],
        readers: NDArray[int32],
    ) -> None: ...

class Problem:
    def __init__(
        self,
        *,
        graph: Graph,
        device_class: NDArray[int32],
        durations: NDArray[int64],
        pool: NDArray[int32],
        memory: NDArray[int64],
        latency: NDArray[int64],
        rate: NDArray[int64],
        overhead: NDArray[int64],
        ports: int,
        launch: NDArray[int64],
        host: NDArray[int32],
        ahead: NDArray[uint8],
        allowed: NDArray[uint8],
        max_devices: int,
    ) -> None: ...

class Halt:
    def close(self) -> None: ...
    @property
    def closed(self) -> bool: ...

class Timeline:
    def __init__(self, problem: Problem) -> None: ...
    def committed(self, op: int) -> bool: ...
    def waits_for(self, op: int) -> int: ...
    def group_device(self, op: int) -> int: ...
    def earliest_start(self, op: int, device: int) -> int | None: ...
    def fits(self, op: int, device: int) -> bool: ...
    def allows(self, op: int, device: int) -> bool: ...
    def reserve(self, op: int, device: int) -> None: ...
    def hold_back(self, pool: int, nbytes: int) -> None: ...
    def commit(self, op: int, device: int) -> tuple[int, int]: ...
    def fold(self, devices: NDArray[int32], order: NDArray[int32]) -> int: ...
    def list_schedule(self, favorites: NDArray[int32]) -> bool: ...
    def ranked_schedule(
        self, ranks: NDArray[int64], future: NDArray[int64], overfull: bool = False
    ) -> bool: ...
    def insertion_schedule(
        self, ranks: NDArray[int64], future: NDArray[int64], loads: NDArray[int64]
    ) -> bool: ...
    def span_columns(
        self,
    ) -> tuple[NDArray[int32], NDArray[int32], NDArray[int64], NDArray[int64]]: ...
    def transfer_columns(
        self,
    ) -> tuple[NDArray[int32], NDArray[int32], NDArray[int32], NDArray[int64], NDArray[int64]]: ...
    def makespan(self) -> int: ...
    def peaks(self) -> list[int]: ...
    def left(self) -> list[int]: ...
    def need(self, op: int) -> int: ...

def indices(values: tuple[int, ...]) -> NDArray[int32]: ...
def backtrack(
    problem: Problem, order: NDArray[int32], budget: int, seed: int
) -> tuple[NDArray[int32], bool]: ...
def local_search(
    problem: Problem,
    devices: NDArray[int32],
    order: NDArray[int32],
    clusters: list[NDArray[int32]],
    budget: int,
    target: int,
    seed: int,
    halt: Halt | None = None,
) -> tuple[NDArray[int32], NDArray[int32], int, int, int]: ...
def grown(
    problem: Problem,
    clusters: list[NDArray[int32]],
    stretch: int,
    budget: int,
    seed: int,
    halt: Halt | None = None,
) -> tuple[NDArray[int32], NDArray[int32], int]: ...
def partition_search(
    problem: Problem,
    devices: NDArray[int32],
    clusters: list[NDArray[int32]],
    loads: NDArray[int64],
    cut_weight: float,
    windows: int,
    moves: int,
    seed: int,
    halt: Halt | None = None,
) -> NDArray[int32]: ...
def most_held(problem: Problem) -> int: ...
def level_order(problem: Problem) -> NDArray[int32]: ...
def list_order(problem: Problem, devices: NDArray[int32]) -> NDArray[int32]: ...
def coarsen(
    problem: Problem, idle: NDArray[uint8], color: NDArray[int32], limit: int
) -> tuple[NDArray[int32], NDArray[int32]]: ...
def coarse_arrays(
    problem: Problem, part_of: NDArray[int32], parts: int
) -> tuple[NDArray[int64], NDArray[int32], NDArray[int64], NDArray[int32]]: ...
def regrouped(problem: Problem, cluster: NDArray[int32]) -> Problem: ...
def group_clusters(problem: Problem, color: NDArray[int32]) -> list[NDArray[int32]]: ...
def mean_transfers(problem: Problem) -> list[int]: ...
def upward_ranks(problem: Problem) -> list[int]: ...
def optimistic_costs(problem: Problem) -> tuple[list[int], list[int]]: ...
def contiguous_splits(
    problem: Problem,
    *,
    blocks: int,
    block: NDArray[int32],
    loads: NDArray[int64],
    costs: NDArray[int64],
    devices: NDArray[int32],
    caps: NDArray[int64],
    allowed: NDArray[uint8],
    bottleneck: bool,
) -> list[list[int]]: ...
def lower_bounds(
    problem: Problem,
    *,
    durations: NDArray[int64],
    allowed: NDArray[uint8],
    memory: NDArray[int64],
    latency: NDArray[int64],
    rate: NDArray[int64],
    weights: NDArray[int64],
    weight_sums: NDArray[int64],
    window: int,
    thresholds: int,
    guesses: int,
) -> tuple[int, int, int]: ...
def longest_paths(
    times: NDArray[float64], src: NDArray[int32], dst: NDArray[int32], length: NDArray[float64]
) -> tuple[list[float], list[float]]: ...
def save_transfers(
    times: NDArray[float64],
    src: NDArray[int32],
    dst: NDArray[int32],
    cost: NDArray[float64],
    tolerance: float,
    max_iterations: int,
) -> tuple[list[float], float, float, int]: ...
def same_contents(holders: list[Any], rows: list[Any]) -> bool: ...
