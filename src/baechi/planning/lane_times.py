"""Times of operators on lanes of one GPU, by how many are busy beside each in a plan.

    known       t(1) alone, t(k) while all k lanes are busy, each with its like
    in a plan   b lanes are busy in the mean while an operator runs:
                t = t(1) + (t(k) - t(1)) (b - 1) / (k - 1)

A plan's times decide which operators meet, so both are settled together, in a few rounds.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

import numpy as np

from baechi.errors import InfeasibleError
from baechi.problem.simulation import simulate
from baechi.records.cluster import Cluster, lanes_of
from baechi.records.graph import OpGraph
from baechi.records.placement import Placement, Span

_ROUNDS: Final = 4


def settled(
    graph: OpGraph,
    cluster: Cluster,
    placement: Placement,
    solve: Callable[[OpGraph], Placement] | None,
    fits: Callable[[OpGraph, Placement], bool],
) -> tuple[OpGraph, Placement]:
    """The faster of two placements, and the graph with the times that operators have in it.

    Where neither fits by these times, what was given: it fits by those of lanes always busy.

    Args:
        graph: With times of all lanes busy.
        cluster: The devices.
        placement: That for these times.
        solve: What finds another, for lanes that take nothing from each other; None for none.
        fits: Whether a placement fits by the times of a graph.
    """
    free = {kind: row for kind, row in graph.times.items() if lanes_of(kind)[1] == 1}
    if not any(device.lane_of for device in cluster.devices) or len(free) == len(graph.times):
        return graph, placement
    found = [_in_plan(graph, cluster, placement)]
    if solve is not None:
        with suppress(InfeasibleError):
            found.append(_in_plan(graph, cluster, solve(replace(graph, times=free))))
    fitting = [pair for pair in found if fits(*pair)]
    return min(fitting, key=lambda pair: pair[1].stats["makespan_ns"], default=(graph, placement))


def _in_plan(graph: OpGraph, cluster: Cluster, placement: Placement) -> tuple[OpGraph, Placement]:
    """The graph with the times of lanes that operators have in a placement, and this for it."""
    own, mine = graph, replace(placement, graph_digest=graph.digest)
    for _ in range(_ROUNDS):
        rows = {kind: list(row) for kind, row in graph.times.items()}
        for span, others_ns in _beside(simulate(own, cluster, mine).spans, cluster):
            kind = cluster.devices[span.device].kind
            alone = (
                graph.times[kind][span.op] if kind in graph.times else graph.ops[span.op].time_ns
            )
            for name, row in rows.items():
                base, lanes = lanes_of(name)
                if base == kind and lanes > 1:
                    more = (row[span.op] - alone) * others_ns
                    row[span.op] = alone + more // ((span.end_ns - span.start_ns) * (lanes - 1))
        own = replace(graph, times={kind: tuple(row) for kind, row in rows.items()})
        mine = replace(placement, graph_digest=own.digest)
    step_ns = simulate(own, cluster, mine).makespan_ns
    return own, replace(mine, stats={**placement.stats, "makespan_ns": step_ns})


def _beside(spans: Sequence[Span], cluster: Cluster) -> Iterator[tuple[Span, int]]:
    """Every operator on one of several lanes, and how long others of its GPU are busy meanwhile."""
    lanes: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        name = cluster.devices[span.device].lane_of
        if name and span.end_ns > span.start_ns:
            lanes[name].append(span)
    for row in lanes.values():
        if len({span.device for span in row}) == 1:
            continue
        start = np.array([span.start_ns for span in row], np.int64)
        end = np.array([span.end_ns for span in row], np.int64)
        # The lanes' busy time until each instant at which one begins or ends.
        instants, steps = np.concatenate([start, end]), np.repeat([1, -1], len(row))
        order = np.argsort(instants, kind="stable")
        instants, busy = instants[order], np.cumsum(steps[order])
        until = np.concatenate([[0], np.cumsum(np.diff(instants) * busy[:-1])])
        first, last = np.searchsorted(instants, start), np.searchsorted(instants, end)
        others = until[last] - until[first] - (end - start)
        yield from zip(row, others.tolist(), strict=True)
