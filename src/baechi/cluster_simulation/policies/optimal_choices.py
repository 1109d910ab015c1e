"""Choices of the largest sum: pairs of two sides, and how many of something each job gets."""

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from baechi.placers.linear_programs import LinearProgram, solved

_One = TypeVar("_One", bound=Hashable)
_Other = TypeVar("_Other", bound=Hashable)


def best_flows(
    weights: Mapping[tuple[_One, _Other], float],
    many: Mapping[_One, int],
    room: Mapping[_Other, int],
) -> dict[tuple[_One, _Other], int]:
    """How many of each pair a matching has whose sum of weights is the largest.

    A linear program, whose vertices are whole, over sets of things that are alike.

    Args:
        weights: Of the pairs that may be.
        many: How many there are of each of the first side.
        room: How many there are of each of the second.
    """
    pairs = [(a, b) for (a, b), weight in weights.items() if weight > 0 and many[a] and room[b]]
    if len(pairs) < 2:
        return {(one, other): min(many[one], room[other]) for one, other in pairs}
    ones = {one: row for row, one in enumerate(dict.fromkeys(one for one, _ in pairs))}
    others = {other: row for row, other in enumerate(dict.fromkeys(b for _, b in pairs), len(ones))}
    entries = []
    for number, (one, other) in enumerate(pairs):
        entries += [(ones[one], number, 1.0), (others[other], number, 1.0)]
    limit = [*(float(many[one]) for one in ones), *(float(room[other]) for other in others)]
    cost = [-weights[pair] for pair in pairs]
    parts = solved(LinearProgram.of(cost, [np.inf] * len(pairs), entries, limit))
    return {pair: round(part) for pair, part in zip(pairs, parts, strict=True) if part > 0.5}


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
