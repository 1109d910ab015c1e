"""From a graph and a cluster to a placement: check, coarsen, place, expand, simulate, guard.

Placers that search do not give up where `placers/packing.py` finds a placement; where nothing is
found, the error says what is missing (`_explain`).
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Final, NoReturn

import numpy as np

from baechi.devices import Cluster, Device
from baechi.errors import InfeasibleError, InputError
from baechi.graph import OpGraph
from baechi.placement import Placement
from baechi.placers.assignments import shortest
from baechi.placers.auto import Auto, best, check_effort, portfolio
from baechi.placers.base import Placer
from baechi.placers.baselines import RandomPlacer, RoundRobin, SingleDevice
from baechi.placers.contiguous import Contiguous
from baechi.placers.etf import METF
from baechi.placers.heft import HEFT
from baechi.placers.mincut import Metis
from baechi.placers.packing import arrangements
from baechi.placers.peft import PEFT
from baechi.placers.sct import MSCT
from baechi.placers.topo import MTopo
from baechi.problem import LIMIT, Problem
from baechi.simulation import fits_memory, replay
from baechi.units import format_bytes
from baechi.values import FrozenDict

_PLACERS: Final[dict[str, Placer]] = {
    placer.name: placer
    for placer in (
        Auto(),
        MTopo(),
        METF(),
        MSCT(),
        HEFT(),
        PEFT(),
        Contiguous(),
        Metis(),
        SingleDevice(),
        RoundRobin(),
        RandomPlacer(),
    )
}
# Devices that an error text lists.
_LISTED: Final = 8
# Up to how many ops the missing memory is found to the byte. Above, each of the thirty or more
# steps of that bisection takes too long, and ten of them find it to a thousandth.
_EXACT_OPS: Final = 256


def solve(
    graph: OpGraph, cluster: Cluster, placer: str | Placer = "auto", *, effort: str = "balanced"
) -> Placement:
    """A valid placement of the graph on the cluster: it fits, and its order is topological.

    A pure function: equal input gives equal bytes.

    Args:
        graph: What to place.
        cluster: What is left to place it on.
        placer: `"auto"`, `"m-topo"`, `"m-etf"`, `"m-sct"`, `"heft"`, `"peft"`, `"contiguous"`,
            `"metis"`, `"single"`, `"round-robin"`, `"random"`, in any case, or a placer.
        effort: `"fast"`, `"balanced"` or `"thorough"`; see `placers/auto.py`.

    Raises:
        InfeasibleError: No placement was found; says what is missing.
        InputError: The placer or the effort is unknown, or times or bytes add up to 2**62.
    """
    placer = _placer_of(placer)
    check_effort(effort)
    if isinstance(placer, Auto):
        placer = replace(placer, effort=effort)
    problem = Problem(graph, cluster)
    placement = _attempt(problem, placer, effort)
    if placement is None and placer.fixed:
        _explain_fixed(problem, placer)
    if placement is None:
        _explain(problem, placer, effort)
    if not fits_memory(problem, replay(problem, placement.devices, placement.order)):
        raise InputError(f"placer {placer.name!r} returned a placement that does not fit.")
    return placement


def _placer_of(placer: str | Placer) -> Placer:
    if isinstance(placer, Placer):
        return placer
    known = _PLACERS.get(placer.lower()) if isinstance(placer, str) else None
    if known is None:
        names = ", ".join(repr(name) for name in _PLACERS)
        raise InputError(f"placer {placer!r} is unknown; it must be one of {names}, or a Placer.")
    return known


def _attempt(problem: Problem, placer: Placer, effort: str) -> Placement | None:
    if placer.fixed:
        return placer.place(problem)
    if isinstance(placer, Auto):
        placement = placer.place(problem)
    else:
        placement = best(portfolio(problem, (placer,), effort), placer.name)
    if placement is not None:
        return placement
    fallback = shortest(arrangements(problem))
    if fallback is None:
        return None
    stats = FrozenDict({**fallback.stats, "fallback": fallback.placer})
    return replace(fallback, placer=placer.name, stats=stats)


def _explain(problem: Problem, placer: Placer, effort: str) -> NoReturn:
    """Raises the error that says what is missing."""
    op, needed, left = _worst(problem)
    extra, device = _smallest_extra(problem, placer, effort)
    names = [device.name for device in problem.cluster.devices]
    room = [f"{name} {format_bytes(b)} left" for name, b in zip(names, left, strict=True)]
    if len(room) > _LISTED:
        room[_LISTED:] = [f"and {len(room) - _LISTED} more devices"]
    raise InfeasibleError(
        f"cannot place {problem.group_name(op)} (needs {format_bytes(needed)} when it runs): no "
        f"device has room then ({', '.join(room)}). Give {format_bytes(extra)} more to "
        f"{names[device]}, add a device, or shrink the batch.",
        problem.graph.ops[op].group or problem.graph.ops[op].name,
        needed,
        tuple(zip(names, left, strict=True)),
        extra,
        names[device],
    )


def _worst(problem: Problem) -> tuple[int, int, tuple[int, ...]]:
    """An op that finds no room, what it needs, and what each device has left then.

    That is the op with the largest need of those that earliest task first cannot place; or one
    that is too large for every device, if there is one.
    """
    timeline = problem.timeline()
    needs = [timeline.need(op) for op in range(len(problem.graph.ops))]
    largest = max(range(len(needs)), key=lambda op: (needs[op], -op))
    left = problem.pool_memory
    if needs[largest] <= max(left):
        timeline.list_schedule(np.empty(0, np.int32))
        stuck = [
            op
            for op in range(len(needs))
            if not timeline.committed(op) and timeline.waits_for(op) < 0
        ]
        needs = [timeline.need(op) for op in range(len(needs))]
        largest = max(stuck, key=lambda op: (needs[op], -op))
        left = tuple(max(0, nbytes) for nbytes in timeline.left())
    return largest, needs[largest], tuple(left[pool] for pool in problem.device_pool)


def _smallest_extra(problem: Problem, placer: Placer, effort: str) -> tuple[int, int]:
    """The smallest extra memory of one device with which `solve` succeeds, and that device.

    Found by bisection between what fails and what everything on that device needs: so `solve`
    succeeds with it, and fails with one byte less, though it might succeed with still less. For
    more than `_EXACT_OPS` ops it is a multiple of a unit, and `solve` fails with one unit less.
    """

    def arranged(units: int, device: int) -> bool:
        return next(arrangements(_grown(problem, device, units * unit)), None) is not None

    def solved(units: int, device: int) -> bool:
        return _attempt(_grown(problem, device, units * unit), placer, effort) is not None

    missing = [_missing_for_all(problem, d) for d in range(len(problem.device_pool))]
    device = missing.index(min(missing))
    unit = 1 if len(problem.graph.ops) <= _EXACT_OPS else 1 + (missing[device] >> 10)
    units = -(-missing[device] // unit)
    for other in _different_devices(problem):
        if arranged(units - 1, other):
            units, device = _bisected(arranged, units - 1, other), other
    # The placer itself may succeed where the arrangements do not.
    if solved(units - 1, device):
        units = _bisected(solved, units - 1, device)
    return units * unit, device


def _different_devices(problem: Problem) -> list[int]:
    """The devices without those that are like an earlier one in everything but the name."""
    cluster = problem.cluster
    links = {
        link for src, row in enumerate(cluster.links) for dst, link in enumerate(row) if src != dst
    }
    if len(links) > 1 or len(problem.pool_memory) < len(cluster.devices):
        return list(range(len(cluster.devices)))
    first: dict[Device, int] = {}
    for index, device in enumerate(cluster.devices):
        first.setdefault(replace(device, name="any"), index)
    return list(first.values())


def _bisected(succeeds: Callable[[int, int], bool], high: int, device: int) -> int:
    """The extra memory that succeeds where one unit less does not, given that `high` succeeds."""
    low = 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if succeeds(middle, device) else (middle, high)
    return high


def _missing_for_all(problem: Problem, device: int) -> int:
    """What the device lacks to hold the whole graph."""
    n = len(problem.graph.ops)
    timeline = problem.timeline()
    timeline.fold(np.full(n, device, np.int32), np.arange(n, dtype=np.int32))
    pool = problem.device_pool[device]
    return timeline.peaks()[pool] - problem.pool_memory[pool]


def _grown(problem: Problem, device: int, extra: int) -> Problem:
    """The problem with so much more memory on the device, and so in its pool."""
    pool = problem.device_pool[device]
    devices = tuple(
        replace(row, memory_bytes=row.memory_bytes + extra)
        if problem.device_pool[index] == pool
        else row
        for index, row in enumerate(problem.cluster.devices)
    )
    return Problem(problem.graph, replace(problem.cluster, devices=devices))


def _explain_fixed(problem: Problem, placer: Placer) -> NoReturn:
    """Raises the error that says what a placer that does not search would need."""
    ample = tuple(replace(device, memory_bytes=LIMIT) for device in problem.cluster.devices)
    ample_problem = Problem(problem.graph, replace(problem.cluster, devices=ample))
    if placer == SingleDevice():
        n = len(ample)
        placer = SingleDevice(min(range(n), key=lambda d: (_missing_for_all(problem, d), d)))
    placement = placer.place(ample_problem)
    if placement is None:
        raise InputError(f"placer {placer.name!r} found no placement even with ample memory.")
    peaks = replay(problem, placement.devices, placement.order).peaks()
    missing, device = max(
        (peaks[pool] - problem.pool_memory[pool], -d) for d, pool in enumerate(problem.device_pool)
    )
    name = problem.cluster.devices[-device].name
    there = [g for g, ops in enumerate(problem.group_ops) if placement.devices[ops[0]] == -device]
    loads = problem.group_bytes
    group = max(there, key=lambda group: (loads[group], -group))
    op = problem.group_ops[group][0]
    left = tuple((row.name, row.memory_bytes) for row in problem.cluster.devices)
    raise InfeasibleError(
        f"the placement of {placer.name!r} does not fit: {name} would need "
        f"{format_bytes(missing)} more than its {format_bytes(dict(left)[name])}, and the largest "
        f"there is {problem.group_name(op)} ({format_bytes(loads[group])}). Give it more, shrink "
        "the batch, or let a placer that looks at memory decide, such as 'auto'.",
        problem.graph.ops[op].group or problem.graph.ops[op].name,
        loads[group],
        left,
        missing,
        name,
    )
