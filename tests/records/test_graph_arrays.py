"""Columns of graphs and schedules: the same as the values that they stand for."""

import pickle
from copy import copy, deepcopy
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import clusters, graphs

from baechi import (
    Cluster,
    Link,
    Op,
    OpGraph,
    Placement,
    Schedule,
    Span,
    Tensor,
    dump,
    load,
    simulate,
)
from baechi.problem.problem_arrays import Problem
from baechi.records.placement import Rows


@given(graphs(parted=True))
def test_arrays_are_the_columns_of_the_graph(graph):
    arrays = graph.arrays
    assert arrays is graph.arrays
    assert arrays.times.tolist() == [op.time_ns for op in graph.ops]
    assert {kind: tuple(row.tolist()) for kind, row in arrays.kind_times.items()} == graph.times
    assert arrays.persistent.tolist() == [op.persistent_bytes for op in graph.ops]
    assert arrays.workspace.tolist() == [op.net_workspace_bytes for op in graph.ops]
    assert arrays.nbytes.tolist() == [tensor.nbytes for tensor in graph.tensors]
    assert arrays.kept.tolist() == [tensor.kept for tensor in graph.tensors]
    producers, consumers = (row.tolist() for row in arrays.edges())
    assert list(zip(producers, consumers, strict=True)) == [
        (tensor.producer, consumer) for tensor in graph.tensors for consumer in tensor.consumers
    ]
    for op, row in enumerate(graph.ops):
        for other, same in enumerate(graph.ops):
            together = op == other or (row.group is not None and row.group == same.group)
            assert (arrays.op_group[op] == arrays.op_group[other]) == together
    first = [arrays.op_group.tolist().index(group) for group in range(arrays.groups)]
    assert first == sorted(first)
    parts = []
    for tensor in graph.tensors:
        others = {*tensor.consumers} - {op for part in tensor.parts for op in part[1:]}
        parts.append([*tensor.parts, *([(tensor.nbytes, *sorted(others))] if others else [])])
    if any(tensor.parts for tensor in graph.tensors):
        told = [parts[t] if tensor.parts else [] for t, tensor in enumerate(graph.tensors)]
        assert np.diff(arrays.part_begin).tolist() == [len(row) for row in told]
        flat = [part for row in told for part in row]
        assert arrays.part_bytes.tolist() == [part[0] for part in flat]
        assert np.diff(arrays.reader_begin).tolist() == [len(part) - 1 for part in flat]
        assert arrays.readers.tolist() == [op for part in flat for op in part[1:]]
    rows = [row for op in graph.ops for row in op.beside]
    assert list(zip(arrays.beside.tolist(), arrays.beside_bytes.tolist(), strict=True)) == rows
    begin = [sum(len(op.beside) for op in graph.ops[:i]) for i in range(len(graph.ops) + 1)]
    assert arrays.beside_begin.tolist() == (begin if rows else [])
    running = [
        row.net_workspace_bytes
        - sum(nbytes for _, nbytes in row.beside)
        + sum(graph.tensors[t].nbytes for t in graph.op_outputs[op])
        + sum(min(part[0] for part in parts[t]) for t in graph.op_inputs[op])
        for op, row in enumerate(graph.ops)
    ]
    assert arrays.running_bytes.tolist() == running
    with pytest.raises(ValueError, match="read-only"):
        arrays.times[:] = 1


@given(graphs(), clusters(whole=True), st.data())
def test_links_are_those_of_the_cluster(graph, cluster, data):
    problem = Problem(graph, cluster)
    latency, rate = problem.links
    n = len(cluster.devices)
    src, dst = data.draw(st.integers(0, n - 1)), data.draw(st.integers(0, n - 1))
    if src != dst:
        at = src * n + dst if latency.size > 1 else 0
        overhead = int(problem.overheads[at]) if problem.overheads.size else 0
        assert Link(int(latency[at]), int(rate[at]), overhead) == cluster.links[src][dst]


def test_rows_are_the_tuple_of_them():
    columns = tuple(np.array(row) for row in ([0, 1, 2], [0, 1, 0], [0, 0, 5], [5, 7, 9]))
    rows = Rows(Span, columns)
    spans = (Span(0, 0, 0, 5), Span(1, 1, 0, 7), Span(2, 0, 5, 9))
    assert (rows == spans, spans == rows, rows == Rows(Span, columns)) == (True, True, True)
    assert rows != spans[:2]
    assert rows != (*spans[:2], spans[0])
    assert rows != list(spans)
    assert (rows[0], rows[-1], rows[1:]) == (spans[0], spans[2], spans[1:])
    assert type(rows[2].end_ns) is type(rows[1:][0].op) is int
    assert (len(rows), tuple(rows), spans[1] in rows) == (3, spans, True)
    assert (hash(rows), repr(rows)) == (hash(spans), repr(spans))
    assert type(pickle.loads(pickle.dumps(rows))) is tuple
    with pytest.raises(IndexError):
        rows[3]


@given(graphs(), st.data())
def test_a_schedule_of_columns_is_one_of_tuples(graph, data):
    cluster = data.draw(clusters(whole=True))
    n = len(cluster.devices)
    homes = data.draw(st.lists(st.integers(0, n - 1), min_size=20, max_size=20))
    devices = tuple(homes[group] for group in graph.arrays.op_group)
    schedule = simulate(graph, cluster, Placement(graph.digest, devices, range(len(devices))))
    plain = Schedule(
        tuple(schedule.spans),
        tuple(schedule.transfers),
        schedule.peak_bytes,
        schedule.lower_bound_ns,
    )
    assert schedule == plain
    assert hash(schedule) == hash(plain)
    assert (schedule.makespan_ns, schedule.gap) == (plain.makespan_ns, plain.gap)
    assert pickle.loads(pickle.dumps(schedule)) == plain


def test_a_schedule_of_columns_survives_a_file(tmp_path):
    graph = OpGraph((Op("a", 5), Op("b", 5)), (Tensor(0, (1,), 7),))
    cluster = Cluster.uniform(2, 100, Link(1, 10**9))
    schedule = simulate(graph, cluster, Placement(graph.digest, (0, 1), (0, 1)))
    dump(schedule, tmp_path / "s.json")
    assert load(tmp_path / "s.json") == schedule
    assert type(load(tmp_path / "s.json").spans) is tuple


def test_the_bound_of_a_schedule_is_computed_once_and_only_when_asked_for():
    calls = []
    late = Schedule((), (), (3,), late_bound=lambda: calls.append(None) or 7)
    assert (late.makespan_ns, late.peak_bytes, calls) == (0, (3,), [])
    assert late == replace(late) == Schedule((), (), (3,), 7)
    assert (late.lower_bound_ns, len(calls)) == (7, 1)
    # Another thread that asked at the same time may come after it was computed.
    assert (late.__getattr__("lower_bound_ns"), len(calls)) == (7, 1)
    unasked = Schedule((), (), (3,), late_bound=lambda: calls.append(None) or 7)
    assert pickle.loads(pickle.dumps(copy(unasked))) == late
    with pytest.raises(AttributeError, match="'bound'"):
        _ = late.bound


@given(graphs(parted=True))
def test_a_graph_that_was_solved_still_travels(graph):
    """What problems share of it is the core's, and made anew on the other side."""
    cluster = Cluster.uniform(2, 2**60, Link(1, 10**9))
    order = tuple(range(len(graph.ops)))
    placement = Placement(graph.digest, (0,) * len(order), order)
    schedule = simulate(graph, cluster, placement)
    twin = pickle.loads(pickle.dumps(graph))
    assert twin == graph == deepcopy(graph)
    assert simulate(twin, cluster, placement) == schedule


def test_problems_of_one_graph_share_its_rows():
    graph = OpGraph((Op("a", 5), Op("b", 5)), (Tensor(0, (1,), 7),))
    first = Problem(graph, Cluster.uniform(2, 100, Link(1, 10**9))).timeline()
    shared = graph.arrays.core
    second = Problem(graph, Cluster.uniform(3, 50, Link(2, 10**9))).timeline()
    assert graph.arrays.core is shared
    del graph, shared
    assert (first.need(1), second.need(1), second.left()) == (7, 7, [50, 50, 50])


def test_the_rows_of_a_schedule_outlive_its_timeline_and_stay_when_it_grows():
    graph = OpGraph((Op("a", 5), Op("b", 5)), (Tensor(0, (1,), 7),))
    timeline = Problem(graph, Cluster.uniform(2, 100, Link(1, 10**9))).timeline()
    timeline.commit(0, 0)
    before = timeline.span_columns()
    assert [column.tolist() for column in before] == [[0], [0], [0], [5]]
    timeline.commit(1, 1)
    after, sent = timeline.span_columns(), timeline.transfer_columns()
    del timeline
    assert [column.tolist() for column in before] == [[0], [0], [0], [5]]
    assert [column.tolist() for column in after] == [[0, 1], [0, 1], [0, 13], [5, 18]]
    assert [column.tolist() for column in sent] == [[0], [0], [1], [5], [13]]
