"""Choices of the largest sum: matchings, and how many of something each job gets."""

from collections import Counter, deque
from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations, product
from typing import Final, TypeVar

import networkx as nx
import numpy as np

from baechi.cluster_simulation.jobs import JobRun
from baechi.cluster_simulation.policy_support.predictions import Predictions
from baechi.placers.linear_programs import LinearProgram, solved

_KINDS: Final = 8  # of things to couple: at most some hundred rows

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


def couples(
    view: Predictions,
    guests: Mapping[_One, Sequence[JobRun]],
    places: Mapping[_Other, Sequence[int]],
    weights: Mapping[tuple[_One, _Other], float],
) -> list[tuple[JobRun, int]]:
    """The pairs of a matching of maximum weight; who is in its place already stays there.

    Args:
        view: The cluster.
        guests: Jobs that are alike.
        places: The indices of hosts that are alike, or one negative number for GPUs that are.
        weights: Of a guest of a kind in a place of a kind.
    """
    flows = best_flows(
        weights,
        {kind: len(rows) for kind, rows in guests.items()},
        {kind: len(rows) for kind, rows in places.items()},
    )
    waiting = {kind: list(rows) for kind, rows in guests.items()}
    free = {kind: list(rows) for kind, rows in places.items()}
    found = []
    for stays in (True, False):
        for one, other in flows:
            for guest in tuple(waiting[one]):
                place = _place(view, guest) if stays else free[other][:1]
                if flows[one, other] and place and place[0] in free[other]:
                    flows[one, other] -= 1
                    waiting[one].remove(guest)
                    free[other].remove(place[0])
                    found.append((guest, place[0]))
    return found


def _place(view: Predictions, guest: JobRun) -> list[int]:
    """The host that it is beside, or the negative share of a GPU that it has for itself."""
    if not guest.running:
        return []
    gpu = guest.grant.gpus[0]
    first = view.devices.owners[gpu][0]
    return [first if first != guest.index else -view.devices.fleet.gpus[gpu].share]


def best_couples(
    weights: Mapping[tuple[_One, _One], float], many: Mapping[_One, int]
) -> dict[tuple[_One, _One], int]:
    """How many of each pair a matching has whose sum of weights is the largest, of one side.

    Edmonds' program over kinds of things that are alike, whose vertices are whole: of a set of
    kinds that has an odd number of things, one is left over. There are 2^kinds such sets; of more
    than `_KINDS` kinds Blossom's algorithm matches thing by thing, in cubic time.

    Args:
        weights: Of the pairs that may be; each once, that of a kind with itself included.
        many: How many there are of each.
    """
    kinds = [kind for kind, count in many.items() if count]
    pairs = [(a, b) for (a, b), weight in weights.items() if weight > 0 and many[a] and many[b]]
    if not pairs:
        return {}
    if len(kinds) > _KINDS:
        graph = nx.Graph()
        for one, other in pairs:
            for pair in product(range(many[one]), range(many[other])):
                if one != other or pair[0] < pair[1]:
                    ends = (one, pair[0]), (other, pair[1])
                    graph.add_edge(*ends, weight=weights[one, other])
        found = Counter((a, b) for (a, _), (b, _) in nx.max_weight_matching(graph))
        return {(a, b): found[a, b] + found[b, a] * (a != b) for a, b in pairs}
    sets: list[tuple[_One, ...]] = [(kind,) for kind in kinds]
    limit = [many[kind] for kind in kinds]
    for size in range(1, len(kinds) + 1):
        for some in combinations(kinds, size):
            if (total := sum(many[kind] for kind in some)) % 2:
                sets.append(some)
                limit.append(total // 2)
    entries = []
    for row, some in enumerate(sets):
        for number, (one, other) in enumerate(pairs):
            inside = (one in some) + (other in some)
            if inside == 2 or (inside and row < len(kinds)):
                entries.append((row, number, float(inside if row < len(kinds) else 1)))
    cost = [-weights[pair] for pair in pairs]
    program = LinearProgram.of(cost, [np.inf] * len(pairs), entries, limit)
    parts = solved(program, presolve=False)
    return {pair: round(part) for pair, part in zip(pairs, parts, strict=True) if part > 0.5}


def partners(kinds: Sequence[_One], couples_of: Mapping[tuple[_One, _One], int]) -> dict[int, int]:
    """Who is with whom, by places: of each pair the later to the earlier; the first go together.

    Args:
        kinds: Of every thing.
        couples_of: How many couples there are of each two kinds, as `best_couples` says.
    """
    left = dict(couples_of)
    waiting: dict[_One, deque[int]] = {}
    for place, kind in enumerate(kinds):
        waiting.setdefault(kind, deque()).append(place)
    pairs: dict[int, int] = {}
    for early, kind in enumerate(kinds):
        if early in pairs:
            continue
        waiting[kind].popleft()
        others = [(pair, pair[pair[0] == kind]) for pair in left if kind in pair and left[pair]]
        if others:
            late, pair = min((waiting[other][0], pair) for pair, other in others)
            left[pair] -= 1
            waiting[kinds[late]].popleft()
            pairs[late] = early
    return pairs


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
