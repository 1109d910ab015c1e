"""Ops, tensors, graphs and placements: what they refuse, and what they derive."""

import hashlib
import json
import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import graphs

from baechi import InputError, Op, OpGraph, Placement, Schedule, Span, Tensor

A, B, C = Op("a", 5), Op("b", 5, group="g"), Op("c", 5, group="g")
LOSS, BACKWARD = Op("l", 0, phase="loss"), Op("a2", 5, phase="backward", forward=(0,))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Op("", 5), "op name is ''; it must be a non-empty string"),
        (lambda: Op(3, 5), "op name is 3"),
        (lambda: Op("a", -1), "time_ns of op 'a' is -1; it must be between 0 and"),
        (lambda: Op("a", 1.5), "time_ns of op 'a' is 1.5, a float; it must be an integer"),
        (lambda: Op("a", True), "time_ns of op 'a' is True, a bool"),
        (lambda: Op("a", 0, 2**63), "persistent_bytes of op 'a' is 9223372036854775808"),
        (lambda: Op("a", 0, 0, "nine"), "workspace_bytes of op 'a' 'nine' cannot be read"),
        (lambda: Op("a", "9"), "time_ns of op 'a' is '9', a str"),
        (lambda: Tensor(0, (), "9 miles"), "nbytes of a tensor of op 0 '9 miles' cannot be read"),
        (lambda: Op("a", 0, launch_ns=-1), "launch_ns of op 'a' is -1; it must be between"),
        (lambda: Op("a", 0, reused_bytes=-1), "reused_bytes of op 'a' is -1; it must be between"),
        (lambda: Op("a", 0, group=""), "group of op 'a' is ''"),
        (lambda: Tensor(-1, (), 0), "producer of a tensor is -1"),
        (lambda: Tensor(0, (1.0,), 0), "consumer of a tensor of op 0 is 1.0"),
        (lambda: Tensor(0, (1, 2**63), 0), "consumer of a tensor of op 0 is 9223372036854775808"),
        (lambda: Tensor(0, (1, True), 0), "consumer of a tensor of op 0 is True"),
        (lambda: Tensor(0, (), -5), "nbytes of a tensor of op 0 is -5"),
        (lambda: Tensor(0, (), 0, kept=1), "kept of a tensor of op 0 is 1, a int; give a bool"),
        (lambda: Op("a", 0, phase="late"), "op 'a' is of phase 'late'"),
        (lambda: Op("a", 0, phase=["loss"]), r"op 'a' is of phase \['loss'\]"),
        (lambda: Op("a", 0, forward=(1,)), r"of phase 'forward' with forward=\(1,\)"),
        (lambda: Op("a", 0, phase="backward"), r"of phase 'backward' with forward=\(\)"),
        (lambda: Op("a", 0, phase="backward", forward=(0, 1)), "has the one op"),
        (lambda: Op("a", 0, phase="recompute", forward=(0, 0)), r"forward=\(0, 0\)"),
        (lambda: Op("a", 0, forward=("b",)), "forward of op 'a' is 'b'"),
        (lambda: OpGraph((A, LOSS, B)), "op 'b' of phase 'forward' is out of place"),
        (lambda: OpGraph((A, LOSS, replace(LOSS, name="m"))), "op 'm' of phase 'loss' is out of"),
        (lambda: OpGraph((A, BACKWARD)), "op 'a2' of phase 'backward' is out of place"),
        (
            lambda: OpGraph((A, LOSS, replace(BACKWARD, forward=(1,)))),
            r"forward of op 'a2' is \(1,\); 1 ops are forward",
        ),
        (
            lambda: OpGraph((A, LOSS, BACKWARD, replace(BACKWARD, name="a3"))),
            "op 'a3' is a second backward of 'a'",
        ),
        (
            lambda: Op("a", 0, beside=((1, 2, 3),)),
            r"beside of op 'a' is \(\(1, 2, 3\),\); give pairs",
        ),
        (
            lambda: Op("a", 0, workspace_bytes=9, beside=((2, 1), (1, 1))),
            "beside of op 'a' .* by their first number, each once",
        ),
        (
            lambda: Op("a", 0, workspace_bytes=9, beside=((1, 4), (2, 6))),
            "beside of op 'a' has 10 bytes, and its workspace_bytes are 9",
        ),
        (
            lambda: OpGraph((A, Op("b", 1, workspace_bytes=1, beside=((2, 1),)))),
            "beside of op 'b' names op 2, but there are 2 ops",
        ),
        (
            lambda: Tensor(0, (1,), 9, parts=((5, 2),)),
            r"parts of a tensor of op 0 .* the consumers",
        ),
        (lambda: Tensor(0, (1,), 9, parts=((),)), "parts of a tensor of op 0"),
        (lambda: Tensor(0, (1,), 9, parts=((-5, 1),)), "a part of a tensor of op 0 is -5"),
        (lambda: OpGraph((A, A)), "two ops are named 'a'"),
        (
            lambda: OpGraph((A, Op("b", 1, 3, late_bytes=3, reused_bytes=9)), (Tensor(1, (), 5),)),
            "reused_bytes of op 'b' is 9, but it makes 8 bytes of tensors and late bytes",
        ),
        (lambda: OpGraph((A,), (Tensor(1, (), 0),)), "tensor 0 names op 1, but there are 1 ops"),
        (lambda: OpGraph((A,), (Tensor(0, (9,), 0),)), "tensor 0 names op 9"),
        (lambda: OpGraph((A, B), (Tensor(1, (0,), 0),)), r"op 'b' \(index 1\) to op 'a' .* cycle"),
        (lambda: OpGraph((A,), (Tensor(0, (0,), 0),)), "the graph has a cycle"),
        (lambda: OpGraph((A, B), times={"x": (1,)}), r"times\['x'\] has 1 entries for 2 ops"),
        (lambda: OpGraph((A,), times={"x": (-1,)}), "time of an op on device kind 'x' is -1"),
        (lambda: OpGraph((A,), times={"": (1,)}), "device kind is ''"),
        (lambda: Placement("d", (0, 0), (0,)), "the order of a placement of 2 ops is no perm"),
        (lambda: Placement("d", (0, 0), (0, 0)), "name every op index exactly once"),
        (lambda: Placement("d", (-1,), (0,)), "device of a placement is -1"),
    ],
)
def test_what_is_wrong_is_named(make, match):
    with pytest.raises(InputError, match=match):
        make()


def test_consumers_are_sorted_and_counted_once():
    assert Tensor(0, (3, 1, 3), 5).consumers == (1, 3)


def test_integers_of_numpy_are_taken_and_become_int():
    op = Op("a", np.int64(5), np.int32(6))
    assert (type(op.time_ns), type(op.persistent_bytes)) == (int, int)
    assert op == Op("a", 5, 6)
    tensor = Tensor(np.int64(0), (np.int32(2), 1), np.int64(7))
    assert {type(tensor.producer), type(tensor.nbytes), *map(type, tensor.consumers)} == {int}
    assert tensor == Tensor(0, (1, 2), 7)


def test_what_a_graph_derives():
    graph = OpGraph((A, B, C), [Tensor(0, (1, 2), 7), Tensor(1, (2,), 8), Tensor(2, (), 9, True)])
    assert graph.op_inputs == ((), (0,), (0, 1))
    assert graph.op_outputs == ((0,), (1,), (2,))
    assert (graph.inputs, graph.outputs) == ((0,), (2,))
    assert dict(graph.groups) == {"g": (1, 2)}
    assert (graph.n_forward, graph.is_training, graph.twins) == (3, False, (-1, -1, -1))


def test_phases_say_what_belongs_together_and_are_no_part_of_the_digest():
    again = Op("r", 5, phase="recompute", forward=np.array([1, 0]))
    graph = OpGraph((A, B, LOSS, again, BACKWARD))
    assert (graph.n_forward, graph.is_training) == (2, True)
    assert (graph.twins, graph.units) == ((4, -1), {3: (0, 1)})
    plain = tuple(replace(op, phase="forward", forward=()) for op in graph.ops)
    assert OpGraph(plain).digest == graph.digest
    assert OpGraph(plain) != graph


def test_networkx_sees_the_same_graph():
    graph = OpGraph((A, B), (Tensor(0, (1,), 7), Tensor(0, (1,), 8)))
    digraph = graph.to_networkx()
    assert dict(digraph.nodes[1]) == {
        "name": "b",
        "time_ns": 5,
        "persistent_bytes": 0,
        "workspace_bytes": 0,
        "group": "g",
        "late_bytes": 0,
        "reused_bytes": 0,
        "phase": "forward",
        "forward": (),
        "launch_ns": 0,
        "beside": (),
    }
    assert list(digraph.edges(data="nbytes")) == [(0, 1, 15)]


def test_the_digest_is_of_everything():
    graph = OpGraph((A, B), (Tensor(0, (1,), 7),), {"x": (1, 2)})
    others = [
        OpGraph((A, C), (Tensor(0, (1,), 7),), {"x": (1, 2)}),
        OpGraph((A, B), (Tensor(0, (1,), 8),), {"x": (1, 2)}),
        OpGraph((A, B), (Tensor(0, (1,), 7, True),), {"x": (1, 2)}),
        OpGraph((A, B), (Tensor(0, (1,), 7),), {"x": (2, 1)}),
        OpGraph((A, B), (Tensor(0, (1,), 7),)),
    ]
    others.append(replace(graph, ops=(replace(A, launch_ns=7), B)))
    held = [replace(B, workspace_bytes=9), replace(B, workspace_bytes=9, beside=((0, 5),))]
    others += [replace(graph, ops=(A, op)) for op in held]
    assert len({graph.digest, *(other.digest for other in others)}) == 9
    # Of a format that files keep: this number may not change.
    assert OpGraph(()).digest.startswith("af31b5cc")


@given(graphs(parted=True), st.text(min_size=1), st.none() | st.text(min_size=1))
def test_the_digest_is_of_the_canonical_json(graph, name, group):
    graph = OpGraph((*graph.ops, Op(f"!{name}", 5, group=group)), graph.tensors)
    rows = {
        "ops": [
            [op.name, op.time_ns, op.persistent_bytes, op.workspace_bytes, op.group]
            + ([op.late_bytes, op.reused_bytes] if op.reused_bytes or op.launch_ns else [])
            + ([op.launch_ns] if op.launch_ns else [])
            + ([op.beside] if op.beside else [])
            for op in graph.ops
        ],
        "tensors": [
            [t.producer, t.consumers, t.nbytes, t.kept] + ([t.parts] if t.parts else [])
            for t in graph.tensors
        ],
        "times": dict(graph.times),
    }
    text = json.dumps(rows, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    assert graph.digest == hashlib.sha256(text.encode()).hexdigest()


@given(graphs(parted=True))
def test_a_graph_is_a_value(graph):
    again = OpGraph(list(graph.ops), list(graph.tensors), dict(graph.times))
    assert again == graph
    assert hash(again) == hash(graph)
    assert again.digest == graph.digest
    copy = pickle.loads(pickle.dumps(graph))
    assert copy == graph
    with pytest.raises(AttributeError):
        graph.ops = ()


@pytest.mark.parametrize(
    ("end", "bound", "gap"), [(0, 0, 0.0), (5, 0, float("inf")), (15, 10, 0.5), (10, 10, 0.0)]
)
def test_the_gap_is_relative_to_the_bound(end, bound, gap):
    schedule = Schedule((Span(0, 0, 0, end),), (), (0,), bound)
    assert schedule.makespan_ns == end
    assert schedule.gap == gap


def test_the_stats_of_a_placement_cannot_change():
    placement = Placement("d", (0,), (0,), stats={"a": 1})
    with pytest.raises(TypeError):
        placement.stats["a"] = 2
    assert hash(placement) == hash(Placement("d", [0], [0], stats={"a": 1}))


def late_graph() -> OpGraph:
    """A forward whose backward makes 30 of its group's 100 persistent bytes."""
    ops = (
        Op("f", 10, persistent_bytes=60, group="g"),
        Op("other", 10, persistent_bytes=5),
        Op("again", 10, persistent_bytes=40, group="g"),
        Op("b", 10, workspace_bytes=2, group="g", late_bytes=70, reused_bytes=9),
    )
    return OpGraph(ops, (Tensor(0, (3,), 8),))


def test_late_bytes_are_tensors_of_the_explicit_graph():
    graph = late_graph()
    explicit = graph.explicit
    assert explicit.tensors == (*graph.tensors, Tensor(3, (), 70, kept=True))
    assert [op.persistent_bytes for op in explicit.ops] == [0, 5, 30, 0]
    assert not any(op.late_bytes for op in explicit.ops)
    assert (explicit.ops[3].reused_bytes, explicit.ops[3].net_workspace_bytes) == (9, -7)
    assert explicit.digest == graph.digest
    assert explicit.explicit is explicit
    assert [op.name for op in explicit.ops] == [op.name for op in graph.ops]


def test_late_bytes_are_in_the_digest():
    graph = late_graph()
    less = OpGraph((*graph.ops[:3], Op("b", 10, 0, 2, "g", 69, 9)), graph.tensors)
    whole = OpGraph((*graph.ops[:3], Op("b", 10, 0, 2, "g", 70)), graph.tensors)
    early = OpGraph((*graph.explicit.ops[:3], Op("b", 10, 0, 2, "g")), graph.tensors)
    assert len({graph.digest, less.digest, whole.digest, early.digest}) == 4


@pytest.mark.parametrize(
    ("op", "match"),
    [
        (Op("b", 1, group="g", late_bytes=101), r"late_bytes of op 'b' is 101.*1 too few"),
        (
            Op("b", 1, persistent_bytes=3, late_bytes=7),
            r"late_bytes of op 'b' is 7.*its.*4 too few",
        ),
    ],
)
def test_no_more_comes_late_than_is_persistent(op, match):
    with pytest.raises(InputError, match=match):
        OpGraph((Op("f", 1, persistent_bytes=100, group="g"), op))


def test_sizes_may_be_given_as_people_write_them() -> None:
    assert Op("a", 5, "1.5KiB", "2KB") == Op("a", 5, 1536, 2000)
    assert Tensor(0, (), "1MiB") == Tensor(0, (), 2**20)
    assert type(Tensor(0, (), "1MiB").nbytes) is int
