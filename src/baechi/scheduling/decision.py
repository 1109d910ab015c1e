"""Placement decisions: which of the free devices a graph uses, and the claims for them.

`explore` list-schedules the graph (m-ETF and HEFT, in the one clock) on sets of devices in the
order of `device_sets.py`, skips sets that cannot beat a placement that was found, and returns the
Pareto list of few devices and short steps. Where no list schedule fits, dense packings are tried on
the sets with the most memory, and on all free devices; with more effort than fast, so is the full
solver, which then also improves the placements that were found.

Pure: equal input gives equal output, and nothing is reserved.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, NoReturn, final

from baechi.errors import InfeasibleError, InputError, ReservationError
from baechi.placers.auto import best, portfolio
from baechi.placers.device_choice import linked
from baechi.placers.infeasibility import EVERY, grown
from baechi.placers.list_schedulers import HEFT, METF
from baechi.placers.memory_packing import HASTY, arrangements, is_hopeless
from baechi.placers.placer import shortest, smallest
from baechi.placers.searching import ample_bytes, find
from baechi.problem.problem_arrays import Problem
from baechi.problem.simulation import replay
from baechi.records.cluster import Cluster, Constraints
from baechi.records.graph import OpGraph
from baechi.records.placement import Placement
from baechi.scheduling.claims import WHOLE_MILLI, Claim, Room, Wish
from baechi.scheduling.device_sets import Candidate, Demand, candidates, parts, resolved
from baechi.scheduling.snapshot import Snapshot, claims_of
from baechi.units import format_bytes
from baechi.validation import check_is

# Sets that are tried.
_TRIED: Final = {"fast": 7, "balanced": 24, "thorough": 60}
# Effort of `solve` on the sets of the Pareto list.
_POLISH: Final = {"balanced": "fast", "thorough": "balanced"}
# Sets that `solve` tries where no list schedule fits.
_SOLVED: Final = 2
# Steps of the bisection for packings: to 1/256 of the missing memory.
_PACKED: Final = 8
# Devices of the cluster that is explained where nothing fits.
_EXPLAINED: Final = 8


@final
@dataclass(frozen=True, slots=True)
class Decision:
    """A placement, and the resources that it takes.

    Attributes:
        cluster: The free parts of the devices that it uses, in the order of the snapshot.
        placement: For `cluster`.
        step_ns: The predicted step.
        peak_bytes: The memory that it takes on each device; of its pool, where it is in one.
        shares: The compute that it takes of each, in thousandths.
        version: That of the snapshot.
    """

    cluster: Cluster
    placement: Placement
    step_ns: int
    peak_bytes: tuple[int, ...]
    shares: tuple[int, ...]
    version: int

    @property
    def devices(self) -> tuple[str, ...]:
        """The names of the devices."""
        return tuple(device.name for device in self.cluster.devices)

    def claims(self) -> tuple[Claim, ...]:
        """The claims to reserve for it."""
        shares = dict(zip(self.devices, self.shares, strict=True))
        return claims_of(self.cluster, self.placement, self.peak_bytes, shares)


def decide(graph: OpGraph, snapshot: Snapshot, wish: Wish | None = None) -> Decision:
    """The decision that the wish prefers.

    Raises:
        InfeasibleError: None was found; has the missing memory on the devices with the most memory.
        ReservationError: No device is free, or none that the graph may use.
        InputError: The wish names what does not exist, or contradicts itself.
    """
    wish = Wish() if wish is None else wish
    found = explore(graph, snapshot, wish)
    if not found:
        explain(graph, snapshot, wish)
    return choose(found, wish.slack_milli)


def choose(found: Sequence[Decision], slack_milli: int | None) -> Decision:
    """The one with the fewest devices whose step is within the slack of the shortest."""
    if slack_milli is None:
        return found[0]
    longest = min(row.step_ns for row in found) * (WHOLE_MILLI + slack_milli) // WHOLE_MILLI
    return next(row for row in found if row.step_ns <= longest)


def explore(
    graph: OpGraph, snapshot: Snapshot, wish: Wish, *, tried: int | None = None
) -> tuple[Decision, ...]:
    """The Pareto list of decisions, from the fewest devices to the shortest step.

    Of two, the one with more devices has the shorter step. Empty where none was found. At most
    `tried` sets of devices are list-scheduled on; by the effort if absent.

    Raises:
        InputError: The graph is empty, or the wish names what does not exist or contradicts itself.
    """
    check_is(graph, OpGraph, "graph")
    check_is(snapshot, Snapshot, "snapshot")
    check_is(wish, Wish, "wish")
    if not graph.ops:
        raise InputError("the graph has no ops; there is nothing to place.")
    rooms = snapshot.rooms(wish.share_milli)
    wish = resolved(wish, graph, snapshot.site, rooms)
    found: list[Decision] = []
    untried: list[Candidate] = []
    left = _TRIED[wish.effort] if tried is None else tried
    for candidate in candidates(Demand.of(graph), snapshot.site, rooms, wish):
        size, bound_ns = len(candidate.rooms), candidate.bound_ns
        if any(len(row.devices) <= size and row.step_ns <= bound_ns for row in found):
            continue
        if left == 0 and found:
            break
        if left == 0:
            untried.append(candidate)
            continue
        left -= 1
        chosen = [rooms[at] for at in candidate.rooms]
        problem = problem_of(graph, snapshot, chosen, wish)
        placement = _scheduled(problem)
        if placement is None:
            untried.append(candidate)
        else:
            found.append(decided(problem, placement, snapshot, chosen))
    if not found:
        found = _solved(graph, snapshot, rooms, untried, wish)
    found = _pareto(found)
    if wish.effort in _POLISH:
        polished = (_polished(graph, row, snapshot, rooms, wish) for row in found)
        found = _pareto([*found, *polished])
    return tuple(found)


def explain(graph: OpGraph, snapshot: Snapshot, wish: Wish) -> NoReturn:
    """Raises the error with the missing memory where `explore` finds nothing: slower than that.

    Raises:
        InfeasibleError: As `decide`.
        ReservationError: No device is free, or none that the graph may use.
    """
    rooms = snapshot.rooms(wish.share_milli)
    snapshot.part(rooms)
    wish = resolved(wish, graph, snapshot.site, rooms)
    nothing = replace(Demand.of(graph), total_bytes=0, largest_bytes=0, single_bytes=0)
    rows = list(candidates(nothing, snapshot.site, rooms, wish))
    if not rows:
        raise ReservationError(
            "the constraints leave no device that the graph may use: a pinned one is taken, or all "
            "are excluded. Relax them, or wait."
        )
    few = [row for row in rows if len(row.rooms) <= _EXPLAINED] or rows
    largest = max(few, key=lambda row: (row.memory_bytes, -len(row.rooms)))
    raise _missing(problem_of(graph, snapshot, [rooms[at] for at in largest.rooms], wish))


def _missing(problem: Problem) -> InfeasibleError:
    """The error of a problem that no list schedule fits, with the smallest memory that helps one.

    For the device with the most memory; for every device, where no more of that one helps. A few
    steps of the bisection look whether the denser packings that `solve` tries need less.
    """
    devices = problem.cluster.devices
    ample = ample_bytes(problem)
    roomiest = max(range(len(devices)), key=lambda at: (devices[at].memory_bytes, -at))

    def helps(nbytes: int, device: int) -> bool:
        return _scheduled(grown(problem, device, nbytes)) is not None

    def packs(nbytes: int, device: int) -> bool:
        narrowed = linked(grown(problem, device, nbytes))
        return narrowed is not None and next(arrangements(narrowed), None) is not None

    needs = problem.group_bytes
    op = problem.group_ops[max(range(len(needs)), key=lambda group: (needs[group], -group))][0]
    left = tuple((device.name, device.memory_bytes) for device in devices)
    listed = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in left)
    text = (
        f"no placement was found on any tried set of free devices; the one with most memory is "
        f"{listed}, and the largest to place is {problem.group_name(op)} "
        f"({format_bytes(max(needs))})."
    )
    for device, name in ((roomiest, devices[roomiest].name), (EVERY, "every device")):
        if helps(ample, device):
            high = smallest(partial(helps, device=device), ample)
            high = smallest(partial(packs, device=device), high, low=-1, steps=_PACKED)
            text += f" Give {format_bytes(high)} more to {name}, wait, or shrink the batch."
            break
    else:
        high, name = 0, ""
        text += " More memory would not help: relax the constraints, or wait."
    subject = problem.graph.ops[op].group or problem.graph.ops[op].name
    return InfeasibleError(text, subject, max(needs), left, high, name)


def problem_of(graph: OpGraph, snapshot: Snapshot, chosen: Sequence[Room], wish: Wish) -> Problem:
    """The problem of a few rooms, without constraints on the devices of others."""
    cluster, limits = snapshot.part(chosen), wish.constraints
    if limits == Constraints():
        return Problem(graph, cluster)
    names = {device.name for device in cluster.devices}
    forbidden = {name: names.intersection(row) for name, row in limits.forbidden.items()}
    limits = replace(
        limits,
        forbidden={name: tuple(row) for name, row in forbidden.items() if row},
        excluded=(),  # rooms of these are not chosen
        margins={name: nbytes for name, nbytes in limits.margins.items() if name in names},
    )
    return Problem(graph, cluster, limits)


def _scheduled(problem: Problem) -> Placement | None:
    """The better list schedule; `None` where none fits."""
    narrowed = linked(problem)
    if narrowed is None:
        return None
    return best(portfolio(narrowed, (METF(), HEFT()), "fast", coarsely=False), "auto")


def _solved(
    graph: OpGraph,
    snapshot: Snapshot,
    rooms: Sequence[Room],
    untried: Sequence[Candidate],
    wish: Wish,
) -> list[Decision]:
    """A decision on the sets with the most memory, or on all free devices of a part.

    First the dense packings, which take milliseconds; then, unless the effort is fast, the full
    solver, which takes up to a second before it gives up.
    """
    ranked = sorted(untried, key=lambda row: (-row.memory_bytes, len(row.rooms), row.bound_ns))
    sets = [row.rooms for row in ranked[:_SOLVED]]
    if untried:
        whole = parts(snapshot.site, rooms, wish)[:_SOLVED]
        sets += [row for row in whole if row not in sets]
    problems = []
    for row in sets:
        chosen = [rooms[at] for at in row]
        problem = problem_of(graph, snapshot, chosen, wish)
        if not is_hopeless(problem):
            problems.append((chosen, problem))
    for solver in (_packed,) if wish.effort == "fast" else (_packed, find):
        for chosen, problem in problems:
            placement = solver(problem)
            if placement is not None:
                return [decided(problem, placement, snapshot, chosen)]
    return []


def _packed(problem: Problem) -> Placement | None:
    """The shortest packing; `None` where none is found, or the number of devices is limited."""
    narrowed = linked(problem) if problem.max_devices is None else None
    return None if narrowed is None else shortest(arrangements(narrowed, HASTY))


def _polished(
    graph: OpGraph, decision: Decision, snapshot: Snapshot, rooms: Sequence[Room], wish: Wish
) -> Decision:
    """The placement by `solve` on the devices of a decision, or the decision if there is none."""
    chosen = [room for room in rooms if room.device in decision.cluster.devices]
    problem = problem_of(graph, snapshot, chosen, wish)
    placement = find(problem, _POLISH[wish.effort])
    return decision if placement is None else decided(problem, placement, snapshot, chosen)


def decided(
    problem: Problem, placement: Placement, snapshot: Snapshot, chosen: Sequence[Room]
) -> Decision:
    """The decision with only the devices that are used."""
    timeline = replay(problem, placement.devices, placement.order)
    peaks = timeline.peaks()
    used = sorted(set(placement.devices))
    index = {device: at for at, device in enumerate(used)}
    rows = [chosen[at] for at in used]
    return Decision(
        snapshot.part(rows),
        replace(placement, devices=tuple(index[at] for at in placement.devices)),
        timeline.makespan(),
        tuple(peaks[problem.device_pool[at]] for at in used),
        tuple(row.share_milli for row in rows),
        snapshot.version,
    )


def _pareto(found: Sequence[Decision]) -> list[Decision]:
    """The Pareto list by number of devices and step."""
    rows: list[Decision] = []
    for row in sorted(found, key=lambda row: (len(row.devices), row.step_ns)):
        if not rows or row.step_ns < rows[-1].step_ns:
            rows.append(row)
    return rows
