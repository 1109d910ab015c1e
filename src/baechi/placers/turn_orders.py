"""Orders of the turns of a placed graph of micro-batches, on the one clock.

A turn is a segment with a batch (`problem/microbatches.py`). Candidates are, on the turns as ops of
a graph: earliest task first (m-ETF), which under the memory of 1F1B finds 1F1B; HEFT; m-ETF that
prefers the deepest of the turns that could start at once, which finds zero-bubble schedules; each
also with at most K batches in flight on a device, for the K that fit; a search from the shortest;
and one batch after the other, which needs least memory. The copies of all ops decide (`Turns.ops`),
so that what is predicted is what `simulate` says.

Earliest task first commits by start times. That matters: the clock's ports take transfers in the
order in which they are committed, so an order lane by lane would make the same schedule longer.

Complexity: that of m-ETF and HEFT on `microbatches * segments` turns for each K, and of a
simulation of all copies for the best few.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final, TypeAlias, final

from baechi import _core
from baechi.placers.auto import check_effort
from baechi.placers.etf import METF
from baechi.placers.heft import HEFT
from baechi.placers.local_search import Budget, improved
from baechi.problem.bounds import lower_bound_ns
from baechi.problem.microbatches import Turns, launches, segments_of
from baechi.problem.problem_arrays import Problem
from baechi.problem.simulation import replay
from baechi.records.cluster import Cluster, Constraints
from baechi.records.graph import OpGraph
from baechi.records.placement import Placement
from baechi.validation import check_positive

# Orders to simulate with the copies of all ops.
_SIMULATED: Final = {"fast": 1, "balanced": 3, "thorough": 8}
# Of the search for a shorter order: half a second for a thousand turns.
_SEARCH: Final = Budget(10_000_000, 60_000, ((1, 1 / 4), (1, 1 / 4), (1, 1 / 2)), 0, 0, 0)
# Turns above which few numbers of batches in flight are tried.
_MANY: Final = 4_000

# (segment, batch), in launch order.
Order: TypeAlias = tuple[tuple[int, int], ...]


@final
@dataclass(frozen=True, slots=True)
class Rhythm:
    """The turns of a placed graph in order, with what the clock says of them.

    Attributes:
        segments: The ops of every segment, in their order.
        turns: (segment, batch), in launch order: an order in which one thread may launch all. The
            turns of a segment are in the order of the batches; of those after a joined loss from
            the last batch to the first. A joined loss has one turn.
        step_ns: The step of all batches.
        peak_bytes: Peak memory of every device; of its pool, where it is in one.
        lower_bound_ns: No order of these ops on their devices is shorter.
    """

    segments: tuple[tuple[int, ...], ...]
    turns: tuple[tuple[int, int], ...]
    step_ns: int
    peak_bytes: tuple[int, ...]
    lower_bound_ns: int


def ordered_turns(
    graph: OpGraph,
    cluster: Cluster,
    placement: Placement,
    microbatches: int,
    *,
    segments: Sequence[Sequence[int]] | None = None,
    joined: bool = False,
    constraints: Constraints | None = None,
    effort: str = "balanced",
) -> Rhythm:
    """The shortest order found of the turns of a placed graph, of those that fit the memory.

    If none fits, the one that exceeds it least; `peak_bytes` says by how much.

    Args:
        graph: The graph of one micro-batch.
        cluster: The devices.
        placement: Its devices and its order, from which the segments are cut.
        microbatches: Number of micro-batches.
        segments: The ops of every segment, in topological order; by default `segments_of`.
        joined: Whether a training graph has one loss for all batches in place of one for each.
        constraints: As for `solve`; margins are kept free.
        effort: `"fast"`, `"balanced"` or `"thorough"`: how many orders are tried.

    Raises:
        InputError: A number is not positive, the placement is of another graph, or the segments
            are no partition of its ops in topological order.
    """
    check_positive(microbatches, "microbatches")
    check_effort(effort)
    problem = Problem(graph, cluster, constraints)
    replay(problem, placement.devices, placement.order)  # which checks it
    rows = segments_of(graph, placement) if segments is None else tuple(map(tuple, segments))
    turns = Turns(graph, problem, placement, rows, microbatches, joined)
    order, timeline = shortest_order(turns, effort)
    peaks = timeline.peaks()
    return Rhythm(
        rows,
        order,
        timeline.makespan(),
        tuple(peaks[pool] for pool in problem.device_pool),
        lower_bound_ns(turns.ops[1]),
    )


def shortest_order(turns: Turns, effort: str) -> tuple[Order, _core.Timeline]:
    """The best order found, and the timeline of all copies in it."""
    memory = turns.problem.pool_memory
    rated = sorted(_schedules(turns, effort), key=lambda row: row[0])
    copies, _ = turns.capped()
    one_by_one = turns.order_of(copies, range(copies.arrays.ops))
    best: tuple[int, int, Order, _core.Timeline] | None = None
    for number, order in enumerate((*(order for _, order in rated), one_by_one)):
        if number >= _SIMULATED[effort] and best is not None and best[0] == 0:
            break
        copies, problem = turns.ops
        timeline = problem.timeline()
        timeline.fold(*launches(copies, turns.placement.devices, turns.segments, order))
        over = sum(max(0, p - m) for p, m in zip(timeline.peaks(), memory, strict=True))
        if best is None or (over, timeline.makespan()) < best[:2]:
            best = over, timeline.makespan(), order, timeline
    assert best is not None
    return best[2:]


def _schedules(turns: Turns, effort: str) -> list[tuple[int, Order]]:
    """Orders of the turns, each with its step on the clock of turns; ends at a shortest one."""
    found: list[tuple[int, Order]] = []
    placements: list[Placement] = []
    copies, problem = turns.capped()
    bound = lower_bound_ns(problem)
    schedulers = [(HEFT(), False), (METF(), False), *([(METF(), True)] if effort != "fast" else [])]
    used = len(set(turns.homes))
    for most, (placer, urgent) in product(_caps(turns, effort), schedulers):
        if effort == "fast" and found and 0 < most < used:
            break
        view, capped = turns.capped(most, urgent=urgent) if most or urgent else (copies, problem)
        placement = placer.place(capped)
        if placement is not None:
            step_ns = int(placement.stats["makespan_ns"])
            found.append((step_ns, turns.order_of(view, placement.order)))
            if step_ns <= bound:
                return found
            placements += [] if urgent else [placement]
    better = None if effort == "fast" else improved(problem, placements, _SEARCH)
    if better is not None:
        step_ns = int(better.stats["makespan_ns"])
        found.append((step_ns, turns.order_of(copies, better.order)))
    return found


def _caps(turns: Turns, effort: str) -> Iterator[int]:
    """Numbers of batches in flight to try; 0 is no limit."""
    yield 0
    used, most = len(set(turns.homes)), turns.microbatches - 1
    if turns.joined:
        return
    few = effort == "fast" or turns.microbatches * len(turns.segments) > _MANY
    tried = (used, used // 2, 1) if few else range(1, 2 * used + 1)
    yield from dict.fromkeys(k for k in tried if 0 < k <= most)
