"""The portfolio: it finds what is there to be found, and the same whatever things are called."""

import itertools
import os
import random
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from benchmarks.placement_quality import generators
from benchmarks.placement_quality.witnesses import contiguous_split, largest_peak
from hypothesis import given
from hypothesis import strategies as st
from seeds import seeds
from strategies import clusters, graphs

from baechi import (
    Cluster,
    Device,
    InfeasibleError,
    InputError,
    Link,
    Op,
    OpGraph,
    Pinned,
    Tensor,
    simulate,
    solve,
)
from baechi.placers.contiguous import Contiguous
from baechi.placers.memory_packing import is_hopeless
from baechi.problem.problem_arrays import Problem
from baechi.problem.simulation import fits_memory, overflows

LINK = Link(10, 10**9)
EFFORTS = ["fast", "balanced", "thorough"]
PLACERS = ["auto", "m-topo", "m-etf", "m-sct", "heft", "peft", "contiguous", "single"]


def hidden(seed, most_ops=14):
    """A problem made from a placement in index order, which fills 80 to 95 % of the memory."""
    draw = random.Random(seed)
    n, devices = draw.randrange(4, most_ops), draw.randrange(2, 5)
    ops = tuple(
        Op(
            f"op{i}",
            draw.randrange(1, 30),
            draw.choice([0, draw.randrange(60)]),
            draw.choice([0, draw.randrange(20)]),
            draw.choice([None] * 5 + ["g", "h"]),
        )
        for i in range(n)
    )
    tensors = []
    for _ in range(draw.randrange(2 * n)):
        producer = draw.randrange(n - 1)
        later = range(producer + 1, n)
        consumers = tuple(draw.sample(later, draw.randint(1, min(2, len(later)))))
        tensors.append(Tensor(producer, consumers, draw.randrange(30), draw.random() < 0.1))
    graph = OpGraph(ops, tuple(tensors))
    ample = Cluster.uniform(devices, 2**40, Link(draw.randrange(10), 10**9))
    problem = Problem(graph, ample)
    where = [draw.randrange(devices) for _ in problem.group_ops]
    used = draw.uniform(0.8, 0.95)
    peaks = timeline_of(problem, where).peaks()
    memory = [int(peak / used) for peak in peaks]
    if draw.random() < 0.5:
        memory = [max(memory)] * devices
    rows = tuple(Device(f"d{i}", nbytes) for i, nbytes in enumerate(memory))
    return Problem(graph, replace(ample, devices=rows)), where


def timeline_of(problem, where):
    """The ops in index order, each group where it says."""
    timeline = problem.timeline()
    devices = np.array([where[group] for group in problem.op_group], np.int32)
    assert timeline.fold(devices, np.arange(len(devices), dtype=np.int32)) == -1
    return timeline


def packed(problem):
    """Whether first, best or worst fit fits, by either load and in either order of the groups."""
    groups, devices = range(len(problem.group_ops)), range(len(problem.cluster.devices))
    for loads in (problem.arrays.group_persistent, problem.group_bytes):
        orders = (groups, sorted(groups, key=lambda g: -loads[g]))
        for order, rule in itertools.product(orders, ("first", "best", "worst")):
            left, where = list(problem.pool_memory), {}
            for group in order:
                room = [d for d in devices if left[d] >= loads[group]]
                if not room:
                    break
                signs = {"first": 0, "best": 1, "worst": -1}
                where[group] = min((signs[rule] * left[d], d) for d in room)[1]
                left[where[group]] -= loads[group]
            if len(where) == len(groups) and fits_memory(problem, timeline_of(problem, where)):
                return True
    return False


@pytest.mark.unsanitized
def test_fast_finds_what_is_hidden_and_what_packing_finds():
    easy = 0
    count = seeds(300)
    for seed in count:
        problem, where = hidden(seed)
        assert fits_memory(problem, timeline_of(problem, where))
        assert not is_hopeless(problem)
        easy += packed(problem)
        placement = solve(problem.graph, problem.cluster, effort="fast")
        assert not overflows(simulate(problem.graph, problem.cluster, placement), problem.cluster)
    # There are some in which simple packing finds nothing.
    assert 0.8 * len(count) < easy < len(count)


# Here a fast search finds nothing unless it searches once more; in some, neither does packing.
@pytest.mark.unsanitized
@pytest.mark.parametrize(
    ("effort", "seeds"),
    [
        ("fast", [116, 227, 389, 414, 473, 833, 947, 1118, 1435, 1490]),
        ("balanced", [116, 227, 389, 414, 473, 833, 947, 1118, 1435, 1490]),
        ("thorough", [947]),
    ],
)
def test_every_effort_finds_what_is_hard_to_find(effort, seeds):
    for seed in seeds:
        problem, _ = hidden(seed)
        solve(problem.graph, problem.cluster, effort=effort)


@pytest.mark.unsanitized
@pytest.mark.parametrize("effort", ["fast", "balanced"])
@pytest.mark.parametrize("seed", range(3))
def test_a_memory_that_a_contiguous_split_nearly_fills_is_enough(seed, effort):
    graph = generators.layered(seed, 80, ccr=(0.1, 1, 10)[seed % 3])
    ample = Cluster.uniform(4, generators.AMPLE, generators.LINK)
    split = contiguous_split(Problem(graph, ample))
    memory = largest_peak(Problem(graph, ample), split) * 105 // 100
    cluster = Cluster.uniform(4, memory, generators.LINK)
    known = solve(graph, cluster, Pinned(split)).stats["makespan_ns"]
    assert solve(graph, cluster, effort=effort).stats["makespan_ns"] <= known


@pytest.mark.unsanitized
@pytest.mark.parametrize("effort", ["fast", "balanced"])
@pytest.mark.parametrize("ccr", [0.1, 1, 10])
def test_a_memory_that_a_planted_placement_nearly_fills_is_enough(ccr, effort):
    for seed in range(2):
        made = generators.planted(seed, 40, 3, ccr=ccr)
        solve(made.graph, made.cluster, effort=effort)


@given(graphs(max_ops=4, min_ops=1), clusters(max_devices=3, memory=st.integers(0, 60)))
def test_what_is_hopeless_fits_nowhere(graph, cluster):
    problem = Problem(graph, cluster)
    if not is_hopeless(problem):
        return
    n = len(graph.ops)
    for where in itertools.product(range(len(cluster.devices)), repeat=len(problem.group_ops)):
        timeline = problem.timeline()
        devices = np.array([where[group] for group in problem.op_group], np.int32)
        if timeline.fold(devices, np.arange(n, dtype=np.int32)) < 0:
            assert not fits_memory(problem, timeline)


@given(
    graphs(max_ops=8),
    clusters(uniform=True),
    st.sampled_from(PLACERS),
    st.sampled_from(EFFORTS[:2]),
    st.randoms(use_true_random=False),
)
def test_equal_devices_are_interchangeable(graph, cluster, placer, effort, draw):
    row = list(cluster.devices)
    draw.shuffle(row)
    shuffled = replace(cluster, devices=tuple(row))
    answers = []
    for some in (cluster, shuffled):
        try:
            placement = solve(graph, some, placer, effort=effort)
            answers.append((placement.devices, placement.order, placement.stats["makespan_ns"]))
        except InfeasibleError as error:
            answers.append((error.subject, error.needed_bytes, error.extra_bytes))
    assert answers[0] == answers[1]


PROGRAM = """
import sys
from benchmarks.placement_quality import generators
from baechi import solve
from baechi.storage.serialization import dumps
for placer, effort, ops in {asked!r}:
    made = generators.planted(3, ops, 2)
    placement = solve(made.graph, made.cluster, placer, effort=effort)
    sys.stdout.buffer.write(dumps(placement).encode())
"""


@pytest.mark.unsanitized
def test_every_process_finds_the_same_bytes():
    asked = [("auto", "fast", 80), ("auto", "balanced", 40), ("auto", "thorough", 6)]
    asked += [(name, "balanced", 40) for name in PLACERS[1:-1]]
    outputs = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM.format(asked=asked)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]
    assert outputs[0].count(b"makespan_ns") == len(asked)


@pytest.mark.unsanitized
def test_the_number_of_cores_changes_nothing(monkeypatch):
    made = generators.planted(3, 60, 3)
    answers = []
    for cores in (1, 2, 9):
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        answers.append(solve(made.graph, made.cluster))
    assert answers[0] == answers[1] == answers[2]
    assert answers[0].stats["chosen"] == "local-search"


@pytest.mark.parametrize("effort", EFFORTS)
@pytest.mark.parametrize("time_ns", [0, 5])
def test_a_device_that_is_used_up_is_left_alone(effort, time_ns):
    devices = [Device("full", 0), Device("a", 40), Device("none", 0, pool="p"), Device("b", 30)]
    graph = OpGraph(tuple(Op(f"o{i}", time_ns, 10) for i in range(7)), (Tensor(0, (1,), 0),))
    placement = solve(graph, Cluster.connected(devices, LINK), effort=effort)
    assert sorted(placement.devices) == [1] * 4 + [3] * 3


@pytest.mark.parametrize("effort", EFFORTS)
def test_where_there_is_no_memory_only_what_takes_none_is_placed(effort):
    nothing = Cluster.uniform(3, 0, LINK)
    graph = OpGraph(tuple(Op(f"o{i}", 5) for i in range(6)), (Tensor(0, (1, 2), 0),))
    placement = solve(graph, nothing, effort=effort)
    # The first three stay together, since a link takes 10 ns.
    assert placement.stats["makespan_ns"] == 15
    with pytest.raises(InfeasibleError) as caught:
        solve(OpGraph((*graph.ops, Op("heavy", 5, 1))), nothing, effort=effort)
    assert (caught.value.extra_bytes, caught.value.subject) == (1, "heavy")


@pytest.mark.parametrize("effort", ["fast", "balanced"])
def test_times_and_bytes_up_to_the_limit_are_placed_and_more_is_refused(effort):
    def problem(more):
        ops = tuple(Op(f"o{i}", 2**59 - 2**50, 2**58) for i in range(8))
        graph = OpGraph((*ops, Op("last", more)), (Tensor(0, (1,), 5), Tensor(2, (8,), 5)))
        return graph, Cluster.uniform(4, 2**61, LINK)

    graph, cluster = problem(2**50)
    placement = solve(graph, cluster, effort=effort)
    assert placement.stats["makespan_ns"] == simulate(graph, cluster, placement).makespan_ns
    assert placement.stats["makespan_ns"] < 2**61
    with pytest.raises(InputError, match=r"more than 2\*\*62"):
        solve(*problem(2**54), effort=effort)


@pytest.mark.parametrize("effort", EFFORTS)
def test_one_op_goes_to_the_fastest_device_with_room(effort):
    devices = [Device("slow", 99, 0.5), Device("small", 9, 4.0), Device("fast", 99, 2.0)]
    cluster = Cluster.connected(devices, LINK)
    assert solve(OpGraph(()), cluster, effort=effort).devices == ()
    assert solve(OpGraph((Op("a", 100, 50),)), cluster, effort=effort).devices == (2,)


def test_a_long_chain_with_dear_transfers_is_split_at_once():
    draw = random.Random(1)
    forward = [Op(f"f{i}", draw.randrange(1, 9), 10, group=f"g{i}") for i in range(500)]
    backward = [Op(f"b{i}", 9, group=f"g{i}") for i in reversed(range(500))]
    # What a forward makes its backward reads, too; every tenth is small.
    tensors = tuple(
        Tensor(op, {op + 1, max(op + 1, 999 - op)}, 10 if op % 10 == 9 else 1_000)
        for op in range(999)
    )
    graph = OpGraph((*forward, *backward), tensors)
    cluster = Cluster.uniform(4, 200_000, Link(10, 10**9))
    fast = solve(graph, cluster, effort="fast").stats
    assert fast["single/device0"] == "does not fit"
    assert fast["makespan_ns"] <= Contiguous().place(Problem(graph, cluster)).stats["makespan_ns"]


@pytest.mark.slow
@pytest.mark.parametrize("effort", ["fast", "balanced"])
def test_a_large_graph_is_placed(effort):
    graph = generators.layered(0, 100_000, width=100, ccr=0.5)
    cluster = Cluster.uniform(8, generators.AMPLE, generators.LINK)
    placement = solve(graph, cluster, effort=effort)
    schedule = simulate(graph, cluster, placement)
    assert schedule.makespan_ns == placement.stats["makespan_ns"]
    # Eight devices are at least six times as fast as one.
    assert schedule.makespan_ns * 6 < placement.stats["single/device0"]
