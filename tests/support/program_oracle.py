"""What a program really does: all its interleavings, walked through one by one.

Where a program stands is how far each lane is. What is in memory then follows, for each place is
written once and freed once. So the states that can be reached are few enough to visit all, and
whether a race exists is seen and not derived.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from baechi.records.instructions import Copy, Free, Instruction, Phase, Place, Program, Run, Wait

Position = tuple[int, ...]
# Places of no tensor: the graph of a tape that runs again, and what a tape's forward leaves.
GRAPH, LEFT = -2, -3


def order_of(program: Program, launch: Sequence[int]) -> tuple[int, ...]:
    """A placement's order as the program runs it, for `simulate`.

    Devices alternate as in the placement; inside a segment its own order holds, and forward ops
    come before the loss.
    """
    n = len(program.names)
    order = sorted(launch, key=lambda op: (op > n) - (op < n))
    rank = {op: i for i, op in enumerate(order)}
    for phase in program.phases:
        for segment in phase.segments:
            ops = list(program.ops_of(segment))
            for op, place in zip(ops, sorted(rank[op] for op in ops), strict=True):
                order[place] = op
    return tuple(order)


def touched(
    program: Program, number: int, row: Instruction
) -> tuple[set[Place], set[Place], set[Place]]:
    """What an instruction reads, writes and frees; the graph of a tape that runs again, too."""
    match row:
        case Run():
            segment = program.phases[number].segments[row.segment]
            batch = row.batch
            reads = {Place(t, segment.device, batch) for t in segment.reads}
            writes = {Place(t, segment.device, batch) for t in segment.writes}
            again = {t for t in segment.tapes if program.tapes[t].again >= 0}
            graphs = {Place(t, GRAPH, batch) for t in again}
            left = {Place(t, LEFT, batch) for t in segment.tapes}
            if segment.again:
                writes |= graphs
            elif segment.backward:
                reads |= graphs
                left -= {Place(t, LEFT, batch) for t in again}
            if any(not row.backward for row in program.phases[number].segments):
                if segment.backward:
                    reads |= left
                elif program.is_training and len(program.phases) == 1:
                    writes |= left
            return reads, writes, set()
        case Copy():
            src, dst = (Place(row.tensor, d, row.batch) for d in (row.src, row.dst))
            return {src}, {dst}, set()
        case Free():
            return set(), set(), {Place(row.tensor, row.device, row.batch)}
    return set(), set(), set()


def fault(program: Program) -> str:
    """What can go wrong in the program; empty if nothing can."""
    numbers = range(len(program.phases))
    return next((text for number in numbers if (text := _fault(program, number))), "")


def _fault(program: Program, number: int) -> str:
    phase = program.phases[number]
    lanes = phase.lanes
    end = tuple(map(len, lanes))
    start = tuple(0 for _ in lanes)
    there = {start: frozenset(phase.given)}
    left = [start]
    while left:
        position = left.pop()
        memory = there[position]
        ready = [
            lane
            for lane, rows in enumerate(lanes)
            if position[lane] < len(rows) and _may_go(rows[position[lane]], position, lanes)
        ]
        if not ready and position != end:
            return f"deadlock at {position}"
        updating: set[int] = set()
        for lane in ready:
            row = lanes[lane][position[lane]]
            reads, writes, frees = touched(program, number, row)
            if not reads <= memory or not frees <= memory or writes & memory:
                return f"{row} at {position}"
            if isinstance(row, Run):
                updates = set(phase.segments[row.segment].updates)
                if updates & updating:
                    return f"{row} updates beside another at {position}"
                updating |= updates
            after = (*position[:lane], position[lane] + 1, *position[lane + 1 :])
            if after not in there:
                there[after] = (memory | writes) - frees
                left.append(after)
    ran = sorted((r.segment, r.batch) for rows in lanes for r in rows if isinstance(r, Run))
    batches = range(program.batches)
    if ran != [(segment, batch) for segment in range(len(phase.segments)) for batch in batches]:
        return f"ran {ran}"
    left_over = {place for place in there[end] if place.device not in (GRAPH, LEFT)}
    if left_over != set(phase.kept):
        return f"in the end {left_over}"
    return _out_of_order(program, number) if program.batches > 1 else ""


def _out_of_order(program: Program, number: int) -> str:
    """What is not in the order of batches, or of segments in a batch; empty if nothing is.

    Updates of state are ordered, so that those of any launch order are those of all.
    """
    phase, sign = program.phases[number], -1 if number else 1
    position = [0] * len(phase.lanes)
    last: dict[object, int] = {}
    for lane in phase.launch:
        row = phase.lanes[lane][position[lane]]
        position[lane] += 1
        if not isinstance(row, Run):
            continue
        segment = phase.segments[row.segment]
        keys: dict[object, int] = {("segment", row.segment): sign * row.batch}
        keys["lane", lane, row.batch, segment.backward] = row.segment
        if not segment.again:
            keys |= {("state", state): sign * row.batch for state in segment.updates}
        for key, value in keys.items():
            if value < last.get(key, value):
                return f"{row} is late for {key}"
        last |= keys
    return ""


def _may_go(row: Instruction, position: Position, lanes: Sequence[Sequence[Instruction]]) -> bool:
    if not isinstance(row, Wait):
        return True
    return 0 <= row.position < len(lanes[row.lane]) and position[row.lane] > row.position


def mutants(program: Program) -> Iterator[tuple[str, Program]]:
    """The program with any one instruction dropped, or swapped with the next of its lane."""
    for number, phase in enumerate(program.phases):
        for lane, rows in enumerate(phase.lanes):
            for position, row in enumerate(rows):
                yield f"dropped {row}", _with(program, number, _dropped(phase, lane, position))
                if position + 1 < len(rows) and row != rows[position + 1]:
                    other = (*rows[:position], rows[position + 1], row, *rows[position + 2 :])
                    lanes = (*phase.lanes[:lane], other, *phase.lanes[lane + 1 :])
                    text = f"swapped {row} and {rows[position + 1]}"
                    yield text, _with(program, number, replace(phase, lanes=lanes))


def other_batches(program: Program) -> Iterator[tuple[str, Program]]:
    """The program with any one instruction for the other of two batches."""
    for number, phase in enumerate(program.phases):
        for lane, rows in enumerate(phase.lanes):
            for position, row in enumerate(rows):
                if not isinstance(row, Wait):
                    other = replace(row, batch=1 - row.batch)
                    changed = (*rows[:position], other, *rows[position + 1 :])
                    lanes = (*phase.lanes[:lane], changed, *phase.lanes[lane + 1 :])
                    yield f"{other}", _with(program, number, replace(phase, lanes=lanes))


def _with(program: Program, number: int, phase: Phase) -> Program:
    """The program with another phase, launched in any order that its waits allow."""
    launch: list[int] = []
    position = [0] * len(phase.lanes)
    moved = True
    while moved:
        moved = False
        for lane, rows in enumerate(phase.lanes):
            while position[lane] < len(rows):
                if not _may_go(rows[position[lane]], tuple(position), phase.lanes):
                    break
                position[lane] += 1
                launch.append(lane)
                moved = True
    phases = list(program.phases)
    phases[number] = replace(phase, launch=tuple(launch))
    return replace(program, phases=tuple(phases))


def _dropped(phase: Phase, lane: int, position: int) -> Phase:
    """Without an instruction; who waited for it or a later one waits for the one before."""
    lanes: list[tuple[Instruction, ...]] = []
    for index, rows in enumerate(phase.lanes):
        kept: list[Instruction] = []
        for place, row in enumerate(rows):
            if (index, place) == (lane, position):
                continue
            if isinstance(row, Wait) and row.lane == lane and row.position >= position:
                if row.position > 0:
                    kept.append(Wait(lane, row.position - 1))
                continue
            kept.append(row)
        lanes.append(tuple(kept))
    return replace(phase, lanes=tuple(lanes))
