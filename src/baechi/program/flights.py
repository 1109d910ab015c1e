"""Micro-batches of a step in flight: the slot of each, whose memory it has to itself meanwhile.

A batch is in flight from its first turn or copy to its last, as one thread launches all. Then its
slot is taken by the next batch that begins, if its turns have the same order on every lane: CUDA
graphs of a slot share memory, as far as that order lets them. Lanes may run behind the launches, so
a batch waits for what was the last of the one before it.

O(instructions + batches * slots).
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import final

from baechi.records.instructions import Copy, Program, Run


@final
@dataclass(frozen=True, slots=True)
class Flights:
    """The slots of a program of one phase.

    Attributes:
        slots: The slot of every batch.
        after: Of each (lane, position) where a batch begins on a lane, the one before in its slot.
        last: Of each (lane, position) where a batch ends on a lane that another comes after, it.
    """

    slots: tuple[int, ...]
    after: dict[tuple[int, int], int]
    last: dict[tuple[int, int], int]

    @property
    def n(self) -> int:
        """The number of slots."""
        return max(self.slots) + 1


def flights(program: Program) -> Flights:
    """The slots of the micro-batches of a step."""
    (phase,) = program.phases
    rows = [enumerate(row) for row in phase.lanes]
    turns: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    on: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))  # their positions
    spans: dict[int, list[int]] = {}
    for tick, lane in enumerate(phase.launch):
        position, row = next(rows[lane])
        if isinstance(row, Run | Copy):
            spans.setdefault(row.batch, [tick, tick])[1] = tick
            on[row.batch][lane].append(position)
            if isinstance(row, Run):
                turns[row.batch][lane].append(row.segment)
    found, latest = dict.fromkeys(range(program.batches), 0), list[int]()
    after: dict[tuple[int, int], int] = {}
    last: dict[tuple[int, int], int] = {}
    for batch, (begin, _) in sorted(spans.items(), key=lambda entry: entry[1]):
        free = (
            slot
            for slot, other in enumerate(latest)
            if spans[other][1] < begin and turns[other] == turns[batch]
        )
        found[batch] = slot = next(free, len(latest))
        if slot < len(latest):
            other = latest[slot]
            after |= {(lane, where[0]): other for lane, where in on[batch].items()}
            last |= {(lane, where[-1]): other for lane, where in on[other].items()}
        latest[slot : slot + 1] = [batch]
    return Flights(tuple(found.values()), after, last)
