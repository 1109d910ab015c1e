"""Memory over time, computed from a schedule alone.

The rules are those of the clock, implemented independently from its output: a
device holds the persistent bytes of its ops for the whole step, a tensor from its producer's start
to the end of its last use there, a received copy from the start of its transfer to the end of its
last use there, and a running op's workspace. All intervals are half-open. So the highest step of a
profile equals `Schedule.peak_bytes`, and the text of a report agrees with its figures.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import NamedTuple

from baechi.records.cluster import Cluster
from baechi.records.graph import OpGraph
from baechi.records.placement import Schedule

Steps = tuple[tuple[int, int], ...]

PERSISTENT = "parameters and optimizer"
TENSORS = "tensors made here"
COPIES = "copies received"
WORKSPACE = "workspace"


class Holding(NamedTuple):
    """Bytes that a memory holds for one reason, in [start_ns, stop_ns)."""

    memory: int
    reason: str
    nbytes: int
    start_ns: int
    stop_ns: int


def memory_profile(
    graph: OpGraph, cluster: Cluster, schedule: Schedule, longer: Iterable[Holding] = ()
) -> tuple[Steps, ...]:
    """The memory of each device as steps `(time_ns, bytes)`, from time 0 on.

    A step holds until the next one's time; the last one is at the end of the schedule. Devices of
    one pool share one memory and have equal steps. O(n log n) time in ops, consumers and transfers.

    Args:
        graph: The scheduled graph.
        cluster: Its devices.
        schedule: Its schedule.
        longer: Additional holdings.
    """
    memory_of = memories(cluster)
    level: Counter[int] = Counter()
    changes: dict[int, Counter[int]] = {memory: Counter() for memory in memory_of}
    for held in chain(_holdings(graph, memory_of, schedule), longer):
        if held.reason == PERSISTENT:
            level[held.memory] += held.nbytes
        elif held.start_ns < held.stop_ns:
            changes[held.memory][held.start_ns] += held.nbytes
            changes[held.memory][held.stop_ns] -= held.nbytes
    profiles = {
        memory: _accumulate(level[memory], changes[memory], schedule.makespan_ns)
        for memory in changes
    }
    return tuple(profiles[memory] for memory in memory_of)


def peak_holdings(
    graph: OpGraph, cluster: Cluster, schedule: Schedule
) -> tuple[tuple[int, Mapping[str, int]], ...]:
    """The first time of each device's peak, and the bytes held then by reason."""
    memory_of = memories(cluster)
    profiles = memory_profile(graph, cluster, schedule)
    peak_ns = [max(steps, key=lambda step: step[1])[0] for steps in profiles]
    held_at_peak: dict[int, Counter[str]] = {memory: Counter() for memory in memory_of}
    for held in _holdings(graph, memory_of, schedule):
        at_peak = held.start_ns <= peak_ns[held.memory] < held.stop_ns
        if at_peak or held.reason == PERSISTENT:
            held_at_peak[held.memory][held.reason] += held.nbytes
    return tuple(
        (time_ns, held_at_peak[memory]) for time_ns, memory in zip(peak_ns, memory_of, strict=True)
    )


def memories(cluster: Cluster) -> list[int]:
    """The first device of each device's pool; the device itself where it is in none."""
    first: dict[str, int] = {}
    return [
        first.setdefault(device.pool, index) if device.pool else index
        for index, device in enumerate(cluster.devices)
    ]


def _holdings(graph: OpGraph, memory_of: list[int], schedule: Schedule) -> Iterator[Holding]:
    graph = graph.explicit
    end_ns = schedule.makespan_ns
    span_of = {span.op: span for span in schedule.spans}
    for span in schedule.spans:
        op, memory = graph.ops[span.op], memory_of[span.device]
        yield Holding(memory, PERSISTENT, op.persistent_bytes, 0, end_ns)
        yield Holding(memory, WORKSPACE, op.workspace_bytes, span.start_ns, span.end_ns)
        # Inputs that are already freed.
        yield Holding(memory, TENSORS, -op.reused_bytes, span.start_ns, span.end_ns)
    arrivals: dict[int, dict[int, int]] = defaultdict(dict)  # tensor -> memory -> start of copy
    departed: Counter[int] = Counter()  # tensor -> end of its last transfer out
    for transfer in schedule.transfers:
        memory = memory_of[transfer.dst]
        if memory_of[transfer.src] != memory:  # there are no copies inside a pool
            start_ns = arrivals[transfer.tensor].get(memory, transfer.start_ns)
            arrivals[transfer.tensor][memory] = min(start_ns, transfer.start_ns)
            departed[transfer.tensor] = max(departed[transfer.tensor], transfer.end_ns)
    for index, tensor in enumerate(graph.tensors):
        producer = span_of[tensor.producer]
        home = memory_of[producer.device]
        last_use: Counter[int] = Counter()
        for consumer in tensor.consumers:
            span = span_of[consumer]
            memory = memory_of[span.device]
            last_use[memory] = max(last_use[memory], span.end_ns)
        stays = tensor.kept or not tensor.consumers
        stop_ns = end_ns if stays else max(last_use[home], departed[index])
        yield Holding(home, TENSORS, tensor.nbytes, producer.start_ns, stop_ns)
        for memory, start_ns in arrivals[index].items():
            yield Holding(memory, COPIES, tensor.nbytes, start_ns, last_use[memory])


def _accumulate(level: int, changes: Mapping[int, int], end_ns: int) -> Steps:
    steps = {0: level}
    for time_ns in sorted(changes):
        level += changes[time_ns]
        if changes[time_ns]:
            steps[time_ns] = level
    steps[max([end_ns, *changes])] = level
    return tuple(steps.items())
