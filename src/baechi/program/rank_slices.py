"""Slices of a program: what each rank runs of a phase, and the proof that no ranks deadlock.

A rank has one device. Its slice is the instructions that touch the memory of that device, in the
launch order of the program, which is one order of all instructions:

    launch   run a ── copy a: 0 to 1 ── run b ── free a on 0 ── run c
    rank 0   run a    send a                     free a         run c
    rank 1            receive a         run b

A copy is a send in one slice and a receive in another; waits are in neither, since a rank does one
thing after the other. Segments on several devices that draw from one generator hand its state on:
`in_order` writes these copies, of no tensor, into the order.

No deadlock: let c be the earliest instruction of the order that has not ended. All before it have,
so each rank that takes part in c has come to it, and c goes on, even if a send waits until it is
received. A rank may also send before its turn, where that needs no waiting: edges keep the order of
their copies, so when c's turn comes, all that was sent before it there has been received.

`check_slices` proves the premise for a program that `check_program` has proved: every slice is
complete and in the order. What a device's memory sees is then what it sees in the launch order.
"""

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from baechi.errors import InputError
from baechi.records.instructions import Copy, Instruction, Phase, Place, Run, Wait

GENERATOR: Final = -1  # the "tensor" that is the state of the random generator

Row: TypeAlias = tuple[Instruction, int]  # an instruction, and its position in the order
Slice: TypeAlias = tuple[Row, ...]


def in_order(phase: Phase, random_state: int) -> list[Instruction]:
    """All instructions but waits, in launch order, with the ways of the random generator.

    Args:
        phase: The phase.
        random_state: The number that segments which draw have among their `updates`.
    """
    position = [0] * len(phase.lanes)
    rows: list[Instruction] = []
    last: int | None = None
    for lane in phase.launch:
        row = phase.lanes[lane][position[lane]]
        position[lane] += 1
        if isinstance(row, Wait):
            continue
        if isinstance(row, Run) and random_state in phase.segments[row.segment].updates:
            device = phase.segments[row.segment].device
            if last is not None and last != device:
                rows.append(Copy(GENERATOR, last, device, row.batch))
            last = device
        rows.append(row)
    return rows


def last_to_draw(phase: Phase, random_state: int) -> int | None:
    """The device that has the state of the random generator in the end; None if none draws."""
    found = None
    for row in in_order(phase, random_state):
        if isinstance(row, Run) and random_state in phase.segments[row.segment].updates:
            found = phase.segments[row.segment].device
    return found


def touched(phase: Phase, row: Instruction) -> tuple[int, ...]:
    """The devices whose memory an instruction touches."""
    match row:
        case Run():
            return (phase.segments[row.segment].device,)
        case Copy():
            return (row.src, row.dst)
        case Wait():
            return ()
    return (row.device,)


def slice_of(phase: Phase, order: Sequence[Instruction], device: int) -> Slice:
    """What the rank with a device runs."""
    return tuple((row, at) for at, row in enumerate(order) if device in touched(phase, row))


def check_slices(phase: Phase, order: Sequence[Instruction], slices: Sequence[Slice]) -> None:
    """Prove that ranks which run these never wait for each other in a circle.

    Raises:
        InputError: A slice leaves out what touches its device's memory, has what does not, or is in
            another order.
    """
    for device, rows in enumerate(slices):
        wanted = slice_of(phase, order, device)
        if tuple(rows) != wanted:
            pairs = zip((*rows, None), (*wanted, None), strict=False)
            found, should = next(pair for pair in pairs if pair[0] != pair[1])
            raise InputError(
                f"the slice of rank {device} has {found} where the program's order has {should}: "
                "ranks could wait for each other for ever. Compile the placement again."
            )


def early_sends(phase: Phase, rows: Slice, device: int) -> dict[int, list[tuple[int, Copy]]]:
    """By receiver the sends of a slice in order, each with the index after which it may be made.

    -1 is from the beginning: the caller gives what it sends.
    """
    written: dict[Place, int] = {}
    found: dict[int, list[tuple[int, Copy]]] = {}
    drawn = -1
    for index, (row, _) in enumerate(rows):
        if isinstance(row, Run):
            drawn = index
            for tensor in phase.segments[row.segment].writes:
                written[Place(tensor, device, row.batch)] = index
        elif isinstance(row, Copy) and row.dst == device:
            written[Place(row.tensor, device, row.batch)] = index
        elif isinstance(row, Copy):
            place = Place(row.tensor, device, row.batch)
            after = drawn if row.tensor == GENERATOR else written.get(place, -1)
            found.setdefault(row.dst, []).append((after, row))
    return found


def run_slice(
    rows: Slice,
    device: int,
    sends: dict[int, list[tuple[int, Copy]]],
    do: Callable[[int], None],
    send: Callable[[Copy], None],
    try_send: Callable[[Copy], bool],
) -> None:
    """Run a slice: `do` runs, frees and receives by index; sends go as early as they can."""
    left = {peer: row[::-1] for peer, row in sends.items()}
    for index, (row, _) in enumerate(rows):
        if isinstance(row, Copy) and row.src == device:
            waiting = left[row.dst]
            while any(other is row for _, other in waiting):
                send(waiting.pop()[1])
            continue
        do(index)
        for waiting in left.values():
            while waiting and waiting[-1][0] <= index and try_send(waiting[-1][1]):
                waiting.pop()
