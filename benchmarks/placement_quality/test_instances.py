"""The instances that quality is measured on are what they claim to be."""

import json
from xml.etree import ElementTree

import numpy as np
import pytest
from benchmarks import plain_etf
from benchmarks.placement_quality import generators, timelines
from benchmarks.placement_quality.__main__ import app
from benchmarks.placement_quality.cases import capped, cases
from benchmarks.placement_quality.checks import best_ns, by_case, checks, geometric_mean
from benchmarks.placement_quality.instances import FOLDER, instances, sorted_topologically, traced
from benchmarks.placement_quality.mirroring import STATE_FACTOR, mirrored
from benchmarks.placement_quality.plot import profile, svg
from benchmarks.placement_quality.rows import PLACERS, Row, known_placers, measure
from benchmarks.placement_quality.witnesses import contiguous_split
from typer.testing import CliRunner

import baechi
from baechi import _core
from baechi.placers.baselines import Pinned
from baechi.placers.list_schedulers import METF
from baechi.problem.problem_arrays import Problem
from baechi.problem.simulation import overflows

FAMILIES = [
    generators.layered,
    generators.series_parallel,
    generators.towers,
    generators.chain_with_skips,
]


@pytest.mark.parametrize("ccr", [0.1, 1, 10])
@pytest.mark.parametrize(("ops", "devices"), [(2, 2), (40, 3), (300, 8)])
def test_planted_placement_is_perfect_and_nearly_fills_the_memory(ops, devices, ccr):
    planted = generators.planted(5, ops, devices, ccr=ccr)
    schedule = baechi.simulate(planted.graph, planted.cluster, planted.placement)
    assert len(planted.graph.ops) == ops
    assert schedule.makespan_ns == planted.optimum_ns == schedule.lower_bound_ns
    assert overflows(schedule, planted.cluster) == ()
    memory = planted.cluster.devices[0].memory_bytes
    assert max(schedule.peak_bytes) == pytest.approx(memory / 1.05, rel=1e-6)


def test_planted_graphs_are_connected_across_devices():
    planted = generators.planted(0, 200, 4)
    schedule = baechi.simulate(planted.graph, planted.cluster, planted.placement)
    assert len(schedule.transfers) > 50
    edges = sum(len(tensor.consumers) for tensor in planted.graph.tensors)
    assert edges > 200
    assert planted.placement.order != tuple(range(200))


@pytest.mark.parametrize("family", FAMILIES)
def test_generators_give_about_as_many_ops_as_asked_and_the_same_every_time(family):
    graph = family(3, 60)
    assert 30 <= len(graph.ops) <= 62
    assert graph.digest == family(3, 60).digest != family(4, 60).digest
    assert len(graph.inputs) <= 10
    moved = sum(t.nbytes for t in family(3, 200, ccr=10).tensors)
    assert moved > 50 * sum(t.nbytes for t in family(3, 200, ccr=0.1).tensors)


def test_small_problems_are_small():
    for seed in range(20):
        graph, cluster = generators.small(seed, free=seed % 2 == 0)
        assert len(graph.ops) <= 30
        assert 2 <= len(cluster.devices) <= 4
        free = cluster.devices[0].memory_bytes == generators.AMPLE
        assert free == (seed % 2 == 0)


def test_mirrored_training_runs_back_along_every_edge():
    forward = baechi.OpGraph(
        (baechi.Op("data", 1), baechi.Op("a", 5, 10), baechi.Op("b", 7, 20)),
        (baechi.Tensor(0, (1,), 3), baechi.Tensor(1, (2,), 4), baechi.Tensor(2, (), 2)),
    )
    graph = mirrored(forward, [0, 6, 8])
    names = [op.name for op in graph.ops]
    assert names == ["data", "a", "b", "loss", "backward of b", "backward of a"]
    assert [op.persistent_bytes for op in graph.ops] == [
        size * STATE_FACTOR for size in (0, 10, 20, 0, 0, 0)
    ]
    assert [op.time_ns for op in graph.ops] == [1, 5, 7, 0, 8, 6]
    assert [(t.producer, t.consumers, t.nbytes) for t in graph.tensors] == [
        (0, (1, 5), 3),
        (1, (2, 4), 4),
        (2, (3,), 2),
        (4, (5,), 4),
        (3, (4,), 2),
    ]
    assert graph.groups == {"with a": (1, 5), "with b": (2, 3, 4)}


@pytest.mark.parametrize("seed", range(12))
def test_plain_etf_places_as_metf_does(seed):
    ccr = (0.1, 1, 10)[seed % 3]
    graph = FAMILIES[seed % 4](seed, 80, ccr=ccr)
    cluster = baechi.Cluster.uniform(2 + seed % 4, generators.AMPLE, generators.LINK)
    devices, order = plain_etf.place(graph, cluster)
    placement = METF().place(Problem(graph, cluster))
    assert (tuple(devices), tuple(order)) == (placement.devices, placement.order)


def test_plain_etf_keeps_to_persistent_bytes():
    graph = baechi.OpGraph(tuple(baechi.Op(f"op{i}", 5, 6) for i in range(4)))
    link = baechi.Link(0, 1)
    devices, _ = plain_etf.place(graph, baechi.Cluster.uniform(3, 13, link))
    assert sorted(devices.count(device) for device in range(3)) == [1, 1, 2]
    with pytest.raises(ValueError, match="no device has room for any of 1 ops"):
        plain_etf.place(graph, baechi.Cluster.uniform(3, 11, link))


PIPEDREAM = """\
node1 -- Input -- forward_compute_time=0.500, backward_compute_time=0.000, \
activation_size=100.0, parameter_size=0.000
node3 -- Add(a=1) -- forward_compute_time=2.000, backward_compute_time=1.000, \
activation_size=[30.0; 2.0], parameter_size=8.000
node2 -- Conv -- forward_compute_time=1.250, backward_compute_time=3.000, \
activation_size=60.0, parameter_size=12.000
\tnode2 -- node3
\tnode1 -- node3
\tnode1 -- node2
"""


def test_reads_pipedream_text(tmp_path):
    (tmp_path / "pipedream").mkdir()
    (tmp_path / "pipedream" / "net.txt").write_text(PIPEDREAM)
    (tmp_path / "pipedream" / "LICENSE.txt").write_text("No graph.")
    forward, training = instances(tmp_path)
    assert (forward.name, training.name) == ("net forward", "net training")
    ops = [(op.name, op.time_ns, op.persistent_bytes) for op in forward.graph.ops]
    assert ops == [
        ("node1 Input", 500_000, 0),
        ("node2 Conv", 1_250_000, 12),
        ("node3 Add(a=1)", 2_000_000, 8),
    ]
    tensors = [(t.producer, t.consumers, t.nbytes) for t in forward.graph.tensors]
    assert tensors == [(0, (1, 2), 100), (1, (2,), 60), (2, (), 32)]
    assert [op.time_ns for op in training.graph.ops[3:]] == [0, 1_000_000, 3_000_000]
    assert forward.link(10).transfer_ns(12_000) == 10 * forward.link(1).transfer_ns(12_000)


def test_reads_partitioning_json_and_its_expert(tmp_path):
    def node(number, latency, color=None, backward=False):
        return {"id": number, "name": f"n{number}", "fpgaLatency": latency, "size": number * 10.0,
                "colorClass": color, "isBackwardNode": backward}  # fmt: skip

    edges = [(4, 1, 0.5), (4, 2, 0.5), (4, 3, 0.25), (1, 3, 1)]
    data = {
        "maxFPGAs": 9,
        "nodes": [node(3, 2, 7), node(1, 1, 7), node(2, 0.5), node(4, 0)],
        "edges": [{"sourceId": a, "destId": b, "cost": cost} for a, b, cost in edges],
    }
    folder = tmp_path / "dnn-partitioning"
    folder.mkdir()
    (folder / "net.json").write_text(json.dumps(data))
    expert = {"fpgas": [{"nodes": [4, 2]}, {"nodes": [1, 3]}]}
    (folder / "net_expert.json").write_text(json.dumps(expert))
    forward, training = instances(tmp_path)
    assert [op.name for op in forward.graph.ops] == ["4 n4", "1 n1", "3 n3", "2 n2"]
    assert [op.group for op in forward.graph.ops] == [None, "color 7", "color 7", None]
    tensors = [(t.producer, t.consumers, t.nbytes) for t in forward.graph.tensors]
    assert tensors == [(0, (2,), 250_000), (0, (1, 3), 500_000), (1, (2,), 1_000_000)]
    assert (forward.devices, forward.expert) == (8, (0, 1, 1, 0))
    # Op 4 is a parameter: it has no time and no inputs.
    assert [op.persistent_bytes for op in training.graph.ops] == [160, 10, 30, 20, *[0] * 5]
    assert [op.time_ns for op in training.graph.ops[5:]] == [1_000_000, 4_000_000, 2_000_000, 0]
    data["nodes"][0]["isBackwardNode"] = True
    (folder / "net.json").write_text(json.dumps(data))
    (step,) = instances(tmp_path)
    assert step.training
    assert step.graph == forward.graph


def test_a_cycle_is_no_graph():
    with pytest.raises(ValueError, match="2 of 3 nodes are on a cycle"):
        sorted_topologically({1: [2], 2: [3], 3: [2]})


@pytest.mark.skipif(not FOLDER.is_dir(), reason="the graphs of others are not here")
def test_measured_graphs_can_be_read_and_simulated():
    found = list(instances())
    assert len({instance.name for instance in found}) == len(found) > 10
    for instance in found:
        cluster = baechi.Cluster.uniform(instance.devices, generators.AMPLE, instance.link(1))
        placement = baechi.solve(instance.graph, cluster, "single")
        assert placement.stats["makespan_ns"] == sum(op.time_ns for op in instance.graph.ops)


def test_capped_memory_is_enough_for_as_many_devices_and_for_no_fewer():
    graph = mirrored(generators.layered(1, 60), [1000] * 60)
    found = list(capped(graph, generators.LINK, (2, 3, 4)))
    assert [devices for devices, _, _ in found] == [2, 3, 4]
    for devices, memory, split in found:
        cluster = baechi.Cluster.uniform(devices, memory, generators.LINK)
        assert sorted(set(split)) == list(range(devices))
        assert Pinned(split).place(Problem(graph, cluster)) is not None
        fewer = Problem(graph, baechi.Cluster.uniform(devices - 1, memory, generators.LINK))
        assert Pinned(contiguous_split(fewer)).place(fewer) is None


def test_a_graph_that_more_devices_do_not_help_is_not_capped():
    ops = (baechi.Op("a", 1, 90, group="g"), baechi.Op("b", 1, 10, group="g"))
    assert list(capped(baechi.OpGraph(ops), generators.LINK, (2, 3))) == []
    more = baechi.OpGraph((*ops, baechi.Op("c", 1, 10)))
    assert list(capped(more, generators.LINK, (2, 3))) == [(2, 105, (0, 0, 1))]


def test_traced_graphs_can_be_read():
    found = list(traced())
    assert len(found) == 8
    assert {instance.training for instance in found} == {False, True}


@pytest.fixture(scope="module")
def quick_rows(tmp_path_factory):
    """All placers on small cases of every kind."""
    chosen = [
        case
        for case in cases(tmp_path_factory.getbasetemp(), quick=True)
        if len(case.graph.ops) <= 210 and "10" in case.name
    ]
    assert {case.memory for case in chosen} == {"free", "capped", "tight"}
    known, _ = known_placers(PLACERS)
    return [row for case in chosen for row in measure(case, known, ["fast", "balanced"], 0)]


def test_auto_is_never_worse_than_any_placer(quick_rows):
    table = by_case(quick_rows)
    assert len(table) > 10
    for case in table.values():
        best = best_ns(case)
        for row in case.values():
            if row.placer in PLACERS and row.makespan_ns is not None:
                assert case["auto/balanced"].makespan_ns <= row.makespan_ns
        assert best is None or case["auto/balanced"].makespan_ns is not None


@pytest.mark.parametrize(
    ("effort", "ccr", "above"),
    [("fast", 0.1, 1.03), ("fast", 1, 1.1), ("balanced", 0.1, 1.02), ("balanced", 1, 1.03)],
)
def test_auto_is_near_the_planted_optimum(effort, ccr, above):
    ratios = []
    for seed in range(3):
        made = generators.planted(seed, 80, 3, ccr=ccr)
        placement = baechi.solve(made.graph, made.cluster, effort=effort)
        ratios.append(placement.stats["makespan_ns"] / made.optimum_ns)
    assert min(ratios) >= 1
    assert geometric_mean(ratios) <= above


@pytest.mark.parametrize(("ccr", "above"), [(1, 1.25), (10, 1.17)])
def test_planted_devices_are_listed_near_the_optimum(ccr, above):
    # Without the ports in mind it was 1.36 and 1.24.
    ratios = []
    for seed in range(8):
        made = generators.planted(seed, 200, 4, ccr=ccr)
        problem = Problem(made.graph, made.cluster)
        devices = np.array(made.placement.devices, np.int32)
        timeline = problem.timeline()
        timeline.fold(devices, _core.list_order(problem.core, devices))
        ratios.append(timeline.makespan() / made.optimum_ns)
    assert min(ratios) >= 1
    assert geometric_mean(ratios) <= above


def test_no_step_is_below_its_bound(quick_rows):
    for row in quick_rows:
        assert row.makespan_ns is None or row.gap >= 0


def row_of(case, placer, makespan_ns, proven=False):
    facts = (case, "small", "capped", 1.0, False, 3, 2, 50, None)
    return Row(*facts, placer, makespan_ns, 0.5, proven)


def test_checks_hold_or_fail_with_their_numbers():
    good = [
        row_of("x", "single", None),
        row_of("x", "heft", 400),
        row_of("x", "m-etf", 400),
        row_of("x", "auto/thorough", 201),
        row_of("x", "cp-sat", 200, proven=True),
    ]
    claims = {check.claim: check for check in checks(good)}
    near = claims["small: auto/thorough is within 1% of the optimum on average and 5% at worst"]
    assert (near.holds, near.figure) == (True, "0.50% on average, 0.50% at worst, 1 cases")
    held = [check.holds for check in claims.values()]
    assert held == [True, None, True, True, None, None, True, None, True]
    bad = [*good, row_of("y", "single", 90), row_of("y", "auto/thorough", 100)]
    bad += [row_of("z", "metis", 90), row_of("z", "auto/thorough", None)]
    failed = [check.claim for check in checks(bad) if check.holds is False]
    assert failed == [
        "auto/thorough is never worse than any other row",
        "auto/thorough is never worse than one device",
        "auto/thorough finds a placement wherever one is known",
    ]


def test_profile_counts_the_share_within_a_factor():
    rows = [row_of("x", "a", 100), row_of("y", "a", 300), row_of("z", "a", None)]
    rows += [row_of("x", "b", 200), row_of("y", "b", 100), row_of("z", "b", 100)]
    curves = profile(rows)
    assert curves["a"] == [(1.0, 1 / 3), (3.0, 2 / 3)]
    assert curves["b"] == [(1.0, 2 / 3), (2.0, 1.0)]
    ElementTree.fromstring(svg(curves, "a & b"))


def test_the_command_writes_tables_and_pictures(tmp_path):
    options = ["--quick", "--match", "small 1 ", "--placers", "m-etf,nonsense", "--effort", "fast"]
    where = ["--exact-seconds", "0", "--instances", str(tmp_path / "none"), "--out", str(tmp_path)]
    result = CliRunner().invoke(app, [*options, *where])
    assert "solve does not know them: nonsense" in result.output
    content = json.loads((tmp_path / "placements.json").read_text())
    assert result.exit_code == any(check["holds"] is False for check in content["checks"])
    assert [row["placer"] for row in content["rows"]] == ["m-etf", "auto/fast"]
    assert min(row["ratio_to_best"] for row in content["rows"]) == 1
    rows = (tmp_path / "placements.csv").read_text().splitlines()
    assert len(rows) == 3
    assert "| small | tight | 1 | forward | 1 |" in (tmp_path / "tables.md").read_text()
    assert "m-etf" in (tmp_path / "profile.html").read_text()
    ElementTree.parse(tmp_path / "profile.svg")


def test_no_case_is_told(tmp_path):
    where = ["--instances", str(tmp_path), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, ["--quick", "--match", "nothing like it", *where])
    assert result.exit_code == 2
    assert "No case has 'nothing like it' in its name." in result.output


def test_the_timelines_have_a_bar_per_op_and_transfer():
    instance = generators.planted(1, 12, 4, ccr=1.0)
    schedules = {
        placer: baechi.simulate(
            instance.graph, instance.cluster, baechi.solve(instance.graph, instance.cluster, placer)
        )
        for placer in ("m-etf", "contiguous")
    }
    picture = ElementTree.fromstring(timelines.svg(instance, schedules))
    fills = [element.get("fill") for element in picture.iter() if element.get("fill")]
    colors = ("#0072b2", "#e69f00", "#009e73", "#cc79a7")
    assert sum(map(fills.count, colors)) == 2 * 12
    assert fills.count("#777") == sum(len(step.transfers) for step in schedules.values())
