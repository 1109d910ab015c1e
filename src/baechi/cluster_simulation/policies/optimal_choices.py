"""Choices of the largest sum: pairs of two sides, and how many of something each job gets."""

from collections.abc import Mapping, Sequence

import numpy as np

from baechi.placers.linear_programs import solved


def best_pairs(
    weights: Mapping[tuple[int, int], float], room: Mapping[int, int] | None = None
) -> dict[int, int]:
    """The partners of a matching whose sum of weights is the largest.

    A linear program: of a bipartite graph, its vertices are matchings.

    Args:
        weights: Of each pair that may be; the two sides are numbered apart.
        room: How many partners each of the second side may have; one where absent.
    """
    pairs = [pair for pair, weight in weights.items() if weight > 0]
    if not pairs:
        return {}
    rows = {one: row for row, one in enumerate(dict.fromkeys(one for one, _ in pairs))}
    others = {other: row for row, other in enumerate(dict.fromkeys(o for _, o in pairs), len(rows))}
    entries = []
    for number, (one, other) in enumerate(pairs):
        entries += [(rows[one], number, 1.0), (others[other], number, 1.0)]
    limit = [*[1.0] * len(rows), *(float((room or {}).get(other, 1)) for other in others)]
    parts = solved([-weights[pair] for pair in pairs], [1.0] * len(pairs), entries, limit)
    return {one: other for (one, other), part in zip(pairs, parts, strict=True) if part > 0.5}


def knapsack(values: Sequence[Sequence[float]], room: int) -> list[int]:
    """How many more each job gets, so that the sum of values is the largest.

    Args:
        values: Of each job, what it gains by 1, 2, ... more.
        room: How many there are.
    """
    best = np.zeros(room + 1)
    taken = []
    for row in values:
        options = np.full((min(len(row), room) + 1, room + 1), -np.inf)
        options[0] = best
        for more, value in enumerate(row[:room], start=1):
            options[more, more:] = best[: room + 1 - more] + value
        taken.append(options.argmax(axis=0))
        best = options.max(axis=0)
    answer = []
    for choice in reversed(taken):
        answer.append(int(choice[room]))
        room -= answer[-1]
    return answer[::-1]
