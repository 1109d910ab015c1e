"""Ranks that run their slices wait for each other never for ever, and see what one thread would."""

import queue
import random
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import strategies
from hypothesis import given
from hypothesis import strategies as st

from baechi import InputError, Op, OpGraph, Placement, Tensor
from baechi.problem.segments import instant_ops
from baechi.program.compilation import compile_program
from baechi.program.race_proof import check_program
from baechi.program.rank_slices import (
    GENERATOR,
    Slice,
    check_slices,
    early_sends,
    in_order,
    last_to_draw,
    run_slice,
    slice_of,
)
from baechi.records.instructions import Copy, Free, Instruction, Phase, Place, Program, Run

_DRAWN = -7  # the place of the generator's state
_PATIENCE_S = 30


@st.composite
def programs(draw: st.DrawFn, max_ops: int = 9, max_devices: int = 4) -> tuple[Program, int]:
    """A program for one thread per device, and the number of the random generator's state."""
    graph = draw(strategies.steps(max_ops, again=draw(st.booleans())))
    cluster = draw(strategies.clusters(max_devices, whole=True))
    placement = draw(strategies.placements(graph, cluster))
    batches, seed = draw(st.integers(1, 4)), draw(st.integers(0, 99))
    program = compile_program(
        graph,
        placement,
        instant=instant_ops(graph),
        in_turn=draw(st.sets(st.integers(0, max_ops - 1))),
        batches=batches,
        joined=draw(st.booleans()),
        order=partial(_shuffled, batches, seed),
    )
    check_program(program)
    return program, len(graph.groups)


def _shuffled(batches: int, seed: int, rows: Sequence[object]) -> list[tuple[int, int]]:
    turns = [(row, batch) for row in range(len(rows)) for batch in range(batches)]
    random.Random(seed).shuffle(turns)
    return turns


class Memory:
    """What is in the memory of a device: by place what made it, and of what."""

    def __init__(self, phase: Phase, draws: int, device: int | None = None) -> None:
        self._phase, self._draws = phase, draws
        given = (place for place in phase.given if device in (None, place.device))
        self.rows: dict[Any, Any] = {place: ("given", place) for place in given}
        self.rows[_DRAWN] = "seed"
        self.seen: list[Any] = []

    def do(self, row: Instruction) -> None:
        if isinstance(row, Free):
            del self.rows[Place(row.tensor, row.device, row.batch)]
            return
        assert isinstance(row, Run)
        segment = self._phase.segments[row.segment]
        places = [Place(tensor, segment.device, row.batch) for tensor in segment.reads]
        inputs = tuple(map(self.rows.__getitem__, places))
        if self._draws in segment.updates:
            inputs += (self.rows[_DRAWN],)
            self.rows[_DRAWN] = hash((row, inputs))
        self.seen.append((row, inputs))
        for tensor in segment.writes:
            self.rows[Place(tensor, segment.device, row.batch)] = hash((row, tensor, inputs))

    def out(self, row: Copy) -> Any:
        return self.rows[
            _DRAWN if row.tensor == GENERATOR else Place(row.tensor, row.src, row.batch)
        ]

    def take(self, row: Copy, value: Any) -> None:
        place = _DRAWN if row.tensor == GENERATOR else Place(row.tensor, row.dst, row.batch)
        self.rows[place] = value


def alone(phase: Phase, order: Sequence[Instruction], draws: int) -> Memory:
    """One thread, one memory."""
    memory = Memory(phase, draws)
    for row in order:
        if not isinstance(row, Copy):
            memory.do(row)
        elif row.tensor != GENERATOR:
            memory.take(row, memory.out(row))
    return memory


def together(
    phase: Phase, slices: Sequence[Slice], draws: int, seed: int, slots: int
) -> list[Memory]:
    """A thread per rank, with edges of so many slots and random delays."""
    n = len(slices)
    edges = {(a, b): queue.Queue[Any](slots) for a in range(n) for b in range(n)}
    memories = [Memory(phase, draws, device) for device in range(n)]
    errors: list[BaseException] = []

    def rank(device: int) -> None:
        draw, memory = random.Random(f"{seed} {device}"), memories[device]

        def pause() -> None:
            if draw.random() < 0.3:
                time.sleep(draw.random() * 3e-4)

        def do(index: int) -> None:
            pause()
            row, _ = slices[device][index]
            if isinstance(row, Copy):
                key, value = edges[row.src, device].get(timeout=_PATIENCE_S)
                assert key == row
                memory.take(row, value)
            else:
                memory.do(row)

        def send(row: Copy) -> None:
            pause()
            edges[device, row.dst].put((row, memory.out(row)), timeout=_PATIENCE_S)

        def try_send(row: Copy) -> bool:
            try:
                edges[device, row.dst].put_nowait((row, memory.out(row)))
            except queue.Full:
                return False
            return True

        try:
            sends = early_sends(phase, slices[device], device)
            run_slice(slices[device], device, sends, do, send, try_send)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=rank, args=(device,)) for device in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert all(edge.empty() for edge in edges.values())
    return memories


def slices_of(program: Program, number: int, draws: int) -> tuple[list[Instruction], list[Slice]]:
    phase = program.phases[number]
    order = in_order(phase, draws)
    return order, [slice_of(phase, order, device) for device in range(len(program.lanes))]


@given(made=programs(), seed=st.integers(0, 999))
def test_random_programs_end_whatever_the_delays_and_see_what_one_thread_sees(
    made: tuple[Program, int], seed: int
) -> None:
    """1,000 programs and delays at night: 200 examples, five of each."""
    program, draws = made
    for number, phase in enumerate(program.phases):
        order, slices = slices_of(program, number, draws)
        check_slices(phase, order, slices)
        expected = alone(phase, order, draws)
        for turn, slots in enumerate((1, 1, 2, 3, 1000)):
            memories = together(phase, slices, draws, seed + turn, slots)
            seen = [row for memory in memories for row in memory.seen]
            assert sorted(seen, key=repr) == sorted(expected.seen, key=repr)
            left = {k: v for memory in memories for k, v in memory.rows.items() if k != _DRAWN}
            assert left == {k: v for k, v in expected.rows.items() if k != _DRAWN}
            owner = last_to_draw(phase, draws)
            if owner is not None:
                assert memories[owner].rows[_DRAWN] == expected.rows[_DRAWN]


def stuck(slices: Sequence[Slice]) -> bool:
    """Whether ranks wait for ever where a send waits until it is received.

    Each has one thing to do at a time, so in which order they go on decides nothing.
    """
    position = [0] * len(slices)
    while True:
        heads = [
            rows[at][0] if at < len(rows) else None
            for rows, at in zip(slices, position, strict=True)
        ]
        for device, row in enumerate(heads):
            if row is None:
                continue
            if not isinstance(row, Copy):
                position[device] += 1
                break
            if device == row.src and heads[row.dst] == row:
                position[row.src] += 1
                position[row.dst] += 1
                break
        else:
            return any(heads)


@given(made=programs())
def test_no_slices_are_stuck_and_every_mutant_is_objected_to(made: tuple[Program, int]) -> None:
    program, draws = made
    for number, phase in enumerate(program.phases):
        order, slices = slices_of(program, number, draws)
        assert not stuck(slices)
        for device, rows in enumerate(slices):
            for at in range(len(rows)):
                dropped = rows[:at] + rows[at + 1 :]
                swapped = rows[:at] + rows[at : at + 2][::-1] + rows[at + 2 :]
                for mutant in {dropped, swapped} - {rows}:
                    with pytest.raises(InputError, match=f"slice of rank {device} has"):
                        check_slices(
                            phase, order, [*slices[:device], mutant, *slices[device + 1 :]]
                        )


def test_two_sends_in_another_order_on_one_rank_would_wait_for_ever() -> None:
    """So the order matters, and the oracle sees it."""
    ops = (Op("a", 5), Op("b", 5), Op("c", 5), Op("d", 5))
    tensors = (Tensor(0, (2,), 8), Tensor(1, (3,), 8), Tensor(2, (), 8), Tensor(3, (), 8))
    graph = OpGraph(ops, tensors)
    placement = Placement(graph.digest, (0, 1, 1, 0), (0, 1, 2, 3))
    program = compile_program(graph, placement)
    _, slices = slices_of(program, 0, -1)
    mine = list(slices[1])
    one, two = (i for i, (row, _) in enumerate(mine) if isinstance(row, Copy))
    mine[one], mine[two] = mine[two], mine[one]
    assert not stuck(slices)
    assert stuck([slices[0], tuple(mine)])


def test_a_send_is_made_as_soon_as_there_is_room() -> None:
    """Two batches: the second runs while the first is on its way, where a slot is free."""
    graph = OpGraph((Op("a", 5), Op("b", 5)), (Tensor(0, (1,), 8), Tensor(1, (), 8)))
    turns = [(0, 0), (0, 1), (1, 0), (1, 1)]
    program = compile_program(
        graph, Placement(graph.digest, (0, 1), (0, 1)), batches=2, order=lambda _: turns
    )
    (phase,) = program.phases
    _, slices = slices_of(program, 0, -1)
    for room, wanted in ((2, ["run", "try", "run", "try"]), (0, ["run", "try", "run", "try"])):
        told: list[str] = []

        def try_send(_: Copy, told: list[str] = told, room: int = room) -> bool:
            told.append("try")
            return room > 0

        run_slice(
            slices[0],
            0,
            early_sends(phase, slices[0], 0),
            lambda index, told=told: told.append(
                "run" if isinstance(slices[0][index][0], Run) else "free"
            ),
            lambda _, told=told: told.append("send"),
            try_send,
        )
        sent = [what for what in told if what == "send"]
        assert told[: len(wanted)] == wanted
        assert len(sent) == (0 if room else 2)
