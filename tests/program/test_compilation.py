"""A placement's program: cut where it must be, in the placement's order, and complete."""

import os
import random
import subprocess
import sys
from dataclasses import replace
from functools import cache
from itertools import chain, pairwise, takewhile

import pytest
import strategies
from hypothesis import assume, given
from hypothesis import strategies as st
from program_oracle import order_of
from steps import case

import baechi
from baechi import Cluster, Device, InputError, Link, Op, OpGraph, Placement, Tensor
from baechi.problem.cutting import tapes_of
from baechi.problem.segments import in_run_order, instant_ops
from baechi.program.compilation import compile_program
from baechi.program.race_proof import check_program
from baechi.records.instructions import Copy, Free, Place, Program, Run, Segment, Wait
from baechi.storage.serialization import dumps, loads


@st.composite
def compiled(draw: st.DrawFn, **options: bool) -> tuple[OpGraph, Cluster, Placement, Program]:
    again = options.get("again")
    graph = draw(strategies.steps(9, again=draw(st.booleans()) if again is None else again))
    cluster = draw(strategies.clusters(4, whole=True))
    placement = draw(strategies.placements(graph, cluster))
    lanes = options.get("copy_lanes")
    lanes = draw(st.booleans()) if lanes is None else lanes
    instant = instant_ops(graph)
    program = compile_program(graph, placement, instant=instant, copy_lanes=lanes)
    return graph, cluster, placement, program


def run(program: Program, graph: OpGraph, seed: int) -> None:
    """Run the program op by op, lanes in any turn, and look up every input where the op is."""
    n, twins, units = graph.n_forward, graph.twins, graph.units
    draw = random.Random(seed)
    for number, phase in enumerate(program.phases):
        memory = set(phase.given)
        members = {*twins, *units} if number else set(range(n))
        again: set[int] = set()
        position = [0] * len(phase.lanes)
        ran = []
        while left := [k for k, rows in enumerate(phase.lanes) if position[k] < len(rows)]:
            lane = draw.choice(left)
            row = phase.lanes[lane][position[lane]]
            if isinstance(row, Wait) and position[row.lane] <= row.position:
                continue
            position[lane] += 1
            match row:
                case Run():
                    segment = phase.segments[row.segment]
                    if segment.again:
                        for at in dict.fromkeys(program.tapes[t].again for t in segment.tapes):
                            reads = set(graph.op_inputs[at]) & set(segment.reads)
                            gradients = [
                                t for t in graph.op_inputs[at] if graph.tensors[t].producer >= n
                            ]
                            assert reads == set(gradients)
                            ran.append(at)
                        assert all(Place(t, segment.device) in memory for t in segment.reads)
                        again |= {op for t in segment.tapes for op in program.tapes[t].ops}
                        continue
                    for index in segment.tapes:
                        ops = program.tapes[index].ops
                        assert not number or program.tapes[index].again < 0 or set(ops) <= again
                        order = [twins[op] for op in reversed(ops)] if number else ops
                        inside: set[int] = set()
                        for op in (op for op in order if op >= 0):
                            for tensor in graph.op_inputs[op]:
                                producer = graph.tensors[tensor].producer
                                if producer in units:
                                    assert op in {twins[row] for row in units[producer]}
                                elif producer in members or (number == 1 and producer == n):
                                    there = Place(tensor, segment.device) in memory
                                    assert producer in inside or there, (op, tensor)
                            inside.add(op)
                            made = set(graph.op_outputs[op]) & set(segment.writes)
                            memory |= {Place(tensor, segment.device) for tensor in made}
                            ran.append(op)
                case Copy():
                    assert Place(row.tensor, row.src) in memory
                    memory.add(Place(row.tensor, row.dst))
                case Free():
                    memory.remove(Place(row.tensor, row.device))
        assert sorted(ran) == sorted(op for op in members if op >= 0)
        assert memory == set(phase.kept)
        if number:
            assert again == {op for unit in units.values() for op in unit}


@given(case=compiled(), seed=st.integers(0, 9))
def test_every_operator_runs_once_where_its_inputs_are(
    case: tuple[OpGraph, Cluster, Placement, Program], seed: int
) -> None:
    graph, _, placement, program = case
    check_program(program)
    run(program, graph, seed)
    for tape in program.tapes:
        twins = [program.twins[op] for op in tape.ops if program.twins[op] >= 0]
        assert {placement.devices[op] for op in (*tape.ops, *twins)} == {tape.device}


@given(case=compiled(copy_lanes=True, again=False))
def test_in_the_program_s_order_no_step_is_longer(
    case: tuple[OpGraph, Cluster, Placement, Program],
) -> None:
    """Where links are free for all, so that no transfer takes another's turn.

    Inside a segment the order may differ; an output may then leave earlier, never later. (What runs
    again has tapes of its own, whose turn may let an output leave later; and what the loss reads
    leaves when the call returns.) What is forward runs before the loss, even where a placement
    would rather go backward.
    """
    graph, cluster, placement, program = case
    cluster = replace(cluster, ports="none")
    order = order_of(program, placement.order)
    n = graph.n_forward
    read = [tensor.producer for tensor in graph.tensors if n in tensor.consumers]
    assume(all(placement.devices[op] == placement.devices[n] for op in read))
    phased = sorted(placement.order, key=lambda op: (op > n) - (op < n))
    said = baechi.simulate(graph, cluster, replace(placement, order=tuple(phased)))
    done = baechi.simulate(graph, cluster, replace(placement, order=order))
    assert done.makespan_ns <= said.makespan_ns


@given(case=compiled(copy_lanes=False))
def test_each_device_runs_the_order_that_the_solver_thinks_of(
    case: tuple[OpGraph, Cluster, Placement, Program],
) -> None:
    graph, cluster, placement, program = case
    assume(graph.is_training)
    run, done = in_run_order(graph, placement).order, order_of(program, placement.order)
    for device in set(placement.devices):
        there = [[op for op in row if placement.devices[op] == device] for row in (run, done)]
        assert there[0] == there[1]
    baechi.simulate(graph, replace(cluster, devices=ample(cluster)), replace(placement, order=run))


def ample(cluster: Cluster) -> tuple[Device, ...]:
    return tuple(replace(device, memory_bytes=2**50) for device in cluster.devices)


@given(case=compiled(again=False))
def test_a_segment_is_cut_only_where_something_arrives_or_leaves(
    case: tuple[OpGraph, Cluster, Placement, Program],
) -> None:
    program = case[-1]
    for number, phase in enumerate(program.phases):
        per_device: dict[int, list[Segment]] = {}
        for segment in phase.segments:
            per_device.setdefault(segment.device, []).append(segment)
        copied = {
            Place(row.tensor, row.dst) for rows in phase.lanes for row in rows
            if isinstance(row, Copy)
        }  # fmt: skip
        sent = {row.tensor for rows in phase.lanes for row in rows if isinstance(row, Copy)}
        for segments in per_device.values():
            for one, other in pairwise(segments):
                arrives = any(Place(t, other.device) in copied for t in other.reads)
                assert arrives or set(one.writes) & sent, (number, one, other)


@given(graph=strategies.steps(9), copy_lanes=st.booleans())
def test_one_device_is_one_segment_each_way_and_one_tape(graph: OpGraph, copy_lanes: bool) -> None:
    n = len(graph.ops)
    placement = Placement(graph.digest, (0,) * n, tuple(range(n)))
    program = compile_program(graph, placement, instant=instant_ops(graph), copy_lanes=copy_lanes)
    assert len(program.tapes) == 1
    for phase in program.phases:
        assert len(phase.segments) <= 1
        assert not any(isinstance(row, Wait | Copy) for row in chain(*phase.lanes))


@given(case=compiled())
def test_a_program_goes_to_json_and_back(
    case: tuple[OpGraph, Cluster, Placement, Program],
) -> None:
    program = case[-1]
    assert loads(dumps(program), Program) == program
    assert dumps(loads(dumps(program))) == dumps(program)


def test_towers_are_a_segment_each_and_the_join_is_another() -> None:
    """a b | c d | e on devices 0 and 1; the second tower is sent to the first."""
    graph = OpGraph(
        tuple(Op(name, 5) for name in "abcde"),
        (Tensor(0, (1,), 1), Tensor(1, (4,), 1), Tensor(2, (3,), 1), Tensor(3, (4,), 1)),
    )
    program = compile_program(graph, Placement(graph.digest, (0, 0, 1, 1, 0), (0, 1, 2, 3, 4)))
    assert [tape.ops for tape in program.tapes] == [(2, 3), (0, 1), (4,)]
    (phase,) = program.phases
    assert phase.lanes == (
        (Run(1), Wait(1, 0), Copy(3, 1, 0), Free(3, 1), Run(2), Free(1, 0), Free(3, 0)),
        (Run(0),),
    )
    assert phase.launch == (1, 0, 0, 0, 0, 0, 0, 0)


def test_operators_of_no_time_follow_what_leaves_instead_of_being_cut_off() -> None:
    ops = (Op("x", 0), Op("y", 0), Op("a", 5), Op("b", 5))
    tensors = (Tensor(0, (2, 3), 1), Tensor(1, (2, 3), 1))
    graph = OpGraph(ops, tensors)
    placement = Placement(graph.digest, (0, 0, 0, 1), (0, 1, 2, 3))
    program = compile_program(graph, placement, instant=instant_ops(graph))
    assert [tape.ops for tape in program.tapes] == [(0, 1), (2,), (3,)]


def test_tapes_are_parted_where_a_value_without_a_gradient_would_close_a_circle() -> None:
    """One autograd graph for a and c would have to run before b and after it."""
    graph = OpGraph(tuple(Op(n, 5) for n in "abc"), (Tensor(0, (1,), 8), Tensor(1, (2,), 8)))
    assert tapes_of(graph, (0, 1, 2), {0: 0, 1: 0, 2: 0}) == [(0, (0, 1, 2))]
    assert tapes_of(graph, (0, 1, 2), {0: 1, 1: 0, 2: 0}) == [(1, (0,)), (0, (1, 2))]
    assert tapes_of(graph, (0, 1, 2), {0: 0, 1: 1, 2: 0}) == [(0, (0,)), (1, (1,)), (0, (2,))]


def test_what_has_no_backward_joins_a_tape_beside_it() -> None:
    graph = OpGraph(tuple(Op(n, 5) for n in "abc"), (Tensor(0, (1,), 8), Tensor(1, (2,), 8)))
    assert tapes_of(graph, (0, 1, 2), {1: 0}) == [(0, (0, 1, 2))]
    assert tapes_of(graph, (0, 1, 2), {0: 1, 2: 0}) == [(1, (0, 1)), (0, (2,))]
    assert tapes_of(graph, (0, 1, 2), {}) == [(None, (0, 1, 2))]


@cache
def training_graph(name: str) -> OpGraph:
    traced = case(name).traced
    costs = [1000 + i * 7919 % 5000 for i in range(len(traced.ops))]
    rows = tuple(baechi.OpCost(cost, 2 * cost) for cost in costs)
    return traced.graph(baechi.Profile(traced.digest, "", rows), optimizer="adamw")


PAIRS = [(n, placer) for placer in ("m-etf", "auto", "random") for n in (2, 4)]
MODELS = ("gpt2", "t5", "clip", "branches", "lstm_lm", "mixtral", "inception")


# By default two pairs, each with a model.
@pytest.mark.parametrize(
    ("name", "n_devices", "placer"),
    [
        pytest.param(name, *pair, marks=() if i == j and i in (3, 5) else (pytest.mark.slow,))
        for i, name in enumerate(MODELS)
        for j, pair in enumerate(PAIRS)
    ],
)
def test_a_model_s_step_runs_as_long_as_the_placement_says(
    name: str, n_devices: int, placer: str
) -> None:
    """To 2 %: inside a segment the order differs, so what fills a gap of the placement's may come
    before what is waited for, and transfers may take turns in another order.

    It may be shorter, where an output leaves earlier than it had to.
    """
    graph = training_graph(name)
    rows = [Device(f"d{i}", "8GiB") for i in range(n_devices)]
    cluster = Cluster.connected(rows, Link(300, 10**10))
    chosen = baechi.RandomPlacer(0) if placer == "random" else placer
    placement = baechi.solve(graph, cluster, placer=chosen, effort="fast")
    said = baechi.simulate(graph, cluster, placement)
    for copy_lanes in (False, True):
        program = compile_program(
            graph, placement, instant=instant_ops(graph), copy_lanes=copy_lanes
        )
        check_program(program)
        order = order_of(program, placement.order)
        done = baechi.simulate(graph, cluster, replace(placement, order=order))
        assert 0.95 * said.makespan_ns <= done.makespan_ns <= 1.02 * said.makespan_ns
        for one, other in zip(done.peak_bytes, said.peak_bytes, strict=True):
            assert abs(one - other) <= 0.06 * other


def held(program: Program, graph: OpGraph, persistent: list[int]) -> list[int]:
    """The peak of every device where a program of one phase is done in its launch order.

    What a segment reads last it lets go of at the last operator that reads it.
    """
    (phase,) = program.phases
    live, peak = list(persistent), list(persistent)
    gone: set[tuple[int, int]] = set()
    position = [0] * len(phase.lanes)
    for lane in phase.launch:
        rows = phase.lanes[lane]
        row = rows[position[lane]]
        position[lane] += 1
        if isinstance(row, Copy):
            live[row.dst] += graph.tensors[row.tensor].nbytes
            peak[row.dst] = max(peak[row.dst], live[row.dst])
        elif isinstance(row, Free) and (row.tensor, row.device) not in gone:
            live[row.device] -= graph.tensors[row.tensor].nbytes
        elif isinstance(row, Run):
            segment = phase.segments[row.segment]
            at = segment.device
            ops = [op for tape in segment.tapes for op in program.tapes[tape].ops]
            after = takewhile(lambda row: isinstance(row, Free), rows[position[lane] :])
            ending = {row.tensor for row in after}
            inside = {t for op in ops for t in graph.op_outputs[op]} - set(segment.writes)
            ending |= {t for t in inside if not graph.tensors[t].kept}
            for place, op in enumerate(ops):
                live[at] += sum(graph.tensors[t].nbytes for t in graph.op_outputs[op])
                peak[at] = max(peak[at], live[at] + graph.ops[op].net_workspace_bytes)
                later = {t for other in ops[place + 1 :] for t in graph.op_inputs[other]}
                for tensor in ending.intersection(graph.op_inputs[op]) - later:
                    live[at] -= graph.tensors[tensor].nbytes
                    gone.add((tensor, at))
    return peak


@given(st.data())
def test_in_the_clock_s_order_no_device_holds_more_than_the_clock_says(data: st.DataObject) -> None:
    graph = data.draw(strategies.graphs(9, kinds=False, besides=False))
    ops = tuple(replace(op, time_ns=op.time_ns + 1) for op in graph.ops)
    graph = OpGraph(ops, graph.tensors)
    cluster = data.draw(strategies.clusters(4, whole=True))
    devices = tuple(replace(device, pool="") for device in cluster.devices)
    cluster = Cluster(devices, cluster.links, cluster.ports)
    placement = data.draw(strategies.placements(graph, cluster))
    placement = replace(placement, order=tuple(range(len(ops))))  # tapes run in program order
    schedule = baechi.simulate(graph, cluster, placement)
    program = compile_program(graph, placement, copy_lanes=True, one_thread=True, schedule=schedule)
    check_program(program)
    persistent = [0] * len(cluster.devices)
    for op, device in zip(graph.ops, placement.devices, strict=True):
        persistent[device] += op.persistent_bytes
    for most, said in zip(held(program, graph, persistent), schedule.peak_bytes, strict=True):
        assert most <= said


def test_a_program_explains_itself() -> None:
    graph = OpGraph((Op("a", 5), Op("b", 5)), (Tensor(0, (1,), 8),))
    program = compile_program(graph, Placement(graph.digest, (0, 1), (0, 1)), copy_lanes=True)
    assert program.explain().splitlines() == [
        "forward: 2 segments, 2 tapes",
        "  device 0",
        "       0  run segment 0: a (1 op) -> tensors 0",
        "       1  wait for copies to device 1, 1",
        "       2  free tensor 0 on device 0",
        "  device 1",
        "       0  wait for copies to device 1, 1",
        "       1  run segment 1: b (1 op)",
        "       2  free tensor 0 on device 1",
        "  copies to device 1",
        "       0  wait for device 0, 0",
        "       1  copy tensor 0 from device 0 to device 1",
    ]


def test_operators_that_draw_random_numbers_run_one_after_another() -> None:
    graph = OpGraph((Op("a", 5), Op("b", 5)), (Tensor(0, (), 8, True), Tensor(1, (), 8, True)))
    placement = Placement(graph.digest, (0, 1), (0, 1))

    def waits(program: Program) -> list[Wait]:
        return [row for rows in program.phases[0].lanes for row in rows if isinstance(row, Wait)]

    assert waits(compile_program(graph, placement)) == []
    assert waits(compile_program(graph, placement, in_turn={0, 1})) == [Wait(0, 0)]


def test_a_placement_of_another_graph_is_refused() -> None:
    graph = OpGraph((Op("a", 5), Op("b", 5)), (Tensor(0, (1,), 8),))
    with pytest.raises(InputError, match="another graph"):
        compile_program(graph, Placement(graph.digest, (0,), (0,)))
    with pytest.raises(InputError, match="launches op 'b' before op 'a'"):
        compile_program(graph, Placement(graph.digest, (0, 0), (1, 0)))


def test_the_same_placement_gives_the_same_program_whatever_the_seed_of_hashes() -> None:
    code = (
        "import baechi, hashlib\n"
        "from baechi.program.compilation import compile_program\n"
        "from baechi.storage.serialization import dumps\n"
        "ops = tuple(baechi.Op(f'op{i}', 1 + i % 5) for i in range(60))\n"
        "tensors = tuple(baechi.Tensor(i, (i + 1, min(59, i + 7)), 8) for i in range(58))\n"
        "graph = baechi.OpGraph(ops, tensors)\n"
        "devices = tuple(i * 7 // 3 % 4 for i in range(60))\n"
        "placement = baechi.Placement(graph.digest, devices, tuple(range(60)))\n"
        "for lanes in (False, True):\n"
        "    text = dumps(compile_program(graph, placement, copy_lanes=lanes))\n"
        "    print(hashlib.sha256(text.encode()).hexdigest())\n"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(found) == 1
