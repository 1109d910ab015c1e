"""Placements that fit including the memory held by streams, which the clock does not model.

1. Solve. Add the bytes held by streams (`stream_memory`) to the peaks.
2. If a memory does not suffice, leave as many bytes of it free as were held there, and solve again:
   held bytes change with the placement, so this is repeated a few times.
3. On a single device nothing is held, since nothing crosses devices: it is the last resort.

Deterministic. On CPUs nothing is held, and one solve suffices.
"""

from collections.abc import Set
from dataclasses import replace
from typing import Final

from baechi.errors import InfeasibleError
from baechi.placers.placer import Placer
from baechi.placers.solving import solve
from baechi.problem.simulation import overflows, simulate
from baechi.program.compilation import compile_program
from baechi.program.stream_memory import Gpus, with_held
from baechi.records.cluster import Cluster
from baechi.records.constraints import Constraints
from baechi.records.graph import OpGraph
from baechi.records.instructions import Program
from baechi.records.placement import Placement, Schedule
from baechi.units import format_bytes

_ROUNDS: Final = 4


def scheduled(
    graph: OpGraph,
    cluster: Cluster,
    placement: Placement,
    gpus: Gpus,
    *,
    replayed: bool = False,
    program: Program | None = None,
) -> Schedule:
    """The schedule of a placement, with peaks that include the bytes held by streams.

    Args:
        graph: The placed graph.
        cluster: Its devices.
        placement: Its placement.
        gpus: The GPU of every logical device; None for a CPU.
        replayed: Whether it runs as CUDA graphs, which free nothing between steps.
        program: The program of the streams, if known.
    """
    schedule = simulate(graph, cluster, placement)
    if all(gpu is None for gpu in gpus):
        return schedule
    if program is None:
        program = compile_program(graph, placement, instant=instant_ops(graph), copy_lanes=True)
    return with_held(graph, cluster, placement, schedule, gpus, program, replayed=replayed)


def instant_ops(graph: OpGraph) -> Set[int]:
    """The ops that take no time."""
    return {op for op, row in enumerate(graph.ops) if row.time_ns == 0}


def solve_with_held(
    graph: OpGraph,
    cluster: Cluster,
    placer: str | Placer,
    gpus: Gpus,
    *,
    effort: str | None = None,
    constraints: Constraints | None = None,
    replayed: bool = False,
) -> Placement:
    """A placement that fits including the bytes held by streams.

    Args:
        graph: The graph.
        cluster: The devices, with their free capacity.
        placer: As in `solve`.
        gpus: The GPU of every logical device; None for a CPU.
        effort: As in `solve`.
        constraints: As in `solve`; their margins stay free in addition.
        replayed: As in `scheduled`.

    Raises:
        InfeasibleError: No placement was found.
        InputError: As `solve`.
    """
    placement = solve(graph, cluster, placer, effort=effort, constraints=constraints)
    if all(gpu is None for gpu in gpus):
        return placement
    asked = constraints or Constraints()
    held: dict[str, int] = {}
    for number in range(_ROUNDS):
        schedule = scheduled(graph, cluster, placement, gpus, replayed=replayed)
        missing = dict(overflows(schedule, cluster, asked))
        if not missing:
            return placement
        if number == _ROUNDS - 1:
            break
        planned = simulate(graph, cluster, placement).peak_bytes
        for device, peak, known in zip(cluster.devices, schedule.peak_bytes, planned, strict=True):
            if device.name in missing:
                held[device.name] = max(peak - known, 2 * held.get(device.name, 0))
        margins = {d: asked.margins.get(d, 0) + held.get(d, 0) for d in {**asked.margins, **held}}
        try:
            placement = solve(
                graph, cluster, placer, effort=effort, constraints=replace(asked, margins=margins)
            )
        except InfeasibleError:
            break
    placement = _alone(graph, cluster, placement, constraints)
    schedule = scheduled(graph, cluster, placement, gpus, replayed=replayed)
    missing = dict(overflows(schedule, cluster, asked))
    if missing:
        raise _too_large(missing, cluster, schedule, held)
    return placement


def _alone(
    graph: OpGraph, cluster: Cluster, placement: Placement, constraints: Constraints | None
) -> Placement:
    """Everything on one device; the given placement if that does not fit."""
    try:
        return solve(graph, cluster, "single", constraints=constraints)
    except InfeasibleError:
        return placement


def _too_large(
    missing: dict[str, int], cluster: Cluster, schedule: Schedule, held: dict[str, int]
) -> InfeasibleError:
    name, extra = max(missing.items(), key=lambda row: row[1])
    rows = zip(cluster.devices, schedule.peak_bytes, strict=True)
    needed = next(peak for device, peak in rows if device.name == name)
    left = tuple((device.name, device.memory_bytes) for device in cluster.devices)
    return InfeasibleError(
        f"no placement was found that fits with what streams hold: {name!r} needs "
        f"{format_bytes(needed)}, of which up to {format_bytes(held.get(name, 0))} cross to or "
        "from other streams and stay to the end of a phase, or are left in place by CUDA graphs. "
        f"Give it {format_bytes(extra)} more, or use fewer logical devices on each GPU, a smaller "
        "batch, checkpoint=True, or no CUDA graphs.",
        name,
        needed,
        left,
        extra,
        name,
    )
