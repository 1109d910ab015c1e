"""Explanations of why nothing fits, with the smallest memory with which something was found."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Final, NoReturn

import numpy as np

from baechi.errors import InfeasibleError, InputError
from baechi.placers.auto import EFFORTS, Auto
from baechi.placers.baselines import SingleDevice
from baechi.placers.device_choice import device_choices, device_kinds, linked
from baechi.placers.memory_packing import HASTY, is_hopeless
from baechi.placers.placer import Placer, smallest
from baechi.placers.searching import (
    CHOICES,
    ample_bytes,
    arranged,
    attempt,
    missing_as_run,
    search,
    with_effort,
)
from baechi.placers.turn_orders import ordered_turns
from baechi.problem.problem_arrays import Problem
from baechi.problem.simulation import replay
from baechi.records.graph import OpGraph
from baechi.records.placement import Placement
from baechi.units import format_bytes
from baechi.validation import INT64_MAX

# Stands for all devices.
EVERY: Final = -1
# Maximum number of devices listed in an error.
_LISTED: Final = 8
# Up to this many ops the missing memory is found to the byte, and with the effort of the solve.
# Above, each of the thirty or more steps of that bisection takes too long; seven find it to a
# hundredth, with fast solves.
_EXACT_OPS: Final = 12
_STEPS: Final = 7
# Number of different devices whose extra memory is compared so closely.
_COMPARED: Final = 4


def explain(problem: Problem, placer: Placer, effort: str) -> NoReturn:
    """Raise the error of a problem for which a placer has found nothing."""
    if placer.fixed:
        _explain_fixed(problem, placer)
    fast = with_effort(placer, "fast")
    other = search(problem, fast, "fast") if problem.graph.is_training else None
    if other is not None and missing_as_run(problem, other):
        _explain_run(problem, other)
    _explain_search(problem, placer, effort)


def explain_copies(
    graph: OpGraph, problem: Problem, placement: Placement, microbatches: int
) -> NoReturn:
    """Raise the error that names the memory that one micro-batch leaves too little of."""
    cluster, limits, memory = problem.cluster, problem.constraints, problem.device_memory
    peaks = ordered_turns(graph, cluster, placement, microbatches, constraints=limits).peak_bytes
    missing = [peak - most for peak, most in zip(peaks, memory, strict=True)]
    device = missing.index(max(missing))
    name = cluster.devices[device].name
    text = (
        f"one micro-batch fits, but not {microbatches}: {name} would need "
        f"{format_bytes(missing[device])} more for what all of them leave, or for gradients before "
        "they are added. Give it more, or make fewer or smaller micro-batches."
    )
    op = placement.devices.index(device)
    raise _infeasible(problem, text, op, peaks[device], memory, missing[device], name)


def _explain_search(problem: Problem, placer: Placer, effort: str) -> NoReturn:
    """Raise the error that names the op without room, and memory with which one was found.

    It says that the memory is missing only where a lower bound proves that there is no placement.
    """
    op, needed, left, may = _worst(problem)
    extra = _smallest_extra(problem, placer, effort)
    names = [device.name for device in problem.cluster.devices]
    room = [f"{names[d]} {format_bytes(left[d])} left" for d in may]
    if len(room) > _LISTED:
        room[_LISTED:] = [f"and {len(room) - _LISTED} more devices"]
    which = "" if len(may) == len(names) else " that it may use"
    shortage = (
        f"cannot place {problem.group_name(op)} (needs {format_bytes(needed)} when it runs): no "
        f"device{which} has room then ({', '.join(room)})."
    )
    proved = is_hopeless(problem)
    if not proved:
        patient = isinstance(placer, Auto) and effort == EFFORTS[-1]
        give = "memory" if patient else f"effort ('auto' with effort={EFFORTS[-1]!r}) or memory"
        shortage = (
            f"no placement was found: the search ended where {problem.group_name(op)} needs "
            f"{format_bytes(needed)} to run and no device{which} has room ({', '.join(room)}). "
            f"That does not prove that there is none. Give more {give}"
        )
    nbytes, device = (0, None) if extra is None else extra
    where = "" if device is None else "every device" if device == EVERY else names[device]
    more = f"{format_bytes(nbytes)} more to {where}"
    if device is None:
        shortage = (
            f"no placement was found for {problem.group_name(op)}, and more memory would not help: "
            "what the constraints leave is not linked as the graph needs it, or it takes more "
            "devices than may be used. Relax them, or add a link."
        )
    elif not proved:
        with_it = f"with {format_bytes(nbytes)} more on {where} one was found"
        shortage += f" ({with_it}), add a device, or shrink the batch."
    elif device == EVERY:
        shortage += (
            f" Under these constraints no single device can help: give {more}, relax the "
            "constraints, or shrink the batch."
        )
    else:
        shortage += f" Give {more}, add a device, or shrink the batch."
    raise _infeasible(problem, shortage, op, needed, left, nbytes, where)


def _explain_run(problem: Problem, placement: Placement) -> NoReturn:
    """Raise the error that names the memory that lacks in the order of the run alone."""
    missing = missing_as_run(problem, placement)
    name, nbytes = max(missing.items(), key=lambda row: row[1])
    device = next(d for d, row in enumerate(problem.cluster.devices) if row.name == name)
    op = placement.devices.index(device)
    left = problem.device_memory
    more = ", ".join(f"{format_bytes(lacks)} more on {where}" for where, lacks in missing.items())
    text = (
        "no placement was found that fits as a step runs it, with buffers there from its beginning "
        "and, in training, in the model's order inside of a segment. With "
        f"{more} one was found; or add a device, or shrink the batch."
    )
    raise _infeasible(problem, text, op, left[device] + nbytes, left, nbytes, name)


def _explain_fixed(problem: Problem, placer: Placer) -> NoReturn:
    """Raise the error that names the memory that a fixed placer would need."""
    if placer == SingleDevice():
        if not problem.free_devices:
            raise InputError(
                "the constraints allow no single device for all ops; relax them, or let a placer "
                "that splits decide, such as 'auto'."
            )
        missing_for_all = _missing_for_all(problem)
        placer = SingleDevice(min(problem.free_devices, key=lambda d: (missing_for_all[d], d)))
    placement = placer.place(grown(problem, EVERY, ample_bytes(problem)))
    if placement is None:
        raise InputError(f"placer {placer.name!r} found no placement even with ample memory.")
    peaks = replay(problem, placement.devices, placement.order).peaks()
    missing, device = max(
        (peaks[problem.device_pool[d]] - _bare_memory(problem, d), -d)
        for d in set(placement.devices)
    )
    name = problem.cluster.devices[-device].name
    there = [g for g, ops in enumerate(problem.group_ops) if placement.devices[ops[0]] == -device]
    loads = problem.group_bytes
    group = max(there, key=lambda group: (loads[group], -group))
    op = problem.group_ops[group][0]
    left = [row.memory_bytes for row in problem.cluster.devices]
    text = (
        f"the placement of {placer.name!r} does not fit: {name} would need "
        f"{format_bytes(missing)} more than its {format_bytes(left[-device])}, and the largest "
        f"there is {problem.group_name(op)} ({format_bytes(loads[group])}). Give it more, shrink "
        "the batch, or let a placer that looks at memory decide, such as 'auto'."
    )
    raise _infeasible(problem, text, op, loads[group], left, missing, name)


def _infeasible(
    problem: Problem, text: str, op: int, needed: int, left: Sequence[int], nbytes: int, where: str
) -> InfeasibleError:
    names = [device.name for device in problem.cluster.devices]
    subject = problem.graph.ops[op].group or problem.graph.ops[op].name
    rows = tuple(zip(names, left, strict=True))
    return InfeasibleError(text, subject, needed, rows, nbytes, where)


def _worst(problem: Problem) -> tuple[int, int, tuple[int, ...], list[int]]:
    """An op without room, its need, the free bytes of each device, and its allowed devices.

    That is an op too large for all its allowed devices, if there is one; or else the op with the
    largest need of those that earliest task first cannot place.
    """
    timeline = problem.timeline()
    arrays, left = problem.arrays, problem.pool_memory
    needs = (arrays.running_bytes + arrays.group_persistent[arrays.op_group]).tolist()
    most = problem.largest_memory[arrays.op_group]
    candidates = np.flatnonzero(needs > most).tolist()
    if not candidates:
        timeline.list_schedule(np.empty(0, np.int32))
        ops = range(len(needs))
        candidates = [op for op in ops if not timeline.committed(op) and timeline.waits_for(op) < 0]
        needs = [timeline.need(op) for op in ops]
        left = tuple(max(0, nbytes) for nbytes in timeline.left())
    op = max(candidates, key=lambda op: needs[op])
    home = timeline.group_device(op)
    may = (
        [home]
        if home >= 0
        else [d for d in range(len(problem.device_pool)) if timeline.allows(op, d)]
    )
    return op, needs[op], tuple(left[pool] for pool in problem.device_pool), may


def _smallest_extra(problem: Problem, placer: Placer, effort: str) -> tuple[int, int] | None:
    """The smallest extra memory on one device with which `solve` is known to succeed; that device.

    By bisection (`docs/solver.md`, "Infeasible problems"). Where constraints let no single device
    help, the device is -1, and every device needs that much more; `None` if not even that helps.
    """

    def packed(units: int, device: int) -> bool:
        return _is_arranged(grown(problem, device, units * unit))

    def solved(units: int, device: int) -> bool:
        return attempt(grown(problem, device, units * unit), placer, effort) is not None

    def solved_fast(units: int, device: int) -> bool:
        return attempt(grown(problem, device, units * unit), fast, "fast", HASTY) is not None

    fast = with_effort(placer, "fast")
    kinds = device_kinds(problem)
    different = [device for device, kind in enumerate(kinds) if device == kind]
    missing = _missing_for_all(problem)
    device = min(problem.free_devices, key=lambda d: (missing[d], d), default=-1)
    most = missing[device] if device >= 0 else ample_bytes(problem)
    exact = problem.arrays.ops <= _EXACT_OPS
    unit = 1 if exact else 1 + (most >> _STEPS)
    units = -(-most // unit)
    if device < 0:
        helping = (other for other in (*different, EVERY) if solved_fast(units, other))
        helped = next(helping, None)
        if helped is None:
            return None
        units, device = smallest(partial(solved_fast, device=helped), units), helped
    if device != EVERY:
        for other in different:
            if packed(units - 1, other):
                units, device = smallest(partial(packed, device=other), units - 1), other
    # The placer itself may succeed where the arrangements do not, and with more effort.
    others = different[:_COMPARED] if exact and device != EVERY else []
    solvers = (solved_fast, solved) if exact else (solved_fast,)
    for succeeds in solvers[-1:] if effort == "fast" else solvers:
        for other in dict.fromkeys((device, *others)):
            if succeeds(units - 1, other):
                units, device = smallest(partial(succeeds, device=other), units - 1), other
    # What packing found fits in its own order, and a training step runs in another.
    training, enough = problem.graph.is_training, ample_bytes(problem)
    while training and units * unit < enough and not any(s(units, device) for s in solvers):
        units = max(1, 2 * units)
    return units * unit, device


def _is_arranged(problem: Problem) -> bool:
    """True if `placers/memory_packing.py` finds a placement."""
    rows = itertools.islice(device_choices(problem), CHOICES["fast"])
    choices = [] if problem.max_devices is None else [problem.within(row) for row in rows]
    for choice in (problem, *choices):
        narrowed = linked(choice)
        if narrowed is not None and next(arranged(narrowed, choice, HASTY), None) is not None:
            return True
    return False


def _missing_for_all(problem: Problem) -> list[int]:
    """Bytes that every device lacks to hold the whole graph."""
    n = problem.arrays.ops
    free = Problem(problem.source, problem.cluster)
    missing = []
    for device, pool in enumerate(problem.device_pool):
        timeline = free.timeline()
        timeline.fold(np.full(n, device, np.int32), np.arange(n, dtype=np.int32))
        missing.append(timeline.peaks()[pool] - _bare_memory(problem, device))
    return missing


def _bare_memory(problem: Problem, device: int) -> int:
    """The memory of a device's pool less its margin, possibly negative."""
    margin = problem.pool_margin[problem.device_pool[device]]
    return problem.cluster.devices[device].memory_bytes - margin


def grown(problem: Problem, device: int, extra: int) -> Problem:
    """The problem with `extra` more bytes on a device, and so in its pool; or on `EVERY` one."""
    devices = tuple(
        replace(row, memory_bytes=min(row.memory_bytes + extra, INT64_MAX))
        if device == EVERY or problem.device_pool[index] == problem.device_pool[device]
        else row
        for index, row in enumerate(problem.cluster.devices)
    )
    cluster = replace(problem.cluster, devices=devices)
    return Problem(problem.source, cluster, problem.constraints)
