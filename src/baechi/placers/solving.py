"""The solver: check, coarsen, place, expand, simulate, and explain failures."""

import itertools
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, NoReturn

import numpy as np

from baechi.errors import InfeasibleError, InputError
from baechi.placers.auto import EFFORTS, Auto, best, check_effort, portfolio
from baechi.placers.baselines import MTopo, RandomPlacer, RoundRobin, SingleDevice
from baechi.placers.contiguous import Contiguous
from baechi.placers.device_choice import device_choices, device_kinds, linked
from baechi.placers.list_schedulers import HEFT, METF, PEFT
from baechi.placers.local_search import LocalSearch
from baechi.placers.memory_packing import HASTY, PATIENT, arrangements, is_hopeless
from baechi.placers.metis import Metis
from baechi.placers.placer import Placer, shortest, smallest
from baechi.placers.sct import MSCT
from baechi.placers.turn_orders import Pipelines, ordered_turns
from baechi.problem.microbatches import run_order
from baechi.problem.problem_arrays import Problem
from baechi.problem.simulation import fits_memory, replay
from baechi.records.cluster import Cluster, Constraints
from baechi.records.graph import OpGraph
from baechi.records.placement import Placement
from baechi.units import format_bytes
from baechi.validation import INT64_MAX, FrozenDict, check_choice, check_positive

OBJECTIVES: Final = ("step", "throughput")
# Runs one behind the other for which placements are tried.
_STREAMED: Final = 16
# Stands for all devices.
EVERY: Final = -1
# Minimum number of device choices to try if the number of devices is limited.
_CHOICES: Final = {"fast": 2, "balanced": 6, "thorough": 24}
# Maximum number of devices listed in an error.
_LISTED: Final = 8
# Up to this many ops the missing memory is found to the byte, and with the effort of the solve.
# Above, each of the thirty or more steps of that bisection takes too long; seven find it to a
# hundredth, with fast solves.
_EXACT_OPS: Final = 12
# Number of different devices whose extra memory is compared so closely.
_COMPARED: Final = 4
# How often a placement that does not fit as it runs is looked for with less memory.
_ROUNDS: Final = 4
_STEPS: Final = 7


def solve(
    graph: OpGraph,
    cluster: Cluster,
    placer: str | Placer = "auto",
    *,
    effort: str | None = None,
    constraints: Constraints | None = None,
    microbatches: int | str = 1,
    objective: str = "step",
) -> Placement:
    """A valid placement of the graph on the cluster: it fits, and its order is topological.

    A pure function: equal input gives equal bytes.

    Args:
        graph: The graph.
        cluster: The devices, with their free capacity.
        placer: `"auto"`, `"m-topo"`, `"m-etf"`, `"m-sct"`, `"heft"`, `"peft"`, `"contiguous"`,
            `"metis"`, `"local-search"`, `"single"`, `"round-robin"`, `"random"`, in any case, or a
            placer.
        effort: `"fast"`, `"balanced"` or `"thorough"`; see `placers/auto.py`. `None` is the effort
            of an `Auto` value, and `"balanced"` for any other placer.
        constraints: Constraints besides memory.
        microbatches: How many times a step runs the graph, which is that of one micro-batch; the
            placement then has their turns (`placers/turn_orders.py`).
        objective: `"step"`; or `"throughput"`, of runs one behind the other: first a short period,
            the largest load of a device or port per run, then the step. Both are in `stats`.

    Raises:
        InfeasibleError: No placement was found; the text says whether that is proved, and names
            memory with which one was found.
        InputError: The placer or the effort is unknown, times or bytes add up to 2**62, the
            constraints contradict each other, or a placer that does not search violates one.

    Warns:
        UserWarning: The graph has times for kinds of device, and none for one of the cluster's.
    """
    if microbatches == "auto":
        raise InputError(
            "microbatches='auto' compares micro-batches of several sizes, and this graph is of "
            "one. Use baechi.place(model, ..., microbatches='auto'); or solve a graph of each size "
            "with its number, and compare the steps."
        )
    count = check_positive(microbatches, "microbatches")
    check_choice(objective, OBJECTIVES, "objective")
    steady = objective == "throughput"
    if steady and count > 1:
        raise InputError("objective='throughput' does not go with microbatches=, of one step.")
    placer = placer_of(placer)
    if effort is None:
        effort = placer.effort if isinstance(placer, Auto) else Auto().effort
    placer = _with_effort(placer, effort)
    problem = Problem(graph, cluster, constraints)
    _warn_of_kinds(graph, cluster)
    search = _attempt if count == 1 else _search
    placement = search(problem, placer, effort)
    if placement is None and placer.fixed:
        _explain_fixed(problem, placer)
    if placement is None:
        fast = _with_effort(placer, "fast")
        other = _search(problem, fast, "fast") if graph.is_training else None
        if other is not None and _missing_as_run(problem, other):
            _explain_run(problem, other)
        _explain(problem, placer, effort)
    if not fits_memory(problem, replay(problem, placement.devices, placement.order)):
        raise InputError(f"placer {placer.name!r} returned a placement that does not fit.")
    if count == 1 and not steady:
        return placement
    ones = [placement]
    if effort != "fast" and isinstance(placer, Auto):
        less = _search(problem, _with_effort(placer, "fast"), "fast")
        ones += [] if less is None else [less]
    allowed = (
        problem if problem.max_devices is None else problem.within(next(device_choices(problem)))
    )
    if steady:
        return Pipelines(graph, allowed, _STREAMED, effort).steady(ones, placer)
    found = Pipelines(graph, allowed, count, effort).best(ones, placer)
    if found is None:
        _explain_copies(graph, problem, placement, count)
    return found


def _explain_copies(
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


def _warn_of_kinds(graph: OpGraph, cluster: Cluster) -> None:
    """Say where times of one kind of device are used for another."""
    kinds = dict.fromkeys(device.kind for device in cluster.devices)
    unknown = [kind for kind in kinds if kind and kind not in graph.times]
    if graph.times and unknown:
        warnings.warn(
            f"the graph has times for {', '.join(graph.times)} and none for {', '.join(unknown)}: "
            "what is predicted there is of the graph's default times. Profile the model on such a "
            "device, or compute its times (`baechi estimate`, or `place` with costs='estimate').",
            stacklevel=3,
        )


def find(problem: Problem, effort: str = "fast", placer: str | Placer = "auto") -> Placement | None:
    """A placement as from `solve`, or `None` where it would raise `InfeasibleError`.

    Computing the missing memory takes many times longer than finding that nothing fits.
    """
    return _attempt(problem, _with_effort(placer_of(placer), effort), effort)


def _attempt(
    problem: Problem, placer: Placer, effort: str, patience: int = PATIENT
) -> Placement | None:
    """A placement that fits also in the order in which a training step runs it, or None.

    One that does not is looked for again with as much memory less, and last on one device, where
    the two orders are one. A placer that does not search is not asked twice.
    """
    found = _search(problem, placer, effort, patience)
    constraints = problem.constraints or Constraints()
    margins = dict(constraints.margins)
    for _ in range(_ROUNDS):
        missing = {} if found is None or placer.fixed else _missing_as_run(problem, found)
        if not missing:
            return found
        for name, nbytes in missing.items():
            margins[name] = margins.get(name, 0) + nbytes
        less = Problem(problem.source, problem.cluster, replace(constraints, margins=margins))
        found = _search(less, placer, effort, patience)
        if found is None:
            break
    single = SingleDevice().place(problem)
    if single is None:
        return None
    stats = FrozenDict({**single.stats, "fallback": single.placer})
    return replace(single, placer=placer.name, stats=stats)


def _missing_as_run(problem: Problem, placement: Placement) -> dict[str, int]:
    """The bytes that devices lack in the order in which a training step runs, by name."""
    graph, used = problem.graph, set(placement.devices)
    if not graph.is_training or len(used) < 2:
        return {}
    if ample_bytes(problem) <= min(problem.device_memory[device] for device in used):
        return {}
    peaks = replay(problem, placement.devices, run_order(graph, placement)).peaks()
    over = [peak - most for peak, most in zip(peaks, problem.pool_memory, strict=True)]
    rows = zip(problem.cluster.devices, problem.device_pool, strict=True)
    return {device.name: over[pool] for device, pool in rows if over[pool] > 0}


def _explain_run(problem: Problem, placement: Placement) -> NoReturn:
    """Raise the error that names the memory that lacks in the order of the run alone."""
    missing = _missing_as_run(problem, placement)
    name, nbytes = max(missing.items(), key=lambda row: row[1])
    device = next(d for d, row in enumerate(problem.cluster.devices) if row.name == name)
    op = placement.devices.index(device)
    left = problem.device_memory
    more = ", ".join(f"{format_bytes(lacks)} more on {where}" for where, lacks in missing.items())
    text = (
        "no placement was found that fits as a training step runs it, in the model's order inside "
        f"of a segment. With {more} one was found; or add a device, or shrink the batch."
    )
    raise _infeasible(problem, text, op, left[device] + nbytes, left, nbytes, name)


def _with_effort(placer: Placer, effort: str) -> Placer:
    check_effort(effort)
    return replace(placer, effort=effort) if isinstance(placer, Auto) else placer


def _search(
    problem: Problem, placer: Placer, effort: str, patience: int = PATIENT
) -> Placement | None:
    """A placement that fits in its own order, or None."""
    if placer.fixed:
        return placer.place(problem)
    if is_hopeless(problem):
        return None
    if problem.max_devices is None:
        return _attempt_freely(problem, placer, effort, patience)
    # All choices are tried fast, and the best of them with the requested effort.
    first = _with_effort(placer, "fast")
    found: list[Placement] = []
    choice: tuple[int, ...] = ()  # that of the shortest
    for tried, devices in enumerate(device_choices(problem)):
        if found and tried >= _CHOICES[effort]:
            break
        placement = _attempt_freely(problem.within(devices), first, effort, patience)
        if placement is not None:
            found.append(placement)
            if shortest(found) is placement:
                choice = devices
    if isinstance(placer, Auto):
        if first != placer and found:
            placement = _attempt_freely(problem.within(choice), placer, effort, patience)
            found += [placement] if placement is not None else []
        # The best single device may be in none of the choices.
        single = best([("single", SingleDevice().place(problem))], placer.name)
        found += [single] if single is not None else []
    # A placer that uses only a few devices anyway may find one outside of all choices.
    return shortest(iter(found) if found else arrangements(problem, patience))


def _attempt_freely(
    problem: Problem, placer: Placer, effort: str, patience: int
) -> Placement | None:
    """As `_search`, without a limit on the number of devices."""
    narrowed = linked(problem)
    if narrowed is None:
        return None
    if isinstance(placer, Auto):
        placement = placer.place(narrowed)
    else:
        placement = best(portfolio(narrowed, (placer,), effort), placer.name)
    if placement is not None:
        return placement
    fallback = shortest(_arranged(narrowed, problem, patience))
    if fallback is None:
        return None
    stats = FrozenDict({**fallback.stats, "fallback": fallback.placer})
    return replace(fallback, placer=placer.name, stats=stats)


def _arranged(narrowed: Problem, problem: Problem, patience: int) -> Iterator[Placement]:
    """Placements by packing, then also with the devices that narrowing had ruled out."""
    yield from arrangements(narrowed, patience)
    if narrowed is not problem:
        yield from arrangements(problem, patience)


def _explain(problem: Problem, placer: Placer, effort: str) -> NoReturn:
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

    def arranged(units: int, device: int) -> bool:
        return _is_arranged(grown(problem, device, units * unit))

    def solved(units: int, device: int) -> bool:
        return _attempt(grown(problem, device, units * unit), placer, effort) is not None

    def solved_fast(units: int, device: int) -> bool:
        return _attempt(grown(problem, device, units * unit), fast, "fast", HASTY) is not None

    fast = _with_effort(placer, "fast")
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
            if arranged(units - 1, other):
                units, device = smallest(partial(arranged, device=other), units - 1), other
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
    rows = itertools.islice(device_choices(problem), _CHOICES["fast"])
    choices = [] if problem.max_devices is None else [problem.within(row) for row in rows]
    for choice in (problem, *choices):
        narrowed = linked(choice)
        if narrowed is not None and next(_arranged(narrowed, choice, HASTY), None) is not None:
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


def ample_bytes(problem: Problem) -> int:
    """An upper bound on the extra bytes that any device can need."""
    arrays = problem.arrays
    return arrays.total_op_bytes + arrays.total_tensor_bytes + max(problem.pool_margin)


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


_KINDS: Final[tuple[type[Placer], ...]] = (
    *(Auto, MTopo, METF, MSCT, HEFT, PEFT, Contiguous, Metis, LocalSearch),
    *(SingleDevice, RoundRobin, RandomPlacer),
)
PLACERS: Final[dict[str, Placer]] = {kind.name: kind() for kind in _KINDS}


def placer_of(placer: str | Placer) -> Placer:
    """The placer of that name, in any case.

    Raises:
        InputError: There is none.
    """
    if isinstance(placer, Placer):
        return placer
    known = PLACERS.get(placer.lower()) if isinstance(placer, str) else None
    if known is None:
        names = ", ".join(repr(name) for name in PLACERS)
        raise InputError(f"placer {placer!r} is unknown; it must be one of {names}, or a Placer.")
    return known
