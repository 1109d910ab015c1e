"""The instances that quality is measured on are what they claim to be."""

import pytest
from benchmarks.placement_quality import generators
from benchmarks.placement_quality.mirroring import STATE_FACTOR, mirrored

import baechi
from baechi.simulation import overflows

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
        graph, cluster = generators.small(seed)
        assert len(graph.ops) <= 30
        assert 2 <= len(cluster.devices) <= 4


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
