"""The checker objects to every race and to nothing else: it agrees with all interleavings."""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import program_oracle
import pytest
import strategies
from hypothesis import given
from hypothesis import strategies as st

from baechi import InputError, Op, OpGraph, Placement, Tensor
from baechi.problem.segments import instant_ops
from baechi.program.compilation import compile_program
from baechi.program.race_proof import check_program
from baechi.records.instructions import (
    Copy,
    Free,
    Lane,
    Phase,
    Place,
    Program,
    Run,
    Segment,
    Tape,
    Wait,
)


@st.composite
def programs(draw: st.DrawFn, max_ops: int = 5, max_devices: int = 3, batches: int = 1) -> Program:
    graph = draw(strategies.steps(max_ops, again=draw(st.booleans())))
    cluster = draw(strategies.clusters(max_devices, whole=True))
    placement = draw(strategies.placements(graph, cluster))
    in_turn = draw(st.sets(st.integers(0, max_ops - 1)))
    seed = draw(st.integers(0, 99))
    return compile_program(
        graph,
        placement,
        instant=instant_ops(graph),
        copy_lanes=draw(st.booleans()),
        in_turn=in_turn,
        batches=batches,
        joined=batches == 1 or draw(st.booleans()),
        order=partial(shuffled_turns, batches, seed),
    )


def shuffled_turns(batches: int, seed: int, rows: Sequence[object]) -> list[tuple[int, int]]:
    """All turns in any order."""
    turns = [(row, batch) for row in range(len(rows)) for batch in range(batches)]
    random.Random(seed).shuffle(turns)
    return turns


def objection(program: Program) -> str:
    """What the checker says; empty if nothing."""
    try:
        check_program(program)
    except InputError as error:
        return str(error)
    return ""


@given(program=programs())
def test_what_is_compiled_passes_and_no_interleaving_goes_wrong(program: Program) -> None:
    check_program(program)
    assert not program_oracle.fault(program)


@given(program=programs(max_ops=4))
def test_dropping_or_swapping_any_instruction_is_objected_to_or_harmless(program: Program) -> None:
    """The oracle walks through every interleaving, so that harmless means harmless."""
    for text, mutant in program_oracle.mutants(program):
        said, seen = objection(mutant), program_oracle.fault(mutant)
        assert bool(said) == bool(seen), f"{text}: checker {said!r}, oracle {seen!r}"


@given(program=programs(max_ops=9, max_devices=4))
def test_no_wait_is_there_that_the_others_imply(program: Program) -> None:
    for text, mutant in program_oracle.mutants(program):
        if text.startswith("dropped Wait"):
            assert objection(mutant), text


@given(program=programs(max_ops=9, max_devices=4))
def test_dropping_what_is_no_wait_is_never_harmless(program: Program) -> None:
    for text, mutant in program_oracle.mutants(program):
        if text.startswith(("dropped Run", "dropped Copy", "dropped Free")):
            assert objection(mutant), text


@given(program=programs(max_ops=4, max_devices=2, batches=2))
def test_programs_of_two_batches_pass_and_no_interleaving_goes_wrong(program: Program) -> None:
    check_program(program)
    assert not program_oracle.fault(program)


@given(program=programs(max_ops=3, max_devices=2, batches=2))
def test_mutants_of_two_batches_are_objected_to_or_harmless(program: Program) -> None:
    """With another batch in an instruction, too: what is of one batch is of no other."""
    mutants = [*program_oracle.mutants(program), *program_oracle.other_batches(program)]
    for text, mutant in mutants:
        said, seen = objection(mutant), program_oracle.fault(mutant)
        assert bool(said) == bool(seen), f"{text}: checker {said!r}, oracle {seen!r}"


def two_devices() -> Program:
    """a on device 0 feeds b on device 1; with a lane for copies to each."""
    graph = OpGraph((Op("a", 5), Op("b", 5)), (Tensor(0, (1,), 8), Tensor(1, (), 8, kept=True)))
    return compile_program(graph, Placement(graph.digest, (0, 1), (0, 1)), copy_lanes=True)


def test_the_smallest_program_is_what_one_would_write() -> None:
    (phase,) = two_devices().phases
    assert phase.lanes == (
        (Run(0), Wait(3, 1), Free(0, 0)),
        (Wait(3, 1), Run(1), Free(0, 1)),
        (),
        (Wait(0, 0), Copy(0, 0, 1)),
    )
    assert phase.kept == (Place(1, 1),)


def changed(lane: int, *rows: object) -> Program:
    program = two_devices()
    (phase,) = program.phases
    lanes = (*phase.lanes[:lane], rows, *phase.lanes[lane + 1 :])
    launch = [0] + [3] * len(lanes[3]) + [0] * (len(lanes[0]) - 1) + [1] * len(lanes[1])
    return replace(program, phases=(replace(phase, lanes=lanes, launch=tuple(launch)),))


@pytest.mark.parametrize(
    ("program", "text"),
    [
        (changed(1, Run(1), Free(0, 1)), r"instruction 0 \(run segment 1.*reads it before"),
        (changed(3, Copy(0, 0, 1)), "copies to device 1, instruction 0.*before anybody writes"),
        (changed(0, Run(0), Free(0, 0)), "copy tensor 0.*reads it after a free.*instruction 1"),
        (changed(0, Run(0), Wait(3, 1)), "tensor 0 on device 0 is never freed"),
        (changed(0, Run(0), Wait(3, 1), Free(0, 0), Free(0, 0)), "frees it a second time"),
        (changed(0, Run(0), Run(0), Wait(3, 1), Free(0, 0)), "a segment that has run"),
        (changed(0, Wait(3, 1), Run(0), Free(0, 0)), "deadlock: .*device 0, instruction 0"),
        (changed(0, Run(0), Wait(3, 9), Free(0, 0)), "waits for what does not exist"),
        (changed(0, Run(1), Wait(3, 1), Free(0, 0)), "is on device 1's segment"),
        (changed(0, Run(7)), "runs a segment that does not exist"),
        (changed(1, Wait(3, 1), Run(1), Free(0, 1), Free(1, 1)), "tensor 1 on device 1 is kept"),
        (changed(3, Wait(0, 0), Copy(0, 1, 0)), "on the wrong lane"),
        (changed(1, Wait(3, 1), Run(1), Free(5, 1)), "frees what nobody wrote"),
    ],
)
def test_the_text_names_the_instruction(program: Program, text: str) -> None:
    with pytest.raises(InputError, match=text):
        check_program(program)


def test_the_launch_order_is_checked_too() -> None:
    program = two_devices()
    (phase,) = program.phases
    for launch, text in (
        ((3, 3, 0, 0, 0, 1, 1, 1), "launched before what it waits for"),
        ((0, 3, 3, 0, 0, 1, 1), "leaves instructions out"),
        ((0, 3, 3, 0, 0, 0, 1, 1, 1), "goes on where lane 0 has ended"),
    ):
        with pytest.raises(InputError, match=text):
            check_program(replace(program, phases=(replace(phase, launch=launch),)))


def test_state_is_updated_in_turn_or_objected_to() -> None:
    segments = (Segment(0, (0,), updates=(4,)), Segment(1, (1,), updates=(4,)))
    tapes = (Tape(0, (0,)), Tape(1, (1,)))
    lanes = (Lane(0), Lane(1))

    def program(second: tuple[object, ...]) -> Program:
        phase = Phase(segments, ((Run(0),), second), (0,) + (1,) * len(second))
        return Program("", ("a", "b"), (-1, -1), lanes, tapes, (phase,))

    check_program(program((Wait(0, 0), Run(1))))
    with pytest.raises(InputError, match="updates state 4 while another may"):
        check_program(program((Run(1),)))


def test_every_operator_runs_on_one_tape_and_every_tape_once() -> None:
    program = two_devices()
    with pytest.raises(InputError, match="hold 3 ops"):
        check_program(replace(program, tapes=(*program.tapes, Tape(0, (0,)))))
    (phase,) = program.phases
    twice = replace(phase.segments[1], tapes=(1, 1))
    both = replace(phase, segments=(phase.segments[0], twice))
    with pytest.raises(InputError, match="must run once"):
        check_program(replace(program, phases=(both,)))


def test_ten_thousand_instructions_are_proved_with_work_in_proportion() -> None:
    """A zigzag over four devices; `benchmarks/runtime` has the time that it takes."""
    counts = []
    for n in (100, 200):
        ops = tuple(Op(f"op{i}", 1) for i in range(n))
        tensors = tuple(Tensor(a, (b,), 8) for a, b in pairwise(range(n)))
        graph = OpGraph(ops, tensors)
        placement = Placement(graph.digest, tuple(i % 4 for i in range(n)), tuple(range(n)))
        program = compile_program(graph, placement, copy_lanes=True)
        check_program(program)
        counts.append(sum(map(len, program.phases[0].lanes)))
    assert counts[1] - 2 * counts[0] in range(-20, 20)
