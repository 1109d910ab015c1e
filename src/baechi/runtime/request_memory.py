"""Memory that requests in flight take: those of a call without gradients, several at once."""

from collections.abc import Sequence
from dataclasses import replace

from baechi.errors import InputError
from baechi.problem.simulation import simulate
from baechi.records.cluster import Cluster
from baechi.records.graph import OpGraph
from baechi.records.placement import Placement


def check_requests(
    in_flight: int, rows: Sequence[tuple[int, int]], cluster: Cluster, batches: int
) -> None:
    """Check that so many requests, each at its peak, fit on every device.

    A request is `batches` calls of the placed graph's forward, and `rows` its `request_bytes`.

    Raises:
        InputError: They do not; the text says how many do.
    """
    most = min(
        (device.memory_bytes - kept) // max(own * batches, 1)
        for device, (kept, own) in zip(cluster.devices, rows, strict=True)
    )
    if most < in_flight:
        raise InputError(
            f"{in_flight} requests in flight, each at its peak, exceed a device's memory: give "
            f"in_flight={max(most, 1)}, or smaller requests."
        )


def request_bytes(graph: OpGraph, cluster: Cluster, placement: Placement) -> list[tuple[int, int]]:
    """Of each device the bytes that stay, and those that a call without gradients takes beside."""
    homes, memories = placement.devices, cluster.memories
    kept = [0] * len(memories)
    for op, device in zip(graph.ops, homes, strict=True):
        kept[memories[device]] += op.persistent_bytes
    one = _forward_of(graph)
    n = len(one.ops)
    order = tuple(op for op in placement.order if op < n)
    peaks = simulate(one, cluster, Placement(one.digest, homes[:n], order)).peak_bytes
    return [(kept[memory], peak) for memory, peak in zip(memories, peaks, strict=True)]


def _forward_of(graph: OpGraph) -> OpGraph:
    """The forward of a step as it runs without gradients, and without state."""
    n = graph.n_forward
    rows = ((row, tuple(op for op in row.consumers if op < n)) for row in graph.tensors)
    tensors = tuple(
        replace(row, consumers=inner, kept=row.kept or n in row.consumers)
        for row, inner in rows
        if row.producer < n and (inner or row.kept or n in row.consumers or not graph.is_training)
    )
    ops = tuple(replace(op, persistent_bytes=0, late_bytes=0) for op in graph.ops[:n])
    times = {kind: row[:n] for kind, row in graph.times.items()}
    return OpGraph(ops, tensors, times)
