"""The search for a placement that fits: by a placer, its fallbacks, and choices of devices."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from baechi.errors import InputError
from baechi.placers.auto import Auto, best, check_effort, portfolio
from baechi.placers.baselines import MTopo, RandomPlacer, RoundRobin, SingleDevice
from baechi.placers.contiguous import Contiguous
from baechi.placers.device_choice import device_choices, linked
from baechi.placers.list_schedulers import HEFT, METF, PEFT
from baechi.placers.local_search import LocalSearch
from baechi.placers.memory_packing import PATIENT, arrangements, is_hopeless
from baechi.placers.metis import Metis
from baechi.placers.placer import Placer, shortest
from baechi.placers.sct import MSCT
from baechi.problem.problem_arrays import Problem
from baechi.problem.segments import in_run_order
from baechi.problem.simulation import replay
from baechi.records.cluster import Constraints
from baechi.records.placement import Placement
from baechi.validation import FrozenDict

# Minimum number of device choices to try if the number of devices is limited.
CHOICES: Final = {"fast": 2, "balanced": 6, "thorough": 24}
# How often a placement that does not fit as it runs is looked for with less memory.
_ROUNDS: Final = 4
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


def find(problem: Problem, effort: str = "fast", placer: str | Placer = "auto") -> Placement | None:
    """A placement as from `solve`, or `None` where it would raise `InfeasibleError`.

    Computing the missing memory takes many times longer than finding that nothing fits.
    """
    return attempt(problem, with_effort(placer_of(placer), effort), effort)


def attempt(
    problem: Problem, placer: Placer, effort: str, patience: int = PATIENT
) -> Placement | None:
    """A placement that fits also in the order in which a training step runs it, or None.

    One that does not is looked for again with as much memory less, and last on one device, where
    the two orders are one. A placer that does not search is not asked twice.
    """
    found = search(problem, placer, effort, patience)
    constraints = problem.constraints or Constraints()
    margins = dict(constraints.margins)
    for _ in range(_ROUNDS):
        missing = {} if found is None or placer.fixed else missing_as_run(problem, found)
        if not missing:
            return found
        for name, nbytes in missing.items():
            margins[name] = margins.get(name, 0) + nbytes
        less = Problem(problem.source, problem.cluster, replace(constraints, margins=margins))
        found = search(less, placer, effort, patience)
        if found is None:
            break
    single = SingleDevice().place(problem)
    if single is None:
        return None
    stats = FrozenDict({**single.stats, "fallback": single.placer})
    return replace(single, placer=placer.name, stats=stats)


def search(
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
    first = with_effort(placer, "fast")
    found: list[Placement] = []
    choice: tuple[int, ...] = ()  # that of the shortest
    for tried, devices in enumerate(device_choices(problem)):
        if found and tried >= CHOICES[effort]:
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
    """As `search`, without a limit on the number of devices."""
    narrowed = linked(problem)
    if narrowed is None:
        return None
    if isinstance(placer, Auto):
        placement = placer.place(narrowed)
    else:
        placement = best(portfolio(narrowed, (placer,), effort), placer.name)
    if placement is not None:
        return placement
    fallback = shortest(arranged(narrowed, problem, patience))
    if fallback is None:
        return None
    stats = FrozenDict({**fallback.stats, "fallback": fallback.placer})
    return replace(fallback, placer=placer.name, stats=stats)


def arranged(narrowed: Problem, problem: Problem, patience: int) -> Iterator[Placement]:
    """Placements by packing, then also with the devices that narrowing had ruled out."""
    yield from arrangements(narrowed, patience)
    if narrowed is not problem:
        yield from arrangements(problem, patience)


def missing_as_run(problem: Problem, placement: Placement) -> dict[str, int]:
    """The bytes that devices lack in the order in which a step runs, by name."""
    graph, used = problem.graph, set(placement.devices)
    reordered = graph.is_training or graph.standing
    is_run = len(used) < 2 and placement.order == tuple(range(len(graph.ops)))
    if is_run or not (reordered or problem.in_use(placement.devices) is not problem):
        return {}
    if ample_bytes(problem) <= min(problem.device_memory[device] for device in used):
        return {}
    run = in_run_order(graph, placement)
    peaks = replay(problem, run.devices, run.order).peaks()
    over = [peak - most for peak, most in zip(peaks, problem.pool_memory, strict=True)]
    rows = zip(problem.cluster.devices, problem.device_pool, strict=True)
    return {device.name: over[pool] for device, pool in rows if over[pool] > 0}


def with_effort(placer: Placer, effort: str) -> Placer:
    """The placer, with this effort if it has one."""
    check_effort(effort)
    return replace(placer, effort=effort) if isinstance(placer, Auto) else placer


def ample_bytes(problem: Problem) -> int:
    """An upper bound on the extra bytes that any device can need."""
    arrays = problem.arrays
    return arrays.total_op_bytes + arrays.total_tensor_bytes + max(problem.pool_margin)
