"""Copies of the graph of a micro-batch, and the segments that take turns."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from microbatch_oracle import launched_peaks, run
from strategies import clusters, graphs, placements, steps

from baechi import Cluster, InputError, Link, Op, OpGraph, Placement, Tensor, simulate
from baechi.placers.turn_orders import ordered_turns
from baechi.problem.microbatches import copies_of, unrolled
from baechi.problem.segments import segments_of

# Two layers and their loss; the second has a gradient of 3 bytes from its backward on.
STEP = OpGraph(
    (
        Op("a", 2, 8, group="one"),
        Op("b", 2, 6, group="two"),
        Op("loss", 0, phase="loss"),
        Op("b'", 4, 4, 1, group="two", late_bytes=3, phase="backward", forward=(1,)),
        Op("a'", 4, group="one", phase="backward", forward=(0,)),
    ),
    (
        *(Tensor(0, (1, 4), 10), Tensor(1, (2, 3), 20), Tensor(2, (3,), 20), Tensor(3, (4,), 10)),
        Tensor(1, (), 5, kept=True),
    ),
)


def unroll(graph, microbatches, **options):
    return unrolled(graph, microbatches, **options).graph(graph.explicit)


def names(graph):
    return [op.name for op in graph.ops]


def test_copies_are_named_and_tied_and_hold_parameters_once():
    whole = unroll(STEP, 3)
    assert names(whole) == [
        *("a", "b", "loss", "b'", "a'"),
        *("a@1", "b@1", "loss@1", "b'@1", "a'@1"),
        *("a@2", "b@2", "loss@2", "b'@2", "a'@2"),
    ]
    assert whole.groups == {
        "one": (0, 4, 5, 9, 10, 14),
        "two": (1, 3, 6, 8, 11, 13),
        "loss@": (2, 7, 12),
    }
    assert [op.persistent_bytes for op in whole.ops] == [8, 3, 0, 4, 0] + [0] * 10
    assert [op.time_ns for op in whole.ops] == [2, 2, 0, 4, 4] * 3


def test_a_gradient_is_there_once_and_what_is_added_to_it_only_while_it_is():
    whole = unroll(STEP, 3)
    late = [row for row in whole.tensors if row.producer % 5 == 3 and not row.consumers]
    assert [(row.producer, row.nbytes, row.kept) for row in late if row.nbytes] == [(3, 3, True)]
    assert [op.workspace_bytes for op in whole.ops[3::5]] == [1, 6, 4]  # the second: and the sum
    held = unroll(STEP, 2, segments=((0, 1), (2,), (3, 4)))  # of one tape, to its end
    assert Tensor(8, (9,), 3) in held.tensors
    assert held.ops[8].workspace_bytes == 1
    apart = unroll(STEP, 2, segments=((0,), (1,), (2,), (3, 4)))
    assert [row for row in apart.tensors if row.producer == 8 and row.nbytes == 3] == []
    assert apart.ops[8].workspace_bytes == 6


def test_state_is_updated_in_the_order_of_the_batches():
    edges = {
        (row.producer, row.consumers[0])
        for row in unroll(STEP, 3).tensors
        if row.consumers and row.producer // 5 != row.consumers[0] // 5
    }
    assert edges == {(op, op + 5) for op in range(10)}
    assert all(row.nbytes == 0 for row in unroll(STEP, 3).tensors[-10:])


def test_one_loss_for_all_batches_is_between_all_forwards_and_the_backwards_from_the_last_on():
    whole = unroll(STEP, 3, joined=True)
    assert names(whole) == [
        *("a", "b", "a@1", "b@1", "a@2", "b@2"),
        "loss",
        *("b'@2", "a'@2", "b'@1", "a'@1", "b'", "a'"),
    ]
    # The gradient is allocated by the last batch, which goes backward first.
    kept = [row.producer for row in whole.tensors if row.kept and row.nbytes == 3]
    assert [names(whole)[op] for op in kept] == ["b'@2"]
    twice = [
        row for row in whole.tensors if row.producer == 7 and row.nbytes == 0 and row.consumers
    ]
    assert [row.consumers for row in twice] == [(9,)]


def test_one_micro_batch_is_the_graph():
    whole = unroll(STEP, 1)
    assert [replace(op, group=None) for op in whole.ops] == [
        replace(op, group=None, phase="forward", forward=()) for op in STEP.explicit.ops
    ]
    assert whole.tensors == STEP.explicit.tensors


def test_an_op_that_is_named_like_a_copy_is_refused():
    with pytest.raises(InputError, match="'a@1'"):
        unroll(OpGraph((Op("a", 1), Op("a@1", 1))), 2)


def test_a_group_that_is_named_like_a_copies_group_stays_apart():
    graph = OpGraph((Op("a", 1), Op("b", 1, group="a@"), Op("c", 1, group="a@")))
    groups = {op.name: op.group for op in unroll(graph, 2).ops}
    assert groups["a"] == groups["a@1"] != groups["b"] == groups["c@1"]


def test_segments_are_those_of_the_forward_the_loss_and_the_backward():
    placement = Placement(STEP.digest, (0, 1, 1, 1, 0), (0, 1, 2, 3, 4))
    assert segments_of(STEP, placement) == ((0,), (1,), (2,), (3,), (4,))
    alone = replace(placement, devices=(0,) * 5)
    assert segments_of(STEP, alone) == ((0, 1), (2,), (3, 4))


def test_the_last_op_of_a_segment_may_have_a_lower_index():
    graph = OpGraph(
        (Op("a", 2), Op("b", 2, 9, late_bytes=5), Op("c", 2, 7, late_bytes=3), Op("d", 2))
    )
    cluster = Cluster.uniform(1, 100, Link(0, 10**9))
    placement = Placement(graph.digest, (0,) * 4, (0, 3, 2, 1))
    rhythm = ordered_turns(graph, cluster, placement, 2)
    assert rhythm.segments == ((0, 3, 2, 1),)
    turns = replace(placement, microbatches=2, turns=rhythm.turns)
    assert simulate(graph, cluster, turns).peak_bytes == rhythm.peak_bytes == (16 + 5 + 5,)
    held = unroll(graph, 2, segments=rhythm.segments)
    assert [op.workspace_bytes for op in held.ops] == [0, 0, 0, 0, 0, 5 + 5, 3 + 3, 0]


@st.composite
def late_graphs(draw):
    """Graphs in which gradients are allocated late, with and without phases."""
    if draw(st.booleans()):
        return draw(steps())
    graph = draw(graphs(max_ops=6))
    rows = [draw(st.integers(0, op.persistent_bytes)) for op in graph.ops]
    ops = [replace(op, late_bytes=nbytes) for op, nbytes in zip(graph.ops, rows, strict=True)]
    return replace(graph, ops=tuple(ops))


@given(st.data(), late_graphs(), clusters(max_devices=3, whole=True), st.integers(1, 3))
def test_the_step_is_that_of_a_slow_oracle(data, graph, cluster, microbatches):
    placement = data.draw(placements(graph, cluster))
    joined = data.draw(st.booleans())
    rhythm = ordered_turns(graph, cluster, placement, microbatches, joined=joined, effort="fast")
    segments, turns = rhythm.segments, rhythm.turns
    rows = graph, cluster, placement.devices, segments, turns, microbatches
    oracle = run(*rows, joined=joined)
    peaks = tuple(map(max, oracle.peaks(), launched_peaks(*rows, joined=joined)))
    assert rhythm.step_ns == oracle.makespan
    assert rhythm.peak_bytes == peaks
    gpus = tuple(data.draw(st.sampled_from([None, "cuda:0", "cuda:1"])) for _ in cluster.devices)
    more = ordered_turns(
        graph, cluster, placement, microbatches, joined=joined, effort="fast", gpus=gpus
    )
    rows = (*rows[:4], more.turns, microbatches)
    peaks = map(
        max, run(*rows, joined=joined).peaks(), launched_peaks(*rows, joined=joined, gpus=gpus)
    )
    assert more.peak_bytes == tuple(peaks)
    limits = map(oracle.memory, range(len(cluster.devices)))
    if all(peak <= limit for peak, limit in zip(oracle.peaks(), limits, strict=True)):
        assert rhythm.lower_bound_ns <= rhythm.step_ns
    if microbatches > 1 and not joined and graph.ops:
        placed = replace(placement, microbatches=microbatches, turns=turns)
        schedule = simulate(graph, cluster, placed)
        n = len(graph.ops)
        spans = {(span.op % n, span.op // n) for span in schedule.spans}
        whole, copies = copies_of(graph, placed)
        alone = simulate(whole, cluster, copies)
        assert (schedule.spans, schedule.transfers) == (alone.spans, alone.transfers)
        assert schedule.makespan_ns == oracle.makespan
        assert schedule.peak_bytes == rhythm.peak_bytes
        committed = [(device, start, end) for device, start, end in oracle.spans.values()]
        assert committed == [(s.device, s.start_ns, s.end_ns) for s in schedule.spans]
        assert len(spans) == n * microbatches


@given(st.data(), late_graphs(), clusters(max_devices=3, whole=True), st.integers(2, 3))
def test_every_segment_takes_its_turns_in_the_order_of_the_batches(
    data, graph, cluster, microbatches
):
    placement = data.draw(placements(graph, cluster))
    joined = data.draw(st.booleans())
    rhythm = ordered_turns(graph, cluster, placement, microbatches, joined=joined, effort="fast")
    batches: dict[int, list[int]] = {at: [] for at in range(len(rhythm.segments))}
    for segment, batch in rhythm.turns:
        batches[segment].append(batch)
    ascending = list(range(microbatches))
    for segment, row in batches.items():
        op = graph.ops[rhythm.segments[segment][0]]
        if joined and op.phase == "loss":
            assert row == [0]
        elif joined and op.in_backward:
            assert row == ascending[::-1]
        else:
            assert row == ascending
    rank = {turn: at for at, turn in enumerate(rhythm.turns)}
    part = {op: at for at, ops in enumerate(rhythm.segments) for op in ops}
    for tensor in graph.tensors:
        for reader in tensor.consumers:
            for batch in ascending:
                ends = [
                    rank.get((part[op], batch), rank.get((part[op], 0)))
                    for op in (tensor.producer, reader)
                ]
                assert ends[0] <= ends[1]


def test_turns_of_other_segments_are_refused():
    cluster = Cluster.uniform(2, 100, Link(0, 10**9))
    placement = Placement(STEP.digest, (0, 1, 1, 1, 0), (0, 1, 2, 3, 4))
    turns = tuple((segment, batch) for batch in range(2) for segment in range(4))
    with pytest.raises(InputError, match=r"8 turns.*5 segments"):
        simulate(STEP, cluster, replace(placement, microbatches=2, turns=turns))


@pytest.mark.parametrize(
    ("segments", "text"),
    [
        (((0,), (1,), (2,), (3,)), "every op"),
        (((0, 1), (2,), (3,), (4,)), r"\['a', 'b'\] are on several"),
        (((1,), (0,), (2,), (3,), (4,)), "topological"),
        (((0,), (1, 2), (3,), (4,)), "alone in its segment"),
    ],
)
def test_segments_are_checked(segments, text):
    cluster = Cluster.uniform(2, 100, Link(0, 10**9))
    placement = Placement(STEP.digest, (0, 1, 1, 1, 0), (0, 1, 2, 3, 4))
    with pytest.raises(InputError, match=text):
        ordered_turns(STEP, cluster, placement, 2, segments=segments, joined=True)


def test_the_index_of_a_copy():
    assert unrolled(STEP, 2).position.tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    joined = unrolled(STEP, 2, joined=True).position
    assert joined.tolist() == [[0, 1, 4, 7, 8], [2, 3, 4, 5, 6]]
