"""Kinds of GPU by a minimum-cost matching of jobs to places in queues: AlloX.

The rule (Le et al., "AlloX: Compute Allocation in Hybrid Clusters", EuroSys'20, section 4): the
mean completion time of jobs on unlike machines is least for a minimum-cost matching of jobs to
pairs of a machine and a place p from the end of its queue, where a job that takes t there costs p
t: it and the p - 1 behind it wait for it. The first of each queue starts; the others are matched
anew at the next event. Of the jobs that wait only the oldest are matched, a part alpha = 0.3 of
them but at least as many as GPUs are free, so that long ones are not overtaken for ever.

Where we leave it: GPUs of a kind are alike, so a place is matched as often as there are free GPUs
of the kind: a linear program, whose vertices are matchings. The paper's jobs take one machine; here
one of g GPUs takes g places, and as vertices need not be whole then, its largest part counts. Where
only one kind is free, its queues are in order of time without a program. At most 64 jobs are
matched at once.
"""

from collections.abc import Sequence
from typing import Final, final

from baechi.cluster_simulation.policy_support.allocation import (
    AllocatingPolicy,
    Allocation,
    ClusterView,
)
from baechi.placers.linear_programs import LinearProgram, solved

_ALPHA: Final = 0.3
_MOST: Final = 64  # jobs of one program, which has some thousands of columns then


def matched(
    times: Sequence[Sequence[float]], sizes: Sequence[Sequence[int]], free: Sequence[int]
) -> list[tuple[int, int] | None]:
    """The kind of each job, and its place from the end of the queue there, from 1.

    `None` for a job that no kind has room for.

    Args:
        times: What each job takes on every kind; infinite where it has no room.
        sizes: The GPUs that it needs there.
        free: The GPUs of every kind.
    """
    columns = [
        (job, kind, place)
        for job, (row, needs) in enumerate(zip(times, sizes, strict=True))
        for kind, time in enumerate(row)
        if time < float("inf") and needs[kind] <= free[kind]
        for place in range(1, -(-sum(need[kind] for need in sizes) // free[kind]) + 1)
    ]
    jobs = sorted({job for job, _, _ in columns})
    answer: list[tuple[int, int] | None] = [None] * len(times)
    if not jobs:
        return answer
    if sum(map(bool, free)) == 1:
        kind = next(kind for kind, count in enumerate(free) if count)
        for place, job in enumerate(
            sorted(jobs, key=lambda job: (-times[job][kind], -job)), start=1
        ):
            answer[job] = kind, place
        return answer
    row_of = {job: row for row, job in enumerate(jobs)}
    queues = {queue: row for row, queue in enumerate(sorted({(k, p) for _, k, p in columns}))}
    unit = max(place * times[job][kind] for job, kind, place in columns) or 1.0
    entries = []
    for number, (job, kind, place) in enumerate(columns):
        entries.append((row_of[job], number, -1.0))  # each job at least once
        # Each place at most as often as there are GPUs.
        entries.append((len(jobs) + queues[kind, place], number, float(sizes[job][kind])))
    cost = [place * times[job][kind] / unit for job, kind, place in columns]
    limit = [*[-1.0] * len(jobs), *(float(free[kind]) for kind, _ in queues)]
    solution = solved(LinearProgram.of(cost, [1.0] * len(columns), entries, limit))
    largest = [0.0] * len(times)
    for (job, kind, place), part in zip(columns, solution, strict=True):
        if part > largest[job] + 1e-9:
            largest[job] = part
            answer[job] = kind, place
    return answer


@final
class AlloX(AllocatingPolicy):
    """The first of each queue of a minimum-cost matching."""

    name = "allox"

    def allocate(self, view: ClusterView) -> Sequence[Allocation]:
        """The running jobs, and those that the matching starts on free GPUs."""
        kept = view.kept()
        free = view.idle_by_kind
        if not sum(free):
            return kept
        many = max(sum(free), int(_ALPHA * len(view.waiting)))
        waiting = view.waiting[: min(_MOST, many)]
        times = [[view.time_left(run, kind=kind) for kind in view.kinds] for run in waiting]
        sizes = [[view.needs(run, kind) for kind in view.kinds] for run in waiting]
        places = matched(times, sizes, free)
        kinds = list(view.kinds.values())
        # The first of a queue is the farthest from its end; then the first to arrive.
        order = sorted(range(len(waiting)), key=lambda job: (-(places[job] or (0, 0))[1], job))
        for job in order:
            chosen = places[job]
            if chosen is not None and sizes[job][chosen[0]] <= free[chosen[0]]:
                free[chosen[0]] -= sizes[job][chosen[0]]
                kept.append(Allocation(waiting[job], among=kinds[chosen[0]]))
        wide = [run for run, row in zip(waiting, times, strict=True) if min(row) == float("inf")]
        return [*kept, *view.on_best_kinds(wide, free)]
